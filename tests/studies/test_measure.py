import time

import pytest
import torch

from implicit_attention.studies.measure import median_times, peak_memory

CPU = torch.device("cpu")
MIB = 2**18  # float32 numbers in a mebibyte


def test_peak_memory_counts_what_is_held_at_once_and_not_what_was_freed():
    def allocate():
        for _ in range(3):
            first = torch.empty(3 * MIB)
            del first
        second, third = torch.empty(MIB), torch.empty(MIB)
        return second, third

    assert peak_memory(allocate, CPU) == 3 * 2**20


def test_peak_memory_ignores_what_was_there_before_and_is_the_same_every_time():
    x = torch.ones(MIB, requires_grad=True)

    def work():
        (gradient,) = torch.autograd.grad((x.exp() * x).sum(), [x])
        return gradient

    sizes = {peak_memory(work, CPU) for _ in range(3)}
    assert len(sizes) == 1
    assert 2 * 2**20 <= sizes.pop() <= 6 * 2**20


def test_peak_memory_prints_nothing(capfd):
    peak_memory(lambda: torch.ones(3), CPU)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_stages_are_timed_apart_and_fed_with_each_others_results():
    seen = []
    first, second = median_times(
        lambda: time.sleep(0.02) or "result", lambda value: seen.append(value), device=CPU, repeats=3, warmup=2
    )
    assert seen == ["result"] * 5
    assert first > 0.015
    assert second < 0.015


def test_slow_functions_run_once():
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.02)

    assert median_times(slow, device=CPU, repeats=50, max_seconds=0.01) == [pytest.approx(0.02, abs=0.05)]
    assert len(calls) == 1

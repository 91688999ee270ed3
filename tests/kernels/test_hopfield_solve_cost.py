"""What the operations cost: memory, and evaluations of queries that are done. Torch's profiler sees all allocations."""

import pytest
from hopfield_cases import without_kernels
from torch.profiler import ProfilerActivity, profile

from implicit_attention import AnchoredEnergy, LogSumExp, solve
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.testing.numerics import random


def seen(run):
    """The profiler's events of a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as found:
        run()
    return found.events()


def largest(run):
    """How many numbers of float64 the largest allocation of a call holds."""
    return max(event.self_cpu_memory_usage for event in seen(run)) // 8


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_scores_are_never_stored(is_causal):
    query, keys = random(512, 16), random(512, 16, seed=1)
    stop = {"rtol": 0.0, "atol": 0.0, "max_steps": 6} if is_causal else {}
    options = {"beta": 0.2, "anchor": 0.2, "is_causal": is_causal}
    # Torch's kernel has a buffer of its own, which does not grow with the keys.
    assert largest(lambda: hopfield_solve(query, keys, **options, **stop)) < 512 * 512 / 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_nor_where_torch_has_no_kernel_with_the_log_sum_exp(is_causal, monkeypatch):
    """As for float64 on a CUDA device."""
    monkeypatch.setattr("implicit_attention.potentials.scored_keys.has_kernel", lambda device, dtype: False)
    query, keys = random(4096, 8), random(4096, 8, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.2, query_offset=0 if is_causal else None), query, 0.2)
    with without_kernels():
        assert largest(lambda: solve(energy, query)) < 4096 * 4096 / 8


@pytest.mark.parametrize(
    ("shape", "matrices"), [((64, 128), 1), ((2, 1, 64, 128), 2), ((2, 1, 1, 128), 1), ((4, 64, 128), 8)]
)
def test_masks_are_not_copied_per_head(shape, matrices):
    """2 samples of 4 heads: what is made of a mask, in matrices (64, 128)."""
    query, keys = random(2, 4, 64, 8), random(2, 4, 128, 8, seed=1)
    options = {"beta": 0.2, "anchor": 0.2, "mask": random(*shape, seed=2) > -1}
    steps = {"rtol": 0.0, "atol": 0.0, "max_steps": 5}
    assert largest(lambda: hopfield_solve(query, keys, **options, **steps)) <= matrices * 64 * 128


def test_keys_that_broadcast_are_not_copied():
    query, keys = random(4, 3, 8, 64), random(128, 64, seed=1)
    # A copy for each of the twelve would be 98,304 numbers; the weights of all queries are 12,288.
    options = {"beta": 0.1, "anchor": 0.5}
    for run in (
        lambda: hopfield_solve(query, keys, **options),
        lambda: hopfield_adjoint(query, keys, *[query] * 2, **options),
    ):
        assert largest(run) <= 2 * 4 * 3 * 8 * 128


def test_finished_queries_cost_nothing():
    """One query of many is hard: evaluations of the others are not paid for until it is done."""
    query, keys = random(512, 16), random(128, 16, seed=1)
    options = {"beta": 0.2, "anchor": 0.2}
    initial = hopfield_solve(query, keys, **options, rtol=1e-7).state
    initial[100] = 3.0
    with without_kernels():
        events = seen(
            lambda: hopfield_solve(query, keys, **options, initial=initial, rtol=1e-5, atol=0.0, max_steps=50)
        )
    sizes = [event.input_shapes[0][-2] for event in events if "flash_attention_for_cpu" in event.name]
    # The first evaluation, and the means that are returned.
    assert sizes[0] == sizes[-1] == 512
    assert len(sizes) > 4
    assert set(sizes[1:-1]) == {8}

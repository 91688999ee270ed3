"""Trust in kernels: the mechanism, and torch's private attention operation broken by hand.

The Triton kernels are broken in `triton_trust_cases.py`, which needs their interpreter.
"""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hopfield_cases import without_kernels
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    LogSumExp,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.failure import KernelWarning
from implicit_attention.kernels import hopfield_solve, kernel_checks, native_status, trust
from implicit_attention.kernels.native import solve as native
from implicit_attention.potentials import _attention as attention

CPU = torch.device("cpu")


class Variant(NamedTuple):
    size: int


USE = trust.Use("kernel (test)", CPU, Variant(3))
GOOD, BAD = {"mean": (1e-8, 1e-7)}, {"mean": (1e-6, 1e-7)}


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.setattr(trust, "_found", {})
    monkeypatch.setattr(trust, "_told", set())


class Check:
    """A check that counts its calls and answers, or raises, in turn."""

    def __init__(self, *outcomes):
        self.outcomes, self.calls = list(outcomes), 0

    def __call__(self):
        self.calls += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def verdicts():
    return [check.verdict for check in kernel_checks()]


# The mechanism.


def test_a_sound_kernel_is_checked_once_in_each_configuration():
    check = Check(GOOD)
    for _ in range(3):
        assert trust.answer(USE, check, lambda: "kernel") == "kernel"
    assert check.calls == 1
    assert trust.answer(USE._replace(variant=Variant(4)), check, lambda: "kernel") == "kernel"
    assert check.calls == 2
    first, second = kernel_checks()
    assert (first.verdict, first.errors, first.reason) == ("verified", GOOD, "")
    assert first.use == "kernel (test) on cpu (size 3)"
    assert f"torch {torch.__version__}" in first.where
    assert second.use.endswith("(size 4)")
    assert "mean 1.0e-08 of 1.0e-07" in str(first)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (BAD, "against products written out in float64, mean is off by 1.0e-06, 1.0e-07 is allowed"),
        ({"mean": (torch.nan, torch.nan)}, "mean is NaN"),
        ({"unsolved": (3.0, 0.0)}, "3 unsolved"),
        (RuntimeError("no image\nfor this device"), "it failed with RuntimeError: no image for this device"),
    ],
    ids=["wrong", "unwritten", "counted", "raises"],
)
def test_a_broken_kernel_is_told_once_and_never_run(outcome, words):
    check = Check(outcome)
    with pytest.warns(KernelWarning) as told:
        assert trust.answer(USE, check, pytest.fail) is None
    (warning,) = told
    assert words in str(warning.message)
    assert f"Please report this, with: {kernel_checks()[0].where}" in str(warning.message)
    assert warning.filename == __file__
    assert trust.answer(USE, check, pytest.fail) is None
    with pytest.raises(UnsupportedImplementation, match="`impl='triton'`: the kernel") as caught:
        trust.answer(USE, check, pytest.fail, insists="triton")
    assert words in str(caught.value)
    assert check.calls == 1
    # Another configuration that fails is in the status.
    assert trust.answer(USE._replace(variant=Variant(4)), check, pytest.fail) is None
    assert [found.verdict for found in kernel_checks()] == ["refused", "refused"]
    assert words in str(kernel_checks()[0])


def test_a_launch_that_fails_later_takes_the_trust_away():
    def fails():
        attention._FLASH_FOR_CPU(*[torch.zeros(1, 1, 70, 8)] * 2)

    check = Check(GOOD)
    assert trust.answer(USE, check, lambda: "kernel") == "kernel"
    with pytest.warns(KernelWarning, match="is missing value for argument"):
        assert trust.answer(USE, check, fails) is None
    assert trust.answer(USE, check, pytest.fail) is None
    assert check.calls == 1


ALLOCATORS = {
    "CUDA": torch.OutOfMemoryError("CUDA out of memory"),
    "Linux": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
    "Windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8."),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}


@pytest.mark.parametrize("error", ALLOCATORS.values(), ids=ALLOCATORS)
def test_no_room_is_no_verdict(error):
    check = Check(error, GOOD)
    assert trust.answer(USE, check, pytest.fail) is None
    assert verdicts() == ["open"]
    assert str(error) in kernel_checks()[0].reason
    assert trust.answer(USE, check, lambda: "kernel") == "kernel"
    assert verdicts() == ["verified"]
    with pytest.raises(type(error)):
        trust.answer(USE, check, Check(error))
    assert verdicts() == ["verified"]


def test_a_check_without_a_thread_is_no_verdict():
    before = threading.stack_size(1 << 46)
    try:
        assert trust.answer(USE, Check(GOOD), pytest.fail) is None
    finally:
        threading.stack_size(before)
    assert verdicts() == ["open"]
    assert trust.answer(USE, Check(GOOD), lambda: "kernel") == "kernel"


def test_nothing_is_checked_while_a_graph_is_captured(monkeypatch):
    check = Check(GOOD)
    with monkeypatch.context() as capturing:
        capturing.setattr(trust, "captures", lambda device: True)
        assert trust.answer(USE, check, pytest.fail) is None
        assert "call it once before the capture" in kernel_checks()[0].reason
        with pytest.raises(UnsupportedImplementation, match=r"is not verified yet: .* before the capture"):
            trust.answer(USE, check, pytest.fail, insists="triton")
        assert check.calls == 0
    assert trust.answer(USE, check, lambda: "kernel") == "kernel"
    # What was verified before serves in a capture, where an error is no fault of the kernel.
    monkeypatch.setattr(trust, "captures", lambda device: True)
    with pytest.raises(ZeroDivisionError):
        trust.answer(USE, check, lambda: 1 / 0)
    assert kernel_checks()[-1].verdict == "verified"


def test_two_threads_wait_for_one_check():
    entered, released, second = threading.Event(), threading.Event(), Check(GOOD)

    def check():
        entered.set()
        assert released.wait(10)
        return GOOD

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(trust.answer, USE, check, lambda: "first")]
        assert entered.wait(10)
        answers.append(pool.submit(trust.answer, USE, second, lambda: "second"))
        released.set()
        assert [answer.result(10) for answer in answers] == ["first", "second"]
    assert second.calls == 0


@pytest.mark.skipif(native_status().isa is None, reason="there is no native library")
@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (["hopfield_solve"], "torch: evaluate, step; native: product"),
        (["hopfield_adjoint"], "native: evaluate, step; torch: product"),
        (["hopfield_solve", "hopfield_adjoint"], "torch: evaluate, step, product"),
    ],
    ids=["solve", "adjoint", "both"],
)
@pytest.mark.parametrize("door", ["solve", "equilibrium_attention"])
def test_a_route_does_not_name_a_kernel_that_is_refused(refused, expected, door, monkeypatch):
    query, keys = problem()
    for operation in refused:
        monkeypatch.setitem(native.CHECKS, operation, lambda variant: BAD)
    for first in (True, False):
        with pytest.warns(KernelWarning) if first else contextlib.nullcontext():
            if door == "solve":
                found = solve(AnchoredEnergy(LogSumExp(keys, 0.4), query, 0.3), query)
                value = found.value
            else:
                value, found = equilibrium_attention(query, keys, keys, return_solution=True)
            value.sum().backward()
        assert str(found.route) == f"{expected}; float64"


# Torch's private attention operation, by which the loop evaluates where no kernel answers.


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(2, size, 8, generator=generator).to(dtype) for size in (9, 70))
    return query.requires_grad_(), keys.requires_grad_()


def solved(impl, dtype=torch.float64, **options):
    query, keys = problem(dtype)
    if impl == "reference":
        potential = LogSumExp(keys, 0.4, mask=options.get("mask"), query_offset=0 if "is_causal" in options else None)
        state = solve(AnchoredEnergy(potential, query, 0.3), query, solver=Anderson(rtol=1e-6), impl=impl).value
    else:
        state = hopfield_solve(query, keys, beta=0.4, anchor=0.3, rtol=1e-6, impl=impl, **options).state
    return state.detach(), *torch.autograd.grad(state.square().sum(), (query, keys))


@pytest.fixture
def no_kernels():
    with without_kernels():
        yield


def broken(fault):
    kernel = attention.flash_with_logsumexp

    def call(*arguments, **options):
        if fault == "raises":
            raise RuntimeError("is not implemented for this processor")
        mean, logsumexp = kernel(*arguments, **options)
        if fault == "wrong":
            mean[..., -1, -1] += 1e-3
        elif fault == "wrong logsumexp":
            logsumexp = logsumexp + 1e-3
        else:
            mean[..., -1, :] = torch.nan
        return mean, logsumexp

    return call


MASKS = {"mask": {"mask": torch.arange(70) < 66}, "causal": {"is_causal": True}, "no mask": {}}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("fault", ["wrong", "wrong logsumexp", "unwritten", "raises"])
def test_a_broken_attention_kernel_is_found_at_its_first_use(fault, options, monkeypatch, no_kernels):
    expected = solved("reference", **options)
    monkeypatch.setattr(attention, "flash_with_logsumexp", broken(fault))
    with pytest.warns(KernelWarning) as told:
        found = solved("auto", **options)
    assert len(told) == 1
    assert "the kernel attention with log-sum-exp (torch) on cpu" in str(told[0].message)
    for _ in range(2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        found = solved("auto", **options)
    assert set(verdicts()) == {"refused"}
    assert "head_dim 8" in kernel_checks()[0].use


def test_a_broken_attention_kernel_evaluates_no_potential(monkeypatch):
    query, keys = (t.detach() for t in problem())
    potential = LogSumExp(keys, 0.4)
    value, mean = potential.value(query), potential.mean(query)
    monkeypatch.setattr(attention, "flash_with_logsumexp", broken("wrong"))
    with pytest.warns(KernelWarning):
        found = potential.evaluate(query)
    torch.testing.assert_close(found[0], value)
    torch.testing.assert_close(found[1], mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_attention_kernel_is_verified_here(dtype):
    query, keys = problem()
    for options in MASKS.values():
        hopfield_solve(query.to(dtype), keys.to(dtype), beta=0.4, **options)
        LogSumExp(keys.to(dtype), 0.4, mask=options.get("mask")).evaluate(query.detach().to(dtype))
    found = kernel_checks()
    assert len(found) >= 3
    assert all(check.verdict == "verified" and check.errors for check in found), found


def test_it_is_verified_once_and_leaves_no_trace():
    state = torch.get_rng_state()
    for context in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        trust._found.clear()
        query, keys = (t.detach() for t in problem())
        with context:
            hopfield_solve(query, keys, beta=0.4)
            (first,) = kernel_checks()
            hopfield_solve(query, keys, beta=0.4)
        assert kernel_checks() == (first,)
        assert first.verdict == "verified"
    assert torch.equal(torch.get_rng_state(), state)


def test_it_is_verified_inside_transforms_and_compiled_graphs():
    query, keys = (t.detach() for t in problem())

    def state(query, keys):
        return hopfield_solve(query, keys, beta=0.4, anchor=0.3).state

    expected = state(query, keys)
    for transformed in (torch.func.vmap(state), torch.compile(state, backend="aot_eager", fullgraph=True)):
        trust._found.clear()
        torch.testing.assert_close(transformed(query, keys), expected)
        assert verdicts() == ["verified"]


def evaluated(query, keys, beta):
    return LogSumExp(keys.detach(), beta).evaluate(query.detach())


# What is no verdict: others raise, too, while a kernel runs.


class Interrupted(RuntimeError):
    """Raised by a signal handler."""


@contextlib.contextmanager
def handler_that_raises():
    def handle(signum, frame):
        raise Interrupted("the time is over")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("late", [False, True], ids=["before the kernel", "after the kernel"])
@pytest.mark.parametrize(
    ("owner", "name", "dtype", "door"),
    [
        (native, "call", torch.float32, hopfield_solve),
        (native, "call", torch.float32, lambda query, keys, beta: [equilibrium_attention(query, keys, keys)]),
        (attention, "_FLASH_FOR_CPU", torch.float64, evaluated),
    ],
    ids=["native library", "native attention", "torch's kernel"],
)
def test_an_exception_of_a_signal_handler_is_no_verdict(owner, name, dtype, door, late, monkeypatch):
    query, keys = problem(dtype)
    kernel, expected = getattr(owner, name), door(query, keys, beta=0.4)

    def signalled(*arguments, **options):
        if not late:
            signal.raise_signal(signal.SIGALRM)
        found = kernel(*arguments, **options)
        signal.raise_signal(signal.SIGALRM)
        return found

    with handler_that_raises(), monkeypatch.context() as patched:
        patched.setattr(owner, name, signalled)
        with pytest.raises(Interrupted):
            door(query, keys, beta=0.4)
    assert set(verdicts()) == {"verified"}
    assert torch.equal(door(query, keys, beta=0.4)[0], expected[0])


def test_an_exception_of_a_signal_handler_during_a_check_goes_to_the_caller():
    released = threading.Event()

    def check():
        released.wait(10)
        return GOOD

    with handler_that_raises():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            trust.answer(USE, check, pytest.fail)
    released.set()
    assert trust.answer(USE, Check(GOOD), lambda: "kernel") == "kernel"


def test_an_exception_of_a_mode_of_torch_goes_to_the_caller():
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is attention._FLASH_FOR_CPU:
                raise RuntimeError("not under this mode")
            return func(*args, **(kwargs or {}))

    query, keys = (t.detach() for t in problem())
    potential = LogSumExp(keys, 0.4)
    potential.evaluate(query)
    with Refuses(), pytest.raises(RuntimeError, match="not under this mode"):
        potential.evaluate(query)
    assert verdicts() == ["verified"]


def test_memory_of_a_cpu_that_is_full_is_no_verdict():
    query, keys = torch.zeros(1, 4), torch.randn(70, 4)
    hopfield_solve(query, keys, beta=0.4)
    with pytest.raises(RuntimeError, match=r"not enough memory|DefaultCPUAllocator"):
        hopfield_solve(query.expand(2**46, 4), keys, beta=0.4)
    assert verdicts() == ["verified"]


def test_what_python_around_a_kernel_raises_goes_to_the_caller():
    assert trust.answer(USE, Check(GOOD), lambda: "kernel") == "kernel"
    with pytest.raises(ZeroDivisionError):
        trust.answer(USE, Check(GOOD), lambda: 1 / 0)
    assert kernel_checks()[0].verdict == "verified"

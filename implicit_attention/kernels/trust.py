"""Trust in kernels, earned on the machine where they run, and the small problems by which they earn it.

A kernel (one of ours in Triton, a private operation of torch) answers in a configuration (device, dtype, head
dimension, kind of mask, ...) once its answer to a small problem agrees with products written out in float64. A kernel
that is wrong, does not compile or cannot be launched causes one warning, and torch's public operations answer in its
place. Every other exception while a kernel runs (from the handler of a signal, from a mode of torch, for want of
memory) goes to the caller.

The comparison is made on the CPU, where it shares nothing with the kernel. It allows a small multiple of the error that
rounding to the kernel's precision makes by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from .._torch import HALF, state_dtype
from ..failure import KernelWarning, UnsupportedImplementation, outside
from ..solution import Status
from .problem import RTOL, THERE, AdjointAnswer, AdjointRule, Attention, FusedRule, Solved

_R = TypeVar("_R")
Solve: TypeAlias = Callable[[Attention, Tensor, FusedRule], Solved]
#: What was compared -> (the largest error, the largest that is allowed).
Errors: TypeAlias = Mapping[str, tuple[float, float]]
Verdict = Literal["verified", "refused", "open"]
SHOWN = 400
#: Modules that compile and call kernels: their exceptions are a kernel's fault. The native library raises nothing.
KERNELS = ("torch._ops", "triton")
#: Words in the messages of allocators, those of CPUs above all.
FULL = ("not enough memory", "can't allocate memory", "out of memory", "can't start new thread")
# The allowed error: so many times that of rounding alone, and so many units of float32 (or float64) beside it.
TIMES, UNITS = 4.0, 16.0
# The largest budget of a small problem.
CHECK_STEPS = 100
# Where the queries of small problems begin that attend to keys up to their own index.
OFFSET = 3


class Use(NamedTuple):
    """A kernel in one configuration, which the host knows without waiting for a device."""

    kernel: str
    device: torch.device
    #: A NamedTuple of the other properties that select the code which runs.
    variant: Any

    def __str__(self) -> str:
        of = ", ".join(f"{name} {value}" for name, value in self.variant._asdict().items())
        return f"{self.kernel} on {self.device} ({of})"


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """The verdict on a kernel at its first use in one configuration.

    Attributes:
        use: the kernel, the device and the configuration.
        verdict: "verified", "refused" (it is not used), or "open" (it could not be checked yet; its next use tries).
        errors: what was compared with products written out in float64 -> (largest error, largest allowed one).
        reason: why the kernel is not used; "" where it is verified.
        where: device and versions, as a report of the failure should name them.
        seconds: what the check took, compilation included.

    Not for making: `kernel_checks()` lists them.

    Examples:
        >>> from implicit_attention.kernels import KernelCheck
        >>> print(KernelCheck("a kernel on cpu", "verified", {"mean": (1e-8, 1e-7)}, "", "cpu", 0.1))
        verified: a kernel on cpu; errors: mean 1.0e-08 of 1.0e-07; cpu
    """

    use: str
    verdict: Verdict
    errors: Errors
    reason: str
    where: str
    seconds: float

    def __str__(self) -> str:
        largest = ", ".join(f"{name} {error:.1e} of {allowed:.1e}" for name, (error, allowed) in self.errors.items())
        why = f"; {self.reason}" if self.reason else ""
        return f"{self.verdict}: {self.use}{why}; errors: {largest or 'none measured'}; {self.where}"

    @property
    def report(self) -> str:
        """Why the kernel does not answer, and what to say about it."""
        if self.verdict == "open":
            return f"the kernel {self.use} is not verified yet: {self.reason}"
        return f"the kernel {self.use} is not used: {self.reason}. Please report this, with: {self.where}"


_found: dict[Use, KernelCheck] = {}
#: Kernels and devices that a warning has named; the status has every configuration.
_told: set[tuple[str, torch.device]] = set()
_lock = threading.Lock()


class _Checking(threading.local):
    """Whether this thread checks a kernel."""

    active = False


_checking = _Checking()


def kernel_checks() -> tuple[KernelCheck, ...]:
    """The kernels that were verified, by configuration and with errors, and those that are not used, with reasons.

    A kernel is checked at its first use in a configuration: it and products written out in float64 answer the same
    small problem, in memory filled with NaN. Print the entries to read them.

    Not for checking a kernel before its first use: call the operation once.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import hopfield_solve, kernel_checks
        >>> found = hopfield_solve(torch.randn(2, 4), torch.randn(70, 4), beta=0.3)
        >>> [check.use for check in kernel_checks() if check.verdict == "refused"]
        []
    """
    return tuple(_found.values())


def answer(use: Use, check: Callable[[], Errors], run: Callable[[], _R], *, insists: str | None = None) -> _R | None:
    """Return the result of `run`, which calls the kernel; None where torch's public operations are to answer.

    At the first use `check` asks the kernel for the answers of a small problem and compares them. `insists` names the
    implementation that the user asked for, which raises where it cannot be trusted. Needs tensors that hold numbers:
    the choice is made where an operation runs, not where torch traces it.
    """
    known = _found.get(use)
    if known is None or known.verdict == "open":
        known = _verified(use, check)
    if known.verdict == "verified":
        try:
            return run()
        except Exception as error:
            if captures(use.device) or _is_full(error) or not _is_of_kernel(error):
                raise
            known = _found[use] = dataclasses.replace(known, verdict="refused", reason=_failure(error))
    if insists is not None:
        raise UnsupportedImplementation(f"`impl={insists!r}`: {known.report}")
    if known.verdict == "refused" and use[:2] not in _told:
        _told.add(use[:2])
        advice = (
            "Torch's public operations answer in its place, now and wherever else this kernel fails here; "
            "implicit_attention.kernels.kernel_checks() lists every configuration that was tried"
        )
        warnings.warn(f"{known.report}. {advice}", KernelWarning, stacklevel=outside())
    return None


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a kernel to write to; during a check it is filled, so that a missing write is seen."""
    return several(shape, device, dtype)[0]


def several(shape: Sequence[int], device: torch.device, *dtypes: torch.dtype) -> list[Tensor]:
    """The same for tensors of one shape."""
    memory = []
    for dtype in dtypes:
        memory.append(torch.empty(shape, dtype=dtype, device=device))
    return list(map(poisoned, memory)) if _checking.active else memory


def poisoned(memory: Tensor) -> Tensor:
    """Memory filled with NaN, or with a number that is no code and no count."""
    # Bytes of 255 are NaN to those who read numbers of several bytes there.
    return memory.fill_(torch.nan if memory.is_floating_point() else 255 if memory.dtype == torch.uint8 else 77)


def _verified(use: Use, check: Callable[[], Errors]) -> KernelCheck:
    """The outcome of the check, which is made once, whichever thread comes first."""
    if captures(use.device):
        # The check waits for the device, which a capture forbids.
        reason = "it was first used while a CUDA graph was captured; call it once before the capture"
        return _found.setdefault(use, KernelCheck(str(use), "open", {}, reason, _where(use.device), 0.0))
    with _lock:
        known = _found.get(use)
        if known is None or known.verdict == "open":
            known = _found[use] = _checked(use, check)
    return known


def _checked(use: Use, check: Callable[[], Errors]) -> KernelCheck:
    outcome: list[Errors | BaseException] = []

    def run() -> None:
        _checking.active = True
        try:
            with on_device(use.device):
                outcome.append(check())
        except BaseException as error:
            outcome.append(error)

    started = time.perf_counter()
    # A thread of its own has none of the caller's modes: autocast, inference, torch.func, fake tensors.
    thread = threading.Thread(target=run, name=f"check of {use.kernel}")
    try:
        thread.start()
    except RuntimeError as error:
        if not _is_full(error):
            raise
        outcome.append(error)
    else:
        thread.join()
    (result,), seconds = outcome, time.perf_counter() - started
    verdict: Verdict = "refused"
    if isinstance(result, BaseException):
        reason, errors = _failure(result), {}
        if _is_full(result):
            verdict, reason = "open", f"its check found no room ({_first(str(result))}); its next use tries again"
    else:
        errors = dict(result)
        # A comparison with NaN is false.
        wrong = [_fault(name, error, most) for name, (error, most) in errors.items() if not error <= most]
        verdict = "refused" if wrong else "verified"
        reason = f"against products written out in float64, {'; '.join(wrong)}" if wrong else ""
    return KernelCheck(str(use), verdict, errors, reason, _where(use.device), seconds)


def _is_full(error: BaseException) -> bool:
    """Whether memory was short; on a CPU only torch's message says so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def _is_of_kernel(error: BaseException) -> bool:
    """Whether the code that raised, or the type of the exception, is of one of `KERNELS` or their submodules.

    Handlers of signals and modes of torch are code of other modules.
    """
    names = [type(error).__module__]
    last = error.__traceback__
    while last is not None:
        name, last = last.tb_frame.f_globals.get("__name__", ""), last.tb_next
        if last is None:
            names.append(name)
    return any(name == module or name.startswith(f"{module}.") for name in names for module in KERNELS)


def _fault(name: str, error: float, allowed: float) -> str:
    if math.isnan(error):
        return f"{name} is NaN"
    return f"{name} is off by {error:.1e}, {allowed:.1e} is allowed" if allowed else f"{error:.0f} {name}"


def _failure(error: BaseException) -> str:
    return f"it failed with {type(error).__name__}: {_first(str(error))}"


def _first(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which kernels are launched on a device, which need not be the current CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is captured, for which the host may not wait for numbers."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _where(device: torch.device) -> str:
    """Device and versions."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        parts = [f"{name} (capability {capability})", f"CUDA {torch.version.cuda}, driver {driver}"]
    else:
        parts = [f"{device.type} ({torch.backends.cpu.get_cpu_capability()})"]
    parts.append(f"torch {torch.__version__}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        parts.append(f"triton {importlib.metadata.version('triton')}")
    return ", ".join(parts)


# The reference for kernels.


class Written:
    """Attention over the keys of a problem, written out in float64.

    With another `dtype` operands of products are rounded to it and sums to float32: the error of the plain computation.
    """

    def __init__(self, record: Attention, dtype: torch.dtype = torch.float64) -> None:
        self.dtype, self.sum = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        parts = (torch.as_tensor(part, dtype=torch.float64, device="cpu") for part in record[:4])
        self.query, self.keys, beta, anchor = parts
        self.beta, self.anchor = beta[..., None, None], anchor[..., None, None]
        pairs = torch.zeros(self.query.shape[-2], self.keys.shape[-2], dtype=torch.float64)
        if record.first is not None:
            pairs = pairs.masked_fill(torch.ones_like(pairs, dtype=torch.bool).triu(record.first + 1), -torch.inf)
        if record.pairs is not None:
            given = record.pairs.cpu()
            pairs = pairs.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else pairs + given.double()
        self.pairs = pairs

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype).double()

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.sum).double()

    def attend(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, mean and log-sum-exp at z; zeros for a query without keys."""
        scores = self.beta * self.summed(self.operand(z) @ self.keys.mT) + self.pairs
        peak = scores.amax(-1, keepdim=True)
        empty = peak == -torch.inf
        weights = self.summed((scores - peak.masked_fill(empty, 0.0)).exp())
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        mean = self.summed(self.operand(weights) @ self.keys / total)
        logsumexp = (peak + total.log()).masked_fill(empty, 0.0).squeeze(-1)
        return weights / total, mean, self.summed(logsumexp)

    def mapped(self, mean: Tensor) -> Tensor:
        return self.summed(self.anchor * self.query + (1 - self.anchor) * mean)

    def centred(self, p: Tensor, mean: Tensor, v: Tensor) -> Tensor:
        """p_j (<k_j, v> - <mean, v>), whose product with the keys is Cov v."""
        v = self.operand(v)
        return self.operand(p * self.summed(v @ self.keys.mT - (mean * v).sum(-1, keepdim=True)))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        p, mean, _ = self.attend(z)
        spread = self.summed(self.centred(p, mean, v) @ self.keys)
        return self.summed(v - (1 - self.anchor) * self.beta * spread)

    def gradients(self, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pullbacks of u: (df/dK)^T u and <df/dbeta, u> per query."""
        p, mean, _ = self.attend(z)
        u = (1 - self.anchor) * u
        weights = self.centred(p, mean, u)
        by_keys = self.operand(p).mT @ self.operand(u) + self.beta * (weights.mT @ self.operand(z))
        return self.summed(by_keys), self.summed(((weights @ self.keys) * z).sum(-1))


class KernelComparison:
    """The largest error of every quantity, beside the allowed one."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self.errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, measured: Tensor, exact: Tensor, rough: Tensor, *, size: float = 1.0) -> None:
        """`size` is that of terms which cancel in the result."""
        error, rounding = (float((t.cpu().double() - exact).abs().max()) for t in (measured, rough))
        self.errors[name] = (error, TIMES * rounding + UNITS * self.unit * (size + float(exact.abs().max())))

    def none(self, name: str, wrong: Tensor) -> None:
        """Add an entry for a quantity that must be zero."""
        self.errors[name] = (float(wrong.sum()), 0.0)


# Solves and adjoint solves of a kernel.


def check_rule(dtype: torch.dtype) -> FusedRule:
    """The rule by which small problems are solved, of keys or states in that precision."""
    return FusedRule(RTOL[dtype], 0.0, CHECK_STEPS, plain_steps=2)


def solve_errors(small: Attention, solve: Solve) -> Errors:
    """Solve a small problem, and compare its report with measurements at its answers, which have all digits."""
    wide, stop = state_dtype(small.query.dtype), check_rule(small.keys.dtype)
    solved = solve(small, small.query.to(wide), stop)
    z = solved.state.cpu().double()
    measured = []
    for written in (Written(small), Written(small, wide)):
        _, mean, logsumexp = written.attend(z)
        f = written.mapped(mean)
        measured.append((mean, logsumexp, (f - z).norm(dim=-1), stop.rtol * f.norm(dim=-1)))
    found = KernelComparison(torch.finfo(wide).eps)
    for name, right, near in zip(("mean", "logsumexp", "residual", "tolerance"), *measured, strict=True):
        found.add(name, getattr(solved, name), right, near)
    steps, evals = solved.num_steps, solved.num_evals
    found.none("unsolved", (solved.residual > solved.tolerance) | (solved.status != int(Status.CONVERGED)))
    found.none("miscounted", (steps < 0) | (steps > stop.max_steps) | (evals <= steps) | (evals > stop.max_steps + 1))
    return found.errors


def adjoint_errors(
    small: Attention,
    solve: Solve,
    solve_adjoint: Callable[[Attention, Tensor, Tensor, Tensor, Tensor, AdjointRule], AdjointAnswer],
) -> Errors:
    """The same for an adjoint solve, which takes the results of an evaluation at the state."""
    wide, rtol = state_dtype(small.query.dtype), RTOL[small.keys.dtype]
    state = solve(small, small.query.to(wide), check_rule(small.keys.dtype)).state
    there = solve(small, state, THERE)
    g, stop = normal(tuple(small.query.shape), seed=4).to(wide), AdjointRule(rtol, CHECK_STEPS)
    measured = solve_adjoint(small, state, g.to(state.device), there.mean, there.logsumexp, stop)
    z, u, g = state.cpu().double(), measured.value.cpu().double(), g.double()
    # Operands in half precision are float16, but for the last product, which has all digits.
    rounded = torch.float16 if small.keys.dtype in HALF else wide
    exact, rough, last = Written(small), Written(small, rounded), Written(small, wide)
    products = [written.hessian_product(z, u) for written in (exact, rough, last)]
    residual, _, near = ((g - product).norm(dim=-1) for product in products)
    length = g.norm(dim=-1)
    compared = KernelComparison(torch.finfo(wide).eps)
    compared.add("residual", measured.residual, residual, near)
    compared.add("tolerance", measured.tolerance, rtol * length, rtol * length)
    # A product that is off by so much leaves that in the residual.
    noise = float(((products[1] - products[0]).norm(dim=-1) / length).max())
    compared.errors["cotangent left"] = float((residual / length).max()), 2 * (rtol + noise)
    by_keys, by_beta = exact.gradients(z, u)
    size = small.query.shape[-1]
    compared.add("by_keys", measured.by_keys, by_keys, rough.gradients(z, u)[0], size=size)
    compared.add("by_beta", measured.by_beta, by_beta, last.gradients(z, u)[1], size=size)
    steps = measured.num_steps
    compared.none("unsolved", measured.status != int(Status.CONVERGED))
    compared.none("called saddles", measured.negative_curvature)
    compared.none("miscounted", (steps < 0) | (steps > CHECK_STEPS))
    return compared.errors


def small_problem(record: Attention, rows: int, count: int) -> Attention:
    """Two sets of so many other queries and keys, with a mask of the same kind.

    Anchors and betas are such that few keys have one equilibrium too.
    """
    dim, device, wide = record.query.shape[-1], record.query.device, state_dtype(record.query.dtype)
    query, keys = (normal((2, size, dim), seed) for seed, size in ((0, rows), (1, count)))
    beta = (torch.tensor([0.4, 0.5]) / dim**0.5).to(device, wide)
    anchor = torch.tensor([0.7, 0.8]).to(device, wide)
    mask = None
    if record.pairs is not None:
        mask = third_masked(2, rows if mask_kind(record.pairs).endswith("pair") else 1, count)
        # One query attends to no key.
        mask[:, mask.shape[1] // 2] = -torch.inf if mask.shape[1] > 1 else mask[:, 0]
        mask = (mask != -torch.inf if record.pairs.dtype == torch.bool else mask).to(device, record.pairs.dtype)
    query, keys = query.to(device, record.query.dtype), keys.to(device, record.keys.dtype)
    return Attention.of(query, keys, beta, anchor, mask, None if record.first is None else OFFSET)


def mask_kind(pairs: Tensor | None) -> str:
    """The kind of a mask, by which a kernel chooses the code that reads it."""
    if pairs is None:
        return "none"
    per = "pair" if pairs.ndim > 1 and pairs.shape[-2] > 1 else "key"
    return f"{'boolean' if pairs.dtype == torch.bool else 'added'} per {per}"


# Numbers.


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same numbers on every machine, from a generator of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def third_masked(sets: int, rows: int, count: int) -> Tensor:
    """Return a bias for the scores, (sets, rows, M), -inf for a third of the keys but not for the first."""
    mask = normal((sets, rows, count), seed=2)
    mask = mask.masked_fill(mask < -0.4, -torch.inf)
    mask[..., 0] = 0.0
    return mask

"""Trust in kernels, earned on the machine where they run.

A kernel (one of ours in Triton, a private operation of torch) answers in a configuration (device, dtype, head
dimension, kind of mask, ...) once its answer to a small problem agrees with products written out in float64. A kernel
that is wrong, does not compile or cannot be launched causes one warning, and torch's public operations answer in its
place. Every other exception while a kernel runs (from the handler of a signal, from a mode of torch, for want of
memory) goes to the caller.
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

from ..errors import KernelWarning, UnsupportedImplementation, outside

_R = TypeVar("_R")
#: What was compared -> (the largest error, the largest that is allowed).
Errors: TypeAlias = Mapping[str, tuple[float, float]]
Verdict = Literal["verified", "refused", "open"]
SHOWN = 400
#: Modules that compile and call kernels: their exceptions are a kernel's fault. The native library raises nothing.
KERNELS = ("torch._ops", "triton")
#: Words in the messages of allocators, those of CPUs above all.
FULL = ("not enough memory", "can't allocate memory", "out of memory")


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
            if _captures(use.device) or _is_full(error) or not _raised_by(error, KERNELS):
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


def empty(shape: Sequence[int] | int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a kernel to write to; during a check it is filled, so that a missing write is seen."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    return poisoned(memory) if _checking.active else memory


def empty_like(tensor: Tensor) -> Tensor:
    """The same of the shape of a plain tensor, laid out in order, in half of the time."""
    memory = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return poisoned(memory) if _checking.active else memory


def poisoned(memory: Tensor) -> Tensor:
    """Memory filled with NaN, or with a number that is no code and no count."""
    # Bytes of 255 are NaN to those who read numbers of several bytes there.
    return memory.fill_(torch.nan if memory.is_floating_point() else 255 if memory.dtype == torch.uint8 else 77)


def _verified(use: Use, check: Callable[[], Errors]) -> KernelCheck:
    """The outcome of the check, which is made once, whichever thread comes first."""
    if _captures(use.device):
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
            with torch.cuda.device(use.device) if use.device.type == "cuda" else contextlib.nullcontext():
                outcome.append(check())
        except BaseException as error:
            outcome.append(error)

    started = time.perf_counter()
    # A thread of its own has none of the caller's modes: autocast, inference, torch.func, fake tensors.
    thread = threading.Thread(target=run, name=f"check of {use.kernel}")
    try:
        thread.start()
    except RuntimeError as error:
        if not _raised_by(error, ("threading",)):
            raise
        result: Errors | BaseException = MemoryError(str(error))
    else:
        thread.join()
        result = outcome[0]
    seconds, where = time.perf_counter() - started, _where(use.device)
    if isinstance(result, BaseException) and _is_full(result):
        reason = f"its check found no room ({_first(str(result))}); its next use tries again"
        return KernelCheck(str(use), "open", {}, reason, where, seconds)
    if isinstance(result, BaseException):
        return KernelCheck(str(use), "refused", {}, _failure(result), where, seconds)
    # A comparison with NaN is false.
    wrong = [_fault(name, error, most) for name, (error, most) in result.items() if not error <= most]
    reason = f"against products written out in float64, {'; '.join(wrong)}" if wrong else ""
    return KernelCheck(str(use), "refused" if wrong else "verified", dict(result), reason, where, seconds)


def _is_full(error: BaseException) -> bool:
    """Whether memory was short; on a CPU only torch's message says so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def _raised_by(error: BaseException, modules: tuple[str, ...]) -> bool:
    """Whether the code that raised, or the type of the exception, is of one of these modules or their submodules.

    Handlers of signals and modes of torch are code of other modules.
    """
    names = [type(error).__module__]
    last = error.__traceback__
    while last is not None:
        name, last = last.tb_frame.f_globals.get("__name__", ""), last.tb_next
        if last is None:
            names.append(name)
    return any(name == module or name.startswith(f"{module}.") for name in names for module in modules)


def _fault(name: str, error: float, allowed: float) -> str:
    if math.isnan(error):
        return f"{name} is NaN"
    return f"{name} is off by {error:.1e}, {allowed:.1e} is allowed" if allowed else f"{error:.0f} {name}"


def _failure(error: BaseException) -> str:
    return f"it failed with {type(error).__name__}: {_first(str(error))}"


def _first(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def _captures(device: torch.device) -> bool:
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

"""The native library of this machine, or the reason why there is none."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ...failure import KernelWarning, outside

#: The version of the interface; the same number stands in kernels.cpp.
ABI = 7
#: Chooses an instruction set; "off" uses none and says nothing.
VARIABLE = "IMPLICIT_ATTENTION_NATIVE"
#: Instruction sets by the family of processors, the fastest first.
SETS = {"x86_64": ("avx512", "avx2"), "aarch64": ("neon",), "arm64": ("neon",)}
#: Sets that no test has run yet: their code is that of the others, compiled for them.
UNVERIFIED = ("neon",)
FOLDER = Path(__file__).parent
_LONG, _INT, _ADDRESS = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
#: What each function returns, and its arguments.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("solve", "adjoint", "step"), (_LONG, _LONG, *[_ADDRESS] * 4, _LONG)),
    "finite": (_INT, _LONG, _ADDRESS, _LONG),
}


class Library(SimpleNamespace):
    """A loaded library: `isa`, its instruction set, `handle`, the functions that `ARGUMENTS` names, and `parallel_for`.

    That is the address of torch's loop over its threads, or 0 for one thread.
    """


@dataclasses.dataclass(frozen=True)
class NativeStatus:
    """Whether operations run natively on this CPU, and why not.

    Attributes:
        isa: the instruction set of the library that answers, or None.
        threads: "torch's threads", or "one thread" and why.
        reason: why no library answers, and what to do; where one does, why none of a faster instruction set, or "".

    Not for choosing: set the environment variable IMPLICIT_ATTENTION_NATIVE before the first solve.

    Examples:
        >>> from implicit_attention.kernels import NativeStatus
        >>> print(NativeStatus("avx2", "torch's threads", ""))
        native operations: avx2, torch's threads
    """

    isa: str | None
    threads: str
    reason: str

    def __str__(self) -> str:
        if self.isa is None:
            return f"native operations: none; {self.reason}"
        unverified = ", unverified" if self.isa in UNVERIFIED else ""
        slower = f"; {self.reason}" if self.reason else ""
        return f"native operations: {self.isa}{unverified}, {self.threads}{slower}"


def native_status() -> NativeStatus:
    """The backend of solves on this CPU: a library compiled for its instruction set, or torch, and why.

    Not for trust in single kernels: `kernel_checks` lists these.

    Examples:
        >>> from implicit_attention.kernels import native_status
        >>> print(native_status())  # doctest: +ELLIPSIS
        native operations: ...
    """
    loaded, reason = found()
    if loaded is None:
        return NativeStatus(None, "one thread", reason)
    one = f"one thread (torch {torch.__version__} has no torch_parallel_for; 2.10 has)"
    return NativeStatus(loaded.isa, "torch's threads" if loaded.parallel_for else one, reason)


def unavailable() -> str | None:
    """Why there is no library, as "reason; remedy"."""
    loaded, reason = found()
    return reason if loaded is None else None


@functools.cache
def warn_once() -> None:
    """Warn that torch answers in the place of a native operation, unless the variable says "off"."""
    reason = unavailable()
    if reason is None or os.environ.get(VARIABLE) == "off":
        return
    warnings.warn(
        f"solves on the CPU run without the native operations, several times slower: {reason}. "
        f"{VARIABLE}=off silences this",
        KernelWarning,
        stacklevel=outside(),
    )


@functools.cache
def found() -> tuple[Library | None, str]:
    """The library of this machine, loaded at the first call, and why there is none or not the fastest one."""
    asked = os.environ.get(VARIABLE) or "auto"
    if asked == "off":
        return None, f"they are switched off; unset {VARIABLE}"
    names = sorted({name for sets in SETS.values() for name in sets})
    if asked != "auto" and asked not in names:
        return None, f"{VARIABLE} must be auto, off, {', '.join(names)}, got {asked!r}; change it"
    machine = platform.machine()
    known = SETS.get(machine, ())
    if sys.platform == "win32":
        return None, "they are written for GCC and clang and not built on Windows; use Linux or macOS"
    if not known:
        return None, f"there are none for processors of the family {machine}; use x86-64 or 64-bit ARM"
    if asked != "auto" and asked not in known:
        return None, f"{asked} is not of the processor's family, {machine}; unset {VARIABLE}"
    reasons: list[str] = []
    for isa in known if asked == "auto" else (asked,):
        loaded, reason = _loaded(isa)
        if loaded is not None:
            return loaded, "; ".join(reasons)
        reasons.append(reason)
    # The last reason is about the set that most processors have.
    remedy = "use another processor" if asked == "auto" else f"unset {VARIABLE}"
    return None, reasons[-1] if ";" in reasons[-1] else f"{reasons[-1]}; {remedy}"


def _loaded(isa: str) -> tuple[Library | None, str]:
    again = "install the package again, with g++ or clang at hand"
    path = FOLDER / f"{isa}.library"
    if not path.exists():
        return None, f"{isa} was not compiled when the package was installed; {again}"
    try:
        if not _is_whole(path):
            return None, f"the compiled library for {isa} is damaged; {again}"
        handle = ctypes.CDLL(str(path))
        version, supported = handle.ia_abi(), handle.ia_supported
        if version != ABI:
            return None, f"the compiled library for {isa} is of interface {version}, the package of {ABI}; {again}"
        functions = {name: getattr(handle, f"ia_{name}") for name in ARGUMENTS}
    except (OSError, AttributeError) as error:
        reason = str(error).replace(f"{FOLDER}{os.sep}", "")
        return None, f"the compiled library for {isa} cannot be loaded ({reason}); {again}"
    if not supported():
        return None, f"this processor has no {isa}"
    for name, function in functions.items():
        function.restype, *function.argtypes = ARGUMENTS[name]
    return Library(isa=isa, handle=handle, **functions, parallel_for=_parallel_for()), ""


def _is_whole(path: Path) -> bool:
    """Whether an ELF file ends in its checksum, as setup.py writes it: the system loads a damaged one, and crashes."""
    made = path.read_bytes()
    # Other systems check the signatures of their files themselves.
    return made[:4] != b"\x7fELF" or hashlib.sha256(made[:-32]).digest() == made[-32:]


def _parallel_for() -> int:
    """Return the address of `parallel_for` of torch's stable interface, which torch has from 2.10 on."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).torch_parallel_for
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0

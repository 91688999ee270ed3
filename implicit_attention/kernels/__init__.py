"""Kernels for equilibria of attention and their adjoint solves, and the operations that choose among them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .native.library import NativeStatus, native_status
from .problem import AdjointAnswer, Attention, Solved
from .trust import KernelCheck, kernel_checks

if TYPE_CHECKING:
    from .operations import hopfield_adjoint as hopfield_adjoint
    from .operations import hopfield_solve as hopfield_solve

__all__ = [
    "AdjointAnswer",
    "Attention",
    "KernelCheck",
    "NativeStatus",
    "Solved",
    "hopfield_adjoint",
    "hopfield_solve",
    "kernel_checks",
    "native_status",
]


def __getattr__(name: str) -> Any:
    # They call solvers where no kernel answers, and lie above this package.
    if name not in ("hopfield_adjoint", "hopfield_solve"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".operations", __name__), name)

"""Fused operations: equilibria of attention and their adjoint solves, each one call with several implementations."""

from .api import hopfield_adjoint, hopfield_solve
from .native.library import NativeStatus, native_status
from .rule import AdjointAnswer, Solved
from .trust import KernelCheck, kernel_checks

__all__ = [
    "AdjointAnswer",
    "KernelCheck",
    "NativeStatus",
    "Solved",
    "hopfield_adjoint",
    "hopfield_solve",
    "kernel_checks",
    "native_status",
]

"""Fused operations: equilibria of attention and their adjoint solves, each one call with several implementations."""

from .api import hopfield_adjoint, hopfield_solve
from .rule import Adjoint, Solved
from .trust import KernelCheck, kernel_checks

__all__ = ["Adjoint", "KernelCheck", "Solved", "hopfield_adjoint", "hopfield_solve", "kernel_checks"]

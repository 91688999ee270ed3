"""The hot primitives of equilibrium attention, each one function with several implementations."""

from ._trust import KernelCheck, kernel_checks
from .hopfield_cg.api import hopfield_cg
from .hopfield_cg.rule import Adjoint
from .hopfield_hvp.api import hopfield_hvp
from .hopfield_solve.api import hopfield_solve
from .hopfield_solve.rule import Solved

__all__ = ["Adjoint", "KernelCheck", "Solved", "hopfield_cg", "hopfield_hvp", "hopfield_solve", "kernel_checks"]

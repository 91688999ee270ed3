"""Solvers for z = f(z): one loop, one file per method."""

from .anderson import Anderson
from .base import Solver, Update
from .broyden import Broyden
from .external import SciPy, TorchDEQ, register_if_imported, register_with_torchdeq
from .gradient_descent import GradientDescent
from .iterate import Iteration, Outcome
from .newton import NewtonKrylov
from .picard import Picard
from .safeguard import Safeguarded

__all__ = [
    "Anderson",
    "Broyden",
    "GradientDescent",
    "Iteration",
    "NewtonKrylov",
    "Outcome",
    "Picard",
    "Safeguarded",
    "SciPy",
    "TorchDEQ",
    "register_if_imported",
    "register_with_torchdeq",
    "Solver",
    "Update",
]

"""Solvers for z = f(z): one loop, one file per method, and adapters to the solvers of torchdeq and SciPy.

An adapter imports its library when one of its solvers is created.
"""

from .anderson import Anderson
from .broyden import Broyden
from .gradient_descent import GradientDescent
from .loop import Iteration, Outcome, Solver, Update
from .newton import NewtonKrylov
from .other_libraries import SciPy, TorchDEQ, register_with_torchdeq
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
    "Solver",
    "TorchDEQ",
    "Update",
    "register_with_torchdeq",
]

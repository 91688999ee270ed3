"""Solvers for z = f(z): one loop, one file per method. The adapters to other libraries load when they are asked for."""

import sys
from typing import TYPE_CHECKING, Any

from .anderson import Anderson
from .base import Solver, Update
from .broyden import Broyden
from .gradient_descent import GradientDescent
from .iterate import Iteration, Outcome
from .newton import NewtonKrylov
from .picard import Picard
from .safeguard import Safeguarded

if TYPE_CHECKING:
    from .external import SciPy, TorchDEQ, register_with_torchdeq

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


def __getattr__(name: str) -> Any:
    if name in ("SciPy", "TorchDEQ", "register_with_torchdeq"):
        from . import external

        return getattr(external, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# With torchdeq loaded, its users find our solvers by name; without it nothing is imported.
if "torchdeq" in sys.modules:
    from .external import register_with_torchdeq

    register_with_torchdeq()

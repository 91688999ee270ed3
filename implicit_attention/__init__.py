"""Equilibrium attention: solve grad E(z) = 0 per query, and differentiate the answer exactly."""

from typing import TYPE_CHECKING, Any

from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .energies import AnchoredEnergy, EnergyFunction, RepeatedSelfAttention, SelfAttentionEnergy
from .errors import ConvergenceError, ConvergenceWarning, UnsupportedImplementation
from .functional import equilibrium_attention
from .layers import AttentionPooling, ImplicitAttention, KeyValueCache, MemoryLookup, Rotary
from .linear import CG, GMRES, MINRES, Neumann
from .potentials import LogSumExp, Potential, Quadratic
from .problem import FixedPointMap
from .solution import Solution
from .solve import solve
from .solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard
from .status import Status

if TYPE_CHECKING:
    from .solvers import SciPy, TorchDEQ

__version__ = "0.1.0"

__all__ = [
    "equilibrium_attention",
    "ImplicitAttention",
    "MemoryLookup",
    "AttentionPooling",
    "KeyValueCache",
    "Rotary",
    "LogSumExp",
    "Quadratic",
    "Potential",
    "AnchoredEnergy",
    "EnergyFunction",
    "SelfAttentionEnergy",
    "RepeatedSelfAttention",
    "FixedPointMap",
    "solve",
    "Solution",
    "Status",
    "Picard",
    "Anderson",
    "Broyden",
    "NewtonKrylov",
    "GradientDescent",
    "TorchDEQ",
    "SciPy",
    "Implicit",
    "OneStep",
    "Phantom",
    "Unrolled",
    "CG",
    "MINRES",
    "GMRES",
    "Neumann",
    "ConvergenceError",
    "ConvergenceWarning",
    "UnsupportedImplementation",
]


def __getattr__(name: str) -> Any:
    # The adapters to other libraries load when they are asked for.
    if name in ("SciPy", "TorchDEQ"):
        from . import solvers

        return getattr(solvers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Equilibrium attention: solve grad E(z) = 0 per query, and differentiate the answer exactly."""

from typing import TYPE_CHECKING, Any

from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .attention import equilibrium_attention
from .energies import AnchoredEnergy, EnergyFunction, RepeatedSelfAttention, SelfAttentionEnergy
from .errors import ConvergenceError, ConvergenceWarning, UnsupportedImplementation
from .layers import AttentionPooling, ImplicitAttention, KeyValueCache, MemoryLookup, Rotary
from .linear import CG, GMRES, MINRES, Neumann
from .potentials import LogSumExp, Potential, SquaredScores
from .problem import FixedPointMap
from .solution import Solution
from .solve import solve
from .solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard
from .status import Status

if TYPE_CHECKING:
    from .potentials.gaussian_mixture import GaussianMixture
    from .potentials.hidden_units import HiddenUnits
    from .potentials.softcap import SoftcapLogSumExp
    from .solvers import SciPy, TorchDEQ
    from .spins import (
        TAP,
        AdaTAP,
        Bethe,
        Enumeration,
        GaussianClosure,
        KineticPlefka,
        MeanField,
        SaddlePoint,
        SpinSystem,
        TransferMatrix,
        decompose,
        free_energy,
        magnetization,
        stationary_state,
    )
    from .spins.stability import stability
    from .spins.thermodynamics import thermodynamics

__version__ = "0.1.0"

__all__ = [
    "equilibrium_attention",
    "ImplicitAttention",
    "MemoryLookup",
    "AttentionPooling",
    "KeyValueCache",
    "Rotary",
    "LogSumExp",
    "SoftcapLogSumExp",
    "SquaredScores",
    "HiddenUnits",
    "GaussianMixture",
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
    "SpinSystem",
    "thermodynamics",
    "free_energy",
    "magnetization",
    "stationary_state",
    "decompose",
    "stability",
    "MeanField",
    "TAP",
    "AdaTAP",
    "SaddlePoint",
    "Bethe",
    "Enumeration",
    "TransferMatrix",
    "GaussianClosure",
    "KineticPlefka",
    "ConvergenceError",
    "ConvergenceWarning",
    "UnsupportedImplementation",
]

_LAZY = {
    "SciPy": ".solvers",
    "TorchDEQ": ".solvers",
    "HiddenUnits": ".potentials.hidden_units",
    "GaussianMixture": ".potentials.gaussian_mixture",
    "SoftcapLogSumExp": ".potentials.softcap",
}


def __getattr__(name: str) -> Any:
    # Loaded when it is asked for: adapters to other libraries, spin systems and what needs their responses.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY.get(name, ".spins"), __name__), name)

"""Equilibrium attention: solve grad E(z) = 0 per query, and differentiate the answer exactly.

What most users need is here. More is in the parts of the package, each complete in itself: `layers`, `energies`,
`potentials` (hidden units, mixtures, capped scores), `solvers` (also those of SciPy and torchdeq), `adjoints`, `linear`
(CG, GMRES, ...), `spins` (systems of coupled spins and their approximations), `integrations` (models of other
libraries), `diagnostics`, `plotting`, `ops` (the fused operations), `testing` (suites for new methods).
"""

from typing import Any

from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .attention import equilibrium_attention
from .energies import AnchoredEnergy, EnergyFunction, RepeatedSelfAttention, SelfAttentionEnergy
from .errors import ConvergenceError, ConvergenceWarning, UnsupportedImplementation
from .fixed_point_map import FixedPointMap, PerSample, Shared
from .layers import (
    AttentionPooling,
    Equilibrium,
    EquilibriumTransformer,
    ImplicitAttention,
    KeyValueCache,
    MemoryLookup,
    Rotary,
    tie,
)
from .options import SolveOptions
from .potentials import LogSumExp, Potential, SquaredScores
from .solution import Solution, SolveReport
from .solve import solve
from .solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard
from .status import Status

__version__ = "0.1.0"

__all__ = [
    # Attention
    "equilibrium_attention",
    "ImplicitAttention",
    "AttentionPooling",
    "MemoryLookup",
    "KeyValueCache",
    "Rotary",
    # Any block, iterated until its answer settles
    "Equilibrium",
    "EquilibriumTransformer",
    "tie",
    # Problems: an energy of a potential, or any map
    "LogSumExp",
    "SquaredScores",
    "Potential",
    "AnchoredEnergy",
    "SelfAttentionEnergy",
    "RepeatedSelfAttention",
    "EnergyFunction",
    "FixedPointMap",
    "PerSample",
    "Shared",
    # A solve, and how it went
    "solve",
    "SolveOptions",
    "Solution",
    "SolveReport",
    "Status",
    "ConvergenceError",
    "ConvergenceWarning",
    "UnsupportedImplementation",
    # Solvers
    "Anderson",
    "Picard",
    "Broyden",
    "NewtonKrylov",
    "GradientDescent",
    # Adjoints: how a solution is differentiated
    "Implicit",
    "OneStep",
    "Phantom",
    "Unrolled",
]

#: Public parts of the package that attention does not need: they load when they are asked for.
_ON_REQUEST = ("diagnostics", "integrations", "plotting", "spins", "testing")


def __getattr__(name: str) -> Any:
    if name not in _ON_REQUEST:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_REQUEST})

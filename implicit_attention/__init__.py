"""Equilibrium attention: solve grad E(z) = 0 per query, and differentiate the answer exactly.

What most users need is here. More is in the parts of the package, each complete in itself: `layers`, `energies`,
`potentials` (hidden units, mixtures, capped scores), `solvers` (also those of SciPy and torchdeq), `adjoints`, `linear`
(CG, GMRES, ...), `spins` (systems of coupled spins and their approximations), `integrations` (models of other
libraries), `diagnostics`, `plotting`, `kernels` (the fused operations), `testing` (suites for new methods),
`training` (what solves came to in a training run), `distributed` (more than one process).
"""

import sys
from typing import TYPE_CHECKING, Any

if sys.orig_argv[1:3] != ["-m", __name__] and not "".join(sys.orig_argv[1:2]).endswith("/bin/implicit-attention"):
    # Exported programs call the package's operations, which torch knows once these are imported. The command line has
    # no such programs, and its help needs no torch.
    from . import _operations as _operations

if TYPE_CHECKING:
    from ._solve import solve
    from .adjoints import Implicit, OneStep, Phantom, Reversible, Unrolled
    from .attention import equilibrium_attention
    from .energies import AnchoredEnergy, EnergyFunction, RepeatedSelfAttention, SelfAttentionEnergy
    from .errors import ConvergenceError, ConvergenceWarning, UnsupportedImplementation
    from .failure_policy import FailurePolicy
    from .fixed_point_map import FixedPointMap, PerSample, Shared
    from .layers import (
        AttentionPooling,
        EnergyTransformer,
        Equilibrium,
        EquilibriumTransformer,
        ImplicitAttention,
        KeyValueCache,
        MemoryLookup,
        Rotary,
    )
    from .layers.tie import tie
    from .options import SolveOptions
    from .potentials import LogSumExp, Potential, SquaredScores
    from .solution import Solution, SolveReport
    from .solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard
    from .status import Status
    from .studies.comparison import compare_solvers

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
    # One energy for a whole block
    "EnergyTransformer",
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
    "compare_solvers",
    "SolveOptions",
    "FailurePolicy",
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
    "Reversible",
    "Unrolled",
]

#: The public names of each module, which is imported when it or one of its names is first read.
_NAMES = {
    "_solve": ("solve",),
    "adjoints": ("Implicit", "OneStep", "Phantom", "Reversible", "Unrolled"),
    "attention": ("equilibrium_attention",),
    "diagnostics": (),
    "energies": ("AnchoredEnergy", "EnergyFunction", "RepeatedSelfAttention", "SelfAttentionEnergy"),
    "errors": ("ConvergenceError", "ConvergenceWarning", "UnsupportedImplementation"),
    "failure_policy": ("FailurePolicy",),
    "fixed_point_map": ("FixedPointMap", "PerSample", "Shared"),
    "integrations": (),
    "layers": (
        "AttentionPooling",
        "EnergyTransformer",
        "Equilibrium",
        "EquilibriumTransformer",
        "ImplicitAttention",
        "KeyValueCache",
        "MemoryLookup",
        "Rotary",
        "tie",
    ),
    "linear": (),
    "models": (),
    "kernels": (),
    "options": ("SolveOptions",),
    "plotting": (),
    "potentials": ("LogSumExp", "Potential", "SquaredScores"),
    "problem": (),
    "solution": ("Solution", "SolveReport"),
    "solvers": ("Anderson", "Broyden", "GradientDescent", "NewtonKrylov", "Picard"),
    "spins": (),
    "status": ("Status",),
    "studies.comparison": ("compare_solvers",),
    "testing": (),
    "training": (),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _NAMES:
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *(name for name in _NAMES if name[0] != "_" and name.isidentifier())})

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
    from .kernels import operations as _operations  # noqa: F401

if TYPE_CHECKING:
    from ._solve import solve as solve
    from .adjoints import Implicit as Implicit
    from .adjoints import OneStep as OneStep
    from .adjoints import Phantom as Phantom
    from .adjoints import Reversible as Reversible
    from .adjoints import Unrolled as Unrolled
    from .attention import equilibrium_attention as equilibrium_attention
    from .energies import AnchoredEnergy as AnchoredEnergy
    from .energies import EnergyFunction as EnergyFunction
    from .energies import RepeatedSelfAttention as RepeatedSelfAttention
    from .energies import SelfAttentionEnergy as SelfAttentionEnergy
    from .failure import ConvergenceError as ConvergenceError
    from .failure import ConvergenceWarning as ConvergenceWarning
    from .failure import FailurePolicy as FailurePolicy
    from .failure import UnsupportedImplementation as UnsupportedImplementation
    from .layers import AttentionPooling as AttentionPooling
    from .layers import EnergyTransformer as EnergyTransformer
    from .layers import Equilibrium as Equilibrium
    from .layers import EquilibriumTransformer as EquilibriumTransformer
    from .layers import ImplicitAttention as ImplicitAttention
    from .layers import KeyValueCache as KeyValueCache
    from .layers import MemoryLookup as MemoryLookup
    from .layers import Rotary as Rotary
    from .layers.tie import tie as tie
    from .options import SolveOptions as SolveOptions
    from .potentials import LogSumExp as LogSumExp
    from .potentials import Potential as Potential
    from .potentials import SquaredScores as SquaredScores
    from .problem import FixedPointMap as FixedPointMap
    from .problem import PerSample as PerSample
    from .problem import Shared as Shared
    from .solution import Solution as Solution
    from .solution import SolveReport as SolveReport
    from .solution import Status as Status
    from .solvers import Anderson as Anderson
    from .solvers import Broyden as Broyden
    from .solvers import GradientDescent as GradientDescent
    from .solvers import NewtonKrylov as NewtonKrylov
    from .solvers import Picard as Picard
    from .studies.comparison import compare_solvers as compare_solvers

__version__ = "0.1.0"

#: The public names of each module, which is imported when it or one of its names is first read.
_NAMES = {
    "_solve": ("solve",),
    "adjoints": ("Implicit", "OneStep", "Phantom", "Reversible", "Unrolled"),
    "attention": ("equilibrium_attention",),
    "energies": ("AnchoredEnergy", "EnergyFunction", "RepeatedSelfAttention", "SelfAttentionEnergy"),
    "failure": ("ConvergenceError", "ConvergenceWarning", "FailurePolicy", "UnsupportedImplementation"),
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
    "options": ("SolveOptions",),
    "potentials": ("LogSumExp", "Potential", "SquaredScores"),
    "problem": ("FixedPointMap", "PerSample", "Shared"),
    "solution": ("Solution", "SolveReport", "Status"),
    "solvers": ("Anderson", "Broyden", "GradientDescent", "NewtonKrylov", "Picard"),
    "studies.comparison": ("compare_solvers",),
    # Of these the modules alone.
    **dict.fromkeys(
        ("diagnostics", "integrations", "kernels", "linear", "models", "plotting", "spins", "testing", "training"), ()
    ),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOME]


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

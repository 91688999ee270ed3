"""Equilibrium attention: solve grad E(z) = 0 per query, and differentiate the answer exactly."""

from .adjoints import Implicit, OneStep, Phantom, Unrolled
from .energies import AnchoredEnergy, EnergyFunction
from .errors import ConvergenceError, ConvergenceWarning
from .linear import CG, GMRES, MINRES, Neumann
from .potentials import LogSumExp, Potential, Quadratic
from .problem import FixedPointMap
from .solution import Solution
from .solve import solve
from .solvers import Anderson, Broyden, GradientDescent, NewtonKrylov, Picard, SciPy, TorchDEQ, register_if_imported
from .status import Status

# With torchdeq loaded, its users find our solvers by name; without it nothing is imported.
register_if_imported()

__version__ = "0.1.0"

__all__ = [
    "LogSumExp",
    "Quadratic",
    "Potential",
    "AnchoredEnergy",
    "EnergyFunction",
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
]

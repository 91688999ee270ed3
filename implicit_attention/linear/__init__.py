"""Matrix-free linear solvers and eigenvalue estimates: batched, every problem on its own, with its measured residual.

A problem is one vector of the last axis: b has the shape (*batch, n), and `matvec` maps (*batch, n) to (*batch, n),
each row separately. Symmetric positive definite: `CG`. Symmetric: `MINRES`. Anything square: `GMRES`. I - A a
contraction: `Neumann`. A new method subclasses `LinearSolver`.
"""

from ._cg import CG
from ._gmres import GMRES
from ._minres import MINRES
from ._neumann import Neumann
from .base import LinearSolution, LinearSolver, SweepState
from .spectrum import Eigenvalue, LanczosResult, extreme_eigenvalues, lanczos, spectral_radius

__all__ = [
    "CG",
    "GMRES",
    "MINRES",
    "Neumann",
    "LinearSolution",
    "LinearSolver",
    "SweepState",
    "lanczos",
    "extreme_eigenvalues",
    "spectral_radius",
    "LanczosResult",
    "Eigenvalue",
]

"""Solvers of other libraries: torchdeq's registry (in both directions) and SciPy's root finders as an oracle.

Neither library is imported before one of its solvers is made.
"""

from ._scipy import SciPy
from ._torchdeq import TorchDEQ, register_with_torchdeq

__all__ = ["SciPy", "TorchDEQ", "register_with_torchdeq"]

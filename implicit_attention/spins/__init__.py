"""Free energies of coupled vector spins, and their magnetizations m = -dF/dh."""

from .bethe import Bethe
from .enumeration import Enumeration
from .mean_field import MeanField
from .method import Method
from .saddle_point import SaddlePoint
from .system import SpinSystem
from .thermodynamics import Thermodynamics, free_energy, magnetization, thermodynamics
from .transfer_matrix import TransferMatrix

__all__ = [
    "SpinSystem",
    "Method",
    "MeanField",
    "SaddlePoint",
    "Bethe",
    "Enumeration",
    "TransferMatrix",
    "Thermodynamics",
    "thermodynamics",
    "free_energy",
    "magnetization",
]

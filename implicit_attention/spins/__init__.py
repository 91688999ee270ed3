"""Free energies of coupled vector spins, and their magnetizations m = -dF/dh."""

from ..potentials import (
    AmosResponse,
    DiscreteUnits,
    GaussianUnits,
    LargeDResponse,
    SaddlePointResponse,
    SignUnits,
    SphereUnits,
)
from .adaptive_tap import AdaTAP
from .approximation import Approximation
from .bethe import Bethe
from .decomposition import Decomposition, decompose, extensivity
from .dynamics import StationaryState, stationary_state
from .enumeration import Enumeration
from .gaussian_closure import GaussianClosure
from .kinetic_plefka import KineticPlefka
from .mean_field import MeanField
from .saddle_point import SaddlePoint
from .stability import Stability, stability
from .system import SpinSystem
from .tap import TAP
from .thermodynamics import Thermodynamics, free_energy, magnetization, thermodynamics
from .transfer_matrix import TransferMatrix

__all__ = [
    "SpinSystem",
    "Approximation",
    "MeanField",
    "TAP",
    "AdaTAP",
    "SaddlePoint",
    "Bethe",
    "Enumeration",
    "TransferMatrix",
    "GaussianClosure",
    "KineticPlefka",
    "Thermodynamics",
    "thermodynamics",
    "free_energy",
    "magnetization",
    "StationaryState",
    "stationary_state",
    "Decomposition",
    "decompose",
    "extensivity",
    "SphereUnits",
    "AmosResponse",
    "SaddlePointResponse",
    "LargeDResponse",
    "SignUnits",
    "GaussianUnits",
    "DiscreteUnits",
    "Stability",
    "stability",
]

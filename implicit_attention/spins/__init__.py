"""Free energies of coupled vector spins, their magnetizations m = -dF/dh, dynamics, samples and inverse problems."""

from ..potentials import (
    AmosResponse,
    DiscreteUnits,
    GaussianUnits,
    LargeDResponse,
    SaddlePointResponse,
    SignUnits,
    SiteLaw,
    SphereUnits,
    SphericalLaw,
)
from ..solution import SolveReport, Status
from .adaptive_tap import AdaTAP
from .approximation import Answer, Approximation, FixedPointApproximation, LogPartition
from .bethe import Bethe
from .bonds import Bonds
from .decomposition import Decomposition, decompose, extensivity
from .driven import DrivenPath, drive
from .dynamics import DynamicalMethod, StationaryState, stationary_state
from .enumeration import Enumeration
from .exact import StationaryLaw, stationary_law
from .gaussian_closure import GaussianClosure
from .inverse_ising import fit_ising, fit_ising_moments
from .kinetic_plefka import KineticPlefka
from .low_rank import LowRank
from .mean_field import MeanField
from .saddle_point import SaddlePoint
from .sampling import Samples, heat_bath, sample_spins, synchronous
from .stability import Stability, stability
from .sweep import Sweep, sweep
from .system import SpinSystem
from .tap import TAP
from .thermodynamics import Thermodynamics, free_energy, magnetization, thermodynamics
from .transfer_matrix import TransferMatrix

__all__ = [
    # Systems, and the laws of their sites.
    "SpinSystem",
    "LowRank",
    "Bonds",
    "SphereUnits",
    "AmosResponse",
    "SaddlePointResponse",
    "LargeDResponse",
    "SignUnits",
    "GaussianUnits",
    "DiscreteUnits",
    "SphericalLaw",
    "SiteLaw",
    # Methods for equilibrium.
    "MeanField",
    "TAP",
    "AdaTAP",
    "SaddlePoint",
    "Bethe",
    "Enumeration",
    "TransferMatrix",
    # Methods for synchronous dynamics.
    "GaussianClosure",
    "KineticPlefka",
    # What methods derive from.
    "Approximation",
    "FixedPointApproximation",
    "DynamicalMethod",
    "LogPartition",
    "Answer",
    # Questions to a method, and their answers.
    "thermodynamics",
    "Thermodynamics",
    "free_energy",
    "magnetization",
    "stationary_state",
    "StationaryState",
    "drive",
    "DrivenPath",
    "decompose",
    "Decomposition",
    "extensivity",
    "stability",
    "Stability",
    "sweep",
    "Sweep",
    "SolveReport",
    "Status",
    # Without a method: exact dynamics, samples, and systems from data.
    "stationary_law",
    "StationaryLaw",
    "heat_bath",
    "synchronous",
    "sample_spins",
    "Samples",
    "fit_ising",
    "fit_ising_moments",
]

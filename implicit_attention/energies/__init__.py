"""Energies: problems grad E(z) = 0 with their value, gradient and Hessian."""

from .anchored import AnchoredEnergy
from .base import Energy, EnergyFunction

__all__ = ["AnchoredEnergy", "Energy", "EnergyFunction"]

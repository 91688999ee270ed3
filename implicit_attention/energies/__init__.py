"""Energies: problems grad E(z) = 0 with their value, gradient and Hessian."""

from .anchored import AnchoredEnergy
from .base import Energy, EnergyFunction
from .self_attention import RepeatedSelfAttention, SelfAttentionEnergy

__all__ = ["AnchoredEnergy", "Energy", "EnergyFunction", "RepeatedSelfAttention", "SelfAttentionEnergy"]

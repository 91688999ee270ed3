"""Energies: problems grad E(z) = 0 with their value, gradient and Hessian."""

from .anchored import AnchoredEnergy
from .base import Energy, EnergyFunction
from .causal_tokens import CausalDynamics, CausalTokens
from .epanechnikov import Epanechnikov
from .legendre import LegendreEnergy, PublishedDynamics
from .self_attention import RepeatedSelfAttention, SelfAttentionEnergy
from .sphere import SphereEnergy

__all__ = [
    "AnchoredEnergy",
    "CausalDynamics",
    "CausalTokens",
    "Energy",
    "EnergyFunction",
    "Epanechnikov",
    "LegendreEnergy",
    "PublishedDynamics",
    "RepeatedSelfAttention",
    "SelfAttentionEnergy",
    "SphereEnergy",
]

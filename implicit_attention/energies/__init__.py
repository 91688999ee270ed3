"""Energies: problems grad E(z) = 0 with their value, gradient and Hessian."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .anchored import AnchoredEnergy
from .base import Energy, EnergyFunction
from .self_attention import RepeatedSelfAttention, SelfAttentionEnergy

if TYPE_CHECKING:
    from .causal_tokens import CausalDynamics, CausalTokens
    from .epanechnikov import Epanechnikov
    from .legendre import LegendreEnergy, PublishedDynamics
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

_LAZY = {
    "CausalDynamics": "causal_tokens",
    "CausalTokens": "causal_tokens",
    "Epanechnikov": "epanechnikov",
    "LegendreEnergy": "legendre",
    "PublishedDynamics": "legendre",
    "SphereEnergy": "sphere",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

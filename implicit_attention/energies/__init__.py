"""Energies: problems grad E(z) = 0 with their value, gradient and Hessian."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .anchored import AnchoredEnergy as AnchoredEnergy
from .base import Energy as Energy
from .base import EnergyFunction as EnergyFunction
from .self_attention import RepeatedSelfAttention as RepeatedSelfAttention
from .self_attention import SelfAttentionEnergy as SelfAttentionEnergy

if TYPE_CHECKING:
    from .causal_tokens import CausalDynamics as CausalDynamics
    from .causal_tokens import CausalTokens as CausalTokens
    from .epanechnikov import Epanechnikov as Epanechnikov
    from .legendre import LegendreEnergy as LegendreEnergy
    from .legendre import PublishedDynamics as PublishedDynamics
    from .sphere import SphereEnergy as SphereEnergy

_LAZY = {
    "CausalDynamics": "causal_tokens",
    "CausalTokens": "causal_tokens",
    "Epanechnikov": "epanechnikov",
    "LegendreEnergy": "legendre",
    "PublishedDynamics": "legendre",
    "SphereEnergy": "sphere",
}

__all__ = ["AnchoredEnergy", "Energy", "EnergyFunction", "RepeatedSelfAttention", "SelfAttentionEnergy", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

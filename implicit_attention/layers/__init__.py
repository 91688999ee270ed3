"""Modules: projections around an energy, solved by `solve`, and blocks that are iterated until they settle."""

from typing import Any

from .attention import ImplicitAttention
from .block import Equilibrium
from .cache import KeyValueCache
from .contractive import contractive
from .memory import AttentionPooling, MemoryLookup
from .projections import Rotary
from .tie import tie
from .transformer import EquilibriumTransformer

__all__ = [
    "ImplicitAttention",
    "Equilibrium",
    "EquilibriumTransformer",
    "tie",
    "contractive",
    "SpinAttention",
    "MemoryLookup",
    "AttentionPooling",
    "KeyValueCache",
    "Rotary",
]


def __getattr__(name: str) -> Any:
    # Spins load when they are asked for.
    if name != "SpinAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .spin import SpinAttention

    return SpinAttention

"""Modules: projections around an energy, solved by `solve`, and blocks that are iterated until they settle."""

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
    "MemoryLookup",
    "AttentionPooling",
    "KeyValueCache",
    "Rotary",
]

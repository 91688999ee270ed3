"""Modules: projections around an energy, solved by `solve`."""

from .attention import ImplicitAttention
from .block import Equilibrium
from .cache import KeyValueCache
from .memory import AttentionPooling, MemoryLookup
from .projections import Rotary

__all__ = ["ImplicitAttention", "Equilibrium", "MemoryLookup", "AttentionPooling", "KeyValueCache", "Rotary"]

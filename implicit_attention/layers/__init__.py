"""Modules: projections around an energy, solved by `solve`."""

from .attention import ImplicitAttention
from .cache import KeyValueCache
from .memory import AttentionPooling, MemoryLookup
from .projections import Rotary

__all__ = ["ImplicitAttention", "MemoryLookup", "AttentionPooling", "KeyValueCache", "Rotary"]

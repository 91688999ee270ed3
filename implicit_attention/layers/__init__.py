"""Modules: projections around an energy, solved by `solve`, and blocks that are iterated until they settle."""

import importlib
from typing import TYPE_CHECKING, Any

from .attention import ImplicitAttention
from .block import Equilibrium
from .cache import KeyValueCache
from .confirm import Confirm, ConfirmReport
from .contractive import contractive
from .exits import Exit, ExitReport
from .memory import MemoryLookup
from .past import BlockCache, Past
from .pooling import AttentionPooling
from .projections import Rotary
from .tie import tie
from .transformer import EquilibriumTransformer

if TYPE_CHECKING:
    from .causal_tokens import solve_in_order
    from .energy_layer_norm import EnergyLayerNorm
    from .energy_transformer import EnergyTransformer
    from .mean_field import MeanFieldAttention
    from .spin import SpinAttention
    from .spin_transformer import SpinTransformer, SpinTransformerBlock

__all__ = [
    "ImplicitAttention",
    "Equilibrium",
    "EquilibriumTransformer",
    "tie",
    "contractive",
    "EnergyTransformer",
    "EnergyLayerNorm",
    "solve_in_order",
    "SpinAttention",
    "SpinTransformerBlock",
    "SpinTransformer",
    "MeanFieldAttention",
    "MemoryLookup",
    "AttentionPooling",
    "KeyValueCache",
    "BlockCache",
    "Exit",
    "ExitReport",
    "Confirm",
    "ConfirmReport",
    "Past",
    "Rotary",
]


#: Name -> its module. Spins load at the first use of a name.
_LAZY = {
    "EnergyLayerNorm": "energy_layer_norm",
    "EnergyTransformer": "energy_transformer",
    "solve_in_order": "causal_tokens",
    "SpinAttention": "spin",
    "SpinTransformerBlock": "spin_transformer",
    "SpinTransformer": "spin_transformer",
    "MeanFieldAttention": "mean_field",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)

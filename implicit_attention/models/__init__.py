"""Whole models around an `EnergyTransformer`: images, graphs, and checkpoints of their training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import load_checkpoint, save_checkpoint
    from .classifier import ImageClassifier
    from .graph import NodeClassifier, laplacian_positions
    from .image import ImageEnergyTransformer, scatter_mask

__all__ = [
    "ImageEnergyTransformer",
    "ImageClassifier",
    "scatter_mask",
    "NodeClassifier",
    "laplacian_positions",
    "save_checkpoint",
    "load_checkpoint",
]

_LAZY = {
    "ImageEnergyTransformer": "image",
    "scatter_mask": "image",
    "ImageClassifier": "classifier",
    "NodeClassifier": "graph",
    "laplacian_positions": "graph",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)

"""Recurrent networks that reason step by step, each an `Equilibrium` around one block; read-outs stand outside.

The looped transformer among them is `EquilibriumTransformer`.
"""

from ...layers.transformer import TransformerStack
from .convolutional import ConvolutionalReasoner
from .graph import GraphReasoner
from .two_stream import TwoStreamReasoner

__all__ = ["ConvolutionalReasoner", "GraphReasoner", "TransformerStack", "TwoStreamReasoner"]

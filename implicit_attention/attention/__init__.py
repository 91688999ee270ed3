"""Equilibrium attention as a function: masks, heads, the solve and the read-out, on tensors and without modules."""

from .function import equilibrium_attention

__all__ = ["equilibrium_attention"]

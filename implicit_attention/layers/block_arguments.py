"""Checks of the arguments of an `Equilibrium`: its block, its steps, and how a causal one solves its tokens."""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

from torch import nn

from .. import _validate
from .._torch import transforms_active
from .exits import checked_exit
from .token_solve import TokenSolve
from .token_window import Reads, takes_past

Steps: TypeAlias = int | range | None


def check_block(block: Any) -> None:
    """Raise unless the block is a module that takes a state and an input."""
    remedy = "wrap a function in a module, or use solve with a FixedPointMap"
    _validate.check_instance("block", block, nn.Module, "be an nn.Module", remedy)
    try:
        taken = inspect.signature(block.forward)
    except (TypeError, ValueError):  # a forward that is not written in Python
        return
    kinds = [parameter.kind for parameter in taken.parameters.values()]
    count = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    if count < 2 and inspect.Parameter.VAR_POSITIONAL not in kinds:
        remedy = "wrap it in a module whose forward(z, x) returns the next state, such as torch.tanh(layer(z) + x)"
        received = f"{type(block).__name__}, which takes {taken}"
        raise TypeError(_validate.message("block", "take a state and an input, block(z, x)", received, remedy))


def checked_chunk(chunk: Any) -> int | None:
    return None if chunk is None else int(_validate.check_integer("chunk", chunk, low=1))


def checked_steps(steps: Any) -> Steps:
    if steps is None:
        return None
    if isinstance(steps, range):
        _validate.require(len(steps) > 0, "steps", "be a range that holds a number", repr(steps))
        _validate.check_integer("steps", min(steps[0], steps[-1]), low=0)
        return steps
    count: int = _validate.check_integer("steps", steps, low=0, remedy="None solves")
    return count


def check_causal(causal: Any, event_ndim: int | None, compiled: bool, chunk: Any) -> None:
    """Raise unless the other options of a layer fit `causal`."""
    _validate.check_instance("causal", causal, bool, "be True or False")
    if causal:
        required = "number tokens on its first axis, and so be at least 2, with causal=True"
        _validate.require(event_ndim is None or event_ndim > 1, "event_ndim", required, event_ndim)
        required = "be False with causal=True, whose tokens leave one by one"
        _validate.require(not compiled, "compiled", required, True)
    required, remedy = "be None without causal=True", "make the layer with causal=True"
    _validate.require(causal or chunk is None, "chunk", required, chunk, remedy)


def check_cachable(block: nn.Module, causal: bool) -> None:
    """Raise unless a layer can decode with a cache."""
    _validate.require(causal, "causal", "be True for a cache", causal, "make the layer with causal=True")
    required, received = "take a keyword argument `past` for a cache", f"{type(block).__name__}, which does not"
    remedy = "see `implicit_attention.layers.Past`, or call the layer on all tokens"
    _validate.require(takes_past(block), "block", required, received, remedy)


def solve_of_tokens(
    block: nn.Module, causal: bool, cache: Any, chunk: Any, exit: Any, reads: Reads | None
) -> TokenSolve | None:
    """The solve of tokens on their own that a call of a causal layer asks for; None for other layers."""
    _validate.check_instance(
        "reads", reads, (Reads, type(None)), "be None, or the `Reads` of a layer built on this one"
    )
    for name, given in (("cache", cache), ("chunk", chunk), ("exit", exit), ("reads", reads)):
        required, remedy = "be None for a layer without causal=True", "make the layer with causal=True"
        _validate.require(causal or given is None, name, required, type(given).__name__, remedy)
    if not causal:
        return None
    for name, given in (("cache", cache), ("exit", exit)):
        required, remedy = "be None inside torch.func and torch.vmap", "call the layer outside of transforms"
        _validate.require(given is None or not transforms_active(), name, required, "one", remedy)
    # A loop in a graph asks for no windows.
    return TokenSolve(reads, False, cache, checked_chunk(chunk), checked_exit(exit))

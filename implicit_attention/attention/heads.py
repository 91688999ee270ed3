"""Heads: taken out of the features of tokens, and grouped where several heads of queries share one head of keys."""

from __future__ import annotations

from torch import Tensor

from .. import _validate


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(*batch, N, heads * D) -> (*batch, heads, N, D)."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(*batch, heads, N, D) -> (*batch, N, heads * D)."""
    return x.transpose(-3, -2).flatten(-2)


def group_size(query: Tensor, keys: Tensor) -> int:
    """How many heads of queries share one head of keys."""
    heads, kv_heads = query.shape[-3], keys.shape[-3]
    _validate.require(
        kv_heads > 0 and heads % kv_heads == 0,
        "query",
        f"have a number of heads that the {kv_heads} heads of `key` divide",
        f"{heads} heads, shape {tuple(query.shape)}",
    )
    return heads // kv_heads


def split_groups(tensor: Tensor, heads: int, groups: int, axis: int, tiled: bool) -> Tensor:
    """The axis of `heads` heads as two, (heads / groups, groups), or (groups, heads / groups) if tiled.

    Head h then reads key head h // groups, or h mod (heads / groups) if tiled. An axis of size 1 becomes (1, 1).

    A tensor without that axis, which is the same for all heads, stays as it is.
    """
    if tensor.ndim < -axis:
        return tensor
    split = (heads // groups, groups) if tensor.shape[axis] == heads else (tensor.shape[axis], 1)
    parts: Tensor = tensor.unflatten(axis, split[::-1] if tiled else split)  # type: ignore[no-untyped-call]
    return parts

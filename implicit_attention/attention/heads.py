"""Heads: taken out of the features of tokens, and grouped where several heads of queries share one head of keys."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from .. import _validate

T = TypeVar("T", Tensor, Tensor | None, float | Tensor)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(*batch, N, heads * D) -> (*batch, heads, N, D)."""
    *lead, width = x.shape
    return x.reshape(*lead, heads, width // heads).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """(*batch, heads, N, D) -> (*batch, N, heads * D)."""
    return x.transpose(-3, -2).flatten(-2)


def group_size(query: Tensor, keys: Tensor) -> int:
    """Return the number of query heads that share one head of keys."""
    heads, kv_heads = query.shape[-3], keys.shape[-3]
    _validate.require(
        kv_heads > 0 and heads % kv_heads == 0,
        "query",
        f"have a number of heads that the {kv_heads} heads of `key` divide",
        f"{heads} heads, shape {tuple(query.shape)}",
    )
    return heads // kv_heads


def split_groups(given: T, heads: int, groups: int, axis: int, tiled: bool) -> T:
    """The axis of `heads` heads as two: (heads / groups, groups), or (groups, heads / groups) if tiled.

    Head h then shares the keys of head h // groups, or h mod (heads / groups) if tiled. An axis of size 1 becomes
    (1, 1). What has no such axis (a number, a smaller tensor, None) is the same for all heads and stays as it is.
    """
    if not isinstance(given, Tensor) or given.ndim < -axis:
        return given
    split = (heads // groups, groups) if given.shape[axis] == heads else (given.shape[axis], 1)
    return given.unflatten(axis, split[::-1] if tiled else split)  # type: ignore[no-untyped-call, no-any-return]

"""Masks over keys, and keys that are not finite: checks, and the keys and values that queries then read."""

from __future__ import annotations

import math

import torch
from einops import einsum
from torch import Tensor

from .. import _validate
from .._torch import host_may_look, transforms_active


def check_masks(mask: Tensor | None, bias: Tensor | None, keys: Tensor | None = None) -> None:
    """Raise unless `mask` is boolean and `bias` floating-point, with one entry (or one for all) for each of `keys`."""
    if mask is not None:
        _validate.check_boolean("mask", mask, "be a boolean tensor (True = attend)", "pass additive masks as `bias`")
        _validate.check_dense("mask", mask)
    if bias is not None:
        _validate.check_float_tensor("bias", bias, min_ndim=1)
    for name, pairs in (("mask", mask), ("bias", bias)):
        if pairs is None or keys is None:
            continue
        _validate.check_same_kind([("keys", keys), (name, pairs)])
        count = keys.shape[-2]
        if pairs.ndim < 1 or pairs.shape[-1] not in (1, count):
            required = f"broadcast to (*batch, N, M) with M = {count} keys"
            raise ValueError(_validate.message(name, required, f"shape {tuple(pairs.shape)}"))


def check_masks_fit(
    mask: Tensor | None, bias: Tensor | None, argument: str, z: Tensor, count: int, meaning: str
) -> None:
    """Raise unless both broadcast to the pairs of the states z (*batch, N, D) and `count` keys."""
    for name, pairs in (("mask", mask), ("bias", bias)):
        if pairs is not None:
            _validate.check_same_kind([(argument, z), (name, pairs)])
            _validate.check_broadcast(name, pairs.shape, (*z.shape[:-1], count), meaning)


def check_per_key(name: str, pairs: Tensor, remedy: str) -> torch.Size:
    """Raise unless `pairs` are the same for all queries; return their leading axes."""
    required, received = "be the same for all queries, shape (*batch, 1, M)", f"shape {tuple(pairs.shape)}"
    _validate.require(pairs.ndim == 1 or pairs.shape[-2] == 1, name, required, received, remedy)
    return pairs.shape[:-2]


def joined(mask: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Mask and bias as one tensor of pairs (a mask, or a bias that is -inf where masked), and which pairs count."""
    if bias is None:
        return mask, mask
    if mask is not None:
        bias = bias.where(mask, -torch.inf)
    return bias, torch.ne(bias, -torch.inf)


def restricted_to(scores: Tensor, pairs: Tensor | None, empty: Tensor | None) -> Tensor:
    """Scores with the bias, and -inf where the mask is False."""
    if pairs is not None:
        masked = pairs.dtype == torch.bool
        scores = scores.masked_fill(~pairs, -torch.inf) if masked else scores + pairs
    # A row of -inf has a NaN gradient; any finite row serves, because the results of `empty` rows are replaced.
    return scores if empty is None else scores.masked_fill(empty[..., None], 0.0)


def surely_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite, where the host can look without waiting."""
    if transforms_active() or not host_may_look(*tensors):
        return False
    return all(math.isfinite(float(t.detach().sum())) for t in tensors)


def without_nan(sources: list[Tensor], attended: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return keys and values (*#batch, M, ...) with zeros where they are not finite, and NaN for rows that read those.

    A key may hold NaN for queries that do not attend to it. 0 * NaN is NaN, so the key is read as zero, and the queries
    that do attend to it are found by a product that costs one number per pair.
    """
    finite, bad = _finite(sources)
    reads = attended.expand(*attended.shape[:-1], bad.shape[-1])
    # einsum, unlike @, expands neither of the two.
    number = einsum(reads.to(dtype), bad.to(dtype), "... n m, ... m -> ... n")
    poison = torch.where(number > 0, torch.nan, 0.0).to(dtype)
    return [t.where(f, 0.0) for t, f in zip(sources, finite, strict=True)], poison


def without_nan_before(sources: list[Tensor], first: int, rows: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return the results of `without_nan` where row i of `rows` attends to keys up to first + i."""
    finite, bad = _finite(sources)
    last = torch.arange(first, first + rows, device=bad.device).clamp(max=bad.shape[-1] - 1)
    reached = bad.cumsum(-1).index_select(-1, last) > 0
    poison = torch.where(reached, torch.nan, 0.0).to(dtype)
    return [t.where(f, 0.0) for t, f in zip(sources, finite, strict=True)], poison


def _finite(sources: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return which rows of each (*#batch, M, 1) are finite, and for which (*#batch, M) the first or the last is not."""
    finite = [torch.isfinite(t).all(-1, keepdim=True) for t in sources]
    return finite, ~(finite[0] & finite[-1]).squeeze(-1)

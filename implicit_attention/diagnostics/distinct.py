"""The number of different solutions, and the number of keys that an answer rests on."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import _validate
from ..potentials.scored_keys import ScoredKeys
from ..solvers.loop import flat

# Rows handled at a time where an (N, M) or (N, N) matrix would be needed.
TILE = 512


@torch.no_grad()
def distinct_fixed_points(value: Tensor, *, event_ndim: int = 1, rtol: float = 1e-2) -> Int[Tensor, "*batch"]:
    """Count the different solutions along the last leading axis.

    Not for problems with different parameters, whose solutions differ anyway.

    Two solutions are the same within a distance of rtol times the larger of their norms (plus rtol times 1e-3).

    Args:
        value: (*batch, N, *event); problems whose value is not finite are not counted.
        event_ndim: number of axes of one problem.
        rtol: relative distance.

    Returns:
        (*batch) integers.

    Examples:
        >>> import torch
        >>> from implicit_attention.diagnostics import distinct_fixed_points
        >>> distinct_fixed_points(torch.tensor([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0]]))
        tensor(2)
    """
    return first_fixed_points(value, event_ndim=event_ndim, rtol=rtol).sum(-1)


@torch.no_grad()
def first_fixed_points(value: Tensor, *, event_ndim: int = 1, rtol: float = 1e-2) -> Bool[Tensor, "*batch N"]:
    """Which solutions along the last leading axis differ from all before them; arguments as `distinct_fixed_points`.

    Not for the number alone: use `distinct_fixed_points`.

    Examples:
        >>> import torch
        >>> from implicit_attention.diagnostics import first_fixed_points
        >>> first_fixed_points(torch.tensor([[1.0, 0.0], [1.0, 0.001], [0.0, 1.0]]))
        tensor([ True, False,  True])
    """
    _validate.require(
        value.ndim > event_ndim, "value", "have a leading axis of problems", f"shape {tuple(value.shape)}"
    )
    rows = flat(value, value.shape[value.ndim - event_ndim :])
    norms = torch.linalg.vector_norm(rows, dim=-1)
    finite = torch.isfinite(norms)
    rows = torch.where(finite[..., None], rows, 0.0)
    first = []
    index = torch.arange(rows.shape[-2], device=value.device)
    for part in torch.split(index, TILE):
        # cdist by matrix products loses the small distances that matter here.
        near = torch.cdist(rows[..., part, :], rows, compute_mode="donot_use_mm_for_euclid_dist")
        scale = torch.maximum(norms[..., part, None], norms[..., None, :]) + 1e-3
        earlier = (near <= rtol * scale) & finite[..., None, :] & (index < part[:, None])
        first.append(finite[..., part] & ~earlier.any(-1))
    return torch.cat(first, dim=-1)


@torch.no_grad()
def effective_keys(potential: ScoredKeys, z: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch N"]:
    """exp(-sum_j p_j log p_j) of the attention weights at z: on how many keys the answer rests, from 1 to M.

    Not for potentials without attention weights.

    Queries that attend to no key have 0.

    Examples:
        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.diagnostics import effective_keys
        >>> effective_keys(LogSumExp(torch.eye(4), beta=1.0), torch.zeros(2, 4)).round(decimals=3)
        tensor([4., 4.])
    """
    index = torch.arange(z.shape[-2], device=z.device)
    counts = []
    for part in torch.split(index, TILE):
        rows = potential.select(part.expand(*z.shape[:-2], part.numel()))
        if rows is None:
            return _perplexity(potential.probabilities(z))
        counts.append(_perplexity(rows.probabilities(z[..., part, :])))
    return torch.cat(counts, dim=-1)


def _perplexity(p: Tensor) -> Tensor:
    """exp(entropy) of distributions over the last axis, 0 for one that is all zeros."""
    total = p.sum(-1)
    return torch.where(total > 0, torch.special.entr(p).sum(-1).exp(), total)

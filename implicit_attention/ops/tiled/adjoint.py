"""Conjugate gradients in torch, tile by tile: the weights of a tile are formed once and serve all products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...linear import MINRES
from ...linear._solution import forgiven
from ...linear._vectors import normalised
from ...linear.base import FLOAT32_RTOL
from ...status import Status
from ..fold import BLOCK
from ..problem import Hopfield
from ..rule import AdjointAnswer, AdjointRule
from .rows import TiledRows, dot

# Attention weights held at once: about what stays in a processor's cache.
TILE = 2**19
# A curvature below this times eps |p|^2 is rounding or negative.
NOISE = 10.0
# Rounding may keep the recomputed residual above the tolerance by this factor, where the recurrence is below it.
SLACK = 10.0
# A tile's weights are copied without its finished rows if these are more than this part.
COMPACT_BELOW = 0.7


class RowTile(NamedTuple):
    """A as products with the weights p (E, R, M): A v = v - by_cov (K^T (p * K v) - mean <mean, v>), v (E * R, D).

    `scratch` has the size of the weights: what is made anew for every product costs as much as the product.
    """

    weights: Tensor
    mean: Tensor
    keys: Tensor
    by_cov: Tensor
    scratch: Tensor

    @classmethod
    def of(cls, rows: TiledRows, z: Tensor) -> RowTile:
        """The tile of some rows at their states z (E * R, D)."""
        weights = rows.weights(z)
        mean = torch.bmm(weights, rows.keys).view_as(z)
        by_cov = rows.per_row((1 - rows.anchor) * rows.beta)
        return cls(weights, mean, rows.keys, by_cov, torch.empty_like(weights).flatten())

    def _scores(self, v: Tensor) -> Tensor:
        """K v (E, R, M), in the scratch."""
        shape = self.weights.shape
        out = self.scratch[: shape.numel()].view(shape)
        return torch.bmm(v.view(*shape[:2], -1), self.keys.mT, out=out)

    def centred(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """p * (K v - <mean, v>) (E, R, M), and K^T of that, Cov v/beta."""
        scores = self._scores(v)
        scores.sub_(dot(self.mean, v).view(*scores.shape[:2], 1)).mul_(self.weights)
        return scores, torch.bmm(scores, self.keys).view_as(v)

    def product(self, v: Tensor) -> Tensor:
        spread = torch.bmm(self._scores(v).mul_(self.weights), self.keys).view_as(v)
        spread.addcmul_(dot(self.mean, v)[:, None], self.mean, value=-1.0)
        return torch.addcmul(v, spread, self.by_cov, value=-1.0)

    def select(self, flat: Tensor, entries: Tensor | None, count: int) -> RowTile:
        weights = self.weights.flatten(0, 1).index_select(0, flat).view(-1, count, self.weights.shape[-1])
        keys = self.keys if entries is None else self.keys.index_select(0, entries)
        return RowTile(weights, self.mean.index_select(0, flat), keys, self.by_cov.index_select(0, flat), self.scratch)


@torch.no_grad()
def solve_adjoint(
    problem: Hopfield,
    state: Tensor,
    cotangent: Tensor,
    stop: AdjointRule,
    *,
    size: int = TILE,
    by_bias: Tensor | None = None,
) -> AdjointAnswer:
    """Solve A u = cotangent for every query; MINRES finishes queries that stall, at saddles above all.

    by_bias: zeros (*batch, M), to which (df/db)^T u is added for a bias b of every key.
    """
    rows = TiledRows(problem.to(state.dtype), fused=False).without_common()
    z, g = (rows.laid(t).flatten(0, 1) for t in (state, cotangent))
    g, unit = normalised(g)
    result = AdjointAnswer.allocated(g.new_zeros, g.shape, rows.keys.shape, g.dtype)
    # One for all queries that have an entry of the batch in common.
    sums = None if by_bias is None else g.new_zeros(rows.sets, rows.count // rows.length, rows.keys.shape[1])
    for part, entries in _tiles_with_cotangents(rows, g, size):
        own = (t.index_select(0, part.ids) for t in (z, g, unit))
        _solve_tile(part, entries, *own, stop=stop, result=result, sums=sums)
    per_query = [rows.restored(t[:, : rows.dim] if t.ndim > 1 else t) for t in result[:-1]]
    by_keys = rows.keys_restored(result.by_keys).reshape(problem.keys.shape)
    if by_bias is not None and sums is not None:
        by_bias += rows.fold.restored(sums.view(*rows.shape[:-1], -1))
    return AdjointAnswer._make((*per_query, by_keys))


def _tiles_with_cotangents(rows: TiledRows, g: Tensor, size: int) -> Iterator[tuple[TiledRows, Tensor]]:
    """Tiles without most of the rows whose cotangent, and hence answer, is zero, and the sets of the tiles."""
    origin: Tensor | None = None
    if g.device.type == "cpu":
        busy = (g != 0).any(-1)
        counts = rows.counts(busy)
        if not any(counts):
            return
        if (smaller := rows.compacted(busy, counts)) is not None:
            before, (rows, flat) = rows, smaller
            origin = flat.view(rows.sets, -1)[:, 0] // before.count
    for part, entries in tiles(rows, size):
        yield part, entries if origin is None else origin[entries]


def tiles(rows: TiledRows, size: int) -> Iterator[tuple[TiledRows, Tensor]]:
    """The working set in parts of about `size` weights: some sets with all their rows, or some rows of one set."""
    per_set = rows.count * rows.keys.shape[1]
    together = max(size // max(per_set, 1), 1)
    count = rows.count if per_set <= size else max(size // rows.keys.shape[1] // BLOCK, 1) * BLOCK
    for start in range(0, rows.sets, together):
        entries = torch.arange(start, min(start + together, rows.sets), device=rows.device)
        for first in range(0, rows.count, count):
            local = torch.arange(first, min(first + count, rows.count), device=rows.device)
            flat = (entries[:, None] * rows.count + local).flatten()
            yield rows.select(flat, entries), entries


@torch.inference_mode()
def _solve_tile(
    rows: TiledRows,
    entries: Tensor,
    z: Tensor,
    g: Tensor,
    unit: Tensor,
    *,
    stop: AdjointRule,
    result: AdjointAnswer,
    sums: Tensor | None,
) -> None:
    """Solve for the cotangents g, each in units of its own power of two, and write the answers of the tile."""
    tile = RowTile.of(rows, z)
    weights, by_cov = tile.weights, tile.by_cov
    size = torch.linalg.vector_norm(g, dim=-1)
    tolerance = stop.rtol * size
    u, steps, blocked = _conjugate_gradients(rows, tile, g, size, tolerance, stop)
    # The same product gives the residual of u and its gradients.
    centred, spread = tile.centred(u)
    residual = torch.linalg.vector_norm(g - u + by_cov * spread, dim=-1)
    finite = torch.isfinite(residual)
    solved = finite & (residual <= SLACK * tolerance) & ~blocked
    stalled = blocked | (finite & (steps < stop.max_steps) & ~solved)
    status = torch.full_like(result.status[rows.ids], int(Status.MAX_STEPS))
    status.masked_fill_(solved, int(Status.CONVERGED)).masked_fill_(~finite, int(Status.NONFINITE))
    if bool(stalled.any()):
        value, *evidence = _minimal_residuals(rows, tile, g, tolerance, stalled, stop)
        u = torch.where(stalled[:, None], value, u)
        centred, spread = tile.centred(u)
        old = status, residual, tolerance
        status, residual, tolerance = (torch.where(stalled, a, b) for a, b in zip(evidence[:3], old, strict=True))
        steps, blocked = steps + evidence[3], blocked | evidence[4]
    # A row that is not finite gives NaN; a row without a cotangent adds nothing, even if it is not finite.
    idle = size == 0
    u = u.masked_fill(~torch.isfinite(residual)[:, None], torch.nan) * unit[:, None]
    share = rows.per_row(1 - rows.anchor)
    left, right, by_beta = share * u, by_cov * z, share.squeeze(-1) * dot(spread, z) * unit
    centred.mul_(unit.view(*centred.shape[:2], 1))
    lost = idle & ~finite
    if lost.device.type != "cpu" or bool(lost.any()):
        # 0 * NaN is NaN.
        residual, by_beta = residual.masked_fill(lost, 0.0), by_beta.masked_fill(lost, 0.0)
        status = status.masked_fill(lost, int(Status.CONVERGED))
        u, left, right = (t.masked_fill(lost[:, None], 0.0) for t in (u, left, right))
        for matrix in (weights, centred):
            matrix.masked_fill_(lost.view(*matrix.shape[:2], 1), 0.0)
    shape = (*weights.shape[:2], -1)
    by_keys = torch.bmm(weights.mT, left.view(shape))
    by_keys.baddbmm_(centred.mT, right.view(shape))
    result.by_keys.index_add_(0, entries, by_keys)
    if sums is not None:
        # Which rows belong to which entry of the batch, by the share that they have in f.
        batch = rows.ids.view(shape[:-1]) % (sums.shape[1] * rows.length) // rows.length
        member = torch.arange(sums.shape[1], device=z.device)[:, None] == batch[:, None]
        sums.index_add_(0, entries, torch.bmm(share.view(len(entries), 1, -1) * member, centred))
    updates = (u, status, residual * unit, tolerance * unit, steps, blocked, by_beta)
    for whole, part in zip(result, updates, strict=False):
        whole.index_copy_(0, rows.ids, part)


def _minimal_residuals(
    rows: TiledRows, tile: RowTile, g: Tensor, tolerance: Tensor, chosen: Tensor, stop: AdjointRule
) -> tuple[Tensor, ...]:
    """(u, status, residual, tolerance, products, negative curvature) of the rows `chosen`; the others are at rest."""
    g = g.masked_fill(~chosen[:, None], 0.0)
    rest, ids = g, None
    if (smaller := rows.compacted(chosen, rows.counts(chosen), below=1.0)) is not None:
        before, (rows, ids) = rows, smaller
        entries = ids.view(rows.sets, -1)[:, 0] // before.count if rows.sets < before.sets else None
        tile, rest, tolerance = tile.select(ids, entries, rows.count), g[ids], tolerance[ids]
    rtol = max(stop.rtol, FLOAT32_RTOL) if g.dtype == torch.float32 else stop.rtol
    answer = MINRES(rtol=min(rtol, 1.0), max_steps=max(stop.max_steps, 1)).solve(tile.product, rest)
    u, residual, negative = answer.value, answer.residual, answer.negative_curvature
    sizes = (torch.linalg.vector_norm(t, dim=-1) for t in (u, rest))
    status, tolerance = forgiven(answer.status, residual, tolerance, negative, *sizes)
    status = status.masked_fill((status == Status.CONVERGED) & negative, int(Status.UNSTABLE))
    parts = u, status, residual, tolerance, answer.num_steps.to(torch.int32), negative
    whole = tuple(t.new_zeros((len(g), *t.shape[1:])) for t in parts)
    return _merged(whole, ids, parts)


def _conjugate_gradients(
    rows: TiledRows, tile: RowTile, g: Tensor, size: Tensor, tolerance: Tensor, stop: AdjointRule
) -> tuple[Tensor, Tensor, Tensor]:
    """(u, products, blocked) of a tile; `blocked` met a curvature that is not positive."""
    u, r, p = torch.zeros_like(g), g.clone(), g.clone()
    square = length = size.square()
    limit = tolerance.square()
    active = square > limit
    steps, blocked = torch.zeros_like(size, dtype=torch.int32), torch.zeros_like(active)
    whole: tuple[Tensor, ...] | None = None
    ids: Tensor | None = None
    noise = NOISE * torch.finfo(g.dtype).eps
    for index in range(stop.max_steps):
        if index % (1 if g.device.type == "cpu" else 4) == 0:
            counts = rows.counts(active)
            if not any(counts):
                break
            if g.device.type == "cpu" and (smaller := rows.compacted(active, counts, below=COMPACT_BELOW)) is not None:
                whole, ids = _merged(whole, ids, (u, steps, blocked)), smaller[1] if ids is None else ids[smaller[1]]
                before, (rows, flat) = rows, smaller
                entries = flat.view(rows.sets, -1)[:, 0] // before.count if rows.sets < before.sets else None
                tile = tile.select(flat, entries, rows.count)
                u, r, p, square, length, limit, active, steps, blocked = (
                    t.index_select(0, flat) for t in (u, r, p, square, length, limit, active, steps, blocked)
                )
        product = tile.product(p)
        curvature = dot(p, product)
        steps += active
        # A NaN is not blocked: it goes on into the residual and is seen there.
        negative = active & (curvature <= noise * length)
        blocked |= negative
        active ^= negative
        rate = torch.where(active, square / curvature, 0.0)[:, None]
        u.addcmul_(rate, p)
        r.addcmul_(rate, product, value=-1.0)
        reached = dot(r, r)
        ratio = torch.where(active, reached / square, 0.0)
        p = torch.addcmul(r, ratio[:, None], p)
        # |p|^2, as r is orthogonal to the directions before.
        length = reached + ratio.square() * length
        square = reached
        active &= square > limit
    result = _merged(whole, ids, (u, steps, blocked))
    return result[0], result[1], result[2]


def _merged(whole: tuple[Tensor, ...] | None, ids: Tensor | None, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`parts`, those of the rows `ids`, put into the whole."""
    if whole is None or ids is None:
        return parts
    return tuple(t.index_copy_(0, ids, part) for t, part in zip(whole, parts, strict=True))

"""Rays along which |z|^2/2 - scale Phi(z) falls without end, for potentials that grow like |z|^2 or faster."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import at_least_single, host_may_look

# The largest rectified growth has no closed form.
ASCENT_STEPS = 30


class Ray(NamedTuple):
    """A ray along which the energy falls, per batch entry, in float64 and without graph.

    direction: (*batch, D), of length 1, or zeros where no ray is known.
    limit: (*batch), |z|^2/2 - scale Phi(z) falls along the direction at least like -|z|^2 for every scale above it; 0
        where Phi grows faster than |z|^2, infinite where no ray is known.
    """

    direction: Tensor
    limit: Tensor


def quadratic_ray(
    keys: Tensor, strength: float | Tensor, scale: float | Tensor, *, rectified: bool = False, together: bool = True
) -> Ray:
    """Return the ray of a Phi that grows like (strength/2) sum_j <k_j, z>^2, over positive <k_j, z> if `rectified`.

    Args:
        keys: (*batch, M, D), float64 and finite.
        strength: >= 0, a float or a tensor that broadcasts to *batch.
        scale: no ray is looked for where a matrix norm shows the host that nothing falls up to this scale.
        together: whether one query reads all keys; if not, each key counts by itself.
    """
    strength = torch.as_tensor(strength).detach().to(keys)
    if not together:
        return _ray(_longest(keys), strength * keys.square().sum(-1).amax(-1))
    # Scaled, as squares of large keys overflow.
    size = keys.abs().amax((-1, -2), keepdim=True)
    scaled = keys / torch.where(size > 0, size, 1.0)
    strength, gram = strength * size[..., 0, 0].square(), scaled.mT @ scaled
    if _all_bounded(strength * torch.linalg.matrix_norm(gram), scale):
        return _ray(torch.zeros_like(gram[..., 0]), torch.zeros_like(strength))
    eigenvalues, axes = torch.linalg.eigh(gram)
    direction, steepness = axes[..., -1], eigenvalues[..., -1]
    if rectified and not _all_bounded(strength * steepness, scale):
        # The growth is convex: no step to the top of its linearisation lowers it. Each start may lead elsewhere.
        direction = torch.stack([direction, -direction, _longest(scaled)])
        for _ in range(ASCENT_STEPS):
            direction = _unit((_rectified(scaled, direction)[..., None, :] @ scaled).squeeze(-2))
        steepness, best = _rectified(scaled, direction).square().sum(-1).max(0)
        direction = direction.gather(0, best[None, ..., None].expand(1, *direction.shape[1:]))[0]
    elif rectified:
        direction, steepness = torch.zeros_like(direction), torch.zeros_like(steepness)
    return _ray(direction, strength * steepness)


def faster_ray(keys: Tensor) -> Ray:
    """Return the ray of a Phi that grows faster than |z|^2 along every key (*batch, M, D): the longest key."""
    direction = _longest(keys)
    return Ray(direction, torch.where(direction.any(-1), 0.0, torch.inf).to(keys))


def steeper(ray: Ray | None, weight: float | Tensor) -> Ray | None:
    """Return the ray of weight Phi for a weight >= 0, or one per batch entry."""
    if ray is None:
        return None
    direction, limit = ray
    limit = limit / torch.as_tensor(weight).detach().to(limit)
    return Ray(direction.expand(*limit.shape, -1), limit)


def first_to_fall(rays: Iterable[Ray | None]) -> Ray | None:
    """Return the ray of the lowest limit, per batch entry."""
    return functools.reduce(_lower, rays, None)


def _lower(a: Ray | None, b: Ray | None) -> Ray | None:
    if a is None or b is None:
        return b if a is None else a
    first = (a.limit <= b.limit)[..., None]
    return Ray(torch.where(first, a.direction, b.direction), torch.minimum(a.limit, b.limit))


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest singular value, (*batch, K, D) -> (*batch), without graph; entries that are not finite are zeros."""
    norm: Tensor = torch.linalg.matrix_norm(finite(at_least_single(matrix.detach())), ord=2)
    return norm.to(matrix.dtype)


def finite(tensor: Tensor) -> Tensor:
    """Replace entries that are not finite by zeros: for one such batch entry LAPACK would raise."""
    return tensor.where(tensor.isfinite(), 0.0)


def _ray(direction: Tensor, steepness: Tensor) -> Ray:
    return Ray(direction.expand(*steepness.shape, -1), torch.where(steepness > 0, 1 / steepness, torch.inf))


def _all_bounded(steepness: Tensor, scale: float | Tensor) -> bool:
    part = scale * steepness
    return host_may_look(part) and bool((part < 1).all())


def _rectified(keys: Tensor, direction: Tensor) -> Tensor:
    return (keys @ direction[..., None]).squeeze(-1).relu()


def _longest(keys: Tensor) -> Tensor:
    """The direction of the longest key, (*batch, D)."""
    index = keys.square().sum(-1).argmax(-1)[..., None, None]
    return _unit(keys.gather(-2, index.expand(*keys.shape[:-2], 1, keys.shape[-1])).squeeze(-2))


def _unit(vectors: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1.0)

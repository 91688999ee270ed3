"""Whether a stationary point of a mean-field free energy is a minimum, from a few products."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import LinearMap
from ..linear import extreme_eigenvalues
from ..potentials.spin import Response

#: Lanczos steps towards an extreme eigenvalue of N D.
STEPS = 24


def covariance_roots(
    response: Response, field: Tensor, beta: float | Tensor, radius: float
) -> tuple[LinearMap, LinearMap]:
    """v -> Cov^{1/2} v and v -> Cov^{-1/2} v for lone spins in the field, (*batch, N, D); the latter 0 where Cov is."""
    tau, rho = response.covariance_parts(field, beta, radius)
    unit = field / torch.linalg.vector_norm(field, dim=-1, keepdim=True).clamp(min=torch.finfo(field.dtype).tiny)
    across, along = (part.clamp(min=0).sqrt()[..., None] for part in (tau, rho))

    def scaled(v: Tensor, across: Tensor, along: Tensor) -> Tensor:
        part: Tensor = (unit * v).sum(-1, keepdim=True) * unit
        result: Tensor = across * (v - part) + along * part
        return result

    inverse = [torch.where(part > 0, part.reciprocal(), 0.0) for part in (across, along)]
    return lambda v: scaled(v, across, along), lambda v: scaled(v, *inverse)


def extremes(product: LinearMap, like: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest eigenvalue of a symmetric map of states, (*batch), each from inside the spectrum."""
    low, high = extreme_eigenvalues(
        lambda v: product(v.reshape(like.shape)).flatten(-2), torch.zeros_like(like.flatten(-2)), STEPS
    )
    return low.value, high.value


def above_one(eigenvalue: Tensor) -> Tensor:
    """Whether it is, beyond rounding."""
    above: Tensor = eigenvalue > 1 + torch.finfo(eigenvalue.dtype).eps ** 0.5
    return above

"""The adjoint solve by dense Hessians, one (D, D) matrix per query: what the others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ...status import Status
from .._hopfield import Hopfield
from .._rows import Rows, dot
from .rule import Adjoint, CGStop


@torch.no_grad()
def solve_adjoint(
    problem: Hopfield, state: Tensor, cotangent: Tensor, stop: CGStop, *, leave_out: bool = False
) -> Adjoint:
    """Solve A u = cotangent for every query by a factorisation of A; of `stop` only the tolerance is read."""
    rows = Rows(problem.to(state.dtype), fused=False)
    z, g = (rows.laid(t).flatten(0, 1) for t in (state, cotangent))
    weights = rows.weights(z)
    mean = torch.bmm(weights, rows.keys).flatten(0, 1)
    second = torch.einsum("erm,emc,emd->ercd", weights, rows.keys, rows.keys).flatten(0, 1)
    covariance = second - mean[:, :, None] * mean[:, None, :]
    share, beta = rows.per_row(1 - rows.anchor), rows.per_row(rows.beta)
    hessian = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device) - (share * beta)[..., None] * covariance
    finite = torch.isfinite(hessian).all(-1).all(-1)
    hessian = hessian.where(finite[:, None, None], torch.eye(z.shape[-1], dtype=z.dtype, device=z.device))
    negative = (torch.linalg.eigvalsh(hessian)[:, 0] <= 0) & finite
    u = torch.linalg.solve(hessian, g)
    residual = torch.linalg.vector_norm(g - (hessian @ u[..., None]).squeeze(-1), dim=-1)
    residual = residual.where(finite, torch.nan)
    u = u.where(finite[:, None], torch.nan)
    tolerance = stop.rtol * torch.linalg.vector_norm(g, dim=-1)
    solved = (residual <= tolerance) & ~negative
    status = torch.full_like(residual, int(Status.STALLED), dtype=torch.int8)
    status.masked_fill_(solved, int(Status.CONVERGED)).masked_fill_(~torch.isfinite(residual), int(Status.NONFINITE))
    dropped = ~solved if leave_out else negative
    u, z = u.masked_fill(dropped[:, None], 0.0), z.masked_fill(dropped[:, None], 0.0)
    mean = mean.masked_fill(dropped[:, None], 0.0)
    weights = weights.masked_fill(dropped.view(*weights.shape[:2], 1), 0.0)
    shape = (*weights.shape[:2], -1)
    centred = weights * (u.view(shape) @ rows.keys.mT - dot(mean, u).view(*weights.shape[:2], 1))
    by_keys = weights.mT @ (share * u).view(shape) + centred.mT @ (share * beta * z).view(shape)
    by_beta = share.squeeze(-1) * dot((centred @ rows.keys).flatten(0, 1), z)
    steps = torch.zeros_like(status, dtype=torch.int32)
    per_query = (u, status, residual, tolerance, steps, negative, by_beta)
    restored = [rows.restored(t[:, : rows.dim] if t.ndim > 1 else t) for t in per_query]
    return Adjoint._make((*restored, rows.keys_restored(by_keys).reshape(problem.keys.shape)))

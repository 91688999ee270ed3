"""The adjoint solve by dense Hessians, one (D, D) matrix per query: what the others are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from ...linear._vectors import normalised
from ...status import Status
from .._rows import Rows, dot
from ..problem import Hopfield
from .rule import Adjoint, CGStop


@torch.no_grad()
def solve_adjoint(problem: Hopfield, state: Tensor, cotangent: Tensor, stop: CGStop) -> Adjoint:
    """Solve A u = cotangent for every query by a factorisation of A; of `stop` only the tolerance is read."""
    rows = Rows(problem.to(state.dtype), fused=False).without_common()
    z, g = (rows.laid(t).flatten(0, 1) for t in (state, cotangent))
    g, unit = normalised(g)
    weights = rows.weights(z)
    mean = torch.bmm(weights, rows.keys).flatten(0, 1)
    second = torch.einsum("erm,emc,emd->ercd", weights, rows.keys, rows.keys).flatten(0, 1)
    covariance = second - mean[:, :, None] * mean[:, None, :]
    share, beta = rows.per_row(1 - rows.anchor), rows.per_row(rows.beta)
    hessian = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device) - (share * beta)[..., None] * covariance
    finite = torch.isfinite(hessian).all(-1).all(-1)
    hessian = hessian.where(finite[:, None, None], torch.eye(z.shape[-1], dtype=z.dtype, device=z.device))
    negative = (torch.linalg.eigvalsh(hessian)[:, 0] <= 0) & finite
    u = torch.linalg.solve_ex(hessian, g).result
    residual = torch.linalg.vector_norm(g - (hessian @ u[..., None]).squeeze(-1), dim=-1)
    finite &= torch.isfinite(residual)
    tolerance = stop.rtol * torch.linalg.vector_norm(g, dim=-1)
    solved = torch.where(negative, int(Status.UNSTABLE), int(Status.CONVERGED)).to(torch.int8)
    status = torch.where(residual <= tolerance, solved, int(Status.STALLED)).masked_fill(~finite, int(Status.NONFINITE))
    # What is not finite gives NaN, not a number; but what has no cotangent carries nothing, whatever else it holds.
    lost = ~finite & (g == 0).all(-1)
    status = status.masked_fill(lost, int(Status.CONVERGED))
    u = u.where(finite[:, None], torch.nan).masked_fill(lost[:, None], 0.0)
    residual = residual.where(finite, torch.nan).masked_fill(lost, 0.0) * unit
    shape = (*weights.shape[:2], -1)
    weights = weights.masked_fill(lost.view(*weights.shape[:2], 1), 0.0)
    left, right = (t.masked_fill(lost[:, None], 0.0) for t in (share * u * unit[:, None], share * beta * z))
    middle = dot(mean, u).masked_fill(lost, 0.0)
    centred = weights * (u.view(shape) @ rows.keys.mT - middle.view(*weights.shape[:2], 1))
    by_beta = share.squeeze(-1) * dot((centred @ rows.keys).flatten(0, 1), z).masked_fill(lost, 0.0) * unit
    centred = centred * unit.view(*centred.shape[:2], 1)
    by_keys = weights.mT @ left.view(shape) + centred.mT @ right.view(shape)
    steps = torch.zeros_like(status, dtype=torch.int32)
    per_query = (u * unit[:, None], status, residual, tolerance * unit, steps, negative, by_beta)
    restored = [rows.restored(t[:, : rows.dim] if t.ndim > 1 else t) for t in per_query]
    return Adjoint._make((*restored, rows.keys_restored(by_keys).reshape(problem.keys.shape)))

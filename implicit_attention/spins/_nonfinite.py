"""Samples whose numbers are not finite: how they are kept from the others."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from .._autograd import host_may_look, readable
from .system import SpinSystem


def without_nonfinite(system: SpinSystem, *, symmetric: bool = False) -> tuple[SpinSystem, Bool[Tensor, "*batch"]]:
    """Replace samples that cannot be solved by spins without field or couplings, and say which these are.

    Such a sample has a number that is not finite, or fields so strong that the square of the field at a site is not
    finite. In derivatives by tensors that samples share, its 0 * NaN would spoil the others. The caller makes its
    answers NaN at the end. With `symmetric`, a sample with asymmetric couplings is replaced as well; wherever the host
    can look, `Approximation.check` has refused it already.
    """
    field, couplings, beta = system.field, system.couplings, system.beta_over(0)
    with torch.no_grad():
        sites, strongest = nonfinite_sites(system)
        lost = sites.any(-1)
        if symmetric and readable(lost) is None:
            lost = lost | system.asymmetric()
        if host_may_look(lost) and not lost.any():
            sound = system.at(field, couplings, system.beta)
            sound.row_sums = None if system.low_rank or system.block else strongest
            return sound, lost
    own = couplings.shape[-system.pair_axes :]
    if couplings.ndim > len(own):
        couplings = fill(couplings.expand(*lost.shape, *own), lost, 0.0)
    else:
        # Shared couplings belong to samples with different masks: entries at missing sites may be anything.
        couplings = couplings.masked_fill(~couplings.isfinite(), 0.0)
    if isinstance(beta, Tensor):
        beta = beta.expand(lost.shape).masked_fill(lost, 1.0)
    return system.at(fill(field, lost, 0.0), couplings, beta), lost


@torch.no_grad()
def nonfinite_sites(system: SpinSystem) -> tuple[Bool[Tensor, "*batch N"], Tensor]:
    """The sites that make a sample unsolvable, and sum_j |J_ij|, (*#batch, N)."""
    if system.low_rank:
        sizes = torch.linalg.vector_norm(system.live_factors, dim=-1)
        strongest = sizes * sizes.sum(-1, keepdim=True)
    else:
        couplings, axes = system.live_couplings, (-3, -2, -1) if system.block else (-1,)
        if host_may_look(couplings) and couplings.numel() and bool(couplings.amin() >= 0):
            # Two such passes take a quarter of the time of one that takes sizes.
            strongest = couplings.sum(axes)
        else:
            strongest = torch.linalg.vector_norm(couplings, ord=1, dim=axes)
    reach = system.live_field.norm(dim=-1) + system.radius * strongest
    return ~(system.beta_over(1) * system.radius * reach).square().isfinite(), strongest


def fill(x: Tensor, samples: Tensor, value: float = torch.nan) -> Tensor:
    """x with `value` in some samples."""
    return x.masked_fill(samples.reshape((*samples.shape, *(1,) * (x.ndim - samples.ndim))), value)

"""Samples whose numbers are not finite: how they are kept from the others."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from .._autograd import readable
from .system import SpinSystem


def without_lost(system: SpinSystem, *, symmetric: bool = False) -> tuple[SpinSystem, Bool[Tensor, "*batch"]]:
    """The system with spins without a field in the place of samples that are lost, and which those are.

    A sample is lost if some number of it is not finite, or if the square of the field that a site may be in is not. It
    would reach by 0 * NaN the gradients of what it shares with others. Its answers are to be made NaN at the end. With
    `symmetric`, one of asymmetric couplings is lost, too; wherever the host could look these were refused.
    """
    field, couplings, beta = system.field, system.couplings, system.sample_beta
    with torch.no_grad():
        strongest = system.live_couplings.abs().sum((-3, -2, -1) if system.block else -1)
        reach = system.live_field.norm(dim=-1) + system.radius * strongest
        lost = ~(system.site_beta * system.radius * reach).square().isfinite().all(-1)
        if symmetric and readable(lost) is None:
            lost = lost | system.asymmetric()
    own = 4 if system.block else 2
    if couplings.ndim > own:
        couplings = fill(couplings.expand(*lost.shape, *couplings.shape[-own:]), lost, 0.0)
    else:
        # Of what all share, entries between sites that a sample does not have may be anything.
        couplings = couplings.masked_fill(~couplings.isfinite(), 0.0)
    if isinstance(beta, Tensor):
        beta = beta.expand(lost.shape).masked_fill(lost, 1.0)
    return system.at(fill(field, lost, 0.0), couplings, beta), lost


def fill(x: Tensor, samples: Tensor, value: float) -> Tensor:
    """x with `value` in some samples."""
    return x.masked_fill(samples.reshape((*samples.shape, *(1,) * (x.ndim - samples.ndim))), value)

"""Samples whose numbers are not finite: how they are kept from the others."""

from __future__ import annotations

from jaxtyping import Bool
from torch import Tensor

from .system import SpinSystem


def without_lost(system: SpinSystem, also: Tensor | bool = False) -> tuple[SpinSystem, Bool[Tensor, "*batch"]]:
    """The system with spins without a field in the place of samples that are lost, and which those are.

    A sample whose numbers are not finite, or that is in `also`, would reach by 0 * NaN the gradients of what it shares
    with others. Its answers are to be made NaN once all is computed.
    """
    couplings, beta = system.couplings, system.sample_beta
    own = 4 if system.block else 2
    unknown = ~system.live_couplings.isfinite().flatten(-own).all(-1)
    lost = unknown | ~system.live_field.isfinite().flatten(-2).all(-1) | also
    if isinstance(beta, Tensor):
        lost = lost | ~beta.isfinite()
        beta = beta.expand(lost.shape).masked_fill(lost, 1.0)
    if couplings.ndim > own or unknown.ndim:
        couplings, unknown = couplings.expand(*lost.shape, *couplings.shape[-own:]), lost
    return system.at(fill(system.field, lost, 0.0), fill(couplings, unknown, 0.0), beta), lost


def fill(x: Tensor, samples: Tensor, value: float) -> Tensor:
    """x with `value` in some samples."""
    return x.masked_fill(samples.reshape((*samples.shape, *(1,) * (x.ndim - samples.ndim))), value)

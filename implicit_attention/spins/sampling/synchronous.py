"""Synchronous dynamics: all spins drawn at once in the field of the state before."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from ..._torch import exact_precision
from ..system import SpinSystem
from .ensemble import Ensemble, Schedule, ScheduleKeywords, check_arguments
from .estimates import Estimates, Samples
from .von_mises_fisher import draw_noise, unit_spins


@torch.no_grad()
def synchronous(
    system: SpinSystem,
    *,
    generator: torch.Generator,
    start: Float[Tensor, "*#chains_batch N D"] | None = None,
    **schedule: Unpack[ScheduleKeywords],
) -> Samples:
    """Averages over the law that p(s' | s) = prod_i exp(beta s'_i.f_i)/Z_1(f_i), f = h + J s, settles in.

    Couplings may be asymmetric; a diagonal J_ii couples a spin to its own past. The law is Boltzmann's for no couplings
    but zero: for symmetric ones it is Peretto's. Of two successive states come the delayed correlations
    D_ij = <s'_i.s_j> - <s_i>.<s_j> and the entropy production per step,

        sigma = beta <s'.J s - s.J s'>,  which is beta sum_ij (J_ij - J_ji) D_ij for numbers as couplings.

    Args:
        system: the spins; numbers or matrices as couplings, of all pairs or of `Bonds`, any D and R.
        generator: as in `heat_bath`.
        start: as in `heat_bath`.
        **schedule: as in `heat_bath`; a sweep is one step.

    Returns:
        Samples, with delayed correlations and entropy production, without heat capacity. `energy` is the mean of
        E = -s.J s/2 - h.s in this law.

    Raises:
        TypeError, ValueError: arguments of wrong types, shapes or ranges.

    Gradients: none.

    Reference: Peretto (1984), Collective properties of neural networks; Aguilera, Moosavi and Shimazaki (2021).

    Not for Boltzmann's law, which synchronous steps do not sample: use `heat_bath`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem, synchronous
        >>> system = SpinSystem(0.3 * torch.ones(4, 4), torch.zeros(4, 3))
        >>> generator = torch.Generator().manual_seed(0)
        >>> samples = synchronous(system, chains=20, burn_in=5, sweeps=20, generator=generator)
        >>> samples.delayed_correlations.shape, bool(samples.entropy_production.abs() < 1e-9)  # symmetric couplings
        (torch.Size([4, 4]), True)
    """
    check_arguments(system, generator)
    plan = Schedule(**schedule)
    with exact_precision(system.field):
        ensemble = Ensemble(system, plan.chains)
        beta = ensemble.beta[:, None, None, None]

        def step(state: Tensor) -> Tensor:
            noise = draw_noise(state, generator)
            pull = beta * (ensemble.coupled(state) + ensemble.field)
            return unit_spins(pull, noise, generator) * ensemble.exists[..., None, None]

        estimates = Estimates(ensemble, plan, dynamics=True)
        return estimates.samples(estimates.run(ensemble.start(start, generator), step))

"""Sequential heat bath: each spin in turn drawn from its law in the field of the others."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Unpack

from ... import _validate
from ..._torch import exact_precision
from ..system import SpinSystem, check_sites
from .ensemble import Ensemble, Schedule, ScheduleKeywords, check_arguments
from .estimates import Estimates, Samples
from .von_mises_fisher import draw_noise, unit_spins

# Fields are computed for so many sites at a time by one matrix product, and corrected by the spins among them that
# have changed since: fewer numbers are moved than by correcting the fields of all sites after each change.
BLOCK = 8


@torch.no_grad()
def heat_bath(
    system: SpinSystem,
    *,
    generator: torch.Generator,
    start: Float[Tensor, "*#chains_batch N D"] | None = None,
    clamp: Bool[Tensor, "*#batch N"] | None = None,
    **schedule: Unpack[ScheduleKeywords],
) -> Samples:
    """Averages over Boltzmann's law exp(-beta E), from independent chains of sequential heat bath.

    A sweep visits the sites in their order and draws s_i from exp(beta s_i.f_i), f_i = h_i + sum_{j != i} J_ij s_j,
    exactly (`sample_spins`), whatever D and R are. All chains of all samples take each step together.

    Args:
        system: symmetric couplings, numbers or matrices. A diagonal J_ii of numbers is a constant of the energy.
        generator: where randomness comes from, on the field's device. The same state gives the same samples; the
            samples of a batch share it.
        start: the first states, of length R, broadcast to (chains, *batch, N, D); drawn uniformly if None.
        clamp: True where a spin stays as in `start`, broadcasts to (*batch, N). What is sampled is then the law of the
            others given these.
        **schedule: `chains` = 64 independent chains per sample; `burn_in` = 200 sweeps that are left out; `sweeps` =
            1000 after these, of which every `thin` = 1st is measured; `keep` = False, True holds every measured state;
            `progress` = None, or a function that is called after every sweep with (sweeps done, sweeps in all).

    Returns:
        Samples, with the heat capacity. Half precision is sampled in float32.

    Raises:
        TypeError, ValueError: asymmetric couplings; a matrix J_ii that prefers directions, whose one-site law is none
            of von Mises and Fisher; `clamp` without `start`; arguments of wrong types, shapes or ranges.

    Gradients: none.

    Reference: Miyatake et al. (1986), The implementation of the heat bath algorithm, for D = 3.

    Not for synchronous dynamics: use `synchronous`; not at low temperatures, where chains stay caught, as few
    `effective_samples` tell.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem, heat_bath
        >>> system = SpinSystem(0.3 * torch.ones(4, 4), torch.zeros(4, 3))
        >>> generator = torch.Generator().manual_seed(0)
        >>> heat_bath(system, chains=20, burn_in=5, sweeps=20, generator=generator).correlations.shape
        torch.Size([4, 4])
    """
    check_arguments(system, generator)
    plan = Schedule(**schedule)
    _check_boltzmann(system)
    with exact_precision(system.field):
        ensemble = Ensemble(system, plan.chains)
        fixed = _checked_clamp(clamp, start, system)
        state = ensemble.start(start, generator)
        estimates = Estimates(ensemble, plan)
        return estimates.samples(estimates.run(state, HeatBath(ensemble, generator, fixed)))


def _check_boltzmann(system: SpinSystem) -> None:
    """Raise unless exp(-beta E) exists and its one-site laws are von Mises-Fisher."""
    system.check_symmetric("heat_bath", wait=True)
    if not system.block:
        return
    own = system.live_couplings.detach().diagonal(dim1=-4, dim2=-3).movedim(-1, -3).nan_to_num(0.0, 0.0, 0.0)
    mean = own.diagonal(dim1=-2, dim2=-1).mean(-1)
    apart = (own - mean[..., None, None] * torch.eye(system.dim).to(own)).abs()
    scale = float(own.abs().sum())
    fits = float(apart.sum()) <= 64 * torch.finfo(own.dtype).eps * scale
    required = "have multiples of the unit matrix on the diagonal for heat_bath"
    received = f"entries that differ from these by up to {float(apart.max()) if apart.numel() else 0.0:.1e}"
    _validate.require(fits, "couplings", required, received, "leave the diagonal out")


class HeatBath:
    """Sweeps over an ensemble in place; `fixed` (B, N) are sites that stay."""

    def __init__(self, ensemble: Ensemble, generator: torch.Generator, fixed: Tensor | None = None) -> None:
        self.ensemble, self.generator = ensemble, generator
        beta, rows = ensemble.beta[:, None, None], ensemble.rows
        site = torch.arange(ensemble.num_sites * rows, device=beta.device) // max(rows, 1)
        #: beta K without couplings of a spin to itself, and beta g.
        self.couplings = (beta * ensemble.couplings).masked_fill_(site[:, None] == site, 0.0)
        self.field = beta[..., None] * ensemble.field
        stays = ~ensemble.exists if fixed is None else ~ensemble.exists | fixed
        self.stays = stays[..., None, None]
        # Read once: which sites stay in all samples, and which in some.
        self.skipped: list[bool] = stays.all(0).tolist()
        self.mixed: list[bool] = stays.any(0).tolist()

    def __call__(self, state: Tensor) -> Tensor:
        noise = draw_noise(state, self.generator)
        rows, sites = self.ensemble.rows, self.ensemble.num_sites
        columns = self.ensemble.columns(state)
        for start in range(0, sites, BLOCK):
            stop = min(start + BLOCK, sites)
            if all(self.skipped[start:stop]):
                continue
            pending = torch.bmm(self.couplings[:, start * rows : stop * rows], columns)
            pull = pending.view(len(state), stop - start, *state.shape[2:])
            pull += self.field[:, start:stop]
            for i in range(start, stop):
                if self.skipped[i]:
                    continue
                old = state[:, i]
                new = unit_spins(pull[:, i - start], noise.site(i), self.generator)
                if self.mixed[i]:
                    new = torch.where(self.stays[:, i], old, new)
                if i + 1 < stop:
                    change = (new - old).view(len(state), rows, pending.shape[-1])
                    into = self.couplings[:, (i + 1) * rows : stop * rows, i * rows : (i + 1) * rows]
                    pending[:, (i + 1 - start) * rows :].baddbmm_(into, change)
                state[:, i] = new
        return state


def _checked_clamp(clamp: Tensor | None, start: Tensor | None, system: SpinSystem) -> Tensor | None:
    if clamp is None:
        return None
    check_sites("clamp", clamp, system.field, "True = the spin stays")
    _validate.require(start is not None, "start", "be given with `clamp`", None, "it holds the spins that stay")
    return clamp.expand(system.field.shape[:-1]).reshape(-1, system.num_sites)

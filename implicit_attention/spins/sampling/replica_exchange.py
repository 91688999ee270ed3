"""Replica exchange: heat bath at many temperatures, which exchange their states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from ... import _validate
from ..._autograd import exact_precision
from ..system import SpinSystem, check_type
from .ensemble import Ensemble, Schedule, ScheduleKeywords, check_arguments
from .estimates import Estimates, Samples
from .heat_bath import HeatBath, check_boltzmann


@torch.no_grad()
def replica_exchange(
    system: SpinSystem,
    betas: Sequence[float] | Tensor,
    *,
    generator: torch.Generator,
    exchange_every: int = 1,
    **schedule: Unpack[ScheduleKeywords],
) -> Samples:
    """Averages over exp(-beta E) at several beta at once, for laws in whose parts a plain heat bath stays caught.

    After a sweep, neighbouring temperatures exchange their states with probability
    min(1, exp((beta_a - beta_b)(E_a - E_b))), even and odd pairs in turn: cold states travel by way of hot ones.

    Args:
        system: as in `heat_bath`; its own beta is not used.
        betas: T >= 2 inverse temperatures > 0 in rising or falling order, near enough to each other that
            `exchange_rate` is not near 0, and the hottest so hot that a heat bath moves freely there.
        exchange_every: sweeps between exchanges.
        generator: as in `heat_bath`.
        **schedule: as in `heat_bath`; `chains` counts the independent sets of T states, per sample.

    Returns:
        Samples whose batch is (T, *batch): the first axis of every average, and the second of `final`, is the
        temperature. With `exchange_rate`, (T - 1, *batch); NaN for pairs that were never tried.

    Raises:
        TypeError, ValueError: as `heat_bath`, and for betas that are not as said.

    Gradients: none.

    Reference: Hukushima and Nemoto (1996).

    Not for one temperature at which chains move freely: `heat_bath` is cheaper.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem, replica_exchange
        >>> system = SpinSystem(0.3 * torch.ones(4, 4), torch.zeros(4, 3))
        >>> generator = torch.Generator().manual_seed(0)
        >>> samples = replica_exchange(system, [0.5, 1.0], chains=20, burn_in=5, sweeps=20, generator=generator)
        >>> samples.energy.shape, samples.exchange_rate.shape
        (torch.Size([2]), torch.Size([1]))
    """
    check_arguments(system, generator)
    plan = Schedule(**schedule)
    _validate.check_integer("exchange_every", exchange_every, low=1)
    check_boltzmann(system, "replica_exchange")
    with exact_precision(system.field):
        ensemble = Ensemble(system, plan.chains, _checked_betas(betas))
        step = _Exchange(ensemble, generator, exchange_every)
        estimates = Estimates(ensemble, plan)
        final = estimates.run(ensemble.start(None, generator), step)
        return estimates.samples(final, exchange_rate=step.rate())


class _Exchange:
    """A sweep of heat bath, and then exchanges between neighbours."""

    def __init__(self, ensemble: Ensemble, generator: torch.Generator, every: int) -> None:
        self.ensemble, self.generator, self.every = ensemble, generator, every
        self.heat_bath = HeatBath(ensemble, generator)
        self.beta = ensemble.beta.view(ensemble.batch[0], ensemble.batch[1:].numel(), 1)
        self.done = 0
        pairs = len(self.beta) - 1
        self.tried = [0] * pairs
        self.accepted = self.beta.new_zeros(pairs, self.beta.shape[1], dtype=torch.float64)

    def __call__(self, state: Tensor, measured: bool) -> Tensor:
        state = self.heat_bath(state, measured)
        self.done += 1
        if self.done % self.every == 0:
            self._exchange(state, first=self.done // self.every % 2, measured=measured)
        return state

    def _exchange(self, state: Tensor, *, first: int, measured: bool) -> None:
        """Exchange pairs (first, first + 1), (first + 2, first + 3), ... in place."""
        count = (len(self.beta) - first) // 2
        low, high = slice(first, first + 2 * count, 2), slice(first + 1, first + 2 * count, 2)
        energy = self.ensemble.energy(state).view(*self.beta.shape[:2], self.ensemble.chains)
        gain = (self.beta[low] - self.beta[high]) * (energy[low] - energy[high])
        accepted = torch.empty_like(gain).uniform_(generator=self.generator).log() < gain
        states = state.view(*self.beta.shape[:2], *state.shape[1:])
        swap = accepted[:, :, None, None]
        cold, hot = states[low], states[high]
        states[low], states[high] = torch.where(swap, hot, cold), torch.where(swap, cold, hot)
        if measured:
            self.accepted[low] += accepted.double().mean(-1)
            for pair in range(first, first + 2 * count, 2):
                self.tried[pair] += 1

    def rate(self) -> Tensor:
        """Accepted over tried, (T - 1, *batch)."""
        tried = torch.tensor(self.tried, dtype=torch.float64, device=self.accepted.device)
        lost = self.ensemble.lost.view(self.beta.shape[:2]).any(0)
        rate = (self.accepted / tried[:, None]).masked_fill(lost, torch.nan)
        return rate.reshape(len(self.tried), *self.ensemble.batch[1:])


def _checked_betas(betas: Sequence[float] | Tensor) -> Tensor:
    check_type("betas", betas, (Tensor, Sequence), "be a sequence of numbers or a tensor")
    if isinstance(betas, Tensor):
        _validate.check_float_tensor("betas", betas)
        listed = betas.detach().double().cpu()
    else:
        numbers = [_validate.check_number("betas", beta, low=0.0, open_low=True) for beta in betas]
        listed = torch.tensor(numbers, dtype=torch.float64)
    shape, remedy = f"shape {tuple(listed.shape)}", "use heat_bath for one temperature"
    _validate.require(listed.ndim == 1 and len(listed) > 1, "betas", "hold at least 2 numbers", shape, remedy)
    inside = bool((torch.isfinite(listed) & (listed > 0)).all())
    _validate.require(inside, "betas", "be > 0 and finite", listed.tolist())
    signs = listed.diff().sign()
    ordered = bool((signs == signs[0]).all() & (signs[0] != 0))
    _validate.require(ordered, "betas", "be in rising or falling order", listed.tolist(), "sort them")
    return listed

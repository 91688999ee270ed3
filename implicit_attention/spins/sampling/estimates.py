"""Averages over Markov chains with standard errors that autocorrelation cannot fool."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from .._request import fill
from .._site import inner
from .ensemble import Ensemble, Schedule

# Averages are taken over so many independent parts of the run at most, whose scatter gives the errors (to 13 %).
PARTS = 32


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Samples:
    """Averages over the chains and sweeps that were measured, and their standard errors. All are float64.

    The chains are independent. Their averages, in groups if there are more than 32 chains, scatter by the standard
    error, however slowly each chain moves. With fewer than 17 chains every chain is cut into blocks of time as well,
    which have to be long against the autocorrelation time. Where one number is all there is, the error is infinite;
    a spin that hardly ever turns, and others that scatter in few states alone, have an error that is too small.
    Masked sites are zero, and samples with numbers that are not finite NaN.

    Attributes:
        magnetization, magnetization_error: <s_i>, (*batch, N, D).
        correlations, correlations_error: <s_i . s_j>, (*batch, N, N), not connected; R^2 on the diagonal. On `Bonds`
            those of the bonds, (*batch, E), in the order of `Bonds.pairs`.
        energy, energy_error: <E>, (*batch).
        heat_capacity, heat_capacity_error: beta^2 Var(E), (*batch); None for synchronous dynamics, whose law has no
            temperature.
        delayed_correlations, delayed_correlations_error: D_ij = <s_i(t+1) . s_j(t)> - <s_i> . <s_j>, (*batch, N, N);
            None but for synchronous dynamics. On `Bonds` (*batch, 2, E): at 0 those with i the first site of a pair and
            j the second, at 1 those with i the second and j the first.
        entropy_production, entropy_production_error: sigma per step, (*batch); None but for synchronous dynamics.
        effective_samples: (*batch), of how many independent states the scatter is that of: the variance of one state
            over the squared error, for the energy or the magnetization, whichever is less. Near the number of chains,
            the chains have not moved: take more sweeps.
        num_samples: chains times measured sweeps.
        final: (chains, *batch, N, D), the last states, to look at or to `start` from.
        trajectory: (measurements, chains, *batch, N, D), all measured states, if they were to be kept.

    Not for derivatives, as nothing here has a graph: use `thermodynamics`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import SpinSystem, heat_bath
        >>> system = SpinSystem(0.3 * torch.ones(4, 4), torch.zeros(4, 3))
        >>> generator = torch.Generator().manual_seed(0)
        >>> samples = heat_bath(system, chains=20, burn_in=5, sweeps=20, generator=generator)
        >>> samples.num_samples, samples.magnetization_error.shape
        (400, torch.Size([4, 3]))
    """

    magnetization: Float[Tensor, "*batch N D"]
    magnetization_error: Float[Tensor, "*batch N D"]
    correlations: Float[Tensor, "*batch N N"] | Float[Tensor, "*batch E"]
    correlations_error: Float[Tensor, "*batch N N"] | Float[Tensor, "*batch E"]
    energy: Float[Tensor, "*batch"]
    energy_error: Float[Tensor, "*batch"]
    effective_samples: Float[Tensor, "*batch"]
    num_samples: int
    final: Float[Tensor, "chains *batch N D"]
    heat_capacity: Tensor | None = None
    heat_capacity_error: Tensor | None = None
    delayed_correlations: Tensor | None = None
    delayed_correlations_error: Tensor | None = None
    entropy_production: Tensor | None = None
    entropy_production_error: Tensor | None = None
    trajectory: Tensor | None = None

    def __repr__(self) -> str:
        shape = tuple(self.magnetization.shape)
        fewest = float(self.effective_samples.min()) if self.effective_samples.numel() else math.nan
        return f"Samples(magnetization {shape}, {self.num_samples} states, {fewest:.3g} effective)"


class Estimates:
    """Running sums over each part of the run, in float64: chains in groups, and measurements in blocks if few.

    Args:
        ensemble: whose chains they are.
        schedule: of their sweeps.
        dynamics: whether the chains are synchronous dynamics: correlations between successive states are measured,
            and there is no heat capacity, as the law that they sample has no temperature.
    """

    def __init__(self, ensemble: Ensemble, schedule: Schedule, *, dynamics: bool = False) -> None:
        self.ensemble, self.wide, self.schedule, self.dynamics = ensemble, copy.copy(ensemble), schedule, dynamics
        self.wide.couplings, self.wide.field = ensemble.couplings.double(), ensemble.field.double()
        chains = ensemble.chains
        self.group = math.ceil(chains / PARTS)
        groups = math.ceil(chains / self.group)
        self.sizes = [min(self.group, chains - g * self.group) for g in range(groups)]
        self.measurements, self.seen = schedule.sweeps // schedule.thin, 0
        self.blocks = max(1, min(PARTS // groups, self.measurements))
        self.counts = [0] * (self.blocks * groups)
        self.sums: dict[str, Tensor] = {}
        self.reference: Tensor | None = None
        self.kept: list[Tensor] = []

    def run(self, state: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        """The last state of burn-in and sweeps by `step`, every `thin`-th of the latter measured."""
        plan = self.schedule
        total = plan.burn_in + plan.sweeps
        for done in range(1, total + 1):
            before, state = state, step(state)
            if done > plan.burn_in and (done - plan.burn_in) % plan.thin == 0:
                self.measure(before, state)
            if plan.progress is not None:
                plan.progress(done, total)
        return state

    def measure(self, before: Tensor, after: Tensor) -> None:
        """Add two successive states to the sums."""
        state = after.double()
        coupled = self.wide.coupled(state)
        energy = -((coupled / 2 + self.wide.field) * state).sum((1, 2))
        if self.reference is None:
            # Heat capacities are small differences of large squares, unless energies are counted from a typical one.
            self.reference = energy.mean(-1)
        excess = energy - self.reference[:, None]
        rows = self._rows(state)
        self._add("spin", state)
        self._add("energy", excess)
        self._add("square", excess.square())
        self._add_products("pair", rows, rows)
        if self.dynamics:
            old = before.double()
            self._add("old", old)
            self._add_products("delayed", rows, self._rows(old))
            self._add("flow", (state * self.wide.coupled(old) - old * coupled).sum((1, 2)))
        for g, size in enumerate(self.sizes):
            self.counts[self._block() * len(self.sizes) + g] += size
        if self.schedule.keep:
            self.kept.append(self.ensemble.public(after))
        self.seen += 1

    def samples(self, final: Tensor) -> Samples:
        """Return the estimates."""
        numbers: dict[str, Tensor] = {}

        def add(name: str, scale: Any, mean: Tensor, error: Tensor) -> None:
            numbers[name], numbers[f"{name}_error"] = self._public(scale * mean), self._public(scale * error)

        radius, beta = self.ensemble.radius, self.ensemble.beta.double()
        spin, spin_error = self._summary(self._means("spin"))
        add("magnetization", radius, spin, spin_error)
        add("correlations", radius**2, *self._summary(self._means("pair")))
        excess, energy_error = self._summary(self._means("energy"))
        assert self.reference is not None
        energy = excess + self.reference
        add("energy", 1, energy, energy_error)
        # A variance is a nonlinear function of averages: its error is that of its linear part.
        linear = (q - 2 * excess * e for q, e in zip(self._means("square"), self._means("energy"), strict=True))
        shifted, variance_error = self._summary(linear)
        variance = shifted + excess.square()
        if not self.dynamics:
            add("heat_capacity", beta.square(), variance, variance_error)
        else:
            old, _ = self._summary(self._means("old"))
            parts = zip(self._means("delayed"), self._means("spin"), self._means("old"), strict=True)
            pairs = functools.partial(inner, graph=self.ensemble.graph)
            shifted, error = self._summary(d - pairs(s, old) - pairs(spin, o) for d, s, o in parts)
            add("delayed_correlations", radius**2, shifted + pairs(spin, old), error)
            add("entropy_production", beta, *self._summary(self._means("flow")))
        total, sites = sum(self.counts), self.ensemble.exists.sum(-1)
        still = sites - spin.square().sum((-1, -2))
        effective = torch.minimum(
            _effective(variance, energy_error, 1e-20 * energy.square(), total),
            _effective(still, torch.linalg.vector_norm(spin_error, dim=(-1, -2)), 1e-12 * sites, total),
        )
        return Samples(
            **numbers,
            effective_samples=self._public(effective),
            num_samples=total,
            final=self.ensemble.public(final),
            trajectory=torch.stack(self.kept) if self.schedule.keep else None,
        )

    def _public(self, value: Tensor) -> Tensor:
        return fill(value, self.ensemble.lost).reshape(self.ensemble.batch + value.shape[1:])

    def _block(self) -> int:
        return self.seen * self.blocks // self.measurements

    def _add(self, name: str, values: Tensor) -> None:
        """Add the sums over each group of chains, (..., C)."""
        sums = self._grouped(values).sum(-1).movedim(-1, 0)
        self._current(name, sums, sums.shape[1:]).add_(sums)

    def _add_products(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add sum_k left_ik right_jk for rows (groups, B, N, k); of a matrix without a tensor of the products."""
        if self.ensemble.graph is not None:
            # Of a state with itself both directions of a bond are one number.
            sums = self.ensemble.graph.overlap(left) if left is right else inner(left, right, self.ensemble.graph)
            self._current(name, sums, sums.shape[1:]).add_(sums)
            return
        sites = left.shape[2]
        into = self._current(name, left, torch.Size([left.shape[1], sites, sites]))
        into.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1).mT)

    def _current(self, name: str, like: Tensor, shape: torch.Size) -> Tensor:
        """The sums of the current block, (groups, *shape)."""
        groups = len(self.sizes)
        if name not in self.sums:
            self.sums[name] = like.new_zeros(self.blocks * groups, *shape)
        start = self._block() * groups
        return self.sums[name][start : start + groups]

    def _grouped(self, values: Tensor) -> Tensor:
        """(..., C) -> (..., groups, chains per group), the last group filled up with zeros."""
        missing = self.group * len(self.sizes) - values.shape[-1]
        filled = functional.pad(values, (0, missing)) if missing else values
        return filled.unflatten(-1, (len(self.sizes), self.group))  # type: ignore[no-any-return, no-untyped-call]

    def _rows(self, state: Tensor) -> Tensor:
        """Spins as rows whose products are sums of s_i . s_j over a group, (groups, B, N, D chains)."""
        return self._grouped(state).permute(3, 0, 1, 2, 4).flatten(-2)

    def _means(self, name: str) -> Iterable[Tensor]:
        return (part / count for part, count in zip(self.sums[name], self.counts, strict=True))

    def _summary(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """The mean of the parts, weighted by their size, and its standard error."""
        total, mean, spread = 0, torch.zeros(()), torch.zeros(())
        for value, count in zip(parts, self.counts, strict=True):
            total += count
            change = value - mean
            mean = mean + change * (count / total)
            spread = spread + count * change * (value - mean)
        if len(self.counts) < 2:
            return mean, torch.full_like(mean, torch.inf)
        return mean, (spread / (len(self.counts) - 1) / total).sqrt()


def _effective(variance: Tensor, error: Tensor, floor: Tensor, total: int) -> Tensor:
    """Variance/error^2; where there is no variance but rounding, nothing could be better known."""
    return torch.where(variance > floor, variance / error.square(), float(total))

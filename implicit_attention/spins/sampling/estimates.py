"""Averages over Markov chains with standard errors that autocorrelation cannot fool."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from .ensemble import Ensemble

# Averages are taken over so many independent parts of the run at most, whose scatter gives the errors (to 13 %).
PARTS = 32


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Samples:
    """Averages over the chains and sweeps that were measured, and their standard errors. All are float64.

    The chains are independent. Their averages, in groups if there are more than 32 chains, scatter by the standard
    error, however slowly each chain moves. With fewer than 17 chains every chain is cut into blocks of time as well,
    which have to be long against the autocorrelation time. Where one number is all there is, the error is infinite;
    what too few states show to scatter, such as a spin that hardly ever turns, has an error that is too small.
    Masked sites are zero, and samples with numbers that are not finite NaN.

    Attributes:
        magnetization, magnetization_error: <s_i>, (*batch, N, D).
        correlations, correlations_error: <s_i . s_j>, (*batch, N, N), not connected; R^2 on the diagonal.
        energy, energy_error: <E>, (*batch).
        heat_capacity, heat_capacity_error: beta^2 Var(E), (*batch); None for synchronous dynamics, whose law has no
            temperature.
        delayed_correlations, delayed_correlations_error: D_ij = <s_i(t+1) . s_j(t)> - <s_i> . <s_j>, (*batch, N, N);
            None but for synchronous dynamics.
        entropy_production, entropy_production_error: sigma per step, (*batch); None but for synchronous dynamics.
        exchange_rate: the share of accepted exchanges between neighbouring temperatures, (T - 1, *batch); None but for
            replica exchange.
        effective_samples: (*batch), of how many independent states the scatter is that of: the variance of one state
            over the squared error, for the energy or the magnetization, whichever is less. Near the number of chains,
            the chains have not moved: take more sweeps, or replica exchange.
        num_samples: chains times measured sweeps.
        final: (chains, *batch, N, D), the last states, to look at or to `start` from.
        trajectory: (measurements, chains, *batch, N, D), all measured states, if they were to be kept.
    """

    magnetization: Float[Tensor, "*batch N D"]
    magnetization_error: Float[Tensor, "*batch N D"]
    correlations: Float[Tensor, "*batch N N"]
    correlations_error: Float[Tensor, "*batch N N"]
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
    exchange_rate: Tensor | None = None
    trajectory: Tensor | None = None

    def __repr__(self) -> str:
        shape = tuple(self.magnetization.shape)
        fewest = float(self.effective_samples.min()) if self.effective_samples.numel() else math.nan
        return f"Samples(magnetization {shape}, {self.num_samples} states, {fewest:.3g} effective)"


class Estimates:
    """Running sums over each part of the run, in float64: chains in groups, and measurements in blocks if few.

    Args:
        ensemble: whose chains they are.
        measurements: how many there will be.
        dynamics: whether correlations between successive states are wanted.
        keep: whether to hold all states.
    """

    def __init__(self, ensemble: Ensemble, measurements: int, *, dynamics: bool = False, keep: bool = False) -> None:
        self.ensemble, self.wide, self.dynamics = ensemble, ensemble.wide(), dynamics
        chains = ensemble.chains
        self.group = math.ceil(chains / PARTS)
        groups = math.ceil(chains / self.group)
        self.sizes = [min(self.group, chains - g * self.group) for g in range(groups)]
        self.blocks = max(1, min(PARTS // groups, measurements))
        self.measurements, self.seen = measurements, 0
        self.counts = [0] * (self.blocks * groups)
        self.sums: dict[str, Tensor] = {}
        self.reference: Tensor | None = None
        self.kept: list[Tensor] | None = [] if keep else None

    @torch.no_grad()
    def __call__(self, before: Tensor, after: Tensor) -> None:
        """Add one measurement to the sums."""
        state = after.double()
        coupled = self.wide.coupled(state)
        energy = -((coupled / 2 + self.wide.field) * state).sum((1, 2))
        if self.reference is None:
            # Heat capacities are small differences of large squares, unless energies are counted from a typical one.
            self.reference = energy.mean(-1)
        excess = energy - self.reference[:, None]
        rows = self._rows(state)
        self._add("spin", self._by_group(state))
        self._add("energy", self._by_group(excess))
        self._add("square", self._by_group(excess.square()))
        self._add_products("pair", rows, rows)
        if self.dynamics:
            old = before.double()
            self._add("old", self._by_group(old))
            self._add_products("delayed", rows, self._rows(old))
            flow = (state * self.wide.coupled(old) - old * coupled).sum((1, 2))
            self._add("flow", self._by_group(flow))
        for g, size in enumerate(self.sizes):
            self.counts[self._block() * len(self.sizes) + g] += size
        if self.kept is not None:
            self.kept.append(self.ensemble.public(after))
        self.seen += 1

    @torch.no_grad()
    def samples(self, final: Tensor, *, thermal: bool = True, exchange_rate: Tensor | None = None) -> Samples:
        """What was found; `thermal` says that the chains sample Boltzmann's law."""
        radius = self.ensemble.radius
        spin, spin_error = self._summary(self._means("spin"))
        pair, pair_error = self._summary(self._means("pair"))
        excess, energy_error = self._summary(self._means("energy"))
        # A variance is a nonlinear function of averages: its error is that of its linear part.
        linear = (q - 2 * excess * e for q, e in zip(self._means("square"), self._means("energy"), strict=True))
        shifted, variance_error = self._summary(linear)
        variance = shifted + excess.square()
        assert self.reference is not None
        energy = excess + self.reference
        total = sum(self.counts)
        sites = self.ensemble.exists.sum(-1)
        still = sites - spin.square().sum((-1, -2))
        effective = torch.minimum(
            _effective(variance, energy_error, 1e-20 * energy.square(), total),
            _effective(still, torch.linalg.vector_norm(spin_error, dim=(-1, -2)), 1e-12 * sites, total),
        )
        found = {
            "magnetization": radius * spin,
            "magnetization_error": radius * spin_error,
            "correlations": radius**2 * pair,
            "correlations_error": radius**2 * pair_error,
            "energy": energy,
            "energy_error": energy_error,
            "effective_samples": effective,
        }
        beta = self.ensemble.beta.double()
        if thermal:
            scale = beta.square()
            found |= {"heat_capacity": scale * variance, "heat_capacity_error": scale * variance_error}
        if self.dynamics:
            old, _ = self._summary(self._means("old"))
            parts = zip(self._means("delayed"), self._means("spin"), self._means("old"), strict=True)
            shifted, error = self._summary(d - s @ old.mT - spin @ o.mT for d, s, o in parts)
            found["delayed_correlations"] = radius**2 * (shifted + spin @ old.mT)
            found["delayed_correlations_error"] = radius**2 * error
            flow, error = self._summary(self._means("flow"))
            found |= {"entropy_production": beta * flow, "entropy_production_error": beta * error}
        lost = self.ensemble.lost
        public = {name: self._public(value, lost) for name, value in found.items()}
        trajectory = None if self.kept is None else torch.stack(self.kept)
        return Samples(
            **public,
            num_samples=total,
            final=self.ensemble.public(final),
            exchange_rate=exchange_rate,
            trajectory=trajectory,
        )

    def _public(self, value: Tensor, lost: Tensor) -> Tensor:
        value = value.masked_fill(lost.reshape(-1, *(1,) * (value.ndim - 1)), torch.nan)
        return value.reshape(self.ensemble.batch + value.shape[1:])

    def _block(self) -> int:
        return self.seen * self.blocks // self.measurements

    def _add(self, name: str, values: Tensor) -> None:
        """Add the sums over each group, (groups, ...)."""
        self._current(name, values, values.shape[1:]).add_(values)

    def _add_products(self, name: str, left: Tensor, right: Tensor) -> None:
        """Add sum_k left_ik right_jk for rows (groups, B, N, k), without a tensor for what is added."""
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

    def _by_group(self, values: Tensor) -> Tensor:
        return self._grouped(values).sum(-1).movedim(-1, 0)

    def _rows(self, state: Tensor) -> Tensor:
        """Spins as rows whose products are sums of s_i . s_j over a group, (groups, B, N, D chains)."""
        return self._grouped(state).permute(3, 0, 1, 2, 4).flatten(-2)

    def _means(self, name: str) -> Iterable[Tensor]:
        return (part / count for part, count in zip(self.sums[name], self.counts, strict=True))

    def _summary(self, parts: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """The mean of what the parts say, weighted by their size, and its standard error."""
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

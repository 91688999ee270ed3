"""Many Markov chains of a batch of systems as one tensor, and the schedule that they run by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from ... import _validate
from ...problem import widened
from .._request import nonfinite_sites
from ..system import SpinSystem
from .von_mises_fisher import check_generator, draw_noise, unit_spins

#: Called with (sweeps done, sweeps in all), those of the burn-in included.
Progress = Callable[[int, int], None]


class ScheduleKeywords(TypedDict, total=False):
    """The keyword arguments of a sampler that make its `Schedule`."""

    chains: int
    burn_in: int
    sweeps: int
    thin: int
    keep: bool
    progress: Progress | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The number of chains, and of their sweeps that are left out, made and measured.

    Args:
        chains: independent chains per sample.
        burn_in: sweeps that are left out.
        sweeps: sweeps after these.
        thin: every thin-th of them is measured.
        keep: whether every measured state is stored.
        progress: called after every sweep with (sweeps done, sweeps in all).
    """

    chains: int = 64
    burn_in: int = 200
    sweeps: int = 1000
    thin: int = 1
    keep: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name, low in (("chains", 1), ("burn_in", 0), ("sweeps", 1), ("thin", 1)):
            _validate.check_integer(name, getattr(self, name), low=low)
        remedy = "each `thin`-th sweep is measured"
        _validate.require(self.thin <= self.sweeps, "thin", f"be <= sweeps = {self.sweeps}", self.thin, remedy)
        _validate.check_instance("keep", self.keep, bool, "be a bool")
        required, received = "be None or a function of (sweeps done, sweeps in all)", type(self.progress).__name__
        fits = self.progress is None or callable(self.progress)
        _validate.require(fits, "progress", required, received, kind=TypeError)


class Ensemble:
    """C chains of every sample. States are unit vectors (B, N, D, C), zero where there is no site.

    B numbers the samples. With chains last, sum_j J_ij s_j is one matrix product per sample, for numbers as couplings
    and for matrices, and the spins at one site are D long rows. -E = s.K s/2 + g.s with K = R^2 J and g = R h.

    Args:
        system: the spins to sample.
        chains: C.
    """

    def __init__(self, system: SpinSystem, chains: int) -> None:
        system = widened(system)[0]
        self.radius, self.chains = system.radius, chains
        self.num_sites, self.dim = system.num_sites, system.dim
        #: Rows of the coupling matrix per site.
        self.rows = system.dim if system.block else 1
        self.batch, self.lost = system.batch, nonfinite_sites(system)[0].any(-1).reshape(-1)
        self.beta = system.beta_tensor().detach().expand(self.batch).reshape(-1)
        exists = self.lost.new_ones(()) if system.mask is None else system.mask
        self.exists = exists.expand(*self.batch, self.num_sites).reshape(len(self.beta), self.num_sites)
        self.field = self._flat((self.radius * system.live_field.detach()).nan_to_num(0.0, 0.0, 0.0), 2)[..., None]
        self.graph = system.graph
        if self.graph is not None and self.graph.ends.ndim > 2:
            self.graph = self.graph.at(self._flat(self.graph.ends, 2))
        numbers = system.flat_couplings if self.graph is None else system.live_numbers
        axes = 2 if self.graph is None else 1 + self.graph.directed + 2 * system.block
        #: K, (B, N, N) or (B, N D, N D), or of bonds (B, E) or (B, E, D, D), where they are directed (B, 2, E, ...).
        self.couplings = self._flat((self.radius**2 * numbers.detach()).nan_to_num(0.0, 0.0, 0.0), axes)

    def coupled(self, state: Tensor) -> Tensor:
        """sum_j K_ij s_j, (B, N, D, C)."""
        if self.graph is None:
            return torch.bmm(self.couplings, self.columns(state)).view(state.shape)
        chains = state.permute(3, 0, 1, 2)
        return self.graph.product(self.couplings, chains, block=self.rows > 1).permute(1, 2, 3, 0)

    def columns(self, state: Tensor) -> Tensor:
        """The state as columns for the coupling matrix, a view."""
        return state.view(len(state), self.num_sites * self.rows, self.dim // self.rows * self.chains)

    def start(self, spins: Tensor | None, generator: torch.Generator) -> Tensor:
        """The first state: `spins`, (chains, *batch, N, D), or drawn uniformly."""
        shape = (self.chains, *self.batch, self.num_sites, self.dim)
        if spins is None:
            rest = self.field.new_zeros(*self.field.shape[:3], self.chains)
            return unit_spins(rest, draw_noise(rest, generator), generator) * self.exists[..., None, None]
        _validate.check_float_tensor("start", spins, min_ndim=2)
        on = self.field.device
        _validate.require(spins.device == on, "start", f"be on the device of the field ({on})", spins.device)
        _validate.check_broadcast("start", spins.shape, shape, "(chains, *batch, N, D)")
        spins = spins.detach().to(self.field.dtype).expand(shape).reshape(self.chains, *self.field.shape[:3])
        state = spins.permute(1, 2, 3, 0).contiguous().masked_fill_(~self.exists[..., None, None], 0.0)
        length = torch.linalg.vector_norm(state, dim=2, keepdim=True)
        wrong = self.exists[..., None, None] & ((length - self.radius).abs() > 1e-2 * self.radius)
        if bool(wrong.any()):
            received = f"one of length {float(length[wrong].flatten()[0]):.6g}"
            remedy = "normalise them, or continue from the `final` of earlier samples"
            _validate.refuse("start", f"hold spins of length {self.radius:.6g}", received, remedy)
        self.lost = self.lost | state.isnan().flatten(1).any(1)
        # Spins in half precision have rounded lengths.
        return state.div_(length.masked_fill_(length == 0, 1.0))

    def public(self, state: Tensor) -> Tensor:
        """Spins of length R, (chains, *batch, N, D), NaN where a sample is lost."""
        spins = state.masked_fill(self.lost[:, None, None, None], torch.nan).permute(3, 0, 1, 2)
        return self.radius * spins.reshape(self.chains, *self.batch, self.num_sites, self.dim)

    def _flat(self, tensor: Tensor, axes: int) -> Tensor:
        """The tensor with the batch as one axis before the last `axes`."""
        event = tensor.shape[-axes:]
        return tensor.expand(*self.batch, *event).reshape(len(self.beta), *event)


def check_arguments(system: SpinSystem, generator: torch.Generator) -> None:
    """Raise unless `system` is a SpinSystem, and `generator` a torch.Generator on its device."""
    _validate.check_instance("system", system, SpinSystem, "be a SpinSystem")
    check_generator(generator, system.field)

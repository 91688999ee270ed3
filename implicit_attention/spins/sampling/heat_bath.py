"""Sequential heat bath: each spin in turn drawn from its law in the field of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
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
    exactly (`sample_spins`), whatever D and R are. All chains of all samples take each step together. On `Bonds` a
    sweep visits the colours of the graph in their order, which are such that no two sites of a colour are coupled, and
    draws all sites of a colour at once: time and memory are linear in the bonds. A graph without odd cycles, such as a
    square lattice, has two colours, others have at most one more than the most neighbours of a site.

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
        stays = ~ensemble.exists
        if clamp is not None:
            check_sites("clamp", clamp, system.field, "True = the spin stays")
            _validate.require(start is not None, "start", "be given with `clamp`", None, "it holds the spins that stay")
            stays |= clamp.expand(system.field.shape[:-1]).reshape(stays.shape)
        state = ensemble.start(start, generator)
        estimates = Estimates(ensemble, plan)
        make = in_order if ensemble.graph is None else on_bonds
        return estimates.samples(estimates.run(state, make(ensemble, generator, stays)))


def _check_boltzmann(system: SpinSystem) -> None:
    """Raise unless exp(-beta E) exists and its one-site laws are von Mises-Fisher."""
    system.check_symmetric("heat_bath", wait=True)
    if not system.block:
        return
    couplings = system.live_numbers.detach().nan_to_num(0.0, 0.0, 0.0)
    diagonal = torch.eye(system.num_sites).to(couplings) if system.graph is None else system.graph.own()
    own = (couplings + couplings.mT) / 2 * diagonal[..., None, None]
    mean = own.diagonal(dim1=-2, dim2=-1).mean(-1)
    apart = (own - mean[..., None, None] * torch.eye(system.dim).to(own)).abs()
    fits = float(apart.sum()) <= 64 * torch.finfo(own.dtype).eps * float(own.abs().sum())
    required = "have multiples of the unit matrix on the diagonal for heat_bath"
    received = f"entries that differ from these by up to {float(apart.max()) if apart.numel() else 0.0:.1e}"
    _validate.require(fits, "couplings", required, received, "leave the diagonal out")


def in_order(ensemble: Ensemble, generator: torch.Generator, stays: Tensor) -> Callable[[Tensor], Tensor]:
    """Sweeps over an ensemble in place, site by site; `stays` (B, N) are sites that stay."""
    beta, rows, sites = ensemble.beta[:, None, None], ensemble.rows, ensemble.num_sites
    site = torch.arange(sites * rows, device=beta.device) // rows
    # beta K without couplings of a spin to itself, and beta g.
    couplings = (beta * ensemble.couplings).masked_fill_(site[:, None] == site, 0.0)
    field = beta[..., None] * ensemble.field
    # Read once: which sites stay in all samples, and which in some.
    skipped, mixed = stays.all(0).tolist(), stays.any(0).tolist()

    def sweep(state: Tensor) -> Tensor:
        noise, columns = draw_noise(state, generator), ensemble.columns(state)
        for start in range(0, sites, BLOCK):
            stop = min(start + BLOCK, sites)
            pending = torch.bmm(couplings[:, start * rows : stop * rows], columns)
            pull = pending.view(len(state), stop - start, *state.shape[2:])
            pull += field[:, start:stop]
            for i in range(start, stop):
                if skipped[i]:
                    continue
                old = state[:, i]
                new = unit_spins(pull[:, i - start], noise.site(i), generator)
                if mixed[i]:
                    new = torch.where(stays[:, i, None, None], old, new)
                change = (new - old).view(len(state), rows, pending.shape[-1])
                into = couplings[:, (i + 1) * rows : stop * rows, i * rows : (i + 1) * rows]
                pending[:, (i + 1 - start) * rows :].baddbmm_(into, change)
                state[:, i] = new
        return state

    return sweep


def on_bonds(ensemble: Ensemble, generator: torch.Generator, stays: Tensor) -> Callable[[Tensor], Tensor]:
    """Sweeps over an ensemble on bonds in place, all sites of a colour at once; `stays` (B, N) are sites that stay."""
    assert ensemble.graph is not None
    # All samples are one graph.
    number = torch.arange(stays.numel(), device=stays.device).view_as(stays)
    ends = ensemble.graph.at_ends(number).movedim(1, 0).flatten(1)
    into, source = torch.cat([ends, ends.flip(0)], 1)
    values = ensemble.couplings.reshape(-1, ensemble.rows, ensemble.rows)
    beta = ensemble.beta.repeat_interleave(ensemble.num_sites)[:, None, None]
    values, field = beta[into] * torch.cat([values, values.mT]), beta * ensemble.field.flatten(0, 1)
    colour = colours(ends, stays.numel()).masked_fill_(stays.flatten(), -1)
    parts = []
    for c in torch.unique(colour[colour >= 0]):
        sites, bonds = (colour == c).nonzero()[:, 0], ((colour[into] == c) & (into != source)).nonzero()[:, 0]
        parts.append((sites, field[sites], torch.searchsorted(sites, into[bonds]), source[bonds], values[bonds]))

    def sweep(state: Tensor) -> Tensor:
        spins = state.view(-1, *state.shape[2:])
        for sites, own, place, others, bonds in parts:
            felt = bonds @ spins[others] if ensemble.rows > 1 else bonds * spins[others]
            pull = own.expand(-1, -1, ensemble.chains).index_add(0, place, felt)
            spins[sites] = unit_spins(pull, draw_noise(pull, generator), generator)
        return state

    return sweep


def colours(ends: Int[Tensor, "2 E"], sites: int) -> Int[Tensor, " N"]:
    """Colours 0, 1, ... of sites, (N), such that no bond, (2, E), joins two of one colour; loops do not count.

    Parts of the graph without odd cycles have two. In others the sites come in an order by chance, the same each time,
    and have the first colour that no neighbour before them has: at most one more than the most neighbours.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    i, j = ends[:, ends[0] != ends[1]].cpu()
    # Of two copies of the sites bonds join each to the other: a walk from a site to its own copy is an odd cycle.
    places = torch.cat([i, j]), torch.cat([j, i]) + sites
    twofold = coo_array((torch.ones(2 * len(i)), places), (2 * sites, 2 * sites))
    part, other = torch.from_numpy(connected_components(twofold, directed=False)[1]).view(2, sites)
    colour: Tensor = (part > other).long().masked_fill_(part == other, -1)
    rank = torch.randperm(sites, generator=torch.Generator().manual_seed(0))
    later, last = torch.where(rank[i] < rank[j], i, j), 0
    before = i + j - later
    while bool((colour < 0).any()):
        # Of the sites that can have this colour, those get it that come before their neighbours.
        free = (colour < 0).index_fill_(0, later[colour[before] == last], False)
        colour[free.index_fill(0, later[free[before]], False)] = last
        last += not free.any()
    return colour.to(ends.device)

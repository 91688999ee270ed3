"""Places of the sites of a system, and figures of the couplings between them."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..spins.bonds import Bonds
from ..spins.system import ALL_PAIRS
from .style import BAD, GOOD, Figure, add_bar, hide_ticks, legend_below, new_figure

#: Widths in points: the widest of few lines, the widest of many, and the narrowest that is still seen.
WIDEST, CROWDED, NARROWEST = 4.0, 1.2, 0.25
#: Up to so many sites have their number written into them.
NUMBERED = 40
ALIKE, OPPOSITE = "-", (0, (3, 1.5))


def couplings_figure(
    couplings: Float[Tensor, "N N"] | Float[Tensor, "N N D D"] | Bonds,
    *,
    places: Float[Tensor, "N 2"] | None = None,
    spins: Float[Tensor, "N"] | None = None,
    strongest: int = 400,
    title: str = "Couplings",
) -> Figure:
    """Draw the couplings: sites as circles, pairs as lines, wide where |J_ij| is large, dashed where J_ij < 0.

    A matrix J_ij between vectors counts by its Frobenius norm, with the sign of its trace. Both orders of a pair are
    one line, of (J_ij + J_ji)/2, on which alone an equilibrium depends; the title says so where J is not
    symmetric. Couplings around the ends of a lattice are two stubs. Diagonals are left out.

    Not for states: draw them with `configuration_figure`.

    Args:
        couplings: J, (N, N), a number for each pair, or (N, N, D, D), a matrix for each pair; or the `Bonds` of at
            most 2,048 sites, of which the `couplings` of a system are the values alone.
        places: where the sites are, (N, 2), x to the right and y upwards; default `site_places(couplings)`.
        spins: colours of the sites, from -1 to 1, (N,), with a dashed rim where they are negative; default none.
        strongest: the number of pairs that are drawn at most, the strongest first.
        title: above the graph.

    Raises:
        ValueError: couplings, places or spins of another shape; couplings or places that are not finite; no sites;
            strongest < 1.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import couplings_figure
        >>> chain = torch.diag(torch.ones(3), 1) - torch.diag(0.5 * torch.ones(2), 2)
        >>> figure = couplings_figure(chain + chain.T, title="A frustrated chain")
        >>> [text.get_text() for text in figure.legends[0].texts]
        ['J > 0', 'J < 0', 'widest: |J| = 1']
    """
    _validate.check_integer("strongest", strongest, low=1)
    pairs = _numbers(couplings)
    count = len(pairs)
    lattice = places is None and lattice_columns(pairs) is not None
    places = site_places(pairs) if places is None else places.detach().double().cpu()
    fits = places.shape == (count, 2) and bool(places.isfinite().all())
    _validate.require(fits, "places", f"be finite, of shape ({count}, 2)", f"shape {tuple(places.shape)}")
    if not bool(torch.equal(pairs, pairs.mT)):
        title = f"{title}\ndrawn is (J + J^T)/2 of a J that is not symmetric"
    pairs = (pairs + pairs.mT).triu(1) / 2
    first, second = pairs.nonzero().T
    strength = pairs[first, second]
    if len(strength) > strongest:
        title = f"{title}\nthe {strongest:,} strongest of {len(strength):,} pairs"
    # The strongest last, so that they lie above the others.
    order = strength.abs().argsort()[-strongest:]
    first, second, strength = first[order], second[order], strength[order]

    span = places.amax(0) - places.amin(0)
    wide, high = (min(max(float(side), 1.0) / max(float(span.max()), 1.0) * 5.0, 5.0) for side in span)
    figure = new_figure(max(wide, 3.0) + 0.8, max(high, 1.0) + 1.5, title)
    from matplotlib.collections import LineCollection
    from matplotlib.lines import Line2D

    axes: Any = figure.subplots()
    axes.set_aspect("equal")
    hide_ticks(axes)
    axes.spines[:].set_visible(False)
    lines, owners = _lines(places, first, second, lattice)
    largest = float(strength.abs().max()) if len(strength) else 1.0
    widest = max(CROWDED, WIDEST * min(1.0, math.sqrt(70 / max(len(strength), 1))))
    look = {
        "colors": [GOOD if strength[owner] > 0 else BAD for owner in owners],
        "linestyles": [ALIKE if strength[owner] > 0 else OPPOSITE for owner in owners],
        "linewidths": [NARROWEST + (widest - NARROWEST) * abs(float(strength[o])) / largest for o in owners],
    }
    axes.add_collection(LineCollection(lines, zorder=1, capstyle="butt", **look))
    _draw_sites(figure, axes, places, spins)
    handles = [
        Line2D([], [], color=GOOD, ls=ALIKE, lw=2, label="J > 0"),
        Line2D([], [], color=BAD, ls=OPPOSITE, lw=2, label="J < 0"),
        Line2D([], [], color="0.3", lw=widest, label=f"widest: |J| = {largest:.3g}"),
    ]
    legend_below(figure, handles, 3)
    return figure


def site_places(couplings: Tensor | Bonds) -> Float[Tensor, "N 2"]:
    """Return the places of the sites: a lattice in rows and columns if the couplings make one, else a circle.

    A lattice is an open chain, or sites in reading order in rows of one length, where no site is coupled beyond its
    neighbours to the left, right, above and below, across the ends of rows and columns included.

    Not for positions that are known: pass them to `couplings_figure` as `places`.

    Args:
        couplings: J, (N, N) or (N, N, D, D), or `Bonds`.

    Returns:
        x and y of every site, (N, 2), a lattice with steps of length 1, y upwards.

    Raises:
        ValueError: couplings of another shape or that are not finite.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import site_places
        >>> site_places(torch.diag(torch.ones(3), 1)).tolist()
        [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
        >>> site_places(torch.ones(4, 4)).round().abs().tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    pairs = _numbers(couplings)
    columns, place = lattice_columns(pairs), torch.arange(len(pairs))
    if columns is None:
        # Clockwise from the top; neighbours are about a step of 1 apart.
        angle = math.pi / 2 - 2 * math.pi * place.double() / len(place)
        return max(1.0, len(place) / (2 * math.pi)) * torch.stack([angle.cos(), angle.sin()], -1)
    return torch.stack([place % columns, -(place // columns)], -1).double() + 0.0


def lattice_columns(couplings: Tensor | Bonds) -> int | None:
    """Return in how many columns the couplings make a lattice, as `site_places` says; None if they make none."""
    linked = _numbers(couplings) != 0
    count = len(linked)
    first, second = (linked | linked.mT).triu(1).nonzero().T
    if not len(first):
        # Sites without couplings are drawn as a square.
        return math.ceil(math.sqrt(count))
    shapes = [columns for columns in range(count, 1, -1) if count % columns == 0]
    for columns in sorted(shapes, key=lambda columns: abs(columns - count / columns)):
        x, y = (first % columns - second % columns).abs(), (first // columns - second // columns).abs()
        rows = count // columns
        # A closed chain is drawn as a circle.
        around = rows > 1
        across, along = (x == 1) | (around & (x == columns - 1)), (y == 1) | (around & (y == rows - 1))
        if bool(((across & (y == 0)) | (along & (x == 0))).all()):
            return columns
    return None


def _numbers(couplings: Any) -> Tensor:
    """Return one number for each pair, (N, N), in double precision."""
    required = "be a tensor (N, N) or (N, N, D, D) with N at least 1"
    remedy = "pass system.couplings, of one sample if they differ"
    if isinstance(couplings, Bonds):
        most, sites = f"have at most {ALL_PAIRS:,} sites", couplings.num_sites
        _validate.require(sites <= ALL_PAIRS, "couplings", most, f"Bonds of {sites:,} sites", "draw fewer")
        couplings = couplings.dense()
    _validate.check_instance("couplings", couplings, Tensor, required, remedy)
    shape = tuple(couplings.shape)
    fits = len(shape) in (2, 4) and shape[0] == shape[1] > 0 and (len(shape) == 2 or shape[2] == shape[3])
    _validate.require(fits, "couplings", required, f"shape {shape}", "of several samples draw one")
    pairs: Tensor = couplings.detach().double().cpu()
    _validate.require(bool(pairs.isfinite().all()), "couplings", "be finite", "NaN or infinite couplings")
    if pairs.ndim == 2:
        return pairs
    trace = pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(trace < 0, -1.0, 1.0) * pairs.square().sum((-2, -1)).sqrt()


def _lines(places: Tensor, first: Tensor, second: Tensor, lattice: bool) -> tuple[list[Any], list[int]]:
    """Return the lines, and the pair that each belongs to; a pair across the ends of a lattice has two stubs."""
    lines: list[Any] = []
    owners: list[int] = []
    for pair, (a, b) in enumerate(zip(places[first], places[second], strict=True)):
        step, parts = b - a, [(a, b)]
        # Couplings of a lattice reach further than one step only around its ends.
        if lattice and float(step.norm()) > 1:
            out = 0.6 * step / step.norm()
            parts = [(a, a - out), (b, b + out)]
        lines += [(start.tolist(), end.tolist()) for start, end in parts]
        owners += [pair] * len(parts)
    return lines, owners


def _draw_sites(figure: Figure, axes: Any, places: Tensor, spins: Tensor | None) -> None:
    """Draw circles with numbers, coloured by the spins."""
    count = len(places)
    numbered = count <= NUMBERED
    look: dict[str, Any] = {"s": 190 if numbered else max(8, 4000 / count), "edgecolors": "k", "linewidths": 0.8}
    tone = torch.zeros(count, dtype=torch.float64)
    if spins is None:
        axes.scatter(*places.T.numpy(), c="w", zorder=2, **look)
    else:
        required = f"have one number for each of the {count} sites"
        _validate.require(spins.numel() == count, "spins", required, f"shape {tuple(spins.shape)}")
        tone = spins.detach().double().cpu().flatten()
        look["linestyles"] = [OPPOSITE if value < 0 else ALIKE for value in tone]
        colours = {"cmap": "RdBu_r", "vmin": -1, "vmax": 1, "plotnonfinite": True}
        drawn = axes.scatter(*places.T.numpy(), c=tone.numpy(), zorder=2, **colours, **look)
        add_bar(figure, drawn, "spin", ax=axes, shrink=0.6, aspect=25)
    for index, (x, y) in enumerate(places.tolist() if numbered else ()):
        color = "w" if abs(float(tone[index])) > 0.6 else "k"
        axes.text(x, y, str(index), ha="center", va="center_baseline", fontsize=7, color=color, zorder=3)
    # Room for half a circle, and for the stubs of a lattice that is closed.
    axes.set_xlim(float(places[:, 0].min()) - 0.75, float(places[:, 0].max()) + 0.75)
    axes.set_ylim(float(places[:, 1].min()) - 0.75, float(places[:, 1].max()) + 0.75)

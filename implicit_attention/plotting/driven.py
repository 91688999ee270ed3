"""Spins in a field that changes: what drives them, how they follow, and what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, Figure, finish, new_figure

if TYPE_CHECKING:
    from ..spins import DrivenPath

#: So many sites have a line of their own.
SITES = len(COLORS) - 1


def driven_figure(path: DrivenPath, *, sample: int = 0, title: str = "Driven spins") -> Figure:
    """Draw field and magnetizations over time, the parts of entropy production, and the distance from stationary.

    Of vectors the component is drawn along the axis on which fields and magnetizations vary most. Lines have a gap
    where there is no number. A path without stationary states has no parts and no fourth panel.

    Not for one state of many spins: use `configuration_figure`.

    Args:
        path: the result of `drive`.
        sample: its number, counted over all axes of the batch.
        title: above the panels.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import driven_figure
        >>> from implicit_attention.spins import KineticPlefka, drive
        >>> fields = torch.cos(0.5 * torch.arange(9.0))[:, None, None].expand(9, 2, 1)
        >>> path = drive(KineticPlefka(), torch.tensor([[0.0, 0.5], [-0.2, 0.0]]), fields)
        >>> [axes.get_ylabel() for axes in driven_figure(path).axes[:3]]
        ['field h', 'magnetization m', 'entropy production per step']
    """
    fields, states = (_sample(x, 2, sample) for x in (path.fields, path.states))
    steps, sites, dim = fields.shape
    times, along = torch.arange(1, steps + 1), ""
    if dim > 1:
        axis = _axis(torch.cat((fields.flatten(0, 1), states.flatten(0, 1))))
        fields, states, along = (fields @ axis)[..., None], (states @ axis)[..., None], ", along the main axis"
    if sites > SITES:
        title = f"{title}\nthe first {SITES} of {sites} sites"
    figure = new_figure(8.2, 5.4, title)
    grid: Any = figure.subplots(2, 2, sharex=True)
    drive, follow, cost, distance = grid.flat
    for site in range(min(sites, SITES)):
        look = {"color": COLORS[site], "lw": 1.2, "label": f"site {site + 1}"}
        drive.plot(times.numpy(), fields[:, site, 0].numpy(), drawstyle="steps-mid", **look)
        follow.plot(torch.arange(steps + 1).numpy(), states[:, site, 0].numpy(), marker=".", ms=3, **look)
    parts = {
        "sigma, all": (path.entropy_production, {"color": "0.0", "lw": 2.5, "alpha": 0.35}),
        "housekeeping": (path.housekeeping, {"color": COLORS[0], "lw": 1.4}),
        "field change": (path.field_change, {"color": COLORS[1], "lw": 1.4, "ls": "--"}),
    }
    for name, (values, look) in parts.items():
        if values is not None:
            cost.plot(times.numpy(), _sample(values, 0, sample).numpy(), marker=".", ms=3, label=name, **look)
    for axes in (drive, follow, cost):
        _name(axes, axes.get_legend_handles_labels()[0])
    if path.mismatch is None or path.relaxation_time is None:
        distance.set_axis_off()
    else:
        other = distance.twinx()
        mismatch = _sample(path.mismatch, 0, sample)
        relaxation = _sample(path.relaxation_time, 0, sample)
        relaxation = relaxation.masked_fill(~relaxation.isfinite(), torch.nan)
        lines = distance.plot(times.numpy(), mismatch.numpy(), marker=".", ms=3, color=COLORS[2], label="mismatch")
        look = {"color": COLORS[3], "ls": "--", "label": "relaxation time"}
        lines += other.plot(times.numpy(), relaxation.numpy(), marker=".", ms=3, **look)
        other.set_ylabel("relaxation time, steps", fontsize=8)
        known = relaxation[relaxation.isfinite()]
        other.set_ylim(0, 1.15 * float(known.max()) if len(known) and float(known.max()) > 0 else 1)
        distance.set_ylim(bottom=min(0.0, distance.get_ylim()[0]))
        other.tick_params(labelsize=7)
        _name(distance, lines)
    finish(drive, y=f"field h{along}", grid=0.3)
    finish(follow, y=f"magnetization m{along}", grid=0.3)
    finish(cost, "step", "entropy production per step", grid=0.3)
    finish(distance, "step", "mismatch to the stationary state", grid=0.3)
    return figure


def _name(axes: Any, lines: list[Any]) -> None:
    """Name lines above the panel, where names hide nothing."""
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": len(lines), "handlelength": 1.4}
    labels = [line.get_label() for line in lines]
    axes.legend(lines, labels, fontsize=6, frameon=False, columnspacing=1.0, **place)


def _sample(x: Tensor, own: int, sample: int) -> Tensor:
    """Return one sample of `x` with the axes (T, *batch) and `own` more, in double precision."""
    batch = x.shape[1 : x.ndim - own]
    count = batch.numel()
    _validate.require(0 <= sample < count, "sample", f"be in [0, {count})", sample, "count over all axes of the batch")
    return x.detach().double().cpu().reshape(len(x), count, *x.shape[x.ndim - own :])[:, sample]


def _axis(vectors: Tensor) -> Tensor:
    """The unit vector along which vectors (K, D) have the largest sum of squares; its largest entry is positive."""
    known = vectors.nan_to_num()
    axis: Tensor = torch.linalg.eigh(known.mT @ known).eigenvectors[:, -1]
    return axis * axis[axis.abs().argmax()].sign()

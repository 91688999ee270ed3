"""Figures of risk against coverage: how many answers are wrong among those that a model is surest of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, DASHES, Figure, finish, new_figure


def risk_figure(curves: Mapping[str, tuple[Tensor, Tensor]], *, title: str = "Risk against coverage") -> Figure:
    """Draw the share of wrong answers among those that are kept, for each share that is kept, the surest first.

    Not for shares at one threshold: `training.calibration_table` prints them with their intervals.

    Args:
        curves: by the name of the set, coverage and risk, (n,) each, as `Calibration.risk` returns them.
        title: above the curves.

    Raises:
        ValueError: no curves; numbers outside of [0, 1]; not as many risks as coverages.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import risk_figure
        >>> coverage = torch.tensor([0.25, 0.5, 0.75, 1.0])
        >>> figure = risk_figure({"9 x 9": (coverage, torch.tensor([0.0, 0.0, 0.0, 0.25]))})
        >>> figure.axes[0].get_xlabel()
        'answers that are kept, in %'
    """
    _validate.require(len(curves) > 0, "curves", "hold at least one curve", "none")
    figure = new_figure(5.6, 3.6, title, fontsize=10)
    axes: Any = figure.subplots()
    for number, (name, (coverage, risk)) in enumerate(curves.items()):
        pair = [torch.as_tensor(t).detach().double().cpu() for t in (coverage, risk)]
        fits = pair[0].ndim == 1 and pair[0].shape == pair[1].shape and pair[0].numel() > 0
        received = f"shapes {tuple(pair[0].shape)} and {tuple(pair[1].shape)}"
        _validate.require(fits, f"curves[{name!r}]", "be coverage and risk, (n,) each", received)
        inside = all(bool(((t >= 0) & (t <= 1)).all()) for t in pair)
        _validate.require(inside, f"curves[{name!r}]", "hold numbers in [0, 1]", "others")
        style = DASHES[number // len(COLORS) % len(DASHES)]
        axes.plot(*(100 * t for t in pair), style, color=COLORS[number % len(COLORS)], lw=1.6, label=name)
    axes.set_xlim(0, 100)
    # A line at 0 is to be seen, whether the others are at 1 or at 80.
    axes.set_ylim(-0.02 * axes.get_ylim()[1], max(axes.get_ylim()[1], 1.0))
    finish(axes, "answers that are kept, in %", "wrong among them, in %", frame=False)
    # Beside the curves, which may run anywhere.
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure

"""Figures of the hidden parts of images, how they were filled in, and energies on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .style import COLORS, Figure, finish, hide_ticks, new_figure

#: The colour of hidden pixels: no grey of a digit, and rare in photographs.
HIDDEN = (0.80, 0.47, 0.65)


def reconstruction_figure(
    columns: Sequence[tuple[str, Tensor]], hidden: Tensor, *, title: str = "Hidden patches, filled in"
) -> Figure:
    """Draw a row of pictures per image, a column per stage: the visible pixels, the answers of a model, the truth.

    Not for states without pixels: use `retrieval_figure`.

    Args:
        columns: (heading, images (count, C, H, W)), C = 1 or 3, pixels in [0, 1]; others are clipped.
        hidden: (count, 1, H, W) bool; these pixels are blank in the first column.
        title: above the pictures.

    Raises:
        ValueError: no columns, or shapes that do not fit.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import reconstruction_figure
        >>> images, hidden = torch.rand(2, 1, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.bool)
        >>> figure = reconstruction_figure([("given", images), ("truth", images)], hidden)
        >>> [axes.get_title() for axes in figure.axes]
        ['given', 'truth', '', '']
    """
    _validate.require(len(columns) > 0, "columns", "hold at least one column", "none")
    shape = columns[0][1].shape
    known = len(shape) == 4 and shape[1] in (1, 3)
    _validate.require(known, "columns", "have images (count, C, H, W) with C = 1 or 3", tuple(shape))
    for heading, images in columns:
        received = f"{tuple(images.shape)} in {heading}"
        _validate.require(images.shape == shape, "columns", f"have images of shape {tuple(shape)}", received)
    count, _, height, width = shape
    expected = (count, 1, height, width)
    _validate.require(tuple(hidden.shape) == expected, "hidden", f"have shape {expected}", tuple(hidden.shape))
    figure = new_figure(1.3 * max(len(columns), 2), 0.7 + 1.25 * max(count, 1), title)
    if count == 0:
        return figure
    grid: Any = figure.subplots(count, len(columns), squeeze=False)
    blank = torch.tensor(HIDDEN)[:, None, None]
    for index, (heading, images) in enumerate(columns):
        shown = images.detach().float().cpu().nan_to_num().clamp(0, 1)
        if shape[1] == 1:
            # Digits are ink on paper.
            shown = 1 - shown.expand(-1, 3, -1, -1)
        if index == 0:
            shown = torch.where(hidden.cpu(), blank, shown)
        for axes, image in zip(grid[:, index], shown, strict=True):
            axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            hide_ticks(axes)
        grid[0, index].set_title(heading, fontsize=7)
    return figure


def energies_figure(panels: Mapping[str, Tensor], *, title: str = "Energy on the way") -> Figure:
    """Draw energies of several samples, a panel per dynamics, a line per sample.

    Not for residuals: use `convergence_figure`.

    Args:
        panels: by name, energies (steps + 1, samples); a NaN is not drawn.
        title: above the panels.

    Raises:
        ValueError: no panels, or energies without the two axes.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import energies_figure
        >>> figure = energies_figure({"published": -torch.arange(13.0)[:, None].expand(13, 3)})
        >>> len(figure.axes[0].lines), figure.axes[0].get_title()
        (3, 'published')
    """
    _validate.require(len(panels) > 0, "panels", "hold at least one panel", "none")
    for name, energies in panels.items():
        received = f"{tuple(energies.shape)} in {name}"
        _validate.require(energies.ndim == 2, "panels", "have energies (steps + 1, samples)", received)
    figure = new_figure(3.6 * len(panels), 3.0, title)
    for axes, (name, energies) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for index, line in enumerate(energies.detach().double().cpu().T):
            axes.plot(line.numpy(), color=COLORS[index % len(COLORS)], lw=1.2, marker="o", ms=2)
        axes.set_title(name, fontsize=8)
        finish(axes, "evaluation", "energy")
    return figure

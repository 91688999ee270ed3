"""Figures of the parts of the answer of spins in a stack of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import _validate
from .style import COLORS, Figure, add_legend, finish, new_figure

if TYPE_CHECKING:
    from ..spins import Decomposition

#: The parts of a `Decomposition`, and their counterparts in a transformer.
PARTS = {
    "field": "own field (residual)",
    "coupling": "couplings (token mixing)",
    "onsager": "self-correction (Onsager)",
    "coupling_function": "J(h) (feed-forward)",
}


def decomposition_figure(
    blocks: Sequence[Decomposition], *, names: Sequence[str] = (), title: str = "Parts of the magnetizations"
) -> Figure:
    """Draw the sizes of the four parts of m = -dF/dh, a group of bars for every block; their sum is the black line.

    A bar is sqrt(<|part_i|^2>) over samples, heads and sites, sites with a NaN left out. Parts are vectors, and may
    cancel: the lengths do not add up to that of the sum.

    Not for the magnetizations themselves: draw them with `configuration_figure`.

    Args:
        blocks: such as `SpinTransformer.decompose(x)`, or one `Decomposition` in a list.
        names: of the blocks, default 1, 2, ...
        title: above the bars.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import SpinTransformer
        >>> from implicit_attention.plotting import decomposition_figure
        >>> parts = SpinTransformer(16, heads=4, blocks=3).decompose(torch.randn(2, 5, 16))
        >>> figure = decomposition_figure(parts)
        >>> [text.get_text() for text in figure.axes[0].get_xticklabels()]
        ['1', '2', '3']
    """
    _validate.require(len(blocks) > 0, "blocks", "hold at least one Decomposition", "none", "pass [parts] for one")
    count = len(blocks)
    names = list(names) or [str(index + 1) for index in range(count)]
    _validate.require(len(names) == count, "names", f"have one entry for each of the {count} blocks", len(names))
    figure = new_figure(2.6 + 1.1 * max(count, 2), 3.2, title)
    axes = figure.subplots()
    width = 0.8 / len(PARTS)
    for place, (part, label) in enumerate(PARTS.items()):
        at = [index + (place - (len(PARTS) - 1) / 2) * width for index in range(count)]
        axes.bar(at, [_size(getattr(block, part)) for block in blocks], width, color=COLORS[place], label=label)
    for index, block in enumerate(blocks):
        line = axes.hlines(_size(block.total), index - 0.45, index + 0.45, color="black", lw=1.5)
        if index == 0:
            line.set_label("sum, m")
    axes.set_xticks(range(count), names)
    finish(axes, "block", "root mean square length", grid=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    add_legend(figure, axes, 7)
    return figure


def _size(part: torch.Tensor) -> float:
    return float(part.detach().double().square().sum(-1).nanmean().sqrt())

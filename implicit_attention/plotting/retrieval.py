"""What was asked of a memory, and what it returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _validate
from .style import BAD, GOOD, hide_ticks, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def retrieval_figure(
    rows: Sequence[tuple[str, Tensor, Tensor | None]], *, columns: Sequence[str] = (), title: str = "Retrieval"
) -> Figure:
    """A grid of patterns: one row per kind of state, one column per query.

    Not for states of coupled spins, such as a batch (count, N, D): use `configuration_figure`.

    Args:
        rows: (name, states (count, D), success (count,) bool or None). Where success is given, the frame and a mark
            say for every state whether it is the stored pattern. States are images if D is a square, curves if not.
        columns: a heading for every query.
        title: above the grid.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import retrieval_figure
        >>> queries, answers = torch.zeros(2, 9), torch.ones(2, 9)
        >>> success = torch.tensor([True, False])
        >>> figure = retrieval_figure([("query", queries, None), ("answer", answers, success)], columns=["a", "b"])
        >>> [axes.get_xlabel() for axes in figure.axes]
        ['', '', '✓ retrieved', '✗ not']
    """
    _validate.require(len(rows) > 0, "rows", "hold at least one row", "none")
    count, dim = rows[0][1].shape
    for name, states, success in rows:
        for what, tensor, shape in (("states", states, (count, dim)), ("success", success, (count,))):
            if tensor is not None:
                received = f"{tuple(tensor.shape)} in {name}"
                _validate.require(tensor.shape == shape, "rows", f"have {what} of shape {shape}", received)
    side = math.isqrt(dim)
    image = side * side == dim and side > 1
    finite = [s[s.isfinite()] for _, s, _ in (rows[-1], *rows)]
    if not image:  # curves should stay inside their frames
        finite = [torch.cat(finite)]
    low, high = next(((float(f.min()), float(f.max())) for f in finite if f.numel()), (0.0, 1.0))
    figure = new_figure(1.4 + 1.0 * max(count, 5), 1.0 + 1.12 * len(rows), title)
    if count == 0:
        return figure
    grid: Any = figure.subplots(len(rows), count, squeeze=False)
    for axes_row, (name, states, success) in zip(grid, rows, strict=True):
        for index, axes in enumerate(axes_row):
            state = states[index].detach().float().cpu().numpy()
            if image:
                axes.imshow(state.reshape(side, side), cmap="gray_r", vmin=low, vmax=high)
            else:
                axes.plot(state, color="0.25", lw=0.8)
                margin = 0.1 * (high - low) or 1.0
                axes.set_ylim(low - margin, high + margin)
            hide_ticks(axes)
            if success is not None:
                _mark(axes, bool(success[index]))
        axes_row[0].set_ylabel(name, fontsize=9)
    for axes, heading in zip(grid[0], columns, strict=False):
        axes.set_title(heading, fontsize=7)
    return figure


def _mark(axes: Any, good: bool) -> None:
    """A coloured frame, and below it a tick or a cross with a word, so that colour is not needed."""
    color = GOOD if good else BAD
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.0, linestyle="-" if good else (0, (2, 1)))
    axes.set_xlabel("✓ retrieved" if good else "✗ not", fontsize=7, color=color, labelpad=2)

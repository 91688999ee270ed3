"""Figures of retrieval: queries of a memory, its answers, and how often these are right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .style import BAD, COLORS, DASHES, GOOD, MARKERS, Figure, finish, hide_ticks, new_figure


def retrieval_figure(
    rows: Sequence[tuple[str, Tensor, Tensor | None]], *, columns: Sequence[str] = (), title: str = "Retrieval"
) -> Figure:
    """Draw a grid of patterns: one row per kind of state, one column per query.

    Not for states of coupled spins, such as a batch (count, N, D): use `configuration_figure`.

    Args:
        rows: (name, states (count, D), success (count,) bool or None). Where success is given, the frame and a mark
            say for every state whether it is the stored pattern. States are images if D is a square, curves if not.
        columns: a heading for every query.
        title: above the grid.

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
    if not image:  # so that curves stay inside their frames
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
    """Colour the frame, and write a tick or a cross with a word below it, so that colour is not needed."""
    color = GOOD if good else BAD
    for spine in axes.spines.values():
        spine.set(color=color, linewidth=2.0, linestyle="-" if good else (0, (2, 1)))
    axes.set_xlabel("✓ retrieved" if good else "✗ not", fontsize=7, color=color, labelpad=2)


#: Dashes of the horizontal lines, of which two may lie on each other.
LEVEL_DASHES = ((0, (6, 2)), (0, (1, 1.5)), (3, (3, 5)))


def rates_figure(
    betas: Tensor,
    curves: Mapping[str, Mapping[str, Tensor]],
    levels: Mapping[str, Mapping[str, Tensor]],
    *,
    title: str = "Retrieval against inverse temperature",
) -> Figure:
    """Draw the retrieval rate against beta: a panel per task, a curve per method, a star at its own best beta.

    Not for one temperature: print the rates, or draw the states with `retrieval_figure`.

    Args:
        betas: (K,), rising, > 0.
        curves: by task, then by method, rates (K, draws) in [0, 1]; drawn are the mean and, as a band, the standard
            deviation over the draws.
        levels: by task, then by method, rates (draws,) of methods without beta: horizontal lines.
        title: above the panels.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import rates_figure
        >>> betas = torch.tensor([1.0, 2.0, 4.0])
        >>> rising = torch.tensor([[0.2, 0.4], [0.6, 0.6], [0.9, 0.7]])
        >>> figure = rates_figure(betas, {"noisy": {"one step": rising}}, {"noisy": {"nearest": torch.ones(2)}})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['1.000  nearest', '0.800  one step, beta 4']
    """
    _validate.require(len(curves) > 0, "curves", "hold at least one task", "none")
    figure = new_figure(0.6 + 4.8 * len(curves), 4.8, title, fontsize=11)
    grid: Any = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    x = betas.detach().double().cpu()
    for column, (axes, (task, methods)) in enumerate(zip(grid, curves.items(), strict=True)):
        drawn: list[tuple[float, str, Any]] = []
        for index, (name, rates) in enumerate(methods.items()):
            shape, received = f"(K, draws) with K = {len(x)}", (name, tuple(rates.shape))
            _validate.require(rates.ndim == 2 and len(rates) == len(x), "curves", f"have shape {shape}", received)
            rates = rates.detach().double().cpu()
            mean, spread = rates.mean(-1), rates.std(-1, correction=0)
            color, top = COLORS[index % len(COLORS)], int(mean.argmax())
            look = {"color": color, "ls": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
            axes.fill_between(x.numpy(), (mean - spread).numpy(), (mean + spread).numpy(), color=color, alpha=0.1, lw=0)
            (line,) = axes.plot(x.numpy(), mean.numpy(), lw=1.8, ms=3.5, **look)
            axes.plot(x[top], mean[top], ls="", marker="*", ms=14, color=color, mec="white", mew=0.8, zorder=5)
            drawn.append((float(mean[top]), f"{float(mean[top]):.3f}  {name}, beta {float(x[top]):g}", line))
        for index, (name, rates) in enumerate(levels.get(task, {}).items(), len(methods)):
            level = float(rates.double().mean())
            color, dashes = COLORS[index % len(COLORS)], LEVEL_DASHES[index % len(LEVEL_DASHES)]
            line = axes.axhline(level, lw=1.3, zorder=1, color=color, ls=dashes)
            drawn.append((level, f"{level:.3f}  {name}", line))
        drawn.sort(key=lambda entry: -entry[0])
        handles, names = [line for _, _, line in drawn], [text for _, text, _ in drawn]
        axes.legend(handles, names, title="best rate", fontsize=8, title_fontsize=8, alignment="left", handlelength=3.2)
        axes.set_title(f"{task} queries", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x.tolist(), [f"{value:g}" for value in x.tolist()])
        axes.set_ylim(-0.02, 1.03)
        y = "" if column else "retrieval rate"
        finish(axes, "inverse temperature beta", y, size=9, frame=False)
    return figure

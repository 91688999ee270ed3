"""Figures of the length of one step of bare self-attention on Gaussian tokens, over dimension and scale."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .style import Figure, legend_below, new_figure

#: Powers of 10 below this, which float32 rounds away, are one colour.
FLOOR = -8


def step_norms(
    dims: Sequence[int], beta_scales: Sequence[float], *, tokens: int = 32, draws: int = 40, seed: int = 0
) -> Float[Tensor, "scales dims draws"]:
    """|x - softmax(s x x^T / sqrt d) x|, by how much one step of bare self-attention moves standard normal tokens.

    The norm is Frobenius' over all tokens, in float64.

    Not for tokens of a model, which are not normal: call `LogSumExp(x, beta).mean(x)` on yours.

    Args:
        dims: dimensions d, >= 1.
        beta_scales: scales s > 0, in units of 1/sqrt d.
        tokens: number of tokens of each draw.
        draws: independent draws of tokens, the same for all scales of a dimension.
        seed: of the draws.

    Returns:
        (len(beta_scales), len(dims), draws).

    Raises:
        TypeError, ValueError: no dimension or scale; numbers out of range.

    Examples:
        >>> from implicit_attention.plotting import step_norms
        >>> norms = step_norms([2, 64], [1.0], draws=3)
        >>> norms.shape, bool((norms[0, 0] > norms[0, 1]).all())
        (torch.Size([1, 2, 3]), True)
    """
    dims = [_validate.check_integer("dims", dim, low=1) for dim in dims]
    scales = [_validate.check_number("beta_scales", scale, low=0.0, open_low=True) for scale in beta_scales]
    _validate.require(bool(dims), "dims", "hold at least one dimension", "none")
    _validate.require(bool(scales), "beta_scales", "hold at least one scale", "none")
    tokens = _validate.check_integer("tokens", tokens, low=1)
    draws = _validate.check_integer("draws", draws, low=1)
    norms = torch.empty(len(scales), len(dims), draws, dtype=torch.float64)
    for column, dim in enumerate(dims):
        # A dimension has its own draws, whatever the others are.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + dim)
        x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
        scores = x @ x.mT / dim**0.5
        for row, scale in enumerate(scales):
            norms[row, column] = (x - (scale * scores).softmax(-1) @ x).flatten(1).norm(dim=-1)
    return norms


def step_norm_figure(
    dims: Sequence[int],
    beta_scales: Sequence[float],
    *,
    norms: Float[Tensor, "scales dims draws"] | None = None,
    title: str = "How far one step of bare self-attention moves Gaussian tokens",
) -> Figure:
    """Draw the median of `step_norms` over dimension and scale, as contours a factor of 10 apart.

    Not for two or three numbers: print `step_norms(...).median(-1)`.

    Args:
        dims: dimensions d, ascending, at least two.
        beta_scales: scales s, ascending, at least two.
        norms: of `step_norms(dims, beta_scales)`; None computes them.
        title: above the picture.

    Raises:
        TypeError, ValueError: fewer than two dimensions or scales, or not ascending; norms of another shape or NaN.

    Examples:
        >>> from implicit_attention.plotting import step_norm_figure, step_norms
        >>> dims, scales = [2, 8, 32], [0.5, 1.0]
        >>> figure = step_norm_figure(dims, scales, norms=step_norms(dims, scales, draws=2))
        >>> len(figure.axes)
        2
    """
    for name, numbers in (("dims", dims), ("beta_scales", beta_scales)):
        rising = len(numbers) >= 2 and all(a < b for a, b in itertools.pairwise(numbers))
        _validate.require(rising, name, "hold at least two numbers, ascending", list(numbers))
    if norms is None:
        norms = step_norms(dims, beta_scales)
    shape = (len(beta_scales), len(dims))
    fits = norms.ndim == 3 and tuple(norms.shape[:2]) == shape and norms.shape[2] > 0
    _validate.require(fits, "norms", f"have the shape {(*shape, 'draws')}", tuple(norms.shape))
    _validate.require(bool(norms.isfinite().all()), "norms", "hold finite numbers", "others")
    figure = new_figure(6.6, 4.6, title, fontsize=10)
    from matplotlib.ticker import LogFormatterMathtext

    axes: Any = figure.subplots()
    middle = norms.detach().double().cpu().median(-1).values.clamp(min=1e-300).log10()
    lowest, highest = max(int(middle.min().floor()), FLOOR), max(int(middle.max().ceil()), FLOOR + 1)
    levels = list(range(lowest, highest + 1))
    field = (list(dims), list(beta_scales), middle.numpy())
    drawn = axes.contourf(*field, levels=levels, cmap="Blues_r", extend="min")
    axes.contour(*field, levels=levels, colors="k", linewidths=0.5, linestyles="-")
    axes.axhline(1.0, color="k", lw=1.4, ls="--", label="$s = 1$, the scale of transformers")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("dimension $d$", fontsize=9)
    axes.set_ylabel(r"scale $s$ (inverse temperature in units of $1/\sqrt{d}$)", fontsize=9)
    form = LogFormatterMathtext()
    bar = figure.colorbar(drawn, ax=axes, ticks=levels, format=lambda power, _: form(10.0**power))
    bar.set_label(r"median of $|x - \mathrm{softmax}(s\, x x^T / \sqrt{d})\, x|$, all tokens", fontsize=9)
    legend_below(figure, axes.get_legend_handles_labels()[0], 1)
    return figure

"""States of more than two dimensions, on the two axes along which keys and paths vary most."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..potentials.masked_keys import in_double
from .style import BAD, Figure, legend_below, new_figure


def principal_figure(
    keys: Float[Tensor, "M D"],
    path: Float[Tensor, "T *N D"],
    *,
    title: str = "Keys and paths on their two principal axes",
) -> Figure:
    """Draw keys and the ways of queries on the two axes along which they vary most, with the part of the variance.

    The axes are the first two right singular vectors of keys and path together, less their mean.

    Not for two dimensions: use `landscape_figure`. Not for distances: what lies across both axes is not seen, and the
    labels say how much that is.

    Args:
        keys: (M, D), the stored patterns.
        path: (T, D) or (T, N, D), the states of one query or of N after every step, such as `Trace.value`.
        title: above the picture.

    Raises:
        TypeError, ValueError: keys or path of another shape, of different widths, empty, or with NaN; D below 2.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.plotting import principal_figure
        >>> keys, queries = torch.eye(8), torch.linspace(-1, 1, 16).view(2, 8)
        >>> trace = solve(AnchoredEnergy(LogSumExp(keys, beta=4.0), queries), queries, trace=True).trace
        >>> principal_figure(keys, trace.value).axes[0].get_xlabel()[:16]
        'principal axis 1'
    """
    _validate.check_float_tensor("keys", keys)
    _validate.require(keys.ndim == 2 and len(keys) > 0, "keys", "have the shape (M, D)", tuple(keys.shape))
    _validate.check_float_tensor("path", path)
    fits = path.ndim in (2, 3) and path.numel() > 0
    _validate.require(fits, "path", "have the shape (T, D) or (T, N, D)", tuple(path.shape))
    width = keys.shape[-1]
    _validate.require(path.shape[-1] == width, "path", f"have the width {width} of `keys`", path.shape[-1])
    _validate.require(width >= 2, "keys", "have at least two dimensions", width)
    for name, points in (("keys", keys), ("path", path)):
        _validate.require(bool(points.isfinite().all()), name, "hold finite numbers", "others")
    stored, ways = in_double(keys).cpu(), in_double(path).cpu()
    ways = ways[:, None] if ways.ndim == 2 else ways
    cloud = torch.cat([stored, ways.flatten(0, 1)])
    middle = cloud.mean(0)
    _, sizes, axes_of = torch.linalg.svd(cloud - middle, full_matrices=False)
    shares = sizes.square() / sizes.square().sum().clamp(min=torch.finfo(sizes.dtype).tiny)
    # A single point spans no axis; any two of the space show it.
    basis = axes_of[:2] if len(axes_of) > 1 else torch.eye(width, dtype=torch.float64)[:2]
    shares = torch.cat([shares, shares.new_zeros(2)])[:2]
    figure = new_figure(6.2, 5.4, title, fontsize=11)
    axes: Any = figure.subplots()
    _draw(axes, (stored - middle) @ basis.T, (ways - middle) @ basis.T)
    x, y = (f"principal axis {i} ({share:.0%} of the variance)" for i, share in enumerate(shares.tolist(), 1))
    axes.set(xlabel=x, ylabel=y)
    axes.set_aspect("equal", adjustable="datalim")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    legend_below(figure, axes.get_legend_handles_labels()[0], 4)
    return figure


def _draw(axes: Any, keys: Tensor, ways: Tensor) -> None:
    axes.plot(*keys.T.numpy(), ls="", marker="o", ms=9, mfc="none", mec="k", mew=1.3, label="stored pattern")
    for index, way in enumerate(ways.transpose(0, 1)):
        axes.plot(*way.T.numpy(), color=BAD, lw=1, marker=".", ms=3, label=None if index else "way of a query")
    look = {"ls": "", "color": BAD, "mec": "w", "mew": 0.6}
    axes.plot(*ways[0].T.numpy(), marker="s", ms=5, label="its start", **look)
    axes.plot(*ways[-1].T.numpy(), marker="D", ms=6, label="its end", **look)

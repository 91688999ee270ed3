"""Two ways down an energy: a fixed number of steps, and the solve for an equilibrium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import _validate
from .style import COLORS, Figure, finish, legend_below, new_figure


def descent_figure(
    published: Mapping[str, tuple[Tensor, Tensor]],
    equilibrium: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    *,
    title: str = "Energy Transformer",
) -> Figure:
    """Draw energies along the steps of `PublishedDynamics` and the solve of `LegendreEnergy`, a column per potential.

    The upper row shows the published energy -Phi(g) of both against the evaluations that they have made, and goes on
    with a dashed line at that of the equilibrium. The lower row shows by how much the energy of the equilibrium, with
    the Legendre term and the field, exceeds its last value. Evaluations have a logarithmic axis.

    Not for residuals of solvers: use `convergence_figure`.

    Args:
        published: by name the steps made, (T,), from 0 on, and the published energies after them, (T,).
        equilibrium: by the same names the evaluations spent, (K,), the published energies and the own ones, (K,) each.
        title: above the panels.

    Raises:
        ValueError: no or other names; courses of another shape, with fewer than two points or numbers that are not
            finite; evaluations below 1 or steps below 0.

    Examples:
        >>> import torch
        >>> from implicit_attention.plotting import descent_figure
        >>> steps, evaluations = torch.arange(5), torch.arange(1, 4)
        >>> energies = torch.tensor([0.0, -2.0, -2.5])
        >>> figure = descent_figure({"memory": (steps, -1.0 * steps)}, {"memory": (evaluations, energies, energies)})
        >>> figure.axes[0].get_title(), figure.axes[1].get_xlabel()
        ('memory', 'evaluations')
    """
    _validate.require(bool(published), "published", "hold at least one course", "none")
    names = f"have the names {sorted(published)} of `published`"
    _validate.require(set(equilibrium) == set(published), "equilibrium", names, sorted(equilibrium))
    figure = new_figure(3.3 * len(published) + 0.4, 4.6, title, fontsize=10)
    grid: Any = figure.subplots(2, len(published), sharex=True, squeeze=False, height_ratios=(1.4, 1))
    for index, ((upper, lower), name) in enumerate(zip(grid.T, published, strict=True)):
        steps, energies = _checked(f"published[{name!r}]", published[name], 2, first=0)
        evaluations, same, own = _checked(f"equilibrium[{name!r}]", equilibrium[name], 3, first=1)
        # k + 1 evaluations have seen the state after k steps.
        upper.plot((steps + 1).numpy(), energies.numpy(), color=COLORS[0], lw=1.8, label="published steps")
        look = {"color": COLORS[1], "lw": 1.8}
        upper.plot(evaluations.numpy(), same.numpy(), label="solve for the equilibrium", **look)
        upper.plot(evaluations[-1:].numpy(), same[-1:].numpy(), ls="", marker="o", ms=5, color=COLORS[1])
        upper.axhline(float(same[-1]), color=COLORS[1], lw=0.9, ls=(0, (4, 3)), zorder=1)
        above = own - own[-1]
        # Rounding may leave 0, which has no logarithm.
        seen = above > 0
        lower.plot(evaluations[seen].numpy(), above[seen].numpy(), **look)
        upper.set_title(name, fontsize=10)
        upper.set_xscale("log")
        lower.set(xscale="log", yscale="log")
        upper.yaxis.set_major_formatter("{x:,.0f}")
        finish(upper, y="" if index else "published energy\nE(g) = -Phi(g)", frame=False)
        finish(lower, "evaluations", "" if index else "E_tot(x) above\nits last value", frame=False)
    legend_below(figure, grid[0, 0].get_legend_handles_labels()[0], 2)
    return figure


def _checked(argument: str, course: tuple[Tensor, ...], parts: int, *, first: int) -> tuple[Tensor, ...]:
    """Return the parts of a course in double precision on the CPU."""
    shapes = [tuple(part.shape) for part in course]
    fits = len(shapes) == parts and len(set(shapes)) == 1 and len(shapes[0]) == 1 and shapes[0][0] >= 2
    _validate.require(fits, argument, f"hold {parts} tensors of one shape (T,), T at least 2", f"shapes {shapes}")
    exact = tuple(part.detach().double().cpu() for part in course)
    _validate.require(all(bool(part.isfinite().all()) for part in exact), argument, "hold finite numbers", "others")
    _validate.require(bool((exact[0] >= first).all()), argument, f"count from {first} on", f"{float(exact[0].min()):g}")
    return exact

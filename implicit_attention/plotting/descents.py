"""Two ways down an energy: a fixed number of steps, and the solve for an equilibrium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import _validate
from .style import COLORS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def descent_figure(
    published: Mapping[str, tuple[Tensor, Tensor]],
    equilibrium: Mapping[str, tuple[Tensor, Tensor, Tensor]],
    *,
    title: str = "Energy Transformer",
) -> Figure:
    """Energies along the steps of `PublishedDynamics` and along the solve of `LegendreEnergy`, a column per potential.

    The upper row shows the published energy -Phi(g) of both against the evaluations that they have made, and goes on
    with a dashed line at that of the equilibrium. The lower row shows by how much the energy of the equilibrium, with
    the Legendre term and the field, exceeds its last value. Evaluations have a logarithmic axis.

    Not for residuals of solvers: use `convergence_figure`.

    Args:
        published: by name the steps made, (T,), from 0 on, and the published energies after them, (T,).
        equilibrium: by the same names the evaluations spent, (K,), the published energies and the own ones, (K,) each.
        title: above the panels.

    Returns:
        A matplotlib `Figure`; save it with `figure.savefig(path)`.

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
    for column, name in zip(grid.T, published, strict=True):
        steps, energies = _checked(f"published[{name!r}]", published[name], 2, first=0)
        evaluations, same, own = _checked(f"equilibrium[{name!r}]", equilibrium[name], 3, first=1)
        upper, lower = column
        # The state after k steps is known to k + 1 evaluations.
        upper.plot((steps + 1).numpy(), energies.numpy(), color=COLORS[0], lw=1.8, label="published steps")
        look = {"color": COLORS[1], "lw": 1.8}
        upper.plot(evaluations.numpy(), same.numpy(), label="solve for the equilibrium", **look)
        upper.plot(evaluations[-1:].numpy(), same[-1:].numpy(), ls="", marker="o", ms=5, color=COLORS[1])
        upper.axhline(float(same[-1]), color=COLORS[1], lw=0.9, ls=(0, (4, 3)), zorder=1)
        above = own - own[-1]
        # What rounding leaves of it has no logarithm.
        seen = above > 0
        lower.plot(evaluations[seen].numpy(), above[seen].numpy(), **look)
        lower.set_yscale("log")
        upper.set_title(name, fontsize=10)
        lower.set_xlabel("evaluations", fontsize=8)
        upper.yaxis.set_major_formatter("{x:,.0f}")
        for axes in column:
            axes.set_xscale("log")
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylabel("published energy\nE(g) = -Phi(g)", fontsize=8)
    grid[1, 0].set_ylabel("E_tot(x) above\nits last value", fontsize=8)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    return figure


def _checked(argument: str, course: tuple[Tensor, ...], parts: int, *, first: int) -> tuple[Tensor, ...]:
    """The parts of a course, as double precision on the CPU."""
    shapes = [tuple(part.shape) for part in course]
    fits = len(shapes) == parts and len(set(shapes)) == 1 and len(shapes[0]) == 1 and shapes[0][0] >= 2
    _validate.require(fits, argument, f"hold {parts} tensors of one shape (T,), T at least 2", f"shapes {shapes}")
    found = tuple(part.detach().double().cpu() for part in course)
    _validate.require(all(bool(part.isfinite().all()) for part in found), argument, "hold finite numbers", "others")
    _validate.require(bool((found[0] >= first).all()), argument, f"count from {first} on", f"{float(found[0].min()):g}")
    return found

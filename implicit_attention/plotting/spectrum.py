"""Eigenvalues of the Jacobian of a map at its fixed points."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import exact_precision
from ..problem import Problem, widened
from .style import BAD, GOOD, Figure, finish, new_figure

#: The most entries of one problem, whose Jacobian is computed column by column.
LARGEST = 512
#: Imaginary parts below this share of the largest modulus count as rounding.
ROUNDING = 1e-5


def spectrum_figure(
    problem: Problem, states: Float[Tensor, "*lead_event"], *, title: str = "Eigenvalues of df/dz"
) -> Figure:
    """All eigenvalues of df/dz at some states, and where |eigenvalue| = 1: inside, plain iteration converges near them.

    Where there are complex eigenvalues, they are points of the plane beside the unit circle. Real ones, as an energy
    without a metric has, are in lines, a line for each problem, the largest modulus at the top. Crosses mark those of
    modulus 1 or more, and a line below the title counts the problems that have any.

    Not for problems of many entries: `diagnostics.spectral_radius` estimates the largest modulus without the matrix.

    Args:
        problem: any problem, of at most 512 entries.
        states: (*lead, *event), such as `solution.value`; problems that are not finite there are left out.
        title: above the axes.

    Raises:
        TypeError: `problem` is no problem.
        ValueError: states that do not fit, or with more than 512 entries.

    Examples:
        >>> import torch
        >>> from implicit_attention import AnchoredEnergy, LogSumExp, solve
        >>> from implicit_attention.plotting import spectrum_figure
        >>> energy = AnchoredEnergy(LogSumExp(torch.eye(4), beta=0.5), field=torch.ones(2, 4), anchor=0.5)
        >>> figure = spectrum_figure(energy, solve(energy, energy.field).value, title="At two fixed points")
        >>> print(figure.get_suptitle())
        At two fixed points
        largest modulus: median 0.0625, at most 0.0625; 1 or more in 0 of 2 problems
    """
    _validate.check_instance("problem", problem, Problem, "be a Problem, such as an energy")
    eigenvalues = _eigenvalues(problem, states)
    finite = eigenvalues.isfinite().all(-1)
    values = eigenvalues[finite]
    moduli = values.abs()
    radius = moduli.amax(-1) if values.numel() else torch.zeros(0)
    if len(radius):
        words = f"largest modulus: median {float(radius.median()):.3g}, at most {float(radius.max()):.3g}"
        title = f"{title}\n{words}; 1 or more in {int((radius >= 1).sum())} of {len(radius)} problems"
    if lost := int((~finite).sum()):
        title = f"{title}\n{lost} of {len(eigenvalues)} problems are not finite"
    largest = float(radius.max()) if len(radius) else 1.0
    flat = values.numel() == 0 or float(values.imag.abs().max()) <= ROUNDING * max(largest, 1e-30)
    figure = new_figure(6.4, 3.6 if flat else 6.0, title)
    axes: Any = figure.subplots()
    if flat:
        height = _draw_lines(axes, radius)[:, None].expand_as(moduli)
        x, y, low = values.real, height, 0.0 if len(radius) == 0 else float(values.real.min())
        axes.set_xlim(min(-0.1, 1.1 * low), 1.1 * max(largest, 1.0))
    else:
        _draw_plane(axes, largest)
        x, y = values.real, values.imag
    inside = moduli < 1
    dot = {"ls": "", "marker": "o", "ms": 4, "color": GOOD, "alpha": 0.6, "mew": 0, "label": "modulus below 1"}
    cross = {"ls": "", "marker": "x", "ms": 6, "color": BAD, "mew": 1.5, "label": "modulus 1 or more"}
    for look, where in ((dot, inside), (cross, ~inside)):
        if bool(where.any()):
            axes.plot(x[where].numpy(), y[where].numpy(), **look)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_plane(axes: Any, largest: float) -> None:
    angle = torch.linspace(0, 2 * torch.pi, 181)
    axes.plot(angle.cos().numpy(), angle.sin().numpy(), color="0.2", lw=1, ls=(0, (4, 2)), label="unit circle")
    for draw in (axes.axhline, axes.axvline):
        draw(0, color="0.8", lw=0.8, zorder=0)
    reach = 1.1 * max(largest, 1.0)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    finish(axes, "real part", "imaginary part", size=9, grid=0)


def _draw_lines(axes: Any, radius: Tensor) -> Tensor:
    """Return the height of each problem's line, from 1 at the bottom."""
    from matplotlib.ticker import MaxNLocator

    place = torch.empty(len(radius), dtype=torch.float64)
    place[radius.argsort()] = torch.arange(1, len(radius) + 1, dtype=torch.float64)
    for number, limit in enumerate((-1, 1)):
        axes.axvline(limit, color="0.2", lw=1, ls=(0, (4, 2)), label="|eigenvalue| = 1" if number else None)
    axes.axvline(0, color="0.8", lw=0.8, zorder=0)
    axes.set_ylim(0, len(radius) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    finish(axes, "eigenvalue (all are real)", "problem, by its largest modulus", size=9, grid=0)
    return place


@torch.no_grad()
def _eigenvalues(problem: Problem, states: Tensor) -> Tensor:
    """Return the eigenvalues of df/dz for each problem, (problems, n), NaN where it is not finite."""
    problem.check_state(states)
    count = states.shape[states.ndim - problem.event_ndim :].numel()
    remedy = "use diagnostics.spectral_radius"
    _validate.require(0 < count <= LARGEST, "states", f"have 1 to {LARGEST} entries for one problem", count, remedy)
    problem, (z,) = widened(problem, states.detach())
    event = z.shape[z.ndim - problem.event_ndim :]
    columns = []
    with exact_precision(z):
        linear = problem.linearize(z)
        for unit in torch.eye(count, dtype=z.dtype, device=z.device):
            columns.append(linear.jvp(unit.reshape(event).expand_as(z).contiguous()).reshape(-1, count))
    jacobian = torch.stack(columns, -1).double().cpu()
    known = jacobian.isfinite().all(-1).all(-1)
    values: Tensor = torch.linalg.eigvals(jacobian.masked_fill(~known[:, None, None], 0.0))
    return values.masked_fill(~known[:, None], torch.nan)

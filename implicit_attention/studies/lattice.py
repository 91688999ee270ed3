"""The magnetization of Ising spins on a square lattice: Onsager's, that of methods and that of a heat bath."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..plotting import phase_figure
from ..spins import Bethe, Bonds, MeanField, SpinSystem, heat_bath, magnetization
from .progress import Listener

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: h/J, in which all but Onsager's are: so small that it only chooses the sign.
FIELD = 1e-4
#: Sweeps that are left out, and made; chains; and the blocks of time whose means scatter, together with the chains.
SWEEPS, CHAINS, BLOCKS = 300, 4, 4
#: What is to be known of these numbers.
NOTES = (
    "the lattice orders at beta J = ln(1 + sqrt 2)/2 = 0.4407, bethe at artanh(1/3) = 0.3466, mean-field at 0.25: both "
    "leave out the loops of the lattice, and are wrong between their transition and that of the lattice",
    "onsager is of an infinite lattice without a field, the others of a torus in a field of 0.0001 J",
    "heat-bath starts with all spins up: near 0.4407 it needs more sweeps than it has, and its error is too small",
)


def onsager(beta: Tensor) -> Tensor:
    """m = (1 - sinh(2 beta J)^-4)^(1/8) for J = 1, 0 where that has no root: Onsager's, see Yang (1952)."""
    return (1 - torch.sinh(2 * beta) ** -4).clamp(min=0.0) ** (1 / 8)


def magnetizations(size: int, progress: Listener, *, seed: int, quick: bool) -> list[dict[str, float]]:
    """Return beta and the magnetizations on size x size sites, with the error of the heat bath's."""
    sites, generator = torch.arange(size**2).reshape(size, size), torch.Generator().manual_seed(seed)
    pairs = torch.cat([torch.stack([sites, sites.roll(-1, axis)], -1).flatten(0, 1) for axis in (0, 1)])
    bonds, up = Bonds(pairs, torch.ones(len(pairs)).double(), size**2), torch.ones(size**2, 1).double()
    betas, rows = torch.linspace(0.21, 0.57, 7 if quick else 19, dtype=torch.float64), []
    sweeps = SWEEPS // 5 if quick else SWEEPS
    plan: Any = {"chains": CHAINS, "burn_in": sweeps, "sweeps": sweeps, "thin": 5, "keep": True}
    for index, beta in enumerate(betas):
        progress.begin(f"beta {beta:.2f}", index, len(betas))
        system = SpinSystem(bonds, FIELD * up, float(beta))
        row = {"beta": float(beta), "onsager": float(onsager(beta))}
        for name, method in (("mean-field", MeanField()), ("bethe", Bethe())):
            # Of several solutions that of spins along the field.
            m = magnetization(system, method, initial=0.99 * up, on_failure="ignore")
            row[name] = float(m.mean())
        samples: Any = heat_bath(system, start=up, generator=generator, **plan)
        means = samples.trajectory.mean((-1, -2)).unflatten(0, (BLOCKS, -1)).mean(1)
        row |= {"heat-bath": float(means.mean()), "error": float(means.std() / means.numel() ** 0.5)}
        rows.append(row)
    return rows


def figure(rows: list[dict[str, float]], title: str) -> Figure:
    """Draw the magnetizations against beta, the heat bath's with error bars."""
    numbers = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    betas, error = numbers.pop("beta"), numbers.pop("error")
    curves = {name: {"m": values} for name, values in numbers.items()}
    drawn = phase_figure(betas, curves, panels={"m": "magnetization"}, exact=("onsager",), title=title)
    drawn.axes[0].errorbar(betas, numbers["heat-bath"], error, fmt="none", ecolor="0.2", capsize=2, zorder=4)
    return drawn

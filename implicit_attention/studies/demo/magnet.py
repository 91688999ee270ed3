"""Magnetization of a small magnet against temperature: approximations beside the sum over all states."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from ...solution import Status
from ...spins import TAP, AdaTAP, Bethe, Enumeration, MeanField, SpinSystem, Sweep, sweep
from ...spins.approximation import Approximation
from ..progress import Listener
from .experiment import Experiment

SIDES = (3, 4)
FIELD = 0.1
HOTTEST, COLDEST, POINTS = 0.04, 0.6, 24
EXACT = "enumeration"
#: Up to this beta spins hardly correlate.
HOT = 0.15

CODE = """\
import torch
from implicit_attention.spins import AdaTAP, Bethe, Enumeration, MeanField, SpinSystem, sweep
ring = lambda n: torch.eye(n).roll(1, 0) + torch.eye(n).roll(-1, 0)
couplings = torch.kron(ring(3), torch.eye(4)) + torch.kron(torch.eye(3), ring(4))
system = SpinSystem(couplings.double(), torch.full((12, 1), 0.1).double())
found = sweep(system, [MeanField(), Bethe(), AdaTAP(), Enumeration()], beta=torch.linspace(0.04, 0.6, 24))
found.plot().savefig("magnet.png")
"""


def magnet() -> SpinSystem:
    """Return Ising spins on a torus, each coupled to its four neighbours, in a weak field."""
    eyes = [torch.eye(side, dtype=torch.float64) for side in SIDES]
    rings = [eye.roll(1, 0) + eye.roll(-1, 0) for eye in eyes]
    couplings = torch.kron(rings[0], eyes[1]) + torch.kron(eyes[0], rings[1])
    return SpinSystem(couplings, torch.full((len(couplings), 1), FIELD, dtype=torch.float64))


def magnet_experiment(progress: Listener) -> Experiment:
    """Solve every method at every temperature, and draw the curves."""
    methods: dict[str, Approximation] = {
        "mean field": MeanField(),
        "TAP": TAP(),
        "Bethe": Bethe(),
        "AdaTAP": AdaTAP(),
        EXACT: Enumeration(),
    }
    system, betas = magnet(), torch.linspace(HOTTEST, COLDEST, POINTS, dtype=torch.float64)
    progress.begin(f"{len(methods)} methods at {POINTS} temperatures")
    found = sweep(system, methods, beta=betas)
    rows = [_row(name, found) for name in methods]
    for row in rows:
        progress.end(row["method"], {"line": f"half magnetized at beta {row['half']:.2f}"})
    spins, (first, *_, last) = len(system.couplings), rows
    return Experiment(
        name="magnet",
        title="Magnetizations, beside the sum over all states",
        text=(
            f"{spins} Ising spins on a torus of {SIDES[0]} x {SIDES[1]}, in a field of {FIELD:g}, are cooled from beta "
            f"{HOTTEST:g} to {COLDEST:g}. m = -dF/dh of four approximate free energies F is compared with the sum over "
            f"all {2**spins:,} states. Mean field magnetizes at beta {first['half']:.2f}, the magnet at "
            f"{last['half']:.2f}: so small a magnet turns over as a whole, and has no sharp transition. While it is "
            "hot, all of them are near to the sum."
        ),
        picture=found.plot(title=f"{spins} Ising spins against inverse temperature"),
        ending="png",
        description="Three panels against beta: the mean magnetization, the largest susceptibility and the heat "
        f"capacity of {spins} spins, by four approximations and by enumeration. The approximations turn up earlier and "
        "more sharply than the exact curves.",
        headers=("method", "|m| is 1/2 at beta", f"largest error of |m|, beta < {HOT:g}", "at any beta", "statuses"),
        rows=[
            (
                row["method"],
                f"{row['half']:.2f}",
                *(f"{row[name]:.1e}" if row["method"] != EXACT else "exact" for name in ("hot", "all")),
                row["status"],
            )
            for row in rows
        ],
        notes=(
            "every point is a solve of its own: CONVERGED says that its residual reached the tolerance, and that the "
            "free energy has a minimum there",
            f"the enumeration sums over {2**spins:,} states; its half-way point is where its curve crosses 1/2",
        ),
        code=CODE,
        further=("implicit-attention magnetize", "implicit-attention magnetize FILE.npz --sweep beta=0.1:1:20"),
        numbers={"beta": betas, "curves": {name: found.curves[name]["mean_length"] for name in methods}, "rows": rows},
    )


def _row(name: str, found: Sweep) -> dict[str, Any]:
    """Return where a method is magnetized by half, how far it is from the exact sum, and how its solves went."""
    values, exact = (found.curves[key]["mean_length"] for key in (name, EXACT))
    off, above = (values - exact).abs().nan_to_num(math.inf), (values > 0.5).nonzero().flatten()
    half = math.nan
    if len(above) and (index := int(above[0])) > 0:
        (x0, x1), (y0, y1) = found.beta[index - 1 : index + 1].tolist(), values[index - 1 : index + 1].tolist()
        half = x0 + (x1 - x0) * (0.5 - y0) / (y1 - y0)
    report = found.reports[name]
    counts = Counter(Status(code).name for code in report.status.flatten().tolist())
    return {
        "method": name,
        "half": half,
        "hot": float(off[found.beta < HOT].max()),
        "all": float(off.max()),
        "status": ", ".join(f"{count} {word}" for word, count in counts.items()),
    }

"""The picture of docs/potentials.md: `python docs/potentials/landscapes.py` writes landscapes.png beside this file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, SquaredScores, solve
from implicit_attention.plotting import panels_figure
from implicit_attention.potentials import (
    BernoulliUnits,
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    Exponential,
    GaussianMixture,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    PositiveFeatures,
    Potential,
    SoftcapLogSumExp,
    Softmax1,
    Tilted,
    units_potential,
)

KEYS = torch.tensor([[1.0, 0.5], [-0.5, 1.2], [0.3, -1.0], [-1.0, -0.4]], dtype=torch.float64)
BETA, REACH, SIDE, STARTS = 2.0, 2.0, 161, 17


def potentials(beta: float = BETA) -> dict[str, Potential]:
    """All of the page over the same four keys, those without a lower bound at the end."""
    random = PositiveFeatures(2, 64, generator=torch.Generator().manual_seed(0))
    # Patterns with a spread across their own direction, (1/beta) log sum_j of the mean of exp(beta <x, z>).
    across = torch.stack((-KEYS[:, 1], KEYS[:, 0]), -1)
    spread = 0.2 * across[:, :, None] * across[:, None, :]
    mixture = GaussianMixture(beta * KEYS, beta**2 * spread, KEYS.new_zeros(4))
    return {
        "LogSumExp": LogSumExp(KEYS, beta),
        "Softmax1": Softmax1(KEYS, beta),
        "DistanceLogSumExp": DistanceLogSumExp(KEYS, beta),
        "Tilted(LogSumExp, (.5, .5))": Tilted(LogSumExp(KEYS, beta), KEYS.new_tensor([0.5, 0.5])),
        "Entmax, alpha 1.5": Entmax(KEYS, beta),
        "Entmax, alpha 2": Entmax(KEYS, beta, alpha=2.0),
        "SoftcapLogSumExp, cap 2": SoftcapLogSumExp(KEYS, beta, cap=2.0),
        "GaussianMixture / beta": (1 / beta) * mixture,
        "KernelPotential, elu + 1": KernelPotential(KEYS, beta, features=EluFeatures()),
        "KernelPotential, 64 random": KernelPotential(KEYS, beta, features=random),
        "units_potential, Bernoulli .5": units_potential(BernoulliUnits(0.5))(KEYS, beta),
        "NormalisedScores / 4": 0.25 * NormalisedScores(KEYS, beta),
        "SquaredScores": SquaredScores(KEYS, beta),
        "Polynomial, degree 2": Polynomial(KEYS, beta),
        "Polynomial, degree 3": Polynomial(KEYS, beta, degree=3),
        "Exponential": Exponential(KEYS, beta),
    }


def plane(side: int) -> Tensor:
    """States on a square, (side^2, 2), row after row."""
    line = torch.linspace(-REACH, REACH, side, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack((x, y), -1).flatten(0, 1)


def energies(potential: Potential) -> Tensor:
    """|z|^2/2 - Phi(z), (SIDE, SIDE)."""
    z = plane(SIDE)
    return (z.square().sum(-1) / 2 - potential.value(z)).unflatten(0, (SIDE, SIDE))


def minima(potential: Potential) -> Tensor | None:
    """Where solves from all over the square end, each once; None for an energy that may have no lower bound."""
    if potential.bounded_below(1.0) is not True:
        return None
    starts = plane(STARTS)
    energy = AnchoredEnergy(potential, starts, anchor=0.0)
    z = solve(energy, starts, solver=Picard(atol=1e-10, rtol=1e-10, max_steps=5000)).value
    hessian = torch.stack([energy.hessian_product(z, v.expand_as(z)) for v in torch.eye(2).to(z)], -1)
    z = z[torch.linalg.eigvalsh(hessian)[:, 0] > 0]
    first = (torch.cdist(z, z) < 1e-3).int().argmax(-1)
    return z[first == torch.arange(len(z))]


if __name__ == "__main__":
    found = {name: (energies(potential), minima(potential)) for name, potential in potentials().items()}
    for name, (_, ends) in found.items():
        print(name, "no lower bound" if ends is None else [[round(x, 3) for x in end] for end in ends.tolist()])
    title = f"|z|^2/2 - Phi(z) over four keys in the plane, beta {BETA:g}"
    figure = panels_figure(found, KEYS, reach=REACH, title=title)
    figure.savefig(Path(__file__).parent / "landscapes.png")

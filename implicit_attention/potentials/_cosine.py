"""Cosines between a unit vector and its field, drawn from the von Mises-Fisher law in any dimension."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A proposal is refused with probability < 0.35, a NaN never: so many rounds are enough.
ROUNDS = 200
# Rounds for few cosines try several proposals at once: their cost is the number of calls, not of numbers.
WIDTH = 512


def one_minus_cosine(kappa: Tensor, dim: int, generator: torch.Generator | None, level: Tensor) -> Tensor:
    """1 - w for cosines w of density exp(kappa w) (1 - w^2)^((D - 3)/2), kappa >= 0, D > 1.

    `level`, uniform in (0, 1), is inverted for D = 3; every other D is drawn by rejection.

    Reference: Wood (1994), Simulation of the von Mises-Fisher distribution.
    """
    if dim != 3:
        return _by_rejection(kappa, dim, generator)
    floor = kappa.clamp_min(torch.finfo(kappa.dtype).tiny ** 0.5)
    return -torch.log1p(level * torch.expm1(-2 * floor)) / floor


def _by_rejection(kappa: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    """Draw 1 - cosine for any D > 1."""
    flat = kappa.flatten()
    drawn = torch.empty_like(flat)
    left = torch.arange(len(flat), device=flat.device)
    for _ in range(ROUNDS):
        if not len(left):
            return drawn.view_as(kappa)
        value, accepted = _proposals(flat[left], dim, max(1, WIDTH // len(left)), generator)
        first = accepted.to(torch.uint8).argmax(0, keepdim=True)
        some = accepted.any(0)
        drawn[left[some]] = value.gather(0, first)[0, some]
        left = left[~some]
    raise RuntimeError(f"no proposal was accepted in {ROUNDS} rounds; this is a bug")


def _proposals(kappa: Tensor, dim: int, tries: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Values of 1 - cosine, (tries, n), and which of them are accepted.

    With 1 - w = 2 b G/(G' + b G) for G = 1 - X, G' = 1 + X and X the cosine of a uniform direction, the envelope
    touches at w = x_0 = (1 - b)/(1 + b). Wood's formulas, written for 1 - w and 1 - x_0.
    """
    u = kappa.new_empty(3, tries, len(kappa)).uniform_(generator=generator)
    tilt = 2 * kappa / (dim - 1)
    root = (1 + tilt * tilt).sqrt()
    b = 1 / (tilt + root)
    x0 = b * (tilt + tilt * tilt / (1 + root)) / (1 + b)
    y0 = 2 * b / (1 + b)
    # Two coordinates of a uniform direction have length r and angle 2 psi; 1 - r = q/(1 + r) with q = 1 - r^2.
    q = u[0].log().mul_(2 / (dim - 2)).exp_() if dim > 2 else torch.zeros_like(u[0])
    r = (1 - q).sqrt()
    near = q / (1 + r) + 2 * r * (math.pi / 2 * u[1]).sin().square()
    # Where 2 - near loses digits, it is small against b near, or the proposal far out and refused.
    value = 2 * b * near / (2 - near + b * near)
    part = value / y0
    logarithm = kappa * y0 * (1 - part) + (dim - 1) * torch.log1p(x0 / (1 + x0) * (part - 1))
    # This comparison accepts NaN, which would otherwise be tried for ever.
    return value, ~(logarithm < u[2].log())

"""The rule of accelerated steps, once: Triton compiles it, `native/rule.h` is made of it, torch runs it.

The loop of solvers, which has other histories, metrics and gradients through its steps, calls the parts of `decide`.

The functions are elementwise, of numbers that belong to one problem each. They are written with arithmetic,
comparisons, &, |, ~, `where`, `sqrt` and `abs` of `lang`, which all three have; what is decided is never NaN.
"""

from __future__ import annotations

from typing import TypeAlias

import torch as lang
from torch import Tensor

#: Truth values of problems.
Truth: TypeAlias = Tensor

# An accelerated step must lower E by this part of |r|^2; a plain one of a convex potential lowers it by 1/2.
DESCENT = 0.25
# E is known to this many units of rounding.
ENERGY_SLACK = 4.0
# Where the last step met negative curvature, extrapolation would climb to a saddle: go this many plain steps at once.
STRETCH = 4.0
# An accelerated step s is not evaluated unless <r, s> >= SLOPE |r|^2, and it is cut to LONGEST |r|. (Near a fold the
# true step is that long; refusing it there would leave hundreds of plain steps.)
SLOPE = 0.5
LONGEST = 30.0


def rounding_of(energy: Tensor, before: Tensor, eps: float) -> Tensor:
    """The rounding of a difference of two energies."""
    here = lang.abs(energy)
    there = lang.abs(before)
    return eps * lang.where(here > there, here, there)


def descends(energy: Tensor, before: Tensor, required: Tensor, trapezoid: Tensor, eps: float) -> Truth:
    """Whether E fell by what is required: E tells, or where rounding hides that, its gradient by the trapezoid rule."""
    rounding = rounding_of(energy, before, eps)
    resolved = required > ENERGY_SLACK * rounding
    return (resolved & (before - energy >= required - rounding)) | (~resolved & (trapezoid >= required))


def shortened(residual: Tensor, reach: Tensor, most: float) -> Tensor:
    """The factor that makes a step of length `reach` no longer than `most` |r|; its gradient is never 0/0."""
    longest = most * residual
    return lang.where(reach > longest, longest / lang.where(reach > longest, reach, 1.0), 1.0)


def promises(square: Tensor, slope: Tensor, reach: Tensor, part: float) -> Truth:
    """Whether a step s of length `reach` may be tried: the slope <r, s> is at least `part` of the plain one, |r|^2."""
    return (reach < float("inf")) & (slope >= part * square)


def decide(
    square: Tensor,
    residual: Tensor,
    energy: Tensor,
    trapezoid: Tensor,
    across: Tensor,
    turned: Tensor,
    along: Tensor,
    span: Tensor,
    bent: Tensor,
    before: Tensor,
    residual_before: Tensor,
    finite: Truth,
    tried: Truth,
    may: Truth,
    eps: float,
    tiny: float,
    least: float,
) -> tuple[Truth, Truth, Tensor, Tensor]:
    """Decide what follows an evaluation at z = z' + dz from the last accepted point z'; f(z) = z + r and df = dz + dr.

    square, residual: |r|^2, and |r|, which neither underflows nor overflows.
    energy, before: E at z and at z'.
    trapezoid: <r + r', dz>/2. across, turned, along, span, bent: <dr, r>, |dr|^2, <r, df>, |df|^2, <dz, dr>.
    residual_before: |r'|.
    finite: whether f(z) is.
    tried: whether the step to z was accelerated, so that it has to lower E.
    may: whether the next one may be: there is a z', and budget is left.
    eps, tiny, least: units of rounding, the smallest normal number, the least length whose square has all its digits.

    Returns whether z is accepted, whether the next step is accelerated, by_r and by_df: that step is by_r r - by_df df;
    from z, or from z' where z is not accepted, whence it is plain.
    """
    required = DESCENT * residual_before * residual_before
    accepted = ~tried | (finite & descends(energy, before, required, trapezoid, eps))
    gamma = across / lang.where(turned > tiny, turned, tiny)
    slope = square - gamma * along
    reach_square = slope - gamma * along + gamma * gamma * span
    reach = lang.sqrt(lang.where(reach_square > 0.0, reach_square, 0.0))
    cut = shortened(residual, reach, LONGEST)
    # Products that underflow do not measure the curvature.
    downward = (bent >= 0.0) & (residual_before >= least)
    tries = accepted & may & (downward | promises(square, cut * slope, reach, SLOPE))
    by_r = lang.where(tries, lang.where(downward, STRETCH, cut), 1.0)
    by_df = lang.where(tries & ~downward, cut * gamma, 0.0)
    return accepted, tries, by_r, by_df

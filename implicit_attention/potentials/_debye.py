"""Debye's uniform expansion of L = v + kappa I_v'/I_v and of what follows from it, as polynomials in y = v/s.

In powers of 1/s with s = sqrt(v^2 + kappa^2), it holds for all kappa, 0 included, where the order v is large. Of its
functions y^p with t = kappa^2 as the variable d/dt makes -p y^{p + 2}/(2 v^2), so that all derivatives are polynomials.

Reference: NIST DLMF 10.41 (expansion; derived here for the logarithmic derivative).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.polynomial.polynomial import polyadd, polymul, polysub


class Order(NamedTuple):
    """The factors of (1 - c) s^{-k}, c = v^2/s^2, in L, w and W, as polynomials in c; see `expansion`."""

    length: tuple[float, ...]
    curvature: tuple[float, ...]
    potential: tuple[float, ...]
    stirling: float
    bound: float


def _over_one_minus_c(a: Any, unit: Fraction) -> list[Fraction]:
    return [unit * x for x in itertools.accumulate(a[:-1])]


def _floats(a: list[Fraction]) -> tuple[float, ...]:
    return tuple(map(float, a))


def expansion(orders: int) -> tuple[Order, ...]:
    """Coefficients of N = kappa I_v'/I_v = s + sum_k n_k(c) s^{-k}, and of w and W, which follow from it.

    Bessel's equation reads N^2 + (1 - c) Y N = s^2 with Y = s d/ds at fixed v, Y c^m s^{-k} = -(k + 2m) c^m s^{-k}.
    Its orders give n_{k+1} from those before. Every n_k has the factor 1 - c = t/s^2, for N = v at t = 0.
    """
    # Polynomials by numpy, of integers, 2^{2k + 1} n_k, of any size.
    one_minus_c = np.array([1, -1], dtype=object)
    scaled: list[Any] = [-one_minus_c]
    terms = []
    for k in range(orders):
        falling = polymul(one_minus_c, [(k + 2 * m) * x for m, x in enumerate(scaled[k])])  # -(1 - c) Y n_k
        squares = functools.reduce(polyadd, [polymul(scaled[i], scaled[k - i]) for i in range(k + 1)])
        scaled.append(polysub(2 * falling, squares))
        unit = Fraction(1, 2 ** (2 * k + 1))
        length = _over_one_minus_c(scaled[k], unit)
        # w = L - 2 t L', and 2 t d/dt = (1 - c) Y.
        curvature = _over_one_minus_c(polyadd(scaled[k], falling), unit) if k else []
        # dW/ds = (N - v) s / t with t = (1 - c) s^2, integrated from s = v; k = 0 gives a logarithm instead. The terms
        # c^m - 1 have the factor 1 - c; the rest, s^{-k} - v^{-k}, has the coefficients of Stirling's series.
        integral = [x / (k + 2 * m) for m, x in enumerate(length)] if k else [Fraction(0)]
        stirling = sum(integral, Fraction(0))
        potential = _over_one_minus_c([stirling - integral[0], *(-x for x in integral[1:])], Fraction(1))
        grid = [i / 64 for i in range(65)]
        bound = max(abs((1 - c) * sum(float(x) * c**m for m, x in enumerate(length))) * c ** (k / 2) for c in grid)
        terms.append(Order(_floats(length), _floats(curvature), _floats(potential), float(stirling), bound))
    return tuple(terms)


EXPANSION = expansion(17)
#: The smallest order v at which the expansion is used: there its terms fall below the precision before they end. So
#: much more for each derivative.
LOWEST_ORDER = {torch.float64: (20.0, 4.0), torch.float32: (8.0, 6.0)}


class Start(NamedTuple):
    """The order v = D/2 + steps at which the expansion starts, and the number of its terms that count there."""

    order: float
    steps: int
    terms: int


def start(dim: int, dtype: torch.dtype, derivative: int = 0) -> Start:
    """The start for a function, or for its derivative of this order, whose terms fall more slowly."""
    lowest, more = LOWEST_ORDER[dtype]
    steps = max(0, math.ceil(lowest + more * derivative - dim / 2))
    order = dim / 2 + steps
    small = 0.05 * torch.finfo(dtype).eps * order / 100**derivative
    terms = next((k for k, term in enumerate(EXPANSION) if term.bound * order**-k < small), len(EXPANSION))
    return Start(order, steps, terms)


class Polynomials(NamedTuple):
    """Polynomials in y to be evaluated together, the lowest powers first.

    numbers: their coefficients, all of the power 0, then all of the power 1, ...; width: the number of polynomials.
    """

    start: Start
    numbers: tuple[float, ...]
    width: int


def series_rows(dim: int, dtype: torch.dtype, length: int, excess: int) -> Polynomials:
    """L and w - (D - 1)/2 at the order v, and their Taylor coefficients.

    Of L: (L - v - s)/(1 - c), and the coefficients of h^n, n = 1, ..., `length`, over y^{2n - 1}. Where `excess` >= 0
    of w - (D - 1)/2 = c (s + 3/2 - c) + (1 - c) C: C, and the coefficients up to h^excess over y^{2n}.
    """
    return _series_rows(dim, dtype, length, excess)


def value_rows(dim: int, dtype: torch.dtype) -> Polynomials:
    """(L - v - s)/(1 - c), and the two parts of W with the factors 1 - c and 1 - y."""
    return _value_rows(dim, dtype)


# torch.compile asks these for their answer, and does not look into them.
series_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]
value_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _series_rows(dim: int, dtype: torch.dtype, length: int, excess: int) -> Polynomials:
    begin = start(dim, dtype, max(length, excess))
    v = begin.order
    rows = [_collected(begin, "length")]
    # L y and w - (D - 1)/2 as polynomials.
    whole = _times_one_minus_square([0.0, *rows[0]])
    whole[0] += v
    whole[1] += v
    rows += [_taylor(whole, v, n, -1) for n in range(1, length + 1)]
    if excess >= 0:
        rows.append(_collected(begin, "curvature"))
        beyond = _times_one_minus_square(rows[-1])
        beyond += [0.0] * (5 - len(beyond))
        for power, number in ((1, v), (2, 1.5), (4, -1.0)):
            beyond[power] += number
        rows += [_taylor(beyond, v, n, 0) for n in range(1, excess + 1)]
    return _packed(begin, rows, dtype)


@functools.cache
def _value_rows(dim: int, dtype: torch.dtype) -> Polynomials:
    begin = start(dim, dtype)
    # sum_k stirling_k (v^{-k} - s^{-k}) over 1 - y
    stirling = [0.0] * len(EXPANSION)
    for k, term in enumerate(EXPANSION[: begin.terms]):
        for power in range(k):
            stirling[power] += term.stirling * begin.order**-k
    return _packed(begin, [_collected(begin, "length"), _collected(begin, "potential"), stirling], dtype)


def _collected(begin: Start, field: str) -> list[float]:
    """sum_k [...] s^{-k} by powers of y."""
    row = [0.0] * (3 * max(begin.terms, 1))
    for k, term in enumerate(EXPANSION[: begin.terms]):
        for m, number in enumerate(getattr(term, field)):
            row[k + 2 * m] += number * begin.order**-k
    return row


def _times_one_minus_square(row: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip([*row, 0.0, 0.0], [0.0, 0.0, *row], strict=True)]


def _taylor(row: Sequence[float], v: float, n: int, shift: int) -> list[float]:
    """The coefficient of h^n of sum_j row_j y^{j + shift}, over y^{2n + shift}."""
    return [math.prod(-(j + shift + 2 * i) / (2 * v**2) / (i + 1) for i in range(n)) * x for j, x in enumerate(row)]


def _packed(begin: Start, rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Polynomials:
    # High powers far below rounding are left out; then there are a multiple of eight, so that three times
    # the even and the odd powers can be joined.
    least = [1e-6 * torch.finfo(dtype).eps * max(map(abs, row)) for row in rows]
    counted = max(i + 1 for row, small in zip(rows, least, strict=True) for i, x in enumerate(row) if abs(x) >= small)
    length = -(-counted // 8) * 8
    padded = [[*row, *[0.0] * length][:length] for row in rows]
    return Polynomials(begin, tuple(number for power in zip(*padded, strict=True) for number in power), len(rows))

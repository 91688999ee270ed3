"""Ratios of modified Bessel functions: the law of a unit vector in a field, in any dimension.

Everything is a function of t = kappa^2, analytic also at t = 0. With nu = D/2 - 1 and A = I_{nu+1}(kappa)/I_nu(kappa):

    ratio          G(t) = A / kappa = 1 / L                               (1/D at t = 0)
    radial         P(t) = dA/dkappa = G + 2 t G' = G^2 w, w = L - 2 t L'  (1/D at t = 0)
    log_partition  W(t) = log of the mean of exp(kappa u_1) over the unit sphere;  W' = G/2

A recurrence joins the dimensions D and D + 2 (marked +), stable downwards:

    L = D + t G+,    w = D - t P+,    W = W+ + log(L / D).

It starts at a dimension 2v that is large enough for Debye's uniform expansion of L = v + kappa I_v'/I_v in powers of
1/s, s = sqrt(v^2 + kappa^2), which holds for all kappa, 0 included. For large kappa, P is smaller than G by a factor
kappa, and G + 2 t G' or 1 - A^2 - (D - 1) A / kappa would lose it; these recurrences for w do not.

Reference: NIST DLMF 10.29 (recurrences) and 10.41 (expansion; derived here for the logarithmic derivative).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar, cast

import torch
from numpy.polynomial.polynomial import polyadd, polymul, polysub
from torch import Tensor

from ._jet import Jet

_Number = TypeVar("_Number", Tensor, Jet)


class _Order(NamedTuple):
    """The factors of (1 - c) s^{-k}, c = v^2/s^2, in L, w and W, as polynomials in c; see `_expansion`."""

    length: tuple[float, ...]
    curvature: tuple[float, ...]
    potential: tuple[float, ...]
    stirling: float
    bound: float


def _over_one_minus_c(a: Any) -> list[Fraction]:
    return [sum(a[: m + 1], Fraction(0)) for m in range(len(a) - 1)]


def _floats(a: list[Fraction]) -> tuple[float, ...]:
    return tuple(map(float, a))


def _expansion(orders: int) -> tuple[_Order, ...]:
    """Coefficients of N = kappa I_v'/I_v = s + sum_k n_k(c) s^{-k}, and of w and W, which follow from it.

    Bessel's equation reads N^2 + (1 - c) Y N = s^2 with Y = s d/ds at fixed v, Y c^m s^{-k} = -(k + 2m) c^m s^{-k}.
    Its orders give n_{k+1} from those before. Every n_k has the factor 1 - c = t/s^2, for N = v at t = 0.
    """
    # Polynomials by numpy, of exact fractions.
    one_minus_c = [Fraction(1), Fraction(-1)]
    n: list[Any] = [[Fraction(-1, 2), Fraction(1, 2)]]
    terms = []
    for k in range(orders):
        falling = polymul(one_minus_c, [(k + 2 * m) * x for m, x in enumerate(n[k])])  # -(1 - c) Y n_k
        squares = functools.reduce(polyadd, [polymul(n[i], n[k - i]) for i in range(k + 1)])
        n.append(polysub(falling, squares) / 2)
        length = _over_one_minus_c(n[k])
        # w = L - 2 t L', and 2 t d/dt = (1 - c) Y.
        curvature = _over_one_minus_c(polyadd(n[k], falling)) if k else []
        # dW/ds = (N - v) s / t with t = (1 - c) s^2, integrated from s = v; k = 0 gives a logarithm instead. The terms
        # c^m - 1 have the factor 1 - c; the rest, s^{-k} - v^{-k}, has the coefficients of Stirling's series.
        integral = [x / (k + 2 * m) for m, x in enumerate(length)] if k else [Fraction(0)]
        stirling = sum(integral, Fraction(0))
        potential = _over_one_minus_c([stirling - integral[0], *(-x for x in integral[1:])])
        grid = [i / 64 for i in range(65)]
        bound = max(abs((1 - c) * sum(float(x) * c**m for m, x in enumerate(length))) * c ** (k / 2) for c in grid)
        terms.append(_Order(_floats(length), _floats(curvature), _floats(potential), float(stirling), bound))
    return tuple(terms)


_EXPANSION = _expansion(12)
#: The smallest order v at which the expansion is used: there its terms fall below the precision before they end.
_LOWEST_ORDER = {torch.float64: 30.0, torch.float32: 12.0}


class _Start(NamedTuple):
    """The order v = D/2 + steps at which the expansion starts, and the number of its terms that count there."""

    order: float
    steps: int
    terms: int


def _start(dim: int, dtype: torch.dtype) -> _Start:
    steps = max(0, math.ceil(_LOWEST_ORDER[dtype] - dim / 2))
    order = dim / 2 + steps
    small = 0.05 * torch.finfo(dtype).eps * order
    terms = next((k for k, term in enumerate(_EXPANSION) if term.bound * order**-k < small), len(_EXPANSION))
    return _Start(order, steps, terms)


def _polynomial(coefficients: Sequence[Any], x: Any) -> Any:
    """Return sum_k coefficients_k x^k, for coefficients that are numbers or tensors; 0 without coefficients."""
    value: Any = coefficients[-1] if coefficients else 0.0
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


class _Top(NamedTuple):
    """The start of the recurrences: the numbers of the expansion, tensors or jets."""

    start: _Start
    s: Any
    z: Any
    c: Any
    one_minus_c: Any

    @classmethod
    def at(cls, t: Any, dim: int) -> _Top:
        start = _start(dim, (t.coefficients[0] if isinstance(t, Jet) else t).dtype)
        s = (t + start.order**2).sqrt()
        z = s.reciprocal()
        root = start.order * z
        return cls(start, s, z, root * root, t * z * z)

    def sum(self, field: str) -> Any:
        """(1 - c) sum_k [...] s^{-k}."""
        polynomials = [_polynomial(getattr(term, field), self.c) for term in _EXPANSION[: self.start.terms]]
        return self.one_minus_c * _polynomial(polynomials, self.z)


def _ratios(t: _Number, dim: int, top: _Top) -> list[_Number]:
    """1/L for the dimensions 2v, 2v - 2, ..., dim."""
    ratio: _Number = (top.start.order + top.s + top.sum("length")).reciprocal()
    ratios = [ratio]
    for j in reversed(range(top.start.steps)):
        ratio = (t * ratio + (dim + 2 * j)).reciprocal()
        ratios.append(ratio)
    return ratios


def _ratio(t: _Number, dim: int) -> _Number:
    return _ratios(t, dim, _Top.at(t, dim))[-1]


def _radial(t: _Number, dim: int) -> _Number:
    top = _Top.at(t, dim)
    ratios = _ratios(t, dim, top)
    # w - (D - 1)/2, small for large kappa; Bessel's equation 1 - A^2 = (D - 1) G + P avoids a difference.
    excess: _Number = top.c * (top.s + 1.5 - top.c) + top.sum("curvature")
    for j, above in zip(reversed(range(top.start.steps)), ratios[:-1], strict=True):
        half = (dim + 1) / 2 + j
        excess = half**2 * above * (above + 2.0) - (t - half) * above * above * excess
    radial: _Number = ratios[-1] * ratios[-1] * (excess + (dim - 1) / 2)
    return radial


def _log_partition(t: Tensor, dim: int) -> Tensor:
    top = _Top.at(t, dim)
    above: Tensor = t / (top.s + top.start.order)
    return above + _logarithms(t, dim, top)


def _logarithms(t: Tensor, dim: int, top: _Top) -> Tensor:
    """Return W without its first term s - v, the only one that grows like kappa."""
    v = top.start.order
    above = t / (top.s + v)  # s - v
    total: Tensor = -v * torch.log1p(above / (2 * v)) - torch.log1p(above / v) / 2 + top.sum("potential")
    # sum_k stirling_k (v^{-k} - s^{-k}), k odd, each difference from the one before, all of one sign.
    power, difference = top.z, above * top.z / v
    squares = difference * (1 / v + top.z)
    for term in _EXPANSION[1 : top.start.terms : 2]:
        total = total + term.stirling * difference
        difference = difference / v**2 + power * squares
        power = power * top.z * top.z
    total = total + torch.log1p((above + top.sum("length")) / (2 * v))
    for j, ratio in zip(reversed(range(top.start.steps)), _ratios(t, dim, top), strict=False):
        total = total + torch.log1p(t * ratio / (dim + 2 * j))
    return total


def _length(q: Tensor, dim: int) -> Tensor:
    """Invert by Newton's method, from the closed form of Amos' bound.

    The slope of L - L(q L^2) is (w + L - L(q L^2))/L. Four steps reach rounding in float64 for every D and q, three do
    in float32: the start is off by 3 % at most, and the error is squared.
    """
    a = (dim - 1) / 2
    length = (a + (a**2 + dim * (1 - q)).sqrt()) / (1 - q)
    for _ in range(4 if q.dtype == torch.float64 else 3):
        t = q * length * length
        exact = _ratio(t, dim).reciprocal()
        w = _radial(t, dim) * exact * exact
        # Bessel's equation L^2 - (D - 1) L - w = t holds at `exact`. Less the same expression at `length`, where t is
        # q length^2, it gives their difference, which for q near 1 is far below their rounding.
        excess = (((1 - q) * length - (dim - 1)) * length - w) / (length + exact - (dim - 1))
        length = length - excess * length / (w + excess)
    return length


def _entropy(q: Tensor, dim: int) -> Tensor:
    """W(t) - q L."""
    length = _length(q, dim)
    t = q * length * length
    top = _Top.at(t, dim)
    v = top.start.order
    # (s - v) - q L stays finite where both grow like kappa.
    difference = ((1 - q) * length * length - v**2) / (length + top.s) - v
    finite: Tensor = q * length * difference / (top.s + v)
    return finite + _logarithms(t, dim, top)


@dataclass(frozen=True, eq=False)
class _Smooth:
    """A function of a tensor and D that can be differentiated to any order.

    formula: (x, D) -> y. slope: (x, D, y) -> dy/dx, made of functions of this kind.
    """

    formula: Callable[[Tensor, int], Tensor]
    slope: Callable[[Tensor, int, Tensor], Tensor]

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        if torch.compiler.is_compiling():
            # The compiler stops at functions with a forward-mode rule. It differentiates the formula, and fuses it.
            return self.formula(x, dim)
        return cast(Tensor, _WithSlope.apply(x, dim, self))  # type: ignore[no-untyped-call]


class _WithSlope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, function: _Smooth) -> Tensor:
        return function.formula(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, ctx.function = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _WithSlope.jvp(ctx, cotangent), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        x, y = ctx.saved_tensors
        return tangent * cast(Tensor, ctx.function.slope(x, ctx.dim, y))


@functools.cache
def _derivative(formula: Callable[[Any, int], Any], order: int) -> _Smooth:
    """The derivative of a formula for tensors or jets; its own derivative is the next order."""

    def value(t: Tensor, dim: int) -> Tensor:
        return cast(Tensor, formula(Jet.variable(t, order), dim).derivative() if order else formula(t, dim))

    return _Smooth(value, lambda t, dim, _: _derivative(formula, order + 1)(t, dim))


#: G(t) = A(kappa)/kappa to rounding.
ratio = _derivative(_ratio, 0)
#: dG/dt to rounding.
ratio_slope = _derivative(_ratio, 1)
#: P(t) = dA/dkappa to rounding, for D >= 2.
radial = _derivative(_radial, 0)
#: W(t) to rounding, for every t >= 0 and D >= 1.
log_partition = _Smooth(_log_partition, lambda t, dim, _: ratio(t, dim) / 2)
#: L = kappa/A where A(kappa)^2 = q, for 0 <= q < 1 and D >= 2. dL/dq = L^2 L'(t) / (1 - 2 t L'(t)/L), L' = -G'/G^2.
length = _Smooth(_length, lambda q, dim, y: -(y**3) * ratio_slope(q * y * y, dim) / radial(q * y * y, dim))
#: The minimum over kappa of W - kappa sqrt(q), W(t) - q L, for 0 <= q < 1 and D >= 2; it is stationary in L.
entropy = _Smooth(_entropy, lambda q, dim, _: length(q, dim) / -2)

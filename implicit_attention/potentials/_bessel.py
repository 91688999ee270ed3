"""Ratios of modified Bessel functions: the law of a unit vector in a field, in any dimension.

Everything is a function of t = kappa^2, analytic also at t = 0. With nu = D/2 - 1 and A = I_{nu+1}(kappa)/I_nu(kappa):

    ratio          G(t) = A / kappa = 1 / L                               (1/D at t = 0)
    radial         P(t) = dA/dkappa = G + 2 t G' = G^2 w, w = L - 2 t L'  (1/D at t = 0)
    log_partition  W(t) = log of the mean of exp(kappa u_1) over the unit sphere;  W' = G/2

A recurrence joins the dimensions D and D + 2 (marked +), stable downwards:

    L = D + t G+,    w = D - t P+,    W = W+ + log(L / D).

It starts at a dimension 2v that is large enough for Debye's uniform expansion of L = v + kappa I_v'/I_v in powers of
1/s, s = sqrt(v^2 + kappa^2), which holds for all kappa, 0 included (`_debye`). For large kappa, P is smaller
than G by a factor kappa, and G + 2 t G' or 1 - A^2 - (D - 1) A / kappa would lose it; these recurrences for w do not.

Derivatives by t are Taylor coefficients of the same recurrences, for all dimensions on the way at once. They begin with
L' = (G+ + P+)/2, a sum of positive numbers.

Reference: NIST DLMF 10.29 (recurrences).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch import is_plain, tangent_rule
from . import _debye

#: Bytes of t that are read at a time, of G alone and of functions that keep all dimensions on the way in memory.
MANY, FEW = 2**17, 2**14


class _Top(NamedTuple):
    """The start of the recurrences: y = v/s, 1 - c = t/s^2, and the polynomials in y."""

    start: _debye.Start
    s: Tensor
    y: Tensor
    rest: Tensor
    rows: Sequence[Tensor]

    @classmethod
    def at(cls, t: Tensor, table: _debye.Polynomials) -> _Top:
        v = table.start.order
        s = (t + v**2).sqrt()
        z = s.reciprocal()
        y = v * z
        return cls(table.start, s, y, t * z * z, _polynomials(_coefficients(table, t), y).unbind())

    @property
    def length(self) -> Tensor:
        """L."""
        return self.rest * self.rows[0] + (self.s + self.start.order)


#: The coefficients of polynomials as tensors, by table and device.
_kept: dict[tuple[_debye.Polynomials, torch.dtype, torch.device], Tensor] = {}


def _coefficients(table: _debye.Polynomials, t: Tensor) -> Tensor:
    """Coefficients (powers, polynomials, ...) that broadcast with t."""
    plain = not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())
    numbers = _kept.get((table, t.dtype, t.device)) if plain else None
    if numbers is None:
        numbers = torch.tensor(table.numbers, dtype=t.dtype, device=t.device)
        if plain:
            _kept[table, t.dtype, t.device] = numbers
    return numbers.view(-1, table.width, *(1,) * t.ndim)


def _polynomials(coefficients: Tensor, y: Tensor) -> Tensor:
    """Values of polynomials, (polynomials, ...): even and odd powers are joined until their number is odd (Estrin)."""
    while coefficients.shape[0] % 2 == 0:
        coefficients = torch.addcmul(coefficients[0::2], coefficients[1::2], y)
        y = y * y
    value = coefficients[-1]
    for lower in reversed(coefficients[:-1].unbind()):
        value = torch.addcmul(lower, value, y)
    return value


def _dims(t: Tensor, dim: int, top: _Top) -> Tensor:
    """The dimensions on the way, dim, dim + 2, ..., 2v, (steps + 1, ...), to broadcast with t."""
    dims = torch.arange(dim, dim + 2 * top.start.steps + 2, 2, dtype=t.dtype, device=t.device)
    return dims.view(-1, *(1,) * t.ndim)


def _lengths(t: Tensor, dims: Tensor, top: _Top) -> list[Tensor]:
    """L for the dimensions 2v, 2v - 2, ..., dim."""
    lengths = [top.length]
    for own in reversed(dims.unbind()[:-1]):
        lengths.append(torch.addcdiv(own, t, lengths[-1]))
    return lengths


def _ratio(t: Tensor, dim: int) -> Tensor:
    top = _Top.at(t, _debye.series_rows(dim, t.dtype, 0, -1))
    return _lengths(t, _dims(t, dim, top), top)[-1].reciprocal()


def _series(t: Tensor, dim: int, ratio: int, radial: int) -> tuple[list[Tensor], list[Tensor]]:
    """Taylor coefficients of G up to h^ratio, and of P up to h^radial; `radial` = -1 for none.

    Every one is computed for all dimensions on the way, from `dim` up, along the first axis; the last for `dim` alone.
    """
    most, excesses = max(ratio, radial), max(ratio - 1, radial)
    top = _Top.at(t, _debye.series_rows(dim, t.dtype, most, excesses))
    beyond = top.rows[most + 1 :]
    dims, y, square = _dims(t, dim, top), top.y, top.y * top.y
    half = (dims[:-1] + 1) / 2
    weights, far = half * half, half - t
    g = [torch.stack(_lengths(t, dims, top)[::-1]).reciprocal()]
    squares = [g[0] * g[0]]
    slopes: list[Tensor] = []
    steepness: list[Tensor] = []
    e: list[Tensor] = []
    p: list[Tensor] = []
    power = y.reciprocal()
    for k in range(most + 1):
        if k:
            # G' = -G^2 L' with L' = (G+ + P+)/2
            power = power * square
            inner = (g[-1][1 : len(p[-1])] + p[-1][1:]) / 2
            slopes.append(torch.cat([inner, (k * power * top.rows[k])[None]]))
            g.append(_convolved(squares, slopes, k - 1, 1 if k > excesses else None) / -k)
        if k > excesses:
            break
        if k:
            squares.append(_convolved(g, g, k))
        # w - (D - 1)/2, small for large kappa; Bessel's equation 1 - A^2 = (D - 1) G + P avoids a difference:
        # its value is half^2 G+ (G+ + 2) + (half - t) G+^2 times that of the dimension above.
        above = squares[k][1:]
        steep = far * above
        if k:
            steep = steep - squares[k - 1][1:]
        steepness.append(steep)
        own = weights * torch.add(above, g[k][1:], alpha=2)
        for i in range(1, k + 1):
            own = torch.addcmul(own, steepness[i], e[k - i][1:])
        last = power * y * beyond[k] if k else top.rest * beyond[0] + square * (top.s + 1.5 - square)
        # Of the last coefficients those of the dimensions above serve no more, but one for the last slope.
        needed = 1 + most - k if k == excesses else None
        e.append(_downwards(own, steepness[0], last, needed))
        p.append(torch.addcmul(_convolved(squares, e, k, needed), (dims[:needed] - 1) / 2, squares[k][:needed]))
    return [each[0] for each in g], [each[0] for each in p]


def _convolved(a: Sequence[Tensor], b: Sequence[Tensor], k: int, needed: int | None = None) -> Tensor:
    """Return sum_i a_i b_{k-i}, of the first `needed` dimensions."""
    total = a[0][:needed] * b[k][:needed]
    for i in range(1, k + 1):
        total = torch.addcmul(total, a[i][:needed], b[k - i][:needed])
    return total


def _downwards(own: Tensor, steep: Tensor, last: Tensor, needed: int | None) -> Tensor:
    """e_j = own_j + steep_j e_{j+1} for all j from the last, the first `needed` of them."""
    found = [last]
    for a, b in zip(reversed(own.unbind()), reversed(steep.unbind()), strict=True):
        found.append(torch.addcmul(a, b, found[-1]))
    return torch.stack(found[::-1][:needed])


def _log_partition(t: Tensor, dim: int) -> Tensor:
    top = _Top.at(t, _debye.value_rows(dim, t.dtype))
    above: Tensor = t / (top.s + top.start.order)
    return above + _logarithms(t, dim, top)


def _logarithms(t: Tensor, dim: int, top: _Top) -> Tensor:
    """Return W without its first term s - v, the only one that grows like kappa."""
    v = top.start.order
    above = t / (top.s + v)  # s - v
    total: Tensor = -v * torch.log1p(above / (2 * v)) - torch.log1p(above / v) / 2 + top.rest * top.rows[1]
    total = total + above / top.s * top.rows[2]
    total = total + torch.log1p((above + top.rest * top.rows[0]) / (2 * v))
    if top.start.steps:
        # L/D - 1 = t G+/D. A running sum adds in the same order whatever the shape.
        dims = _dims(t, dim, top)
        above = torch.stack(_lengths(t, dims, top)[-2::-1])
        total = total + torch.log1p(t / above / dims[:-1]).cumsum(0)[-1]
    return total


def _length(q: Tensor, dim: int) -> Tensor:
    """Invert by Newton's method, from the closed form of Amos' bound.

    The slope of L - L(q L^2) is (w + L - L(q L^2))/L. Four steps reach rounding in float64 for every D and q, three do
    in float32: the start is off by 3 % at most, and the error is squared.
    """
    a = (dim - 1) / 2
    length = (a + (a**2 + dim * (1 - q)).sqrt()) / (1 - q)
    for _ in range(4 if q.dtype == torch.float64 else 3):
        (ratio,), (radial,) = _series(q * length * length, dim, 0, 0)
        exact = ratio.reciprocal()
        w = radial * exact * exact
        # Bessel's equation L^2 - (D - 1) L - w = t holds at `exact`. Less the same expression at `length`, where t is
        # q length^2, it gives their difference, which for q near 1 is far below their rounding.
        excess = (((1 - q) * length - (dim - 1)) * length - w) / (length + exact - (dim - 1))
        length = length - excess * length / (w + excess)
    return length


def _entropy(q: Tensor, dim: int) -> Tensor:
    """W(t) - q L."""
    length = _length(q, dim)
    t = q * length * length
    top = _Top.at(t, _debye.value_rows(dim, t.dtype))
    v = top.start.order
    # (s - v) - q L stays finite where both grow like kappa.
    difference = ((1 - q) * length * length - v**2) / (length + top.s) - v
    finite: Tensor = q * length * difference / (top.s + v)
    return finite + _logarithms(t, dim, top)


@dataclass(frozen=True, eq=False)
class _Smooth:
    """Functions of a tensor and D that can be differentiated to any order.

    formula: (x, D) -> the values y. slope: (x, D, y) -> the dy/dx, made of functions of this kind. together: bytes of
    x that are read at a time.
    """

    formula: Callable[[Tensor, int], tuple[Tensor, ...]]
    slope: Callable[[Tensor, int, tuple[Tensor, ...]], tuple[Tensor, ...]]
    together: int = FEW

    def __call__(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            # The compiler stops at functions with a forward-mode rule. It differentiates the formula, and fuses it; the
            # index makes the number of steps a constant of the graph.
            return self.formula(x, operator.index(dim))
        # A pullback of torch.func that is called at the end holds tensors whose transform is over.
        x = torch._C._functorch.unwrap_if_dead(x)
        if is_plain(x):
            return self.values(x, dim)
        return cast("tuple[Tensor, ...]", _WithSlope.apply(x, dim, self))  # type: ignore[no-untyped-call]

    def values(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The formula of parts of x, one after the other."""
        together = self.together // x.element_size()
        if x.numel() <= together:
            return self.formula(x, dim)
        parts = [self.formula(part, dim) for part in torch.split(x.reshape(-1), together)]
        return tuple(torch.cat(part).reshape(x.shape) for part in zip(*parts, strict=True))


class _WithSlope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, functions: _Smooth) -> tuple[Tensor, ...]:
        return functions.values(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.dim, ctx.functions = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *output)
        ctx.save_for_forward(x, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *y = ctx.saved_tensors
        slopes = ctx.functions.slope(x, ctx.dim, tuple(y))
        terms = [u * slope for u, slope in zip(cotangents, slopes, strict=True) if u is not None]
        return (sum(terms[1:], terms[0]) if terms else None), None, None

    @tangent_rule
    def jvp(ctx: Any, saved: list[Tensor], tangent: Tensor, *_: Any) -> tuple[Tensor, ...]:
        x, *y = saved
        return tuple(tangent * slope for slope in ctx.functions.slope(x, ctx.dim, tuple(y)))


def derivatives(t: Tensor, dim: int, ratio: tuple[int, ...], radial: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """The derivatives of G and then of P of these orders, to rounding, by one pass."""
    if torch.compiler.is_compiling():
        # The compiler ignores caches.
        return _values(t, operator.index(dim), ratio, radial)
    return _smooth(ratio, radial)(t, dim)


def _values(t: Tensor, dim: int, ratio: tuple[int, ...], radial: tuple[int, ...]) -> tuple[Tensor, ...]:
    if (ratio, radial) == ((0,), ()):
        return (_ratio(t, dim),)
    g, p = _series(t, dim, max(ratio, default=0), max(radial, default=-1))
    found = [(g[k], k) for k in ratio] + [(p[k], k) for k in radial]
    # Copies, beside which the dimensions on the way are freed.
    return tuple(math.factorial(k) * value if k > 1 else value.clone() for value, k in found)


@functools.cache
def _smooth(ratio: tuple[int, ...], radial: tuple[int, ...]) -> _Smooth:
    """`derivatives` of these orders; their own derivatives are the next orders."""
    following = tuple(k + 1 for k in ratio), tuple(k + 1 for k in radial)
    return _Smooth(
        lambda t, dim: _values(t, dim, ratio, radial),
        lambda t, dim, _: _smooth(*following)(t, dim),
        MANY if (ratio, radial) == ((0,), ()) else FEW,
    )


def _alone(formula: Callable[[Tensor, int], Tensor], slope: Callable[[Tensor, int, Tensor], Tensor]) -> _Smooth:
    return _Smooth(lambda x, dim: (formula(x, dim),), lambda x, dim, y: (slope(x, dim, *y),))


def ratio(t: Tensor, dim: int) -> Tensor:
    """G(t) = A(kappa)/kappa to rounding."""
    return derivatives(t, dim, (0,))[0]


def ratio_slope(t: Tensor, dim: int) -> Tensor:
    """dG/dt to rounding."""
    return derivatives(t, dim, (1,))[0]


def radial(t: Tensor, dim: int) -> Tensor:
    """P(t) = dA/dkappa to rounding, for D >= 2."""
    return derivatives(t, dim, (), (0,))[0]


def log_partition(t: Tensor, dim: int) -> Tensor:
    """W(t) to rounding, for every t >= 0 and D >= 1."""
    return _VALUE(t, dim)[0]


def length(q: Tensor, dim: int) -> Tensor:
    """L = kappa/A where A(kappa)^2 = q, for 0 <= q < 1 and D >= 2."""
    return _LENGTH(q, dim)[0]


def entropy(q: Tensor, dim: int) -> Tensor:
    """The minimum over kappa of W - kappa sqrt(q), W(t) - q L, for 0 <= q < 1 and D >= 2."""
    return _ENTROPY(q, dim)[0]


def _length_slope(q: Tensor, dim: int, y: Tensor) -> Tensor:
    # dL/dq = L^2 L'(t) / (1 - 2 t L'(t)/L) with L' = -G'/G^2
    slope, radial = derivatives(q * y * y, dim, (1,), (0,))
    return -(y**3) * slope / radial


_VALUE = _alone(_log_partition, lambda t, dim, _: ratio(t, dim) / 2)
_LENGTH = _alone(_length, _length_slope)
# It is stationary in L.
_ENTROPY = _alone(_entropy, lambda q, dim, _: length(q, dim) / -2)

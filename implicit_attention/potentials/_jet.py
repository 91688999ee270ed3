"""Truncated power series of tensors: a formula evaluated on a series gives its derivatives of every order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self


class Jet:
    """The series c_0 + c_1 h + ... + c_K h^K, with the arithmetic of tensors that the recurrences of `_bessel` use."""

    def __init__(self, coefficients: Sequence[Tensor]) -> None:
        self.coefficients = tuple(coefficients)

    @classmethod
    def variable(cls, value: Tensor, order: int) -> Self:
        """`value` + h, up to h^order."""
        return cls([value, torch.ones_like(value), *[torch.zeros_like(value)] * (order - 1)][: order + 1])

    def derivative(self) -> Tensor:
        """The derivative of the highest order that is kept."""
        return math.factorial(len(self.coefficients) - 1) * self.coefficients[-1]

    def __neg__(self) -> Self:
        return type(self)([-a for a in self.coefficients])

    def __add__(self, other: Self | float) -> Self:
        if isinstance(other, Jet):
            return type(self)([a + b for a, b in zip(self.coefficients, other.coefficients, strict=True)])
        return type(self)([self.coefficients[0] + other, *self.coefficients[1:]])

    __radd__ = __add__

    def __sub__(self, other: Self | float) -> Self:
        return self + (-other)

    def __rsub__(self, other: float) -> Self:
        return -self + other

    def __mul__(self, other: Self | float) -> Self:
        if not isinstance(other, Jet):
            return type(self)([a * other for a in self.coefficients])
        a, b = self.coefficients, other.coefficients
        return type(self)([_convolved(a, b, k) for k in range(len(a))])

    __rmul__ = __mul__

    def reciprocal(self) -> Self:
        a = self.coefficients
        b = [a[0].reciprocal()]
        for k in range(1, len(a)):
            b.append(-b[0] * _convolved(a[1:], b, k - 1))
        return type(self)(b)

    def sqrt(self) -> Self:
        a = self.coefficients
        b = [a[0].sqrt()]
        for k in range(1, len(a)):
            inner = _convolved(b[1:], b[1:], k - 2) if k > 1 else 0.0
            b.append((a[k] - inner) / (2 * b[0]))
        return type(self)(b)


def _convolved(a: Sequence[Tensor], b: Sequence[Tensor], k: int) -> Tensor:
    """Return sum_i a_i b_{k-i}."""
    total = a[0] * b[k]
    for i in range(1, k + 1):
        total = total + a[i] * b[k - i]
    return total

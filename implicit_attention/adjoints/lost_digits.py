"""Integers times a fraction below 1, such that the product can be undone bit for bit.

A product x -> x n/m drops log2(m/n) bits of x. Here they go into a store, an integer for each entry: one step of
arithmetic coding, which puts the remainder of x by m in and takes one by n out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

#: The integers of a store stay below this; torch's have 63 bits and a sign.
_FULL = 2**62


class LostDigits:
    """A store of what the products with a fraction drop.

    Not for floats: state and store are integers of 64 bits.

    Args:
        fraction: n/m, in (0, 1).
        count: how many products are made.
        words: the integers of a store after its `count` products, which are to be undone; empty before the first.

    Examples:
        >>> import torch
        >>> from fractions import Fraction
        >>> from implicit_attention.adjoints.lost_digits import LostDigits
        >>> store, x = LostDigits(Fraction(4, 5), 1), torch.tensor([-123, 456])
        >>> y = store.multiply(x)
        >>> y.tolist(), LostDigits(Fraction(4, 5), 1, store.words).divide(y).tolist()
        ([-98, 365], [-123, 456])

    Reference: Maclaurin, Duvenaud and Adams (2015).
    """

    def __init__(self, fraction: Fraction, count: int, words: Sequence[Tensor] = ()) -> None:
        self.numerator, self.denominator = fraction.numerator, fraction.denominator
        power = self.denominator.bit_length() - 1
        #: The binary logarithm of the denominator; None where that is no power of two.
        self.power = power if 2**power == self.denominator else None
        self.words = list(words)
        self.turns = _turns(self.numerator, self.denominator, count)
        self.index = count if words else 0

    def multiply(self, x: Tensor) -> Tensor:
        """x n/m, up to n units; what it drops is kept."""
        known = self.words.pop() if self.index and self.index not in self.turns else None
        quotient, rest = _divided(x, self.denominator, self.power)
        word = rest if known is None else rest.add_(known, alpha=self.denominator)
        if self.numerator > 1:
            word, rest = _divided(word, self.numerator, None, positive=True)
            quotient = quotient.mul_(self.numerator).add_(rest)
        self.words.append(word)
        self.index += 1
        return quotient

    def divide(self, x: Tensor) -> Tensor:
        """The integer of which `multiply`, the last one that is not undone, made x."""
        word, self.index = self.words.pop(), self.index - 1
        if self.numerator > 1:
            x, rest = _divided(x, self.numerator, None)
            word = rest.add_(word, alpha=self.numerator)
        word, rest = _divided(word, self.denominator, self.power, positive=True)
        if self.index and self.index not in self.turns:
            self.words.append(word)
        return rest.add_(x, alpha=self.denominator)


def _divided(x: Tensor, by: int, power: int | None, *, positive: bool = False) -> tuple[Tensor, Tensor]:
    """The quotient, rounded down, and the remainder >= 0."""
    if power is not None:
        return x >> power, x & (by - 1)
    quotient = torch.div(x, by, rounding_mode="trunc" if positive else "floor")
    return quotient, torch.sub(x, quotient, alpha=by)


def _turns(numerator: int, denominator: int, count: int) -> frozenset[int]:
    """The products before which a new integer is begun, as the last one would be too large with another digit."""
    turns, bound = set(), 0
    for index in range(count):
        if bound * denominator + denominator > _FULL:
            turns.add(index)
            bound = 0
        bound = (bound * denominator + denominator - 1) // numerator
    return frozenset(turns)

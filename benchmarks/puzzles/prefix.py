"""The control: parities of the beginnings of a bit string, where what a token may see decides what can be learnt."""

from __future__ import annotations

import torch

from .models import Examples, Shape

#: Bits of strings to learn from.
LENGTH = 16


class Prefix:
    """Is the number of ones up to here odd?

    reach: how many bits before its own a token sees, None for all.
    """

    shape = Shape(features=2, classes=2)

    def __init__(self, reach: int | None) -> None:
        self.reach = reach

    def draw(self, count: int, generator: torch.Generator) -> Examples:
        return self.strings(count, LENGTH, generator)

    def test(self, name: str, count: int) -> Examples:
        """Of the set `k bits`."""
        length = int(name.split()[0])
        return self.strings(count, length, torch.Generator().manual_seed(2**31 + length))

    def strings(self, count: int, length: int, generator: torch.Generator) -> Examples:
        bits = torch.randint(2, (count, length), generator=generator)
        back = torch.arange(length)[:, None] - torch.arange(length)
        edges = (back >= 0) & (back <= (length if self.reach is None else self.reach))
        first = torch.zeros(count, length)
        first[:, 0] = 1
        return Examples(
            torch.stack([bits.float(), first], -1), edges.expand(count, length, length), bits.cumsum(-1) % 2
        )

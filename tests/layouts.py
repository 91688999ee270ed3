"""Tensors of random numbers in every layout in memory that torch knows, for tests of what must not depend on it."""

import math
import random

import torch


def _windows(make, shape, step):
    """Rows that overlap: (*lead, N, D) from N + D numbers, the same for all that leads."""
    *lead, rows, columns = shape
    return make((step * max(rows - 1, 0) + columns,)).unfold(0, columns, step).expand(*lead, rows, columns)


def _overlapping(make, shape, rng):
    """All axes, those of the batch too, step through the same few numbers."""
    steps = [rng.choice((1, 2, 3)) for _ in shape]
    return make((sum(step * (size - 1) for step, size in zip(steps, shape, strict=True)) + 1,)).as_strided(shape, steps)


def _odd_singletons(make, shape, rng):
    dense = make(shape)
    steps = [rng.choice((0, 1, 3, 7)) if size == 1 else step for size, step in zip(shape, dense.stride(), strict=True)]
    return dense.as_strided(shape, steps)


def _square(make, shape):
    size = max(shape[-2:])
    return make((*shape[:-2], size, size)), make.scale * math.sqrt(size)


def _qr(make, shape):
    square, scale = _square(make, shape)
    return (torch.linalg.qr(square)[0] * scale)[..., : shape[-2], : shape[-1]]


def _svd(make, shape):
    square, scale = _square(make, shape)
    return (torch.linalg.svd(square)[0] * scale)[..., : shape[-2], : shape[-1]]


def _eigh(make, shape):
    square, scale = _square(make, shape)
    return (torch.linalg.eigh(square + square.mT)[1] * scale)[..., : shape[-2], : shape[-1]]


def _solve(make, shape):
    *lead, rows, _ = shape
    matrix = 0.1 * make((*lead, rows, rows)) / (make.scale * rows) + torch.eye(rows, dtype=make.dtype)
    return torch.linalg.solve(matrix, make(shape))


#: name -> (make, shape, rng) -> a tensor of that shape; `make(shape)` are dense random numbers.
MATRICES = {
    "contiguous": lambda make, s, rng: make(s),
    "transposed": lambda make, s, rng: make((*s[:-2], s[-1], s[-2])).mT,
    "every other column": lambda make, s, rng: make((*s[:-1], 2 * s[-1]))[..., ::2],
    "every other row": lambda make, s, rng: make((*s[:-2], 2 * s[-2], s[-1]))[..., ::2, :],
    "one row expanded": lambda make, s, rng: make((*s[:-2], 1, s[-1])).expand(s),
    "one column expanded": lambda make, s, rng: make((*s[:-1], 1)).expand(s),
    "one sample expanded": lambda make, s, rng: make(s[-2:]).expand(s),
    "one number expanded": lambda make, s, rng: make((1,) * len(s)).expand(s),
    "sliced": lambda make, s, rng: make((*s[:-2], s[-2] + 3, s[-1] + 5))[..., 2 : 2 + s[-2], 3 : 3 + s[-1]],
    "one of three beside each other": lambda make, s, rng: make((*s[:-1], 3, s[-1]))[..., 1, :],
    "one of three within each other": lambda make, s, rng: make((*s, 3))[..., 1],
    "windows": lambda make, s, rng: _windows(make, s, 1),
    "windows with steps": lambda make, s, rng: _windows(make, s, 2),
    "overlapping": _overlapping,
    "axes reversed": lambda make, s, rng: make(s[::-1]).permute(*reversed(range(len(s)))),
    "rows first": lambda make, s, rng: make((s[-2], *s[:-2], s[-1])).movedim(0, -2),
    "columns first": lambda make, s, rng: make((s[-1], *s[:-1])).movedim(0, -1),
    "at an offset": lambda make, s, rng: make((math.prod(s) + 1,))[1:].view(s),
    "odd strides of single entries": _odd_singletons,
}
#: Of floating-point numbers that LAPACK takes.
NUMBERS = {
    "result of qr": lambda make, s, rng: _qr(make, s),
    "result of svd": lambda make, s, rng: _svd(make, s),
    "result of eigh": lambda make, s, rng: _eigh(make, s),
    "result of solve": lambda make, s, rng: _solve(make, s),
    "sign kept aside": lambda make, s, rng: torch.complex(t := make(s), -t).conj().imag,
}
#: No two entries of which share memory.
DISJOINT = (
    "contiguous",
    "transposed",
    "every other column",
    "every other row",
    "sliced",
    "one of three beside each other",
    "one of three within each other",
    "axes reversed",
    "rows first",
    "columns first",
    "at an offset",
)
#: Of tensors with one axis or none.
VECTORS = (
    "contiguous",
    "every other column",
    "one number expanded",
    "one of three within each other",
    "at an offset",
    "odd strides of single entries",
)


class Layouts:
    """Draws tensors in random layouts from one seed, and remembers which.

    Args:
        seed: of numbers and layouts.
        dtype: of the numbers.
    """

    def __init__(self, seed, dtype=torch.float64):
        self.rng = random.Random(seed)
        self.dtype = dtype
        self.used = []
        self._numbers = torch.Generator().manual_seed(seed)

    def normal(self, shape, dtype=None, scale=1.0):
        """Dense numbers."""
        return scale * torch.randn(shape, generator=self._numbers, dtype=dtype or self.dtype)

    def tensor(self, *shape, scale=1.0, dtype=None):
        """(*shape) of normal numbers."""
        dtype = self.dtype if dtype is None else dtype

        def make(size):
            return self.normal(size, dtype, scale)

        lapack = dtype in (torch.float32, torch.float64) and len(shape) > 1 and 0 not in shape
        make.dtype, make.scale = dtype, scale
        return self._drawn(make, shape, NUMBERS if lapack else {})

    def uniform(self, *shape, low, high):
        """(*shape) of numbers in [low, high]."""
        return self._drawn(
            lambda size: low + (high - low) * torch.rand(size, generator=self._numbers, dtype=self.dtype), shape
        )

    def flags(self, *shape):
        """(*shape), boolean, four in five True."""
        return self._drawn(lambda size: torch.rand(size, generator=self._numbers) < 0.8, shape)

    def symmetric(self, *shape, scale):
        """(*lead, N, N), symmetric matrices."""
        numbers = self.normal(shape, scale=scale)
        held = self._drawn(lambda size: torch.zeros(size, dtype=self.dtype), shape, kinds=DISJOINT)
        return held.copy_(numbers + numbers.mT)

    def _drawn(self, make, shape, more=(), kinds=None):
        if kinds is None:
            kinds = ("contiguous",) if not shape else VECTORS if len(shape) == 1 else [*MATRICES, *more]
        kind = self.rng.choice(kinds)
        self.used.append(kind)
        drawn = {**MATRICES, **NUMBERS}[kind](make, shape, self.rng)
        assert drawn.shape == torch.Size(shape), kind
        return drawn

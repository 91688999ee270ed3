"""Patterns and queries of the retrieval task: scikit-learn's digits, or a user's file."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
from torch import Tensor

TASKS = ("half-masked", "noisy")
#: Standard deviation of the noise; for a user's data in units of the data's own.
NOISE = 0.5


def load_digits() -> Tensor:
    """Load the 1797 digits of scikit-learn, (1797, 64) float64 in [-1, 1]."""
    from sklearn import datasets

    return torch.from_numpy(datasets.load_digits().data).to(torch.float64) / 8 - 1


@dataclasses.dataclass(frozen=True)
class DataSample:
    """Draws of a retrieval task; rows of `queries` and `targets` are first all half-masked ones, then all noisy ones.

    Attributes:
        keys: stored patterns, (*draws, M, D).
        queries: the states that are completed, (*draws, N, D), N even.
        targets: the patterns that the queries were made from, (*draws, N, D).
    """

    keys: Tensor
    queries: Tensor
    targets: Tensor

    @cached_property
    def usable(self) -> Tensor:
        """Return which patterns (*draws, M) are without NaN or infinity; only these are stored."""
        return self.keys.isfinite().all(-1)

    @property
    def finite(self) -> Tensor:
        """Return which queries (*draws, N) are without NaN or infinity."""
        return self.queries.isfinite().all(-1)

    @property
    def parts(self) -> tuple[slice, slice]:
        """Return the rows of each of the `TASKS`."""
        half = self.queries.shape[-2] // 2
        return slice(0, half), slice(half, None)

    @property
    def known(self) -> Tensor:
        """Return which entries (N, D) of the queries were not masked."""
        known = torch.ones(self.queries.shape[-2:], dtype=torch.bool, device=self.queries.device)
        known[self.parts[0], _kept(self.queries.shape[-1]) :] = False
        return known

    def draw(self, index: int) -> DataSample:
        """Return one of the draws."""
        return DataSample(self.keys[index], self.queries[index], self.targets[index])

    def first(self, count: int) -> DataSample:
        """Return the first `count` queries of each task in the first draw."""
        draw = self.draw(0)
        queries, targets = (torch.cat([t[p][:count] for p in self.parts]) for t in (draw.queries, draw.targets))
        return DataSample(draw.keys, queries, targets)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> DataSample:
        """Convert the sample for the solvers; a pattern that overflows in `dtype` is not usable."""
        return DataSample(*(t.to(device, dtype) for t in (self.keys, self.queries, self.targets)))


def _kept(dim: int) -> int:
    """Return the number of known entries of a half-masked query: the first half."""
    return (dim + 1) // 2


def draw(data: Tensor, *, patterns: int, queries: int, noise: float, draws: int, seed: int) -> DataSample:
    """Draw `draws` independent choices of `patterns` rows of `data`, with `queries` queries of each task.

    Half-masked: the second half of the entries (for an image the lower half) is 0. Noisy: Gaussian noise of standard
    deviation `noise` is added.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.stack([data[torch.randperm(len(data), generator=generator)[:patterns]] for _ in range(draws)])
    targets = keys[:, :queries]
    masked = targets.clone()
    masked[..., _kept(data.shape[1]) :] = 0
    noisy = targets + noise * torch.randn(targets.shape, generator=generator, dtype=targets.dtype)
    return DataSample(keys, torch.cat([masked, noisy], -2), torch.cat([targets, targets], -2))


def noise_of(data: Tensor | None) -> float:
    """Return the noise for a user's data, or for the digits (None)."""
    if data is None:
        return NOISE
    finite = data[data.isfinite()]
    return NOISE * float(finite.std(correction=0)) if finite.numel() else NOISE

"""The small problems by which kernels earn trust, and the products in float64 that they are compared with.

The comparison is made on the CPU, where it shares nothing with the kernel. It allows a small multiple of the error that
rounding to the kernel's precision makes by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import mean_and_logsumexp
from .fold import aligned
from .problem import Hopfield
from .trust import Errors, poisoned

# How many times the error of rounding alone, and how many units of float32 (or float64) beside that.
TIMES, UNITS = 4.0, 16.0


class AttentionVariant(NamedTuple):
    """What decides which code of torch's attention kernels runs, masks being numbers added to the scores."""

    dtype: torch.dtype
    head_dim: int
    mask: bool
    causal: bool
    #: Whether the rows of a mask begin at multiples of 16 bytes.
    aligned: bool


def attention_variant(keys: Tensor, *, mask: bool, causal: bool) -> AttentionVariant:
    dim = aligned(keys.shape[-1], keys.dtype)
    return AttentionVariant(keys.dtype, dim, mask, causal, keys.shape[-2] * keys.dtype.itemsize % 16 == 0)


# What kernels are compared with.


class Written:
    """Attention over the keys of a problem, written out in float64.

    With a `dtype` operands of products are rounded to it and sums to float32: the error of the plain computation.
    """

    def __init__(self, problem: Hopfield, dtype: torch.dtype | None = None) -> None:
        self.dtype, self.sum = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.field, self.keys, self.beta, self.anchor = (t.cpu().double() for t in problem[:4])
        pairs = torch.zeros(problem.field.shape[-2], problem.keys.shape[-2], dtype=torch.float64)
        if problem.is_causal:
            pairs = pairs.masked_fill(torch.ones_like(pairs, dtype=torch.bool).triu(1), -torch.inf)
        if problem.mask is not None:
            mask = problem.mask.cpu()
            pairs = pairs.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else pairs + mask.double()
        self.pairs = pairs

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype).double()

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.sum).double()

    def attend(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, mean and log-sum-exp at z; zeros where nothing is attended to."""
        scores = self.beta * self.summed(self.operand(z) @ self.keys.mT) + self.pairs
        peak = scores.amax(-1, keepdim=True)
        empty = peak == -torch.inf
        weights = self.summed((scores - peak.masked_fill(empty, 0.0)).exp())
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        mean = self.summed(self.operand(weights) @ self.keys / total)
        logsumexp = (peak + total.log()).masked_fill(empty, 0.0).squeeze(-1)
        return weights / total, mean, self.summed(logsumexp)

    def mapped(self, mean: Tensor) -> Tensor:
        return self.summed(self.anchor * self.field + (1 - self.anchor) * mean)

    def centred(self, p: Tensor, mean: Tensor, v: Tensor) -> Tensor:
        """p_j (<k_j, v> - <mean, v>), whose product with the keys is Cov v."""
        v = self.operand(v)
        return self.operand(p * self.summed(v @ self.keys.mT - (mean * v).sum(-1, keepdim=True)))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        p, mean, _ = self.attend(z)
        spread = self.summed(self.centred(p, mean, v) @ self.keys)
        return self.summed(v - (1 - self.anchor) * self.beta * spread)

    def gradients(self, z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """What u carries: (df/dK)^T u and <df/dbeta, u> per query."""
        p, mean, _ = self.attend(z)
        u = (1 - self.anchor) * u
        weights = self.centred(p, mean, u)
        by_keys = self.operand(p).mT @ self.operand(u) + self.beta * (weights.mT @ self.operand(z))
        return self.summed(by_keys), self.summed(((weights @ self.keys) * z).sum(-1))


class Comparison:
    """Collects the largest error of every quantity beside what is allowed."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self.errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, found: Tensor, exact: Tensor, rough: Tensor, *, size: float = 1.0) -> None:
        """`size` is that of terms which cancel in the result."""
        error, rounding = (float((t.cpu().double() - exact).abs().max()) for t in (found, rough))
        self.errors[name] = (error, TIMES * rounding + UNITS * self.unit * (size + float(exact.abs().max())))

    def none(self, name: str, wrong: Tensor) -> None:
        """Nothing of what must not be."""
        self.errors[name] = (float(wrong.sum()), 0.0)


def attention(variant: AttentionVariant, device: torch.device) -> Errors:
    """One evaluation as the solves make it, with masks whose rows are shared and with others."""
    # More than one block of either kind in torch's kernels, and a part of one.
    rows, count, dim = 33, 520 if variant.aligned else 515, variant.head_dim
    query, keys = (normal((2, size, dim), seed).to(variant.dtype) for seed, size in ((0, rows), (1, count)))
    masks: dict[str, Tensor | None] = {"": None}
    if variant.mask:
        masks = {f" ({what})": third_masked(*size, count) for what, size in (("keys", (1, 1)), ("pairs", (2, rows)))}
    scale = dim**-0.5
    number = torch.full((1, 1, 1), scale, dtype=torch.float64)
    # In half precision torch takes exponentials with 20 bits.
    found = Comparison(2**-20 if variant.dtype.itemsize == 2 else torch.finfo(variant.dtype).eps)
    for what, mask in masks.items():
        mask = None if mask is None else mask.to(variant.dtype)
        problem = Hopfield(query, keys, number, number, mask, variant.causal)
        written = (Written(problem), Written(problem, variant.dtype))
        (_, mean, logsumexp), (_, rough_mean, rough_logsumexp) = (w.attend(query.double()) for w in written)
        pairs = None if mask is None else mask.to(device)
        # Torch allocates the outputs: as likely as not where something of their size was freed.
        for size in (query.shape, query.shape[:2]):
            poisoned(torch.empty(size, dtype=variant.dtype, device=device))
        ours = mean_and_logsumexp(query.to(device), keys.to(device), pairs, scale, is_causal=variant.causal)
        found.add(f"mean{what}", ours[0], mean, rough_mean.to(variant.dtype).double())
        found.add(f"logsumexp{what}", ours[1], logsumexp, rough_logsumexp)
    return found.errors


# Numbers.


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same numbers on every machine, from a generator of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def third_masked(sets: int, rows: int, count: int) -> Tensor:
    """What is added to the scores, (sets, rows, M), -inf for a third of the keys but not for the first."""
    mask = normal((sets, rows, count), seed=2)
    mask = mask.masked_fill(mask < -0.4, -torch.inf)
    mask[..., 0] = 0.0
    return mask

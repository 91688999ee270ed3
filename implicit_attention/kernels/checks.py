"""The small problems by which kernels earn trust, and the products in float64 that they are compared with.

The comparison is made on the CPU, where it shares nothing with the kernel. It allows a small multiple of the error that
rounding to the kernel's precision makes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._fused_rule import FusedRule
from ..status import Status
from .attention import with_logsumexp
from .fold import aligned
from .problem import Hopfield
from .rule import RTOL, THERE, AdjointAnswer, AdjointRule, Solved
from .trust import Errors, poisoned

# The allowed error: so many times that of rounding alone, and so many units of float32 (or float64) beside it.
TIMES, UNITS = 4.0, 16.0
# Sizes of the small problems.
MAX_STEPS = 100
# Where the queries of small problems begin that attend to keys up to their own index.
OFFSET = 3

Solve = Callable[[Hopfield, Tensor, FusedRule], Solved]


class AttentionVariant(NamedTuple):
    """The properties that select the code path of torch's attention kernels; masks are numbers added to the scores."""

    dtype: torch.dtype
    head_dim: int
    mask: bool
    causal: bool
    #: Whether the rows of a mask begin at multiples of 16 bytes.
    aligned: bool


def attention_variant(keys: Tensor, *, mask: bool, causal: bool) -> AttentionVariant:
    dim = aligned(keys.shape[-1], keys.dtype)
    return AttentionVariant(keys.dtype, dim, mask, causal, keys.shape[-2] * keys.dtype.itemsize % 16 == 0)


# The reference for kernels.


class Written:
    """Attention over the keys of a problem, written out in float64.

    With a `dtype` operands of products are rounded to it and sums to float32: the error of the plain computation.
    """

    def __init__(self, problem: Hopfield, dtype: torch.dtype | None = None) -> None:
        self.dtype, self.sum = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.field, self.keys, self.beta, self.anchor = (t.cpu().double() for t in problem[:4])
        pairs = torch.zeros(problem.field.shape[-2], problem.keys.shape[-2], dtype=torch.float64)
        if problem.first is not None:
            pairs = pairs.masked_fill(torch.ones_like(pairs, dtype=torch.bool).triu(problem.first + 1), -torch.inf)
        if problem.mask is not None:
            mask = problem.mask.cpu()
            pairs = pairs.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else pairs + mask.double()
        self.pairs = pairs

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype).double()

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor if self.dtype is None else tensor.to(self.sum).double()

    def attend(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, mean and log-sum-exp at z; zeros for a query without keys."""
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
        """Return the pullbacks of u: (df/dK)^T u and <df/dbeta, u> per query."""
        p, mean, _ = self.attend(z)
        u = (1 - self.anchor) * u
        weights = self.centred(p, mean, u)
        by_keys = self.operand(p).mT @ self.operand(u) + self.beta * (weights.mT @ self.operand(z))
        return self.summed(by_keys), self.summed(((weights @ self.keys) * z).sum(-1))


class KernelComparison:
    """The largest error of every quantity, beside the allowed one."""

    def __init__(self, unit: float) -> None:
        self.unit = unit
        self.errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, measured: Tensor, exact: Tensor, rough: Tensor, *, size: float = 1.0) -> None:
        """`size` is that of terms which cancel in the result."""
        error, rounding = (float((t.cpu().double() - exact).abs().max()) for t in (measured, rough))
        self.errors[name] = (error, TIMES * rounding + UNITS * self.unit * (size + float(exact.abs().max())))

    def none(self, name: str, wrong: Tensor) -> None:
        """Add an entry for a quantity that must be zero."""
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
    measured = KernelComparison(2**-20 if variant.dtype.itemsize == 2 else torch.finfo(variant.dtype).eps)
    for what, mask in masks.items():
        mask = None if mask is None else mask.to(variant.dtype)
        problem = Hopfield(query, keys, number, number, mask, 0 if variant.causal else None)
        written = (Written(problem), Written(problem, variant.dtype))
        (_, mean, logsumexp), (_, rough_mean, rough_logsumexp) = (w.attend(query.double()) for w in written)
        pairs = None if mask is None else mask.to(device).expand(1, 2, rows, count)
        # Torch allocates the outputs, often where memory of their size was freed.
        for size in (query.shape, query.shape[:2]):
            poisoned(torch.empty(size, dtype=variant.dtype, device=device))
        given = [t.to(device)[None] for t in (query, keys, keys)]
        ours = with_logsumexp(*given, attn_mask=pairs, scale=scale, first=0 if variant.causal else None)
        measured.add(f"mean{what}", ours[0][0], mean, rough_mean.to(variant.dtype).double())
        measured.add(f"logsumexp{what}", ours[1][0], logsumexp, rough_logsumexp)
    return measured.errors


# Solves and adjoint solves of a kernel.


def solve_errors(small: Hopfield, solve: Solve, *, fixed_budget: bool = False) -> Errors:
    """Solve a small problem, and compare its report with measurements at its answers."""
    wide = small.beta.dtype
    rtol = 0.0 if fixed_budget else RTOL[small.keys.dtype]
    stop = FusedRule(rtol, 0.0, MAX_STEPS // 10 if fixed_budget else MAX_STEPS, plain_steps=2)
    solved = solve(small, small.field.to(wide), stop)
    z = solved.state.cpu().double()
    measured, mapped = [], []
    for written in (Written(small), Written(small, small.keys.dtype)):
        _, mean, logsumexp = written.attend(z)
        f = written.mapped(mean)
        measured.append((mean, logsumexp, (f - z).norm(dim=-1), rtol * f.norm(dim=-1)))
        mapped.append(f)
    found = KernelComparison(torch.finfo(wide).eps)
    for name, right, near in zip(("mean", "logsumexp", "residual", "tolerance"), *measured, strict=True):
        found.add(name, getattr(solved, name), right, near)
    if fixed_budget:
        # The equilibrium is reached long before: where f is z, up to the rounding of f.
        found.add("equilibrium", z, *mapped)
    steps, evals = solved.num_steps, solved.num_evals
    failed = (solved.residual > solved.tolerance) & (not fixed_budget)
    found.none("unsolved", failed | (solved.status != int(stop.exhausted if fixed_budget else Status.CONVERGED)))
    found.none("miscounted", (steps < 0) | (steps > stop.max_steps) | (evals <= steps) | (evals > stop.max_steps + 1))
    return found.errors


def adjoint_errors(
    small: Hopfield,
    solve: Solve,
    solve_adjoint: Callable[[Hopfield, Tensor, Tensor, Solved, AdjointRule], AdjointAnswer],
) -> Errors:
    """The same for an adjoint solve, which takes the results of an evaluation at the state."""
    wide, rtol = small.beta.dtype, RTOL[small.keys.dtype]
    state = solve(small, small.field.to(wide), FusedRule(rtol, 0.0, MAX_STEPS, plain_steps=2)).state
    there = solve(small, state, THERE)
    g, stop = normal(tuple(small.field.shape), seed=4).to(wide), AdjointRule(rtol, MAX_STEPS)
    measured = solve_adjoint(small, state, g.to(state.device), there, stop)
    z, u, g = state.cpu().double(), measured.value.cpu().double(), g.double()
    exact, rough = Written(small), Written(small, small.keys.dtype)
    products = [written.hessian_product(z, u) for written in (exact, rough)]
    residual, near = ((g - product).norm(dim=-1) for product in products)
    size = g.norm(dim=-1)
    compared = KernelComparison(torch.finfo(wide).eps)
    compared.add("residual", measured.residual, residual, near)
    compared.add("tolerance", measured.tolerance, rtol * size, rtol * size)
    # A product that is off by so much leaves that in the residual.
    noise = float(((products[1] - products[0]).norm(dim=-1) / size).max())
    compared.errors["cotangent left"] = float((residual / size).max()), 2 * (rtol + noise)
    for name, right, about in zip(("by_keys", "by_beta"), exact.gradients(z, u), rough.gradients(z, u), strict=True):
        compared.add(name, getattr(measured, name), right, about, size=small.field.shape[-1])
    steps = measured.num_steps
    compared.none("unsolved", measured.status != int(Status.CONVERGED))
    compared.none("called saddles", measured.negative_curvature)
    compared.none("miscounted", (steps < 0) | (steps > MAX_STEPS))
    return compared.errors


def small_problem(problem: Hopfield, rows: int, count: int) -> Hopfield:
    """Two sets of so many other queries and keys, with a mask of the same kind.

    Anchors and betas are such that few keys have one equilibrium too.
    """
    dim, device, wide = problem.field.shape[-1], problem.field.device, problem.beta.dtype
    field, keys = (normal((2, size, dim), seed) for seed, size in ((0, rows), (1, count)))
    beta = (torch.tensor([0.4, 0.5]).view(2, 1, 1) / dim**0.5).to(wide)
    anchor = torch.tensor([0.7, 0.8]).view(2, 1, 1).to(wide)
    mask = None
    if problem.mask is not None:
        mask = third_masked(2, rows if problem.mask.shape[-2] > 1 else 1, count)
        # One query attends to no key.
        mask[:, mask.shape[1] // 2] = -torch.inf if mask.shape[1] > 1 else mask[:, 0]
        mask = mask != -torch.inf if problem.mask.dtype == torch.bool else mask.to(wide)
        mask = mask.to(device)
    field, keys = field.to(device, problem.field.dtype), keys.to(device, problem.keys.dtype)
    return Hopfield(field, keys, beta.to(device), anchor.to(device), mask, None if problem.first is None else OFFSET)


def mask_kind(mask: Tensor | None) -> str:
    """The kind of a mask, by which a kernel chooses the code that reads it."""
    if mask is None:
        return "none"
    return f"{'boolean' if mask.dtype == torch.bool else 'added'} per {'pair' if mask.shape[-2] > 1 else 'key'}"


# Numbers.


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """The same numbers on every machine, from a generator of their own."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def third_masked(sets: int, rows: int, count: int) -> Tensor:
    """Return a bias for the scores, (sets, rows, M), -inf for a third of the keys but not for the first."""
    mask = normal((sets, rows, count), seed=2)
    mask = mask.masked_fill(mask < -0.4, -torch.inf)
    mask[..., 0] = 0.0
    return mask

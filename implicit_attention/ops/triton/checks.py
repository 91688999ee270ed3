"""The small problems by which the Triton kernels earn trust."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._fused_rule import FusedRule
from ...status import Status
from ..checks import Comparison, Written, normal, third_masked
from ..problem import Hopfield
from ..rule import RTOL, THERE, AdjointRule, Solved
from ..trust import Errors
from .layout import TILES, tiles

EPS = torch.finfo(torch.float32).eps
MAX_STEPS = 100


class Variant(NamedTuple):
    """What decides which code of a Triton kernel runs."""

    dtype: torch.dtype
    head_dim: int
    mask: str
    causal: bool
    #: Queries and keys per tile of every kernel involved.
    tiles: tuple[tuple[int, ...], ...]
    #: Whether a solve has a fixed budget.
    fixed_budget: bool


def variant(problem: Hopfield, kernels: tuple[str, ...], *, fixed_budget: bool) -> Variant:
    mask = "none"
    if problem.mask is not None:
        kind = "boolean" if problem.mask.dtype == torch.bool else "added"
        mask = f"{kind} per {'pair' if problem.mask.shape[-2] > 1 else 'key'}"
    sizes = tuple(tiles(kernel, problem)[:2] for kernel in kernels)
    return Variant(problem.keys.dtype, problem.field.shape[-1], mask, problem.is_causal, sizes, fixed_budget)


def _solve(problem: Hopfield, fixed_budget: bool) -> Errors:
    small = _small(problem)
    rtol = 0.0 if fixed_budget else RTOL[small.keys.dtype]
    stop = FusedRule(rtol, 0.0, MAX_STEPS // 10 if fixed_budget else MAX_STEPS, plain_steps=2)
    solved = _solved(small, small.field.float(), stop)
    z = solved.state.cpu().double()
    measured, mapped = [], []
    for written in (Written(small), Written(small, small.keys.dtype)):
        _, mean, logsumexp = written.attend(z)
        f = written.mapped(mean)
        measured.append((mean, logsumexp, (f - z).norm(dim=-1), rtol * f.norm(dim=-1)))
        mapped.append(f)
    found = Comparison(EPS)
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


def _adjoint(problem: Hopfield, _: bool) -> Errors:
    from .adjoint import solve_adjoint

    small = _small(problem)
    rtol = RTOL[small.keys.dtype]
    state = _solved(small, small.field.float(), FusedRule(rtol, 0.0, MAX_STEPS, plain_steps=2)).state
    there = _solved(small, state, THERE)
    g, stop = normal(tuple(small.field.shape), seed=4).float(), AdjointRule(rtol, MAX_STEPS)
    found = solve_adjoint(small, state, g.to(state.device), there.mean, there.logsumexp, stop)
    z, u, g = state.cpu().double(), found.value.cpu().double(), g.double()
    exact, rough = Written(small), Written(small, small.keys.dtype)
    products = [written.hessian_product(z, u) for written in (exact, rough)]
    residual, near = ((g - product).norm(dim=-1) for product in products)
    size = g.norm(dim=-1)
    compared = Comparison(EPS)
    compared.add("residual", found.residual, residual, near)
    compared.add("tolerance", found.tolerance, rtol * size, rtol * size)
    # A product that is off by so much leaves that in the residual.
    noise = float(((products[1] - products[0]).norm(dim=-1) / size).max())
    compared.errors["cotangent left"] = float((residual / size).max()), 2 * (rtol + noise)
    for name, right, about in zip(("by_keys", "by_beta"), exact.gradients(z, u), rough.gradients(z, u), strict=True):
        compared.add(name, getattr(found, name), right, about, size=small.field.shape[-1])
    steps = found.num_steps
    compared.none("unsolved", found.status != int(Status.CONVERGED))
    compared.none("called saddles", found.negative_curvature)
    compared.none("miscounted", (steps < 0) | (steps > MAX_STEPS))
    return compared.errors


#: Operation -> its check, and the kernels whose tiles it is made of.
CHECKS = {
    "hopfield_solve": (_solve, ("solve",)),
    "hopfield_adjoint": (_adjoint, ("solve", "adjoint", "keys")),
}


def _small(problem: Hopfield) -> Hopfield:
    """Two sets of other queries and keys, so many as fill the same tiles twice, with a mask of the same kind.

    Anchors and betas are such that few keys have one equilibrium too.
    """
    most = max(max(sizes.rows, sizes.keys) for table in TILES.values() for sizes in table.values())
    rows, count = min(problem.field.shape[-2], most + 5), min(problem.keys.shape[-2], 2 * most + 3)
    dim, device = problem.field.shape[-1], problem.field.device
    field, keys = (normal((2, size, dim), seed) for seed, size in ((0, rows), (1, count)))
    beta = torch.tensor([0.4, 0.5]).view(2, 1, 1) / dim**0.5
    anchor = torch.tensor([0.7, 0.8]).view(2, 1, 1)
    mask = None
    if problem.mask is not None:
        mask = third_masked(2, rows if problem.mask.shape[-2] > 1 else 1, count)
        # One query attends to nothing.
        mask[:, mask.shape[1] // 2] = -torch.inf if mask.shape[1] > 1 else mask[:, 0]
        mask = mask != -torch.inf if problem.mask.dtype == torch.bool else mask.float()
        mask = mask.to(device)
    field, keys = field.to(device, problem.field.dtype), keys.to(device, problem.keys.dtype)
    return Hopfield(field, keys, beta.to(device), anchor.to(device), mask, problem.is_causal)


def _solved(small: Hopfield, initial: Tensor, stop: FusedRule) -> Solved:
    from .solve import solve

    return solve(small, initial, stop)

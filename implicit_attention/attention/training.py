"""The solve and its read-out as one function of autograd, whose backward pass is two kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._autograd import applied, are_plain, exact_precision, unobserved
from ..adjoints.native import NativeSolve, native_gradients
from ..kernels.attention import flash_gradients, torch_chooses_flash, with_logsumexp
from ..kernels.problem import Hopfield
from .call import Sources
from .read_out import read_out_plain


def read_out_at(
    state: Tensor,
    mean: Tensor,
    values: Tensor,
    problem: Hopfield,
    solve: NativeSolve,
    sources: Sources | None,
    inputs: Hopfield,
) -> Tensor | None:
    """The values read out at native equilibria, differentiable; None where torch's kernel for the CPU does not read.

    The tensors are laid out as that kernel takes them, and all queries have answers.

    sources: where beta and anchor come from, if they are learned and have no graph.
    inputs: the tensors to differentiate by, as `inputs_of` has them.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        # Hooks must see all saved tensors, and this function keeps some past them.
        return None
    query, scale = scaled(state, problem.beta, sources)
    if not torch_chooses_flash(query, problem.keys, values, None, scale):
        return None
    return applied(_ReadOutAtEquilibrium, solve, (state, mean, query, problem), scale, sources, values, *inputs)


def inputs_of(problem: Hopfield, sources: Sources) -> Hopfield:
    """The problem with the parameters of learned numbers in their place: the tensors to differentiate by."""
    field, keys, beta, anchor, mask, first = problem
    of_beta, of_anchor = sources
    beta = beta if of_beta is None else of_beta.parameter
    return Hopfield(field, keys, beta, anchor if of_anchor is None else of_anchor.parameter, mask, first)


def scaled(z: Tensor, beta: float | Tensor, sources: Sources | None) -> tuple[Tensor, float]:
    """Queries and their scale, a number, for attention at the states z."""
    if isinstance(beta, Tensor):
        columns = columns_of(sources)
        return ((beta.detach().view(*beta.shape, 1, 1) if columns is None else columns) * z).contiguous(), 1.0
    return z.contiguous(), beta


def columns_of(sources: Sources | None) -> Tensor | None:
    """A learned beta with two more axes; None for one that the caller gave."""
    return None if sources is None or sources.beta is None else sources.beta.columns


#: The sources of numbers that the caller gave.
NONE = Sources(None, None)


class _ReadOutAtEquilibrium(torch.autograd.Function):
    """(solve, (state, mean, scaled state, problem), scale, sources, values, *inputs) -> the values at the state.

    The inputs are those of `inputs_of`.
    """

    # Without `setup_context`: torch would bind the arguments by their signature at every call.
    @staticmethod
    def forward(
        ctx: Any, solve: NativeSolve, solution: Any, scale: float, sources: Any, values: Tensor, *inputs: Any
    ) -> Tensor:
        state, mean, query, problem = solution
        ctx.solve, ctx.scale, ctx.sources = solve, scale, sources
        ctx.parts = [Tensor if isinstance(part, Tensor) else part for part in problem]
        ctx.save_for_backward(state, mean, values, *[t for t in problem if isinstance(t, Tensor)])
        ctx.kept = _kept(query, values, problem, scale)
        return ctx.kept[0].detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
        state, mean, values, *tensors = ctx.saved_tensors
        saved = iter(tensors)
        problem = Hopfield._make([next(saved) if part is Tensor else part for part in ctx.parts])
        kept, ctx.kept = ctx.kept, None
        plain = not torch.is_grad_enabled() and unobserved()
        if plain and are_plain(state.dtype, cotangent, values, problem.field, problem.keys):
            if kept is None or kept[0]._version != kept[2]:
                # A backward pass has used it up, or the caller wrote to the output.
                kept = _kept(scaled(state, problem.beta, ctx.sources)[0], values, problem, ctx.scale)
            gradients = _by_kernels(ctx, problem, state, mean, values, kept, cotangent)
            if gradients is not None:
                return gradients
        return _by_parts(ctx, problem, state, mean, values, cotangent)


def _kept(query: Tensor, values: Tensor, problem: Hopfield, scale: float) -> tuple[Tensor, Tensor, int, Tensor]:
    """The output, the log-sum-exp of the scores, the version of the output, and the scaled states."""
    output, logsumexp = with_logsumexp(query, problem.keys, values, attn_mask=None, scale=scale, first=problem.first)
    return output, logsumexp, output._version, query


def _by_kernels(
    ctx: Any, problem: Hopfield, state: Tensor, mean: Tensor, values: Tensor, kept: Any, cotangent: Tensor
) -> tuple[Any, ...] | None:
    """The gradients by torch's backward kernel and the native backward solve; None where the latter has none."""
    output, logsumexp, _, query = kept
    by_query, by_keys, by_values = flash_gradients(
        cotangent, query, problem.keys, values, output, logsumexp, None, ctx.scale, problem.first
    )
    of_beta, of_anchor = ctx.sources or NONE
    beta, beta_here = problem.beta, None
    if isinstance(beta, Tensor):
        columns = beta.view(*beta.shape, 1, 1) if of_beta is None else of_beta.columns
        beta_here = (by_query * state).sum_to_size(columns.shape).reshape(beta.shape)
        by_query = by_query.mul_(columns)
    of_state = native_gradients(problem, ctx.solve, state, mean, by_query)
    if of_state is None:
        return None
    by_field, keys_too, by_beta, by_anchor = of_state
    # The sum lies in memory as the one of autograd: the bits of later operations depend on the layout.
    by_keys = by_keys.add_(keys_too)
    by_beta = None if by_beta is None or beta_here is None else beta_here.add_(by_beta)
    if of_beta is not None and by_beta is not None:
        by_beta = of_beta.pull(by_beta)
    if of_anchor is not None and by_anchor is not None:
        by_anchor = of_anchor.pull(by_anchor)
    return None, None, None, None, by_values, by_field, by_keys, by_beta, by_anchor, None, None


def _by_parts(
    ctx: Any, problem: Hopfield, state: Tensor, mean: Tensor, values: Tensor, cotangent: Tensor
) -> tuple[Any, ...]:
    """The gradients by separate functions for the solve and the read-out, which have every derivative."""
    asked = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
    of_beta, of_anchor = ctx.sources or NONE
    with exact_precision(cotangent), torch.enable_grad():
        # Views, because one tensor in two places has two gradients here, which autograd adds.
        leaves: list[Any] = [t.view_as(t) if isinstance(t, Tensor) else t for t in (values, *problem)]
        problem = Hopfield._make(leaves[1:])
        if of_beta is not None:
            leaves[3] = of_beta.leaf()
            problem = problem._replace(beta=of_beta.formula(leaves[3]))
        if of_anchor is not None:
            leaves[4] = of_anchor.leaf()
            problem = problem._replace(anchor=of_anchor.formula(leaves[4]))
        z = ctx.solve.states(problem, state, mean)
        output = read_out_plain(z, problem.keys, leaves[0], problem.beta, problem.first)
    recorded = torch.is_grad_enabled()
    with exact_precision(cotangent):
        derivatives = torch.autograd.grad(
            output, [leaves[i] for i in asked], cotangent, create_graph=recorded, allow_unused=True
        )
    gradients: list[Tensor | None] = [None] * 11
    for i, gradient in zip(asked, derivatives, strict=True):
        gradients[4 + i] = gradient
    return tuple(gradients)

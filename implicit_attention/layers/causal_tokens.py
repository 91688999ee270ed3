"""Causal tokens solved one after the other, each given those before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._autograd import exact_precision
from .._solve import solve
from .._types import Impl, OnFailure
from ..adjoints import Adjoint
from ..energies.causal_tokens import CausalTokens
from ..errors import ConvergenceError
from ..problem import widened
from ..solution import AdjointReport, Record, SolveReport
from ..solvers import Solver


class InOrder(NamedTuple):
    """Tokens that were solved one after the other.

    Attributes:
        value: x, (*batch, N, D); float32 where the problem is in half precision.
        keys: (*batch, H, M + N, Y), of the earlier tokens and of these, with their graph: for the tokens that follow.
        report: how each token was solved, (*batch, N). Its `adjoint` stays empty:
        adjoints: how the backward solve of each token went, filled when a gradient was computed.
    """

    value: Tensor
    keys: Tensor
    report: SolveReport
    adjoints: tuple[AdjointReport, ...]


def solve_in_order(
    problem: CausalTokens,
    initial: Float[Tensor, "*batch N D"] | None = None,
    *,
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    on_failure: OnFailure = "raise",
) -> InOrder:
    """The fixed point of a causal problem, token by token: N problems of one token, given the keys of those before it.

    No later token is looked at, so that the bits of a token do not depend on any, and tokens may be added later: with
    the `keys` of this answer in the next problem. Where the fixed point is unique it is that of `solve(problem, ...)`;
    where a token has several, either may find another.

    Args:
        problem: a `CausalTokens`.
        initial: where each token starts, (*batch, N, D), by default at the field.
        solver: as of `solve`, for every token.
        adjoint: as of `solve`; gradients flow from each token to all earlier ones through their keys.
        impl: as of `solve`.
        on_failure: as of `solve`; an error says which token it is about.

    Returns:
        An `InOrder`: the tokens, the keys, and how each token was solved.

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: arguments that do not fit.

    Gradients: with respect to every tensor of the problem, as the adjoint says.

    Not for training on long sequences, where all at once takes fewer and larger products, and keeps the keys once
    instead of once per token: use `solve`.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.energies import CausalTokens
        >>> from implicit_attention.layers import solve_in_order
        >>> from implicit_attention.potentials import LayerNormPotential, TokenAttention
        >>> weights = 0.3 * torch.cos(torch.arange(24.0)).view(2, 3, 4)
        >>> norm, attention = LayerNormPotential(), TokenAttention(weights, weights, beta=1.0)
        >>> tokens = torch.sin(torch.arange(20.0)).view(5, 4)
        >>> problem = CausalTokens(norm, attention, None, tokens)
        >>> answer = solve_in_order(problem)
        >>> torch.allclose(answer.value, solve(problem, tokens).value, atol=1e-3), answer.report.status.tolist()
        (True, [0, 0, 0, 0, 0])
    """
    if not isinstance(problem, CausalTokens):
        raise TypeError(_validate.message("problem", "be a CausalTokens", type(problem).__name__))
    initial = problem.field if initial is None else initial
    problem.check_state(initial)
    problem, (initial,) = widened(problem, initial)
    keys, values, reports = problem.keys, [], []
    for index in range(initial.shape[-2]):
        try:
            solution = solve(
                problem.token(index, keys),
                initial[..., index : index + 1, :],
                solver=solver,
                adjoint=adjoint,
                impl=impl,
                on_failure=on_failure,
            )
        except ConvergenceError as error:
            raise ConvergenceError(f"token {index}: {error}") from None
        values.append(solution.value)
        reports.append(solution.report)
        new = keys_at(problem, solution.value)
        keys = new if keys is None else torch.cat([keys, new], dim=-2)
    if not reports:
        raise ValueError(_validate.message("problem", "have at least one token", f"shape {tuple(initial.shape)}"))
    assert keys is not None
    record = Record(*(torch.stack(fields, dim=-1) for fields in zip(*(r.record for r in reports), strict=True)))
    report = SolveReport(record, remedies=reports[0].remedies)
    return InOrder(torch.cat(values, dim=-2), keys, report, tuple(r.adjoint for r in reports))


def keys_at(problem: CausalTokens, x: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N Y"]:
    """The keys of solved tokens, NaN of those that are not finite, without gradient there: 0 * NaN would be NaN."""
    finite = x.isfinite().all(-1, keepdim=True)
    with exact_precision(x):
        keys = problem.attention.keys_of(problem.activation(x.where(finite, 0.0)))
    return keys.where(finite.unsqueeze(-3), torch.nan)

"""Causal tokens, each a problem that reads those before it, and those that are lost."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._solve import by_adjoint, solve
from .._torch import backward_running, host_may_look, in_own_precision, is_exporting, transforms_active
from ..adjoints import Adjoint, Implicit, Request, Unrolled
from ..energies.causal_tokens import CausalTokens
from ..failure import ConvergenceError, OnFailure, located, report_failures
from ..kernels.problem import Impl
from ..options import SolveOptions
from ..problem import Problem, TokenOrder, Tokens, of_problems, widened
from ..solution import AdjointReport, Record, Solution, SolveReport, Status
from ..solvers import Outcome, Picard, Solver
from .cache import KeyValueCache, check_cache


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

    The bits of a token depend on no later token, and tokens may be added later, with the `keys` of this answer in the
    next problem, and any solver may solve them. A unique fixed point is that of `solve(problem, ...)`; of several, the
    two functions may find different ones.

    Args:
        problem: a `CausalTokens`.
        initial: where each token starts, (*batch, N, D), by default at the field.
        solver: as of `solve`, for every token.
        adjoint: as of `solve`; gradients flow from each token to all earlier ones through their keys.
        impl: as of `solve`.
        on_failure: as of `solve`; an error names its token.

    Returns:
        An `InOrder`: the tokens, the keys, and how each token was solved.

    Raises:
        ConvergenceError: with on_failure="raise". TypeError, ValueError: arguments that do not fit.

    Gradients: with respect to every tensor of the problem, as the adjoint says.

    Not for training on long sequences: `solve` stops each token on its own, too, by fewer and larger products, and
    keeps the keys once instead of once per token.

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
                _token(problem, index, keys),
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
    report = SolveReport(record, remedies=reports[0].remedies, tolerances=reports[0].tolerances)
    return InOrder(torch.cat(values, dim=-2), keys, report, tuple(r.adjoint for r in reports))


def _token(problem: CausalTokens, index: int, keys: Float[Tensor, "*batch H K Y"] | None) -> CausalTokens:
    """The problem of one token, given the keys of all earlier tokens, those of the problem included."""
    attention, memory, rows = copy.copy(problem.attention), problem.memory, slice(index, index + 1)
    count = problem.field.shape[-2]
    if attention.mask is not None:
        before = 0 if keys is None else keys.shape[-2]
        mask = attention.mask.broadcast_to(*attention.mask.shape[:-2], count, count + before - index)
        attention.mask = mask[..., rows, : before + 1]
    if memory is not None and count > 1:
        chosen = torch.full((*problem.field.shape[:-2], 1), index, device=problem.field.device)
        memory = memory.select(chosen)
        if memory is None:
            required, received = "tell what it is for one token alone", type(problem.memory).__name__
            remedy = "define its `select`, or solve all tokens at once"
            _validate.refuse("memory", required, f"{received}, which cannot", remedy)
    found = type(problem)(problem.lagrangian, attention, memory, problem.field[..., rows, :], keys=keys)
    # A single token has no order, so that any solver can solve it.
    found.token_order = None
    return found


@in_own_precision
def keys_at(problem: CausalTokens, x: Float[Tensor, "*batch N D"]) -> Float[Tensor, "*batch H N Y"]:
    """The keys of solved tokens; those of tokens that are not finite are NaN without gradient: 0 * NaN would be NaN."""
    finite = x.isfinite().all(-1, keepdim=True)
    keys = problem.attention.keys_of(problem.activation(x.where(finite, 0.0)))
    return keys.where(finite.unsqueeze(-3), torch.nan)


# For layers whose tokens stop each on its own.


class Lost(NamedTuple):
    """Tokens, (*batch, heads, N), without an answer: they, or tokens that they read, are not finite."""

    tokens: Tensor

    def fill(self, x: Tensor, value: float = 0.0, *, trailing: int = 1) -> Tensor:
        """x, (*#batch, heads, N, ...) with as many further axes as `trailing` says, with `value` at these tokens."""
        return torch.where(self.tokens[(..., *(None,) * trailing)], value, x)

    def report(self, report: SolveReport, on_failure: Any, layer: str, event: int = 0) -> SolveReport:
        """The report in which problems with such tokens are NONFINITE, after an error or a warning about them.

        event: number of axes of `tokens` that belong to one problem, beside that of the tokens.
        """
        failed = self.tokens.flatten(-1 - event).any(-1) & ~report.failed
        record = report.record.nonfinite_at(failed)
        on_failure, site = located(on_failure)
        only = record._replace(status=record.status.masked_fill(~failed, int(Status.CONVERGED)))
        if not backward_running():
            remedies = {Status.NONFINITE: "look for NaN and infinities; tokens before the first of them are answered"}
            report_failures(on_failure, layer, only, remedies, site=site)
        return SolveReport(**report._parts | {"record": record})


def without_nonfinite(x: Tensor) -> tuple[Tensor, Tensor]:
    """x, (..., D), with 0 in the place of tokens that are not finite, and these tokens, (...).

    0 * NaN is NaN: in products and in gradients of weights such a token would spoil those before it.
    """
    lost = ~x.detach().isfinite().all(-1)
    if host_may_look(lost) and not bool(lost.any()):
        return x, lost
    return x.masked_fill(lost[..., None], 0.0), lost


def lost_tokens(order: TokenOrder, sites: Tensor | None, own: Tensor) -> Lost | None:
    """The tokens (*batch, heads, N) that are lost by their `own` numbers, and those that read them; None for none.

    sites: which tokens exist, (*#batch, #heads, N), or None for all.
    """
    if host_may_look(own) and not bool(own.any()):
        return None
    tokens = order.behind(own)
    return Lost(tokens if sites is None else tokens & sites)


# For calls of an `EnergyTransformer`.

_CAUSAL = "make the layer with causal=True"


def check_causal_call(layer: Any, x: Tensor, mask: Tensor | None, cache: object, return_energies: bool) -> None:
    """Raise unless an `EnergyTransformer` can solve the tokens x beside this cache."""
    if cache is not None:
        check_cachable(layer)
        check_cache(cache, layer._identity, tuple(x.shape[:-2]))
        _validate.require(mask is None, "mask", "be None beside a cache", "a mask", "use key_mask")
    required = "be False for causal=True: a pull of queries alone is the gradient of no energy"
    _validate.require(not (layer.causal and return_energies), "return_energies", required, return_energies)


def check_cachable(layer: Any) -> None:
    """Raise unless an `EnergyTransformer` can solve its tokens after those of a cache."""
    _validate.require(layer.causal, "causal", "be True for a cache", layer.causal, _CAUSAL)
    required = "be 'equilibrium' for a cache: published steps read earlier tokens as they are at every step"
    _validate.require(layer.mode != "published", "mode", required, "'published'", "call the layer on all tokens")


def pairs_that_exist(
    x: Tensor, mask: Tensor | None, key_mask: Tensor | None, cache: KeyValueCache | None
) -> tuple[Tensor | None, Tensor | None]:
    """Which of the tokens x exist, (*batch, N), and which of all they may read, (*#batch, N, M + N); None: all."""
    before = None if cache is None or cache.held is None else cache.held.key_mask
    if before is None and key_mask is None:
        return None, mask
    every = torch.ones((), dtype=torch.bool, device=x.device)
    parts = ((before, 0 if cache is None else cache.length), (key_mask, x.shape[-2]))
    earlier, own = ((every if m is None else m).expand(*x.shape[:-2], n) for m, n in parts)
    pairs = own[..., :, None] & torch.cat([earlier, own], dim=-1)[..., None, :]
    return own, pairs if mask is None else mask & pairs


@dataclasses.dataclass
class _EachToken:
    """The loop over tokens, which keeps the record of each, (*batch, N); `lost` are those without an answer."""

    lost: Tensor | None
    record: Record | None = None

    def run(self, solver: Solver, problem: Problem, initial: Tensor, *, trace: bool, graph: bool) -> Outcome:
        outcome = solver.run(Tokens(problem), initial, trace=trace, graph=graph)
        if isinstance(problem, CausalTokens) and not transforms_active():
            self.record = outcome.record if self.lost is None else outcome.record.nonfinite_at(self.lost)
        return outcome._replace(record=of_problems(outcome.record, 1))


def solve_tokens(
    problem: CausalTokens,
    x: Tensor,
    own: Tensor,
    options: SolveOptions,
    on_failure: Any,
    cache: KeyValueCache | None,
    key_mask: Tensor | None,
) -> Solution:
    """The solution with a record of each token (in a transform, of each sample); the tokens are added to the cache.

    The default solver makes plain steps. Without an energy that guards it Anderson failed where these converge: at
    N 32, D 64 and weights of standard deviation 0.02, memories of 0.1, in 3 of 4 samples within 1,000 steps, of which
    plain steps needed 120 to 193 to 1e-4. At smaller weights both needed the same few.

    own: tokens that are not finite, (*batch, N), which are 0 in the problem.
    """
    if options.solver is None:
        options = dataclasses.replace(options, solver=Picard(max_steps=1000))
    # A cache numbers heads; these states have none.
    begin = None if cache is None else cache.start(x.unsqueeze(-3))
    initial, solver = x if begin is None else begin.squeeze(-3), options.effective_solver
    adjoint = Unrolled() if options.explicit else options.effective_adjoint or Implicit()
    assert problem.token_order is not None
    lost = lost_tokens(problem.token_order, None, own)
    each = _EachToken(None if lost is None else lost.tokens)
    if is_exporting():
        solution = solve(problem, initial, solver=solver, adjoint=adjoint, on_failure=on_failure)
    else:
        report = AdjointReport(on_failure=on_failure.on_failure, site=on_failure.site)
        # The layer has checked its options.
        request = Request(problem, initial, solver, options.impl, False, report, by_token=each)
        solution = by_adjoint(request, adjoint)
    if lost is not None:
        solution = dataclasses.replace(solution, value=lost.fill(solution.value, torch.nan))
    if cache is not None:
        evals = solution.num_evals if each.record is not None else solution.num_evals[..., None]
        contents = cache.with_new(keys_at(problem, solution.value), None, key_mask)
        cache.commit(contents, solution.value.unsqueeze(-3), evals.unsqueeze(-2))
    return solution

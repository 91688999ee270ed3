"""Equilibrium attention as a function, and `attend`, which layers call: checks, heads, masks and the read-out.

A door makes one record of tensors, `Attention`, and `_solve` finds the states for it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from .._solve import HALF_SOLVER, fits_kernels, for_kernel, in_half, in_one_piece, is_finite, solve, solve_plainly
from .._torch import (
    HALF,
    at_least_single,
    host_may_look,
    in_own_precision,
    into_onnx,
    is_batched,
    is_exporting,
    is_fake,
    may_have_tangent,
    uncompiled,
    unobserved,
)
from ..adjoints import Implicit, Unrolled
from ..energies import AnchoredEnergy
from ..failure import FailurePolicy, FailureSite, Located, UnsupportedImplementation, Word, policy_of, without_gradient
from ..kernels.operations import solved_in_graph
from ..kernels.problem import Attention, mapped
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp, Potential, ReadsOut
from ..potentials._attention import Fold, differentiable, loses_nan, sdpa, triangle
from ..potentials._attention import attend as attend_folded
from ..potentials._read import surely_finite
from ..potentials.log_sum_exp import OverLogSumExp
from ..potentials.scored_keys import ScoredKeys
from ..solution import AdjointReport, Record, Solution, SolveReport, Status, Trace
from ..solvers import Picard
from ..solvers.loop import check_no_evidence, is_budget, stepped
from .masks import check_causal, check_order, check_whole, mask_and_bias

#: Makes a potential: (keys, beta, mask=, bias=) -> Potential; mask and bias are passed only if the call has them.
PotentialFactory: TypeAlias = Callable[..., Potential]

# Torch aligns new memory to a multiple of so many bytes.
LINE = 64
# Rows of so many numbers are aligned in any precision.
WIDTH = 4
_DEFAULTS = SolveOptions()


@overload
def equilibrium_attention(
    query: Float[Tensor, "*q N D"],
    key: Float[Tensor, "*k M D"],
    value: Float[Tensor, "*v M E"],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | None = ...,
    enable_gqa: bool = ...,
    *,
    anchor: float | Tensor = ...,
    query_offset: int = ...,
    potential: PotentialFactory = ...,
    return_solution: Literal[False] = ...,
    **options: Unpack[SolveKeywords],
) -> Tensor: ...
@overload
def equilibrium_attention(
    query: Float[Tensor, "*q N D"],
    key: Float[Tensor, "*k M D"],
    value: Float[Tensor, "*v M E"],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | None = ...,
    enable_gqa: bool = ...,
    *,
    anchor: float | Tensor = ...,
    query_offset: int = ...,
    potential: PotentialFactory = ...,
    return_solution: Literal[True],
    **options: Unpack[SolveKeywords],
) -> tuple[Tensor, Solution]: ...
@overload
def equilibrium_attention(
    query: Float[Tensor, "*q N D"],
    key: Float[Tensor, "*k M D"],
    value: Float[Tensor, "*v M E"],
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | Tensor | None = ...,
    enable_gqa: bool = ...,
    *,
    anchor: float | Tensor = ...,
    query_offset: int = ...,
    potential: PotentialFactory = ...,
    return_solution: bool,
    **options: Unpack[SolveKeywords],
) -> Tensor | tuple[Tensor, Solution]: ...
def equilibrium_attention(
    query: Float[Tensor, "*q N D"],
    key: Float[Tensor, "*k M D"],
    value: Float[Tensor, "*v M E"],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    *,
    anchor: float | Tensor = 0.5,
    query_offset: int = 0,
    potential: PotentialFactory = LogSumExp,
    return_solution: bool = False,
    **options: Unpack[SolveKeywords],
) -> Tensor | tuple[Tensor, Solution]:
    r"""Softmax attention whose queries first settle into the equilibrium of their energy over the keys.

    ```math
    \begin{align*}
    z &= a\,q + (1 - a)\, \operatorname{softmax}(\text{scale} \cdot z K^\top + \text{mask})\, K \\
    \text{output} &= \operatorname{softmax}(\text{scale} \cdot z K^\top + \text{mask})\, V
    \end{align*}
    ```

    The first is solved for every query q on its own, with a the anchor. Arguments up to `enable_gqa` mean what they
    mean in `torch.nn.functional.scaled_dot_product_attention`; `max_steps=0` is that function.

    Args:
        query: (*batch, N, D), or (*batch, H, N, D) with `enable_gqa`.
        key: (*batch, M, D); leading axes broadcast. With `enable_gqa` (*batch, Hkv, M, D), Hkv dividing H; nothing is
            copied.
        value: (*batch, M, E); E may differ from D.
        attn_mask: boolean (True = attend) or additive, broadcasts to (*batch, N, M). A query that attends to nothing
            gives zeros.
        dropout_p: part of the attention weights dropped in the read-out, always (pass 0 in evaluation); the
            equilibrium itself has no noise.
        is_causal: a query attends to keys up to its own index, both counted from the start; no mask of the pairs is
            written. Beside it, `attn_mask` may only say which keys exist, shape (..., 1, M).
        scale: inverse temperature beta > 0, default 1/sqrt(D); a tensor broadcasts to *batch (one per head: (H,)).
        enable_gqa: query head h reads key head h // (H / Hkv).
        anchor: in [0, 1], how much of the query stays, a float or a tensor that broadcasts to *batch. With 0 the query
            gets no gradient from the solve.
        query_offset: with `is_causal`, the index of the first query among the keys, where the queries are a part of a
            sequence: query i attends to keys up to query_offset + i.
        potential: makes the potential of the keys, (key, scale, mask=, bias=) -> Potential; mask and bias are given
            only where there are any. The output is its `readout`, the equilibrium z = anchor query + (1 - anchor) times
            its `mean`. Keys that are spread over processes: `functools.partial(ShardedLogSumExp, group=group)`.
        return_solution: return (output, solution): states, statuses, residuals, evaluations.
        **options: how the equilibrium is found and differentiated, see `SolveOptions`.

    Returns:
        (*batch, N, E) in the inputs' dtype. Half-precision problems are solved in float32, or as `solve` says by a
        card's kernels, beside which values are read out in half precision.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: `impl` cannot do what is asked for.
        ConvergenceError: with on_failure="raise".

    Gradients: with respect to query, key, value, an additive mask, scale and anchor, to any order (exact at the
    solution with `Implicit()`, ordinary ones with max_steps=0).

    Reference: Ramsauer et al. (2020) for the iteration without anchor; the read-out follows their layer.

    Examples:
        >>> import torch
        >>> from implicit_attention import equilibrium_attention
        >>> query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)
        >>> output, solution = equilibrium_attention(query, key, value, anchor=0.5, return_solution=True)
        >>> output.shape
        torch.Size([2, 4, 3, 6])
        >>> bool(solution.converged.all())
        True

    Not for queries, keys and values that have yet to be projected: use `ImplicitAttention`. Where keys and values are
    the queries themselves and move with them, use `SelfAttentionEnergy` with `solve`.
    """
    remedy = "without it every query attends to every key, wherever it stands"
    query_offset = _validate.check_offset("query_offset", query_offset, causal=bool(is_causal), remedy=remedy)
    chosen = _DEFAULTS.override(**options) if options else _DEFAULTS
    tensors = [("query", query), ("key", key), ("value", value)]
    _validate.check_tensors(tensors, min_ndim=3 if enable_gqa else 2)
    dropout_p = _validate.check_number("dropout_p", dropout_p, low=0.0, high=1.0)
    _check_shapes(query, key, value, enable_gqa)
    if not enable_gqa:
        batch, *others = (t.shape[:-2] for _, t in tensors)
        if not all(shape == batch for shape in others):
            # Torch takes as long for this as for a small solve.
            batch = torch.broadcast_shapes(batch, *others)  # type: ignore[no-untyped-call]
        query = query.expand(*batch, *query.shape[-2:])
    # Without a dimension all scores are 0 at any scale.
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    of, remedy = ("query", query), "parametrise it, for example exponentially"
    scale = _validate.check_per_batch("scale", scale, low=0.0, open_low=True, remedy=remedy, of=of)
    if isinstance(anchor, Tensor) and not (anchor.is_floating_point() or anchor.is_complex()):
        anchor = anchor.float()
    remedy = "parametrise it by a sigmoid"
    anchor = _validate.check_per_batch("anchor", anchor, low=0.0, high=1.0, remedy=remedy, of=of)
    shape = (*query.shape[:-1], key.shape[-2])
    if is_causal:
        check_order("is_causal", potential)
        check_causal("attn_mask", attn_mask, "is_causal")
    masks = (None, None) if attn_mask is None else mask_and_bias(attn_mask, shape=shape, like=query, name="attn_mask")
    first = query_offset if is_causal else None
    call = Attention(query, key, scale, anchor, *masks, first, value, dropout_p)
    attended = attend(call, chosen, grouped=enable_gqa, potential=potential, return_solution=return_solution)
    return (attended.output, attended.solution) if return_solution else attended.output  # type: ignore[return-value]


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> None:
    # Texts are made for errors only: sizes that torch.compile keeps open would be fixed by them.
    pairs = zip(reversed(query.shape[:-2]), reversed(key.shape[:-2]), strict=False)
    if not grouped and not all(q == k or 1 in (q, k) for q, k in pairs):
        required = f"have leading axes that broadcast with the query's {tuple(query.shape[:-2])}"
        remedy = "pass enable_gqa=True if its heads are fewer"
        _validate.refuse("key", required, f"shape {tuple(key.shape)}", remedy)
    if key.shape[-1] != query.shape[-1]:
        required = f"have the query's dimension {query.shape[-1]} on its last axis"
        _validate.refuse("key", required, f"shape {tuple(key.shape)}")
    if value.shape[-2] != key.shape[-2]:
        required = f"have one row for each of the {key.shape[-2]} keys"
        _validate.refuse("value", required, f"shape {tuple(value.shape)}")
    _validate.check_together("value", value.shape[:-2], key.shape[:-2], "the leading axes of `key`")


# Layers and hosts.


class Attended(NamedTuple):
    """The read-out of an attention call, and the solve behind it.

    Attributes:
        output: (*batch, H, N, E), or (*batch, N, E) without heads.
        state: the equilibrium that was read at, in the precision of the solve.
        report: the report that a layer may remember; from a compiled graph the `Record`, at which the host has not
            looked. None inside torch.vmap, which no tensor may leave.
        solution: the `Solution`, if the caller wants it or it was made on the way.
        weights: (*batch, H, N, M), if the caller wants them.
    """

    output: Tensor
    state: Tensor
    report: SolveReport | Record | None
    solution: Solution | None
    weights: Tensor | None = None


def attend(
    call: Attention,
    options: SolveOptions,
    *,
    initial: Tensor | None = None,
    grouped: bool | Literal["tiled"] = False,
    plain: bool | None = None,
    **asked: Any,
) -> Attended:
    """Equilibria of the queries over the keys, and the read-out there: softmax attention over values, or the state.

    With max_steps=0 nothing is solved: the read-out is taken at the query, and without values it is one step of the
    map.

    Under torch.compile the solve is one operation of the graph where there is one for it; the host then learns of
    failures when it reads the report. Otherwise the graph breaks once. Tensors that have shapes alone (meta, fake) take
    the same path.

    Args:
        call: the tensors, which fit each other.
        options: how the equilibria are found and differentiated.
        initial: where the solves start, by default at the query.
        grouped: whether fewer heads of keys are shared by heads of queries: head h reads key head h // (H / Hkv), or
            h mod Hkv if "tiled".
        plain: the value of `eager()`, if the caller has it.
        **asked: what is asked for beside tensors and options, see `_answer`.
    """
    if call.first is not None:
        call = _with_triangle(call, call.first, asked.get("potential", LogSumExp))
    heads, groups = call.query.shape[-3] if call.query.ndim > 3 or grouped else None, 1
    if grouped and not call.query.shape[-3] == call.keys.shape[-3] != 0:
        call, initial, groups = _split(call, initial, tiled=grouped == "tiled")
    if type(call.query) is Tensor and call.query.is_cpu and (eager() if plain is None else plain):
        # No compiler, mode or autocast is active that the call would have to be kept from.
        attended = _answer(call, initial, options, False, True, **asked)
    else:
        check_whole()
        if torch.compiler.is_compiling() and any(
            isinstance(part, Tensor) and may_have_tangent(part) for part in (*call, initial)
        ):
            raise UnsupportedImplementation(
                "equilibria have no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers) inside "
                "torch.compile; call them outside of it"
            )
        if exporting := is_exporting():
            check_no_evidence(asked.get("return_solution", False), "return_solution")
            check_no_evidence(asked.get("trace", False), "return_trajectory")
        in_graph = exporting or torch.compiler.is_compiling() or is_fake(call.query)
        if exporting and is_budget(options.effective_solver):
            # Products written out take any number of keys, torch's kernels at least one.
            options = options.override(impl="reference")
        else:
            in_graph = in_graph and not into_onnx() and _fits_graph(call, options, asked)
        attended = _exactly(call, initial, options, True, False, **asked) if in_graph else None
        attended = attended or _outside_graph(call, initial, options, False, False, **asked)
    assert attended is not None
    if groups > 1:
        attended = _merged(attended)
    if heads is not None and isinstance(attended.report, SolveReport) and attended.report.route is not None:
        attended.report.route.heads = heads
    return attended


def _with_triangle(call: Attention, first: int, potential: PotentialFactory) -> Attention:
    """The call with a mask in the place of `first`, unless the potential takes `first` itself."""
    count = call.keys.shape[-2]
    # An exported program must hold for other lengths.
    if not is_exporting():
        if first + 1 >= count:
            return call._replace(first=None)
        if call.mask is None and call.bias is None and potential is LogSumExp:
            return call
    lower = triangle(call.query.shape[-2], count, first, call.query.device)
    return call._replace(mask=lower if call.mask is None else call.mask & lower, first=None)


def _fits_graph(call: Attention, options: SolveOptions, asked: dict[str, Any]) -> bool:
    """Whether the solve may be an operation in the graph of a compiler, if there is one for it."""
    if asked.get("return_solution") or asked.get("trace") or asked.get("return_weights"):
        return False
    make, adjoint = asked.get("potential", LogSumExp), options.adjoint
    if make is not LogSumExp and not (isinstance(make, type) and OverLogSumExp in make.__bases__):
        return False
    if call.keys.shape[-2] == 0 or policy_of(options.on_failure).over == "raise" or options.impl == "reference":
        return False
    if call.bias is not None and call.bias.requires_grad:
        return False
    if options.explicit:
        return call.values is not None
    exact = adjoint is None or (isinstance(adjoint, Implicit) and adjoint.linear_solver is None)
    return exact and not options.effective_solver.fixed_budget


# The answer.


def _answer(
    given: Attention,
    initial: Tensor | None,
    options: SolveOptions,
    in_graph: bool,
    plain: bool,
    *,
    potential: PotentialFactory = LogSumExp,
    trace: bool = False,
    return_solution: bool = False,
    return_weights: bool = False,
    unbounded: Word = "raise",
    site: FailureSite | None = None,
) -> Attended | None:
    """The answer in the precision of the solve; None if a compiler's graph needs an operation, and there is none.

    Args:
        given: the tensors, without heads that share keys.
        initial: where the solves start.
        options: how the equilibria are found and differentiated.
        in_graph: whether the solve has to be an operation of a graph.
        plain: whether torch is known to run eagerly, and autocast not to be active.
        potential: what makes the potential of the keys.
        trace: keep the course of the iteration in the solution.
        return_solution: evaluate the residual also where nothing is solved; implied by `trace`.
        return_weights: return the attention weights.
        unbounded: see `AnchoredEnergy`; where nothing is solved it does not matter.
        site: the layer that calls.
    """
    if empty := given.keys.shape[-2] == 0:
        given = _with_masked_key(given)
    if site is None and isinstance(options.on_failure, FailurePolicy):
        site = options.on_failure._site
    able, dtype = potential is LogSumExp and not (empty or trace), given.query.dtype
    # On a card keys and values stay in half precision, in the kernels and where values are read out.
    half = able and given.keys.dtype in HALF and not options.explicit and in_half(given, options.impl)
    on_card, chosen = half and not in_graph, options
    if half:
        chosen = options.override(solver=options.solver or HALF_SOLVER, max_steps=options.max_steps)
    call = given._replace(query=given.query.float()) if on_card else _in_single(given)
    start = call.query if initial is None else at_least_single(initial)
    found: tuple[Tensor, SolveReport | Record, bool] | None = None
    explicit, plain = False, able and not (return_weights or given.dropout) and (plain or (not in_graph and eager()))
    if on_card or plain:
        explicit = options.plan.solver.max_steps == 0
        if not explicit:
            adjoint = AdjointReport(on_failure=options.on_failure, site=site)
            found = solve_plainly(given if half else call, start, chosen.plan, adjoint, whole=return_solution or half)
        # A read-out in half precision widens nothing.
        elif not return_solution and dtype not in HALF and options.impl == "auto":
            query = _read_at_once(call)
            told = SolveReport(Record.unmeasured(call.query, Status.EXPLICIT, 1))
            found = None if query is None else (query, told, False)
    # What needs no loop needs no energy.
    energy: AnchoredEnergy | None = None
    explicit = options.explicit if found is None else explicit

    def made() -> Potential:
        return _made(_in_single(call), potential, options) if energy is None else energy.potential

    def one_step() -> Tensor:
        wide = _in_single(call)
        whole = AnchoredEnergy(made(), wide.query, wide.anchor, unbounded="ignore") if energy is None else energy
        return whole.fixed_point_map(wide.query)

    try:
        if found is None:
            call, half = _in_single(call), half and in_graph
            energy = AnchoredEnergy(made(), call.query, call.anchor, unbounded="ignore" if explicit else unbounded)
            if call.values is not None or return_weights:
                reads_out(made())
            chosen, keys = (chosen, given.keys) if half else (options, None)
            found = _by_loop(energy, start, chosen, site, in_graph, return_solution, trace, keys)
            if found is None:
                return None
        state, evidence, failed = found
        if failed and policy_of(options.on_failure).forward == "explicit":
            lost = evidence.failed
            if not host_may_look(lost) or bool(lost.any()):
                state = torch.where(lost[..., None], one_step() if call.values is None else call.query, state)
        if explicit and given.keys.dtype == dtype in HALF:
            # A potential that computes a bias from its keys and beta would compute another in half precision.
            half = isinstance(scores := made(), ScoredKeys) and scores.bias is call.bias
        if call.values is None:
            output = one_step() if explicit else state
        # A wide bias is not rounded.
        elif half and all(t is None or t.dtype == given.keys.dtype for t in (given.values, given.bias)):
            output = _read_in_half(given._replace(beta=call.beta), state, potential, options)
        elif (
            not (failed or energy) and call.mask is call.bias is None and (call.first is None or is_finite(call.values))
        ):
            output = read_out_plain(state, call)
        else:
            output = read_out(made(), state, at_least_single(call.values), call.dropout)
    except (RuntimeError, ValueError) as error:
        _refuse_shapes(call, potential, error)
        raise
    weights = reads_out(made()).probabilities(state) if return_weights else None
    if empty and weights is not None:
        weights = weights[..., :0]
    anchor = call.anchor
    if explicit and call.values is not None and isinstance(anchor, Tensor) and anchor.requires_grad:
        # It has no effect, but a parameter without any gradient stops distributed training.
        output = output + 0 * anchor.sum()
    output = output.to(dtype)
    if not isinstance(evidence, Solution):
        return Attended(output, state, evidence, None, weights)
    report = None if is_batched(evidence.status) else evidence.report
    return Attended(output, state, report, evidence, weights)


def _read_in_half(given: Attention, z: Tensor, potential: PotentialFactory, options: SolveOptions) -> Tensor:
    """The values read out at z in the half precision of keys and values."""
    beta, values = given.beta, given.values
    if isinstance(beta, Tensor):
        # A rounded temperature would shift all scores alike; the rounding of a product does not.
        z, beta = beta[..., None, None] * z, 1.0
    assert values is not None
    # Scores that large have one key, which a shorter z attends to as well.
    most = torch.finfo(values.dtype).max / z.detach().abs().amax(-1, keepdim=True)
    z = z * most.clamp(max=1.0).nan_to_num(1.0)
    made = _made(given._replace(beta=beta), potential, options)
    return read_out(made, z.to(values.dtype), values, given.dropout)


def eager() -> bool:
    """Whether torch runs eagerly, `unobserved`, and its attention is its own."""
    return F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention and unobserved()


def _read_at_once(call: Attention) -> Tensor | None:
    """The query, at which torch's kernel may read values out; None where it may not answer as the potential does."""
    query, keys = call.query, call.keys
    if call.values is None or call.mask is not None or call.bias is not None or not fits_kernels(call):
        return None
    query = query if in_one_piece(query) else query.contiguous()
    # A query that is not finite must read NaN, and kernels do not always return it.
    if query.data_ptr() % LINE or not is_finite(query):
        return None
    # Keys that are not finite must not reach queries that do not attend to them.
    return query if not (loses_nan(keys) or call.first is not None) or is_finite(keys) else None


def _with_masked_key(call: Attention) -> Attention:
    """The call with one masked key in the place of no key: a query attends to nothing either way."""
    keys, values = (t if t is None else t.new_zeros(*t.shape[:-2], 1, t.shape[-1]) for t in (call.keys, call.values))
    assert keys is not None
    masked = torch.zeros(1, dtype=torch.bool, device=keys.device)
    return call._replace(keys=keys, values=values, mask=masked, bias=None, first=None)


def _in_single(call: Attention) -> Attention:
    """The call in the precision of the solve: float32 where it came in half precision."""
    for part in call:
        if isinstance(part, Tensor) and (part.dtype in HALF or part.dtype not in (call.query.dtype, torch.bool)):
            break
    else:
        return call
    # Keys, values and biases of another precision are refused by the potential.
    call = mapped(call, at_least_single)
    beta, anchor = (t.to(call.query.dtype) if isinstance(t, Tensor) else t for t in (call.beta, call.anchor))
    return call._replace(beta=beta, anchor=anchor)


_exactly = in_own_precision(_answer)
_outside_graph = uncompiled(_exactly)


def _made(call: Attention, potential: PotentialFactory, options: SolveOptions) -> Potential:
    """The potential of the keys."""
    made = made_by(potential, call.keys, call.beta, mask=call.mask, bias=call.bias, query_offset=call.first)
    if options.impl == "reference" and isinstance(made, LogSumExp | OverLogSumExp):
        return made.written_out()
    return made


def _by_loop(
    energy: AnchoredEnergy,
    start: Tensor,
    options: SolveOptions,
    site: FailureSite | None,
    in_graph: bool,
    wanted: bool,
    trace: bool,
    keys: Tensor | None,
) -> tuple[Tensor, Solution | Record, bool] | None:
    """The states, their evidence, and whether some may have failed; None if a graph has no operation for them.

    wanted: whether the residual is wanted where nothing is solved.
    keys: those of the operation of a graph, where they stay in half precision.
    """
    solver, impl, query = options.effective_solver, options.impl, energy.field
    if solver.max_steps == 0:
        if impl in ("native", "triton"):
            solves = f"`impl={impl!r}` solves, and max_steps=0 solves nothing"
            raise UnsupportedImplementation(f"{solves}; use impl='auto'")
        record = Record.unmeasured(query, Status.EXPLICIT, 1)
        found = record if in_graph else Solution(record, value=query.detach())
        if wanted or trace:
            # Without tolerances the status is EXPLICIT even where the query solves its problem.
            solver, start = Picard(rtol=0, atol=0, max_steps=0), query.detach()
            with torch.no_grad():
                found = solve(energy, start, solver=solver, adjoint=Unrolled(), on_failure="ignore", trace=trace)
        return query, found, False
    if in_graph and is_budget(solver):
        return stepped(solver, energy, start), Record.unmeasured(query, solver.end_rule.exhausted, 1), False
    if in_graph:
        given = for_kernel(energy, start, solver, impl, keys=keys)
        # Without the gradient of a bias.
        if given is None or (given[0].bias is not None and given[0].bias.requires_grad):
            return None
        # An exported program keeps no site, and counts nothing.
        state, record = solved_in_graph(*given, impl, options.on_failure, None if is_exporting() else site)
        return without_gradient(options.on_failure, record.failed, state), record, True
    on_failure: Any = options.on_failure if site is None else Located(options.on_failure, site)
    adjoint = options.effective_adjoint
    found = solve(energy, start, solver=solver, adjoint=adjoint, impl=impl, on_failure=on_failure, trace=trace)
    return found.value, found, True


# Heads.


def _split(call: Attention, initial: Tensor | None, *, tiled: bool) -> tuple[Attention, Tensor | None, int]:
    """Call and start with an axis along which the keys broadcast, and the number of query heads that share a head.

    The axis of heads becomes (Hkv, H / Hkv), or (H / Hkv, Hkv) if tiled: head h then shares the keys of head
    h // (H / Hkv), or h mod Hkv. An axis of size 1 becomes (1, 1). What has no such axis (a number, a smaller tensor,
    None) is the same for all heads and stays as it is.
    """
    heads, kv_heads = call.query.shape[-3], call.keys.shape[-3]
    required = f"have a number of heads that the {kv_heads} heads of `key` divide"
    received = f"{heads} heads, shape {tuple(call.query.shape)}"
    _validate.require(kv_heads > 0 and heads % kv_heads == 0, "query", required, received)
    groups, shared = heads // kv_heads, -4 if tiled else -3

    def split(given: Any, axis: int) -> Any:
        if not isinstance(given, Tensor) or given.ndim < -axis:
            return given
        sizes = (kv_heads, groups) if given.shape[axis] == heads else (given.shape[axis], 1)
        return given.unflatten(axis, sizes[::-1] if tiled else sizes)  # type: ignore[no-untyped-call]

    axes = {"query": -3, "beta": -1, "anchor": -1, "mask": -3, "bias": -3}
    parts: dict[str, Any] = {name: split(getattr(call, name), axis) for name, axis in axes.items()}
    parts["keys"], parts["values"] = (t if t is None else t.unsqueeze(shared) for t in (call.keys, call.values))
    return call._replace(**parts), split(initial, -3), groups


def _merged(attended: Attended) -> Attended:
    output, state, report, solution, weights = attended
    output, state = output.flatten(-4, -3), state.flatten(-4, -3)
    weights = None if weights is None else weights.flatten(-4, -3)
    if solution is not None:
        solution = _merged_solution(solution)
        report = None if report is None else solution.report
    elif report is not None:
        report = report.map(_merge_heads)
    return Attended(output, state, report, solution, weights)


def _merge_heads(of_problems: Tensor) -> Tensor:
    return of_problems.flatten(-3, -2)


def _merged_solution(solution: Solution) -> Solution:
    merged = solution.map(_merge_heads)
    trace, function, split = merged.trace, merged.energy_function, merged.value.shape
    if trace is not None:
        residual, energy, evals = (None if t is None else _merge_heads(t) for t in trace[:3])
        trace = Trace(residual, energy, evals, trace.value.flatten(-4, -3))  # type: ignore[arg-type]
    whole = None if function is None else lambda z: _merge_heads(function(z.reshape(split)))
    return dataclasses.replace(merged, value=merged.value.flatten(-4, -3), trace=trace, energy_function=whole)


# The potential and the read-out.


def made_by(
    make: PotentialFactory,
    keys: Tensor,
    beta: float | Tensor,
    *,
    named: tuple[str, str] = ("potential", "(keys, beta, mask=, bias=)"),
    **options: Any,
) -> Potential:
    """The potential that the factory, `named` with what it takes, makes with the options that are not None."""
    (argument, takes), given = named, {name: option for name, option in options.items() if option is not None}
    try:
        made: Any = make(keys, beta, **given)
    except TypeError as error:
        received = getattr(make, "__name__", repr(make))
        try:
            received += str(signature := inspect.signature(make))
            signature.bind(keys, beta, **given)
        except (TypeError, ValueError):
            remedy = "pass a class or function with these names; beta is a number, or has one for each head, (H,)"
            raise TypeError(_validate.message(argument, f"take {takes}", received, remedy)) from error
        raise
    if not isinstance(made, Potential):
        required = f"make a Potential from {takes}"
        _validate.refuse(argument, required, type(made).__name__, "for example LogSumExp", TypeError)
    return made


def _refuse_shapes(call: Attention, potential: Any, error: RuntimeError | ValueError) -> None:
    """Raise if a potential of the user's failed, in torch's words about shapes, on what the call gives it."""
    home, ours = str(getattr(potential, "__module__", "")), __name__.partition(".")[0]
    own = home.startswith(ours) or str(error).startswith("`")
    if not own and type(error) in (RuntimeError, ValueError) and _validate.OF_SHAPES.search(str(error)) is not None:
        given = {"keys": call.keys, "beta": call.beta, "mask": call.mask, "bias": call.bias, "states": call.query}
        required = "take " + ", ".join(f"{name} {tuple(t.shape)}" for name, t in given.items() if isinstance(t, Tensor))
        received = f"{getattr(potential, '__name__', repr(potential))}, which raised: {error}"
        remedy = "beta has one number for each head: multiply scores (*batch, H, N, M) by beta[..., None, None]"
        _validate.refuse("potential", required, received, remedy)


def read_out(potential: Potential, z: Tensor, values: Tensor, dropout_p: float) -> Tensor:
    """softmax(beta z K^T) V. A state that is not finite reads NaN and adds nothing to other gradients."""
    # Bits depend on the alignment of z. They are those of the copy below, which is aligned, as all new memory is.
    if isinstance(potential, ScoredKeys) and surely_finite(z) and z.data_ptr() % LINE == 0:
        return potential.readout(z, values, dropout_p=dropout_p)
    lost = ~torch.isfinite(z).all(-1, keepdim=True)
    output = reads_out(potential).readout(z.masked_fill(lost, 0.0), values, dropout_p=dropout_p)
    return output.masked_fill(lost, torch.nan)


def reads_out(potential: Potential) -> ReadsOut:
    """The potential, or an error if it has no weights to read values out with."""
    if isinstance(potential, ReadsOut):
        return potential
    raise UnsupportedImplementation(
        f"{type(potential).__name__} has no attention weights (no methods `probabilities` and `readout`); use "
        "readout='state', without weights"
    )


def read_out_plain(z: Tensor, call: Attention) -> Tensor:
    """softmax(beta z K^T) V of finite states, keys and values, as `LogSumExp.readout` has it, without a mask."""
    keys, values, beta, first = call.keys, call.values, call.beta, call.first
    assert values is not None
    query, scale = (beta[..., None, None] * z, 1.0) if isinstance(beta, Tensor) else (z, beta)
    differentiated = torch.is_grad_enabled() and (query.requires_grad or keys.requires_grad or values.requires_grad)
    kernel = differentiable if differentiated else sdpa
    if is_laid_out(z.shape, keys.shape, values.shape):
        # The same as `attend_folded`, for tensors that lie as the kernel takes them.
        if first is None and not differentiated and query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1:
            return F.scaled_dot_product_attention(query, keys, values, scale=scale)
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
        return kernel(query, keys, values, attn_mask=None, scale=scale, first=first)[0]
    fold = Fold(z.shape[:-2], keys.shape[:-2], values.shape[:-2])
    keys, values = (fold.rows(fold.moved(t)) for t in (keys, values))
    return fold.restored(attend_folded(kernel, fold, fold.moved(query), keys, values, None, scale, first)[0])


@functools.lru_cache(maxsize=1024)
def is_laid_out(shape: torch.Size, of_keys: torch.Size, of_values: torch.Size) -> bool:
    """Whether torch's kernel takes tensors of these shapes, and takes them aligned, as they are."""
    return len(shape) == 4 and of_keys == of_values and shape[:-2] == of_keys[:-2] and shape[-1] % WIDTH == 0

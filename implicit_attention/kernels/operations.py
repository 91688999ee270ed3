"""The operations that torch knows by name: equilibria of attention and their adjoint solves, by a kernel or the loop.

They are in the graphs of autograd and of the compiler, under torch.vmap and in exported programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._torch import is_fake, may_have_tangent, state_dtype
from ..failure import (
    FailureSite,
    OnFailure,
    UnsupportedImplementation,
    forgiven,
    left_out,
    lost,
    of_text,
    report_failures,
    text_of,
    unread,
)
from ..linear import CG
from ..linear.base import adjoint_rtol
from ..solution import Record
from .problem import MAX_STEPS, SOLVE_RTOL, AdjointAnswer, Attention, FusedRule, Impl, Solved, check_impl
from .trust import captures

_PROBLEM = "Tensor field, Tensor keys, Tensor beta, Tensor anchor, Tensor? mask, SymInt? first"
_EIGHT = f"({', '.join(['Tensor'] * 8)})"


def refuse_tangents(operation: str, *inputs: Any) -> None:
    """Raise in forward mode, for which torch lets an operation have no rule: every derivative would be 0."""
    if any(isinstance(t, Tensor) and may_have_tangent(t) for t in inputs):
        raise UnsupportedImplementation(
            f"`{operation}` has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual numbers); use "
            "solve(AnchoredEnergy(LogSumExp(keys, beta), query, anchor), query), which has every derivative"
        )


def _record(arguments: tuple[Any, ...]) -> Attention:
    """The record of an operation's arguments, whose numbers have two axes more."""
    query, keys, beta, anchor, mask, first = arguments
    return Attention.of(query, keys, beta[..., 0, 0], anchor[..., 0, 0], mask, first)


def _arguments(call: Attention) -> tuple[Any, ...]:
    """The arguments of an operation: views with as many axes as the query, which torch.vmap needs."""
    query, pairs, axes = call.query, call.pairs, call.query.ndim
    wide = state_dtype(query.dtype)
    given = (call.beta, call.anchor)
    numbers = (t.to(wide) if isinstance(t, Tensor) else query.new_full((), t, dtype=wide) for t in given)
    beta, anchor = (t[(None,) * (axes - 2 - t.ndim)][..., None, None] for t in numbers)
    keys = call.keys[(None,) * (axes - call.keys.ndim)]
    pairs = None if pairs is None else pairs[(None,) * (axes - pairs.ndim)]
    return query, keys, beta, anchor, pairs, call.first


def _run_solve(*args: Any) -> tuple[Tensor, ...]:
    from .._solve import solved

    return _unshared(solved(_record(args[:6]), args[6], FusedRule(*args[7:11]), args[11]))


def _run_adjoint(*args: Any) -> tuple[Tensor, ...]:
    from .._solve import adjoint_solved

    call, (state, cotangent, rtol, max_steps, impl, text) = _record(args[:6]), args[6:12]
    # Torch leaves out arguments that have their default.
    handle, evaluation = args[12] if len(args) > 12 else None, args[13:]
    options = (rtol, max_steps), impl, evaluation
    answer = adjoint_solved(call, state, cotangent, *options)
    on_failure, site = of_text(text), FailureSite.of(handle)
    if site is not None and site.tally is not None:
        site.tally.add_backward(*answer[1:5], lost(answer.status, cotangent))
    if not captures(answer.status.device):
        # A compiled graph has no other place that could report its backward pass.
        what = "the adjoint solve of `hopfield_solve`, whose gradient is therefore wrong,"
        reported = answer.record._replace(status=forgiven(answer.status, cotangent))
        report_failures(on_failure, what, reported, CG.remedies, site=site, side="backward")
    if (rest := left_out(on_failure, answer.status, cotangent)) is not None:
        again = adjoint_solved(call, state, rest, *options)
        answer = answer._replace(value=again.value, by_keys=again.by_keys, by_beta=again.by_beta)
    return _unshared(answer)


def _unshared(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # Results of an operation share no memory.
    return tuple(t.clone(memory_format=torch.contiguous_format) for t in tensors)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.first, ctx.rtol, (ctx.impl, ctx.on_failure) = inputs[5], inputs[7], inputs[11:13]
    site = inputs[13] if len(inputs) > 13 else None
    ctx.save_for_backward(*inputs[:5], *output[:3], site)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, cotangent: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    from .._solve import in_half

    field, keys, beta, anchor, mask, state, mean, logsumexp, site = ctx.saved_tensors
    if cotangent is None:
        return (None,) * 14
    refuse_tangents("hopfield_solve", cotangent)
    problem = (field, keys, beta, anchor, mask, ctx.first)
    rest = unread(state, cotangent, 1)
    state, mean, field = (t.masked_fill(rest[..., None], 0.0) for t in (state, mean, field))
    logsumexp = logsumexp.masked_fill(rest, 0.0)
    # Half precision that is widened has the tolerance of the precision in which products are then formed.
    products = keys.dtype if in_half(_record(problem), ctx.impl) else state.dtype
    rtol = adjoint_rtol(ctx.rtol, products) if keys.dtype in (state.dtype, products) else None
    options = rtol, MAX_STEPS, ctx.impl, ctx.on_failure, site
    answer = AdjointAnswer(*adjoint_op(*problem, state, cotangent, *options, mean, logsumexp))
    by_anchor = (answer.value * (field - mean)).sum(-1, keepdim=True)
    gradients = (anchor * answer.value, answer.by_keys, answer.by_beta[..., None], by_anchor)
    # The gradients of broadcast tensors are sums.
    likes = (field, keys, beta, anchor)
    return (*(g.sum_to_size(t.shape).to(t.dtype) for g, t in zip(gradients, likes, strict=True)), *(None,) * 10)


def _batched(operation: Any, states: tuple[int, ...], site: int) -> Callable[..., tuple[Any, Any]]:
    """The rule of torch.vmap: one more leading axis, of which all but the arguments `states` may have size 1."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        given: list[Any] = []
        for index, (argument, dim) in enumerate(zip(args, in_dims, strict=True)):
            # The number of a site has no such axis.
            if isinstance(argument, Tensor) and index != site:
                argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
                if index in states:
                    argument = argument.expand(info.batch_size, *argument.shape[1:])
            given.append(argument)
        return operation(*given), (0,) * 8

    return rule


solve_op = torch.library.custom_op(
    "implicit_attention::hopfield_solve",
    _run_solve,
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor initial, float rtol, float atol, int max_steps, int plain_steps, str impl, "
    f"str on_failure, Tensor? site=None) -> {_EIGHT}",
)
solve_op.register_autograd(_backward, setup_context=_setup)
solve_op.register_vmap(_batched(solve_op, states=(0, 6), site=13))


@solve_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return Solved.allocated(args[6].new_empty, args[6].shape, args[6].dtype)


adjoint_op = torch.library.custom_op(
    "implicit_attention::hopfield_adjoint",
    _run_adjoint,
    mutates_args=(),
    schema=f"({_PROBLEM}, Tensor state, Tensor cotangent, float? rtol, int max_steps, str impl, str on_failure, "
    f"Tensor? site=None, Tensor? mean=None, Tensor? logsumexp=None) -> {_EIGHT}",
)


@adjoint_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    keys, state = args[1], args[6]
    return AdjointAnswer.allocated(state.new_empty, state.shape, keys.shape, state.dtype)


# The gradient of the keys, an output, has the new axis too.
adjoint_op.register_vmap(_batched(adjoint_op, states=(0, 1, 6, 7, 13, 14), site=12))


def solved_in_graph(
    call: Attention, initial: Tensor, rule: FusedRule, impl: Impl, on_failure: OnFailure, site: FailureSite | None
) -> tuple[Tensor, Record]:
    """A fused solve as one operation that a compiler keeps in its graph, with a first derivative.

    A backward solve that fails is reported as `on_failure` says, at the `site`.
    """
    # On an accelerator a number of the host would keep the graph from being captured.
    numbered = site is not None and not is_fake(initial) and (initial.device.type == "cpu" or site.tally is not None)
    handle = site.handle if site is not None and numbered else None
    found = Solved(*solve_op(*_arguments(call), initial, *rule, impl, text_of(on_failure), handle))
    return found.state, found.record


def hopfield_solve(
    query: Float[Tensor, "*batch N D"],
    keys: Float[Tensor, "*#batch M D"],
    *,
    beta: float | Float[Tensor, "*#batch"],
    anchor: float | Float[Tensor, "*#batch"] = 0.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    initial: Float[Tensor, "*batch N D"] | None = None,
    rtol: float | None = None,
    atol: float = 1e-8,
    max_steps: int = 200,
    plain_steps: int = 3,
    impl: Impl = "auto",
) -> Solved:
    r"""The equilibrium z of every query x, each solved on its own; with a the anchor:

    ```math
    z = a\,x + (1 - a)\, \operatorname{softmax}(\beta z K^\top)\, K
    ```

    Picard's iteration, accelerated from step `plain_steps` on where that lowers the energy: what `Anderson(history=1)`
    does to an `AnchoredEnergy`, in one operation.

    Args:
        query: x, (*batch, N, D).
        keys: K, (*batch, M, D); leading axes broadcast, and are not copied (grouped queries: one axis more).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch.
        mask: boolean (True = the query attends to the key), or added to the scaled scores; broadcasts to
            (*batch, N, M). What a masked key holds must be finite.
        is_causal: a query attends to keys up to its own index, both counted from the start; no mask is written.
        query_offset: with `is_causal`, the index of the first query among the keys: query i attends to keys up to
            query_offset + i.
        initial: where to start, default the query.
        rtol: a query is done when |f(z) - z|_2 <= atol + rtol |f(z)|_2. None is 1e-4; for Triton's products of
            keys in half precision, which know residuals to 2e-6 |f(z)|, 1e-3, and at least 1e-5.
        atol: with 0 for both exactly `max_steps` steps are made, without any look of the host.
        max_steps: largest number of updates of a query.
        plain_steps: steps before acceleration, at least 2; more than `max_steps` is Picard's iteration.
        impl: "native" (compiled for this CPU), "triton" (for a GPU), "auto", the one of them that can do it and is
            right on this machine (`kernel_checks`), or else the solvers' loop over torch's attention kernels, or
            "reference", the loop with every product written out.

    Returns:
        `Solved`: state, and what was measured there. In half precision the state is float32; the products of
        impl="triton" are in float16, and those of the last evaluation of a query in twice its digits.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: `impl` cannot do it, such as
            impl="triton" a finer rtol in half precision, or is wrong on this machine, and why.

    Gradients: of `state`, exact where it converged, at saddles too, with respect to query, keys, beta and anchor, not
    to an additive mask; first order, by backward passes, of which one that fails warns. `implicit_attention.solve` has
    all orders and forward mode.

    Not for derivatives of second order, forward mode, a bias with a gradient or another potential: use `solve` with
    `AnchoredEnergy`.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import hopfield_solve
        >>> query, keys = torch.randn(2, 4), torch.randn(70, 4)
        >>> found = hopfield_solve(query, keys, beta=0.3, anchor=0.5)
        >>> found.state.shape, bool((found.residual <= found.tolerance).all())
        (torch.Size([2, 4]), True)

    Reference: Ramsauer et al. (2020) for the iteration, Walker and Ni (2011) for the acceleration.
    """
    from .._solve import in_half

    states = {"initial": query if initial is None else initial}
    call, (start,) = _checked("hopfield_solve", impl, states, query, keys, beta, anchor, mask, is_causal, query_offset)
    if rtol is None:
        rtol = SOLVE_RTOL if in_half(call, impl) else 1e-4
    rtol = _validate.check_number("rtol", rtol, low=0.0)
    atol = _validate.check_number("atol", atol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    plain_steps = _validate.check_integer("plain_steps", plain_steps, low=2)
    plain, remedy = mask is None or not mask.requires_grad, "use solve() with LogSumExp(bias=mask)"
    _validate.require(plain, "mask", "not require grad", "one that does", remedy)
    return Solved(*solve_op(*_arguments(call), start, rtol, atol, max_steps, plain_steps, impl, "warn"))


def hopfield_adjoint(
    query: Float[Tensor, "*batch N D"],
    keys: Float[Tensor, "*#batch M D"],
    state: Float[Tensor, "*batch N D"],
    cotangent: Float[Tensor, "*batch N D"],
    *,
    beta: float | Float[Tensor, "*#batch"],
    anchor: float | Float[Tensor, "*#batch"] = 0.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    rtol: float | None = None,
    max_steps: int = MAX_STEPS,
    impl: Impl = "auto",
) -> AdjointAnswer:
    """The u with A u = cotangent, A = I - (1 - anchor) beta Cov(z), and the gradients of z that it carries.

    By conjugate gradients for each query, in tiles: the memory is O((N + M) D) beside one tile. dL/dx = anchor u,
    dL/dK = `by_keys`, dL/dbeta = `by_beta` summed.

    Args:
        query: x, (*batch, N, D).
        keys: K, (*#batch, M, D), as in `hopfield_solve`.
        state: z, (*batch, N, D), a solution.
        cotangent: dL/dz, (*batch, N, D).
        beta: inverse temperature, as in `hopfield_solve`.
        anchor: in [0, 1], as in `hopfield_solve`.
        mask: boolean or additive, as in `hopfield_solve`.
        is_causal: a query attends to keys up to its own index.
        query_offset: as in `hopfield_solve`.
        rtol: a system is solved when |cotangent - A u| <= rtol |cotangent|, by its recurrence; recomputed at u it may
            be ten times that, as rounding adds up. Default 1e-10 in float64 and 1e-5 in float32; for
            Triton's products of keys in half precision 3e-3.
        max_steps: largest number of products with A.
        impl: as in `hopfield_solve`; the loop is that of `linear.CG`, with an rtol of at least 1e-6 in float32 and at
            least one product.

    Returns:
        `AdjointAnswer`: u, evidence, gradients. A query with negative curvature is a saddle: MINRES finishes it.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: an `impl` that cannot do it.

    Gradients: none; it is the derivative of `hopfield_solve`.

    Not for the gradient of a solve, which autograd takes: use `solve` or `hopfield_solve` and `backward()`.

    Examples:
        >>> import torch
        >>> from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
        >>> query, keys = torch.randn(2, 4), torch.randn(70, 4)
        >>> state = hopfield_solve(query, keys, beta=0.3, anchor=0.5).state
        >>> found = hopfield_adjoint(query, keys, state, torch.ones(2, 4), beta=0.3, anchor=0.5)
        >>> found.value.shape, found.by_keys.shape, bool((found.residual <= 10 * found.tolerance).all())
        (torch.Size([2, 4]), torch.Size([70, 4]), True)

    Reference: Hestenes and Stiefel (1952).
    """
    states = {"state": state, "cotangent": cotangent}
    call, (state, cotangent) = _checked(
        "hopfield_adjoint", impl, states, query, keys, beta, anchor, mask, is_causal, query_offset
    )
    rtol = None if rtol is None else _validate.check_number("rtol", rtol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    return AdjointAnswer(*adjoint_op(*_arguments(call), state, cotangent, rtol, max_steps, impl, "ignore"))


def _checked(
    operation: str,
    impl: Impl,
    states: dict[str, Tensor],
    query: Tensor,
    keys: Tensor,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    is_causal: bool,
    query_offset: int,
) -> tuple[Attention, list[Tensor]]:
    """The record of an operation's tensors, and its states, by name, in the precision of the solve."""
    from .._solve import check_kernel

    _validate.check_tensors([("query", query), ("keys", keys)], min_ndim=2)
    _validate.require(keys.shape[-2] > 0, "keys", "hold at least one key", f"shape {tuple(keys.shape)}")
    required = f"have the query's dimension {query.shape[-1]} on the last axis"
    _validate.require(keys.shape[-1] == query.shape[-1], "keys", required, f"shape {tuple(keys.shape)}")
    _validate.check_broadcast("keys", keys.shape[:-2], query.shape[:-2], "the leading axes of `query`")
    query_offset = _validate.check_offset("query_offset", query_offset, causal=is_causal)
    wide = state_dtype(query.dtype)
    numbers: list[float | Tensor] = []
    for name, number, high in (("beta", beta, math.inf), ("anchor", anchor, 1.0)):
        limits: dict[str, Any] = {"low": 0.0, "high": high, "open_low": name == "beta"}
        number = _validate.check_per_batch(name, number, **limits, remedy="parametrise it", of=("query", query))
        # Where the host does not look, a number out of range becomes NaN, and its queries report NONFINITE.
        number = _validate.inside(number, **limits)
        numbers.append(number.to(wide) if isinstance(number, Tensor) else number)
    kept, required = _validate.keeps_digits(wide, numbers[1]), f"leave 1 - anchor its digits in {wide}"
    _validate.require(kept, "anchor", required, numbers[1], "pass float64 tensors, or 1")
    if mask is not None:
        pairs = (*query.shape[:-1], keys.shape[-2])
        _validate.check_boolean("mask", mask, "be boolean (True = attend) or added to the scores", or_float=True)
        _validate.check_dense("mask", mask)
        _validate.check_broadcast("mask", mask.shape, pairs, "(*batch, N, M)")
        _validate.require(mask.device == query.device, "mask", f"be on {query.device}", mask.device)
        mask = mask if mask.dtype == torch.bool else mask.to(wide)
    call = Attention.of(query, keys, numbers[0], numbers[1], mask, query_offset if is_causal else None)
    shape, device = query.shape, query.device
    for name, state in states.items():
        _validate.check_float_tensor(name, state)
        _validate.require(state.shape == shape, name, f"have the query's shape {tuple(shape)}", tuple(state.shape))
        _validate.require(state.device == device, name, f"be on the query's device {device}", state.device)
    found = [state.to(wide) for state in states.values()]
    refuse_tangents(operation, *call, *found)
    check_impl("impl", impl)
    check_kernel(impl, call)
    return call, found

"""The public functions: `hopfield_solve`, the equilibrium of every query, and `hopfield_adjoint`, its adjoint solve."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._autograd import state_dtype
from .._types import Impl
from . import registration
from .dispatch import checked, default_rtol
from .problem import Hopfield, carries
from .rule import MAX_STEPS, AdjointAnswer, Solved


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
        rtol: a query is done when |f(z) - z|_2 <= atol + rtol |f(z)|_2. None is 1e-4; for Triton's products of keys in
            half precision 1e-3 in float16 and 5e-3 in bfloat16, the least that these can tell.
        atol: with 0 for both exactly `max_steps` steps are made, without any look of the host.
        max_steps: largest number of updates of a query.
        plain_steps: steps before acceleration, at least 2; more than `max_steps` is Picard's iteration.
        impl: "native" (compiled for this CPU), "tiled" (torch's attention kernels), "triton" (one kernel), or "auto",
            the fastest of them that can do it and is right on this machine (`kernel_checks`), and else products that
            are written out. On a CPU "auto" is "native" but for float64.

    Returns:
        `Solved`: state, and what was measured there. In half precision the state is float32; the products of
        impl="triton" are those of the keys' precision, and its residuals include the most that rounding may hide.

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
        >>> from implicit_attention.ops import hopfield_solve
        >>> query, keys = torch.randn(2, 4), torch.randn(70, 4)
        >>> found = hopfield_solve(query, keys, beta=0.3, anchor=0.5)
        >>> found.state.shape, bool((found.residual <= found.tolerance).all())
        (torch.Size([2, 4]), True)

    Reference: Ramsauer et al. (2020) for the iteration, Walker and Ni (2011) for the acceleration.
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal, query_offset=query_offset)
    start = state_of(problem, "initial", query if initial is None else initial)
    rtol = default_rtol(impl, problem) if rtol is None else rtol
    rtol = _validate.check_number("rtol", rtol, low=0.0)
    atol = _validate.check_number("atol", atol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    plain_steps = _validate.check_integer("plain_steps", plain_steps, low=2)
    if mask is not None and mask.requires_grad:
        raise ValueError(
            _validate.message("mask", "not require grad", "one that does", "use solve() with LogSumExp(bias=mask)")
        )
    registration.refuse_tangents("hopfield_solve", *problem, start)
    impl = checked(impl, problem)
    return Solved(*registration.solve_op(*problem, start, rtol, atol, max_steps, plain_steps, impl, "warn"))


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
            be ten times that, as rounding adds up. Default 1e-10 in float64 and 1e-5 in float32; impl="triton", which
            forms products in the keys' precision, 5e-3 in float16 and 3e-2 in bfloat16.
        max_steps: largest number of products with A.
        impl: as in `hopfield_solve`; "tiled" keeps the weights of a tile for all products with it.

    Returns:
        `AdjointAnswer`: u, evidence, gradients. A query with negative curvature is a saddle: MINRES finishes it.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: an `impl` that cannot do it.

    Gradients: none; it is the derivative of `hopfield_solve`.

    Not for the gradient of a solve, which autograd takes: use `solve` or `hopfield_solve` and `backward()`.

    Examples:
        >>> import torch
        >>> from implicit_attention.ops import hopfield_adjoint, hopfield_solve
        >>> query, keys = torch.randn(2, 4), torch.randn(70, 4)
        >>> state = hopfield_solve(query, keys, beta=0.3, anchor=0.5).state
        >>> found = hopfield_adjoint(query, keys, state, torch.ones(2, 4), beta=0.3, anchor=0.5)
        >>> found.value.shape, found.by_keys.shape, bool((found.residual <= 10 * found.tolerance).all())
        (torch.Size([2, 4]), torch.Size([70, 4]), True)

    Reference: Hestenes and Stiefel (1952).
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal, query_offset=query_offset)
    state, cotangent = state_of(problem, "state", state), state_of(problem, "cotangent", cotangent)
    registration.refuse_tangents("hopfield_adjoint", *problem, state, cotangent)
    rtol = None if rtol is None else _validate.check_number("rtol", rtol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    impl = checked(impl, problem)
    return AdjointAnswer(*registration.adjoint_op(*problem, state, cotangent, rtol, max_steps, impl, "ignore"))


def laid_out(
    query: Tensor,
    keys: Tensor,
    *,
    beta: float | Tensor,
    anchor: float | Tensor,
    mask: Tensor | None,
    is_causal: bool,
    query_offset: int = 0,
) -> Hopfield:
    """The problem of an operation, all its tensors with as many axes as the query."""
    named = [("query", query), ("keys", keys)]
    for name, tensor in named:
        _validate.check_float_tensor(name, tensor, min_ndim=2)
    _validate.check_same_kind(named)
    _validate.require(keys.shape[-2] > 0, "keys", "hold at least one key", f"shape {tuple(keys.shape)}")
    _validate.require(
        keys.shape[-1] == query.shape[-1],
        "keys",
        f"have the query's dimension {query.shape[-1]} on the last axis",
        f"shape {tuple(keys.shape)}",
    )
    _validate.check_broadcast("keys", keys.shape[:-2], query.shape[:-2], "the leading axes of `query`")
    query_offset = _validate.check_offset("query_offset", query_offset)
    _validate.require(is_causal or query_offset == 0, "query_offset", "come with is_causal=True", query_offset)
    axes, wide = query.ndim, state_dtype(query.dtype)
    numbers: list[Tensor] = []
    for name, number, high in (("beta", beta, math.inf), ("anchor", anchor, 1.0)):
        if isinstance(number, Tensor):
            _validate.check_float_tensor(name, number)
            _validate.check_broadcast(name, number.shape, query.shape[:-2], "the leading axes of `query`")
            _validate.check_range(name, number, low=0.0, high=high, open_low=name == "beta", remedy="parametrise it")
            # Where the host does not look, a number out of range becomes NaN, and its queries report NONFINITE.
            number = _validate.inside(number, low=0.0, high=high, open_low=name == "beta")
            numbers.append(number.to(wide)[(None,) * (axes - 2 - number.ndim)][..., None, None])
        else:
            number = _validate.check_number(name, number, low=0.0, high=high, open_low=name == "beta")
            if name == "anchor":
                required = f"leave 1 - anchor its digits in {wide}"
                _validate.require(carries(wide, number), name, required, number, "pass float64 tensors, or 1")
            numbers.append(query.new_full((1,) * axes, number, dtype=wide))
    if mask is not None:
        pairs = (*query.shape[:-1], keys.shape[-2])
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            received = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(_validate.message("mask", "be boolean (True = attend) or added to the scores", received))
        _validate.check_dense("mask", mask)
        _validate.check_broadcast("mask", mask.shape, pairs, "(*batch, N, M)")
        _validate.require(mask.device == query.device, "mask", f"be on {query.device}", mask.device)
        if mask.dtype != torch.bool:
            mask = mask.to(wide)
        mask = mask[(None,) * (axes - mask.ndim)]
    return Hopfield(
        query, keys[(None,) * (axes - keys.ndim)], numbers[0], numbers[1], mask, query_offset if is_causal else None
    )


def state_of(problem: Hopfield, argument: str, state: Tensor) -> Tensor:
    """A tensor of the shape of the state, in the precision of the solve."""
    _validate.check_float_tensor(argument, state)
    shape = problem.field.shape
    _validate.require(state.shape == shape, argument, f"have the query's shape {tuple(shape)}", tuple(state.shape))
    _validate.require(
        state.device == problem.field.device, argument, f"be on the query's device {problem.field.device}", state.device
    )
    return state.to(state_dtype(problem.field.dtype))

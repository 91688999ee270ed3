"""`hopfield_cg`: the adjoint solve behind the gradient of an equilibrium."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ... import _validate
from ..._types import Impl
from ...status import Status
from ..dispatch import by_triton, checked, laid_out, state_of
from ..hopfield_solve.rule import FusedRule
from ..problem import Hopfield
from ..registration import refuse_tangents
from .rule import MAX_STEPS, Adjoint, CGStop, nothing


def hopfield_cg(
    query: Float[Tensor, "*batch N D"],
    keys: Float[Tensor, "*#batch M D"],
    state: Float[Tensor, "*batch N D"],
    cotangent: Float[Tensor, "*batch N D"],
    *,
    beta: float | Float[Tensor, "*#batch"],
    anchor: float | Float[Tensor, "*#batch"] = 0.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    rtol: float | None = None,
    max_steps: int = MAX_STEPS,
    impl: Impl = "auto",
) -> Adjoint:
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
        rtol: a system is solved when |cotangent - A u| <= rtol |cotangent|, by its recurrence; recomputed at u it may
            be ten times that, as rounding adds up. Default 1e-10 in float64 and 1e-5 in float32; impl="triton", which
            forms products in the keys' precision, 5e-3 in float16 and 3e-2 in bfloat16.
        max_steps: largest number of products with A.
        impl: as in `hopfield_solve`; "reference" solves by dense Hessians.

    Returns:
        `Adjoint`: u, its evidence and its gradients. A query with negative curvature is a saddle: MINRES finishes it.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: an `impl` that cannot do it.

    Gradients: none; it is the derivative of `hopfield_solve`.

    Reference: Hestenes and Stiefel (1952).
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal)
    state, cotangent = state_of(problem, "state", state), state_of(problem, "cotangent", cotangent)
    refuse_tangents("hopfield_cg", *problem, state, cotangent)
    rtol = None if rtol is None else _validate.check_number("rtol", rtol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    from .ops import hopfield_cg_op

    return Adjoint(*hopfield_cg_op(*problem, state, cotangent, rtol, max_steps, checked(impl, problem), "ignore"))


def run(problem: Hopfield, state: Tensor, cotangent: Tensor, stop: CGStop, *, impl: Impl) -> Adjoint:
    """The same for a problem that is laid out."""
    return dispatch(problem, state, cotangent, *stop, checked(impl, problem))


def dispatch(
    problem: Hopfield, state: Tensor, cotangent: Tensor, rtol: float | None, max_steps: int, impl: Impl
) -> Adjoint:
    """Run the implementation."""
    if state.numel() == 0:
        return nothing(problem, state)

    def fused() -> Adjoint:
        from ..hopfield_solve.triton import solve
        from .triton import solve_adjoint

        there = solve(problem, state, FusedRule(0.0, 0.0, max_steps=0, plain_steps=2))
        stop = CGStop.of(rtol, max_steps, products=problem.keys.dtype)
        return solve_adjoint(problem, state, cotangent, there.mean, there.logsumexp, stop)

    found, stop = by_triton(impl, "hopfield_cg", problem, fused), CGStop.of(rtol, max_steps, products=state.dtype)
    if impl == "reference":
        from .reference import solve_adjoint as dense_solve_adjoint

        return dense_solve_adjoint(problem, state, cotangent, stop)
    from .sdpa import solve_adjoint as tiled_solve_adjoint

    if found is None:
        return tiled_solve_adjoint(problem, state, cotangent, stop)
    stalled = found.status == Status.STALLED
    if not may_look(state):
        return _unanswered(found, stalled)
    if not bool(stalled.any()):
        return found
    again = tiled_solve_adjoint(problem, state, cotangent.where(stalled[..., None], 0.0), stop)
    value = torch.where(stalled[..., None], again.value, found.value)
    evidence = (torch.where(stalled, b, a) for a, b in zip(found[1:-1], again[1:-1], strict=True))
    return Adjoint._make((value, *evidence, found.by_keys + again.by_keys))


def may_look(tensor: Tensor) -> bool:
    """Whether the host may wait for numbers: not while a CUDA graph is captured, which must not depend on them."""
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _unanswered(found: Adjoint, stalled: Tensor) -> Adjoint:
    """NaN for what stalled, and for what it is a part of: where a graph is captured the host cannot look and go on."""
    poison = torch.zeros_like(found.by_beta).masked_fill(stalled, torch.nan)
    value, by_beta = found.value + poison[..., None], found.by_beta + poison
    by_keys = found.by_keys + poison.sum(-1)[..., None, None].sum_to_size(*found.by_keys.shape[:-2], 1, 1)
    return found._replace(value=value, by_beta=by_beta, by_keys=by_keys)

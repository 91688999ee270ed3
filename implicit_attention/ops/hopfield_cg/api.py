"""`hopfield_cg`: the adjoint solve behind the gradient of an equilibrium."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ... import _validate
from ..._types import Impl
from .._door import Chosen, chosen, laid_out, state_of
from .._hopfield import Hopfield
from ..hopfield_solve.api import dispatch as dispatch_solve
from ..hopfield_solve.rule import Stop
from .rule import MAX_STEPS, Adjoint, CGStop, default_rtol, nothing


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
        `Adjoint`: u, its evidence and its gradients. A query with negative curvature, a saddle, has u = 0.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: an `impl` that cannot do it.

    Gradients: none; it is the derivative of `hopfield_solve`.

    Reference: Hestenes and Stiefel (1952).
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal)
    state, cotangent = state_of(problem, "state", state), state_of(problem, "cotangent", cotangent)
    which = chosen(impl, problem)
    rtol = default_rtol(keys.dtype, which) if rtol is None else rtol
    rtol = _validate.check_number("rtol", rtol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    from .ops import hopfield_cg_op

    return Adjoint(*hopfield_cg_op(*problem, state, cotangent, rtol, max_steps, which))


def run(
    problem: Hopfield, state: Tensor, cotangent: Tensor, stop: CGStop, *, impl: Impl, leave_out: bool = False
) -> Adjoint:
    """The same for a problem that is laid out; with `leave_out` failed queries have u = 0 and carry no gradient."""
    return dispatch(problem, state, cotangent, stop, chosen(impl, problem), leave_out=leave_out)


def dispatch(
    problem: Hopfield, state: Tensor, cotangent: Tensor, stop: CGStop, which: Chosen, *, leave_out: bool = False
) -> Adjoint:
    """Run the implementation."""
    if state.numel() == 0:
        return nothing(problem, state)
    if which == "triton":
        from .triton import solve_adjoint as fused_solve_adjoint

        there = dispatch_solve(problem, state, Stop(0.0, 0.0, max_steps=0, plain_steps=2), which)
        return fused_solve_adjoint(problem, state, cotangent, there.mean, there.logsumexp, stop, leave_out=leave_out)
    if which == "sdpa":
        from . import sdpa as module
    else:
        from . import reference as module  # type: ignore[no-redef]
    return module.solve_adjoint(problem, state, cotangent, stop, leave_out=leave_out)

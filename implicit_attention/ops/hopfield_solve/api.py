"""`hopfield_solve`: the equilibrium of every query."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ... import _validate
from ..._types import Impl
from ..dispatch import by_triton, checked, laid_out, state_of
from ..fold import widened
from ..problem import Hopfield
from ..registration import refuse_tangents
from .rule import FusedRule, Solved, nothing


def hopfield_solve(
    query: Float[Tensor, "*batch N D"],
    keys: Float[Tensor, "*#batch M D"],
    *,
    beta: float | Float[Tensor, "*#batch"],
    anchor: float | Float[Tensor, "*#batch"] = 0.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    initial: Float[Tensor, "*batch N D"] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-8,
    max_steps: int = 200,
    plain_steps: int = 3,
    impl: Impl = "auto",
) -> Solved:
    """The state z = anchor x + (1 - anchor) softmax(beta z K^T) K of every query x, each solved on its own.

    Picard's iteration, accelerated from step `plain_steps` on where that lowers the energy: what `Anderson(history=1)`
    does to an `AnchoredEnergy`, in one operation.

    Args:
        query: x, (*batch, N, D).
        keys: K, (*batch, M, D); leading axes broadcast, and are not copied (grouped queries: one axis more).
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch.
        mask: boolean (True = the query attends to the key), or added to the scaled scores; broadcasts to
            (*batch, N, M). What a masked key holds must be finite.
        is_causal: a query attends to keys up to its own index, both counted from the start.
        initial: where to start, default the query.
        rtol: a query is done when |f(z) - z|_2 <= atol + rtol |f(z)|_2.
        atol: with 0 for both exactly `max_steps` steps are made, without any look of the host.
        max_steps: largest number of updates of a query.
        plain_steps: steps before acceleration, at least 2; more than `max_steps` is Picard's iteration.
        impl: "reference" (every product written out), "sdpa" (torch's attention kernels), "triton" (one kernel), or
            "auto", the fastest of them that can do it and is right on this machine (`kernel_checks`).

    Returns:
        `Solved`: state, and what was measured there. In half precision the state is float32; the products of
        impl="triton" are those of the keys' precision.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: `impl` cannot do it, or is
            wrong on this machine, and why.

    Gradients: of `state`, exact where it converged, at saddles too, with respect to query, keys, beta and anchor, not
    to an additive mask; first order, by backward passes, of which one that fails warns. `implicit_attention.solve` has
    all orders and forward mode.

    Reference: Ramsauer et al. (2020) for the iteration, Walker and Ni (2011) for the acceleration.
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal)
    start = state_of(problem, "initial", query if initial is None else initial)
    rtol = _validate.check_number("rtol", rtol, low=0.0)
    atol = _validate.check_number("atol", atol, low=0.0)
    max_steps = _validate.check_integer("max_steps", max_steps, low=0)
    plain_steps = _validate.check_integer("plain_steps", plain_steps, low=2)
    if mask is not None and mask.requires_grad:
        raise ValueError(
            _validate.message("mask", "not require grad", "one that does", "use solve() with LogSumExp(bias=mask)")
        )
    from .ops import hopfield_solve_op

    refuse_tangents("hopfield_solve", *problem, start)
    impl = checked(impl, problem)
    return Solved(*hopfield_solve_op(*problem, start, rtol, atol, max_steps, plain_steps, impl, "warn"))


def run(problem: Hopfield, initial: Tensor, stop: FusedRule, *, impl: Impl, keep_mean: bool = True) -> Solved:
    """The same for a problem that is laid out, as plain computation; the mean may be left out where it costs extra."""
    return dispatch(problem, initial, stop, checked(impl, problem), keep_mean=keep_mean)


def dispatch(problem: Hopfield, initial: Tensor, stop: FusedRule, impl: Impl, *, keep_mean: bool = True) -> Solved:
    """Run the implementation."""
    if problem.field.shape[-1] == 0 < initial.shape[:-1].numel():
        # Rows without entries still have weights: those of one entry that is 0.
        field, keys, initial = (widened(t, 1) for t in (problem.field, problem.keys, initial))
        wide = dispatch(problem._replace(field=field, keys=keys), initial, stop, impl, keep_mean=keep_mean)
        return wide._replace(state=wide.state[..., :0], mean=wide.mean[..., :0])
    if initial.numel() == 0:
        return nothing(initial)
    if impl == "reference":
        from .reference import solve as solve_reference

        return solve_reference(problem, initial, stop)

    def fused() -> Solved:
        from .triton import solve

        return solve(problem, initial, stop)

    found = by_triton(impl, "hopfield_solve", problem, fused, fixed_budget=stop.fixed_budget)
    if found is not None:
        return found
    from .sdpa import solve as solve_sdpa

    return solve_sdpa(problem, initial, stop, impl=impl, keep_mean=keep_mean)

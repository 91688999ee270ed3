"""`hopfield_hvp`: the Hessian of the energy at a state, applied to a vector."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ... import _validate
from ..._types import Impl
from ..dispatch import by_triton, checked, laid_out, state_of
from ..hopfield_solve.rule import FusedRule
from ..problem import Hopfield
from ..registration import refuse_tangents


def hopfield_hvp(
    query: Float[Tensor, "*batch N D"],
    keys: Float[Tensor, "*#batch M D"],
    state: Float[Tensor, "*batch N D"],
    vector: Float[Tensor, "*batch N D"],
    *,
    beta: float | Float[Tensor, "*#batch"],
    anchor: float | Float[Tensor, "*#batch"] = 0.0,
    mask: Tensor | None = None,
    is_causal: bool = False,
    mean: Float[Tensor, "*batch N D"] | None = None,
    logsumexp: Float[Tensor, "*batch N"] | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "*batch N D"]:
    """Hess E(z) v = v - (1 - anchor) beta Cov(z) v per query, with memory O((N + M) D) beside one tile.

    Cov(z) v = sum_j p_j k_j <k_j, v> - mean <mean, v> with p = softmax(beta K z).

    Args:
        query: x, (*batch, N, D).
        keys: K, (*#batch, M, D), as in `hopfield_solve`.
        state: z, (*batch, N, D).
        vector: v, (*batch, N, D).
        beta: inverse temperature, as in `hopfield_solve`.
        anchor: in [0, 1], as in `hopfield_solve`.
        mask: boolean or additive, as in `hopfield_solve`.
        is_causal: a query attends to keys up to its own index.
        mean: what `hopfield_solve` measured at that very state; impl="triton" otherwise evaluates it.
        logsumexp: the same, (*batch, N); both or none.
        impl: as in `hopfield_solve`.

    Returns:
        (*batch, N, D), float32 for half-precision inputs.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: an `impl` that cannot do it.

    Gradients: with respect to the vector, first order, as the Hessian is symmetric; for others differentiate
    `AnchoredEnergy.hessian_product`.
    """
    problem = laid_out(query, keys, beta=beta, anchor=anchor, mask=mask, is_causal=is_causal)
    state, vector = state_of(problem, "state", state), state_of(problem, "vector", vector)
    if (mean is None) != (logsumexp is None):
        raise ValueError("`mean` and `logsumexp` must be given together, got one of them; both come from one solve")
    if mean is not None and logsumexp is not None:
        mean = state_of(problem, "mean", mean)
        shape = tuple(query.shape[:-1])
        received = tuple(logsumexp.shape)
        _validate.require(received == shape, "logsumexp", f"have one number per query, shape {shape}", received)
    refuse_tangents("hopfield_hvp", *problem, state, vector, mean, logsumexp)
    from .ops import hopfield_hvp_op

    product: Tensor = hopfield_hvp_op(*problem, state, vector, mean, logsumexp, checked(impl, problem))
    return product


def run(
    problem: Hopfield, state: Tensor, vector: Tensor, mean: Tensor | None, logsumexp: Tensor | None, *, impl: Impl
) -> Tensor:
    """The same for a problem that is laid out."""
    return dispatch(problem, state, vector, mean, logsumexp, checked(impl, problem))


def dispatch(
    problem: Hopfield, state: Tensor, vector: Tensor, mean: Tensor | None, logsumexp: Tensor | None, impl: Impl
) -> Tensor:
    """Run the implementation."""
    if state.numel() == 0:
        return torch.zeros_like(vector)

    def fused() -> Tensor:
        from ..hopfield_solve.triton import solve
        from .triton import hessian_product

        if mean is not None and logsumexp is not None:
            return hessian_product(problem, state, vector, mean, logsumexp)
        there = solve(problem, state, FusedRule(0.0, 0.0, max_steps=0, plain_steps=2))
        return hessian_product(problem, state, vector, there.mean, there.logsumexp)

    found = by_triton(impl, "hopfield_hvp", problem, fused)
    if found is not None:
        return found
    if impl == "reference":
        from . import reference as module
    else:
        from . import sdpa as module  # type: ignore[no-redef]
    return module.hessian_product(problem, state, vector)

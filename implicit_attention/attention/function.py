"""`equilibrium_attention`: the arguments of `scaled_dot_product_attention`, answered by an equilibrium."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from .._types import Impl, OnFailure
from ..adjoints import Adjoint
from ..options import SolveOptions
from ..solution import Solution
from ..solvers import Solver
from .core import attend, check_causal, split_mask


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
    solver: Solver | None = None,
    adjoint: Adjoint | None = None,
    impl: Impl = "auto",
    max_steps: int | None = None,
    on_failure: OnFailure = "warn",
    return_solution: bool = False,
) -> Tensor | tuple[Tensor, Solution]:
    """Softmax attention whose queries first settle into the equilibrium of their energy over the keys.

    z = anchor query + (1 - anchor) softmax(scale z key^T + attn_mask) key, solved for every query on its own, then
    output = softmax(scale z key^T + attn_mask) value. Arguments up to `enable_gqa` mean what they mean in
    `torch.nn.functional.scaled_dot_product_attention`; `max_steps=0` is that function.

    Args:
        query: (*batch, N, D), or (*batch, H, N, D) with `enable_gqa`.
        key: (*batch, M, D); leading axes broadcast. With `enable_gqa` (*batch, Hkv, M, D), Hkv dividing H; nothing is
            copied.
        value: (*batch, M, E); E may differ from D.
        attn_mask: boolean (True = attend) or additive, broadcasts to (*batch, N, M). A query that attends to nothing
            gives zeros.
        dropout_p: part of the attention weights dropped in the read-out, always (pass 0 in evaluation); the
            equilibrium itself has no noise.
        is_causal: a query attends to keys up to its own index, both counted from the start. Beside it, `attn_mask` may
            only say which keys exist, shape (..., 1, M).
        scale: inverse temperature beta > 0, default 1/sqrt(D); a tensor broadcasts to *batch (one per head: (H,)).
        enable_gqa: query head h reads key head h // (H / Hkv).
        anchor: in [0, 1], how much of the query stays, a float or a tensor that broadcasts to *batch. With 0 the query
            gets no gradient from the solve.
        solver: default `Anderson()`.
        adjoint: default `Implicit()`, the exact gradient of the equilibrium, and `Unrolled()` for a fixed budget of
            steps (rtol = atol = 0).
        impl: "auto", "reference" (every product written out), "tiled" (torch's fused attention, or an error), "triton"
            (one kernel for the whole solve, or an error).
        max_steps: replaces the solver's; 0 is one explicit step, whatever the anchor.
        on_failure: "raise", "warn" or "ignore", for queries without an answer and for gradients.
        return_solution: return (output, solution): states, statuses, residuals, evaluations.

    Returns:
        (*batch, N, E) in the inputs' dtype. Half-precision problems are solved in float32.

    Raises:
        TypeError, ValueError: arguments that do not fit. UnsupportedImplementation: `impl` that cannot do it.
        ConvergenceError: with on_failure="raise".

    Gradients: with respect to query, key, value, an additive mask, scale and anchor, to any order (exact at the
    solution with `Implicit()`, ordinary ones with max_steps=0).

    Reference: Ramsauer et al. (2020) for the iteration without anchor; the read-out follows their layer.
    """
    options = SolveOptions(solver=solver, adjoint=adjoint, impl=impl, max_steps=max_steps, on_failure=on_failure)
    tensors = [("query", query), ("key", key), ("value", value)]
    for name, tensor in tensors:
        _validate.check_float_tensor(name, tensor, min_ndim=3 if enable_gqa else 2)
    _validate.check_same_kind(tensors)
    dropout_p = _validate.check_number("dropout_p", dropout_p, low=0.0, high=1.0)
    if not enable_gqa:
        _check_heads_match(query, key)
    _check_pattern_shapes(query, key, value)
    if scale is None:
        # Without a dimension all scores are 0 at any scale.
        scale = max(query.shape[-1], 1) ** -0.5
    elif isinstance(scale, Tensor):
        _validate.check_float_tensor("scale", scale)
        _validate.check_range(
            "scale", scale, low=0.0, open_low=True, remedy="parametrise it, for example exponentially"
        )
    else:
        scale = _validate.check_number("scale", scale, low=0.0, open_low=True)
    mask, bias = split_mask("attn_mask", attn_mask, query)
    if is_causal:
        check_causal("attn_mask", attn_mask, "is_causal")
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = lower if mask is None else mask & lower
    if not enable_gqa:
        batch = torch.broadcast_shapes(*(t.shape[:-2] for _, t in tensors))  # type: ignore[no-untyped-call]
        query = query.expand(*batch, *query.shape[-2:])
    for name, number in (("scale", scale), ("anchor", anchor)):
        if isinstance(number, Tensor):
            _validate.check_broadcast(name, number.shape, query.shape[:-2], "the leading axes of `query`")
    if attn_mask is not None:
        pairs = (*query.shape[:-1], key.shape[-2])
        _validate.check_broadcast("attn_mask", attn_mask.shape, pairs, "(*batch, N, M)")
    output, solution, _, _ = attend(
        query,
        key,
        value,
        beta=scale,
        anchor=anchor,
        mask=mask,
        bias=bias,
        options=options,
        dropout_p=dropout_p,
        grouped=enable_gqa,
        measure=return_solution,
    )
    return (output, solution) if return_solution else output


def _check_pattern_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    _validate.require(
        key.shape[-1] == query.shape[-1],
        "key",
        f"have the query's dimension {query.shape[-1]} on its last axis",
        f"shape {tuple(key.shape)}",
    )
    _validate.require(
        value.shape[-2] == key.shape[-2],
        "value",
        f"have one row for each of the {key.shape[-2]} keys",
        f"shape {tuple(value.shape)}",
    )
    _validate.check_together("value", value.shape[:-2], key.shape[:-2], "the leading axes of `key`")


def _check_heads_match(query: Tensor, key: Tensor) -> None:
    fits = all(
        q == k or 1 in (q, k) for q, k in zip(reversed(query.shape[:-2]), reversed(key.shape[:-2]), strict=False)
    )
    _validate.require(
        fits,
        "key",
        f"have leading axes that broadcast with the query's {tuple(query.shape[:-2])}",
        f"shape {tuple(key.shape)}",
        "pass enable_gqa=True if its heads are fewer",
    )

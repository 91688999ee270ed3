"""`equilibrium_attention`: the arguments of `scaled_dot_product_attention`, answered by an equilibrium."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Unpack

from .. import _validate
from .._autograd import PLAIN_TYPES
from ..adjoints.native import is_finite
from ..kernels.problem import Hopfield
from ..options import SolveKeywords, SolveOptions
from ..potentials import LogSumExp
from ..solution import Solution
from . import direct
from .call import Attended, Call
from .core import attend
from .masks import check_causal, check_order, mask_and_bias
from .read_out import PotentialFactory

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
        (*batch, N, E) in the inputs' dtype. Half-precision problems are solved in float32.

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
    query_offset = _checked_offset(query_offset, is_causal)
    solve_options = None
    plain = attn_mask is None and type(is_causal) is bool and enable_gqa is False and type(return_solution) is bool
    if plain and potential is LogSumExp and type(dropout_p) in (float, int) and dropout_p == 0 and direct.eager():
        solve_options = _options(options)
        first = query_offset if is_causal else None
        attended = _directly(query, key, value, scale, anchor, first, solve_options, return_solution)
        if attended is not None:
            return (attended.output, attended.solution) if return_solution else attended.output  # type: ignore[return-value]
    solve_options = solve_options or _DEFAULTS.override(**options)
    tensors = [("query", query), ("key", key), ("value", value)]
    for name, tensor in tensors:
        _validate.check_float_tensor(name, tensor, min_ndim=3 if enable_gqa else 2)
    _validate.check_same_kind(tensors)
    dropout_p = _validate.check_number("dropout_p", dropout_p, low=0.0, high=1.0)
    _check_shapes(query, key, value, enable_gqa)
    if not enable_gqa:
        batch = torch.broadcast_shapes(*(t.shape[:-2] for _, t in tensors))  # type: ignore[no-untyped-call]
        query = query.expand(*batch, *query.shape[-2:])
    # Without a dimension all scores are 0 at any scale.
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    remedy = "parametrise it, for example exponentially"
    scale = _validate.check_per_batch("scale", scale, low=0.0, open_low=True, remedy=remedy)
    for name, number in (("scale", scale), ("anchor", anchor)):
        if isinstance(number, Tensor):
            _validate.check_broadcast(name, number.shape, query.shape[:-2], "the leading axes of `query`")
    shape = (*query.shape[:-1], key.shape[-2])
    if is_causal:
        check_order("is_causal", potential)
        check_causal("attn_mask", attn_mask, "is_causal")
    mask, bias = mask_and_bias(attn_mask, shape=shape, like=query, name="attn_mask")
    call = Call(
        query,
        key,
        value,
        scale,
        anchor,
        solve_options,
        mask=mask,
        bias=bias,
        first=query_offset if is_causal else None,
        potential=potential,
        dropout_p=dropout_p,
        grouped=enable_gqa,
        return_solution=return_solution,
    )
    attended = attend(call)
    return (attended.output, attended.solution) if return_solution else attended.output  # type: ignore[return-value]


def _options(given: SolveKeywords) -> SolveOptions:
    if not given:
        return _DEFAULTS
    # Two equal policies are two counters.
    if isinstance(given.get("on_failure", "warn"), str):
        try:
            return _known(**given)
        except TypeError:
            # An unknown option, which `override` reports, or a solver without a hash.
            pass
    return _DEFAULTS.override(**given)


#: Calls are many, their options few.
_known = functools.lru_cache(maxsize=256, typed=True)(_DEFAULTS.override)


def _directly(
    query: Any, key: Any, value: Any, scale: Any, anchor: Any, first: int | None, options: SolveOptions, solution: bool
) -> Attended | None:
    """The answer where the arguments are plain tensors that fit each other, else None."""
    plan = options.plan
    if type(query) not in PLAIN_TYPES or type(key) not in PLAIN_TYPES or query.is_nested or query.ndim < 2:
        return None
    if not isinstance(options.on_failure, str) or (plan.explicit and (solution or options.impl != "auto")):
        return None
    if first is not None and (key.ndim < 2 or first + 1 >= key.shape[-2]):
        first = None
    beta = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    problem = Hopfield(query, key, beta, anchor, None, first)
    if plan.explicit:
        output = direct.explicit(problem, value)
        return None if output is None else Attended(output, query, None, None)
    if plan.rule is None or (first is not None and not is_finite(value)):
        return None
    return direct.solved(problem, value, query, plan, options.on_failure, report=solution, solution=solution)


def _checked_offset(offset: int, is_causal: bool) -> int:
    if type(offset) is int and offset == 0:
        return 0
    offset = _validate.check_offset("query_offset", offset)
    remedy = "without it every query attends to every key, wherever it stands"
    _validate.require(bool(is_causal) or offset == 0, "query_offset", "come with is_causal=True", offset, remedy)
    return offset


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> None:
    received = f"shape {tuple(key.shape)}"
    if not grouped:
        pairs = zip(reversed(query.shape[:-2]), reversed(key.shape[:-2]), strict=False)
        required = f"have leading axes that broadcast with the query's {tuple(query.shape[:-2])}"
        remedy = "pass enable_gqa=True if its heads are fewer"
        _validate.require(all(q == k or 1 in (q, k) for q, k in pairs), "key", required, received, remedy)
    required = f"have the query's dimension {query.shape[-1]} on its last axis"
    _validate.require(key.shape[-1] == query.shape[-1], "key", required, received)
    required, received = f"have one row for each of the {key.shape[-2]} keys", f"shape {tuple(value.shape)}"
    _validate.require(value.shape[-2] == key.shape[-2], "value", required, received)
    _validate.check_together("value", value.shape[:-2], key.shape[:-2], "the leading axes of `key`")

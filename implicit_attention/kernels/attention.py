"""Softmax attention by torch's fused kernels, which never store the (N, M) scores, in the layout of a `Fold`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .._autograd import applied, exact_precision, is_plain, transforms_active, unobserved, vjp
from .fold import Fold, addressable, aligned, widened
from .problem import triangle

# With fewer keys than a vector register holds numbers, torch's CPU kernel turns a query of NaN into an answer of zeros.
FLASH_KEYS = 64
# The most bytes of a vector register.
REGISTER = 64


def _operation(name: str) -> Any:
    return getattr(getattr(torch.ops.aten, name, None), "default", None)


# The kernels behind scaled_dot_product_attention, on a CPU and on CUDA, which also return the log-sum-exp that the
# energy needs. A torch without them pays for the scores instead. Nothing but the functions below may call them.
_FLASH_FOR_CPU = _operation("_scaled_dot_product_flash_attention_for_cpu")
_FLASH_BACKWARD = _operation("_scaled_dot_product_flash_attention_for_cpu_backward")
_EFFICIENT = _operation("_scaled_dot_product_efficient_attention")
# The kernel on CUDA wants the rows of a mask to begin at multiples of this.
MASK_ALIGNMENT = 8
# Torch's number of the kernel for the CPU.
FLASH = SDPBackend.FLASH_ATTENTION.value


def flash_with_logsumexp(
    query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T + mask) V and the log-sum-exp, (B, H, N, E) and (B, H, N), on a CPU; of any layout."""
    assert _FLASH_FOR_CPU is not None
    if not (query.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        query, keys, values = (addressable(t) for t in (query, keys, values))
    mean, logsumexp = _FLASH_FOR_CPU(query, keys, values, attn_mask=attn_mask, scale=scale, is_causal=is_causal)
    return mean, logsumexp


def with_logsumexp(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attn_mask: Tensor | None,
    scale: float,
    first: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, where with `first`, and no mask, query i attends to keys up to first + i, first >= 0."""
    kernel = flash_with_logsumexp if query.device.type == "cpu" else efficient_with_logsumexp
    run = partial(kernel, query, attn_mask=attn_mask, scale=scale)
    if first is None:
        return run(keys, values)
    parts = [
        run(keys[..., part, :], values[..., part, :], is_causal=own)
        for part, own in causal_parts(query.shape[-2], keys.shape[-2], first)
    ]
    if len(parts) == 1:
        return parts[0]
    (out, logsumexp), (own_out, own_logsumexp) = parts
    both = torch.logaddexp(logsumexp, own_logsumexp)
    return out * (logsumexp - both).exp()[..., None] + own_out * (own_logsumexp - both).exp()[..., None], both


def causal_parts(rows: int, count: int, first: int) -> list[tuple[slice, bool]]:
    """Parts of the keys that `rows` queries read, the first of which stands at key `first`, and whether by a triangle.

    Torch's kernels know the triangle whose first query attends to the first key alone.
    """
    if rows == 1 or first + 1 >= count:
        return [(slice(min(first + rows, count)), False)]
    own = slice(first, min(first + rows, count)), True
    return [own] if first == 0 else [(slice(first), False), own]


def efficient_with_logsumexp(
    query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same on CUDA."""
    assert _EFFICIENT is not None
    query, keys, values = (addressable(t) for t in (query, keys, values))
    if attn_mask is not None:
        attn_mask = aligned_mask(attn_mask)
    result = _EFFICIENT(query, keys, values, attn_mask, True, is_causal=is_causal, scale=scale)
    return result[0], result[1][..., : query.shape[-2]]


def aligned_mask(mask: Tensor) -> Tensor:
    """The mask laid out as the kernel on CUDA needs it, copied only if it is not."""
    if mask.stride(-1) == 1 and not any(step % MASK_ALIGNMENT for step in mask.stride()[:-1]):
        return mask
    *lead, count = mask.shape
    return mask.new_zeros(*lead, -(-count // MASK_ALIGNMENT) * MASK_ALIGNMENT)[..., :count].copy_(mask)


def loses_nan(keys: Tensor) -> bool:
    """Whether torch's kernel on a CPU may lose the NaN of keys that are not finite, as it may that of queries."""
    return keys.shape[-2] * keys.dtype.itemsize < REGISTER


def has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has such a kernel for a type of device and of numbers."""
    wide = device == "cuda" and dtype == torch.float64
    return not wide and {"cpu": _FLASH_FOR_CPU, "cuda": _EFFICIENT}.get(device) is not None


def sdpa(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attn_mask: Tensor | None,
    scale: float,
    first: int | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor]:
    """softmax(scale Q K^T + mask) V; with `first`, and no mask, query i attends to keys up to first + i."""
    is_causal = False
    if first is not None:
        parts = causal_parts(query.shape[-2], keys.shape[-2], first)
        if len(parts) == 1:
            ((part, is_causal),) = parts
            keys, values = keys[..., part, :], values[..., part, :]
        elif dropout_p == 0 and _is_bare(query, keys, values) and is_flash_for_cpu(query, keys, values, None, scale):
            return (with_logsumexp(query, keys, values, attn_mask=None, scale=scale, first=first)[0],)
        else:
            attn_mask = triangle(query.shape[-2], keys.shape[-2], first, query.device)
    options: dict[str, Any] = {"attn_mask": attn_mask, "scale": scale, "dropout_p": dropout_p, "is_causal": is_causal}
    return (F.scaled_dot_product_attention(query, keys, values, **options),)


def differentiable(
    query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None, scale: float, first: int | None = None
) -> Any:
    """`sdpa` with derivatives of every order with respect to query, keys and values."""
    if torch.compiler.is_compiling():
        # The compiler differentiates the kernel once by itself, and refuses second derivatives of any function.
        return sdpa(query, keys, values, attn_mask=attn_mask, scale=scale, first=first)
    apply = partial(applied, _Attention) if unobserved() else _Attention.apply
    return (apply(query, keys, values, attn_mask, scale, first),)


def attend(
    kernel: Callable[..., tuple[Tensor, ...]],
    fold: Fold,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pairs: Tensor | None,
    scale: float,
    first: int | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of `kernel`, (*kept, *folded, N, ...).

    Args:
        query: (*kept, *folded, N, D).
        keys, values: (*#kept, M, D) and (*#kept, M, E).
        pairs: which keys are attended to, or what is added to the scores, (*#kept, *#folded, #N, #M).
        first: without `pairs`: query i attends to keys up to first + i.
    """
    lead, kept, dim = query.shape[:-2], fold.kept, values.shape[-1]
    # The fast kernels need one dimension, and equal bits need it aligned; zeros change neither scores nor answers.
    wide = aligned(max(query.shape[-1], dim), query.dtype)
    query, keys, values = (widened(t, wide) for t in (query, keys, values))
    keys, values = keys.contiguous(), values.contiguous()
    if pairs is not None and pairs.dtype == torch.bool:
        pairs = torch.zeros((), dtype=query.dtype, device=query.device).where(pairs, -torch.inf)
    by_row = first is not None or (pairs is not None and pairs.shape[kept:-1].numel() > 1)
    if lead[kept:] and by_row:
        # Queries that share keys, as rows of one product, would need copies of such a mask.
        spread = [t[(..., *(None,) * (len(lead) - kept), slice(None), slice(None))] for t in (keys, values)]
        if pairs is None or _cut(lead, *spread, pairs) is not None:
            (keys, values), kept = spread, len(lead)
        else:
            pairs = pairs.expand(*pairs.shape[:kept], *query.shape[kept:-1], pairs.shape[-1])
    rows = query.flatten(kept, -2).contiguous()
    pairs = None if pairs is None else pairs.flatten(kept, -2)
    # They also need exactly two leading axes.
    cut = _cut(lead[:kept], *(t for t in (keys, values, pairs) if t is not None))
    cut = kept if cut is None else cut
    two = math.prod(lead[:cut]), math.prod(lead[cut:kept])
    rows, keys, values = (t.expand(*lead[:kept], -1, -1).reshape(*two, *t.shape[-2:]) for t in (rows, keys, values))
    if pairs is not None:
        shape = (rows.shape[-2], keys.shape[-2])
        pairs = pairs.expand(*lead[:kept], *shape).reshape(*two, *shape)
    causal: dict[str, Any] = {} if first is None else {"first": first}
    answer, *others = kernel(rows, keys, values, attn_mask=pairs, scale=scale, **causal)
    outputs = (answer[..., :dim] if dim < wide else answer, *others)
    return tuple(out.reshape(*query.shape[:-1], *out.shape[3:]) for out in outputs)


def _cut(lead: torch.Size, *tensors: Tensor) -> int | None:
    """Return the cut of the axes `lead` at which both parts merge in tensors (*#lead, X, Y) that stay views."""
    for cut in range(len(lead) - 1, -1, -1):
        parts = [(t.shape[:-2], slice(cut)) for t in tensors] + [(t.shape[:-2], slice(cut, None)) for t in tensors]
        if all(shape[part].numel() in (1, lead[part].numel()) for shape, part in parts):
            return cut
    return None


class _Attention(torch.autograd.Function):
    """(query, keys, values, mask, scale, first) -> what `sdpa` answers.

    The kernels have a first derivative only. A derivative that may itself be differentiated is that of the formula.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        first: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, mask)
        ctx.scale, ctx.first, ctx.kept = scale, first, None
        ctx.is_flash = False
        # Hooks must see all saved tensors, and this function keeps some past them.
        if not any(ctx.needs_input_grad) or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return sdpa(query, keys, values, attn_mask=mask, scale=scale, first=first)[0]
        ctx.is_flash = is_flash_for_cpu(query, keys, values, mask, scale)
        ctx.kept = _kept(ctx, query, keys, values, mask)
        return ctx.kept[0].detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mask = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        if torch.is_grad_enabled() or transforms_active():
            with exact_precision(cotangent):
                pairs = mask
                if ctx.first is not None:
                    pairs = triangle(query.shape[-2], keys.shape[-2], ctx.first, query.device)
                    pairs = query.new_zeros(()).where(pairs, -torch.inf)
                _, pullback = vjp(lambda q, k, v: _formula(q, k, v, pairs, ctx.scale), query, keys, values)
                return (*pullback(cotangent), None, None, None)
        if kept is None or kept[0]._version != kept[2]:
            # A backward pass has used it up, or the caller wrote to the output.
            with exact_precision(cotangent):
                kept = _kept(ctx, query, keys, values, mask)
        if ctx.is_flash:
            result = flash_gradients(cotangent, query, keys, values, kept[0], kept[1], mask, ctx.scale, ctx.first)
            return (*(g if n else None for g, n in zip(result, ctx.needs_input_grad, strict=False)), None, None, None)
        leaves = kept[1]
        with exact_precision(cotangent):
            gradients = iter(torch.autograd.grad(kept[0], [t for t in leaves if t.requires_grad], cotangent))
        return (*(next(gradients) if t.requires_grad else None for t in leaves), None, None, None)


def flash_gradients(
    cotangent: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    scale: float,
    first: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, keys and values, from the output and the log-sum-exp over all keys."""
    assert _FLASH_BACKWARD is not None
    if first is None:
        fixed: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "attn_mask": mask, "scale": scale}
        return _FLASH_BACKWARD(cotangent, query, keys, values, output, logsumexp, **fixed)  # type: ignore[no-any-return]
    count = keys.shape[-2]
    parts = causal_parts(query.shape[-2], count, first)
    # Weights of a part of the keys are normalised over all keys, as the log-sum-exp is.
    result = [
        _FLASH_BACKWARD(
            *(cotangent, query, keys[..., part, :], values[..., part, :], output, logsumexp),
            *(0.0, own),
            attn_mask=mask,
            scale=scale,
        )
        for part, own in parts
    ]
    if len(result) == 1 and result[0][1].shape[-2] == count:
        return result[0]  # type: ignore[no-any-return]
    by_query = result[0][0] if len(result) == 1 else result[0][0] + result[1][0]
    # Keys beyond the last query have no gradient.
    read = sum(by[1].shape[-2] for by in result)
    by_keys, by_values = (F.pad(torch.cat([by[i] for by in result], -2), (0, 0, 0, count - read)) for i in (1, 2))
    return by_query, by_keys, by_values


def _is_bare(*tensors: Tensor) -> bool:
    """Whether neither a derivative nor a compiler's graph follows operations on `tensors`."""
    return is_plain(*tensors) and not torch.compiler.is_compiling()


def is_flash_for_cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> bool:
    """Whether torch takes its kernel for the CPU, whose derivative can be called without a graph of its own."""
    own = F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    if query.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not own:
        return False
    return torch_chooses_flash(query, keys, values, mask, scale)


def torch_chooses_flash(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> bool:
    """The same on a CPU, for plain tensors, while torch runs eagerly."""
    if _FLASH_BACKWARD is None:
        return False
    chosen: int = torch._fused_sdp_choice(query, keys, values, mask, 0.0, False, scale=scale)
    return chosen == FLASH


def _kept(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Any, Any, int]:
    """The kernel's output; its log-sum-exp, or the leaves of its own graph; and the version of the output."""
    if ctx.is_flash:
        out, rest = with_logsumexp(query, keys, values, attn_mask=mask, scale=ctx.scale, first=ctx.first)
        return out, rest, out._version
    out, leaves = _recorded((query, keys, values), mask, ctx.scale, ctx.first, ctx.needs_input_grad)
    return out, leaves, out._version


def _recorded(
    inputs: Sequence[Tensor], mask: Tensor | None, scale: float, first: int | None, needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """The kernel's output with its own graph, for one backward pass, and the leaves of that."""
    leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needed, strict=False)]
    with torch.enable_grad():
        return sdpa(*leaves, attn_mask=mask, scale=scale, first=first)[0], leaves


def _formula(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (scale * query) @ keys.mT
    return (scores if mask is None else scores + mask).softmax(-1) @ values

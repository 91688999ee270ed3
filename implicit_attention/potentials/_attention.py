"""Softmax attention by torch's fused kernels, which never store the (N, M) scores, in the layout of a `Fold`.

A `Fold` lays batch axes along which keys do not change beside the queries, so that products never copy the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from .._torch import exact_precision, is_exporting, is_plain, transforms_active, vjp
from ..kernels.problem import Attention
from ..kernels.trust import Errors, KernelComparison, Use, Written, answer, normal, poisoned, third_masked

_R = TypeVar("_R")
# Attention was measured to give a row the same bits for all multiples of this many rows on a CPU.
BLOCK = 8
# Torch multiplies matrices by itself where rows, inner and outer size have a product below this.
SMALL_PRODUCT = 400
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


# The layout.


def aligned(size: int, dtype: torch.dtype) -> int:
    """The next size at which rows begin at multiples of 16 bytes, on which the bits of products depend."""
    count = 16 // dtype.itemsize
    return -(-size // count) * count


def row_block(inner: int, outer: int, dtype: torch.dtype) -> int:
    """Rows come in multiples of this, so that a row's bits do not depend on how many others there are.

    There are so many rows that no product is so small that torch multiplies it by itself, in another order.
    """
    return -(-SMALL_PRODUCT // (BLOCK * aligned(inner, dtype) * aligned(outer, dtype))) * BLOCK


def widened(tensor: Tensor, size: int) -> Tensor:
    """`tensor` with zeros up to `size` on its last axis."""
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def addressable(tensor: Tensor) -> Tensor:
    """`tensor`, copied unless its rows lie apart from each other and the numbers of a row side by side.

    A kernel is told where rows begin. Torch's kernels take the rest for granted, and answer other layouts with whatever
    lies there: `scaled_dot_product_attention` refuses them before, its operations by themselves do not look.
    """
    apart = tensor.shape[-2] < 2 or tensor.stride(-2) >= tensor.shape[-1]
    return tensor if apart and tensor.stride(-1) == 1 else tensor.contiguous()


class Fold:
    """The layout (*kept, *folded, N, ...) of states (*batch, N, ...) over keys whose leading axes are one of `leads`.

    A batched product copies keys that have size 1 along an axis of the batch (grouped queries, one memory for many
    samples). Here such axes are folded into the rows of one product, which reads the keys where they lie.
    """

    def __init__(self, batch: torch.Size, *leads: torch.Size) -> None:
        axes = range(max(len(shape) for shape in (batch, *leads)))
        sizes, *others = [(*(1,) * (len(axes) - len(shape)), *shape) for shape in (batch, *leads)]
        folded = [i for i in axes if sizes[i] != 1 and all(shape[i] == 1 for shape in others)]
        kept = [i for i in axes if i not in folded]
        self.kept = len(kept)
        self.order = (*kept, *folded)
        self.inverse = tuple(self.order.index(i) for i in axes)
        self.in_order = self.order == tuple(axes)

    def moved(self, tensor: Tensor) -> Tensor:
        """(*#batch, N, X) -> (*#kept, *#folded, N, X), a view; leading axes may be missing."""
        if tensor.ndim < len(self.order) + 2:
            tensor = tensor[(None,) * (len(self.order) + 2 - tensor.ndim)]
        return tensor if self.in_order else tensor.permute(*self.order, -2, -1)

    def restored(self, tensor: Tensor) -> Tensor:
        """(*kept, *folded, N, ...) -> (*batch, N, ...), a view."""
        return tensor if self.in_order else tensor.permute(*self.inverse, *range(len(self.order), tensor.ndim))

    def rows(self, tensor: Tensor) -> Tensor:
        """(*kept, *folded, N, X) -> (*kept, rows, X); of keys, which have size 1 along the folded axes, a view."""
        return tensor.flatten(self.kept, -2)

    def product(self, tensor: Tensor, matrix: Tensor) -> Tensor:
        """(*kept, *folded, N, X) times (*kept, X, Y) -> (*kept, *folded, N, Y)."""
        if is_exporting():
            # An exported program has open sizes, and runs on other machines, which have other bits.
            between = (None,) * (tensor.ndim - matrix.ndim if self.kept else 0)
            return tensor @ matrix[(..., *between, slice(None), slice(None))]
        columns = matrix.shape[-1]
        # Zeros, because bits depend on whether rows begin at multiples of 16 bytes.
        inner, outer = (aligned(size, tensor.dtype) for size in matrix.shape[-2:])
        tensor = widened(tensor, inner)
        if (inner, outer) != matrix.shape[-2:]:
            matrix = F.pad(matrix, (0, outer - columns, 0, inner - matrix.shape[-2]))
        if 2 < tensor.ndim == matrix.ndim:
            return (tensor @ matrix)[..., :columns]
        # Batched even without a batch: the plain product of few rows by few takes other paths, with other bits.
        result = self.rows(tensor)[None] @ matrix[None]
        return result.reshape(*result.shape[1 : 1 + self.kept], *tensor.shape[self.kept : -1], outer)[..., :columns]


def triangle(rows: int, count: int, first: int, device: torch.device) -> Tensor:
    """Whether query i attends to key j <= first + i, (N, M)."""
    return torch.arange(count, device=device) <= torch.arange(first, first + rows, device=device)[:, None]


def common(keys: Tensor, attended: Tensor | None = None) -> Tensor:
    """Return the common part of keys (*batch, M, D), (*batch, 1, D): their mean, large ones counting less.

    Softmax weights and covariances do not change when it is taken from all keys, but their rounding, which grows with
    the square of it, does. A key that is far off is no guide and counts by the inverse square of its length; one that
    nobody attends to, `attended` (*#batch, M), changes no bit, whatever it holds.
    """
    keys = keys.detach()
    lengths: Tensor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True)
    if attended is not None:
        lengths = lengths.masked_fill(~attended[..., None], torch.inf)
    tiny = torch.finfo(keys.dtype).tiny
    share = (lengths.amin(-2, keepdim=True) / lengths.clamp(min=tiny)).square().nan_to_num(0.0)
    return (share.mT @ keys) / share.sum(-2, keepdim=True).clamp(min=tiny)


# The kernels.


def flash_with_logsumexp(
    query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """softmax(scale Q K^T + mask) V and the log-sum-exp, (B, H, N, E) and (B, H, N), on a CPU; of any layout."""
    assert _FLASH_FOR_CPU is not None
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
    parts = [
        run(keys[..., part, :], values[..., part, :], is_causal=own)
        for part, own in causal_parts(query.shape[-2], keys.shape[-2], first)
    ]
    if len(parts) == 1:
        return parts[0]
    (out, logsumexp), (own_out, own_logsumexp) = parts
    both = torch.logaddexp(logsumexp, own_logsumexp)
    out = out * (logsumexp - both).exp()[..., None] + own_out * (own_logsumexp - both).exp()[..., None]
    # The log-sum-exp of half precision is float32.
    return out.to(own_out.dtype), both


def causal_parts(rows: int, count: int, first: int | None) -> list[tuple[slice, bool]]:
    """Parts of the keys that `rows` queries read, the first of which stands at key `first`, and whether by a triangle.

    Torch's kernels know the triangle whose first query attends to the first key alone.
    """
    if first is None:
        return [(slice(None), False)]
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
    *steps, step = (1,) if attn_mask is None else attn_mask.stride()
    if attn_mask is not None and (step != 1 or any(n % MASK_ALIGNMENT for n in steps)):
        *lead, count = attn_mask.shape
        rows = attn_mask.new_zeros(*lead, -(-count // MASK_ALIGNMENT) * MASK_ALIGNMENT)
        attn_mask = rows[..., :count].copy_(attn_mask)
    result = _EFFICIENT(query, keys, values, attn_mask, True, is_causal=is_causal, scale=scale)
    return result[0], result[1][..., : query.shape[-2]]


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
        elif (
            dropout_p == 0
            and is_plain(query, keys, values)
            # A compiler's graph does not know these kernels.
            and not torch.compiler.is_compiling()
            and is_flash_for_cpu(query, keys, values, None, scale)
        ):
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
    return (_Attention.apply(query, keys, values, attn_mask, scale, first),)  # type: ignore[no-untyped-call]


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
    count = keys.shape[-2]
    # Weights of a part of the keys are normalised over all keys, as the log-sum-exp is.
    result = [
        _FLASH_BACKWARD(
            *(cotangent, query, keys[..., part, :], values[..., part, :], output, logsumexp),
            *(0.0, own),
            attn_mask=mask,
            scale=scale,
        )
        for part, own in causal_parts(query.shape[-2], count, first)
    ]
    if len(result) == 1 and result[0][1].shape[-2] == count:
        return result[0]  # type: ignore[no-any-return]
    by_query = result[0][0] if len(result) == 1 else result[0][0] + result[1][0]
    # Keys beyond the last query have no gradient.
    read = sum(by[1].shape[-2] for by in result)
    by_keys, by_values = (F.pad(torch.cat([by[i] for by in result], -2), (0, 0, 0, count - read)) for i in (1, 2))
    return by_query, by_keys, by_values


def is_flash_for_cpu(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> bool:
    """Whether torch takes its kernel for the CPU, whose derivative can be called without a graph of its own."""
    own = F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    if query.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not own or _FLASH_BACKWARD is None:
        return False
    chosen: int = torch._fused_sdp_choice(query, keys, values, mask, 0.0, False, scale=scale)
    return chosen == FLASH


def _kept(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Any, Any, int]:
    """The kernel's output; its log-sum-exp, or the leaves of its own graph; and the version of the output."""
    rest: Any
    if ctx.is_flash:
        out, rest = with_logsumexp(query, keys, values, attn_mask=mask, scale=ctx.scale, first=ctx.first)
    else:
        rest = [t.detach().requires_grad_(n) for t, n in zip((query, keys, values), ctx.needs_input_grad, strict=False)]
        with torch.enable_grad():
            (out,) = sdpa(*rest, attn_mask=mask, scale=ctx.scale, first=ctx.first)
    return out, rest, out._version


def _formula(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (scale * query) @ keys.mT
    return (scores if mask is None else scores + mask).softmax(-1) @ values


# Trust in them.


class AttentionVariant(NamedTuple):
    """The properties that select the code path of torch's attention kernels; masks are numbers added to the scores."""

    dtype: torch.dtype
    head_dim: int
    mask: bool
    causal: bool
    #: Whether the rows of a mask begin at multiples of 16 bytes.
    aligned: bool


def by_attention(keys: Tensor, run: Callable[[], _R], *, mask: bool, causal: bool = False) -> _R | None:
    """Return the answer of `run`, torch's attention kernel with its log-sum-exp, if that is trusted, else None."""
    if torch.compiler.is_compiling():
        # A check cannot run while torch traces. The registered operations are never traced through.
        return None
    dim, count = aligned(keys.shape[-1], keys.dtype), keys.shape[-2]
    variant = AttentionVariant(keys.dtype, dim, mask, causal, aligned(count, keys.dtype) == count)
    use = Use("attention with log-sum-exp (torch)", keys.device, variant)
    return answer(use, partial(_errors, variant, keys.device), run)


def _errors(variant: AttentionVariant, device: torch.device) -> Errors:
    """One evaluation as the solves make it, with masks whose rows are shared and with others."""
    # More than one block of either kind in torch's kernels, and a part of one.
    rows, count, dim = 33, 520 if variant.aligned else 515, variant.head_dim
    query, keys = (normal((2, size, dim), seed).to(variant.dtype) for seed, size in ((0, rows), (1, count)))
    masks: dict[str, Tensor | None] = {"": None}
    if variant.mask:
        masks = {f" ({what})": third_masked(*size, count) for what, size in (("keys", (1, 1)), ("pairs", (2, rows)))}
    scale = dim**-0.5
    # In half precision torch takes exponentials with 20 bits.
    measured = KernelComparison(2**-20 if variant.dtype.itemsize == 2 else torch.finfo(variant.dtype).eps)
    for what, mask in masks.items():
        mask = None if mask is None else mask.to(variant.dtype)
        problem = Attention.of(query, keys, scale, 0.0, mask, 0 if variant.causal else None)
        written = (Written(problem), Written(problem, variant.dtype))
        (_, mean, logsumexp), (_, rough_mean, rough_logsumexp) = (w.attend(query.double()) for w in written)
        pairs = None if mask is None else mask.to(device).expand(1, 2, rows, count)
        # Torch allocates the outputs, often where memory of their size was freed.
        for size in (query.shape, query.shape[:2]):
            poisoned(torch.empty(size, dtype=variant.dtype, device=device))
        given = [t.to(device)[None] for t in (query, keys, keys)]
        ours = with_logsumexp(*given, attn_mask=pairs, scale=scale, first=0 if variant.causal else None)
        measured.add(f"mean{what}", ours[0][0], mean, rough_mean.to(variant.dtype).double())
        measured.add(f"logsumexp{what}", ours[1][0], logsumexp, rough_logsumexp)
    return measured.errors

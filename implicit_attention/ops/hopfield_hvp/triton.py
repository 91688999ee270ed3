"""The Hessian-vector product as one kernel, which stores nothing of size (N, M)."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _trust
from .._triton_kernels import LOG2E, batch_offset, covariance_product, rounded, score_shift
from .._triton_layout import Layout, in_memory, in_order, on_device, plan, readable_mask, tiles
from .._triton_support import interpreted
from ..problem import Hopfield


def hessian_product(problem: Hopfield, state: Tensor, vector: Tensor, mean: Tensor, logsumexp: Tensor) -> Tensor:
    """A v = v - (1 - anchor) beta Cov(z) v, (*batch, N, D) float32; mean and logsumexp are those at the state z."""
    problem = in_memory(problem)
    keys = problem.keys
    rows = state.shape[-2]
    out = _trust.empty(*vector.shape, dtype=torch.float32, device=vector.device)
    if vector.numel() == 0:
        return out
    layout = Layout.of(problem)
    assert layout is not None
    chosen = tiles("hvp", problem)
    count = logsumexp.numel() // rows * triton.cdiv(rows, chosen.rows)
    with on_device(vector):
        _product_kernel[(count,)](
            *(in_order(tensor) for tensor in (state, vector, mean, logsumexp)),
            *(keys, layout.keys, problem.beta, layout.beta, problem.anchor, layout.anchor),
            *(readable_mask(problem), layout.mask, out, layout.sizes, rows, keys.shape[-2]),
            plan(problem, chosen, interpreted=interpreted()),
            num_warps=chosen.warps,
            num_stages=chosen.stages,
            enable_fp_fusion=True,
        )
    return out


@triton.jit(do_not_specialize=["N", "M"])
def _product_kernel(
    state,
    vector,
    mean,
    logsumexp,
    keys,
    keys_strides,
    beta,
    beta_strides,
    anchor,
    anchor_strides,
    mask,
    mask_strides,
    out,
    sizes,
    N,
    M,
    P: tl.constexpr,
):
    ROWS: tl.constexpr = P.rows
    DIMS: tl.constexpr = P.dims
    D: tl.constexpr = P.dim
    per_batch = tl.cdiv(N, ROWS)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    tile = tl.program_id(0) % per_batch
    if P.causal:
        tile = per_batch - 1 - tile
    first = tile * ROWS
    local, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = first + local < N
    inside = real[:, None] & (dims < D)[None, :]
    begin = batch * N + first
    places = begin * D + local[:, None] * D + dims[None, :]

    b = tl.load(beta + batch_offset(batch, sizes, beta_strides)).to(tl.float32)
    a = tl.load(anchor + batch_offset(batch, sizes, anchor_strides)).to(tl.float32)
    key_rows = (keys + batch_offset(batch, sizes, keys_strides), keys_strides[3], keys_strides[4])
    pairs = (mask + batch_offset(batch, sizes, mask_strides), mask_strides[3], mask_strides[4])

    z = tl.load(state + places, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(vector + places, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
    half, scale = rounded(z, P)
    level = tl.load(logsumexp + begin + local, mask=real, other=0.0).to(tl.float32)
    shift = score_shift(z, m, level, half, scale, b)
    product = covariance_product(half, scale * (b * LOG2E), shift, v, m, first, key_rows, pairs, N, M, P)
    tl.store(out + places, v - (1.0 - a) * b * product, mask=inside)

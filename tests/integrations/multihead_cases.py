"""Modules, masks and calls of every form that nn.MultiheadAttention takes, and the solve written out by itself."""

import math

import torch
from torch import nn

from implicit_attention import Anderson
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.testing.numerics import equilibrium_reference, random

B, N, M, DIM, HEADS = 2, 5, 7, 12, 3
TIGHT = Anderson(rtol=1e-12, atol=1e-14)


def module(*, seed=0, dtype=torch.float64, width=DIM, heads=HEADS, **options):
    torch.manual_seed(seed)
    made = ImplicitMultiheadAttention(width, heads, dtype=dtype, **options)
    # Anchors and temperatures that differ between heads and biases that are not zero tell wrong axes.
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1 or name.startswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return made


def theirs(made):
    """torch's module with the same parameters, made from the state dict alone."""
    state = {name: value for name, value in made.state_dict().items() if not name.startswith(("anchor", "beta"))}
    made = nn.MultiheadAttention(
        made.embed_dim, made.num_heads, made.dropout, made.in_proj_bias is not None, made.bias_k is not None,
        made.add_zero_attn, made.kdim, made.vdim, made.batch_first, dtype=made.out_proj.weight.dtype,
    )  # fmt: skip
    made.load_state_dict(state)
    return made


def some(*shape, seed=9):
    mask = random(*shape, seed=seed) > 0.3
    mask[..., 0] = False
    return mask


PADDING = torch.arange(M) >= torch.tensor([[4], [7]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64)
SELF = {"self": True}
#: (options of the constructor, arguments of the call, what the tokens are)
CASES = {
    "self": ({}, {}, SELF),
    "cross": ({}, {}, {}),
    "batch first": ({"batch_first": True}, {}, {}),
    "widths": ({"kdim": 6, "vdim": 4}, {}, {}),
    "widths, no bias": ({"kdim": 6, "vdim": 4, "bias": False, "batch_first": True}, {"key_padding_mask": PADDING}, {}),
    "values of their own width": ({"vdim": 4}, {}, {}),
    "no bias": ({"bias": False}, {}, SELF),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True}, SELF),
    "causal, boolean": ({"batch_first": True}, {"attn_mask": CAUSAL < 0, "is_causal": True}, SELF),
    "mask": ({}, {"attn_mask": some(N, M)}, {}),
    "mask by head": ({}, {"attn_mask": some(B * HEADS, N, M)}, {}),
    "additive mask by head": ({}, {"attn_mask": random(B * HEADS, N, M, seed=3)}, {}),
    "padding": ({}, {"key_padding_mask": PADDING}, {}),
    "additive padding": ({}, {"key_padding_mask": random(B, M, seed=3)}, {}),
    "mask and padding": ({}, {"attn_mask": some(N, M), "key_padding_mask": PADDING}, {}),
    "additive mask and padding": (
        {"batch_first": True}, {"attn_mask": random(N, M, seed=3), "key_padding_mask": random(B, M, seed=4)}, {}),
    "unbatched": ({}, {}, {"batch": False}),
    "unbatched, masks": ({"batch_first": True},
                         {"attn_mask": some(HEADS, N, M), "key_padding_mask": PADDING[0]}, {"batch": False}),
    "learned key": ({"add_bias_kv": True}, {"attn_mask": some(N, M), "key_padding_mask": PADDING}, {}),
    "zero key": ({"add_zero_attn": True, "batch_first": True},
                 {"attn_mask": random(N, M, seed=3), "key_padding_mask": random(B, M, seed=4)}, {}),
    "both keys": ({"add_bias_kv": True, "add_zero_attn": True, "vdim": 5}, {"attn_mask": some(B * HEADS, N, M)}, {}),
}  # fmt: skip


def tokens(made, *, self=False, batch=True, dtype=torch.float64, rows=N, keys=M):
    def some(rows, width, seed):
        lead = (rows,) if not batch else (B, rows) if made.batch_first else (rows, B)
        return random(*lead, width, seed=seed, dtype=dtype)

    if self:
        x = some(rows, made.embed_dim, 0)
        return x, x, x
    return some(rows, made.embed_dim, 0), some(keys, made.kdim, 1), some(keys, made.vdim, 2)


def cast(call, dtype):
    floating = {k: v.to(dtype) for k, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {**call, **floating}


@torch.no_grad()
def reference(made, query, key, value, key_padding_mask=None, attn_mask=None, is_causal=False, *, explicit=False):
    """(output, weights by head) from the state dict by repeating the map; `explicit` without a step."""
    p = {name: value.double() for name, value in made.state_dict().items()}
    second = query.ndim == 3 and not made.batch_first
    batch = [(t.transpose(0, 1) if second else t.view(-1, *t.shape[-2:])).double() for t in (query, key, value)]
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    matrices = p["in_proj_weight"].split(made.embed_dim) if "in_proj_weight" in p else [p[name] for name in names]
    shifts = p["in_proj_bias"].split(made.embed_dim) if "in_proj_bias" in p else [torch.zeros(made.embed_dim)] * 3
    q, k, v = (t @ w.T + s for t, w, s in zip(batch, matrices, shifts, strict=True))
    added = [(p["bias_k"], p["bias_v"])] if "bias_k" in p else []
    added += [(torch.zeros_like(k[:1, :1]), torch.zeros_like(v[:1, :1]))] if made.add_zero_attn else []
    count = k.shape[1]
    for more_k, more_v in added:
        k, v = (torch.cat([t, more.expand(len(t), 1, -1)], 1) for t, more in ((k, more_k), (v, more_v)))
    q, k, v = (t.unflatten(-1, (made.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    bias = torch.zeros(*q.shape[:-1], k.shape[2], dtype=torch.float64)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.view(len(q), 1, 1, -1)
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (len(q), -1))
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.dtype == torch.bool:
            bias[..., :count] = bias[..., :count].masked_fill(mask, -math.inf)
        elif mask is not None:
            bias[..., :count] += mask
    beta, anchor = (torch.as_tensor(part()).expand(made.num_heads) for part in (made.beta, made.anchor))
    every = torch.eye(k.shape[2]).expand(*k.shape[:-1], -1)
    weights = equilibrium_reference(
        q, k, every, bias, beta=beta, anchor=torch.ones_like(anchor) if explicit else anchor
    )
    output = (weights @ v).transpose(1, 2).flatten(2) @ p["out_proj.weight"].T + p.get("out_proj.bias", 0.0)
    if query.ndim == 2:
        return output[0], weights[0]
    return output.transpose(0, 1) if second else output, weights

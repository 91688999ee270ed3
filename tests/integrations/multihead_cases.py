"""Modules, masks and calls of every form that nn.MultiheadAttention takes, and the solve written out by itself."""

import math

import torch
from torch import nn

from implicit_attention import Anderson
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.testing.numerics import random

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
def reference(made, query, key, value, key_padding_mask=None, attn_mask=None, is_causal=False, *, steps=3000):
    """(output, weights by head) from the state dict by repeating the map, one sample and one head at a time."""
    p = {name: value.double() for name, value in made.state_dict().items()}
    if query.ndim == 2:
        padding = None if key_padding_mask is None else key_padding_mask[None]
        batch = [t[None] for t in (query, key, value)]
        output, weights = reference(BatchFirst(made), *batch, padding, attn_mask, steps=steps)
        return output[0], weights[0]
    if not made.batch_first:
        batch = [t.transpose(0, 1) for t in (query, key, value)]
        output, weights = reference(BatchFirst(made), *batch, key_padding_mask, attn_mask, steps=steps)
        return output.transpose(0, 1), weights
    width, count = made.embed_dim // made.num_heads, key.shape[1]
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    matrices = p["in_proj_weight"].split(made.embed_dim) if "in_proj_weight" in p else [p[name] for name in names]
    shifts = p["in_proj_bias"].split(made.embed_dim) if "in_proj_bias" in p else [torch.zeros(made.embed_dim)] * 3
    outputs, all_weights = [], []
    for b in range(len(query)):
        q, k, v = (x[b].double() @ w.T + s for x, w, s in zip((query, key, value), matrices, shifts, strict=True))
        if "bias_k" in p:
            k, v = torch.cat([k, p["bias_k"][0]]), torch.cat([v, p["bias_v"][0]])
        if made.add_zero_attn:
            k, v = (torch.cat([t, torch.zeros(1, made.embed_dim, dtype=t.dtype)]) for t in (k, v))
        heads, of_heads = [], []
        for h in range(made.num_heads):
            bias = torch.zeros(len(q), len(k), dtype=torch.float64)
            for mask in (attn_mask if attn_mask is None or attn_mask.ndim == 2 else attn_mask[b * made.num_heads + h],
                         None if key_padding_mask is None else key_padding_mask[b].expand(len(q), -1)):  # fmt: skip
                if mask is not None and mask.dtype == torch.bool:
                    bias[:, :count] = bias[:, :count].masked_fill(mask, -math.inf)
                elif mask is not None:
                    bias[:, :count] += mask
            beta = float(torch.as_tensor(made.beta()).expand(made.num_heads)[h])
            anchor = float(torch.as_tensor(made.anchor()).expand(made.num_heads)[h])
            part = slice(h * width, (h + 1) * width)
            z, nothing = q[:, part], torch.isneginf(bias).all(-1)

            def weigh(z, k=k[:, part], beta=beta, bias=bias, nothing=nothing):
                scores = (beta * z @ k.T + bias).masked_fill(nothing[:, None], 0.0)
                return scores.softmax(-1).masked_fill(nothing[:, None], 0.0)

            for _ in range(steps):
                before, z = z, anchor * q[:, part] + (1 - anchor) * weigh(z) @ k[:, part]
                if float((z - before).abs().max()) < 1e-14:
                    break
            assert steps == 0 or float((z - before).abs().max()) < 1e-12, "the reference has not settled"
            heads.append(weigh(z) @ v[:, part])
            of_heads.append(weigh(z))
        outputs.append(torch.cat(heads, -1) @ p["out_proj.weight"].T + p.get("out_proj.bias", 0.0))
        all_weights.append(torch.stack(of_heads))
    return torch.stack(outputs), torch.stack(all_weights)


class BatchFirst:
    """A module seen as batch first."""

    batch_first = True

    def __init__(self, made):
        self.made = made

    def __getattr__(self, name):
        return getattr(self.made, name)

"""The transformer layers of torch.nn with equilibrium attention, written out: batch first, float64."""

import math

import torch
import torch.nn.functional as F

from implicit_attention.testing.numerics import equilibrium_reference

B, N, DIM, HEADS = 2, 6, 8, 2


def options(**given):
    return {"d_model": DIM, "nhead": HEADS, "dim_feedforward": 12, "dropout": 0.0, "dtype": torch.float64, **given}


def attended(module, x, context, mask=None):
    """What the module answers; `mask` additive, (B, N, M)."""
    query, key, value = (
        F.linear(t, w, b).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for t, w, b in zip(
            (x, context, context), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True
        )
    )
    mask = None if mask is None else mask[:, None]
    z = equilibrium_reference(query, key, value, mask, beta=module.beta(), anchor=module.anchor())
    return F.linear(z.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)


def feed_forward(layer, x):
    return layer.linear2(torch.relu(layer.linear1(x)))


def encoder_layer(layer, x, mask=None):
    if layer.norm_first:
        normed = layer.norm1(x)
        x = x + attended(layer.self_attn, normed, normed, mask)
        return x + feed_forward(layer, layer.norm2(x))
    x = layer.norm1(x + attended(layer.self_attn, x, x, mask))
    return layer.norm2(x + feed_forward(layer, x))


def decoder_layer(layer, x, memory, mask=None, memory_mask=None):
    if layer.norm_first:
        normed = layer.norm1(x)
        x = x + attended(layer.self_attn, normed, normed, mask)
        x = x + attended(layer.multihead_attn, layer.norm2(x), memory, memory_mask)
        return x + feed_forward(layer, layer.norm3(x))
    x = layer.norm1(x + attended(layer.self_attn, x, x, mask))
    x = layer.norm2(x + attended(layer.multihead_attn, x, memory, memory_mask))
    return layer.norm3(x + feed_forward(layer, x))


def additive(mask=None, padding=None, rows=N):
    total = torch.zeros(B, rows, N, dtype=torch.float64)
    total = total if mask is None else total + mask
    return total if padding is None else total.masked_fill(padding[:, None], -math.inf)


def agree(output, expected, kept=None):
    kept = torch.ones(output.shape[:2], dtype=torch.bool) if kept is None else kept
    torch.testing.assert_close(output[kept], expected[kept], rtol=1e-8, atol=1e-10)

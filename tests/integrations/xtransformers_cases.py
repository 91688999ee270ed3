"""Models of x-transformers with every setting that has an equilibrium, and the solve written out by itself."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper
from x_transformers.x_transformers import Attention

from implicit_attention import Anderson
from implicit_attention.integrations import xtransformers
from implicit_attention.integrations.xtransformers import EquilibriumAttend, replace_attend
from implicit_attention.testing.numerics import random

B, N, TOKENS, DIM, HEADS = 2, 7, 11, 16, 6
TIGHT = Anderson(rtol=1e-12, atol=1e-14, max_steps=400)
SIZES = {"dim": DIM, "depth": 2, "heads": HEADS, "attn_dim_head": 8}
IDS = torch.randint(0, TOKENS, (B, N), generator=torch.Generator().manual_seed(0))
PADDED = torch.arange(N) < torch.tensor([[N], [N - 3]])

CASES = {
    "rotary, grouped": (Decoder, {"rotary_pos_emb": True, "attn_kv_heads": 2}),
    "rotary, grouped, flash": (Decoder, {"rotary_pos_emb": True, "attn_kv_heads": 2, "attn_flash": True}),
    "encoder": (Encoder, {}),
    "encoder, flash": (Encoder, {"attn_flash": True}),
    "alibi": (Decoder, {"alibi_pos_bias": True}),
    "alibi, grouped, flash": (Decoder, {"alibi_pos_bias": True, "attn_kv_heads": 2, "attn_flash": True}),
    "relative positions": (Encoder, {"rel_pos_bias": True, "attn_kv_heads": 2}),
    "forgetting": (Decoder, {"attn_data_dependent_alibi": True}),
    "projected positions": (Decoder, {"attn_use_rel_proj_pos_bias": True}),
    "one key head": (Decoder, {"attn_one_kv_head": True, "alibi_pos_bias": True}),
    "qk_norm": (Decoder, {"attn_qk_norm": True, "attn_qk_norm_scale": 6}),
    "qk_norm, learned": (Decoder, {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True, "attn_kv_heads": 2}),
    "qk_rmsnorm": (Decoder, {"attn_qk_rmsnorm": True}),
    "memory": (Decoder, {"attn_num_mem_kv": 3, "attn_kv_heads": 2, "alibi_pos_bias": True}),
    "zero key": (Decoder, {"attn_add_zero_kv": True, "attn_kv_heads": 2, "alibi_pos_bias": True}),
    "sink": (Decoder, {"attn_head_learned_sink": True, "attn_kv_heads": 2, "alibi_pos_bias": True}),
    "sink and zero key": (Encoder, {"attn_head_learned_sink": True, "attn_add_zero_kv": True}),
    "distances": (Decoder, {"attn_l2_distance": True, "attn_kv_heads": 2, "alibi_pos_bias": True}),
    "distances, flash": (Encoder, {"attn_l2_distance": True, "attn_flash": True}),
    "capped": (Decoder, {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 1.5, "attn_kv_heads": 2}),
    "local": (Decoder, {"attn_max_attend_past": 2}),
    "value width": (Decoder, {"attn_value_dim_head": 6, "attn_kv_heads": 2, "attn_laser": True}),
}  # fmt: skip


def model(case, dtype=torch.float64, *, sharp=3.0, **options):
    """A random model of one case, whose every parameter matters."""
    kind, settings = CASES[case] if isinstance(case, str) else case
    torch.manual_seed(0)
    made = TransformerWrapper(num_tokens=TOKENS, max_seq_len=32, attn_layers=kind(**SIZES, **settings), **options)
    return settled(made, dtype, sharp)


@torch.no_grad()
def settled(made, dtype, sharp):
    for module in made.modules():
        if isinstance(module, Attention):
            module.to_q.weight *= sharp
            for parameter in [*module.parameters()]:
                if parameter.ndim != 2:
                    parameter += 0.3 * torch.randn_like(parameter)
            if dtype == torch.float64:
                # By default its softmax is in float32, whatever it is given.
                module.attend.attn_fn = partial(F.softmax, dim=-1)
    return made.to(dtype).eval()


def replaced(original, **options):
    """A copy with equilibria, in which every head has its own anchor, where anchors are learned."""
    new = copy.deepcopy(original)
    found = replace_attend(new, **options)
    assert all(new.get_submodule(name) is module for name, module in found.items())
    for i, module in enumerate(found.values()):
        for parameter in module.anchor.parameters():
            parameter.data = random(HEADS, seed=i, dtype=parameter.dtype)
    return new


class ReferenceAttend(nn.Module):
    """The equilibrium in float64 by plain steps, every product written out, heads repeated as x-transformers does."""

    def __init__(self, attend, anchor):
        super().__init__()
        self.attend, self.anchor = attend, anchor

    def scores(self, z, k, bias, keep):
        """Scores with zero key and sink in front, and the slope of the cap."""
        theirs = self.attend
        k = F.pad(k, (0, 0, 1, 0)) if theirs.add_zero_kv else k
        s = -(z[..., None, :] - k[..., None, :, :]).square().sum(-1) if theirs.l2_distance else z @ k.mT
        s = s * theirs.scale
        slope = torch.ones_like(s)
        s = s + (F.pad(bias.expand_as(s[..., int(theirs.add_zero_kv) :]), (int(theirs.add_zero_kv), 0)))
        if theirs.softclamp_logits:
            cap = theirs.logit_softclamp_value
            s, slope = cap * torch.tanh(s / cap), 1 / torch.cosh(s / cap) ** 2
        keep = F.pad(keep.expand(*s.shape[:-1], keep.shape[-1]), (int(theirs.add_zero_kv), 0), value=True)
        s = s.masked_fill(~keep, -torch.inf)
        if theirs.head_attn_sink is not None:
            s = torch.cat([theirs.head_attn_sink[:, None, None].expand(*s.shape[:-1], 1), s], dim=-1)
        return s, slope

    def forward(self, q, k, v, mask=None, attn_bias=None, causal=None, **ignored):
        heads, rows, count = q.shape[1], q.shape[2], k.shape[2]
        k, v = (torch.cat([t] * (heads // t.shape[1]), dim=1) for t in (k, v))
        keep = torch.ones(rows, count, dtype=torch.bool) if mask is None else mask
        keep = keep & torch.ones(rows, count).tril(count - rows).bool() if causal else keep
        bias = torch.zeros(1) if attn_bias is None else attn_bias
        extra = self.attend.add_zero_kv + (self.attend.head_attn_sink is not None)
        nothing = ~keep.any(-1, keepdim=True)

        def weights(z):
            s, slope = self.scores(z, k, bias, keep)
            p = s.softmax(-1) if extra else s.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
            return p[..., extra:], slope[..., int(self.attend.add_zero_kv) :]

        a, z, change = self.anchor[:, None, None], q, 1.0
        for _ in range(5000):
            p, slope = weights(z)
            before, z = z, a * q + (1 - a) * (p * slope) @ k
            change = float((z - before).abs().max())
            if change < 1e-14:
                break
        assert change < 1e-12
        return weights(z)[0] @ v, xtransformers.Intermediates()


def with_reference(original, anchors):
    new = copy.deepcopy(original)
    for module, anchor in zip((m for m in new.modules() if isinstance(m, Attention)), anchors, strict=True):
        module.attend = ReferenceAttend(module.attend, anchor)
    return new


def anchors(new):
    return [m.anchor().detach() for m in new.modules() if isinstance(m, EquilibriumAttend)]

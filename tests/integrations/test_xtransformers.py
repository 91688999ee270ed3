"""Equilibrium attention inside models of x-transformers."""

import copy
import importlib
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from x_transformers import (
    AutoregressiveWrapper,
    CrossAttender,
    Decoder,
    Encoder,
    TransformerWrapper,
    ViTransformerWrapper,
    XTransformer,
)
from x_transformers.attend import Attend
from x_transformers.x_transformers import Attention

from implicit_attention import Anderson, Picard, Status, UnsupportedImplementation
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


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_steps_are_the_model_and_steps_the_reference_solve(case, padded):
    original, mask = model(case), PADDED if padded else None
    new = replaced(original, max_steps=0)
    explicit, theirs = new(IDS, mask=mask), original(IDS, mask=mask)
    torch.testing.assert_close(explicit, theirs, rtol=1e-12, atol=1e-12)

    for module in replace_attend(new, solver=TIGHT).values():
        module.anchor.logit.copy_(random(HEADS, seed=int(module.anchor.logit.numel()) + 1))
    found = new(IDS, mask=mask)
    expected = with_reference(original, anchors(new))(IDS, mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert float((found - explicit).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("case", [*CASES, (Encoder, {"dynamic_pos_bias": True, "attn_kv_heads": 2})])
def test_no_steps_are_the_model_in_single_precision(case):
    original = model(case, torch.float32, sharp=1.0)
    for mask in (None, PADDED):
        torch.testing.assert_close(
            replaced(original, max_steps=0)(IDS, mask=mask), original(IDS, mask=mask), rtol=1e-6, atol=1e-6
        )


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True])
def test_cross_attention_and_images(flash):
    torch.manual_seed(0)
    sizes = {"dim": DIM, "depth": 1, "heads": HEADS, "attn_flash": flash}
    cross = settled(CrossAttender(**sizes, attn_kv_heads=2), torch.float64, 3.0)
    x, context, exists = random(B, 3, DIM), random(B, N, DIM, seed=1), {"context_mask": PADDED}
    image = {"image_size": 8, "patch_size": 4, "num_classes": 5}
    vision = settled(ViTransformerWrapper(**image, attn_layers=Encoder(**sizes)), torch.float64, 3.0)
    for original, inputs, call in ((cross, (x, context), exists), (vision, (random(B, 3, 8, 8),), {})):
        theirs = original(*inputs, **call)
        explicit = replaced(original, max_steps=0)
        torch.testing.assert_close(explicit(*inputs, **call), theirs, rtol=1e-12, atol=1e-12)
        new = replaced(original, solver=TIGHT)
        expected = with_reference(original, anchors(new))(*inputs, **call)
        torch.testing.assert_close(new(*inputs, **call), expected, rtol=1e-9, atol=1e-9)
        assert float((theirs - expected).abs().max()) > 1e-3


@torch.no_grad()
def test_encoder_and_decoder_together():
    torch.manual_seed(0)
    sides = {f"{s}_{k}": v for s in ("enc", "dec") for k, v in
             {"num_tokens": TOKENS, "depth": 1, "heads": HEADS, "max_seq_len": N}.items()}  # fmt: skip
    original = settled(XTransformer(dim=DIM, **sides), torch.float64, 3.0)
    new = replaced(original, max_steps=0)
    assert len([m for m in new.modules() if isinstance(m, EquilibriumAttend)]) == 3
    start, call = IDS[:, :1], {"mask": PADDED, "cache_kv": True, "temperature": 0.0}
    assert torch.equal(new.generate(IDS, start, 5, **call), original.generate(IDS, start, 5, **call))


# Decoding.

DECODERS = ["rotary, grouped", "rotary, grouped, flash", "alibi, grouped, flash", "memory", "sink", "zero key", "local"]


@torch.no_grad()
@pytest.mark.parametrize("case", DECODERS)
def test_decoding_with_a_cache_is_the_full_forward(case):
    new = replaced(model(case), solver=TIGHT)
    full = new(IDS)
    _, cache = new(IDS[:, :3], return_intermediates=True)
    found = []
    # One token, then three at once, as speculative decoding does.
    for end, age in ((4, 1), (7, 3)):
        logits, cache = new(IDS[:, :end], cache=cache, cache_age=age, return_intermediates=True)
        found.append(logits[:, -age:])
    torch.testing.assert_close(torch.cat(found, dim=1), full[:, 3:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("case", DECODERS[:3])
def test_generation_is_that_of_the_model_and_needs_no_cache(case):
    original = model(case, use_abs_pos_emb=False)
    call = {"seq_len": 5, "temperature": 0.0, "prompt_lens": torch.tensor([N, N - 3])}
    theirs = AutoregressiveWrapper(original).generate(IDS, **call)
    assert torch.equal(AutoregressiveWrapper(replaced(original, max_steps=0)).generate(IDS, **call), theirs)
    new = AutoregressiveWrapper(replaced(original, solver=TIGHT))
    with_cache = new.generate(IDS, **call)
    assert torch.equal(with_cache, new.generate(IDS, **call, cache_kv=False))
    assert with_cache.unique().numel() > 1


# Masks.


@torch.no_grad()
@pytest.mark.parametrize("case", ["rotary, grouped", "encoder", "sink", "distances", "capped"])
def test_a_masked_token_changes_nothing(case):
    new = replaced(model(case))
    changed = torch.where(PADDED, IDS, (IDS + 1) % TOKENS)
    before, after = (new(ids, mask=PADDED)[PADDED] for ids in (IDS, changed))
    assert torch.equal(before, after)
    assert not torch.equal(new(IDS)[PADDED], new(changed)[PADDED]) or case != "encoder"


@torch.no_grad()
def test_causality_hides_the_future_and_a_call_may_override_it():
    new = replaced(model("rotary, grouped"))
    changed = IDS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % TOKENS
    before, after = new(IDS), new(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])
    module = EquilibriumAttend(HEADS, causal=True, anchor=0.5)
    q, k, v = random(3, B, HEADS, N, 8).unbind()
    torch.testing.assert_close(module(q, k, v, causal=False)[0], EquilibriumAttend(HEADS, anchor=0.5)(q, k, v)[0])


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, random(HEADS, N, N, seed=5)])
def test_a_query_without_keys_gives_zeros_as_their_flash_attention_does(bias):
    theirs = Attend(heads=HEADS, causal=True, flash=True)
    q, k, v = random(B, HEADS, N, 8), random(B, 2, N, 8, seed=1), random(B, 2, N, 8, seed=2)
    left_padded = torch.arange(N) >= torch.tensor([[0], [3]])
    for mask in (left_padded, torch.tensor([[True], [False]]).expand(B, N)):
        expected = theirs(q, k, v, mask=mask[:, None, None], attn_bias=bias)[0]
        for max_steps in (0, None):
            module = EquilibriumAttend(HEADS, causal=True, max_steps=max_steps)
            found = module(q, k, v, mask=mask, attn_bias=bias)[0]
            assert torch.equal(found == 0, expected == 0)
            assert bool((found[1, :, :3] == 0).all())
        torch.testing.assert_close(
            EquilibriumAttend(HEADS, causal=True, max_steps=0)(q, k, v, mask=mask, attn_bias=bias)[0], expected
        )


# Tiled heads.


@torch.no_grad()
def test_heads_are_tiled_and_not_repeated():
    q, k, v = random(B, HEADS, N, 8), random(B, 2, N, 8, seed=1), random(B, 2, N, 8, seed=2)
    module = EquilibriumAttend(HEADS, causal=True, solver=TIGHT, dtype=torch.float64)
    module.anchor.logit.copy_(random(HEADS, seed=3))
    slopes = -random(HEADS, 1, 1, seed=4).exp() * torch.arange(N).sub(torch.arange(N)[:, None]).abs()
    tiled = module(q, k, v, attn_bias=slopes)[0]
    evidence = module.last_solve
    same = module(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1), attn_bias=slopes)[0]
    torch.testing.assert_close(tiled, same, rtol=1e-9, atol=1e-9)
    assert torch.equal(evidence.num_evals, module.last_solve.num_evals)
    assert evidence.num_evals.float().std() > 0
    other = module(q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), attn_bias=slopes)[0]
    assert float((tiled - other).abs().max()) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("extra", [{"add_zero_kv": True}, {"head_learned_sink": True}])
def test_what_is_the_same_for_all_keys_does_not_hide_the_added_one(extra):
    q, k, v = random(B, HEADS, N, 8), random(B, 2, N, 8, seed=1), random(B, 2, N, 8, seed=2)
    module = EquilibriumAttend(HEADS, anchor=0.5, dtype=torch.float64, **extra)
    exists, bias = torch.tensor([True, False])[:, None, None, None], torch.full((1, 1), 0.7, dtype=torch.float64)
    found = module(q, k, v, mask=exists, attn_bias=bias)[0]
    every = {"mask": exists.expand(B, 1, 1, N), "attn_bias": bias.expand(1, N)}
    assert torch.equal(found, module(q, k, v, **every)[0])
    assert bool((found[1] == 0).all())
    assert float((found - module(q, k, v, mask=exists)[0]).abs().max()) > 1e-3


def test_keys_of_groups_are_not_copied(monkeypatch):
    seen, solve = [], xtransformers.attend

    def spy(query, keys, values, **options):
        seen.extend([keys, values])
        return solve(query, keys, values, **options)

    monkeypatch.setattr(xtransformers, "attend", spy)
    q, k, v = random(B, HEADS, N, 8), random(B, 2, N, 8, seed=1), random(B, 2, N, 8, seed=2)
    EquilibriumAttend(HEADS)(q, k, v)
    for given, held in zip((k, v), seen, strict=True):
        assert (held.data_ptr(), held.numel()) == (given.data_ptr(), given.numel())


# Gradients and training.


@pytest.mark.parametrize("case", ["rotary, grouped", "qk_norm, learned", "sink", "distances", "capped"])
def test_gradients_reach_every_projection_and_anchor(case):
    new = replaced(model(case)).train()
    new(IDS, mask=PADDED)[PADDED].square().sum().backward()
    reached = {name: p.grad for name, p in new.named_parameters() if any(
        part in name for part in ("to_q", "to_k", "to_v", "anchor", "sink", "qk_norm"))}  # fmt: skip
    assert len(reached) >= 8
    for name, gradient in reached.items():
        assert gradient is not None, name
        assert bool(gradient.isfinite().all()), name
        assert float(gradient.abs().max()) > 1e-8, name
    found = [m.last_solve for m in new.modules() if isinstance(m, EquilibriumAttend)]
    assert len(found) == SIZES["depth"]
    for evidence in found:
        assert evidence.status.shape == evidence.adjoint.status.shape == (B, HEADS, N)
        assert not bool(evidence.failed.any() or evidence.adjoint.failed.any())


@pytest.mark.parametrize("options", [{}, {"l2_distance": True}, {"add_zero_kv": True, "head_learned_sink": True},
                                     {"softclamp_logits": True, "logit_softclamp_value": 1.5}])  # fmt: skip
def test_gradients_are_the_derivatives(options):
    module = EquilibriumAttend(6, causal=True, solver=TIGHT, dtype=torch.float64, **options)
    parameters = dict(module.named_parameters())
    inputs = [random(1, 6, 2, 3), random(1, 2, 3, 3, seed=1), random(1, 2, 3, 2, seed=2)]
    inputs += [] if "softclamp_logits" in options else [random(6, 2, 3, seed=3)]
    inputs += [random(*p.shape, seed=4) for p in parameters.values()]
    inputs = [t.requires_grad_() for t in inputs]
    mask = torch.tensor([[True, False, True]])

    def output(q, k, v, *rest):
        bias, numbers = (None, rest) if "softclamp_logits" in options else (rest[0], rest[1:])
        given = dict(zip(parameters, numbers, strict=True))
        return torch.func.functional_call(module, given, (q, k, v), {"mask": mask, "attn_bias": bias})[0]

    assert torch.autograd.gradcheck(output, inputs, atol=1e-7, fast_mode=True)


def test_dropout_is_for_training():
    original = model((Decoder, {"attn_dropout": 0.5, "rotary_pos_emb": True}))
    new = replaced(original)
    assert torch.equal(new(IDS), new(IDS))
    new.train()
    assert not torch.equal(new(IDS), new(IDS))
    assert {m.dropout for m in new.modules() if isinstance(m, EquilibriumAttend)} == {0.5}
    assert all(m.training for m in replace_attend(new).values())


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"l2_distance": True}, {"add_zero_kv": True, "head_learned_sink": True},
                                     {"softclamp_logits": True, "logit_softclamp_value": 1.5}])  # fmt: skip
def test_half_precision_is_solved_in_single(options):
    q, k, v = (random(B, h, N, 8, seed=i).bfloat16() for i, h in enumerate((HEADS, 2, 2)))
    slopes = -random(HEADS, 1, 1, seed=4).exp() * torch.arange(N).sub(torch.arange(N)[:, None]).abs()
    slopes = None if "softclamp_logits" in options else slopes.bfloat16()
    for max_steps in (None, 0):
        half, exact = (
            EquilibriumAttend(HEADS, causal=True, anchor=0.4, max_steps=max_steps, dtype=dtype, **options)
            for dtype in (torch.bfloat16, torch.float64)
        )
        found = half(q, k, v, attn_bias=slopes)[0]
        expected = exact(q.double(), k.double(), v.double(), attn_bias=slopes)[0]
        assert found.dtype == torch.bfloat16
        # One rounding of the solved output; torch's own attention rounds its weights as well.
        torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.02 if max_steps == 0 else 0.005)


@torch.no_grad()
@pytest.mark.parametrize("case", ["rotary, grouped", "alibi, grouped, flash", "qk_norm", "sink"])
def test_no_steps_are_the_model_in_half_precision(case):
    original = model(case, torch.bfloat16, sharp=1.0)
    torch.testing.assert_close(replaced(original, max_steps=0)(IDS), original(IDS), rtol=0.05, atol=0.05)


def test_compiled_evidence_is_in_order_of_heads():
    q, k, v = random(B, HEADS, N, 8), random(B, 2, N, 8, seed=1), random(B, 2, N, 8, seed=2)
    module = EquilibriumAttend(HEADS, causal=True, anchor=0.2)
    eager, evidence = module(q, k, v)[0], module.last_solve
    compiled = torch.compile(module, backend="eager")(q, k, v)[0]
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert torch.equal(module.last_solve.status, evidence.status)
    assert module.last_solve.num_evals.shape == (B, HEADS, N)


# What is replaced, and what is refused.


def test_parameters_stay_and_options_arrive():
    original = model("sink")
    new = copy.deepcopy(original)
    found = replace_attend(new, solver=Picard(rtol=1e-3), on_failure="raise")
    assert list(found) == ["attn_layers.layers.0.1.attend", "attn_layers.layers.2.1.attend"]
    module = found["attn_layers.layers.0.1.attend"]
    assert module.options.solver == Picard(rtol=1e-3)
    assert module.options.on_failure == "raise"
    missing = new.load_state_dict(original.state_dict(), strict=False)
    assert missing.missing_keys == [f"{name}.anchor.logit" for name in found]
    assert not missing.unexpected_keys
    again = replace_attend(new, anchor=0.25, max_steps=2)
    assert [*again] == [*found]
    assert all(m.anchor() == 0.25 and m.options.max_steps == 2 for m in again.values())
    assert again["attn_layers.layers.0.1.attend"].head_attn_sink is module.head_attn_sink
    assert not new.load_state_dict(original.state_dict()).missing_keys
    alone = Attention(DIM, heads=HEADS)
    assert [*replace_attend(alone)] == ["attend"]


@torch.no_grad()
def test_a_fixed_budget_is_used_as_asked():
    new = replaced(model("rotary, grouped"), anchor=0.3, solver=Picard(rtol=0.0, atol=0.0, max_steps=2))
    new(IDS)
    for module in new.modules():
        if isinstance(module, EquilibriumAttend):
            assert bool((module.last_solve.status == Status.BUDGET).all())


REFUSED = {
    "pre_talking_heads": {"attn_pre_talking_heads": True},
    "post_talking_heads": {"attn_post_talking_heads": True},
    "pre_scale_post_talking_heads": {"attn_pre_scale_post_talking_heads": True},
    "sparse_topk_attn": {"attn_sparse_topk": 2},
    "one_hot": {"attn_hard": True},
    "sigmoid": {"attn_sigmoid": True},
    "gumbel_softmax": {"attn_gumbel_softmax": True},
    "relu_squared": {"attn_custom_attn_fn": lambda scores: scores.relu().square()},
    "selective": {"attn_selective": True},
    "cog_signed": {"attn_cog_signed": True},
    "cope": {"attn_use_cope": True},
    "residual_attn": {"residual_attn": True},
    "softclamp_logits": {"attn_softclamp_logits": True, "attn_l2_distance": True},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_has_no_equilibrium_is_refused_and_nothing_replaced(setting):
    made = Decoder(**SIZES, **REFUSED[setting])
    wanted = {
        "one_hot": "one_hot_straight_through",
        "relu_squared": "<lambda>",
        "pre_talking_heads": "pre_softmax_talking_heads",
        "post_talking_heads": "post_softmax_talking_heads",
    }
    # One attention that could be replaced comes first.
    both = nn.ModuleList([Encoder(**SIZES), made])
    with pytest.raises(ValueError, match=wanted.get(setting, setting)):
        replace_attend(both)
    assert not any(isinstance(m, EquilibriumAttend) for m in both.modules())


def test_other_refusals_name_their_reason():
    cross = {"dim": DIM, "depth": 1, "heads": HEADS}
    with pytest.raises(ValueError, match="inverted_attention"):
        replace_attend(CrossAttender(**cross, cross_attn_inverted_attention=True))
    with pytest.raises(ValueError, match="cross_residual_attn"):
        replace_attend(CrossAttender(**cross, cross_residual_attn=True))
    with pytest.raises(ValueError, match="`model` must hold an Attention of x-transformers, got Linear"):
        replace_attend(nn.Linear(2, 2))

    class Other(Attend):
        pass

    made = Attention(DIM)
    made.attend = Other()
    with pytest.raises(ValueError, match="own Attend, got Other"):
        replace_attend(made)
    with pytest.raises(ValueError, match=r"impl.*'auto', 'reference', 'sdpa', 'triton'"):
        replace_attend(Attention(DIM), impl="fast")
    with pytest.raises(ValueError, match="'learned' or a number"):
        replace_attend(Attention(DIM), anchor="free")


def test_a_setting_of_a_later_release_is_refused(monkeypatch):
    class Later(Attend):
        def __init__(self, *, tilted=False, **settings):
            super().__init__(**settings)
            self.tilted = tilted

    made = Attention(DIM)
    monkeypatch.setattr(xtransformers, "Attend", Later)
    made.attend = Later(heads=8, scale=0.1)
    assert replace_attend(made)
    made.attend = Later(heads=8, scale=0.1, tilted=True)
    with pytest.raises(ValueError, match="tilted=False, which is not known here, got tilted=True"):
        replace_attend(made)


ARGUMENTS = {
    "prev_attn": {"prev_attn": torch.zeros(B, HEADS, N, N)},
    "attn_delta": {"attn_delta": torch.zeros(B, HEADS, N, N)},
    "flash_pack_seq_kwargs": {"flash_pack_seq_kwargs": {"max_seqlen_q": 3}},
    r"`mask` must be \(B, M\)": {"mask": PADDED[:, 1:]},
    "`mask` must broadcast": {"mask": torch.ones(3, 1, 1, N, dtype=torch.bool)},
    "`attn_bias` must broadcast": {"attn_bias": torch.zeros(HEADS, N, N + 1)},
    "`q` must have 6 heads": {"q": torch.zeros(B, 3, N, 8)},
    "divides the 6 of `q`": {"k": torch.zeros(B, 4, N, 8)},
    "`v` must have": {"v": torch.zeros(B, 2, N, 8)},
    "`k` must have the axes": {"k": torch.zeros(B, N, 8)},
    "own keys if causal": {"k": torch.zeros(B, HEADS, 2, 8), "v": torch.zeros(B, HEADS, 2, 8), "causal": True},
}


@pytest.mark.parametrize("wanted", ARGUMENTS)
def test_arguments_that_would_change_the_result_are_refused(wanted):
    given = {name: torch.zeros(B, HEADS, N, 8) for name in "qkv"} | ARGUMENTS[wanted]
    with pytest.raises(ValueError, match=wanted):
        EquilibriumAttend(HEADS)(**given)


def test_wrong_kinds_are_refused():
    q = torch.zeros(B, HEADS, N, 8)
    with pytest.raises(TypeError, match=r"`mask` must be a boolean tensor \(True = attend\), got torch.float32"):
        EquilibriumAttend(HEADS)(q, q, q, mask=torch.ones(B, N))
    with pytest.raises(ValueError, match="`attn_bias` must be None with softclamp_logits=True"):
        EquilibriumAttend(HEADS, softclamp_logits=True)(q, q, q, attn_bias=torch.zeros(N, N))
    with pytest.raises(UnsupportedImplementation, match="LogSumExp only"):
        EquilibriumAttend(HEADS, softclamp_logits=True, impl="reference")(q, q, q)
    for options in ({"scale": 0.0}, {"dropout": 2.0}, {"anchor": 1.5}, {"logit_softclamp_value": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            EquilibriumAttend(HEADS, **options)


def test_without_x_transformers_the_error_says_what_to_install(monkeypatch):
    for name in ("x_transformers", "x_transformers.attend", "x_transformers.x_transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, xtransformers.__name__)
    with pytest.raises(ImportError, match=r'pip install "implicit_attention\[x-transformers\]"'):
        importlib.import_module(xtransformers.__name__)

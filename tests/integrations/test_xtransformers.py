"""Equilibrium attention inside models of x-transformers: what they compute, with and without a cache and masks."""

import pytest
import torch
from x_transformers import AutoregressiveWrapper, CrossAttender, Encoder, ViTransformerWrapper, XTransformer
from x_transformers.attend import Attend
from xtransformers_cases import (
    CASES,
    DIM,
    HEADS,
    IDS,
    PADDED,
    TIGHT,
    TOKENS,
    B,
    N,
    anchors,
    model,
    replaced,
    settled,
    with_reference,
)

from implicit_attention import Picard
from implicit_attention.integrations.xtransformers import EquilibriumAttend, replace_attend
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import Allocations


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


SINGLE = [(case, torch.float32, 1e-6) for case in (*CASES, (Encoder, {"dynamic_pos_bias": True, "attn_kv_heads": 2}))]
HALF = [(case, torch.bfloat16, 0.05) for case in ("rotary, grouped", "alibi, grouped, flash", "qk_norm", "sink")]


@torch.no_grad()
@pytest.mark.parametrize(("case", "dtype", "bound"), SINGLE + HALF)
def test_no_steps_are_the_model_in_other_precisions(case, dtype, bound):
    original = model(case, dtype, sharp=1.0)
    # Beside a mask their own layers mix float32 and bfloat16.
    for mask in (None, PADDED) if dtype == torch.float32 else (None,):
        ours, theirs = replaced(original, max_steps=0)(IDS, mask=mask), original(IDS, mask=mask)
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


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


@torch.no_grad()
def test_keys_of_groups_are_not_copied():
    count = 4096
    q, k, v = (random(1, heads, n, 8, dtype=torch.float32) for heads, n in ((HEADS, 1), (2, count), (2, count)))
    module = EquilibriumAttend(HEADS, solver=Picard(rtol=0.0, atol=0.0, max_steps=2))
    with Allocations() as seen:
        module(q, k, v)
    # The scores of all heads are the largest; keys of all heads would be eight times as large.
    assert seen.largest < k.numel()

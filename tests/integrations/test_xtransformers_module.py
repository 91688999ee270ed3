"""EquilibriumAttend as a module of x-transformers: training, precisions, what is replaced and what is refused."""

import copy

import pytest
import torch
from torch import nn
from x_transformers import CrossAttender, Decoder, Encoder
from x_transformers.attend import Attend
from x_transformers.x_transformers import Attention
from xtransformers_cases import DIM, HEADS, IDS, PADDED, SIZES, TIGHT, B, N, model, replaced

from implicit_attention import Picard
from implicit_attention.integrations.xtransformers import EquilibriumAttend, replace_attend
from implicit_attention.testing.numerics import random

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
    module.anchor.set(0.7)
    new.load_state_dict(original.state_dict())
    torch.testing.assert_close(module.anchor(), torch.full_like(module.anchor(), 0.7))
    again = replace_attend(new, anchor=0.25, max_steps=2)
    assert [*again] == [*found]
    assert all(m.anchor() == 0.25 and m.options.max_steps == 2 for m in again.values())
    assert again["attn_layers.layers.0.1.attend"].head_attn_sink is module.head_attn_sink
    assert not new.load_state_dict(original.state_dict()).missing_keys
    alone = Attention(DIM, heads=HEADS)
    assert [*replace_attend(alone)] == ["attend"]


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

    class Other(Attend):
        pass

    made = Attention(DIM)
    made.attend = Other()
    with pytest.raises(ValueError, match="own Attend, got Other"):
        replace_attend(made)
    with pytest.raises(ValueError, match=r"impl.*'auto', 'reference', 'native', 'triton'"):
        replace_attend(Attention(DIM), impl="fast")
    with pytest.raises(ValueError, match="'learned' or a number"):
        replace_attend(Attention(DIM), anchor="free")


def test_a_setting_of_a_later_release_is_refused(monkeypatch):
    made = [Attention(DIM), Attention(DIM)]

    def later(self, *, tilted=False, **settings):
        """The constructor of a release with one more setting."""

    monkeypatch.setattr(Attend, "__init__", later)
    for attention, tilted in zip(made, (False, True), strict=True):
        attention.attend.tilted = tilted
    assert replace_attend(made[0])
    with pytest.raises(ValueError, match="tilted=False, which is not known here, got tilted=True"):
        replace_attend(made[1])

"""The attention that vision transformers of timm take, without timm."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from implicit_attention import Anderson
from implicit_attention.integrations.timm import EquilibriumAttention
from implicit_attention.testing.numerics import equilibrium_reference, random

B, N, DIM, HEADS = 2, 6, 12, 3
TIGHT = Anderson(rtol=1e-12, atol=1e-14)
OPTIONS = {
    "plain": {},
    "biases": {"qkv_bias": True, "proj_bias": False},
    "norms": {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm},
    "sizes": {"attn_head_dim": 5, "dim_out": 7, "gated": True, "qkv_bias": True},
}
SOME = random(B, HEADS, N, N, seed=5) > -0.5
SOME[..., 0] = True
EXISTS = (torch.arange(N) < torch.tensor([[N], [4]]))[:, None, None]
LOWER = torch.ones(N, N).tril().bool()
# What is passed, and the mask that it means.
MASKS = {
    "none": ({}, None),
    "boolean": ({"attn_mask": SOME}, SOME),
    "additive": ({"attn_mask": random(N, N, seed=6)}, random(N, N, seed=6)),
    "causal": ({"is_causal": True}, LOWER),
    "causal and padding": ({"is_causal": True, "attn_mask": EXISTS}, LOWER & EXISTS),
}


def layer(case="plain", **options):
    torch.manual_seed(0)
    made = EquilibriumAttention(DIM, HEADS, **OPTIONS[case], dtype=torch.float64, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.6)
    return made.eval()


def written_out(made, x, mask, *, explicit):
    """timm's operations in their order, one by one."""
    q, k, v = made.qkv(x).reshape(B, N, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind()
    q, k = made.q_norm(q), made.k_norm(k)
    scale = q.shape[-1] ** -0.5
    if explicit:
        out = F.scaled_dot_product_attention(q, k, v, mask)
    else:
        out = equilibrium_reference(q, k, v, mask, beta=scale, anchor=made.anchor().detach())
    out = made.norm(out.transpose(1, 2).flatten(2))
    return made.proj(out if made.gate is None else out * made.gate(x).sigmoid())


@torch.no_grad()
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", OPTIONS)
def test_no_steps_are_timms_attention_and_steps_the_reference_solve(case, mask):
    call, means = MASKS[mask]
    x, made = random(B, N, DIM), layer(case, solver=TIGHT)
    found = made(x, **call)
    torch.testing.assert_close(found, written_out(made, x, means, explicit=False), rtol=1e-9, atol=1e-9)
    assert made.last_solve.status.shape == (B, HEADS, N)
    assert bool(made.last_solve.converged.all())
    explicit = layer(case, max_steps=0)(x, **call)
    torch.testing.assert_close(explicit, written_out(made, x, means, explicit=True), rtol=1e-12, atol=1e-12)
    assert float((found - explicit).abs().max()) > 1e-3


def test_state_dict_and_signature_are_timms():
    made = layer("sizes", anchor=0.5)
    assert [*made.state_dict()] == ["qkv.weight", "qkv.bias", "gate.weight", "gate.bias", "proj.weight", "proj.bias"]
    assert [*layer("norms").state_dict()] == ["qkv.weight", "q_norm.weight", "q_norm.bias", "k_norm.weight",
        "k_norm.bias", "norm.weight", "norm.bias", "proj.weight", "proj.bias", "anchor.logit"]  # fmt: skip
    ours = inspect.signature(EquilibriumAttention).parameters.values()
    theirs = ["dim", "num_heads", "attn_head_dim", "dim_out", "qkv_bias", "qk_norm", "scale_norm", "proj_bias", "gated",
              "attn_drop", "proj_drop", "norm_layer", "device", "dtype"]  # fmt: skip
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == theirs


#: Names and shapes of `timm.create_model("vit_tiny_patch16_224", depth=1).state_dict()`, timm 1.0.31.
SHAPES = json.loads((Path(__file__).parent / "timm_vit_tiny.json").read_text())
WHERE = "blocks.0.attn"


def vision_transformer():
    """That model's parameters, and the attention that `create_model(..., attn_layer=EquilibriumAttention)` makes."""
    model = nn.Module()
    for name, shape in SHAPES.items():
        *path, last, part = *name.split("."), model
        for step in path:
            part.add_module(step, getattr(part, step, nn.Module()))
            part = getattr(part, step)
        part.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    model.set_submodule(WHERE, EquilibriumAttention(192, num_heads=3, qkv_bias=True))
    return model


def weights():
    return {name: random(*shape, seed=i).float() for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_timm_loads_strictly_and_leaves_the_anchor(assign):
    model, state = vision_transformer(), weights()
    model.get_submodule(WHERE).anchor.set(0.7)
    model.load_state_dict(state, assign=assign)
    assert list(state) == list(SHAPES)
    own = model.state_dict()
    torch.testing.assert_close(own.pop(f"{WHERE}.anchor.logit").sigmoid(), torch.full((3,), 0.7), rtol=0, atol=1e-3)
    assert own.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in own.items())
    alone = EquilibriumAttention(192, num_heads=3, qkv_bias=True)
    alone.load_state_dict({name[len(WHERE) + 1 :]: t for name, t in state.items() if name.startswith(WHERE)})
    assert torch.equal(alone.qkv.weight, state[f"{WHERE}.qkv.weight"])


@pytest.mark.parametrize("way", ["assign", "to_empty"])
def test_a_state_dict_of_timm_fills_a_model_that_was_made_on_no_device(way):
    with torch.device("meta"):
        model = vision_transformer()
    if way == "to_empty":
        # Deterministic algorithms fill what `to_empty` leaves as it is with NaN.
        torch.use_deterministic_algorithms(True)
        model.to_empty(device="cpu")
        torch.use_deterministic_algorithms(False)
    model.load_state_dict(weights(), assign=way == "assign")
    anchor = model.get_submodule(WHERE).anchor
    assert torch.equal(anchor(), torch.full((3,), 0.5))
    assert anchor.logit.requires_grad


def test_other_keys_that_are_missing_or_unexpected_are_refused():
    state = weights()
    for change, words in (
        ({f"{WHERE}.qkv.bias": None}, f'Missing key(s) in state_dict: "{WHERE}.qkv.bias". '),
        ({f"{WHERE}.rope": torch.zeros(3)}, f'Unexpected key(s) in state_dict: "{WHERE}.rope". '),
        ({f"{WHERE}.anchor.other": torch.zeros(3)}, f'Unexpected key(s) in state_dict: "{WHERE}.anchor.other". '),
    ):
        changed = {name: t for name, t in {**state, **change}.items() if t is not None}
        with pytest.raises(RuntimeError, match=re.escape(words)):
            vision_transformer().load_state_dict(changed)


def test_dropout_is_for_training():
    made, x = layer("biases", attn_drop=0.4, solver=TIGHT), random(B, N, DIM)
    assert torch.equal(made(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))

"""ImplicitMultiheadAttention: torch's module where nothing is solved, an independent solve where something is."""

import math

import pytest
import torch
from multihead_cases import CASES, DIM, HEADS, PADDING, TIGHT, B, M, N, cast, module, reference, some, theirs, tokens
from torch import nn

from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.testing.numerics import random

# Without a solve it is torch's.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_no_steps_are_torchs_module(case, dtype):
    options, call, kind = CASES[case]
    made = module(beta=None, max_steps=0, dtype=dtype, **options)
    expected, call = theirs(made), cast(call, dtype)
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
    # Weights and outputs by both ways that torch computes them.
    for need in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        found = []
        for it in (made, expected):
            it.zero_grad()
            given = tokens(it, dtype=dtype, **kind)
            leaves = [t.requires_grad_() for t in dict.fromkeys(given)]
            output, weights = it(*given, **call, **need)
            output.sin().sum().backward()
            gradients = {name: p.grad for name, p in it.named_parameters() if not name.startswith("anchor")}
            found.append((output.detach(), weights, gradients, [t.grad for t in leaves]))
        (output, weights, by_parameter, by_token), (output_, weights_, by_parameter_, by_token_) = found
        assert output.dtype == dtype
        torch.testing.assert_close(output, output_, **tolerance)
        torch.testing.assert_close(weights, weights_, **tolerance)
        scale = 10 if dtype == torch.float32 else 1
        for ours, others in ((by_parameter, by_parameter_), (by_token, by_token_)):
            torch.testing.assert_close(ours, others, rtol=0, atol=scale * tolerance["atol"])


def test_a_boolean_mask_and_an_additive_one_are_both_obeyed():
    made = module(solver=TIGHT)
    given = tokens(made)
    for attn_mask, padding in ((some(N, M), random(B, M, seed=3)), (random(N, M, seed=3), PADDING)):
        both = made(*given, padding, attn_mask=attn_mask)[0]
        additive = [
            torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, -math.inf) if m.dtype == torch.bool else m
            for m in (padding, attn_mask)
        ]
        torch.testing.assert_close(both, made(*given, additive[0], attn_mask=additive[1])[0], rtol=1e-10, atol=1e-12)
        expected = reference(made, *given, padding, attn_mask)[0]
        torch.testing.assert_close(both, expected, rtol=1e-9, atol=1e-11)


def test_the_hint_of_causality_changes_nothing_and_needs_its_mask():
    made = module()
    given = tokens(made, self=True)
    anything = some(N, N)
    for need in (True, False):
        hinted, plain = (made(*given, None, need, anything, is_causal=hint)[0] for hint in (True, False))
        assert torch.equal(hinted, plain)
    with pytest.raises(ValueError, match="`attn_mask` must be given with is_causal=True"):
        made(*given, is_causal=True)


def test_initialisation_is_torchs_from_the_same_random_numbers():
    for options in ({}, {"kdim": 6, "vdim": 4, "add_bias_kv": True}):
        states, after = [], []
        for kind in (ImplicitMultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(4)
            states.append(kind(DIM, HEADS, **options).state_dict())
            after.append(torch.rand(()))
        assert all(torch.equal(value, states[0][name]) for name, value in states[1].items())
        assert torch.equal(*after)


# With a solve it is an independent one.


@pytest.mark.parametrize("case", CASES)
def test_output_and_weights_are_those_of_a_reference_solve(case):
    options, call, kind = CASES[case]
    made = module(solver=TIGHT, **options)
    given = tokens(made, **kind)
    output, weights = made(*given, **call, average_attn_weights=False)
    expected, expected_weights = reference(made, *given, **call)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-9, atol=1e-11)
    assert torch.equal(made(*given, **call)[1], weights.mean(-3))
    assert torch.equal(made(*given, **call, need_weights=False)[0], output)
    assert made(*given, **call, need_weights=False)[1] is None
    explicit = reference(made, *given, **call, explicit=True)[0]
    assert float((explicit - output).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("case", ["self", "widths", "both keys", "additive mask and padding", "unbatched"])
def test_gradients_are_the_derivatives(case):
    options, call, kind = CASES[case]
    made = module(solver=TIGHT, width=4, heads=2, **{**options, **({"kdim": 3} if "kdim" in options else {})})
    given = tokens(made, rows=2, keys=3, **kind)
    call = {k: random(*((2, 3) if k == "attn_mask" else (B, 3)), seed=3) for k in call if "both" not in case}
    leaves = list(dict.fromkeys(given))
    names = [name for name, _ in made.named_parameters()]

    def both(*tensors):
        new = dict(zip(names, tensors[len(leaves) :], strict=True))
        tokens = tensors[:1] * 3 if len(leaves) == 1 else tensors[:3]
        return torch.func.functional_call(made, new, tokens, call)

    inputs = [t.detach().requires_grad_() for t in (*leaves, *made.parameters())]
    # Entry by entry once, along random directions of all tensors elsewhere.
    assert torch.autograd.gradcheck(both, inputs, rtol=1e-5, atol=1e-7, fast_mode=case != "self")


# What one token or sample does to another.


@pytest.mark.parametrize("max_steps", [0, None])
@pytest.mark.parametrize("boolean", [True, False])
def test_fully_padded_queries_give_zeros_before_the_output_projection(max_steps, boolean):
    made = module(max_steps=max_steps, batch_first=True)
    padding = torch.tensor([[True] * M, [False] * M])
    padding = padding if boolean else torch.zeros(B, M, dtype=torch.float64).masked_fill(padding, -math.inf)
    query, key, value = (t.requires_grad_() for t in tokens(made))
    output, weights = made(query, key, value, padding)
    assert torch.equal(output[0], made.out_proj.bias.expand(N, DIM))
    assert torch.equal(weights[0], torch.zeros(N, M, dtype=torch.float64))
    assert bool(theirs(made)(query, key, value, padding)[0][0].isnan().all())
    output.square().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (query, key, value, *made.parameters()))
    assert float(key.grad[0].abs().max()) == 0 < float(key.grad[1].abs().max())
    if max_steps is None:
        assert not bool(made.last_solve.failed.any())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("count", [M, 64])
@pytest.mark.parametrize("other", [1e3, math.nan, math.inf])
def test_padded_tokens_change_nothing(count, other, need_weights):
    made = module(on_failure="raise")
    query, key, value = (t.requires_grad_() for t in tokens(made, keys=count))
    padding = torch.arange(count) >= torch.tensor([[count - 3], [count]])
    found = []
    for fill in (0.0, other):
        spoiled = [t.detach().clone() for t in (query, key, value)]
        for t in spoiled[1:]:
            t[-3:, 0] = fill
        spoiled = [t.requires_grad_() for t in spoiled]
        output, weights = made(*spoiled, padding, need_weights)
        # Not to the parameters, to whose gradients a projected NaN adds 0 * NaN in torch as well.
        found.append((output.detach(), weights, *torch.autograd.grad(output.square().sum(), spoiled)))
    for ours, others in zip(*found, strict=True):
        assert ours is others is None or torch.equal(ours, others)


@pytest.mark.parametrize("max_steps", [0, None])
def test_a_nan_stays_in_its_query_and_in_its_sample(max_steps):
    made = module(on_failure="ignore", max_steps=max_steps, batch_first=True)
    given = tokens(made)
    clean = made(*given)[0]
    query, key = given[0].clone(), given[1].clone()
    query[0, 1], key[1, 2] = math.nan, math.nan
    output = made(query, key, given[2])[0]
    spoiled = torch.zeros(B, N, dtype=torch.bool)
    spoiled[0, 1] = spoiled[1] = True
    assert torch.equal(output.isnan().all(-1), spoiled)
    assert torch.equal(output[~spoiled], clean[~spoiled])

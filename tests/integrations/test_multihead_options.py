"""What the options of ImplicitMultiheadAttention change, and the arguments that it refuses."""

import inspect
import warnings

import pytest
import torch
from multihead_cases import DIM, HEADS, PADDING, B, M, N, module, some, tokens
from torch import nn

from implicit_attention import (
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    OneStep,
    Picard,
    Status,
    UnsupportedImplementation,
)
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention

# Options.


def outcome(made):
    made.eval()
    output, weights = made(*tokens(made))
    return output.detach(), weights.detach()


CHANGES = {
    "anchor": {"anchor": 0.9},
    "beta": {"beta": 2.0},
    "solver": {"solver": Picard(max_steps=1)},
    "max_steps": {"max_steps": 0},
    "bias": {"bias": False},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "kdim": {"kdim": 6},
    "vdim": {"vdim": 6},
    "num_heads": {"heads": 4},
    "embed_dim": {"width": 6},
    "batch_first": {"batch_first": True},
}


@pytest.mark.parametrize("function", ["__init__", "forward"])
def test_torchs_arguments_come_first_with_their_defaults(function):
    ours, theirs = (
        [(name, p.default) for name, p in inspect.signature(getattr(kind, function)).parameters.items()]
        for kind in (ImplicitMultiheadAttention, nn.MultiheadAttention)
    )
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("option", CHANGES)
def test_every_option_changes_the_outcome(option):
    usual = outcome(module(on_failure="ignore"))
    other = outcome(module(on_failure="ignore", **CHANGES[option]))
    same = usual[0].shape == other[0].shape and torch.allclose(usual[0], other[0], atol=1e-4)
    assert not same


def test_options_that_show_elsewhere():
    given = tokens(module())
    gradients = []
    for adjoint in (None, OneStep()):
        made = module(adjoint=adjoint)
        made(*given)[0].square().sum().backward()
        gradients.append(made.in_proj_weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-3)
    with pytest.raises(UnsupportedImplementation, match="use a CUDA device"):
        module(impl="triton")(*given)
    with pytest.raises(ConvergenceError):
        module(max_steps=1, on_failure="raise")(*given)
    with pytest.warns(ConvergenceWarning):
        module(max_steps=1)(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = module(max_steps=1, on_failure="ignore")
        made(*given)
    assert bool((made.last_solve.status == Status.MAX_STEPS).any())
    assert module(dtype=torch.float32).anchor.logit.dtype == torch.float32
    assert all(p.device.type == "meta" for p in module(device="meta").parameters())


def test_beta_may_be_learned_given_or_torchs():
    usual = (DIM // HEADS) ** -0.5
    assert module(beta=None).beta() == usual
    assert module(beta=0.7).beta() == 0.7
    assert torch.equal(ImplicitMultiheadAttention(DIM, HEADS).beta(), torch.full((HEADS,), usual))
    assert torch.allclose(ImplicitMultiheadAttention(DIM, HEADS).anchor(), torch.full((HEADS,), 0.5))


def test_replaced_options_count_from_the_next_call_on():
    made = module()
    first = outcome(made)[0]
    made.options = made.options.override(max_steps=0)
    second = outcome(made)[0]
    made.options = made.options.override(solver=Anderson())
    assert not torch.allclose(first, second, atol=1e-3)
    assert torch.equal(outcome(made)[0], first)


def test_dropout_drops_while_training_and_not_from_the_weights():
    made = module(dropout=0.5)
    given = tokens(made)
    made.eval()
    output, weights = made(*given)
    assert torch.equal(made(*given)[0], output)
    made.train()
    torch.manual_seed(0)
    dropped, same = made(*given)
    assert not torch.allclose(dropped, output)
    assert torch.equal(same, weights)
    with torch.no_grad():
        draws = torch.stack([made(*given, need_weights=False)[0] for _ in range(100)])
    # Within five standard errors.
    assert bool(((draws.mean(0) - output).abs() < 5 * draws.std(0) / 10).all())


# Bad input.


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


WRONG_CALLS = [
    ({"attn_mask": zeros(N, M, dtype=torch.uint8)}, TypeError, r"`attn_mask` must be boolean \(True = ignore\) or "
     r"additive floating-point, got torch.uint8; use attn_mask.bool\(\)"),
    ({"attn_mask": [[0.0]]}, TypeError, "`attn_mask` must be boolean"),
    ({"attn_mask": zeros(N, M).to("meta")}, ValueError, "`attn_mask` must be on cpu"),
    ({"key_padding_mask": zeros(B, M, dtype=torch.int64)}, TypeError, "`key_padding_mask` must be boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "match"), WRONG_CALLS)
def test_wrong_calls_are_named(call, kind, match):
    made = module()
    given = dict(zip(("query", "key", "value"), tokens(made), strict=True))
    with pytest.raises(kind, match=match):
        made(**{**given, **call})


def test_masks_of_a_batch_do_not_fit_a_call_without():
    made = module()
    given = tokens(made, batch=False)
    with pytest.raises(ValueError, match=r"`key_padding_mask` must have shape \(M,\) = \(7,\), got shape \(1, 7\)"):
        made(*given, PADDING[:1])
    with pytest.raises(ValueError, match=r"or \(B \* num_heads, N, M\) = \(3, 5, 7\)"):
        made(*given, attn_mask=some(B * HEADS, N, M))


def test_empty_inputs_give_empty_results():
    made = module(batch_first=True)
    query, key, value = tokens(made)
    output, weights = made(query[:, :0], key, value)
    assert output.shape == (B, 0, DIM)
    assert weights.shape == (B, 0, M)
    output, weights = made(query[:0], key[:0], value[:0])
    assert output.shape == (0, N, DIM)
    output, weights = made(query, key[:, :0], value[:, :0])
    assert torch.equal(output, made.out_proj.bias.expand(B, N, DIM))
    assert weights.shape == (B, N, 0)

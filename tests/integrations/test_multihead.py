"""ImplicitMultiheadAttention: torch's module where nothing is solved, an independent solve where something is."""

import copy
import inspect
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
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
    explicit = reference(made, *given, **call, steps=0)[0]
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


def test_second_derivatives_are_the_derivatives_of_the_first():
    made = module(solver=TIGHT, width=4, heads=2)
    inputs = [random(rows, 4, seed=rows).requires_grad_() for rows in (2, 3)]
    inputs += [made.anchor.logit, made.beta.log_scale]
    assert torch.autograd.gradgradcheck(
        lambda x, y, *_: made(x, y, y, need_weights=False)[0], inputs, rtol=1e-4, atol=1e-6
    )


def test_gradients_reach_every_parameter_in_training_and_evaluation():
    made = module(add_bias_kv=True)
    for mode in (True, False):
        made.train(mode).zero_grad()
        made(*tokens(made))[0].square().sum().backward()
        for name, parameter in made.named_parameters():
            assert float(parameter.grad.abs().max()) > 1e-9, name
    assert bool((made.last_solve.adjoint.status == Status.CONVERGED).all())


def test_no_parameter_is_without_gradient_where_nothing_is_solved():
    made = module(max_steps=0)
    made(*tokens(made))[0].square().sum().backward()
    assert all(p.grad is not None for p in made.parameters())


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


def test_samples_do_not_see_each_other():
    made = module(dtype=torch.float32, batch_first=True, width=32, heads=4)
    given = tokens(made, dtype=torch.float32)
    # One that is hard beside one that is easy.
    given = [torch.cat([t, 20 * t[:1]]) for t in given]
    together = made(*given)[0]
    for order in ([2, 0], [1], [0, 1, 2]):
        torch.testing.assert_close(made(*(t[order] for t in given))[0], together[order], rtol=0, atol=3e-6)


# State dicts, and torch's module.


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 4}, {"add_bias_kv": True}], ids=str)
def test_the_state_dict_is_torchs_and_two_keys(options):
    made = module(**options)
    state, their_state = made.state_dict(), theirs(made).state_dict()
    extra = {"anchor.logit": (HEADS,), "beta.log_scale": (HEADS,)}
    shapes = [{name: tuple(value.shape) for name, value in s.items()} for s in (state, their_state)]
    assert shapes[0] == {**shapes[1], **extra}
    assert list(state) == [*their_state, *extra]
    assert [name for name, _ in made.named_parameters()] == list(state)
    assert list(module(anchor=0.3, beta=0.7, **options).state_dict()) == list(their_state)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_torchs_state_dict_loads_strictly_and_leaves_anchor_and_beta(inside, assign):
    source = nn.MultiheadAttention(DIM, HEADS, dtype=torch.float64)
    made = module()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    outer = nn.ModuleDict({"a": made, "b": nn.Linear(2, 2)}) if inside else made
    state = (nn.ModuleDict({"a": source, "b": nn.Linear(2, 2)}) if inside else source).state_dict()
    keys = list(state)
    found = outer.load_state_dict(state, strict=True, assign=assign)
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert list(state) == keys
    for name, value in made.state_dict().items():
        expected = before[name] if name.startswith(("anchor", "beta")) else source.state_dict()[name]
        assert torch.equal(value, expected), name
    assert not torch.equal(made.in_proj_weight, before["in_proj_weight"])


def test_own_state_dicts_go_round_and_must_fit():
    made, other = module(), module(seed=1)
    other.load_state_dict(made.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in made.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*anchor.logit"):
        module(anchor=0.5).load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*anchor.logit"):
        made.load_state_dict(module(anchor=0.5).state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*in_proj_bias"):
        made.load_state_dict(module(bias=False, anchor=0.5, beta=None).state_dict())


@pytest.mark.parametrize("case", ["self", "widths, no bias", "both keys"])
def test_from_torch_takes_over_everything(case):
    options, call, kind = CASES[case]
    source = theirs(module(dtype=torch.float32, dropout=0.25, **options)).eval()
    source.out_proj.weight.requires_grad_(False)
    state = torch.get_rng_state()
    made = ImplicitMultiheadAttention.from_torch(source, anchor=0.3, solver=TIGHT)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in source.named_parameters():
        assert made.get_parameter(name) is parameter, name
    assert not made.training
    assert not made.out_proj.weight.requires_grad
    assert made.beta.log_scale.dtype == torch.float32
    assert made.beta.log_scale.device.type == "cpu"
    assert made.anchor() == 0.3
    for name in ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first"):
        assert getattr(made, name) == getattr(source, name), name
    made.options = made.options.override(max_steps=0)
    given, call = tokens(made, dtype=torch.float32, **kind), cast(call, torch.float32)
    expected = source(*given, **call)
    torch.testing.assert_close(made(*given, **call), expected, rtol=0, atol=1e-6)


def test_an_optimizer_goes_on_with_the_parameters_that_it_has():
    source = nn.MultiheadAttention(DIM, HEADS)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    made = ImplicitMultiheadAttention.from_torch(source)
    before = made.in_proj_weight.detach().clone()
    made(*tokens(made, dtype=torch.float32))[0].square().sum().backward()
    optimizer.step()
    assert not torch.equal(made.in_proj_weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["self", "widths", "widths, no bias", "both keys"])
def test_to_torch_is_the_model_without_steps(case, dtype):
    options, call, kind = CASES[case]
    for beta in ("learned", 0.9):
        made = module(dtype=dtype, beta=beta, max_steps=0, dropout=0.25, **options).eval()
        made.out_proj.weight.requires_grad_(False)
        state = {name: value.clone() for name, value in made.state_dict().items()}
        generator = torch.get_rng_state()
        given, found = tokens(made, dtype=dtype, **kind), made.to_torch()
        assert torch.equal(generator, torch.get_rng_state())
        assert type(found) is nn.MultiheadAttention
        assert not found.training
        assert found.dropout == 0.25
        assert [n for n, p in found.named_parameters() if not p.requires_grad] == ["out_proj.weight"]
        tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
        output, expected = (it(*given, **cast(call, dtype)) for it in (found, made))
        torch.testing.assert_close(output, expected, **tolerance)
        # Copies, so that neither can spoil the other.
        with torch.no_grad():
            for parameter in found.parameters():
                parameter.zero_()
        assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())


def test_there_and_back_changes_no_bit():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        source = nn.MultiheadAttention(20, 4, kdim=6, add_bias_kv=True, dtype=dtype)
        nn.init.normal_(source.in_proj_bias)
        for beta in ("learned", None):
            state = ImplicitMultiheadAttention.from_torch(source, beta=beta).to_torch().state_dict()
            assert all(torch.equal(value, state[name]) for name, value in source.state_dict().items())


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_from_torch_refuses_what_computes_something_else():
    make = ImplicitMultiheadAttention.from_torch
    with pytest.raises(TypeError, match=r"`mha` must be an nn.MultiheadAttention, got Linear"):
        make(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"a forward of its own \(OwnForward\)"):
        make(OwnForward(4, 2))
    hooked = nn.MultiheadAttention(4, 2)
    handle = hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks, which would be lost"):
        make(hooked)
    handle.remove()
    make(hooked)
    normed = nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(4, 2), "in_proj_weight")
    with pytest.raises(ValueError, match=r"other parameters \(parametrizations"):
        make(normed)
    for unknown in ({"steps": 3}, {"bias": False}, {"dtype": torch.float64}):
        with pytest.raises(TypeError, match="`options` must be among anchor, beta, .*, got " + next(iter(unknown))):
            make(nn.MultiheadAttention(4, 2), **unknown)
    with pytest.raises(TypeError, match="`anchor` must be a number"):
        make(nn.MultiheadAttention(4, 2), anchor=None)


def test_a_subclass_without_a_forward_of_its_own_is_the_same():
    class Named(nn.MultiheadAttention):
        pass

    source = Named(DIM, HEADS)
    made = ImplicitMultiheadAttention.from_torch(source, max_steps=0)
    given = tokens(made, dtype=torch.float32)
    torch.testing.assert_close(made(*given), source(*given), rtol=0, atol=1e-6)


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
ELSEWHERE = {"adjoint", "impl", "on_failure", "device", "dtype", "dropout"}


def test_every_option_is_listed_and_torchs_come_first():
    names = list(inspect.signature(ImplicitMultiheadAttention).parameters)
    assert set(names) == set(CHANGES) | ELSEWHERE
    of_torch = inspect.signature(nn.MultiheadAttention).parameters
    assert names[: len(of_torch)] == list(of_torch)
    for name, parameter in of_torch.items():
        assert inspect.signature(ImplicitMultiheadAttention).parameters[name].default == parameter.default
    forwards = [inspect.signature(it.forward).parameters for it in (ImplicitMultiheadAttention, nn.MultiheadAttention)]
    assert [(n, p.default) for n, p in forwards[0].items()] == [(n, p.default) for n, p in forwards[1].items()]


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
    with pytest.raises(UnsupportedImplementation, match="at least"):
        module(impl="sdpa")(*given)
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


# As a module.


def test_copies_and_pickles_compute_the_same_and_carry_no_solve():
    made = module(kdim=6, add_bias_kv=True, dropout=0.1, solver=Anderson(rtol=1e-6)).eval()
    expected = made(*tokens(made))[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.last_solve is None
        assert torch.equal(other(*tokens(made))[0], expected)


def test_the_evidence_of_the_last_call_stays():
    made = module()
    assert made.last_solve is None
    made(*tokens(made))
    assert made.last_solve.status.shape == (B, HEADS, N)
    assert bool((made.last_solve.status == Status.CONVERGED).all())
    assert int(made.last_solve.num_evals.min()) > 1
    made.options = made.options.override(max_steps=0)
    made(*tokens(made))
    assert bool((made.last_solve.status == Status.EXPLICIT).all())


@pytest.mark.parametrize("max_steps", [0, None])
def test_bfloat16_is_solved_in_single_precision(max_steps):
    made = module(dtype=torch.float32, max_steps=max_steps, width=32, heads=4, solver=Anderson(rtol=1e-5))
    given = tokens(made, dtype=torch.float32)
    half = copy.deepcopy(made).to(torch.bfloat16)
    output, weights = half(*(t.bfloat16() for t in given), PADDING, attn_mask=some(N, M))
    expected, expected_weights = made(*given, PADDING, attn_mask=some(N, M))
    assert output.dtype == weights.dtype == torch.bfloat16
    assert float((output.float() - expected).detach().abs().max()) < 0.03 * float(expected.detach().abs().max())
    assert float((weights.float() - expected_weights).detach().abs().max()) < 0.03
    output.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == torch.bfloat16 for p in half.parameters())
    if max_steps is None:
        assert bool((half.last_solve.status == Status.CONVERGED).all())


@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_autocast_keeps_the_solve_in_single_precision(options):
    made = module(dtype=torch.float32, width=32, heads=4, **options)
    given = tokens(made, dtype=torch.float32)
    expected = made(*given, PADDING)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = made(*given, PADDING)
    assert output.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert float((output.float() - expected).detach().abs().max()) < 0.03 * float(expected.detach().abs().max())
    output.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == torch.float32 for p in made.parameters())


@pytest.mark.parametrize("count", [M, 70])
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiles_without_a_graph_break(count, options):
    torch._dynamo.reset()
    made = module(add_bias_kv=True, batch_first=True, **options)
    given = [t.requires_grad_() for t in tokens(made, keys=count)]
    padding = torch.arange(count) >= torch.tensor([[count - 3], [count]])
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    found = []
    for forward in (made, compiled):
        made.zero_grad()
        output = forward(*given, padding, need_weights=False)[0]
        output.square().sum().backward()
        found.append((output.detach(), [p.grad.clone() for p in made.parameters()], made.last_solve))
    (expected, gradients, evidence), (output, others, told) = found
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(others, gradients, rtol=1e-11, atol=1e-12)
    assert torch.equal(told.num_evals, evidence.num_evals)


def test_torch_func_sees_through_it():
    made = module(solver=TIGHT)
    x = random(3, N, DIM, seed=5)

    def loss(x):
        return made(x, x, x, need_weights=False)[0].square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(x)
    for one, expected in zip(x, each, strict=True):
        one = one.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(loss(one), one)[0], expected, rtol=1e-8, atol=1e-10)


def test_a_fixed_budget_is_differentiated_as_it_ran():
    made = module(solver=Picard(rtol=0, atol=0, max_steps=2), heads=1)
    x = tokens(made, batch=False, self=True)[0]
    gradients = []
    for step_by_step in (False, True):
        made.zero_grad()
        if step_by_step:
            q, k, v = F.linear(x, made.in_proj_weight, made.in_proj_bias).chunk(3, -1)
            z = q
            for _ in range(2):
                z = made.anchor() * q + (1 - made.anchor()) * (made.beta() * z @ k.T).softmax(-1) @ k
            output = made.out_proj((made.beta() * z @ k.T).softmax(-1) @ v)
        else:
            output = made(x, x, x)[0]
        output.square().sum().backward()
        gradients.append([p.grad.clone() for p in made.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_repr_says_what_it_is():
    made = ImplicitMultiheadAttention(
        8, 2, 0.1, kdim=6, add_bias_kv=True, add_zero_attn=True, batch_first=True, anchor=0.25, solver=Picard()
    )
    shown = repr(made)
    for part in ("8, num_heads=2", "kdim=6", "dropout=0.1", "batch_first=True", "add_bias_kv=True", "Picard(", "0.25",
                 "add_zero_attn=True"):  # fmt: skip
        assert part in shown, part
    assert "vdim" not in shown


# Bad input.


WRONG_OPTIONS = [
    ({"embed_dim": 10, "num_heads": 3}, ValueError, "`num_heads` must divide embed_dim = 10, got 3; use a divisor"),
    ({"embed_dim": 0}, ValueError, "`embed_dim` must be >= 1"),
    ({"num_heads": 2.0}, TypeError, "`num_heads` must be an integer"),
    ({"kdim": 0}, ValueError, "`kdim` must be >= 1"),
    ({"vdim": -1}, ValueError, "`vdim` must be >= 1"),
    ({"dropout": 1.5}, ValueError, r"`dropout` must be in \[0, 1\]"),
    ({"anchor": -0.1}, ValueError, r"`anchor` must be in \[0, 1\]"),
    ({"anchor": "fixed"}, ValueError, "`anchor` must be 'learned' or a number"),
    ({"beta": 0.0}, ValueError, "`beta` must be > 0"),
    ({"beta": "fixed"}, ValueError, "`beta` must be 'learned' or a number"),
    ({"solver": "anderson"}, TypeError, "`solver` must be None or a Solver"),
    ({"max_steps": -1}, ValueError, "`max_steps` must be >= 0"),
    ({"impl": "cuda"}, ValueError, "`impl` must be one of"),
    ({"on_failure": "shout"}, ValueError, "`on_failure` must be one of"),
]


@pytest.mark.parametrize(("options", "kind", "match"), WRONG_OPTIONS)
def test_wrong_options_are_named(options, kind, match):
    with pytest.raises(kind, match=match):
        ImplicitMultiheadAttention(**{"embed_dim": 8, "num_heads": 2, **options})


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(*shape, dtype=dtype)


WRONG_CALLS = [
    ({"query": zeros(N, B, 5)}, ValueError, "`query` must have width 12 on its last axis, got shape"),
    ({"key": zeros(M, B, 5)}, ValueError, "`key` must have width 12"),
    ({"value": zeros(M, B, 5)}, ValueError, "`value` must have width 12"),
    ({"query": zeros(B, 1, N, DIM)}, ValueError, "`query` must have 3 axes, or 2 without a batch"),
    ({"query": zeros(N, DIM)}, ValueError, "`key` must have 2 axes like `query`"),
    ({"key": zeros(M, 3, DIM)}, ValueError, "`key` must have the 2 samples of `query` on axis 1.*batch_first is False"),
    ({"value": zeros(M - 1, B, DIM)}, ValueError, r"`value` must have a row for each key, leading axes \(7, 2\)"),
    ({"query": [1.0]}, TypeError, "`query` must be a torch.Tensor"),
    ({"query": zeros(N, B, DIM, dtype=torch.int64)}, TypeError, "`query` must have a floating-point dtype"),
    ({"attn_mask": zeros(M, N)}, ValueError, r"`attn_mask` must have shape \(N, M\) = \(5, 7\) or "
     r"\(B \* num_heads, N, M\) = \(6, 5, 7\), got shape \(7, 5\)"),
    ({"attn_mask": zeros(B, N, M)}, ValueError, "`attn_mask` must have shape"),
    ({"attn_mask": zeros(N, M, dtype=torch.uint8)}, TypeError, r"`attn_mask` must be boolean \(True = ignore\) or "
     r"additive floating-point, got torch.uint8; use attn_mask.bool\(\)"),
    ({"attn_mask": [[0.0]]}, TypeError, "`attn_mask` must be boolean"),
    ({"attn_mask": zeros(N, M).to("meta")}, ValueError, "`attn_mask` must be on cpu"),
    ({"key_padding_mask": zeros(M, B)}, ValueError, r"`key_padding_mask` must have shape \(B, M\) = \(2, 7\), got"),
    ({"key_padding_mask": zeros(M)}, ValueError, r"`key_padding_mask` must have shape \(B, M\)"),
    ({"key_padding_mask": zeros(B, M, dtype=torch.int64)}, TypeError, "`key_padding_mask` must be boolean"),
    ({"is_causal": True}, ValueError, "`attn_mask` must be given with is_causal=True, which is a hint, got None; pass"),
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

"""ImplicitMultiheadAttention as a module: state dicts, to and from torch's, copies, precisions and compilation."""

import copy
import pickle

import pytest
import torch
from multihead_cases import CASES, DIM, HEADS, PADDING, TIGHT, M, N, cast, module, some, theirs, tokens
from torch import nn

from implicit_attention import Anderson, Status
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention

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
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(unknown))}'.* solver, adjoint"):
            make(nn.MultiheadAttention(4, 2), **unknown)
    with pytest.raises(TypeError, match="`anchor` must be a number"):
        make(nn.MultiheadAttention(4, 2), anchor=None)


# As a module.


def test_copies_and_pickles_compute_the_same_and_carry_no_solve():
    made = module(kdim=6, add_bias_kv=True, dropout=0.1, solver=Anderson(rtol=1e-6)).eval()
    expected = made(*tokens(made))[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.last_solve is None
        assert torch.equal(other(*tokens(made))[0], expected)


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

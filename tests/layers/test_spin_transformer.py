"""Transformer blocks of spins: the identity without couplings, parts that add up, masks, bad tokens, every option."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import ConvergenceError, ConvergenceWarning, Picard
from implicit_attention.layers import SpinAttention, SpinTransformer, SpinTransformerBlock
from implicit_attention.potentials import AmosResponse, SaddlePointResponse
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Enumeration,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SignUnits,
    SphereUnits,
    SpinSystem,
    magnetization,
)
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

INPUTS = ("field", "magnetization")


def tokens(*shape, longest=0.9, heads=2, seed=0):
    """Tokens whose heads are shorter than `longest` R."""
    x = random(*shape, seed=seed)
    parts = x.unflatten(-1, (heads, -1))
    return (longest * parts * (parts.shape[-1] ** 0.5 / parts.norm(dim=-1, keepdim=True).max())).flatten(-2)


def block(dim=6, heads=2, **options):
    torch.manual_seed(0)
    options = {"method": MeanField(), **options}
    made = SpinTransformerBlock(dim, heads, **options).double()
    if made.feed_forward is not None:
        # It begins at zero for magnetizations.
        torch.nn.init.normal_(made.feed_forward[-1].weight, std=0.05)
    return made


def apart(x, heads=2):
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def joined(parts):
    return parts.transpose(-3, -2).flatten(-2)


def rms(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


# The identity.

METHODS = [
    MeanField(),
    MeanField(response=AmosResponse()),
    MeanField(response=SaddlePointResponse()),
    TAP(),
    AdaTAP(),
    SaddlePoint(),
    KineticPlefka(),
    KineticPlefka(order=2, response=AmosResponse()),
    GaussianClosure(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("beta", ["learned", 3.0])
def test_a_block_without_couplings_is_the_identity(method, beta):
    x = tokens(3, 5, 6, longest=0.999)
    alone = block(input="magnetization", couplings=lambda h: h.new_zeros(5, 5), method=method, beta=beta)
    torch.testing.assert_close(alone(x), x, rtol=0, atol=1e-12)
    # What stands for the answer of J(h) begins at zero.
    stack = SpinTransformer(
        6, 2, blocks=3, input="magnetization", couplings=lambda h: h.new_zeros(5, 5), method=method, feed_forward=8
    )
    torch.testing.assert_close(stack.double()(x), x, rtol=0, atol=1e-12)
    if method.symmetric:
        parts = alone.decompose(x)
        torch.testing.assert_close(joined(parts.field), x, rtol=0, atol=1e-8)
        for name in ("coupling", "onsager", "coupling_function"):
            torch.testing.assert_close(joined(getattr(parts, name)), torch.zeros_like(x), rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", [MeanField(response=SignUnits()), Enumeration(), AdaTAP()], ids=repr)
def test_ising_blocks_without_couplings_are_the_identity(method):
    x = tokens(2, 5, 2)
    alone = block(2, input="magnetization", couplings=lambda h: h.new_zeros(5, 5), method=method)
    torch.testing.assert_close(alone(x), x, rtol=0, atol=1e-12)


# The block is what the equations say.


@pytest.mark.parametrize("derivative", ["explicit", "total"])
@pytest.mark.parametrize("input", INPUTS)
def test_a_block_is_the_magnetization_of_its_system(input, derivative):
    made = block(input=input, feed_forward=5, derivative=derivative)
    spins, x = made.spins, tokens(2, 4, 6)
    beta = spins.beta()
    if input == "field":
        normed = apart(rms(x, made.norm.weight) @ spins.in_proj.weight.T)
        field = rms(normed, spins.norm.weight)
    else:
        # By halving rather than by `inverse`: the strength at which the response has the length of x.
        parts, size = apart(x), apart(x).norm(dim=-1, keepdim=True) / 3**0.5
        low, high = torch.zeros_like(size), torch.full_like(size, 500.0)
        for _ in range(60):
            kappa = (low + high) / 2
            short = SphereUnits().magnetization(kappa * torch.eye(3)[0].double(), 1.0, 1.0)[..., :1] < size
            low, high = torch.where(short, kappa, low), torch.where(short, high, kappa)
        field = kappa / (beta[:, None, None] * 3**0.5) * parts / parts.norm(dim=-1, keepdim=True)

    def couplings(h):
        q = (h if input == "field" else rms(h, spins.norm.weight)) @ spins.couplings.weight
        scores = (3**-0.5 * q @ q.mT).masked_fill(torch.eye(4, dtype=torch.bool), -math.inf)
        z = scores.exp().sum(-1)
        return scores.exp() / (z[..., :, None] * z[..., None, :]).sqrt()

    given = couplings if derivative == "total" else couplings(field)
    m = joined(magnetization(SpinSystem(given, field, beta), MeanField()))
    first, last = made.feed_forward[1], made.feed_forward[3]

    def feed_forward(t):
        t = rms(t, made.feed_forward[0].weight)
        return F.gelu(t @ first.weight.T + first.bias) @ last.weight.T + last.bias

    if input == "field":
        y = x + m @ spins.out_proj.weight.T
        expected = y + feed_forward(y)
    else:
        expected = m + feed_forward(joined(field))
    torch.testing.assert_close(made(x), expected, rtol=0, atol=1e-8)
    assert (expected - x).abs().max() > 0.1


@pytest.mark.parametrize("method", [MeanField(), TAP(), AdaTAP(), SaddlePoint()], ids=repr)
@pytest.mark.parametrize("input", INPUTS)
def test_the_parts_add_up_to_the_answer_in_total(input, method):
    x = tokens(3, 4, 6, longest=0.7)
    exists = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    made, total = (block(input=input, method=method, derivative=which) for which in ("explicit", "total"))
    parts = made.decompose(x, key_mask=exists)
    assert parts.total.shape == (3, 2, 4, 3)
    torch.testing.assert_close(parts.total, parts.field + parts.coupling + parts.onsager + parts.coupling_function)
    answer = joined(parts.total)
    expected = (
        answer if input == "magnetization" else x.masked_fill(~exists[..., None], 0) + made.spins.out_proj(answer)
    )
    torch.testing.assert_close(total(x, key_mask=exists), expected, rtol=0, atol=1e-8)
    # J(h) has a part, and the explicit answer is the rest.
    assert parts.coupling_function.abs().max() > 1e-3
    explicit = answer - joined(parts.coupling_function)
    _, state = made(x, key_mask=exists, return_state=True)
    torch.testing.assert_close(joined(state), explicit, rtol=0, atol=1e-8)
    assert bool((parts.total.transpose(-3, -2)[~exists] == 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("input", INPUTS)
def test_a_stack_is_its_blocks_in_turn(input):
    torch.manual_seed(0)
    stack = SpinTransformer(6, 2, blocks=3, input=input, method=MeanField()).double()
    x, expected = tokens(2, 4, 6, longest=0.6), []
    y, states = stack(x, return_state=True)
    assert [state.shape for state in states] == [(2, 2, 4, 3)] * 3
    at = x
    for each in stack.blocks:
        expected.append(each.decompose(at))
        at = each(at)
    torch.testing.assert_close(y, at, rtol=0, atol=1e-12)
    torch.testing.assert_close(stack(x, initial=states), y, rtol=0, atol=1e-9)
    assert all(int(each.last_solve.num_evals.max()) <= 3 for each in stack.blocks)
    for found, known in zip(stack.decompose(x), expected, strict=True):
        torch.testing.assert_close(found.total, known.total, rtol=0, atol=1e-9)
    weights = [each.spins.couplings.weight for each in stack.blocks]
    assert not torch.equal(weights[0], weights[1])


def test_a_module_of_ones_own_is_copied_for_every_block():
    class Mixer(torch.nn.Module):
        symmetric = True

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(0.1 * torch.randn(4, 4))

        def forward(self, field):
            return (self.weight + self.weight.mT).expand(*field.shape[:-1], 4)

    stack = SpinTransformer(8, 2, blocks=2, couplings=Mixer())
    stack(torch.randn(2, 4, 8)).sum().backward()
    first, second = (each.spins.couplings.function.weight for each in stack.blocks)
    assert first is not second
    assert bool((first.grad != 0).any() and (second.grad != 0).any())


# Derivatives.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"input": "field", "feed_forward": 5},
        {"input": "field", "derivative": "total"},
        {"input": "magnetization", "feed_forward": 5},
        {"input": "magnetization", "derivative": "total"},
        {"input": "magnetization", "clip": 0.5, "feed_forward": 5},
    ],
)
def test_blocks_are_differentiated_exactly(options):
    made = block(4, **options)
    x = tokens(2, 3, 4).requires_grad_()
    if "clip" in options:
        lengths = apart(x).norm(dim=-1) / 2**0.5
        assert bool((lengths > 0.51).any() and (lengths < 0.49).any() and ((lengths - 0.5).abs() > 0.01).all())
    names, parameters = zip(*made.named_parameters(), strict=True)

    def value(x, *given):
        return torch.func.functional_call(made, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(value, (x, *parameters), fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(value, (x, *parameters), fast_mode=True, atol=1e-5)
    value(x, *parameters).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for p in parameters)


@pytest.mark.slow
def test_the_parts_have_gradients():
    made, x = block(4, input="magnetization"), tokens(2, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: made.decompose(x).coupling, x, fast_mode=True, atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: made.decompose(x).coupling_function, x, fast_mode=True, atol=1e-6)


def test_a_token_at_zero_has_a_gradient():
    made = block(4, input="magnetization", clip=0.9)
    x = tokens(2, 3, 4)
    x[0, 1] = 0
    (grad,) = torch.autograd.grad(made(x.requires_grad_()).square().sum(), x)
    assert bool(grad.isfinite().all())


# Missing tokens.


@pytest.mark.parametrize("input", INPUTS)
@pytest.mark.parametrize("derivative", ["explicit", "total"])
def test_a_missing_token_changes_no_bit_and_its_nan_reaches_no_gradient(input, derivative):
    torch.manual_seed(0)
    stack = SpinTransformer(4, 2, blocks=2, input=input, feed_forward=5, derivative=derivative)
    x, exists = tokens(3, 5, 4, longest=0.5).float(), torch.arange(5) < 3
    truth = stack(x, key_mask=exists)
    parts = stack.decompose(x, key_mask=exists)
    # Neither a NaN nor a token that no field gives is told of where there is none.
    for other in (math.nan, 1e4):
        changed = x.masked_fill(~exists[:, None], other).requires_grad_()
        stack.zero_grad()
        found = stack(changed, key_mask=exists)
        assert torch.equal(found, truth)
        assert bool((found[:, 3:] == 0).all())
        found.square().sum().backward()
        assert all(bool(p.grad.isfinite().all()) for p in (changed, *stack.parameters()))
        assert bool((changed.grad[:, 3:] == 0).all())
        for ours, theirs in zip(stack.decompose(changed, key_mask=exists), parts, strict=True):
            assert torch.equal(ours.total, theirs.total)


def test_masks_and_states_pass_through():
    made, x = block(), tokens(2, 5, 6)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = False
    spun, state = made.spins(made.norm(x), mask=mask, return_state=True)
    found, again = made(x, mask=mask, return_state=True)
    torch.testing.assert_close(found, x + spun, rtol=0, atol=1e-12)
    assert torch.equal(again, state)
    assert not torch.allclose(found, made(x), atol=1e-4)
    made(x, mask=mask, initial=state)
    assert int(made.last_solve.num_evals.max()) <= 2


# Tokens that no field gives.


def test_a_token_that_no_field_gives_is_nan_alone_and_told():
    made = block(input="magnetization", feed_forward=5)
    x = tokens(3, 5, 6, longest=0.6)
    live = torch.ones(3, 5, dtype=torch.bool)
    live[1, 2] = live[2, 0] = False
    expected, parts = made(x, key_mask=live), made.decompose(x, key_mask=live)
    bad = x.clone()
    # One head is too long, the other is not; R itself belongs to no finite field.
    bad[1, 2, :3] = torch.tensor([3.0**0.5, 0, 0], dtype=torch.float64)
    bad[2, 0, 4] = math.nan
    with pytest.warns(ConvergenceWarning, match="no finite field gives 2 of 15 tokens: `x` must be shorter than R"):
        found = made(bad.requires_grad_())
    assert bool(found[~live].isnan().all())
    assert torch.equal(found[live], expected[live])
    (grad,) = torch.autograd.grad(found[live].square().sum(), bad)
    assert bool(grad.isfinite().all())
    with pytest.warns(ConvergenceWarning, match="no finite field"):
        # A copy has told nothing yet.
        seen = copy.deepcopy(made).decompose(bad)
    assert bool(seen.total.transpose(-3, -2)[~live].isnan().all())
    assert torch.equal(seen.gain.isnan(), ~live[:, None].expand(3, 2, 5))
    torch.testing.assert_close(seen.total.transpose(-3, -2)[live], parts.total.transpose(-3, -2)[live])
    with pytest.raises(ConvergenceError, match=r"use clip=0\.95"):
        block(input="magnetization", on_failure="raise")(bad)
    assert bool(block(input="magnetization", on_failure="ignore")(bad)[~live].isnan().all())


def test_a_failed_solve_is_told_as_the_layer_says_or_the_call():
    made = SpinTransformerBlock(8, 2, input="magnetization", solver=Picard(rtol=1e-9, max_steps=1))
    x = tokens(2, 5, 8).float()
    with pytest.warns(ConvergenceWarning, match="MeanField failed for 4 of 4"):
        made.decompose(x)
    with pytest.raises(ConvergenceError, match="MeanField failed"):
        made.decompose(x, on_failure="raise")
    made.decompose(3 * x, on_failure="ignore")


def test_clip_cuts_lengths_and_nothing_else():
    made, plain = (block(input="magnetization", clip=clip) for clip in (0.8, None))
    x = tokens(3, 5, 6, longest=0.79)
    assert torch.equal(made(x), plain(x))
    long = x.clone()
    long[1, 2, :3] = torch.tensor([30.0, 0, 40])
    cut = long.clone()
    cut[1, 2, :3] = 0.8 * 3**0.5 * torch.tensor([0.6, 0, 0.8], dtype=torch.float64)
    torch.testing.assert_close(made(long), plain(cut), rtol=0, atol=1e-12)
    # What has no length is told all the same.
    for bad in (math.nan, math.inf):
        long[1, 2, 0] = bad
        given = long.clone().requires_grad_()
        with pytest.warns(ConvergenceWarning, match="no finite field"):
            found = copy.deepcopy(made)(given)
        assert bool(found[1, 2].isnan().all())
        (grad,) = torch.autograd.grad(found[[0, 2]].square().sum(), given)
        assert bool(grad.isfinite().all())
    huge = x.float()
    huge[1, 2, 0] = 1e30
    with pytest.warns(ConvergenceWarning, match="no finite field"):
        assert bool(copy.deepcopy(made).float()(huge)[1, 2].isnan().all())


# Precision.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("input", INPUTS)
def test_half_precision_autocast_compile_and_vmap(input):
    torch.manual_seed(0)
    made = SpinTransformerBlock(8, 2, input=input, feed_forward=16)
    x = tokens(2, 5, 8, longest=0.5).float()
    truth = made(x)
    half = copy.deepcopy(made).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), truth, rtol=0, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(made(x).float(), truth, rtol=0, atol=0.05)
        made(x).square().sum().backward()
    compiled = torch.compile(made, backend="aot_eager")
    torch.testing.assert_close(compiled(x), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.vmap(made)(x), truth, rtol=0, atol=1e-3)


# Options.


def test_the_system_of_a_layer_gives_its_answers():
    layer, x = SpinAttention(6, 2, couplings="symmetric", method=MeanField()).double(), random(3, 4, 6)
    exists = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    system = layer.system(x, key_mask=exists)
    direct, through = magnetization(system, MeanField(), split=True)
    torch.testing.assert_close(layer(x, key_mask=exists), layer.out_proj(joined(direct)), rtol=0, atol=1e-9)
    layer.derivative = "total"
    torch.testing.assert_close(layer(x, key_mask=exists), layer.out_proj(joined(direct + through)), rtol=0, atol=1e-9)

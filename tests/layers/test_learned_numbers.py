"""Learned anchors and temperatures follow every change of theirs, whoever makes them, and stay in their range."""

import copy
import io
import math

import pytest
import torch
from torch.func import functional_call
from torch.nn.utils import parametrize

import implicit_attention as ia
from implicit_attention.kernels import native_status
from implicit_attention.testing.numerics import random

native = pytest.mark.skipif(native_status().isa is None, reason="there is no native operation here")


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = ia.ImplicitAttention(12, heads=3)
    with torch.no_grad():
        layer.beta.log_scale.copy_(torch.tensor([0.3, -0.2, 0.7]))
        layer.anchor.logit.copy_(torch.tensor([0.5, 0.1, -0.4]))
    return layer


def written(layer, x):
    """The answer of a layer with these very numbers, given as tensors to the function."""
    heads = [p(x).unflatten(-1, (3, 4)).transpose(-3, -2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    answer = ia.equilibrium_attention(*heads, scale=layer.beta(), anchor=layer.anchor())
    return layer.out_proj(answer.transpose(-3, -2).flatten(-2))


CHANGES = {
    "in place": lambda p: p.add_(0.25),
    "past autograd": lambda p: p.data.mul_(1.5),
    "other memory": lambda p: setattr(p, "data", p.data + 0.5),
    "one entry": lambda p: p[1:2].fill_(-0.3),
}


@native
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["beta.log_scale", "anchor.logit"])
def test_every_change_of_a_parameter_reaches_the_next_call(layer, name, change, grad):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    with torch.set_grad_enabled(grad):
        before = layer(x)
        with torch.no_grad():
            CHANGES[change](layer.get_parameter(name))
        after = layer(x)
        assert torch.equal(after, written(layer, x))
    assert not torch.equal(after, before)


@native
def test_another_parameter_in_its_place_gets_the_gradient(layer):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    layer(x).sum().backward()
    old, layer.anchor.logit = layer.anchor.logit, torch.nn.Parameter(layer.anchor.logit.detach().clone())
    old.grad = None
    layer(x).sum().backward()
    assert old.grad is None
    assert layer.anchor.logit.grad.abs().min() > 0


@native
@pytest.mark.parametrize("name", ["beta.log_scale", "anchor.logit"])
@pytest.mark.parametrize("shift", [0.0, 5.0, 20.5, -30.0])
def test_the_derivative_is_that_of_autograd(layer, name, shift):
    """Tensors in the place of parameters have graphs of their own, which lead through the formulas."""
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    with torch.no_grad():
        layer.get_parameter(name)[1] += shift
    if name == "beta.log_scale":
        # Of logarithms that are cut off at 20.
        layer.beta.initial = math.exp(-max(-20.0, min(shift, 20.0)))
    tensors = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    wanted = torch.autograd.grad(functional_call(layer, tensors, (x,)).sin().sum(), list(tensors.values()))
    found = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class Squared(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self):
        return self.part().square()


def hooked(layer, part):
    part.register_forward_hook(lambda module, args, output: 0.7 * output)


def replaced(layer, part):
    usual = part.forward
    part.forward = lambda: 0.7 * usual()


def parametrized(layer, part):
    parametrize.register_parametrization(part, next(name for name, _ in part.named_parameters()), Doubled())


def wrapped(layer, part):
    setattr(layer, "anchor" if part is layer.anchor else "beta", Squared(part))


def derived(layer, part):
    class Halved(type(part)):
        def forward(self):
            return super().forward() / 2

    part.__class__ = Halved


@native
@pytest.mark.parametrize("change", [hooked, replaced, parametrized, wrapped, derived])
@pytest.mark.parametrize("name", ["anchor", "beta"])
def test_a_module_that_is_observed_or_changed_is_called(layer, name, change):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    before = layer(x)
    change(layer, layer.get_submodule(name))
    assert torch.equal(layer(x), written(layer, x))
    assert not torch.allclose(layer(x), before)


@native
def test_hooks_on_every_module_see_anchors_and_temperatures(layer):
    x, seen = random(2, 5, 12, seed=1, dtype=torch.float32), []
    layer(x)
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    layer(x)
    hook.remove()
    assert layer.anchor in seen
    assert layer.beta in seen


@native
def test_a_layer_that_was_first_called_in_inference_mode_trains(layer):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    with torch.inference_mode():
        inferred = layer(x)
    trained = layer(x)
    trained.sum().backward()
    assert torch.equal(inferred, trained.detach())
    assert layer.beta.log_scale.grad is not None


def test_copies_and_files_have_numbers_of_their_own(layer):
    x, file = torch.randn(1, 4, 12), io.BytesIO()
    before = layer(x)
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), before)
        with torch.no_grad():
            other.beta.log_scale.add_(1.0)
        assert not torch.equal(other(x), before)
    assert torch.equal(layer(x), before)


@native
@pytest.mark.parametrize("way", ["kernels", "again differentiable", "autocast"])
def test_the_gradient_is_that_of_the_numbers_of_the_forward_pass(layer, way):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    wanted = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    loss = layer(x).square().sum()
    for parameter in (layer.beta.log_scale, layer.anchor.logit):
        parameter.data = parameter.data + 1.0
    with torch.autocast("cpu", enabled=way == "autocast"):
        found = torch.autograd.grad(loss, list(layer.parameters()), create_graph=way == "again differentiable")
    # Autocast lowers the products of the backward passes of the projections.
    close = {"rtol": 2e-2, "atol": 1e-3} if way == "autocast" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close([g.detach() for g in found], list(wanted), **close)


@native
def test_numbers_may_be_set_between_a_forward_and_its_backward(layer):
    x, sets = random(2, 5, 12, seed=1, dtype=torch.float32), (0.2, 0.5, 0.8)
    total, apart = 0.0, []
    for value in sets:
        layer.anchor.set(value)
        total = total + layer(x).square().sum()
        apart.append(torch.autograd.grad(layer(x).square().sum(), layer.q_proj.weight)[0])
    (found,) = torch.autograd.grad(total, layer.q_proj.weight)
    torch.testing.assert_close(found, sum(apart), rtol=1e-5, atol=1e-6)


@native
@pytest.mark.parametrize("create_graph", [False, True])
def test_one_parameter_of_both_has_the_sum_of_both_gradients(layer, create_graph):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    with torch.no_grad():
        layer.beta.log_scale.copy_(layer.anchor.logit)
    both = [layer.anchor.logit, layer.beta.log_scale]
    wanted = sum(torch.autograd.grad(layer(x).square().sum(), both))
    layer.beta.log_scale = layer.anchor.logit
    (found,) = torch.autograd.grad(layer(x).square().sum(), layer.anchor.logit, create_graph=create_graph)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-6)


def test_reports_can_be_saved(layer):
    layer(torch.randn(1, 4, 12)).sum().backward()
    report = layer.last_solve
    file = io.BytesIO()
    torch.save([report, report.adjoint], file)
    file.seek(0)
    again, adjoint = torch.load(file, weights_only=False)
    assert torch.equal(again.residual, report.residual)
    assert torch.equal(adjoint.gradient_error, report.adjoint.gradient_error)


@pytest.mark.parametrize("initial", [0.0, -0.5])
def test_a_temperature_that_is_none_is_refused(layer, initial):
    x = torch.randn(1, 4, 12)
    layer(x)
    layer.beta.initial = initial
    with pytest.raises(ValueError, match="`beta` must be"):
        layer(x)


class Given(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self):
        return self.number


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("beta", 0.0, "`beta` must be > 0, got 0.0"),
        ("beta", math.inf, "`beta` must be > 0, got inf"),
        ("beta", torch.tensor([0.5, -0.1, 0.5]), "`beta` must be > 0 everywhere, got -0.1"),
        ("beta", torch.ones(5), "`beta` must broadcast with the leading axes of `keys`"),
        ("beta", None, "`beta` must be a number, got None"),
        ("anchor", -0.5, r"`anchor` must be in \[0, 1\], got -0.5"),
        ("anchor", math.nan, r"`anchor` must be in \[0, 1\], got nan"),
        ("anchor", torch.tensor([0.5, 0.5, 1.5]), r"`anchor` must be in \[0, 1\] everywhere, got 1.5"),
        ("anchor", torch.ones(2, 3), "`anchor` must broadcast to the leading axes of `field`"),
        ("anchor", "half", "`anchor` must be a number, got 'half'"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}], ids=["solved", "explicit"])
@pytest.mark.parametrize("readout", ["values", "state"])
def test_what_another_module_returns_is_checked(name, number, words, options, readout):
    layer = ia.ImplicitAttention(12, heads=3, readout=readout)
    setattr(layer, name, Given(number))
    with pytest.raises((TypeError, ValueError), match=words):
        layer(torch.randn(1, 4, 12), **options)

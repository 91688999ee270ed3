"""Learned anchors and temperatures are read as numbers where nothing looks on, and follow every change of theirs."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch.func import functional_call
from torch.nn.utils import parametrize

import implicit_attention as ia
from implicit_attention.layers.projections import LearnedAnchor, LearnedBeta, read
from implicit_attention.ops.native.library import library
from implicit_attention.testing.numerics import random

native = pytest.mark.skipif(library() is None, reason="there is no native operation here")
KINDS = {"anchor": lambda: LearnedAnchor((3,)), "beta": lambda: LearnedBeta((3,), 0.4)}


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 20.5, -30.0])
def test_the_derivative_has_the_bits_of_autograd(kind, dtype, shift):
    module = KINDS[kind]().to(dtype)
    with torch.no_grad():
        (parameter,) = module.parameters()
        parameter.copy_(random(3, seed=4, dtype=dtype)).add_(torch.tensor([0.0, shift, 0.0], dtype=dtype))
    cotangent = random(3, seed=5, dtype=dtype)
    (wanted,) = torch.autograd.grad(module(), parameter, cotangent)
    learned = module.known()
    assert torch.equal(learned.numbers, module().detach())
    assert torch.equal(learned.columns[:, 0, 0], learned.numbers)
    assert torch.equal(learned.pull(cotangent), wanted)


@native
def test_derivatives_of_a_layer_to_second_order():
    torch.manual_seed(0)
    solver = ia.Anderson(rtol=1e-12, atol=1e-12)
    layer = ia.ImplicitAttention(4, heads=2, dtype=torch.float64, solver=solver, impl="native")
    x, leaves = random(1, 3, 4, seed=2), list(layer.parameters())

    def gradients(**options):
        return torch.autograd.grad(layer(x).square().sum(), leaves, **options)

    # Tensors in the place of parameters have graphs of their own, which lead through the formulas.
    tensors = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    wanted = torch.autograd.grad(functional_call(layer, tensors, (x,)).square().sum(), list(tensors.values()))
    found = gradients(create_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    second, step = torch.autograd.grad(sum(g.square().sum() for g in found), leaves), 1e-5
    for leaf, derivative in list(zip(leaves, second, strict=True))[:2]:
        sizes = []
        for moved in (step, -2 * step):
            with torch.no_grad():
                leaf.view(-1)[0] += moved
            sizes.append(sum(g.square().sum() for g in gradients()))
        with torch.no_grad():
            leaf.view(-1)[0] += step
        torch.testing.assert_close(derivative.view(-1)[0], (sizes[0] - sizes[1]) / (2 * step), rtol=1e-5, atol=1e-8)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_is_observed_or_changed_is_called(kind):
    module, calls = KINDS[kind](), []
    assert module.known() is not None
    hook = module.register_forward_hook(lambda *args: calls.append(args))
    assert module.known() is None
    hook.remove()
    assert module.known() is not None
    module.forward = lambda: torch.full((3,), 0.5)
    assert module.known() is None
    del module.forward
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert module.known() is None
    everywhere.remove()
    parametrize.register_parametrization(module, module.source, Doubled())
    assert module.known() is None


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_half_or_of_other_heads_are_not_read(kind):
    module, other = KINDS[kind](), LearnedAnchor((3,))
    assert read(module, other, 3)[2] is not None
    assert read(module, other, 2)[2] is None
    assert KINDS[kind]().half().known() is None
    with torch.no_grad():
        next(module.parameters())[0] = torch.nan
    assert module.known() is None


@native
def test_a_layer_that_was_first_called_in_inference_mode_trains(layer):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    with torch.inference_mode():
        inferred = layer(x)
    trained = layer(x)
    trained.sum().backward()
    assert torch.equal(inferred, trained.detach())
    assert layer.beta.log_scale.grad is not None


def test_copies_and_files_hold_parameters_only(layer):
    layer(torch.randn(1, 4, 12))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.beta._known == (None, None)
        with torch.no_grad():
            other.beta.log_scale.add_(1.0)
        assert layer.beta.known().numbers[0] != other.beta.known().numbers[0]


class Squared(LearnedBeta):
    def forward(self):
        return super().forward().square()


class Shifted(LearnedAnchor):
    @property
    def formula(self):
        return lambda logit: logit.sigmoid() / 2


@native
@pytest.mark.parametrize("part", [Squared((3,), 0.4), Shifted((3,)), torch.nn.Identity()])
def test_modules_of_other_classes_are_called(layer, part):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    if isinstance(part, torch.nn.Identity):
        part.forward = lambda: torch.tensor([0.2, 0.3, 0.4])
    layer.add_module("beta" if isinstance(part, LearnedBeta) else "anchor", part)
    assert torch.equal(layer(x), written(layer, x))


@native
def test_another_initial_temperature_reaches_the_next_call(layer):
    x = random(2, 5, 12, seed=1, dtype=torch.float32)
    layer(x)
    layer.beta.initial = 2.0
    assert torch.equal(layer(x), written(layer, x))


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


def test_a_layer_that_is_dropped_is_freed_at_once(layer):
    layer(torch.randn(1, 4, 12))
    parameter = weakref.ref(layer.beta.log_scale)
    gc.disable()
    try:
        del layer.beta
        assert parameter() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("initial", [0.0, -0.5])
def test_a_temperature_that_is_none_is_refused(layer, initial):
    x = torch.randn(1, 4, 12)
    layer(x)
    layer.beta.initial = initial
    with pytest.raises(ValueError, match="`beta` must be"):
        layer(x)

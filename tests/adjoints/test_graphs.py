"""What a solve may and may not hold on to, read, or hide: modules, closures, initial states, tiles, precision."""

import types
import warnings

import pytest
import torch
from torch import nn

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    EnergyFunction,
    FixedPointMap,
    Implicit,
    LogSumExp,
    Phantom,
    Picard,
    Potential,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.diagnostics import diagnose
from implicit_attention.linear import CG
from implicit_attention.testing.numerics import dense_gradients, random, relative_error
from implicit_attention.testing.problems import hopfield_energy

TIGHT = Anderson(rtol=0.0, atol=1e-12, max_steps=500)
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def test_a_module_under_two_names_is_trained_and_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3).double()
            self.b = self.a

        def forward(self, z):
            return torch.tanh(self.a(z) / 4 + self.b(z) / 4)

    net = Net()
    solve(FixedPointMap(net, event_ndim=1), random(4, 3)).value.sum().backward()
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in net.parameters())
    assert net.a.weight.grad.abs().sum() > 0
    assert net.a is net.b


def test_tied_parameters_get_one_gradient():
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    second.weight = first.weight
    net = nn.Sequential(first, nn.Tanh(), second)
    with torch.no_grad():
        first.weight.mul_(0.5)
    problem = FixedPointMap(net, event_ndim=1)
    assert len(problem.tensors()) == 3
    solve(problem, random(4, 3), solver=TIGHT).value.sum().backward()
    implicit = first.weight.grad.clone()
    net.zero_grad()
    steps = Picard(rtol=0, atol=0, max_steps=400)
    solve(problem, random(4, 3), solver=steps, adjoint=Unrolled()).value.sum().backward()
    assert relative_error(implicit, first.weight.grad) < 1e-8


def test_modules_in_potentials_can_be_indexed_and_iterated():
    class Layers(Potential):
        def __init__(self, layers):
            self.layers = layers

        def value(self, z):
            for layer in self.layers:
                z = torch.tanh(layer(z))
            return (z @ self.layers[0].weight).sum(-1) / 10

    layers = nn.ModuleList([nn.Linear(5, 5).double() for _ in range(2)])
    x = random(3, 5)
    solve(AnchoredEnergy(Layers(layers), x, 0.5), x).value.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layers.parameters())


@pytest.mark.parametrize("hide", ["closure", "object"])
def test_undeclared_tensors_of_potentials_and_energies_are_found(hide):
    weight = random(5, 4, seed=3).requires_grad_()

    class Hidden(Potential):
        def __init__(self):
            self.box = types.SimpleNamespace(weight=weight) if hide == "object" else None

        def value(self, z):
            return torch.log(torch.cosh(z @ (self.box.weight if self.box else weight))).sum(-1) / 10

    x = random(3, 5)
    with pytest.raises(
        ValueError, match=r"`AnchoredEnergy` reads a tensor, which requires grad but is not declared.*attribute"
    ):
        solve(AnchoredEnergy(Hidden(), x, 0.5), x)
    with pytest.raises(ValueError, match="not declared"):
        solve(EnergyFunction(lambda z: (z @ weight).square().sum(-1) / 100, event_ndim=1), x)


@FORWARD_MODE
def test_undeclared_tensors_are_found_in_forward_mode_and_vmap():
    x = random(3, 5)

    def hidden(weight):
        return solve(FixedPointMap(lambda z: 0.3 * torch.tanh(z @ weight) + 1, event_ndim=1), x).value.sum()

    def declared(weight):
        return solve(FixedPointMap(lambda z, w: 0.3 * torch.tanh(z @ w) + 1, weight, event_ndim=1), x).value.sum()

    weight = random(5, 5, seed=1)
    with pytest.raises(ValueError, match="not declared"):
        torch.func.jvp(hidden, (weight,), (weight,))
    with pytest.raises(ValueError, match="not declared"):
        torch.vmap(hidden)(random(2, 5, 5))
    assert torch.func.jvp(declared, (weight,), (weight,))[1] != 0


@pytest.mark.parametrize("rows", [70, 1300], ids=["one tile", "tiles"])
@pytest.mark.parametrize("form", ["plain", "mask", "bias"])
def test_tiles_add_up_to_the_whole_gradient(rows, form):
    keys = random(2, 9, 4).requires_grad_()
    field = random(2, rows, 4, seed=1).requires_grad_()
    beta = torch.tensor([0.5, 0.9], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([0.3, 0.6], dtype=torch.float64, requires_grad=True)
    mask = random(rows, 9, seed=2) > -0.5
    mask[5] = False
    options = {"mask": {"mask": mask}, "bias": {"bias": random(rows, 9, seed=2).requires_grad_()}}.get(form, {})
    energy = AnchoredEnergy(LogSumExp(keys, beta, **options), field, anchor)
    cotangent = random(2, rows, 4, seed=3)
    tensors = [t for t in energy.tensors() if t.requires_grad]
    value = solve(energy, field.detach(), solver=TIGHT).value
    dense = dense_gradients(energy, value.detach(), cotangent)
    expected = [g for g, t in zip(dense, energy.tensors(), strict=True) if t.requires_grad]
    for gradient, truth in zip(torch.autograd.grad(value, tensors, cotangent), expected, strict=True):
        assert relative_error(gradient, truth) < 1e-8


def test_saddles_in_one_tile_are_finished_there():
    energy = hopfield_energy(queries=1100, keys=40, dim=8, sharpness=2.0, clustered=True)
    keys = energy.potential.keys.requires_grad_()
    solver = Anderson(guard="none", rtol=0.0, atol=1e-11, max_steps=400)
    solution = solve(energy, energy.field, solver=solver, on_failure="ignore")
    cotangent = random(1100, 8, seed=3) * solution.converged[:, None]
    (gradient,) = torch.autograd.grad(solution.value, keys, cotangent)
    assert (solution.adjoint.status == Status.UNSTABLE).any()
    assert (solution.adjoint.status == Status.CONVERGED).any()
    truth = dense_gradients(energy, solution.value.detach(), cotangent)[0]
    assert relative_error(gradient, truth) < 1e-7


def test_one_saddle_without_leading_axes():
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    energy = EnergyFunction(lambda z, k: z.square().sum(-1) / 2 - (2 * z @ k.mT).logsumexp(-1) / 2, keys, event_ndim=1)
    solution = solve(energy, torch.zeros(2, dtype=torch.float64))
    solution.value.sum().backward()
    assert solution.adjoint.status.item() == Status.UNSTABLE
    assert diagnose(energy, solution).saddle.item()


def test_a_nan_key_reaches_only_the_queries_that_attend_to_it():
    keys, x = random(7, 5), random(2, 7, 5, seed=1)
    keys[6] = torch.nan
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    solution = solve(AnchoredEnergy(LogSumExp(keys, 0.5, mask=causal), x, 0.5), x, on_failure="ignore")
    assert solution.status.eq(Status.NONFINITE).nonzero().tolist() == [[0, 6], [1, 6]]
    padding = torch.ones(2, 1, 7, dtype=torch.bool)
    padding[..., 6] = False
    solution = solve(AnchoredEnergy(LogSumExp(keys, 0.5, mask=padding), x, 0.5), x)
    shorter = solve(AnchoredEnergy(LogSumExp(keys[:6], 0.5), x, 0.5), x)
    torch.testing.assert_close(solution.value, shorter.value)


def test_evidence_is_exact_under_autocast():
    energy = hopfield_energy(queries=5, keys=20, dim=16, dtype=torch.float32)
    solution = solve(energy, energy.field)
    outside = solution.energy, diagnose(energy, solution).smallest_curvature
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = solution.energy, diagnose(energy, solution).smallest_curvature
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)


def test_half_precision_problems_take_their_own_solution_and_can_be_diagnosed():
    energy = hopfield_energy(queries=5, keys=20, dim=16, dtype=torch.bfloat16, anchor=0.3)
    solution = solve(energy, energy.field)
    assert diagnose(energy, solution).smallest_curvature.dtype == torch.float32
    assert (solve(energy, solution.value).num_evals == 1).all()


def test_unrolled_evidence_carries_no_graph_and_no_grad_is_obeyed():
    keys, x = random(7, 5).requires_grad_(), random(3, 5, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), x, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve(energy, x, solver=Picard(), adjoint=Unrolled(), trace=True)
        repr(solution)
    assert solution.value.requires_grad
    assert not any(t.requires_grad for t in (solution.residual, solution.tolerance, solution.trace.residual))
    with torch.no_grad():
        assert not solve(energy, x, solver=Picard(), adjoint=Unrolled()).value.requires_grad


def test_subclasses_with_more_tensors_keep_their_gradients():
    class Shifted(LogSumExp):
        def __init__(self, keys, beta, shift):
            super().__init__(keys, beta)
            self.shift = shift

        def value(self, z):
            return super().value(z - self.shift)

        def mean(self, z):
            return super().mean(z - self.shift)

        def evaluate(self, z):
            return super().evaluate(z - self.shift)

    # One shift per query: what LogSumExp knows of restricting to rows does not hold for it.
    keys, shift = random(7, 5).requires_grad_(), random(70, 5, seed=2).requires_grad_()
    x = random(70, 5, seed=1)
    energy = AnchoredEnergy(Shifted(keys, 0.5, shift), x, 0.5)
    value = solve(energy, x, solver=TIGHT).value
    cotangent = random(70, 5, seed=4)
    got = torch.autograd.grad(value, (keys, shift), cotangent)
    expected = dense_gradients(energy, value.detach(), cotangent)
    assert relative_error(got[0], expected[0]) < 1e-8
    assert relative_error(got[1], expected[1]) < 1e-8


def test_attached_values_are_those_of_the_solver_even_where_the_graph_is_not_finite():
    def function(x, w):
        return torch.where(x > 500, torch.inf, x * w)

    problem = FixedPointMap(function, torch.tensor(10.0, requires_grad=True), event_ndim=1)
    plain = solve(problem, torch.ones(1, 1), on_failure="ignore")
    phantom = solve(problem, torch.ones(1, 1), adjoint=Phantom(), on_failure="ignore")
    assert torch.equal(plain.value, phantom.value)


def test_the_worst_of_several_adjoint_solves_is_kept():
    keys, x = random(2, 7, 5).requires_grad_(), random(2, 3, 5, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), x, 0.5)
    solution = solve(energy, x, adjoint=Implicit(CG(max_steps=1)), on_failure="ignore")
    (first,) = torch.autograd.grad(solution.value.sum(), keys, create_graph=True)
    failed = solution.adjoint.status.clone()
    assert (failed == Status.MAX_STEPS).any()
    torch.autograd.grad(first.sum() * 0, keys)
    assert torch.equal(solution.adjoint.status, failed)

"""Energies that are networks with parameters: gradients to all of them, modes, copies, transforms and their errors."""

import copy

import pytest
import torch
from torch import nn

from implicit_attention import (
    Anderson,
    ConvergenceError,
    EnergyFunction,
    GradientDescent,
    Implicit,
    NewtonKrylov,
    PerSample,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.linear import CG
from implicit_attention.testing.numerics import random

EXACT = Anderson(rtol=1e-13, atol=1e-14, max_steps=500)
STEPS = GradientDescent(0.3, max_steps=300, rtol=0, atol=0)


class Network(nn.Module):
    """w |z - x|^2/2 and a network of (z, x); `change` is applied to the energy."""

    def __init__(self, *parts, width=6, act=nn.Softplus, change=lambda energy: energy):
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Linear(8, width), *parts, act(), nn.Linear(width, 1)
        self.log_weight, self.net, self.change = nn.Parameter(torch.tensor(0.3)), nn.Sequential(*layers), change
        self.double()

    def forward(self, z, x):
        network = self.net(torch.cat([z, x], -1)).squeeze(-1)
        return self.change(self.log_weight.exp() * (z - x).square().sum(-1) / 2 + network)


def solved(network, x, start=None, **options):
    start = x.detach() if start is None else start
    return solve(EnergyFunction(network, PerSample(x), event_ndim=1), start, **{"solver": EXACT, **options})


def gradients(network, x, **options):
    x = x.clone().requires_grad_()
    # The last bias moves no minimum.
    wanted = [p for name, p in network.named_parameters() if name != "net.2.bias"]
    return torch.autograd.grad(solved(network, x, **options).value.square().sum(), [x, *wanted])


def test_first_and_second_derivatives_with_respect_to_every_parameter_and_the_input():
    network, x = Network(width=3), random(2, 4).requires_grad_()
    names = [name for name, _ in network.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in network.parameters()]

    def answer(x, *values):
        def energy(z, x, *values):
            return torch.func.functional_call(network, dict(zip(names, values, strict=True)), (z, x))

        problem = EnergyFunction(energy, PerSample(x), *values, event_ndim=1)
        return solve(problem, torch.zeros(2, 4).double(), solver=EXACT, adjoint=Implicit(CG(rtol=1e-13))).value

    assert torch.autograd.gradcheck(answer, (x, *values))
    assert torch.autograd.gradgradcheck(answer, (x, *values), fast_mode=True)


def test_a_module_has_the_gradients_of_many_unrolled_steps_and_of_finite_differences():
    network, x = Network(), random(3, 4)
    exact, unrolled = gradients(network, x), gradients(network, x, solver=STEPS, adjoint=Unrolled())
    torch.testing.assert_close(exact, unrolled, rtol=1e-9, atol=1e-11)
    weight, step = network.net[0].weight, 1e-5
    found = []
    for sign in (1, -1):
        moved = copy.deepcopy(network)
        moved.net[0].weight.data[1, 2] += sign * step
        found.append(solved(moved, x).value.square().sum().detach())
    torch.testing.assert_close(exact[2][1, 2], (found[0] - found[1]) / (2 * step), rtol=1e-7, atol=0)
    assert exact[2].shape == weight.shape


def test_frozen_parameters_get_no_gradient_and_the_others_the_same():
    network, x = Network(), random(3, 4)
    expected = gradients(network, x)
    network.net[0].requires_grad_(False)
    solved(network, x).value.square().sum().backward()
    assert network.net[0].weight.grad is None
    torch.testing.assert_close(network.log_weight.grad, expected[1])
    assert not solved(network.requires_grad_(False), x).value.requires_grad
    tracked = x.clone().requires_grad_()
    solved(network, tracked).value.square().sum().backward()
    torch.testing.assert_close(tracked.grad, expected[0])


def test_autocast_changes_no_bit_of_answer_and_gradients():
    network, x = Network().float(), random(3, 4).float()

    def found():
        network.zero_grad()
        value = solved(network, x, solver=Anderson()).value
        value.sum().backward()
        return [value.detach(), *(p.grad for p in network.parameters())]

    expected = found()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, found(), expected))
        with pytest.raises(ValueError, match=r"must have the dtype of .*float32.*convert it with"):
            solved(network, x.double())
        half, single = (solved(network, t, solver=Anderson()).value for t in (x.bfloat16(), x.bfloat16().float()))
        assert torch.equal(half, single)


def test_a_layer_that_solves_works_in_torch_func():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = Network()

        def forward(self, x):
            return solved(self.energy, x, start=torch.zeros_like(x)).value.square().sum()

    layer, x = Layer(), random(3, 4)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    expected = torch.autograd.grad(layer(x), list(layer.parameters()))
    whole = torch.func.grad(loss)(parameters, x)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for exact, found, per_sample in zip(expected, whole.values(), each.values(), strict=True):
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(per_sample.sum(0), exact)


def test_an_evaluation_calls_the_network_once(monkeypatch):
    calls = []
    network, x = Network(change=lambda energy: calls.append(1) or energy), random(3, 4)
    # Beside the evaluations, tests of what the function reads are made at its first solve alone.
    solved(network, x, solver=Anderson())
    calls.clear()
    with torch.no_grad():
        solution = solved(network, x, solver=Anderson())
    assert int(solution.num_evals.max()) > 2
    assert len(calls) == int(solution.num_evals.max())


class Halved(EnergyFunction):
    def energy(self, z):
        return super().energy(z) / 2


def test_an_override_of_the_energy_holds_where_its_gradient_is_read_beside_it():
    network, x, z = Network(), random(3, 4), random(3, 4, seed=2)
    whole, half = (kind(network, PerSample(x), event_ndim=1) for kind in (EnergyFunction, Halved))
    both = half.evaluate(z, energy=True)
    torch.testing.assert_close(both.mapped, half.fixed_point_map(z))
    torch.testing.assert_close(2 * both.energy, whole.energy(z))
    torch.testing.assert_close(2 * (z - both.mapped), z - whole.evaluate(z, energy=True).mapped)


# Modes of modules.


def test_dropout_in_training_mode_is_named_with_its_remedy():
    network, x = Network(nn.Dropout(0.5)), random(6, 4)
    with pytest.raises(ConvergenceError, match=r"`Network` is random: .*; call model.eval\(\): .* has no minimum"):
        solved(network, x)
    assert solved(network.eval(), x).converged.all()


def test_batch_normalisation_in_training_mode_is_named_with_its_remedy():
    network, x = Network(nn.BatchNorm1d(6)), random(6, 4)
    words = r"`Network` mixes problems: .*; call model.eval\(\), normalise each .*nn.LayerNorm.*raise event_ndim"
    with pytest.raises(ConvergenceError, match=words):
        solved(network, x)
    assert solved(network.eval(), x).converged.all()
    assert solved(Network(nn.LayerNorm(6)), x).converged.all()


def test_a_failure_of_another_kind_is_not_called_mixed():
    for network in (Network(), Network(nn.LayerNorm(6))):
        with pytest.raises(ConvergenceError) as raised:
            solved(network, random(6, 4), solver=Anderson(rtol=1e-13, max_steps=1))
        assert "mixes" not in str(raised.value)
        assert "random" not in str(raised.value)


def test_buffers_of_normalisation_are_those_before_a_failure_was_explained():
    network, x = Network(nn.BatchNorm1d(6)), random(6, 4)
    counts = []
    for on_failure in ("ignore", "warn"):
        with pytest.warns(Warning, match="mixes") if on_failure == "warn" else torch.no_grad(), torch.no_grad():
            solution = solved(network, x, solver=Anderson(rtol=1e-13, max_steps=3), on_failure=on_failure)
        counts.append(int(network.net[1].num_batches_tracked))
    assert solution.failed.any()
    assert counts[1] == 2 * counts[0]


# Results that are no energies.


def test_a_network_that_works_in_place_is_named():
    class InPlace(Network):
        def forward(self, z, x):
            return super().forward(z.sub_(x), x)

    with pytest.raises(ValueError, match=r"`InPlace` must leave its state as it is"):
        solved(InPlace(), random(3, 4))


@pytest.mark.parametrize("solver", [Anderson(), GradientDescent(0.5), NewtonKrylov()], ids=lambda s: type(s).__name__)
def test_the_status_tells_of_an_energy_without_a_lower_bound(solver):
    def bottomless(z, x, scale):
        return -scale * (z - x).square().sum(-1)

    x, scale = random(3, 4), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    problem = EnergyFunction(bottomless, PerSample(x), scale, event_ndim=1)
    solution = solve(problem, x + 1, solver=solver, on_failure="ignore")
    assert set(solution.status.tolist()) <= {Status.DIVERGED, Status.STALLED, Status.MAX_STEPS}
    assert "check that E has a lower bound" in solution.message(0)

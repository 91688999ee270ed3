"""Maps of one's own: what they may do to memory, and what they may read."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    FixedPointMap,
    Implicit,
    LogSumExp,
    Picard,
    Unrolled,
    equilibrium_attention,
    solve,
)
from implicit_attention.linear import GMRES
from implicit_attention.solvers import SciPy
from implicit_attention.testing.numerics import random

SHIFT = random(3, 4)
WEIGHT = 0.3 * random(4, 4, seed=1)


def halves_in_place(z):
    return z.mul_(0.5).add_(SHIFT)


def writes_past_torch(z):
    z.data.mul_(0.5)
    return z + SHIFT


def numpy_in_place(z):
    array = z.detach().numpy()
    np.tanh(array, out=array)
    return torch.from_numpy(array)


class Buffered:
    """Tanh(W z + b), always written into the same tensor."""

    def __init__(self, by_numpy):
        self.buffer, self.by_numpy = torch.empty(3, 4, dtype=torch.float64), by_numpy
        self.__name__ = "buffered"

    def __call__(self, z):
        arguments = z.detach() @ WEIGHT.mT + SHIFT
        if not self.by_numpy:
            return torch.tanh(arguments, out=self.buffer)
        np.tanh(arguments.numpy(), out=self.buffer.numpy())
        return torch.from_numpy(self.buffer.numpy())


def relu_block():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).double()


@pytest.mark.parametrize(
    "make", [lambda: halves_in_place, lambda: writes_past_torch, lambda: numpy_in_place, relu_block]
)
@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_a_map_that_works_in_place_is_refused_and_leaves_the_initial_state(make, solver):
    initial = random(3, 4, seed=2)
    before = initial.clone()
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with (
            context,
            pytest.raises(ValueError, match="must leave its state as it is, got a map that works on it in place"),
        ):
            solve(FixedPointMap(make(), event_ndim=1), initial, solver=solver)
        assert torch.equal(initial, before)


def test_the_error_names_the_module():
    with pytest.raises(ValueError, match=r"`Sequential` must leave .*nn.ReLU\(\), not inplace=True"):
        solve(FixedPointMap(relu_block(), event_ndim=1), SHIFT)


@pytest.mark.parametrize("call", ["vmap", "unrolled", "compiled", "foreign"])
def test_a_map_that_works_in_place_is_found_wherever_it_runs(call):
    def answer(z):
        solver = SciPy("anderson") if call == "foreign" else Picard()
        adjoint = Unrolled() if call == "unrolled" else Implicit()
        return solve(FixedPointMap(halves_in_place, event_ndim=1), z, solver=solver, adjoint=adjoint).value

    asked = {"vmap": torch.vmap(answer), "compiled": torch.compile(answer, backend="eager")}.get(call, answer)
    initial = random(2, 3, 4) if call == "vmap" else random(3, 4)
    before = initial.clone()
    with pytest.raises(ValueError, match="works on it in place"):
        asked(initial)
    assert torch.equal(initial, before)


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("solver", [Picard(), Anderson()])
def test_a_map_that_returns_the_same_buffer_again_is_refused(by_numpy, solver):
    for context in (torch.enable_grad(), torch.inference_mode()):
        with context, pytest.raises(ValueError, match=r"`buffered` must return new memory .*; return buffer.clone\(\)"):
            solve(FixedPointMap(Buffered(by_numpy), event_ndim=1), torch.zeros(3, 4).double(), solver=solver)


def test_memory_that_is_shared_and_not_overwritten_is_no_error():
    for function, event_ndim in ((lambda z: z, 1), (lambda z: SHIFT, 1), (lambda z: z.mT, 2)):
        initial = random(4, 4, seed=3)
        initial = initial[:3] if event_ndim == 1 else (initial + initial.mT) / 2
        solution = solve(FixedPointMap(function, event_ndim=event_ndim), initial)
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, function(initial))


class Halved(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts, nn.Tanh())

    def forward(self, z):
        return self.parts(z) / 2


def seeded(make, *parts):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*(part() for part in parts)).double()


def normalised():
    module = seeded(Halved, lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4)).eval()
    norm = module.parts[1]
    norm.running_mean.copy_(random(4))
    norm.running_var.copy_(1 + random(4, seed=1).square())
    module.parts[0].bias.requires_grad_(False)
    return module


def parametrised(kind):
    return seeded(Halved, lambda: kind(nn.Linear(4, 4))).eval()


@pytest.mark.parametrize(
    "make",
    [normalised]
    + [
        lambda kind=kind: parametrised(kind)
        for kind in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal)
    ],
)
def test_modules_with_buffers_or_parametrised_weights_are_differentiated(make):
    module = make()
    parameters = [p for p in module.parameters() if p.requires_grad]
    buffers = {name: b.clone() for name, b in module.named_buffers()}

    def gradients(adjoint, solver, *, create_graph=False):
        value = solve(FixedPointMap(module, event_ndim=1), SHIFT, solver=solver, adjoint=adjoint).value
        first = torch.autograd.grad(value.square().sum(), parameters, create_graph=create_graph)
        if not create_graph:
            return first
        return torch.autograd.grad(sum(g.square().sum() for g in first), parameters)

    # The other route: 60 steps of torch's own graph, twice.
    z = SHIFT
    for _ in range(60):
        z = module(z)
    expected = torch.autograd.grad(z.square().sum(), parameters, create_graph=True)
    torch.testing.assert_close(
        gradients(Implicit(GMRES(rtol=1e-13)), Anderson(rtol=1e-13, atol=0)), expected, rtol=1e-8, atol=1e-9
    )
    twice = torch.autograd.grad(sum(g.square().sum() for g in expected), parameters)
    found = gradients(Implicit(GMRES(rtol=1e-13)), Anderson(rtol=1e-13, atol=0), create_graph=True)
    torch.testing.assert_close(found, twice, rtol=1e-7, atol=1e-8)
    unrolled = gradients(Unrolled(), Picard(rtol=0, atol=0, max_steps=60))
    torch.testing.assert_close(unrolled, expected, rtol=1e-10, atol=1e-12)
    assert all(torch.equal(b, buffers[name]) for name, b in module.named_buffers())


def test_a_solve_inside_cached_parametrisations_is_refused():
    module = parametrised(parametrizations.weight_norm)
    with parametrize.cached(), pytest.raises(ValueError, match=r"parametrize.cached\(\) must not be open"):
        solve(FixedPointMap(module, event_ndim=1), SHIFT)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_are_numbers(number):
    keys, field = random(2, 70, 4), random(2, 3, 4, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, number), field, number)
    plain = AnchoredEnergy(LogSumExp(keys, 0.5), field, 0.5)
    assert type(energy.anchor) is type(energy.potential.beta) is float
    tight = Anderson(rtol=number / 2**30, max_steps=np.int64(50))
    assert tight == Anderson(rtol=2.0**-31, max_steps=50)
    assert type(tight.rtol) is float
    assert torch.equal(solve(energy, field, solver=tight).value, solve(plain, field, solver=tight).value)
    found = equilibrium_attention(field, keys, keys, scale=number, anchor=number)
    assert torch.equal(found, equilibrium_attention(field, keys, keys, scale=0.5, anchor=0.5))


@pytest.mark.parametrize("number", [True, np.bool_(True), 0.5j, "0.5", np.array([0.5]), None])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(TypeError, match="`beta` must be a number"):
        LogSumExp(SHIFT, number)

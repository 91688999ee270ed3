"""Maps of one's own: what they may do to memory, and what they may read."""

import numpy as np
import pytest
import torch
from torch import nn

from implicit_attention import Anderson, FixedPointMap, Implicit, Picard, SciPy, Unrolled, solve
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

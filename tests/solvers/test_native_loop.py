"""The native step of users' maps makes the evaluations, statuses and states that the solvers' loop makes."""

import functools
import itertools

import pytest
import torch
from torch.testing import assert_close

from implicit_attention import Equilibrium, FixedPointMap, PerSample, solve
from implicit_attention.kernels import native_status
from implicit_attention.problem import Problem
from implicit_attention.solvers import Anderson, Broyden, Picard, Update

pytestmark = pytest.mark.skipif(native_status().isa is None, reason="there is no native library")

SOLVERS = {
    "picard": Picard(),
    "anderson": Anderson(rtol=1e-8),
    "history 1": Anderson(history=1),
    "history 2": Anderson(history=2, rtol=1e-6),
    "history 8": Anderson(history=8, plain_steps=1, rtol=1e-6),
    "longest": Anderson(history=9),
    "budget": Anderson(rtol=0, atol=0, max_steps=7),
    "no step": Anderson(max_steps=0),
    "few steps": Picard(max_steps=3),
}


by_torch = functools.partial(solve, impl="reference")


def problem(lead=(6,), n=33, dtype=torch.float64, contraction=0.6, own=True):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, n, generator=generator, dtype=dtype) * contraction / n**0.5
    x = torch.randn(*lead, n, generator=generator, dtype=dtype)
    return FixedPointMap(lambda z, x: torch.tanh(z @ weight + x), PerSample(x) if own else x, event_ndim=1), x


def agree(f, start, solver, rtol=1e-11, atol=1e-12):
    with torch.no_grad():
        one, two = (way(f, start, solver=solver, on_failure="ignore") for way in (solve, by_torch))
    for name in ("status", "num_steps", "num_evals"):
        assert getattr(one, name).tolist() == getattr(two, name).tolist(), name
    for name in ("value", "residual", "tolerance"):
        assert_close(getattr(one, name), getattr(two, name), rtol=rtol, atol=atol, equal_nan=True)
    return one


@pytest.mark.parametrize(
    ("lead", "own"), [((), False), ((1,), True), ((7,), True), ((7,), False), ((2, 5), True), ((2, 5), False)], ids=str
)
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_it_is_the_loop_of_torch(solver, lead, own):
    f, x = problem(lead, own=own)
    agree(f, torch.zeros_like(x), solver)


@pytest.mark.parametrize("solver", [Picard(), Anderson(history=2)], ids=lambda s: type(s).__name__)
def test_samples_that_fail_end_alone_with_the_status_of_torch(solver):
    x = torch.tensor([[0.1, 0.2], [torch.nan, 0.1], [3.0, 0.1], [torch.inf, 0.0], [0.24, 0.1]], dtype=torch.float64)
    f = FixedPointMap(lambda z, x: z * z + x, PerSample(x), event_ndim=1)
    with torch.no_grad():
        found, expected = (way(f, torch.zeros_like(x), solver=solver, on_failure="ignore") for way in (solve, by_torch))
    assert found.status.tolist() == expected.status.tolist()
    assert (found.status == 7).tolist() == [False, True, False, True, False]
    assert_close(found.value[[0, 4]], expected.value[[0, 4]], rtol=1e-11, atol=1e-12)
    assert found.value[[1, 3]].isnan().all()


class Halved(Picard):
    def step(self, problem, state, point, accepted):
        return Update((), point.z + point.r / 2)


class Choosy(Picard):
    def accept(self, problem, state, point):
        return point.residual < 0.5 if point.step == 3 else None


@pytest.mark.parametrize("solver", [Halved(rtol=1e-6), Choosy(max_steps=5)], ids=lambda s: type(s).__name__)
def test_a_subclass_makes_its_own_steps(solver):
    x = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).reshape(2, 3)
    f = FixedPointMap(lambda z, x: x - 1.5 * torch.tanh(z), PerSample(x), event_ndim=1)
    found = agree(f, torch.zeros_like(x), solver)
    assert found.route.step == "torch"
    assert found.converged.all() == isinstance(solver, Halved)


class Marked(torch.Tensor):
    """A tensor of a subclass, as a map may return one, which the library does not read."""


@pytest.mark.parametrize("solver", [Picard(rtol=1e-8), Anderson(rtol=1e-8)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("marked", [range(999), range(6, 999), (5, 6), (7, 8), (5, 6, 9, 10)], ids=str)
def test_images_that_the_library_cannot_read_change_no_end(solver, marked):
    torch.manual_seed(0)
    weight, rates = 0.22 * torch.randn(6, 6).double(), torch.linspace(0.2, 1.3, 40).double()
    calls = []

    def f(z, rates):
        calls.append(len(z))
        image = torch.tanh(rates * (z.as_subclass(torch.Tensor) @ weight) + 0.3)
        return image.as_subclass(Marked) if len(calls) in marked else image

    problem = FixedPointMap(f, rates[:, None], event_ndim=1)
    found = solve(problem, torch.zeros(40, 6).double(), solver=solver)
    value, residual, tolerance, count = (
        getattr(found, name).as_subclass(torch.Tensor) for name in ("value", "residual", "tolerance", "num_evals")
    )
    assert len(calls) > 10
    assert found.converged.all()
    assert bool((residual <= tolerance).all())
    marked = ()  # From here on f returns plain tensors.
    plain = by_torch(problem, torch.zeros(40, 6).double(), solver=solver)
    assert_close(value, plain.value, rtol=0, atol=1e-6)
    assert not isinstance(solver, Picard) or torch.equal(count, plain.num_evals)


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "method",
    [Picard, functools.partial(Anderson, history=2), functools.partial(Anderson, history=3, plain_steps=5)],
    ids=["picard", "anderson", "plain at first"],
)
def test_every_budget_ends_where_the_loop_of_torch_ends(method, own, check_every):
    f, x = problem((7,), own=own)
    for steps in range(12):
        agree(f, torch.zeros_like(x), method(max_steps=steps, check_every=check_every))


@pytest.mark.parametrize("solver", [Picard(), Anderson(rtol=1e-6), Anderson(history=1)], ids=str)
def test_states_and_tolerances_of_any_size_are_measured(solver):
    # Their squares are no float32: they overflow, or lose their digits.
    shift = torch.tensor([1e-30, 1e-22, 1e20, 1e30], dtype=torch.float32)[:, None] * torch.linspace(1, 2, 20)
    f = FixedPointMap(lambda z, x: z / 2 + x, PerSample(shift), event_ndim=1)
    small = type(solver)(**{**vars(solver), "atol": 0.0})
    found = agree(f, torch.zeros_like(shift), small, rtol=1e-3, atol=0)
    assert_close(found.value, 2 * shift, rtol=1e-3, atol=0)


@pytest.mark.parametrize("solver", [Picard(rtol=1e-8), Anderson(rtol=1e-8)], ids=str)
def test_a_problem_has_the_bits_of_any_neighbours(solver):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    others = torch.cat([x[:4], 20 * x[4:6], x[6:] * torch.nan])
    one, two = (
        solve(
            FixedPointMap(lambda z, x: (z.roll(1, -1) / 2 + x).clamp(-2, 2), PerSample(own), event_ndim=1),
            torch.zeros_like(x),
            solver=solver,
            on_failure="ignore",
        )
        for own in (x, others)
    )
    for name in ("value", "status", "num_evals"):
        assert torch.equal(getattr(one, name)[:4], getattr(two, name)[:4]), name
    assert not torch.equal(one.num_evals, two.num_evals)


@pytest.mark.parametrize("solver", [Picard(max_steps=6), Anderson(max_steps=6, plain_steps=7)], ids=str)
def test_the_best_state_of_steps_that_grow_is_returned(solver):
    x = torch.tensor([[0.0, 1.0], [0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    found = agree(FixedPointMap(lambda z, x: 1.2 * z.flip(-1) + x, PerSample(x), event_ndim=1), x.clone(), solver)
    assert bool((found.num_steps < 6).all())


def test_strides_of_states_and_images_change_nothing():
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    f = FixedPointMap(lambda z, x: (z.cos() / 2 + x).transpose(1, 2).contiguous().transpose(1, 2), x, event_ndim=2)
    agree(f, torch.zeros(5, 3, 4, dtype=torch.float64).transpose(1, 2), Anderson(history=2))


def test_two_threads_find_the_bits_of_one():
    f, x = problem((400,), n=300, dtype=torch.float32)
    image = f.fixed_point_map(x)
    constant = FixedPointMap(lambda z, image: z / 2 + image, PerSample(image), event_ndim=1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(solve(constant, x, solver=Anderson(rtol=1e-4, history=2)))
    finally:
        torch.set_num_threads(before)
    for name in ("value", "residual", "num_evals"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name)), name


def test_a_solve_in_inference_mode_leaves_tensors_that_can_be_used_outside():
    f, x = problem()
    with torch.inference_mode():
        found = solve(f, torch.zeros_like(x), solver=Anderson(history=2))
    assert bool(found.converged.all())


class Late(torch.nn.Module):
    """A block that does something else from its fifth call on."""

    def __init__(self, late):
        super().__init__()
        self.late, self.calls = late, 0

    def forward(self, z, x):
        self.calls += 1
        return self.late(z, x) if self.calls > 4 else z / 2 + x


LATE = {
    "state": (lambda z, x: z.mul_(0.5) + x, "leave its state as it is"),
    "argument": (lambda z, x: z / 2 + x.add_(0.1), "leave its arguments as they are"),
    "shape": (lambda z, x: (z / 2 + x)[:, :2], "return"),
    "dtype": (lambda z, x: (z / 2 + x).double(), "return"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", LATE)
def test_a_block_that_changes_its_ways_late_is_refused(name, seen, mode):
    late, words = LATE[name]
    block = Late(late)
    layer = Equilibrium(block, solver=Picard(rtol=1e-6))
    with mode():
        x = torch.ones(3, 4)
        if seen:
            # Its writes were tested by a call before.
            block.late = lambda z, x: z / 2 + x
            layer(x)
            block.late, block.calls = late, 0
        with pytest.raises((ValueError, TypeError), match=words):
            layer(x)
        assert mode is torch.no_grad or bool((x == 1).all())
        # Plain steps, too, by a loop of their own.
        block.calls = 0
        with pytest.raises((ValueError, TypeError), match=words):
            layer(x, steps=6)
    assert block.calls == 5


@pytest.mark.parametrize("solver", [Picard(rtol=1e-6), Anderson(rtol=1e-6), Broyden(rtol=1e-6)], ids=repr)
def test_a_block_that_returns_its_buffer_late_is_solved_in_inference_mode(solver):
    calls = itertools.count()

    def block(z, x):
        found = (z + x).cos() / 2
        return buffer.copy_(found) if next(calls) > 2 else found

    with torch.inference_mode():
        x, buffer = torch.linspace(-1, 1, 12).reshape(3, 4), torch.zeros(3, 4)
        solution = solve(FixedPointMap(block, x, event_ndim=1), torch.zeros(3, 4), solver=solver)
        z = solution.value.clone()
        assert bool(solution.converged.all())
        assert float(((z + x).cos() / 2 - z).norm(dim=-1).max()) < 1e-5


class LateProblem(Problem):
    """The same as a problem of its own."""

    event_ndim = 1

    def __init__(self, block, x):
        self.function, self.x = lambda z, x: block(z, x), x

    def fixed_point_map(self, z):
        return self.function(z, self.x)


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (LATE["state"][0], "leave its state as it is"),
        (lambda z, x: z[:, :2] / 2 + x[:, :2], "shape"),
        (lambda z, x: z[:1] / 2 + x[:1], "candidate like point.z"),
        (lambda z, x: z.double() / 2 + x, "candidate like point.z"),
    ],
    ids=["state", "shape", "fewer", "dtype"],
)
def test_so_is_a_problem(late, words):
    block = Late(late)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=words):
        solve(LateProblem(block, torch.ones(3, 4)), torch.zeros(3, 4), solver=Picard(rtol=1e-6))
    assert block.calls == 5


def test_a_problem_of_its_own_is_solved_as_by_torch():
    f = LateProblem(lambda z, x: (z + x).cos() / 2, torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3))
    agree(f, torch.zeros(4, 3, dtype=torch.float64), Anderson(history=2))

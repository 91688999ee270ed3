"""Maps whose inputs say what belongs to a problem: finished problems leave, and one that mixes them is found."""

import pytest
import torch
from torch import nn

import implicit_attention as ia
from implicit_attention import (
    Anderson,
    EnergyFunction,
    FixedPointMap,
    Implicit,
    OneStep,
    PerSample,
    Phantom,
    Picard,
    Shared,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.linear import GMRES
from implicit_attention.testing.numerics import random

WEIGHT = 0.3 * random(4, 4, seed=1)
TIGHT = Anderson(rtol=1e-12, atol=0)


class Counted:
    """Tanh(slope (z W) + x), which counts the problems that it evaluates."""

    def __init__(self):
        self.rows = []

    def __call__(self, z, x, slope, weight):
        self.rows.append(len(z))
        return torch.tanh(slope * (z @ weight) + x)


def uneven(count=64, hard=4):
    """Inputs of problems of which a few are hard."""
    x, slope = random(count, 3, 4, seed=2), torch.full((count, 1, 1), 0.3, dtype=torch.float64)
    slope[:: count // hard] = 2.5
    return x, slope


def test_finished_samples_leave_the_work():
    x, slope = uneven()
    whole, parts = Counted(), Counted()
    solver = Picard(rtol=1e-8)
    expected = solve(FixedPointMap(whole, x, slope, WEIGHT, event_ndim=2), torch.zeros_like(x), solver=solver)
    problem = FixedPointMap(parts, PerSample(x), PerSample(slope), WEIGHT, event_ndim=2)
    found = solve(problem, torch.zeros_like(x), solver=solver)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.num_evals, expected.num_evals)
    needed, largest = int(found.num_evals.sum()), int(found.num_evals.max())
    assert largest > 3 * needed / 64
    # One evaluation is the check of undeclared tensors, and one at the end judges all that have left.
    assert sum(whole.rows) == 64 * (largest + 1)
    assert sum(parts.rows) <= 1.5 * needed + 2 * 64 < sum(whole.rows) / 2
    assert min(parts.rows) <= 4


@pytest.mark.parametrize("wrap", [Shared, lambda weight: weight])
def test_inputs_beside_a_per_sample_one_are_shared(wrap):
    # As many rows as there are samples.
    weight = 0.3 * random(5, 5)
    rows = []

    def f(z, x, weight):
        rows.append(z.shape)
        return torch.tanh(z @ weight + x)

    x = random(5, 5, seed=2)
    x[0] *= 100
    problem = FixedPointMap(f, PerSample(x), wrap(weight), event_ndim=1)
    found = solve(problem, torch.zeros_like(x), solver=TIGHT)
    torch.testing.assert_close(found.value, f(found.value, x, weight), rtol=1e-10, atol=1e-10)
    assert problem.select(torch.tensor([1, 3])).inputs[1] is weight


@pytest.mark.parametrize(
    ("inputs", "restricted"),
    [
        (lambda x, w: (x, w), False),
        (lambda x, w: (x, Shared(w)), False),
        (lambda x, w: (Shared(x[0]), Shared(w)), True),
        (lambda x, w: (PerSample(x), w), True),
        (lambda x, w: (PerSample((x, {"y": x})), w, 2.0, nn.Linear(4, 4)), True),
        (lambda x, w: (Shared(x[0]), 2.0, nn.Linear(4, 4)), True),
        (lambda x, w: (nn.Linear(4, 4), 2.0), False),
        (lambda x, w: (), False),
    ],
)
def test_what_is_wrapped_decides_whether_problems_leave(inputs, restricted):
    problem = FixedPointMap(lambda z, *inputs: z / 2, *inputs(random(6, 4), WEIGHT), event_ndim=1)
    part = problem.select(torch.tensor([4, 1]))
    assert (part is not None) == restricted
    if part is not None and isinstance(part.inputs[0], tuple):
        assert torch.equal(part.inputs[0][0], random(6, 4)[[4, 1]])
        assert torch.equal(part.inputs[0][1]["y"], random(6, 4)[[4, 1]])


@pytest.mark.parametrize("lead", [(24,), (2, 24), (3, 2, 8)])
@pytest.mark.parametrize("adjoint", [Implicit(GMRES(rtol=1e-13)), Unrolled(), OneStep(), Phantom(3)])
def test_gradients_are_those_of_a_map_that_keeps_all(lead, adjoint):
    x, slope = random(*lead, 3, 4), 0.2 + 1.5 * random(*lead, 1, 1, seed=3).sigmoid()
    leaves = [t.requires_grad_() for t in (x, slope, WEIGHT.clone())]
    cotangent = random(*lead, 3, 4, seed=5)

    def answer(*inputs):
        problem = FixedPointMap(Counted(), *inputs, event_ndim=2)
        value = solve(problem, torch.zeros_like(x), solver=TIGHT, adjoint=adjoint).value
        return value, *torch.autograd.grad(value, leaves, cotangent)

    x, slope, weight = leaves
    torch.testing.assert_close(
        answer(PerSample(x), PerSample(slope), Shared(weight)), answer(x, slope, weight), rtol=1e-9, atol=1e-10
    )


def test_second_derivatives_and_transforms():
    x = random(3, 4)

    def value(x, weight, wrap=PerSample):
        problem = FixedPointMap(lambda z, x, w: torch.tanh(z @ w + x), wrap(x), weight, event_ndim=1)
        return solve(problem, torch.zeros_like(x), solver=TIGHT, adjoint=Implicit(GMRES(rtol=1e-13))).value

    leaves = (x.clone().requires_grad_(), WEIGHT.clone().requires_grad_())
    assert torch.autograd.gradcheck(value, leaves)
    assert torch.autograd.gradgradcheck(value, leaves)
    many = random(2, 3, 4)
    torch.testing.assert_close(
        torch.vmap(value, in_dims=(0, None))(many, WEIGHT), value(many.flatten(0, 1), WEIGHT).reshape(many.shape)
    )
    for derivative in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            derivative(value, argnums=1)(x, WEIGHT), derivative(value, argnums=1)(x, WEIGHT, lambda t: t)
        )


def test_a_trace_and_half_precision_are_as_without():
    x, slope = (t.float() for t in uneven(8, 2))
    plain = FixedPointMap(Counted(), x, slope, WEIGHT.float(), event_ndim=2)
    own = FixedPointMap(Counted(), PerSample(x), PerSample(slope), WEIGHT.float(), event_ndim=2)
    a, b = (solve(problem, torch.zeros_like(x), trace=True) for problem in (plain, own))
    torch.testing.assert_close(b.trace.value, a.trace.value)
    narrow = FixedPointMap(
        Counted(), PerSample(x.bfloat16()), PerSample(slope.bfloat16()), WEIGHT.bfloat16(), event_ndim=2
    )
    assert solve(narrow, torch.zeros_like(x).bfloat16()).value.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(solve(own, torch.zeros_like(x)).value, b.value)


@pytest.mark.parametrize("adjoint", [Implicit(), Unrolled(), OneStep()])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_a_sample_that_is_not_finite_stays_alone(adjoint, bad):
    x = random(5, 3, 4)
    x[2] = bad
    leaves = (x.requires_grad_(), WEIGHT.clone().requires_grad_())

    def f(z, x, weight):
        return torch.tanh(z @ weight + x / x.norm(dim=-1, keepdim=True))

    def answer(x, weight, keep):
        solution = solve(
            FixedPointMap(f, PerSample(x), weight, event_ndim=2),
            torch.zeros_like(x),
            adjoint=adjoint,
            solver=Anderson(rtol=1e-10),
            on_failure="ignore",
        )
        return solution, torch.autograd.grad(solution.value[keep].square().sum(), (x, weight))

    kept = [0, 1, 3, 4]
    solution, (by_x, by_weight) = answer(*leaves, kept)
    _, (x_alone, weight_alone) = answer(leaves[0].detach()[kept].requires_grad_(), leaves[1], slice(None))
    assert solution.status.tolist() == [Status.CONVERGED] * 2 + [Status.NONFINITE] + [Status.CONVERGED] * 2
    torch.testing.assert_close(by_weight, weight_alone, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(by_x[kept], x_alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("adjoint", [Implicit(), Unrolled(), OneStep()])
@pytest.mark.parametrize(("bad", "closed"), [(torch.inf, -1e3), (torch.nan, -torch.inf)])
def test_of_inputs_that_nobody_wrapped_numbers_of_a_lost_sample_stay_alone(adjoint, bad, closed):
    x, weight = random(5, 3, 4), WEIGHT.clone().requires_grad_()
    mask = torch.zeros(4, dtype=torch.float64)
    # All samples read it, whatever it holds.
    mask[0] = closed

    def f(z, x, weight, mask):
        return torch.tanh(z @ weight + x / x.norm(dim=-1, keepdim=True)) / 2 + (z + mask).softmax(-1) / 4

    def gradient(x, keep):
        problem = FixedPointMap(f, x, weight, mask, event_ndim=2)
        options = {"adjoint": adjoint, "solver": Anderson(rtol=1e-10), "on_failure": "ignore"}
        value = solve(problem, torch.zeros_like(x), **options).value[keep]
        assert value.isfinite().all()
        return torch.autograd.grad(value.square().sum(), weight)[0]

    kept = [0, 1, 3, 4]
    expected = gradient(x[kept], slice(None))
    x[2] = bad
    torch.testing.assert_close(gradient(x, kept), expected, rtol=1e-6, atol=1e-9)


def test_an_energy_takes_inputs_per_sample_too():
    target, scale = random(40, 4), torch.full((40, 1), 0.9, dtype=torch.float64)
    scale[3] = 0.02
    rows = []

    def energy(z, target, scale):
        rows.append(len(z))
        return 0.5 * (scale * (z - target).square()).sum(-1)

    problem = EnergyFunction(energy, PerSample(target), PerSample(scale), event_ndim=1)
    found = solve(problem, torch.zeros_like(target), solver=Picard(rtol=1e-6, max_steps=1000))
    torch.testing.assert_close(found.value, target, rtol=1e-3, atol=1e-4)
    assert min(rows) == 1


# Maps that are no separate problems.


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, z, x, slope):
        return torch.tanh(slope * self.norm(self.linear(z)) + x)


def test_the_statistics_of_a_normalisation_count_evaluations_alone():
    torch.manual_seed(0)
    module = Normalised().double()
    x, slope = random(48, 4), torch.full((48, 1), 0.01, dtype=torch.float64)
    slope[::12] = 0.4
    calls = []
    module.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    problem = FixedPointMap(module, PerSample(x), PerSample(slope), event_ndim=1)
    solution = solve(problem, torch.zeros_like(x), solver=Picard(), on_failure="ignore")
    assert set(calls) == {48}
    # One for each evaluation of the solve, none for the check of undeclared tensors.
    assert int(module.norm.num_batches_tracked) == int(solution.num_evals.max()) == len(calls) - 1
    before = module.norm.running_mean.clone()
    solution.value.square().sum().backward()
    assert torch.equal(module.norm.running_mean, before)
    assert int(module.norm.num_batches_tracked) == int(solution.num_evals.max())


def test_a_random_map_converges_where_it_does_not_draw():
    def f(z, x, slope):
        return slope * torch.nn.functional.dropout(z, 0.5) + x

    x, slope = random(48, 4), torch.zeros(48, 1, dtype=torch.float64)
    slope[:12] = 0.3
    torch.manual_seed(0)
    problem = FixedPointMap(f, PerSample(x), PerSample(slope), event_ndim=1)
    assert solve(problem, torch.zeros_like(x), on_failure="ignore").converged.tolist() == [False] * 12 + [True] * 36


def test_where_nobody_leaves_nothing_is_asked():
    x, slope = random(48, 4), torch.full((48, 1), 0.5, dtype=torch.float64)
    f = Counted()
    problem = FixedPointMap(f, PerSample(x), PerSample(slope), WEIGHT, event_ndim=1)
    with torch.no_grad():
        found = solve(problem, torch.zeros_like(x), solver=Picard(rtol=0, atol=0, max_steps=7))
    assert f.rows == [48] * 8
    assert (found.num_evals == 8).all()


@pytest.mark.parametrize("hard", [2, 47])
def test_samples_that_finish_at_nearly_the_same_step_stay_together(hard):
    # Without the hard ones fewer rows would be saved than an evaluation costs that judges all at the end.
    x, slope = random(1, 4).expand(48, 4), torch.full((48, 1), 0.5, dtype=torch.float64)
    slope[:hard] = 0.6
    f = Counted()
    found = solve(
        FixedPointMap(f, PerSample(x), PerSample(slope), WEIGHT, event_ndim=1), 0 * x, solver=Picard(rtol=1e-5)
    )
    assert found.num_evals.min() < found.num_evals.max() <= found.num_evals.min() + 2
    # One evaluation is the check of undeclared tensors.
    assert f.rows == [48] * (int(found.num_evals.max()) + 1)


HIDDEN = [torch.full((4,), 0.5)]


class ReadsAList(torch.nn.Linear):
    def forward(self, z, x=0.0):
        return torch.tanh(0.3 * super().forward(z) + x + HIDDEN[0])


@pytest.mark.parametrize("layer", [True, False])
def test_a_tensor_that_comes_to_require_grad_later_is_told_though_the_map_was_asked(monkeypatch, layer):
    block, x = ReadsAList(4, 4), torch.zeros(2, 3, 4)
    settle = ia.Equilibrium(block)

    def answer():
        return settle(x) if layer else solve(FixedPointMap(block, event_ndim=2), x).value

    monkeypatch.setitem(globals(), "HIDDEN", [torch.full((4,), 0.5)])
    answer().sum().backward()
    HIDDEN[0].requires_grad_()
    with pytest.raises(ValueError, match="reads `HIDDEN`, which requires grad but is not declared"):
        answer()

"""Every adjoint under the contract; the exact ones against each other and against torchdeq; what each refuses."""

import itertools
import warnings

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    FixedPointMap,
    GradientDescent,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    NewtonKrylov,
    OneStep,
    Phantom,
    Picard,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.linear import CG, GMRES, MINRES, Neumann
from implicit_attention.testing.adjoint import AdjointContract, attention_energy, attention_inputs
from implicit_attention.testing.numerics import dense_gradients, random, relative_error

TIGHT = {"rtol": 0.0, "atol": 1e-13, "max_steps": 500}


class TestImplicitByDefault(AdjointContract):
    adjoint = Implicit()
    accuracy = 1e-8
    solver = Anderson(**TIGHT)


class ForFloat32:
    def _for_float32(self):
        return Implicit()


class TestImplicitByCG(ForFloat32, AdjointContract):
    adjoint = Implicit(CG(rtol=1e-12))
    any_map = False


class TestImplicitByMINRES(ForFloat32, AdjointContract):
    adjoint = Implicit(MINRES(rtol=1e-12))
    any_map = False


class TestImplicitByGMRES(ForFloat32, AdjointContract):
    adjoint = Implicit(GMRES(rtol=1e-12))


class TestImplicitByNeumann(ForFloat32, AdjointContract):
    adjoint = Implicit(Neumann(rtol=1e-12))


class TestUnrolledPicard(AdjointContract):
    adjoint = Unrolled()
    solver = Picard(rtol=0.0, atol=0.0, max_steps=60)
    through_initial = True


class TestUnrolledAnderson(AdjointContract):
    adjoint = Unrolled()
    solver = Anderson(rtol=0.0, atol=1e-13, max_steps=100)
    any_map = False
    accuracy = 1e-6
    through_initial = True


class TestOneStep(AdjointContract):
    adjoint = OneStep()
    accuracy = 1.0


class TestPhantom(AdjointContract):
    adjoint = Phantom(steps=5, damping=0.1)
    accuracy = 0.3


EXACT = [
    Implicit(CG(rtol=1e-12)),
    Implicit(MINRES(rtol=1e-12)),
    Implicit(GMRES(rtol=1e-12)),
    Implicit(Neumann(rtol=1e-13)),
]


def gradients(adjoint, solver):
    inputs = attention_inputs()
    value = solve(attention_energy(*inputs), inputs[1].detach(), solver=solver, adjoint=adjoint).value
    return torch.autograd.grad((value * random(2, 3, 5, seed=7)).sum(), inputs)


@pytest.mark.cases(4)
@pytest.mark.parametrize("adjoint", EXACT, ids=repr)
@pytest.mark.parametrize(
    "solver",
    [Anderson(**TIGHT), Broyden(**TIGHT), NewtonKrylov(**TIGHT), Picard(**TIGHT)],
    ids=lambda s: type(s).__name__,
)
def test_implicit_gradient_equals_600_unrolled_steps(adjoint, solver):
    unrolled = gradients(Unrolled(), Picard(rtol=0.0, atol=0.0, max_steps=600))
    for got, truth in zip(gradients(adjoint, solver), unrolled, strict=True):
        assert relative_error(got, truth) < 1e-10


def test_implicit_gradient_equals_that_of_torchdeq():
    from torchdeq import get_deq

    def through_torchdeq():
        inputs = attention_inputs()
        energy = attention_energy(*inputs)
        deq = get_deq(
            f_solver="fixed_point_iter", f_max_iter=500, f_tol=1e-14, ift=True, b_solver="fixed_point_iter",
            b_max_iter=500, b_tol=1e-14,
        )  # fmt: skip
        deq.train()
        states, _ = deq(energy.fixed_point_map, energy.field.detach())
        return torch.autograd.grad((states[-1] * random(2, 3, 5, seed=7)).sum(), inputs)

    for got, truth in zip(gradients(EXACT[0], Anderson(**TIGHT)), through_torchdeq(), strict=True):
        assert relative_error(got, truth) < 1e-10


def test_phantom_errors_fall_with_the_steps_and_one_step_is_the_first():
    truth = torch.cat([g.flatten() for g in gradients(EXACT[0], Anderson(**TIGHT))])

    def error(adjoint):
        return relative_error(torch.cat([g.flatten() for g in gradients(adjoint, Anderson(**TIGHT))]), truth)

    errors = [error(Phantom(steps=k)) for k in (1, 3, 6)]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[0] == pytest.approx(error(OneStep()), rel=1e-9)
    assert error(Phantom(steps=3, damping=0.5)) > errors[1]


def test_query_of_a_bare_memory_gets_exactly_no_gradient():
    """With anchor 0 the query is only where one starts; the reason for the anchor."""
    keys, query = random(7, 5), random(3, 5, seed=1).requires_grad_()
    value = solve(AnchoredEnergy(LogSumExp(keys, 0.4), query, 0.0), query).value
    (gradient,) = torch.autograd.grad(value.sum(), query, allow_unused=True, materialize_grads=True)
    assert gradient.eq(0).all()


def test_initial_state_with_unrolled_gradients_only():
    keys, field = random(7, 5), random(3, 5, seed=1)
    energy = AnchoredEnergy(LogSumExp(keys, 0.4), field, 0.5)
    initial = field.clone().requires_grad_()
    few = solve(energy, initial, solver=GradientDescent(0.5, rtol=0, atol=0, max_steps=2), adjoint=Unrolled())
    (gradient,) = torch.autograd.grad(few.value.sum(), initial)
    assert gradient.abs().min() > 0


def two_keys(sharpness):
    """At z = 0 between two keys: a minimum for small beta, a saddle for large."""
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    return keys, AnchoredEnergy(LogSumExp(keys, sharpness), torch.zeros(1, 2, dtype=torch.float64), 0.0)


def test_a_saddle_is_reported_and_still_differentiated_exactly():
    keys, energy = two_keys(2.0)
    solution = solve(energy, torch.zeros(1, 2, dtype=torch.float64), solver=Picard())
    cotangent = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(solution.value, keys, cotangent)
    assert solution.adjoint.status.tolist() == [Status.UNSTABLE]
    assert solution.adjoint.negative_curvature.all()
    truth, *_ = dense_gradients(energy, solution.value.detach(), cotangent)
    assert relative_error(gradient, truth) < 1e-6


def test_a_minimum_reports_a_converged_adjoint():
    keys, energy = two_keys(0.5)
    solution = solve(energy, torch.zeros(1, 2, dtype=torch.float64), solver=Picard())
    assert solution.adjoint.status is None
    solution.value.sum().backward()
    assert solution.adjoint.status.tolist() == [Status.CONVERGED]
    assert solution.adjoint.residual <= solution.adjoint.tolerance
    assert keys.grad.isfinite().all()


@pytest.mark.parametrize("on_failure", ["raise", "warn", "ignore"])
def test_an_adjoint_that_does_not_converge_is_reported(on_failure):
    inputs = attention_inputs()
    solution = solve(attention_energy(*inputs), inputs[1], adjoint=Implicit(CG(max_steps=1)), on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(
            ConvergenceError, match="adjoint solve by CG, whose gradient is therefore wrong, failed for"
        ):
            solution.value.sum().backward()
    elif on_failure == "warn":
        with pytest.warns(ConvergenceWarning, match="adjoint solve by CG"):
            solution.value.sum().backward()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            solution.value.sum().backward()
    assert (solution.adjoint.status == Status.MAX_STEPS).any()


def test_float32_refuses_tolerances_it_cannot_reach():
    inputs = tuple(t.detach().float().requires_grad_() for t in attention_inputs())
    solution = solve(attention_energy(*inputs), inputs[1], adjoint=Implicit(CG(rtol=1e-9)))
    with pytest.raises(ValueError, match="rtol"):
        solution.value.sum().backward()


def test_undeclared_tensors_that_require_grad_are_named():
    weight = (0.2 * random(5, 5)).requires_grad_()
    layer = torch.nn.Linear(5, 5).double()
    initial = random(3, 5)
    with pytest.raises(ValueError, match="reads `weight`, which requires grad but is not declared"):
        solve(FixedPointMap(lambda z: torch.tanh(z @ weight), event_ndim=1), initial)
    with pytest.raises(ValueError, match="reads the parameters of `layer`"):
        solve(FixedPointMap(lambda z: torch.tanh(layer(z) / 4), event_ndim=1), initial)
    hidden = {"w": weight}
    with pytest.raises(ValueError, match="not declared"):
        solve(FixedPointMap(lambda z: torch.tanh(z @ hidden["w"]), event_ndim=1), initial)
    with torch.no_grad():
        solve(FixedPointMap(lambda z: torch.tanh(z @ weight), event_ndim=1), initial)
    solve(
        FixedPointMap(lambda z: torch.tanh(z @ weight), event_ndim=1), initial, adjoint=Unrolled()
    ).value.sum().backward()
    assert weight.grad.abs().sum() > 0


def test_modules_declare_their_parameters():
    layer = torch.nn.Linear(5, 5).double()
    with torch.no_grad():
        layer.weight.mul_(0.3)
    problem = FixedPointMap(torch.nn.Sequential(layer, torch.nn.Tanh()), event_ndim=1)
    initial = random(3, 5)
    solve(problem, initial, solver=Anderson(**TIGHT)).value.sum().backward()
    implicit = layer.weight.grad.clone()
    layer.zero_grad()
    solve(problem, initial, solver=Picard(rtol=0, atol=0, max_steps=300), adjoint=Unrolled()).value.sum().backward()
    assert relative_error(implicit, layer.weight.grad) < 1e-7


def scaled_tanh(scale, shift):
    return FixedPointMap(lambda z, a, b: a * torch.tanh(z) + b, scale, shift, event_ndim=1)


@pytest.mark.parametrize("kind", [Anderson, Broyden])
@pytest.mark.parametrize("make", ["energy", -3.0, -1.5, 0.9])
def test_unrolled_steps_beyond_a_residual_of_zero_keep_the_gradient(kind, make):
    keys, shift = random(7, 3), random(2, 3 if make == "energy" else 1, seed=1)
    scale = None if make == "energy" else torch.tensor(make, dtype=torch.float64)

    def answer(shift, scale, steps):
        energy = scale is None
        problem = AnchoredEnergy(LogSumExp(keys, 0.5), shift, 0.5) if energy else scaled_tanh(scale, shift)
        solver = kind(rtol=0, atol=0, max_steps=steps)
        return solve(problem, torch.zeros_like(shift), solver=solver, adjoint=Unrolled())

    cotangent = random(*shift.shape, seed=9)
    shift.requires_grad_()
    solution = answer(shift, scale, 60)
    assert (solution.residual <= 2e-16).all()
    (found,) = torch.autograd.grad(solution.value, shift, cotangent)
    problem = AnchoredEnergy(LogSumExp(keys, 0.5), shift, 0.5) if scale is None else scaled_tanh(scale, shift)
    (*_, expected) = (t for t in dense_gradients(problem, solution.value.detach(), cotangent) if t is not None)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [Anderson, Broyden])
def test_from_an_exact_solution_accelerated_steps_have_no_derivative_and_plain_ones_give_theirs(kind):
    weight, start = 0.4 * random(3, 3), torch.zeros(1, 3, dtype=torch.float64)

    def answer(shift, solver):
        problem = FixedPointMap(lambda z, b: torch.tanh(z @ weight + b), shift, event_ndim=1)
        return solve(problem, start, solver=solver, adjoint=Unrolled()).value

    accelerated, plain = (k(rtol=0, atol=0, max_steps=3) for k in (kind, Picard))

    def change(direction):
        return (answer(1e-6 * direction, accelerated) - answer(-1e-6 * direction, accelerated)) / 2e-6

    first, second = torch.eye(3, dtype=torch.float64)[:2]
    apart, together = change(first) + change(second), change(first + second)
    assert (apart - together).norm() > 1e-3 * together.norm()
    gradients = []
    for solver in (accelerated, plain):
        shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        gradients.append(torch.autograd.grad(answer(shift, solver).sum(), shift)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


FORWARD_OR_REVERSE = {"jacfwd": torch.func.jacfwd, "jacrev": torch.func.jacrev, "grad": torch.func.grad}
#: The solution of z = t exp(-z) at t = 1, and its derivatives by t.
LAMBERT = [0.5671432904097838, 0.3618962566348892, -0.2145406463, 0.273668524]


def nested(function, derivatives):
    for name in derivatives:
        function = FORWARD_OR_REVERSE[name](function)
    return function


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_every_nesting_of_forward_and_reverse_mode(order):
    def value(t):
        problem = FixedPointMap(lambda z, t: t * torch.exp(-z), t, event_ndim=1)
        return solve(problem, torch.full_like(t, 0.5).expand(1), solver=Anderson(**TIGHT)).value.sum()

    at = torch.ones((), dtype=torch.float64)
    for derivatives in itertools.product(FORWARD_OR_REVERSE, repeat=order):
        derivative = nested(value, derivatives)
        for found in (derivative(at), *torch.vmap(derivative)(at.expand(2))):
            assert abs(float(found) - LAMBERT[order]) < 1e-9, derivatives


class Squashed(torch.nn.Module):
    def forward(self, z, x, weight):
        return torch.tanh(z @ weight + x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_the_hessians_of_layers_are_the_same_by_every_nesting():
    torch.manual_seed(0)
    tokens, direction = random(2, 1, 5, 4)
    solver = Anderson(rtol=1e-13, atol=0.0, max_steps=500)
    block, weight = Equilibrium(Squashed(), solver=solver), 0.4 * random(4, 4, seed=1)
    for layer in (lambda x: block(x, weight), ImplicitAttention(4, heads=2, solver=solver).double()):
        value = lambda t, layer=layer: layer(tokens + t * direction).square().sum()  # noqa: E731
        at = torch.tensor(0.3, dtype=torch.float64)
        expected = nested(value, ("jacrev", "jacrev"))(at)
        for derivatives in itertools.product(("jacfwd", "jacrev"), repeat=2):
            torch.testing.assert_close(nested(value, derivatives)(at), expected, rtol=1e-9, atol=1e-11)

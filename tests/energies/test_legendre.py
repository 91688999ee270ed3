"""The equilibrium Energy Transformer: an energy whose residual is a gradient in the metric of a layer norm."""

import energy_transformer_truth as truth
import pytest
import torch

from implicit_attention import Anderson, Implicit, LogSumExp, Picard, Status, Unrolled, solve
from implicit_attention.diagnostics import certified_error, diagnose, smallest_curvature, spectral_radius
from implicit_attention.energies import LegendreEnergy, PublishedDynamics
from implicit_attention.linear import CG, GMRES, MINRES
from implicit_attention.potentials import LayerNormPotential, Polynomial, Potential, TokenAttention, TokenMemory
from implicit_attention.solvers import Broyden, GradientDescent, NewtonKrylov
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import check_close, dense_jacobian, random

F64 = torch.float64


def given(
    *, exclude_self: bool = False, mask: torch.Tensor | None = None
) -> tuple[LayerNormPotential, Potential, torch.Tensor]:
    """The inputs of the numbers below."""
    attention = truth.attention(mask=mask, exclude_self=exclude_self)
    return truth.norm(), attention + TokenMemory(Polynomial(truth.MEMORIES, 1.0)), truth.TOKENS


G = truth.norm().mean(truth.TOKENS)
TIGHT = Anderson(rtol=1e-13, atol=1e-13, max_steps=500)


class Contract(EnergyContract):
    def norm(self) -> LayerNormPotential:
        return LayerNormPotential(torch.tensor(1.3, dtype=F64), 0.1 * random(5, seed=3), eps=1e-2)


class TestMemoryAlone(Contract):
    def make(self) -> LegendreEnergy:
        return LegendreEnergy(self.norm(), Polynomial(0.5 * random(7, 5, seed=4), 0.8), random(2, 3, 5, seed=5))


class TestSoftmaxMemory(Contract):
    def make(self) -> LegendreEnergy:
        norm = LayerNormPotential(torch.tensor([0.8, 1.5], dtype=F64), eps=1e-3)
        return LegendreEnergy(norm, LogSumExp(random(2, 7, 5, seed=4), 1.5), 5 * random(2, 3, 5, seed=5))


class TestTokens(Contract):
    def make(self) -> LegendreEnergy:
        w_query, w_key = 0.6 * random(2, 3, 5, seed=6), 0.6 * random(2, 3, 5, seed=7)
        attention = TokenAttention(w_query, w_key, torch.tensor([0.5, 0.9], dtype=F64), exclude_self=True)
        memory = TokenMemory(Polynomial(0.5 * random(7, 5, seed=4), 1.0))
        return LegendreEnergy(self.norm(), attention + memory, random(2, 3, 5, seed=5))


@pytest.mark.parametrize(
    ("exclude_self", "state", "energy", "loss", "gradient", "radius", "stiffness"),
    [
        (
            False,
            [3.464161295029, 1.689443478083, -2.021146385217, -3.748743834513],
            -33.876001545039,
            -1.082106971735,
            [0.125225054967, -0.131003617096, -0.110448574241, 0.116227136370],
            0.344301187712,
            [2.206024, 3.195555, 1.882353],
        ),
        (
            True,
            [-2.854332020790, 0.764981109976, 3.690220016027, 2.240236021116],
            -31.260440285697,
            0.074674606557,
            [0.014514188714, -0.032740546905, 0.017681639483, 0.000544718708],
            0.590986553400,
            [1.871631, 3.091899, 2.250771],
        ),
    ],
    ids=["self attended", "exclude_self"],
)
def test_equilibrium_of_the_ground_truth(exclude_self, state, energy, loss, gradient, radius, stiffness) -> None:
    norm, phi, x = given(exclude_self=exclude_self)
    field = x.clone().requires_grad_()
    problem = LegendreEnergy(norm, phi, field)
    solution = solve(problem, x, solver=TIGHT, adjoint=Implicit(CG(rtol=1e-12)))
    close = {"rtol": 0.0, "atol": 1e-9}
    torch.testing.assert_close(solution.value[0], torch.tensor(state, dtype=F64), **close)
    assert abs(float(problem.energy(solution.value.detach()).detach()) - energy) < 1e-9
    value = (truth.W * problem.activation(solution.value)).sum()
    assert abs(float(value.detach()) - loss) < 1e-9
    (found,) = torch.autograd.grad(value, field)
    torch.testing.assert_close(found[0], torch.tensor(gradient, dtype=F64), **close)
    # A layer norm forgets the mean of its token.
    assert float(found.mean(-1).abs().max()) < 1e-14
    assert abs(float(spectral_radius(problem, solution.value)) - radius) < 1e-9
    s = (solution.value.detach().var(-1, correction=0) + norm.eps).sqrt() / 1.3
    torch.testing.assert_close(s, torch.tensor(stiffness, dtype=F64), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("exclude_self", "step", "energies"),
    [
        (False, 0.1, {0: -22.322269593677, 1: -22.864408669061, 2: -23.193304843125, 12: -24.135020151085}),
        (False, 0.5, {1: -23.509249112478, 2: -23.855684788246, 12: -24.460143756890}),
        (True, 0.1, {0: -11.580532420247, 1: -11.815816369835, 2: -11.968781437212, 12: -12.821166262218}),
        (True, 0.5, {1: -12.161054464563, 2: -12.410745263217, 12: -14.072014715513}),
    ],
)
def test_published_dynamics_of_the_ground_truth(exclude_self: bool, step: float, energies: dict[int, float]) -> None:
    norm, phi, x = given(exclude_self=exclude_self)
    steps = GradientDescent(step_size=step, max_steps=12, rtol=0, atol=0)
    solution = solve(PublishedDynamics(norm, phi), x, solver=steps, adjoint=Unrolled(), trace=True)
    for index, energy in energies.items():
        assert abs(float(solution.trace.energy[index]) - energy) < 1e-9
    assert int(solution.status) == Status.BUDGET


def problem_at_scale(scale: int, seed: int = 0) -> tuple[LegendreEnergy, torch.Tensor]:
    """The five weight scales at which guards were compared, from the published initial weights up."""
    sizes = [(32, 4, 16, 0.002, 0.02), (32, 4, 16, 0.02, 0.1), (32, 4, 16, 0.1, 0.06), (32, 4, 16, 0.3, 0.03)]
    n, h, y, w, xi = [*sizes, (50, 6, 21, 1 / 21, 1.0)][scale]
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    attention = TokenAttention(w * drawn(h, y, 64), w * drawn(h, y, 64), y**-0.5)
    field = drawn(n, 64)
    return LegendreEnergy(
        LayerNormPotential(), attention + TokenMemory(Polynomial(xi * drawn(256, 64), 1.0)), field
    ), field


@pytest.mark.cases(2)
@pytest.mark.parametrize("scale", range(5))
def test_default_solver_needs_no_more_than_plain_steps_and_ends_in_a_minimum(scale: int) -> None:
    problem, start = problem_at_scale(scale)
    plain = solve(problem, start, solver=Picard(rtol=1e-8, max_steps=3000))
    found = solve(problem, start, solver=Anderson(rtol=1e-8, max_steps=3000))
    assert int(found.num_evals) <= int(plain.num_evals)
    residual = torch.linalg.vector_norm(problem.fixed_point_map(found.value) - found.value)
    assert float(residual) <= 1e-8 * float(torch.linalg.vector_norm(found.value)) * (1 + 1e-6)
    assert float(smallest_curvature(problem, found.value, steps=200)) > 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("scale", range(5))
def test_energy_falls_at_every_plain_step(scale: int) -> None:
    problem, state = problem_at_scale(scale, seed=1)
    steps = Picard(rtol=0, atol=0, max_steps=1000 if scale else 100)
    energy = solve(problem, state, solver=steps, adjoint=Unrolled(), on_failure="ignore", trace=True).trace.energy
    rounding = 1e-14 * float(energy.abs().max()) * 64
    assert float((energy[1:] - energy[:-1]).max()) <= rounding


def test_drop_of_a_plain_step_is_the_sum_of_two_divergences() -> None:
    norm, phi, x = given()
    problem = LegendreEnergy(norm, phi, x)
    state = random(3, 4, seed=8)
    mapped = problem.fixed_point_map(state)
    g, after = problem.activation(state), problem.activation(mapped)
    by_phi = phi.value(after) - phi.value(g) - (phi.mean(g) * (after - g)).sum()
    drop = problem.energy(state) - problem.energy(mapped)
    torch.testing.assert_close(drop, problem.divergence(state, mapped) + by_phi, rtol=1e-11, atol=1e-11)


def test_energy_is_bounded_below() -> None:
    """Even where the anchored energy of the same potential falls without end."""
    memory = Polynomial(3 * random(9, 4, seed=1), 1.0, degree=3)
    problem = LegendreEnergy(LayerNormPotential(), memory, random(2, 4, seed=2))
    for size in (1.0, 1e3, 1e6):
        assert float(problem.energy(size * random(2, 4, seed=3)).min()) > -1e4


@pytest.mark.parametrize("method", [None, CG(rtol=1e-12), MINRES(rtol=1e-12), GMRES(rtol=1e-12)], ids=str)
def test_gradients_of_every_tensor_by_every_linear_solver(method) -> None:
    """Against a thousand recorded plain steps."""
    norm, phi, x = given()
    problem = LegendreEnergy(norm, phi, x)
    leaves = [t.clone().requires_grad_() for t in problem.tensors()]

    def loss(adjoint, solver) -> tuple[torch.Tensor, ...]:
        moved = problem.replace(*leaves)
        value = solve(moved, x, solver=solver, adjoint=adjoint).value
        return torch.autograd.grad((truth.W * moved.activation(value)).sum(), leaves)

    expected = loss(Unrolled(), Picard(rtol=0, atol=0, max_steps=200))
    for found, slow in zip(loss(Implicit(method), TIGHT), expected, strict=True):
        torch.testing.assert_close(found, slow, rtol=1e-8, atol=1e-9)


def small() -> tuple[LegendreEnergy, list[torch.Tensor]]:
    attention = TokenAttention(
        0.4 * random(2, 2, 3, seed=1), 0.4 * random(2, 2, 3, seed=2), torch.tensor([0.7, 1.1], dtype=F64)
    )
    memory = TokenMemory(LogSumExp(random(4, 3, seed=3), 0.9))
    norm = LayerNormPotential(torch.tensor(0.8, dtype=F64), 0.2 * random(3, seed=4), eps=1e-2)
    problem = LegendreEnergy(norm, attention + memory, random(2, 2, 3, seed=5))
    return problem, [t.clone().requires_grad_() for t in problem.tensors()]


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, GMRES(rtol=1e-12)], ids=str)
def test_first_and_second_derivatives(method) -> None:
    problem, leaves = small()
    start = problem.field.clone()

    def solved(*tensors: torch.Tensor) -> torch.Tensor:
        moved = problem.replace(*tensors)
        return moved.activation(solve(moved, start, solver=TIGHT, adjoint=Implicit(method)).value)

    assert torch.autograd.gradcheck(solved, leaves)
    assert torch.autograd.gradgradcheck(solved, leaves)


def test_vmap_agrees_with_a_loop() -> None:
    problem, (*tensors, field) = small()
    tensors, fields = [t.detach() for t in tensors], torch.stack([field.detach(), 1.5 * field.detach()])

    def of_field(field: torch.Tensor) -> torch.Tensor:
        return solve(problem.replace(*tensors, field), problem.field, solver=TIGHT).value

    for function in (of_field, torch.func.grad(lambda f: of_field(f).square().sum())):
        looped = torch.stack([function(f) for f in fields])
        torch.testing.assert_close(torch.vmap(function)(fields), looped, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("solver", [Broyden(rtol=1e-10), NewtonKrylov(rtol=1e-10), Picard(rtol=1e-10)], ids=str)
def test_other_solvers_end_at_the_same_minimum(solver) -> None:
    norm, phi, x = given()
    problem = LegendreEnergy(norm, phi, x)
    expected = solve(problem, x, solver=TIGHT).value
    torch.testing.assert_close(solve(problem, x, solver=solver).value, expected, rtol=1e-8, atol=1e-8)


def test_a_saddle_is_found_and_its_gradient_told() -> None:
    """Between two memories that mirror each other a state that neither pulls is stationary and no minimum."""
    keys = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]], dtype=F64)
    field = torch.tensor([[0.1, 0.1, -0.2]], dtype=F64, requires_grad=True)
    problem = LegendreEnergy(LayerNormPotential(), LogSumExp(4 * keys, 1.0), field)
    solution = solve(problem, field.detach(), solver=Picard(rtol=1e-12, atol=1e-12), on_failure="ignore")
    assert bool(solution.converged.all())
    assert float(smallest_curvature(problem, solution.value)) < 0
    assert bool(diagnose(problem, solution).saddle.all())
    upwards = torch.tensor([[0.3, -0.2, 0.9]], dtype=F64)
    (gradient,) = torch.autograd.grad((solution.value * upwards).sum(), field)
    assert solution.adjoint.status.tolist() == [Status.UNSTABLE]
    # Exact all the same, by MINRES.
    jacobian = dense_jacobian(problem, solution.value.detach())[0]
    expected = torch.linalg.solve(torch.eye(3, dtype=F64) - jacobian.mT, upwards[0])
    torch.testing.assert_close(gradient[0], expected, rtol=1e-8, atol=1e-9)


def test_curvature_in_the_metric_is_that_of_the_symmetric_matrix() -> None:
    norm, phi, x = given()
    problem = LegendreEnergy(norm, phi, x)
    state = random(3, 4, seed=8)
    eigenvalues = torch.linalg.eigvals(dense_jacobian(problem, state))
    assert float(eigenvalues.imag.abs().max()) < 1e-10
    assert abs(float(smallest_curvature(problem, state)) - float((1 - eigenvalues.real).min())) < 1e-9


@pytest.mark.parametrize("event_ndim", [1, 2])
def test_lipschitz_bound_holds_where_the_map_leads_to(event_ndim: int) -> None:
    memory = LogSumExp(0.5 * random(6, 5, seed=1), 1.0)
    phi = memory if event_ndim == 1 else TokenMemory(memory)
    norm = LayerNormPotential(1.3, 0.2 * random(5, seed=2))
    problem = LegendreEnergy(norm, phi, 40 * random(2, 3, 5, seed=3))
    bound = problem.lipschitz()
    assert bound.shape == (2,)
    assert bool((bound < 1).all())
    for seed in range(20):
        a, b = (problem.fixed_point_map(10 ** (seed % 5 - 2) * random(2, 3, 5, seed=s)) for s in (seed, seed + 50))
        apart = (problem.fixed_point_map(a) - problem.fixed_point_map(b)).norm(dim=-1) / (a - b).norm(dim=-1)
        assert bool((apart <= bound[:, None]).all())
    assert torch.isinf(problem.replace(*problem.tensors()[:-1], 0.1 * problem.field).lipschitz()).all()
    rough = solve(problem, problem.field, solver=Picard(rtol=1e-3))
    exact = solve(problem, problem.field, solver=TIGHT).value
    axes = (-1,) if event_ndim == 1 else (-2, -1)
    distance = torch.linalg.vector_norm(rough.value - exact, dim=axes)
    certified = certified_error(problem, rough)
    assert certified.shape == distance.shape
    assert bool((distance <= certified).all())
    assert bool((certified < 1).all())


def test_no_lipschitz_bound_with_attention() -> None:
    norm, phi, x = given()
    assert LegendreEnergy(norm, phi, x).lipschitz() is None


# Its attention.

GRADIENTS = {
    False: [-2.614210814517, -1.293619124461, 1.611951229669, 2.906493896127],
    True: [-1.976403267136, -1.315578765418, 0.950413992998, 2.213593348303],
}
PRODUCTS = {
    False: [0.370364743646, 0.212716420095, -0.305426973936, -0.593972549847],
    True: [0.357999029715, 0.261000492361, -0.240885268842, -0.572512557939],
}


@pytest.mark.parametrize(("exclude", "energy"), [(False, -16.084745348194), (True, -5.343008174763)])
def test_numbers_of_its_attention(exclude: bool, energy: float) -> None:
    """Of the attention alone, and gradient and curvature with the memory."""
    attention = truth.attention(exclude_self=exclude)
    assert abs(float(-attention.value(G)) - energy) < 1e-9
    _, phi, _ = given(exclude_self=exclude)
    check_close(-phi.mean(G)[0], torch.tensor(GRADIENTS[exclude], dtype=F64), 0, 1e-9)
    check_close(-phi.covariance_product(G, truth.V)[1], torch.tensor(PRODUCTS[exclude], dtype=F64), 0, 1e-9)


def test_numbers_of_attention_on_a_path_graph() -> None:
    attention = truth.attention(mask=torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool())
    assert abs(float(-attention.value(G)) - 8.299383251163) < 1e-9
    expected = torch.tensor([1.2135123715, -0.3531692983, -1.5951487439, -1.3705557908], dtype=F64)
    check_close(-attention.mean(G)[0], expected, 0, 1e-9)


def test_published_gradients_keep_their_digits_at_states_that_grow():
    problem = PublishedDynamics(LayerNormPotential(1.2), LogSumExp(1e-3 * random(6, 4, seed=1), 0.7))
    single, x = problem.replace(*(t.float() for t in problem.tensors())), 1e4 * random(8, 4, seed=2)
    right = problem.gradient(x)
    assert float((single.gradient(x.float()).double() - right).norm() / right.norm()) < 1e-5

"""Naive mean field: known values, its bound, its order, and that all it says is a derivative of its own F."""

import math

import pytest
import torch

from implicit_attention import Anderson, Picard, Status
from implicit_attention.potentials import AmosResponse, LargeDResponse, SphereUnits
from implicit_attention.problem import pullback
from implicit_attention.spins import (
    Enumeration,
    GaussianClosure,
    KineticPlefka,
    MeanField,
    SpinSystem,
    _curvature,
    approximation,
    free_energy,
    magnetization,
    thermodynamics,
)
from implicit_attention.spins._curvature import coupling_bound
from implicit_attention.spins.mean_field import MeanFieldProblem
from implicit_attention.testing.numerics import dense_jacobian, random

FOUR = {(0, 1): 0.30, (0, 2): -0.20, (0, 3): 0.10, (1, 2): 0.25, (1, 3): -0.15, (2, 3): 0.40}
FIELD = (0.20, -0.10, 0.30, 0.05)


def ising(beta, scale=1.0):
    couplings = torch.zeros(4, 4, dtype=torch.float64)
    for (i, j), value in FOUR.items():
        couplings[i, j] = couplings[j, i] = scale * value
    field = torch.tensor(FIELD, dtype=torch.float64)[:, None]
    return SpinSystem(couplings, field, beta, radius=1.0, measure="counting")


def vectors(batch=(2,), sites=4, dim=3, *, strength=0.2, seed=0):
    couplings = strength * random(*batch, sites, sites, seed=seed)
    return (couplings + couplings.mT) / 2, random(*batch, sites, dim, seed=seed + 1)


def test_the_ising_values():
    found = thermodynamics(ising(1.0), MeanField())
    expected = [0.1514109954, -0.0003523460, 0.3348150869, 0.1965294424]
    assert float(found.free_energy) == pytest.approx(-2.844206303196, abs=1e-11)
    assert found.magnetization.flatten().tolist() == pytest.approx(expected, abs=1e-10)
    assert float(found.susceptibility()[2, 0, 3, 0]) == pytest.approx(0.3794142692, abs=1e-9)
    assert float(free_energy(ising(2.0), MeanField())) == pytest.approx(-1.585429858556, abs=1e-10)


def test_the_chain_of_vectors():
    couplings = torch.zeros(4, 4, dtype=torch.float64)
    for i, value in enumerate((0.6, -0.5, 0.8)):
        couplings[i, i + 1] = couplings[i + 1, i] = value
    field = torch.zeros(4, 3, dtype=torch.float64)
    field[:, 0] = math.sqrt(3) * torch.tensor([0.4, -0.2, 0.3, 0.1], dtype=torch.float64)
    system = SpinSystem(couplings, field, 1.2)
    assert float(-1.2 * free_energy(system, MeanField()) / 3) == pytest.approx(0.4253680091, abs=1e-10)


@pytest.mark.parametrize(
    ("dim", "expected"), [(2, 0.7241587176), (3, 0.6757069001), (8, 0.6139205376), (64, 0.5818695038)]
)
def test_curie_weiss_below_the_transition(dim, expected):
    """With the diagonal kept every site is alike, and a field of 1e-12 only chooses the direction."""
    field = torch.zeros(5, dim, dtype=torch.float64)
    field[:, 0] = 1e-12
    system = SpinSystem(torch.full((5, 5), 0.2, dtype=torch.float64), field, 1.5)
    m = magnetization(system, MeanField(solver=Picard(rtol=1e-12, atol=0.0, max_steps=5000)))
    assert (m[:, 0] / math.sqrt(dim)).tolist() == pytest.approx([expected] * 5, abs=1e-9)


@pytest.mark.parametrize("beta", [0.3, 1.0, 2.0])
def test_the_free_energy_is_an_upper_bound(beta):
    """Without a diagonal, which mean field reads as m_i^2 where it is R^2."""
    for seed in range(5):
        couplings, field = vectors(sites=6, dim=1, strength=0.5, seed=seed)
        couplings = couplings - torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))
        system = SpinSystem(couplings, field, beta, radius=1.0)
        bound = free_energy(system, MeanField(), on_failure="ignore")
        assert bool((bound >= free_energy(system, Enumeration()) - 1e-9).all())


def test_it_is_off_in_second_order_of_the_couplings():
    scales = torch.tensor([0.02, 0.04, 0.08], dtype=torch.float64)
    errors = torch.stack(
        [
            (free_energy(ising(1.0, s), MeanField()) - free_energy(ising(1.0, s), Enumeration())).abs()
            for s in scales.tolist()
        ]
    )
    slopes = errors.log().diff() / scales.log().diff()
    assert slopes.tolist() == pytest.approx([2.0, 2.0], abs=0.1)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse()])
def test_the_linearization_is_the_jacobian(response, block):
    couplings, field = vectors()
    if block:
        couplings = 0.2 * random(4, 4, 3, 3, seed=7)
        couplings = couplings + couplings.transpose(0, 1).mT
    beta = torch.tensor([0.7, 1.3], dtype=torch.float64)
    problem = MeanFieldProblem(SpinSystem(couplings, field, beta), response)
    z, u = random(2, 4, 3, seed=3), random(2, 4, 3, seed=4)
    linear, jacobian = problem.linearize(z), dense_jacobian(problem, z)
    flat = u.reshape(2, -1, 1)
    torch.testing.assert_close(linear.jvp(u).reshape(2, -1, 1), jacobian @ flat, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(linear.vjp(u).reshape(2, -1, 1), jacobian.mT @ flat, rtol=1e-9, atol=1e-10)
    for fast, slow in zip(linear.vjp_tensors(u), pullback(problem, z, u), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse()])
def test_magnetizations_solve_their_equation(response):
    couplings, field = vectors()
    system = SpinSystem(couplings, field, 0.8)
    m = magnetization(system, MeanField(response=response))
    answer = response.magnetization(field + couplings @ m, 0.8, system.radius)
    torch.testing.assert_close(m, answer, rtol=1e-8, atol=1e-9)


def test_the_large_d_response_has_its_radius():
    couplings, field = vectors(dim=8)
    m = magnetization(SpinSystem(couplings, field, 0.8, radius="bessel"), MeanField(response=LargeDResponse()))
    assert bool((m.norm(dim=-1) < math.sqrt(3)).all())
    with pytest.raises(ValueError, match="radius"):
        free_energy(SpinSystem(couplings, field, 0.8), MeanField(response=LargeDResponse()))


@pytest.mark.slow
def test_every_output_is_differentiable_twice():
    couplings, field = vectors(batch=(1,), sites=3, dim=2)
    symmetric = couplings[0]
    method = MeanField(solver=Anderson(rtol=1e-13, atol=1e-14, max_steps=1000))

    def outputs(field, half, beta):
        found = thermodynamics(SpinSystem(half + half.mT, field, beta), method)
        return found.free_energy, found.internal_energy, found.heat_capacity, found.magnetization

    arguments = [
        field.requires_grad_(),
        (symmetric / 2).requires_grad_(),
        torch.tensor([0.9]).double().requires_grad_(),
    ]
    assert torch.autograd.gradcheck(outputs, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: outputs(*a)[::3], arguments, fast_mode=True)


def test_samples_do_not_see_each_other():
    couplings, field = vectors()
    alone = magnetization(SpinSystem(couplings[1:], field[1:]), MeanField())
    spoiled = field.clone()
    spoiled[0, 1] = math.nan
    found = thermodynamics(SpinSystem(couplings, spoiled), MeanField(), on_failure="ignore")
    assert found.report.status.tolist() == [Status.NONFINITE, Status.CONVERGED]
    # One is the derivative of log Z and the other what the solver found: they agree to its tolerance.
    torch.testing.assert_close(found.magnetization[1:], alone, rtol=1e-9, atol=1e-10)


def test_options_count_and_are_checked():
    couplings, field = vectors(dim=2)
    system = SpinSystem(couplings, field)
    exact = free_energy(system, MeanField())
    assert not torch.equal(free_energy(system, MeanField(response=AmosResponse())), exact)
    assert not torch.equal(free_energy(system, MeanField(solver=Picard(rtol=1e-2))), exact)
    for name in ("response", "solver", "adjoint"):
        with pytest.raises(TypeError, match=f"`{name}` must be (None or )?a"):
            MeanField(**{name: "exact"})
    with pytest.raises(ValueError, match=r"`couplings` must be symmetric .* for MeanField"):
        free_energy(SpinSystem(random(4, 4), field), MeanField())


def _couplings(kind, n, seed):
    noise = random(3, n, n, seed=seed)
    if kind == "softmax":
        rows = torch.softmax(4 * noise, -1)
        return (rows + rows.mT) / 2
    if kind == "asymmetric":
        return noise * (noise > 0.5)
    if kind == "low rank":
        return noise[..., :2] @ noise[..., :2].mT
    chain = torch.diag_embed(noise[..., 1:, 0], 1)
    return chain + chain.mT


@pytest.mark.parametrize("kind", ["softmax", "asymmetric", "low rank", "chain"])
@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_the_norm_of_couplings_is_below_its_bound(kind, n):
    for seed in range(10):
        couplings = _couplings(kind, n, seed)
        bound = coupling_bound(SpinSystem(couplings, random(3, n, 2)))
        radius = torch.linalg.eigvals(couplings).abs().amax(-1)
        assert bool((bound >= radius).all())
        if kind == "softmax":
            assert bool((bound <= 1.6 * radius + 1e-3).all())
        # Where sums of rows are enough, no more is done.
        sums = couplings.abs().sum(-1).amax(-1)
        at_once = coupling_bound(SpinSystem(couplings, random(3, n, 2)), enough=1.01 * sums + 1e-9)
        torch.testing.assert_close(at_once, sums, rtol=1e-6, atol=0)
        squares = torch.tensor(0.7, dtype=torch.float64)
        with_squares = coupling_bound(SpinSystem(couplings, random(3, n, 2)), squares=squares)
        exact = torch.linalg.eigvals(couplings.abs() + squares * couplings.square()).abs().amax(-1)
        assert bool((with_squares >= exact).all())


def test_the_norm_of_matrices_for_pairs_is_below_its_bound():
    blocks = random(5, 5, 3, 3)
    flat = blocks.transpose(1, 2).reshape(15, 15)
    bound = coupling_bound(SpinSystem(blocks, random(2, 5, 3)))
    assert bool((bound >= torch.linalg.eigvals(flat).abs().amax()).all())


@pytest.mark.parametrize(
    "method",
    [
        MeanField(),
        MeanField(response=AmosResponse()),
        KineticPlefka(),
        GaussianClosure(),
        GaussianClosure(response=AmosResponse()),
    ],
    ids=repr,
)
def test_where_steps_contract_neither_damping_nor_a_verdict_costs_a_product(method, monkeypatch):
    couplings, field = vectors()
    system = SpinSystem(couplings, field, torch.tensor([0.9, 1.0], dtype=field.dtype))
    with monkeypatch.context() as patch:
        # The answer of the general path.
        patch.setattr(type(method), "contracting", lambda self, system: None)
        settled, slow = magnetization(system, method, check="stability", return_answer=True)

    def refused(*args, **options):
        raise AssertionError("asked for")

    for name in ("extreme_eigenvalues", "ritz_radius"):
        monkeypatch.setattr(_curvature, name, refused)
    monkeypatch.setattr(approximation, "_settled", refused)
    m, quick = magnetization(system, method, return_answer=True)
    torch.testing.assert_close(m, settled, rtol=0, atol=1e-10)
    assert bool((quick.report.num_evals < slow.report.num_evals).all())
    if isinstance(method, MeanField):
        assert bool(method.answer(system, check="stability").report.converged.all())
    # Stronger couplings are no longer certain.
    with pytest.raises(AssertionError, match="asked for"):
        magnetization(SpinSystem(3 * couplings, field), method)


def test_a_sample_that_contracts_has_its_bits_beside_one_that_does_not():
    couplings, field = vectors()
    both = MeanField().answer(SpinSystem(torch.stack([couplings[0], 8 * couplings[0]]), field))
    alone = MeanField().answer(SpinSystem(couplings[:1], field[:1]))
    assert both.report.num_evals[0] == alone.report.num_evals[0] < both.report.num_evals[1]
    torch.testing.assert_close(both.magnetization[0], alone.magnetization[0], rtol=0, atol=1e-15)


def test_an_answer_starts_the_next_solve():
    couplings, field = vectors()
    system = SpinSystem(2 * couplings, field)
    m, answer = magnetization(system, MeanField(solver=Anderson(rtol=1e-10)), return_answer=True)
    again = magnetization(
        system, MeanField(solver=Anderson(rtol=1e-9)), initial=answer.magnetization, return_answer=True
    )
    assert torch.equal(m, answer.magnetization)
    assert again[1].report.num_evals.tolist() == [1, 1]
    # Couplings that are a function of the field answer, too; <s_i> is told beside the total.
    total, answer = magnetization(SpinSystem(lambda h: h @ h.mT / 20, field), MeanField(), return_answer=True)
    direct, through = magnetization(SpinSystem(lambda h: h @ h.mT / 20, field), MeanField(), split=True)
    torch.testing.assert_close(answer.magnetization, direct)
    torch.testing.assert_close(total, direct + through)
    assert float(through.abs().max()) > 1e-3

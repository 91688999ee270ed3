"""The Gaussian-field closure: its equations, the average of tanh, and how near it is to chains."""

import math

import numpy as np
import pytest
import torch

from implicit_attention.potentials import AmosResponse, SphereUnits
from implicit_attention.spins import (
    GaussianClosure,
    KineticPlefka,
    SpinSystem,
    magnetization,
    stationary_law,
    stationary_state,
)
from implicit_attention.testing.numerics import random, relative_error

pytestmark = pytest.mark.cases(2)


def gaussian_couplings(sites, seed):
    return random(sites, sites, seed=seed) / math.sqrt(sites)


def by_quadrature(mean, variance, nodes=4001, reach=12.0):
    """<tanh> by equal steps, right to rounding while the standard deviation is below about 10."""
    z = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    weight = torch.softmax(-z.square() / 2, 0)
    return (torch.tanh(mean[..., None] + variance.sqrt()[..., None] * z) * weight).sum(-1)


# Equations.


@pytest.mark.parametrize("strength", [0.01, 1.0, 6.0])
def test_the_equation_of_ising_spins(strength):
    beta, radius, couplings, field = 1.3, 1.4, strength * gaussian_couplings(6, seed=1), random(6, 1, seed=2)
    m = magnetization(SpinSystem(couplings, field, beta, radius=radius), GaussianClosure())[:, 0]
    local = field[:, 0] + couplings @ m
    spread = couplings.square() @ (radius**2 - m.square())
    scale = beta * radius
    expected = radius * by_quadrature(scale * local, scale**2 * spread)
    torch.testing.assert_close(m, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("response", [SphereUnits(), AmosResponse()])
def test_the_equation_of_vectors(response):
    beta, couplings, field = 1.2, gaussian_couplings(5, seed=1), random(5, 3, seed=2)
    system = SpinSystem(couplings, field, beta, radius=1.5)
    m = magnetization(system, GaussianClosure(response=response))
    local = field + couplings @ m
    length = local.norm(dim=-1, keepdim=True)
    wide = (length.square() + couplings.square() @ (1.5**2 - m.square().sum(-1, keepdim=True))).sqrt()
    # The response to a field of length n along f, shortened to the part along f.
    answer = response.magnetization(local * wide / length, beta, 1.5)
    torch.testing.assert_close(m, answer * length / wide, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dim", [1, 3])
def test_delayed_correlations_are_the_jacobian_times_the_covariance(dim):
    beta, radius, couplings = 1.1, 1.2, gaussian_couplings(4, seed=1)
    system = SpinSystem(couplings, random(4, dim, seed=2), beta, radius=radius)
    state = stationary_state(system, GaussianClosure())
    m = state.magnetization
    local = system.field + couplings @ m
    spread = couplings.square() @ (radius**2 - m.square().sum(-1))
    response = SphereUnits()

    def mean(f, v):
        if dim == 1:
            return radius * by_quadrature(beta * radius * f, (beta * radius) ** 2 * v)
        wide = (f.square().sum() + v).sqrt()
        return response.magnetization((f * wide / f.norm())[None], beta, radius)[0] * f.norm() / wide

    jacobian = torch.stack([torch.func.jacrev(mean)(f, v) for f, v in zip(local, spread, strict=True)])
    # Of C the trace is known, and along f what the Jacobian has there beyond what it has across.
    unit = local / local.norm(dim=-1, keepdim=True)
    along = torch.einsum("ia,iab,ib->i", unit, jacobian, unit) / beta
    trace = jacobian.diagonal(dim1=-2, dim2=-1).sum(-1) / beta
    excess = torch.zeros_like(along) if dim == 1 else along - (trace - along) / (dim - 1)
    outer = excess[:, None, None] * unit[:, :, None] * unit[:, None, :]
    rest = (radius**2 - m.square().sum(-1) - excess) / dim
    covariance = outer + rest[:, None, None] * torch.eye(dim, dtype=torch.float64)
    expected = couplings * torch.einsum("iab,jba->ij", jacobian, covariance)
    torch.testing.assert_close(state.delayed_correlations, expected, rtol=1e-8, atol=1e-10)


def test_many_neighbours_make_the_average_exact():
    """Ising spins that all see s_1 + ... + s_N of free spins: what is left is that the sum is not quite normal."""
    errors = []
    for n in (4, 8):
        couplings = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        couplings[n, :n] = 1.2 / math.sqrt(n)
        field = torch.zeros(n + 1, dtype=torch.float64)
        field[n] = 0.5
        truth = stationary_law(couplings, field).magnetization[n]
        m = [
            magnetization(SpinSystem(couplings, field[:, None]), method)[n, 0]
            for method in (GaussianClosure(), KineticPlefka())
        ]
        errors.append([float((x - truth).abs()) for x in m])
    (near, naive), (nearer, still_naive) = errors
    assert nearer < 0.65 * near
    assert near < 0.1 * naive
    assert nearer < 0.05 * still_naive


# Against chains.


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_it_is_nearer_to_ising_chains_than_expansions_are(beta):
    """Medians over systems of eight sites. At beta = 2 the second order is worse than the first in D."""
    found = []
    for seed in range(7):
        couplings, field = gaussian_couplings(8, seed=seed), 0.5 * random(8, seed=100 + seed)
        law = stationary_law(couplings, field, beta)
        system = SpinSystem(couplings, field[:, None], beta)
        row = []
        for method in (GaussianClosure(), KineticPlefka(), KineticPlefka(order=2)):
            state = stationary_state(system, method, on_failure="ignore")
            row.append(
                [
                    relative_error(state.magnetization[:, 0], law.magnetization),
                    relative_error(state.delayed_correlations, law.delayed),
                    abs(float(state.entropy_production) / law.entropy_production - 1),
                ]
            )
        found.append(row)
    gaussian, first, second = np.median(found, axis=0)
    assert (gaussian < 0.75 * first).all()
    assert (gaussian < 0.75 * second).all()
    assert gaussian[0] < 0.25 * first[0]


def sampled(system, chains=48, steps=120, seed=0):
    """m and D of synchronous dynamics, each step averaged over what its fields leave open."""
    generator = np.random.default_rng(seed)
    couplings, field, beta, radius = system.couplings, system.field, system.beta, system.radius
    response, d = SphereUnits(), field.shape[-1]

    def drawn(local):
        """From exp(beta s . f) on the sphere: the cosine by Wood's rejection, the rest of a normal vector across."""
        length = local.norm(dim=-1, keepdim=True)
        kappa = (beta * radius * length[..., 0]).numpy()
        b = (d - 1) / (2 * kappa + np.sqrt(4 * kappa**2 + (d - 1) ** 2))
        x = (1 - b) / (1 + b)
        cosine, todo = np.empty_like(kappa), np.ones(kappa.shape, dtype=bool)
        while todo.any():
            z = generator.beta((d - 1) / 2, (d - 1) / 2, todo.sum())
            k, c, y = kappa[todo], x[todo], b[todo]
            w = (1 - (1 + y) * z) / (1 - (1 - y) * z)
            level = k * (w - c) + (d - 1) * (np.log1p(-c * w) - np.log1p(-c * c))
            accepted = level >= np.log(generator.random(len(w)))
            cosine[todo] = np.where(accepted, w, np.nan)
            todo[todo] = ~accepted
        w = torch.as_tensor(cosine)[..., None]
        unit = local / length
        across = torch.as_tensor(generator.standard_normal(local.shape))
        across = across - (across * unit).sum(-1, keepdim=True) * unit
        across = across / across.norm(dim=-1, keepdim=True)
        return radius * (w * unit + (1 - w.square()).clamp(min=0).sqrt() * across)

    spins = drawn(field.expand(chains, *field.shape))
    m, later = torch.zeros_like(field), torch.zeros_like(couplings)
    for step in range(steps + 20):
        local = field + couplings @ spins
        if step >= 20:
            mean = response.magnetization(local, beta, radius)
            m += mean.mean(0) / steps
            later += torch.einsum("cid,cjd->ij", mean, spins) / (chains * steps)
        spins = drawn(local)
    return m, later - m @ m.mT


@pytest.mark.parametrize(("beta", "close", "naive", "second"), [(1.0, 0.015, 0.12, 0.06), (2.0, 0.02, 0.17, 0.14)])
def test_it_is_near_to_chains_of_vectors(beta, close, naive, second):
    """64 dimensions, 16 sites, Gaussian couplings: relative errors of m, to which the sample adds about .006."""
    couplings, field = gaussian_couplings(16, seed=0), 0.6 * random(16, 64, seed=1)
    system = SpinSystem(couplings, field, beta, radius="bessel")
    m, delayed = sampled(system)
    state = stationary_state(system, GaussianClosure())
    assert relative_error(state.magnetization, m) < close
    assert relative_error(magnetization(system, KineticPlefka(), on_failure="ignore"), m) > naive
    produced = beta * float(((couplings - couplings.mT) * delayed).sum())
    assert float(state.entropy_production) == pytest.approx(produced, rel=0.08)
    expansion = stationary_state(system, KineticPlefka(order=2), on_failure="ignore")
    near = relative_error(expansion.magnetization, m)
    assert close < near < second
    assert relative_error(state.delayed_correlations, delayed) < 0.7 * relative_error(
        expansion.delayed_correlations, delayed
    )


# What is refused.


@pytest.mark.parametrize("kind", ["any sign", "positive"])
@pytest.mark.parametrize(
    ("response", "dim"), [(SphereUnits(), 1), (SphereUnits(), 2), (SphereUnits(), 5), (AmosResponse(), 3)]
)
def test_where_steps_are_said_to_contract_no_state_has_a_steeper_step(response, dim, kind):
    """By the spectral radius of the Jacobian, by differentiation."""
    method, told = GaussianClosure(response=response), 0
    for seed in range(60):
        couplings = (0.3 + 0.02 * seed) * random(4, 4, seed=seed) / 2
        couplings = couplings.abs() if kind == "positive" else couplings
        beta, radius = 0.5 + 0.02 * seed, dim**0.5
        if not bool(method.contracting(SpinSystem(couplings, random(4, dim), beta))):
            continue
        told += 1
        m = random(60, 4, dim, seed=seed + 200)
        m = 0.999 * radius * m / m.norm(dim=-1, keepdim=True)
        m[40:] *= random(20, 4, 1, seed=seed).sigmoid()
        # Fields near zero, where a spin varies most, and others.
        field = torch.tensor([0.0, 0.3, 2.0]).double().repeat(20)[:, None, None] * random(60, 4, dim) - couplings @ m
        problem = method.problem(SpinSystem(couplings.expand(60, 4, 4), field, beta))

        def step(flat, problem=problem):
            return problem.fixed_point_map(flat.reshape(60, 4, dim)).flatten(1)

        jacobian = torch.stack(
            [torch.func.vjp(step, m.flatten(1))[1](row.expand(60, -1))[0] for row in torch.eye(4 * dim).double()], 1
        )
        assert float(torch.linalg.eigvals(jacobian).abs().max()) < 1
    assert 5 < told < 55


def test_squares_of_couplings_are_summed_in_parts():
    couplings, v = random(2, 300, 300), random(2, 300, 1)
    system = SpinSystem(couplings, random(2, 300, 3))
    torch.testing.assert_close(system.coupled_squares(v), couplings.square() @ v, rtol=1e-12, atol=1e-12)

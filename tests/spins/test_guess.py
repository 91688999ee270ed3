"""Where the Newton steps of the saddle point begin: near the solution of glasses, and harmless elsewhere."""

import math

import pytest
import torch

from implicit_attention import Status
from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy
from implicit_attention.testing.numerics import random


def glass(*batch, n=128, d=64, beta=1.0, seed=0):
    """Couplings of variance 1/N, fields of variance 1."""
    couplings = random(*batch, n, n, seed=seed)
    return SpinSystem((couplings + couplings.mT) / math.sqrt(2 * n), random(*batch, n, d, seed=seed + 1), beta)


def magnet(*batch, n=20, beta=4.0):
    """Of one sign, all the same and cold: not what the guess is made for."""
    couplings = torch.full((n, n), 1 / n, dtype=torch.float64)
    return SpinSystem(couplings, torch.zeros(*batch, n, 3, dtype=torch.float64), beta)


def solved(system):
    """lambda of one sample by explicit inverses: Newton steps, halved until A > 0 and phi falls."""
    k = system.beta * system.couplings
    g = system.beta * system.field / math.sqrt(system.dim)

    def phi(t):
        a = torch.diag(t) - k
        if float(torch.linalg.eigvalsh(a)[0]) <= 0:
            return math.inf
        return float(t.sum() - torch.linalg.slogdet(a).logabsdet + (g * torch.linalg.solve(a, g)).sum()) / 2

    t = k.abs().sum(-1) + 1 + torch.linalg.vector_norm(g, dim=-1)
    for _ in range(30):
        x = torch.linalg.inv(torch.diag(t) - k)
        m = x @ g
        excess = x.diagonal() + m.square().sum(-1) - 1
        step = torch.linalg.solve(x * (x / 2 + m @ m.mT), excess / 2)
        while float(excess.abs().max()) > 1e-6 and phi(t + step) >= phi(t):
            step = step / 2
        t = t + step
    assert float(excess.abs().max()) < 1e-13
    return t


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_a_glass_takes_four_evaluations_and_has_the_answer_of_an_explicit_inverse(beta):
    system = glass(beta=beta)
    _, report = SaddlePoint().log_partition(system)
    assert int(report.num_evals) == 4
    found = SaddlePoint().multipliers(system)
    torch.testing.assert_close(found, solved(system), rtol=1e-12, atol=0)


def test_a_guess_that_is_not_near_changes_nothing():
    assert bool(SaddlePoint().log_partition(magnet(2)).report.converged.all())
    # Curie-Weiss without a field: X_ii from the two eigenvalues of A.
    t = SaddlePoint().multipliers(magnet(2))[0, 0]
    torch.testing.assert_close((19 / t + 1 / (t - 4)) / 20, torch.ones_like(t), rtol=1e-12, atol=0)


def test_each_sample_starts_where_it_is_better():
    """A glass beside a magnet is solved as beside a glass, to the bit."""
    one, other = glass(1, n=20, d=3, beta=0.5), magnet(1, beta=4.0)
    couplings = torch.cat([one.couplings, other.couplings[None]])
    field = torch.cat([one.field, other.field])
    beta = torch.tensor([0.5, 4.0], dtype=torch.float64)
    both = SaddlePoint().log_partition(SpinSystem(couplings, field, beta))
    for i in range(2):
        same = [i, i]
        alone = SaddlePoint().log_partition(SpinSystem(couplings[same], field[same], beta[same]))
        assert torch.equal(both.value[i], alone.value[0])
        assert torch.equal(both.report.num_evals[i], alone.report.num_evals[0])


@pytest.mark.parametrize("name", ["shared", "masked", "block"])
def test_groups_and_masks_are_guessed_near(name):
    n, d = 24, 4
    plain = glass(3, n=n, d=d, beta=0.5)
    mask = torch.arange(n) < 18
    block = random(n, n, d, d, seed=7) / (4 * math.sqrt(n * d))
    system, method = {
        "shared": (SpinSystem(plain.couplings, plain.field, 0.5, mask=mask), SaddlePoint(shared=True)),
        "masked": (SpinSystem(plain.couplings, plain.field, 0.5, mask=mask), SaddlePoint()),
        "block": (SpinSystem(block + block.permute(1, 0, 3, 2), plain.field, 1.0), SaddlePoint()),
    }[name]
    assert int(method.log_partition(system).report.num_evals.max()) <= 5


def test_layouts_of_couplings_and_field_change_no_digit():
    system = glass(3, n=10, d=4, beta=0.8)
    value = free_energy(system, SaddlePoint())
    couplings, field = system.couplings, system.field
    layouts = {
        "transposed": (couplings.mT, field.mT.contiguous().mT),
        "strided": (couplings.repeat_interleave(2, -1)[..., ::2], field.repeat_interleave(3, 0)[::3]),
        "batch last": (couplings.permute(1, 2, 0).contiguous().permute(2, 0, 1), field),
    }
    for name, (j, h) in layouts.items():
        torch.testing.assert_close(
            free_energy(SpinSystem(j, h, 0.8), SaddlePoint()), value, rtol=1e-14, atol=0, msg=name
        )
    one = free_energy(SpinSystem(couplings[0], field[0], 0.8), SaddlePoint())
    expanded = SpinSystem(couplings[0].expand(3, 10, 10), field[0].expand(3, 10, 4), 0.8)
    torch.testing.assert_close(free_energy(expanded, SaddlePoint()), one.expand(3), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("size", "status"), [(1e30, Status.CONVERGED), (1e200, Status.NONFINITE)])
def test_fields_beyond_the_range_of_the_guess_are_solved_from_the_start(size, status):
    system = SpinSystem(glass(n=6, d=3).couplings, size * random(6, 3), 1.0)
    report = SaddlePoint().log_partition(system).report
    assert (int(report.status), int(report.num_evals)) == (status, 2)

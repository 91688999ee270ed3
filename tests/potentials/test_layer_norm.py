"""The Lagrangian of a layer norm."""

import energy_transformer_truth as truth
import mpmath
import pytest
import torch

from implicit_attention.potentials import LayerNormPotential
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract

F64 = torch.float64


class TestNumber(PotentialContract):
    selects = False

    def make(self, dtype: torch.dtype) -> LayerNormPotential:
        return LayerNormPotential(1.3, random(5, seed=3, dtype=dtype), eps=1e-2)


class TestPerBatch(TestNumber):
    def make(self, dtype: torch.dtype) -> LayerNormPotential:
        return LayerNormPotential(torch.tensor([0.7, 2.0], dtype=dtype), eps=1e-2)


def test_numbers_of_the_ground_truth() -> None:
    norm, x = truth.norm(), truth.TOKENS
    expected = [
        [1.079134184804, 1.310376604293, -0.076026928555, -1.713483860542],
        [-1.793104714201, -0.544644863548, 1.137998730805, 1.799750846944],
        [2.096292169630, -0.220812915254, -1.273495247554, -0.001984006821],
    ]
    g = norm.mean(x)
    check_close(g, torch.tensor(expected, dtype=F64), 0, 1e-11)
    assert abs(float(norm.value(x).sum()) - 10.044345335988) < 1e-11
    for conjugate in (norm.conjugate(g), norm.conjugate_at(x), (g * x).sum(-1) - norm.value(x)):
        assert abs(float(conjugate.sum()) + 2.46123607869e-4) < 1e-14


def test_mean_is_torchs_layer_norm() -> None:
    x, delta = 3 * random(2, 4, 7, seed=1), random(7, seed=2)
    expected = torch.nn.functional.layer_norm(x, (7,), torch.full((7,), 1.7, dtype=F64), delta, eps=1e-3)
    check_close(LayerNormPotential(1.7, delta, 1e-3).mean(x), expected, 1e-13)


def test_eigenvalues_of_the_covariance() -> None:
    """gamma/s across x - mean x, gamma eps/s^3 along it, 0 along (1, ..., 1); the root has the square roots."""
    gamma, eps, x = 1.7, 1e-2, random(1, 6, seed=4)
    norm = LayerNormPotential(gamma, eps=eps)
    centred = x - x.mean()
    s = (centred.square().mean() + eps).sqrt()
    across = random(1, 6, seed=5)
    across = across - across.mean() - centred * (across * centred).sum() / centred.square().sum()
    for v, eigenvalue in ((across, gamma / s), (centred, gamma * eps / s**3), (torch.ones_like(x), torch.zeros(()))):
        check_close(norm.covariance_product(x, v), eigenvalue * v, 1e-12)
        check_close(norm.root_product(x, v), eigenvalue.sqrt() * v, 1e-12)


def test_a_token_whose_entries_are_all_the_same() -> None:
    x = torch.full((1, 4), 3.0, dtype=F64)
    norm, v = LayerNormPotential(2.0, eps=1e-4), random(1, 4, seed=1)
    assert torch.equal(norm.mean(x), torch.zeros(1, 4, dtype=F64))
    check_close(norm.covariance_product(x, v), 200.0 * (v - v.mean()), 1e-12)
    check_close(norm.root_product(x, norm.root_product(x, v)), norm.covariance_product(x, v), 1e-12)


def test_conjugate_is_finite_on_a_ball_alone() -> None:
    gamma, delta, eps = 1.3, 0.1 * random(6, seed=2), 1e-2
    norm = LayerNormPotential(gamma, delta, eps)
    for size in (1e-3, 1.0, 1e3):
        x = size * random(4, 6, seed=3)
        g = norm.mean(x)
        found = norm.conjugate(g)
        check_close(found, (g * x).sum(-1) - norm.value(x), 1e-9)
        check_close(found, norm.conjugate_at(x), 1e-7, 1e-9)
        assert bool(((found >= -6 * gamma * eps**0.5) & (found <= 0)).all())
        assert torch.isinf(norm.conjugate(g + 0.1)).all()
    assert torch.isinf(norm.conjugate(delta + 1.1 * (norm.mean(1e6 * random(4, 6, seed=3)) - delta))).all()


def test_divergence_is_its_definition() -> None:
    norm = LayerNormPotential(1.3, 0.2 * random(5, seed=1), eps=1e-2)
    for size in (0.1, 1.0, 100.0):
        a, b = size * random(3, 5, seed=2), random(3, 5, seed=3)
        expected = norm.value(a) - norm.value(b) - (norm.mean(b) * (a - b)).sum(-1)
        check_close(norm.divergence(a, b), expected, 1e-9, 1e-11)
    assert torch.equal(norm.divergence(b, b), torch.zeros(3, dtype=F64))


def exact_divergence(gamma: float, eps: float, *states: list[float]) -> float:
    """In 60 digits."""
    with mpmath.workdps(60):
        a, b = ([mpmath.mpf(e) - mpmath.fsum(x) / len(x) for e in x] for x in states)
        s_a, s_b = (mpmath.sqrt(mpmath.fdot(c, c) / len(c) + eps) for c in (a, b))
        change = mpmath.fsum(y * (x - y) for x, y in zip(a, b, strict=True)) / s_b
        return float(gamma * (len(a) * (s_a - s_b) - change))


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-9])
def test_divergence_of_near_states_keeps_its_digits(apart: float) -> None:
    """Where the definition loses all of them."""
    b = random(1, 5, seed=3)
    a = b + apart * random(1, 5, seed=4)
    exact = exact_divergence(1.5, 0.0625, a[0].tolist(), b[0].tolist())
    found = LayerNormPotential(1.5, eps=0.0625).divergence(a, b).item()
    assert found == pytest.approx(exact, rel=1e-6 if apart < 1e-8 else 1e-9)
    assert found > 0

"""The Lagrangian of a layer norm."""

from fractions import Fraction

import energy_transformer_truth as truth
import pytest
import torch
from layouts import MATRICES, Layouts

from implicit_attention.potentials import LayerNormPotential
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract

F64 = torch.float64


class Contract(PotentialContract):
    selects = False

    def delta(self, dtype: torch.dtype) -> torch.Tensor:
        return random(5, seed=3).to(dtype)


class TestNumber(Contract):
    def make(self, dtype: torch.dtype) -> LayerNormPotential:
        return LayerNormPotential(1.3, self.delta(dtype), eps=1e-2)


class TestPerBatch(Contract):
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
    torch.testing.assert_close(g, torch.tensor(expected, dtype=F64), rtol=0.0, atol=1e-11)
    assert abs(float(norm.value(x).sum()) - 10.044345335988) < 1e-11
    for conjugate in (norm.conjugate(g), norm.conjugate_at(x), (g * x).sum(-1) - norm.value(x)):
        assert abs(float(conjugate.sum()) + 2.46123607869e-4) < 1e-14


def test_mean_is_torchs_layer_norm() -> None:
    x, delta = 3 * random(2, 4, 7, seed=1), random(7, seed=2)
    expected = torch.nn.functional.layer_norm(x, (7,), torch.full((7,), 1.7, dtype=F64), delta, eps=1e-3)
    torch.testing.assert_close(LayerNormPotential(1.7, delta, 1e-3).mean(x), expected, rtol=1e-13, atol=1e-13)


def test_more_than_one_token_is_summed_outside_the_root() -> None:
    """Inside, the gradient would be smaller by about the root of their number."""
    x = random(6, 5, seed=1).requires_grad_()
    norm = LayerNormPotential()
    (gradient,) = torch.autograd.grad(norm.value(x).sum(), x)
    torch.testing.assert_close(gradient, norm.mean(x.detach()), rtol=1e-12, atol=1e-12)


def test_eigenvalues_of_the_covariance() -> None:
    """gamma/s across x - mean x, gamma eps/s^3 along it, 0 along (1, ..., 1); the root has the square roots."""
    gamma, eps, x = 1.7, 1e-2, random(1, 6, seed=4)
    norm = LayerNormPotential(gamma, eps=eps)
    centred = x - x.mean()
    s = (centred.square().mean() + eps).sqrt()
    ones = torch.ones(1, 6, dtype=F64)
    across = random(1, 6, seed=5)
    across = across - across.mean() - centred * (across * centred).sum() / centred.square().sum()
    for v, eigenvalue in ((across, gamma / s), (centred, gamma * eps / s**3), (ones, torch.zeros(()))):
        torch.testing.assert_close(norm.covariance_product(x, v), eigenvalue * v, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.root_product(x, v), eigenvalue.sqrt() * v, rtol=1e-12, atol=1e-12)


def test_a_token_whose_entries_are_all_the_same() -> None:
    x = torch.full((1, 4), 3.0, dtype=F64)
    norm, v = LayerNormPotential(2.0, eps=1e-4), random(1, 4, seed=1)
    assert torch.equal(norm.mean(x), torch.zeros(1, 4, dtype=F64))
    torch.testing.assert_close(norm.covariance_product(x, v), 200.0 * (v - v.mean()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.root_product(x, norm.root_product(x, v)), norm.covariance_product(x, v))


def test_conjugate_is_finite_on_a_ball_alone() -> None:
    gamma, delta, eps = 1.3, 0.1 * random(6, seed=2), 1e-2
    norm = LayerNormPotential(gamma, delta, eps)
    for size in (1e-3, 1.0, 1e3):
        x = size * random(4, 6, seed=3)
        g = norm.mean(x)
        found = norm.conjugate(g)
        torch.testing.assert_close(found, (g * x).sum(-1) - norm.value(x), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found, norm.conjugate_at(x), rtol=1e-7, atol=1e-9)
        assert bool(((found >= -6 * gamma * eps**0.5) & (found <= 0)).all())
        assert torch.isinf(norm.conjugate(g + 0.1)).all()
    assert torch.isinf(norm.conjugate(delta + 1.1 * (norm.mean(1e6 * random(4, 6, seed=3)) - delta))).all()
    assert torch.isnan(norm.conjugate(torch.full((1, 6), torch.nan, dtype=F64))).all()


def test_conjugate_is_a_supremum() -> None:
    norm, g = LayerNormPotential(0.9, eps=1e-2), LayerNormPotential(0.9, eps=1e-2).mean(random(1, 5, seed=1))
    others = [((g * x).sum(-1) - norm.value(x)).item() for x in (3 * random(1, 5, seed=s) for s in range(50))]
    assert max(others) <= norm.conjugate(g).item() + 1e-12


def test_divergence_is_its_definition() -> None:
    norm = LayerNormPotential(1.3, 0.2 * random(5, seed=1), eps=1e-2)
    for size in (0.1, 1.0, 100.0):
        a, b = size * random(3, 5, seed=2), random(3, 5, seed=3)
        expected = norm.value(a) - norm.value(b) - (norm.mean(b) * (a - b)).sum(-1)
        torch.testing.assert_close(norm.divergence(a, b), expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(norm.divergence(b, b), torch.zeros(3, dtype=F64))


def exact_divergence(gamma: Fraction, eps: Fraction, a: list[Fraction], b: list[Fraction]) -> Fraction:
    """In rational numbers, with roots to 60 digits."""

    def parts(x: list[Fraction]) -> tuple[list[Fraction], Fraction]:
        mean = sum(x, Fraction(0)) / len(x)
        square = sum(((e - mean) ** 2 for e in x), Fraction(0)) / len(x) + eps
        root = Fraction(float(square) ** 0.5)
        for _ in range(6):
            root = ((root + square / root) / 2).limit_denominator(10**60)
        return [e - mean for e in x], root

    (_, s_a), (c, s_b) = parts(a), parts(b)
    change = sum((gamma * ci / s_b * (ai - bi) for ci, ai, bi in zip(c, a, b, strict=True)), Fraction(0))
    return len(a) * gamma * (s_a - s_b) - change


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-9])
def test_divergence_of_near_states_keeps_its_digits(apart: float) -> None:
    """Where the definition loses all of them."""
    b = random(1, 5, seed=3)
    a = b + apart * random(1, 5, seed=4)
    exact = exact_divergence(Fraction(1.5), Fraction(0.0625), *([Fraction(e) for e in t[0].tolist()] for t in (a, b)))
    found = LayerNormPotential(1.5, eps=0.0625).divergence(a, b).item()
    assert found == pytest.approx(float(exact), rel=1e-6 if apart < 1e-8 else 1e-9)
    assert found > 0


@pytest.mark.parametrize("kind", MATRICES)
def test_layouts(kind: str) -> None:
    draw = Layouts(0)
    norm, v = LayerNormPotential(1.3, random(5, seed=1)), random(2, 3, 5, seed=3)
    laid = MATRICES[kind](draw.normal, (2, 3, 5), draw.rng)
    x = laid.clone(memory_format=torch.contiguous_format)
    for method in (norm.value, norm.mean, norm.conjugate_at, lambda z: norm.root_product(z, v)):
        torch.testing.assert_close(method(laid), method(x), rtol=1e-12, atol=1e-12)

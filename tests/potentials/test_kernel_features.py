"""Features of KernelPotential: random ones against what they approximate, limits, memory, and features of users."""

import math

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, Implicit, LogSumExp, solve
from implicit_attention.linear import GMRES
from implicit_attention.potentials import EluFeatures, KernelPotential, PositiveFeatures, ReluFeatures
from implicit_attention.testing.numerics import check_close, random, relative_error
from implicit_attention.testing.potential import Allocations

KEYS, Z = random(2, 7, 5), random(2, 3, 5, seed=1)


def positive(count, dim=5, seed=0, **options):
    return PositiveFeatures(dim, count, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("orthogonal", [True, False], ids=["orthogonal", "independent"])
def test_the_error_of_random_features_falls_like_their_number_to_the_minus_half(orthogonal):
    # Short vectors: of the kernel of longer ones (|x| about 1.6) 4096 directions tell next to nothing.
    keys, z, beta = 0.3 * KEYS, 0.3 * Z, 0.5
    exact = LogSumExp(keys, beta).mean(z)
    counts, errors = torch.tensor([64.0, 256.0, 1024.0, 4096.0]), []
    for count in counts.tolist():
        draws = [positive(int(count), seed=seed, orthogonal=orthogonal) for seed in range(40)]
        found = torch.stack([KernelPotential(keys, beta, features=features).mean(z) for features in draws])
        errors.append((found - exact).square().mean().sqrt())
    design = torch.stack((counts.log(), torch.ones(4)), -1).double()
    slope = float(torch.linalg.lstsq(design, torch.stack(errors).log()[:, None]).solution[0])
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.25 * exact.square().mean().sqrt()


def test_orthogonal_features_are_orthogonal_normal_and_better():
    w = positive(5 * 4000).directions
    gram = w.view(4000, 5, 5) @ w.view(4000, 5, 5).mT
    check_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), 1e-12)
    # Five standard errors of the first, second and fourth moments of normal numbers, and of their products.
    assert w.mean(0).abs().max() < 5 / math.sqrt(20000)
    assert (w.mT @ w / 20000 - torch.eye(5)).abs().max() < 5 * math.sqrt(2 / 20000)
    assert (w.pow(4).mean(0) - 3).abs().max() < 5 * math.sqrt(96 / 20000)
    assert ((w[:, 0] * w[:, 1]).square().mean() - 1).abs() < 5 * math.sqrt(8 / 20000)
    x, y = 0.5 * random(5), 0.5 * random(5, seed=1)
    errors = [
        torch.stack([(f(x) * f(y)).sum() - (x @ y).exp() for f in draws]).square().mean()
        for draws in ([positive(5, seed=s, orthogonal=o) for s in range(2000)] for o in (True, False))
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("features", [EluFeatures(), positive(64)], ids=["elu", "positive"])
@pytest.mark.parametrize("scale", [1e3, 1e6, -1e6])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_overflows_far_out(features, scale, causal):
    """exp(|x|) would; the answer is the limit, in which one feature has all the weight."""
    keys, z, bias = scale / 1e3 * random(2, 3, 5), scale * Z, torch.tensor([900.0, 0.0, -900.0]).double()
    phi = KernelPotential(keys, 0.7, features=features, bias=bias, causal=causal)
    assert all(t.isfinite().all() for t in (*phi.evaluate(z), phi.covariance_product(z, z)))
    if not isinstance(features, EluFeatures):
        # Near the best of the w: Phi(z) = max_i (<w_i, z>/sqrt(beta) + log S_i/beta) - |z|^2/2 at leading order.
        best = (z @ features.directions.mT + phi.state / math.sqrt(0.7)).argmax(-1)
        check_close(phi.mean(z), features.directions[best] / math.sqrt(0.7) - z, 1e-6, 1e-6 * abs(scale))


def test_an_early_key_is_not_lost_beside_later_larger_ones():
    """A running sum with one shift for all would be 0 at the first rows, in float32 and float64."""
    keys, z, values = random(6, 5), random(6, 5, seed=1), random(6, 3, seed=2)
    bias = torch.tensor([-2000.0, -1500.0, -1000.0, 0.0, 1000.0, 1200.0]).double()
    streamed = KernelPotential(keys, 0.7, features=positive(16), bias=bias, causal=True)
    for n in range(6):
        alone = KernelPotential(keys[: n + 1], 0.7, features=positive(16), bias=bias[: n + 1])
        expected = alone.value(z)[n], alone.mean(z)[n], alone.readout(z, values[: n + 1])[n]
        check_close((streamed.value(z)[n], streamed.mean(z)[n], streamed.readout(z, values)[n]), expected, 1e-12)


@pytest.mark.parametrize("features", [EluFeatures(), torch.exp], ids=["elu", "function"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_of_pairs(features, causal):
    keys, z = random(512, 5).requires_grad_(), random(512, 5, seed=1).requires_grad_()
    with Allocations() as seen:
        phi = KernelPotential(keys, 0.7, features=features, causal=causal)
        (phi.value(z).sum() + phi.mean(z).square().sum() + phi.readout(z, random(512, 4)).square().sum()).backward()
    # The largest is a chunk of pairs, 32 x 32 per feature, or numbers per query and feature, twice in a running sum.
    assert seen.largest <= 32 * 32 * 16


def test_features_of_a_module_are_declared_and_learned():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 6, dtype=torch.float64), torch.nn.Softplus())
    energy = AnchoredEnergy(KernelPotential(KEYS, 0.7, features=module), Z, 0.5)
    z, state = Z, solve(energy, Z, solver=Anderson(rtol=1e-12), adjoint=Implicit(GMRES(rtol=1e-12))).value
    for _ in range(100):
        z = 0.5 * Z + 0.5 * KernelPotential(KEYS, 0.7, features=module).mean(z)
    got, expected = (torch.autograd.grad(t.square().sum(), module[0].weight)[0] for t in (state, z))
    assert relative_error(got, expected) < 1e-8


def test_features_of_a_subclass_are_read_once_per_key_and_evaluation():
    shapes = []

    class Counting(EluFeatures):
        def log(self, x):
            shapes.append(x.shape[-2])
            return super().log(x)

    phi = KernelPotential(KEYS, 0.7, features=Counting())
    for _ in range(3):
        phi.value(Z)
    assert shapes == [7, 3, 3, 3]
    # `pullback` was derived from the `log` that the subclass overrides: it is found by differentiation.
    check_close(phi.mean(Z), KernelPotential(KEYS, 0.7, features=EluFeatures()).mean(Z), 1e-12)
    assert phi.bounded_below(math.inf) is None


@pytest.mark.parametrize("features", [EluFeatures(), ReluFeatures(), positive(16)])
def test_the_energy_is_bounded_below_at_every_scale(features):
    # Phi grows like log |z| at most: E/|z|^2 goes to 1/2 or more along every ray.
    ray, phi = random(2, 50, 5, seed=1), KernelPotential(KEYS, 0.7, features=features)
    assert phi.bounded_below(math.inf)
    assert (phi.value(1e5 * ray / ray.norm(dim=-1, keepdim=True)) < 2 / 0.7 * math.log(1e6)).all()


def test_where_no_entry_is_positive_in_a_key_too_everything_is_zero_and_negative_features_are_nan():
    z = torch.tensor([[-1.0, 3.0], [0.5, 3.0]], dtype=torch.float64, requires_grad=True)
    phi = KernelPotential(torch.tensor([[1.0, -1.0], [2.0, -0.5]]).double(), 0.7, features=ReluFeatures())
    value, mean = phi.evaluate(z)
    out = phi.readout(z, torch.eye(2).double())
    check_close(out, torch.tensor([[0.0, 0.0], [1 / 3, 2 / 3]], dtype=torch.float64), 1e-12)
    assert (value[1].exp() ** 0.7).item() == pytest.approx(0.7 * 0.5 * 3, rel=1e-12)
    (gradient,) = torch.autograd.grad(value.sum() + mean.square().sum() + out.square().sum(), z)
    assert value[0] == mean[0].abs().sum() == gradient[0].abs().sum() == 0
    signed = KernelPotential(torch.ones(3, 2).double(), 1.0, features=lambda x: x)
    assert signed.value(torch.tensor([[1.0, 2.0], [3.0, -1.0]]).double()).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="`features` must return numbers >= 0, got -"):
        KernelPotential(KEYS, 0.7, features=torch.sin)

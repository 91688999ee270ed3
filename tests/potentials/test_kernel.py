"""KernelPotential: the potential contract, kernels written out, random features, streams, and what it refuses."""

import functools
import math
import warnings

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, Implicit, ImplicitAttention, LogSumExp, solve
from implicit_attention.linear import GMRES
from implicit_attention.potentials import EluFeatures, KernelPotential, PositiveFeatures, ReadsOut, ReluFeatures
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import Allocations, PotentialContract

KEYS = (2, 7, 5)
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def positive(count=16, dim=5, seed=0, **options):
    return PositiveFeatures(dim, count, generator=torch.Generator().manual_seed(seed), **options)


def squares(x):
    """Features of a user: a plain function without logarithm."""
    return torch.cat((x.square() + 0.1, (0.3 * x).exp()), -1)


class SoftplusLog:
    """Features of a user that have a logarithm: log(1 + exp(x))."""

    def __call__(self, x):
        return self.log(x).exp()

    def log(self, x):
        return torch.nn.functional.softplus(x).log()


FEATURES = {
    "elu": EluFeatures(),
    "relu": ReluFeatures(),
    "positive": positive(),
    "function": squares,
    "logarithm": SoftplusLog(),
}
each_feature = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
on_and_off = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


def key_mask():
    mask = random(2, 1, 7, seed=9) > -0.5
    mask[0, 0, 2] = False
    return mask


class TestElu(PotentialContract):
    def make(self, dtype):
        return KernelPotential(random(*KEYS, dtype=dtype), 0.7, features=EluFeatures())


class TestEluMaskAndBias(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = random(2, 1, 7, seed=4, dtype=dtype)
        return KernelPotential(random(*KEYS, dtype=dtype), beta, features=EluFeatures(), mask=key_mask(), bias=bias)


class TestPositive(PotentialContract):
    def make(self, dtype):
        return KernelPotential(random(*KEYS, dtype=dtype), 0.7, features=positive())


class TestPositiveMaskAndBias(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = random(7, seed=4, dtype=dtype)
        return KernelPotential(random(*KEYS, dtype=dtype), beta, features=positive(), mask=key_mask(), bias=bias)


class TestRelu(PotentialContract):
    def make(self, dtype):
        bias = random(7, seed=4, dtype=dtype)
        return KernelPotential(random(*KEYS, dtype=dtype), 0.7, features=ReluFeatures(), mask=key_mask(), bias=bias)


class TestCausalElu(PotentialContract):
    def make(self, dtype):
        return KernelPotential(random(2, 3, 5, dtype=dtype), 0.7, features=EluFeatures(), causal=True)


class TestCausalPositive(PotentialContract):
    def make(self, dtype):
        bias = random(3, seed=4, dtype=dtype)
        return KernelPotential(random(2, 3, 5, dtype=dtype), 0.7, features=positive(), bias=bias, causal=True)


class TestCausalRelu(PotentialContract):
    def make(self, dtype):
        # Positive: where S is 0, finite differences would make it negative.
        keys = random(2, 3, 5, dtype=dtype).abs()
        mask = torch.tensor([[[True, True, False]], [[True, False, True]]])
        return KernelPotential(keys, 0.7, features=ReluFeatures(), mask=mask, causal=True)


class TestFeaturesOfAUser(PotentialContract):
    def make(self, dtype):
        return KernelPotential(random(*KEYS, dtype=dtype), 0.7, features=squares, mask=key_mask())


class TestLogarithmOfAUser(PotentialContract):
    def make(self, dtype):
        return KernelPotential(random(*KEYS, dtype=dtype), 0.7, features=SoftplusLog(), mask=key_mask())


def written_out(z, keys, beta, features, allowed=None, bias=0.0):
    """Phi and the weights from the (N, M) kernel matrix; `allowed` (N, M) pairs."""
    kernel = features(math.sqrt(beta) * z) @ features(math.sqrt(beta) * keys).mT * torch.as_tensor(bias).exp()
    kernel = kernel if allowed is None else kernel * allowed
    total = kernel.sum(-1)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return (total.log() / beta).masked_fill(empty, 0.0), kernel / total[..., None]


def test_ground_truth():
    keys = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], dtype=torch.float64)
    z, v = torch.tensor([[[0.6, -0.3]], [[0.5, -1.0]]], dtype=torch.float64)
    phi = KernelPotential(keys, 1.5, features=EluFeatures())
    assert phi.value(z).item() == pytest.approx(1.606830180104, abs=6e-13)
    assert phi.mean(z).tolist()[0] == pytest.approx([0.324647505546, 0.253282854925], abs=6e-13)
    assert phi.covariance_product(z, v).tolist()[0] == pytest.approx([0.044294468, -0.275649306], abs=6e-10)


@each_feature
@on_and_off
def test_it_equals_the_kernel_matrix_written_out(features, causal):
    """Value, mean, covariance, weights and read-out; 70 keys, more than two chunks of a stream."""
    keys, values, bias = random(2, 70, 5), random(2, 70, 4, seed=3), random(2, 1, 70, seed=4)
    mask = random(2, 1, 70, seed=9) > -1
    mask[0, 0, :3] = False
    z, v = random(2, 70, 5, seed=1).requires_grad_(), random(2, 70, 5, seed=2)
    allowed = mask & torch.ones(70, 70, dtype=torch.bool).tril() if causal else mask
    value, weights = written_out(z, keys, 0.7, features, allowed, bias)
    (mean,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (product,) = torch.autograd.grad(mean, z, v)
    phi = KernelPotential(keys, 0.7, features=features, mask=mask, bias=bias, causal=causal)
    found, found_mean = phi.evaluate(z)
    torch.testing.assert_close(found, value, **CLOSE)
    torch.testing.assert_close(found_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(phi.covariance_product(z, v), product, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(phi.probabilities(z), weights, **CLOSE)
    torch.testing.assert_close(phi.readout(z, values), weights @ values, rtol=1e-12, atol=1e-12)


@each_feature
@on_and_off
def test_gradients_reach_what_the_sum_is_made_of(features, causal):
    """Keys, beta, bias and values, through S and the read-out."""
    keys, bias, values = random(2, 4, 5), random(4, seed=4), random(2, 4, 2, seed=3)
    beta = torch.tensor([0.5, 1.3], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True])
    z = random(2, 4, 5, seed=1)

    def results(z, keys, beta, bias, values):
        phi = KernelPotential(keys, beta, features=features, mask=mask, bias=bias, causal=causal)
        return *phi.evaluate(z), phi.readout(z, values)

    inputs = [t.clone().requires_grad_() for t in (z, keys, beta, bias, values)]
    assert torch.autograd.gradcheck(results, inputs)
    assert torch.autograd.gradgradcheck(results, inputs, fast_mode=True)


def test_directions_can_be_learned():
    features, keys, z = positive(8), random(*KEYS), random(2, 3, 5, seed=1)

    def results(directions):
        features.directions = directions
        return KernelPotential(keys, 0.7, features=features).evaluate(z)

    assert torch.autograd.gradcheck(results, features.directions.requires_grad_())


def test_features_of_a_module_are_declared_and_learned():
    module = torch.nn.Sequential(torch.nn.Linear(5, 6, dtype=torch.float64), torch.nn.Softplus())
    keys, x = random(*KEYS), random(2, 3, 5, seed=1)
    energy = AnchoredEnergy(KernelPotential(keys, 0.7, features=module), x, 0.5)
    assert not energy.potential.knows_own
    state = solve(energy, x, solver=Anderson(rtol=1e-12), adjoint=Implicit(GMRES(rtol=1e-12))).value
    z = x
    for _ in range(100):
        z = 0.5 * x + 0.5 * KernelPotential(keys, 0.7, features=module).mean(z)
    weight = module[0].weight
    got, expected = (torch.autograd.grad(t.square().sum(), weight)[0] for t in (state, z))
    assert relative_error(got, expected) < 1e-8


@pytest.mark.parametrize("orthogonal", [True, False], ids=["orthogonal", "independent"])
def test_the_error_of_random_features_falls_like_their_number_to_the_minus_half(orthogonal):
    # Short vectors: of the kernel of longer ones (|x| about 1.6) 4096 directions tell next to nothing.
    keys, z, beta = 0.3 * random(2, 7, 5), 0.3 * random(2, 3, 5, seed=1), 0.5
    exact = LogSumExp(keys, beta)
    counts, errors = torch.tensor([64.0, 256.0, 1024.0, 4096.0]), []
    for count in counts.tolist():
        draws = [positive(int(count), seed=seed, orthogonal=orthogonal) for seed in range(40)]
        found = [KernelPotential(keys, beta, features=features).mean(z) for features in draws]
        errors.append(torch.stack([(mean - exact.mean(z)).square().mean() for mean in found]).mean().sqrt())
    design = torch.stack((counts.log(), torch.ones(4)), -1).double()
    slope = float(torch.linalg.lstsq(design, torch.stack(errors).log()[:, None]).solution[0])
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.25 * exact.mean(z).square().mean().sqrt()


def test_orthogonal_features_are_orthogonal_normal_and_better():
    features = positive(5 * 4000)
    blocks = features.directions.view(4000, 5, 5)
    gram = blocks @ blocks.mT
    torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-12)
    w = features.directions
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


def test_random_features_are_drawn_from_the_generator():
    assert torch.equal(positive(7, seed=3).directions, positive(7, seed=3).directions)
    assert not torch.equal(positive(7, seed=3).directions, positive(7, seed=4).directions)
    torch.manual_seed(0)
    assert positive().directions.shape == PositiveFeatures(5, 16).directions.shape == (16, 5)


@each_feature
def test_keys_are_appended(features):
    keys, z = random(2, 9, 5).requires_grad_(), random(2, 3, 5, seed=1)
    bias, mask = random(9, seed=4), torch.arange(9) % 3 > 0
    whole = KernelPotential(keys, 0.7, features=features, bias=bias, mask=mask)
    first = KernelPotential(keys[:, :4], 0.7, features=features, bias=bias[:4], mask=mask[:4])
    before = first.mean(z)
    grown = first
    for j in range(4, 9):
        grown = grown.append(keys[:, j : j + 1], bias=bias[j : j + 1], mask=mask[j : j + 1])
    for a, b in zip(grown.evaluate(z), whole.evaluate(z), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    assert torch.equal(first.mean(z), before)
    gradients = [torch.autograd.grad(phi.mean(z).square().sum(), keys)[0] for phi in (grown, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)
    assert grown.append(keys[:, :2]).tensors()[0].numel() == 0
    with pytest.raises(ValueError, match="`readout` must be asked of a potential that holds its keys"):
        grown.readout(z, keys)
    with pytest.raises(ValueError, match="`probabilities` must be asked of a potential that holds its keys"):
        grown.probabilities(z)


@pytest.mark.parametrize("features", [EluFeatures(), ReluFeatures()], ids=["elu", "relu"])
def test_nothing_appended_to_nothing(features):
    keys = random(2, 4, 5).requires_grad_()
    nothing = torch.tensor([[[False]], [[True]]])
    phi = KernelPotential(keys[:, :1], 0.7, features=features, mask=nothing).append(keys[:, 1:2], mask=nothing)
    value, mean = phi.evaluate(random(2, 3, 5, seed=1))
    assert value[0].eq(0).all()
    assert mean[0].eq(0).all()
    assert mean[1].ne(0).any()
    (gradient,) = torch.autograd.grad(mean.square().sum() + value.sum(), keys, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), keys)
    for got in (gradient, second):
        assert got.isfinite().all()
        assert got[0].eq(0).all()


@each_feature
def test_a_set_whose_keys_are_all_masked_is_zero_with_finite_gradients(features):
    keys, z, bias = (t.requires_grad_() for t in (random(*KEYS), random(2, 3, 5, seed=1), random(7, seed=4)))
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[0] = False
    phi = KernelPotential(keys, 0.7, features=features, mask=mask, bias=bias)
    value, mean = phi.evaluate(z)
    out, weights = phi.readout(z, keys), phi.probabilities(z)
    for result in (value, mean, out, weights):
        assert result[0].eq(0).all()
        assert result[1].ne(0).any()
    loss = value.sum() + mean.square().sum() + out.square().sum() + weights.square().sum()
    gradients = torch.autograd.grad(loss, (keys, z, bias), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z, bias))
    assert all(g.isfinite().all() for g in (*gradients, *second))
    assert gradients[0][0].eq(0).all()
    assert gradients[1][0].eq(0).all()


@each_feature
@on_and_off
def test_nan_in_a_masked_key_stays_out(features, causal):
    keys, values, z = random(*KEYS), random(2, 7, 4, seed=3), random(2, 7, 5, seed=1)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[0, 0, 0] = mask[1, 0, 4] = False
    options = {"features": features, "mask": mask, "causal": causal}
    clean = KernelPotential(keys, 0.7, **options)
    expected = [*clean.evaluate(z), clean.readout(z, values), clean.probabilities(z)]
    dirty, spoiled = keys.clone(), values.clone()
    for t in (dirty, spoiled):
        t[0, 0] = torch.nan
        t[1, 4] = torch.inf
    dirty.requires_grad_()
    phi = KernelPotential(dirty, 0.7, **options)
    found = [*phi.evaluate(z), phi.readout(z, spoiled), phi.probabilities(z)]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    (gradient,) = torch.autograd.grad(sum(t.square().sum() for t in found), dirty)
    assert gradient.isfinite().all()


@each_feature
@on_and_off
def test_a_key_that_is_nan_reaches_those_who_read_it(features, causal):
    keys, values, z = random(*KEYS), random(2, 7, 4, seed=3), random(2, 7, 5, seed=1)
    options = {"features": features, "causal": causal}
    clean = KernelPotential(keys, 0.7, **options)
    dirty = keys.clone()
    dirty[1, 4, 2] = torch.nan
    spoiled = values.clone()
    spoiled[1, 4, 0] = torch.nan
    phi = KernelPotential(dirty, 0.7, **options)
    reads = torch.zeros(2, 7, dtype=torch.bool)
    reads[1, 4 if causal else 0 :] = True
    expected = [*clean.evaluate(z), clean.readout(z, values), clean.readout(z, values)]
    found = [*phi.evaluate(z), phi.readout(z, values), clean.readout(z, spoiled)]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[~reads], b[~reads])
        assert a[reads].isnan().all()


def test_what_lies_where_no_key_has_a_positive_entry():
    """ReLU: a kernel of 0 with all keys has value and mean 0, the weights too, with zero gradients."""
    keys = torch.tensor([[1.0, -1.0], [2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    z = torch.tensor([[-1.0, 3.0], [0.5, 3.0]], dtype=torch.float64, requires_grad=True)
    phi = KernelPotential(keys, 0.7, features=ReluFeatures())
    value, mean = phi.evaluate(z)
    out = phi.readout(z, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0], [1 / 3, 2 / 3]], dtype=torch.float64))
    torch.testing.assert_close(value[1].exp() ** 0.7, torch.tensor(0.7 * 0.5 * 3, dtype=torch.float64))
    gradients = torch.autograd.grad(value.sum() + mean.square().sum() + out.square().sum(), (z, keys))
    assert value[0] == mean[0].abs().sum() == gradients[0][0].abs().sum() == 0
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("features", [EluFeatures(), positive(64)], ids=["elu", "positive"])
@pytest.mark.parametrize("scale", [1e3, 1e6, -1e6])
@on_and_off
def test_nothing_overflows_far_out(features, scale, causal):
    """exp(|x|) would; the answer is the limit, in which one feature has all the weight."""
    keys, z = scale / 1e3 * random(2, 3, 5), scale * random(2, 3, 5, seed=1)
    phi = KernelPotential(keys, 0.7, features=features, bias=torch.tensor([900.0, 0.0, -900.0]).double(), causal=causal)
    value, mean = phi.evaluate(z)
    assert value.isfinite().all()
    assert mean.isfinite().all()
    assert phi.covariance_product(z, z).isfinite().all()
    if not isinstance(features, EluFeatures):
        # Near the best of the w: Phi(z) = max_i (<w_i, z>/sqrt(beta) + log S_i/beta) - |z|^2/2 at leading order.
        best = (z @ features.directions.mT + phi.state / math.sqrt(0.7)).argmax(-1)
        expected = features.directions[best] / math.sqrt(0.7) - z
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-6 * abs(scale))


def test_an_early_key_is_not_lost_beside_later_larger_ones():
    """A running sum with one shift for all would be 0 at the first rows, in float32 and float64."""
    keys, bias = random(6, 5), torch.tensor([-2000.0, -1500.0, -1000.0, 0.0, 1000.0, 1200.0]).double()
    z = random(6, 5, seed=1)
    streamed = KernelPotential(keys, 0.7, features=positive(), bias=bias, causal=True)
    values = random(6, 3, seed=2)
    for n in range(6):
        alone = KernelPotential(keys[: n + 1], 0.7, features=positive(), bias=bias[: n + 1])
        torch.testing.assert_close(streamed.value(z)[n], alone.value(z)[n], **CLOSE)
        torch.testing.assert_close(streamed.mean(z)[n], alone.mean(z)[n], **CLOSE)
        torch.testing.assert_close(streamed.readout(z, values)[n], alone.readout(z, values[: n + 1])[n], **CLOSE)


@pytest.mark.parametrize("features", [EluFeatures(), positive(), squares], ids=["elu", "positive", "function"])
@on_and_off
def test_no_tensor_of_pairs(features, causal):
    count, dim = 512, 5
    keys = random(count, dim).requires_grad_()
    z, values = random(count, dim, seed=1).requires_grad_(), random(count, 4, seed=2)
    with Allocations() as seen:
        phi = KernelPotential(keys, 0.7, features=features, bias=torch.zeros(count).double(), causal=causal)
        value, mean = phi.evaluate(z)
        out = phi.readout(z, values)
        (value.sum() + mean.square().sum() + out.square().sum()).backward()
    # The largest is a chunk of pairs, 32 x 32 per feature, or numbers per query and feature, twice in a running sum.
    assert seen.largest <= 32 * 32 * 16
    assert seen.largest < count * count / 8


def test_the_state_is_computed_once_and_has_one_number_per_feature():
    calls = []

    class Counting(EluFeatures):
        def log(self, x):
            calls.append(x.shape)
            return super().log(x)

    phi = KernelPotential(random(2, 100, 5), 0.7, features=Counting())
    z = random(2, 3, 5, seed=1)
    for _ in range(3):
        phi.value(z)
    assert [shape[-2] for shape in calls] == [100, 3, 3, 3]
    assert phi.state.shape == (2, 1, 5)
    # `pullback` was derived from the `log` that the subclass overrides: it is found by differentiation.
    torch.testing.assert_close(phi.mean(z), KernelPotential(random(2, 100, 5), 0.7, features=EluFeatures()).mean(z))


def test_bounded_below_as_far_as_it_is_known():
    keys = random(2, 7, 5)
    for name, features in FEATURES.items():
        phi = KernelPotential(keys, 0.7, features=features)
        assert phi.bounded_below(math.inf) is (True if name in ("elu", "relu", "positive") else None)
        assert not phi.convex
        assert isinstance(phi, ReadsOut)
    # Phi grows like log |z| at most: E/|z|^2 goes to 1/2 or more along every ray.
    ray = random(2, 50, 5, seed=1)
    far = 1e5 * ray / ray.norm(dim=-1, keepdim=True)
    for name in ("elu", "relu", "positive"):
        phi = KernelPotential(keys, 0.7, features=FEATURES[name])
        assert (phi.value(far) < 2 / 0.7 * math.log(1e6)).all()


def test_equilibria_and_their_gradients():
    tensors = [random(2, 3, 5), random(2, 7, 5, seed=1), torch.tensor([0.5, 0.8]).double(), random(7, seed=4)]
    for features, causal in ((EluFeatures(), False), (positive(), False), (EluFeatures(), True)):
        query, keys, beta, bias = (t.clone().requires_grad_() for t in tensors)
        if causal:
            keys, bias = random(2, 3, 5, seed=1).requires_grad_(), random(3, seed=4).requires_grad_()
        phi = KernelPotential(keys, beta, features=features, bias=bias, causal=causal)
        energy = AnchoredEnergy(phi, query, 0.6)
        tight = Anderson(rtol=1e-13, atol=1e-13)
        found = solve(energy, query.detach(), solver=tight, adjoint=Implicit(GMRES(rtol=1e-13)))
        assert found.converged.all()
        z = query
        for _ in range(300):
            z = 0.6 * query + 0.4 * KernelPotential(keys, beta, features=features, bias=bias, causal=causal).mean(z)
        assert relative_error(found.value, z) < 1e-11
        cotangent = random(2, 3, 5, seed=8)
        got, expected = (torch.autograd.grad(v, [query, keys, beta, bias], cotangent) for v in (found.value, z))
        for a, b in zip(got, expected, strict=True):
            assert relative_error(a, b) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("readout", ["values", "state"])
@pytest.mark.parametrize("name", ["elu", "positive", "relu"])
@on_and_off
def test_a_layer_trains_a_step_without_a_warning(name, readout, dtype, causal):
    torch.manual_seed(0)
    features = positive(32, 4) if name == "positive" else FEATURES[name]
    factory = functools.partial(KernelPotential, features=features, causal=causal)
    layer = ImplicitAttention(8, 2, potential=factory, readout=readout, dtype=dtype)
    x = random(2, 70, 8, dtype=dtype).requires_grad_()
    padding = torch.arange(70) < 60
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, mask=padding.expand(2, 1, 1, 70)).float().square().mean().backward()
        optimizer.step()
    assert layer.last_solve.converged.all()
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 5)], ids=str)
@pytest.mark.parametrize("name", ["elu", "positive"])
def test_a_row_has_its_bits_alone(size, name):
    features = positive(3, size[1]) if name == "positive" else FEATURES[name]
    for seed in range(3):
        keys, field = random(*size, seed=seed), random(250, size[1], seed=seed + 9)
        phi = KernelPotential(keys, 0.5, features=features)
        whole = solve(AnchoredEnergy(phi, field, 0.6), field).value
        for rows in (slice(0, 1), slice(1, 18), slice(0, None, 2)):
            alone = solve(AnchoredEnergy(phi, field[rows], 0.6), field[rows]).value
            assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_features_take_the_precision_of_the_keys(dtype):
    keys, x = random(*KEYS, dtype=dtype), random(2, 3, 5, seed=1, dtype=dtype)
    found = solve(AnchoredEnergy(KernelPotential(keys, 0.7, features=positive()), x, 0.6), x)
    assert found.converged.all()
    wide = KernelPotential(keys.double(), 0.7, features=positive())
    expected = solve(AnchoredEnergy(wide, x.double(), 0.6), x.double()).value
    assert relative_error(found.value, expected) < (1e-4 if dtype == torch.float32 else 3e-2)


def test_layouts_of_keys_and_states():
    """Shared keys, expanded and transposed tensors answer like their copies."""
    keys, z = random(2, 1, 7, 5), random(2, 4, 3, 5, seed=1)
    beta = torch.tensor([0.5, 0.8, 1.0, 1.3]).double()
    phi = KernelPotential(keys, beta, features=positive())
    full = KernelPotential(keys.expand(2, 4, 7, 5).contiguous(), beta, features=positive())
    torch.testing.assert_close(phi.mean(z), full.mean(z), **CLOSE)
    values = random(2, 1, 7, 3, seed=2)
    torch.testing.assert_close(phi.readout(z, values), full.readout(z, values.expand(2, 4, 7, 3)), **CLOSE)
    turned = KernelPotential(keys.mT.contiguous().mT, beta, features=positive())
    torch.testing.assert_close(turned.mean(z.transpose(0, 1).contiguous().transpose(0, 1)), phi.mean(z), **CLOSE)
    assert KernelPotential(keys[:0], 0.7, features=positive()).mean(z[:0]).shape == (0, 4, 3, 5)


def test_bad_arguments_are_named():
    keys, z = random(*KEYS), random(2, 3, 5, seed=1)
    make = functools.partial(KernelPotential, keys, 0.7, features=EluFeatures())
    with pytest.raises(ValueError, match=r"`mask` must be the same for all queries.*causal=True"):
        make(mask=torch.ones(2, 3, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`bias` must be the same for all queries.*LogSumExp"):
        make(bias=torch.zeros(2, 3, 7).double())
    with pytest.raises(ValueError, match=r"`mask` must broadcast to .* M = 7 keys"):
        make(mask=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match="`mask` must broadcast with the leading axes of `keys`"):
        make(mask=torch.ones(3, 1, 7, dtype=torch.bool))
    with pytest.raises(TypeError, match="`features` must be a function"):
        KernelPotential(keys, 0.7, features="elu")
    with pytest.raises(ValueError, match="`features` must return numbers >= 0, got -"):
        KernelPotential(keys, 0.7, features=torch.sin)
    with pytest.raises(ValueError, match=r"`features` must return a tensor \(\*, m\)"):
        KernelPotential(keys, 0.7, features=lambda x: x.exp().sum(-1))
    with pytest.raises(ValueError, match=r"`features` must return a tensor .*got list"):
        KernelPotential(keys, 0.7, features=lambda x: x.tolist())
    with pytest.raises(ValueError, match=r"`x` must have 4 entries on its last axis, got shape \(2, 7, 5\)"):
        KernelPotential(keys, 0.7, features=positive(dim=4))
    for beta in (0.0, -1.0, torch.tensor([1.0, -1.0]).double()):
        with pytest.raises(ValueError, match="`beta` must be > 0"):
            KernelPotential(keys, beta, features=EluFeatures())
    with pytest.raises(ValueError, match="`z` must have one row for each of the 7 keys"):
        make(causal=True).check_state("z", z)
    with pytest.raises(ValueError, match="`causal` must be False to append keys"):
        make(causal=True).append(keys)
    with pytest.raises(ValueError, match="`keys` must be in float32 or float64 to append to"):
        make().append(keys.bfloat16())
    with pytest.raises(ValueError, match="`keys` must have the dimension 5"):
        make().append(random(2, 1, 4))
    with pytest.raises(ValueError, match="`dropout_p` must be 0 for KernelPotential"):
        make().readout(z, keys, dropout_p=0.1)
    with pytest.raises(ValueError, match="`values` must have one row for each of the 7 keys"):
        make().readout(z, keys[:, 1:])
    with pytest.raises(ValueError, match="`mask, bias and beta` must broadcast"):
        make(mask=torch.ones(2, 1, 1, 7, dtype=torch.bool)).check_state("z", z)
    for options in ({"dim": 0, "count": 4}, {"dim": 4, "count": 0}):
        with pytest.raises(ValueError, match="must be >= 1"):
            PositiveFeatures(**options)
    with pytest.raises(ValueError, match="`features` must record the derivatives"):
        KernelPotential(keys, 0.7, features=lambda x: x.detach().exp()).mean(z)


def test_negative_features_of_a_state_become_nan_in_its_row():
    phi = KernelPotential(torch.ones(3, 2).double(), 1.0, features=lambda x: x)
    value, mean = phi.evaluate(torch.tensor([[1.0, 2.0], [3.0, -1.0]]).double())
    assert value[0].isfinite()
    assert mean[0].isfinite().all()
    assert value[1].isnan()
    assert mean[1].isnan().any()


def test_a_causal_layer_says_how_kernels_are_causal():
    layer = ImplicitAttention(8, 2, potential=functools.partial(KernelPotential, features=EluFeatures()), causal=True)
    with pytest.raises(ValueError, match=r"functools.partial\(KernelPotential, features=..., causal=True\)"):
        layer(torch.zeros(1, 3, 8))

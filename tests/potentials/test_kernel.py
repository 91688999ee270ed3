"""KernelPotential: the potential contract, kernels written out, masked and appended keys."""

import math

import pytest
import torch

from implicit_attention.potentials import EluFeatures, KernelPotential, PositiveFeatures, ReluFeatures
from implicit_attention.testing.numerics import check_close, check_derivatives, random
from implicit_attention.testing.potential import PotentialContract


def squares(x):
    """Features of a user: a plain function without logarithm."""
    return torch.cat((x.square() + 0.1, (0.3 * x).exp()), -1)


POSITIVE = PositiveFeatures(5, 16, generator=torch.Generator().manual_seed(0))
FEATURES = {"elu": EluFeatures(), "relu": ReluFeatures(), "positive": POSITIVE, "function": squares}
each_feature = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
on_and_off = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


class TestElu(PotentialContract):
    features, keys, causal = FEATURES["elu"], random(2, 7, 5), False

    def make(self, dtype):
        count = self.keys.shape[1]
        mask = random(2, 1, count, seed=9) > -0.5
        mask[0, 0, :3] = torch.tensor([True, True, False])
        bias, beta = random(2, 1, count, seed=4, dtype=dtype), torch.tensor([0.5, 1.3], dtype=dtype)
        options = {"features": self.features, "mask": mask, "bias": bias, "causal": self.causal}
        return KernelPotential(self.keys.to(dtype), beta, **options)


class TestPositive(TestElu):
    features = POSITIVE


class TestRelu(TestElu):
    features = FEATURES["relu"]


class TestFunction(TestElu):
    features = staticmethod(squares)


class TestCausalPositive(TestPositive):
    keys, causal = random(2, 3, 5), True


class TestCausalRelu(TestRelu):
    # Positive: where S is 0, finite differences would make it negative.
    keys, causal = random(2, 3, 5).abs(), True


def test_ground_truth():
    keys = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], dtype=torch.float64)
    z, v = torch.tensor([[[0.6, -0.3]], [[0.5, -1.0]]], dtype=torch.float64)
    phi = KernelPotential(keys, 1.5, features=EluFeatures())
    assert phi.value(z).item() == pytest.approx(1.606830180104, abs=6e-13)
    assert phi.mean(z).tolist()[0] == pytest.approx([0.324647505546, 0.253282854925], abs=6e-13)
    assert phi.covariance_product(z, v).tolist()[0] == pytest.approx([0.044294468, -0.275649306], abs=6e-10)


@each_feature
@on_and_off
def test_it_is_the_kernel_matrix_written_out_and_masked_keys_leave_no_trace(features, causal):
    """70 keys are more than two chunks of a stream; the first rows of entry 0 read no key, and no row of entry 1."""
    keys, values, z = random(2, 70, 5), random(2, 70, 4, seed=3), random(2, 70, 5, seed=1)
    bias = random(2, 1, 70, seed=4)
    mask = random(2, 1, 70, seed=9) > torch.tensor([-1.0, 9.0])[:, None, None]
    mask[0, 0, :3] = False
    allowed = mask & torch.ones(70, 70, dtype=torch.bool).tril() if causal else mask
    kernel = allowed * bias.exp() * (features(math.sqrt(0.7) * z) @ features(math.sqrt(0.7) * keys).mT)
    total = kernel.sum(-1)
    weights = (kernel / total[..., None]).nan_to_num()
    value = (total.log() / 0.7).masked_fill(total == 0, 0.0)
    spoiled = [t.masked_fill(~mask.mT, torch.nan).requires_grad_() for t in (keys, values)]
    phi = KernelPotential(spoiled[0], 0.7, features=features, mask=mask, bias=bias, causal=causal)
    found = phi.value(z), phi.probabilities(z), phi.readout(z, spoiled[1])
    check_close(found, (value, weights, weights @ values), 1e-12)
    loss = sum(t.square().sum() for t in (*found, phi.mean(z)))
    gradients = torch.autograd.grad(loss, spoiled)
    assert all(g.isfinite().all() and g[1].eq(0).all() for g in gradients)


@each_feature
@on_and_off
def test_gradients_of_the_readout(features, causal):
    inputs = random(2, 4, 5, seed=1), random(2, 4, 5), random(4, seed=4), random(2, 4, 2, seed=3)

    def readout(z, keys, bias, values):
        return KernelPotential(keys, 0.7, features=features, bias=bias, causal=causal).readout(z, values)

    check_derivatives(readout, [t.requires_grad_() for t in inputs])


@each_feature
def test_keys_are_appended(features):
    keys, z = random(2, 9, 5).requires_grad_(), random(2, 3, 5, seed=1)
    bias, mask = random(9, seed=4), torch.arange(9) % 3 > 0
    whole, grown = (KernelPotential(keys[:, :n], 0.7, features=features, bias=bias[:n], mask=mask[:n]) for n in (9, 1))
    for j in range(1, 9):
        grown = grown.append(keys[:, j : j + 1], bias=bias[j : j + 1], mask=mask[j : j + 1])
    check_close(tuple(grown.evaluate(z)), tuple(whole.evaluate(z)), 1e-12)
    gradients = [torch.autograd.grad(phi.mean(z).square().sum(), keys)[0] for phi in (grown, whole)]
    check_close(*gradients, 1e-11)
    with pytest.raises(ValueError, match="`readout` must be asked of a potential that holds its keys"):
        grown.readout(z, keys)
    with pytest.raises(ValueError, match="`probabilities` must be asked of a potential that holds its keys"):
        grown.probabilities(z)

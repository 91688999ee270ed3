"""LogSumExp: the potential contract in every form of mask, and what is special about softmax attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    GradientDescent,
    LogSumExp,
    NewtonKrylov,
    Picard,
    Status,
    solve,
)
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import Allocations, PotentialContract

KEYS = (2, 7, 5)
MANY = 70  # enough keys for the flash kernels


def mask_with_empty_row() -> torch.Tensor:
    mask = random(2, 3, 7, seed=9) > 0
    mask[0, 1] = False
    return mask


class TestPlain(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7)


class TestTensorBeta(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype))


class TestBias(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7, bias=random(2, 3, 7, seed=4, dtype=dtype))


class TestSharedBias(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7, bias=random(7, seed=4, dtype=dtype))


class TestMask(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7, mask=mask_with_empty_row())


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        bias = random(1, 3, 7, seed=4, dtype=dtype)
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        return LogSumExp(random(*KEYS, dtype=dtype), beta, mask=mask_with_empty_row(), bias=bias)


class TestKeyPadding(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7, mask=mask[:, None])


class TestSharedKeys(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(7, 5, dtype=dtype), 0.7)


class TestSharedKeysMaskAndBias(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = random(3, 7, seed=4, dtype=dtype)
        return LogSumExp(random(1, 7, 5, dtype=dtype), beta, mask=mask_with_empty_row(), bias=bias)


def test_mean_is_scaled_dot_product_attention():
    keys, z = random(2, 3, 7, 5), random(2, 3, 4, 5, seed=1)
    expected = F.scaled_dot_product_attention(z, keys, keys, scale=0.7)
    torch.testing.assert_close(LogSumExp(keys, 0.7).mean(z), expected)


def test_beta_per_head_has_the_shape_of_the_heads():
    keys, z, beta = random(2, 3, 7, 5), random(2, 3, 4, 5, seed=1), torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    mean = LogSumExp(keys, beta).mean(z)
    for h in range(3):
        torch.testing.assert_close(mean[:, h], LogSumExp(keys[:, h], float(beta[h])).mean(z[:, h]))


def test_value_of_two_keys():
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    z = torch.tensor([[0.3, 5.0]], dtype=torch.float64)
    assert LogSumExp(keys, 2.0).value(z).item() == pytest.approx(math.log(2 * math.cosh(0.6)) / 2)
    assert LogSumExp(keys, 2.0).mean(z)[0].tolist() == pytest.approx([math.tanh(0.6), 0.0])


def test_a_query_that_attends_to_nothing_is_zero_with_zero_gradients():
    keys = random(*KEYS).requires_grad_()
    z = random(2, 3, 5, seed=1).requires_grad_()
    bias = random(2, 3, 7, seed=2).requires_grad_()
    potential = LogSumExp(keys, 0.7, mask=mask_with_empty_row(), bias=bias)
    assert potential.value(z)[0, 1] == 0
    assert potential.mean(z)[0, 1].eq(0).all()
    assert potential.mean(z.detach())[0, 1].eq(0).all()
    loss = potential.value(z).sum() + potential.mean(z).square().sum()
    for gradient in torch.autograd.grad(loss, (keys, z, bias)):
        assert gradient.isfinite().all()
    (by_z,) = torch.autograd.grad(potential.mean(z).square().sum(), z)
    assert by_z[0, 1].eq(0).all()


def test_a_row_of_minus_infinite_bias_is_a_masked_row():
    bias = torch.zeros(2, 3, 7, dtype=torch.float64)
    bias[0, 1] = -torch.inf
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[0, 1] = False
    z = random(2, 3, 5, seed=1)
    by_bias, by_mask = LogSumExp(random(*KEYS), 0.7, bias=bias), LogSumExp(random(*KEYS), 0.7, mask=mask)
    assert torch.equal(by_bias.value(z), by_mask.value(z))
    assert torch.equal(by_bias.mean(z), by_mask.mean(z))


def test_masked_keys_are_not_read():
    keys, z = random(*KEYS), random(2, 3, 5, seed=1)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    mask[:, :, 4:] = False
    clean = LogSumExp(keys, 0.7, mask=mask)
    dirty = keys.clone()
    dirty[:, 4:] = torch.nan
    for method in ("value", "mean"):
        assert torch.equal(getattr(LogSumExp(dirty, 0.7, mask=mask), method)(z), getattr(clean, method)(z))
    torch.testing.assert_close(clean.mean(z), LogSumExp(keys[:, :4], 0.7).mean(z))


def test_not_a_number_in_a_bias_is_not_taken_for_a_mask():
    bias = torch.zeros(2, 3, 7, dtype=torch.float64)
    bias[1, 2] = torch.nan
    mean = LogSumExp(random(*KEYS), 0.7, bias=bias).mean(random(2, 3, 5, seed=1))
    assert mean[1, 2].isnan().all()
    assert mean.isnan().sum() == 5


def test_large_scores_do_not_overflow():
    keys, z = 100 * random(*KEYS), 100 * random(2, 3, 5, seed=1)
    potential = LogSumExp(keys, 10.0)
    assert potential.value(z).isfinite().all()
    torch.testing.assert_close(potential.mean(z), keys.gather(1, (z @ keys.mT).argmax(-1)[..., None].expand(2, 3, 5)))


def test_diameter_is_the_largest_distance():
    keys = random(2, 7, 5)
    brute = max(float((a - b).norm()) for a in keys[0] for b in keys[0])
    assert LogSumExp(keys, 1.0).diameter()[0].item() == pytest.approx(brute)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"keys": torch.zeros(5)}, ValueError, "`keys` must have at least 2 axes, got shape"),
        ({"keys": torch.zeros(2, 7, 5, dtype=torch.int64)}, TypeError, "`keys` must have a floating-point dtype"),
        ({"keys": [1.0]}, TypeError, "`keys` must be a torch.Tensor, got list"),
        ({"keys": torch.zeros(2, 0, 5)}, ValueError, "`keys` must hold at least one key"),
        ({"beta": 0.0}, ValueError, "`beta` must be > 0, got 0.0"),
        ({"beta": -1.0}, ValueError, "`beta` must be > 0, got -1.0"),
        ({"beta": math.nan}, ValueError, "`beta` must be > 0, got nan"),
        ({"beta": "1"}, TypeError, "`beta` must be a number"),
        ({"beta": torch.tensor([1.0, -2.0])}, ValueError, "`beta` must be > 0 everywhere, got -2.0"),
        ({"beta": torch.tensor([1, 2])}, TypeError, "`beta` must have a floating-point dtype"),
        ({"beta": torch.ones(2, dtype=torch.float64)}, ValueError, "`beta` must have the dtype of `keys`"),
        ({"beta": torch.ones(3)}, ValueError, "`beta` must broadcast with the leading axes of `keys`"),
        ({"mask": torch.ones(2, 3, 7)}, TypeError, "`mask` must be a boolean tensor .*pass additive masks as `bias`"),
        ({"mask": torch.ones(2, 3, 6, dtype=torch.bool)}, ValueError, "`mask` must broadcast to .* M = 7 keys"),
        ({"bias": torch.ones(2, 3, 6)}, ValueError, "`bias` must broadcast to"),
        ({"bias": torch.ones(2, 3, 7, dtype=torch.float64)}, ValueError, "`bias` must have the dtype of `keys`"),
        ({"keys": torch.zeros(2, 7, 5, device="meta")}, None, ""),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    arguments = {"keys": torch.zeros(2, 7, 5), "beta": 1.0} | change
    keys, beta = arguments.pop("keys"), arguments.pop("beta")
    if error is None:
        LogSumExp(keys, beta)
        return
    with pytest.raises(error, match=words):
        LogSumExp(keys, beta, **arguments)


def test_mixed_devices_are_named():
    with pytest.raises(ValueError, match=r"`bias` must have the device of `keys` \(cpu\), got meta; move it"):
        LogSumExp(torch.zeros(7, 5), 1.0, bias=torch.zeros(3, 7, device="meta"))


@pytest.mark.parametrize("keys", [1, 7, 15, 63, MANY, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_not_a_number_in_a_query_stays_visible(keys, dtype):
    """torch's CPU attention returns zeros for a query of NaN when there are few keys."""
    z = random(2, 3, 5, seed=1, dtype=dtype)
    z[0, 1] = torch.nan
    potential = LogSumExp(random(2, keys, 5, dtype=dtype), 0.7)
    for value in (potential.mean(z), potential.evaluate(z)[1], potential.evaluate(z)[0][..., None]):
        assert value[0, 1].isnan().all()
        assert value.isnan().sum() == value.shape[-1]


@pytest.mark.parametrize("form", ["plain", "beta", "mask", "bias", "mask and bias", "padding"])
def test_flash_kernels_equal_the_differentiable_path(form):
    keys, z = random(2, 3, MANY, 6), random(2, 3, 4, 6, seed=1)
    beta = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if form == "beta" else 0.7
    mask = random(2, 1, 4, MANY, seed=2) > 0
    mask[0, 0, 1] = False
    options = {
        "mask": {"mask": mask},
        "bias": {"bias": random(4, MANY, seed=3)},
        "mask and bias": {"mask": mask, "bias": random(4, MANY, seed=3)},
        "padding": {"mask": random(2, 1, 1, MANY, seed=4) > 0},
    }.get(form, {})
    potential = LogSumExp(keys, beta, **options)
    tracked = z.clone().requires_grad_()
    value, mean = potential.evaluate(z)
    torch.testing.assert_close(potential.mean(z), potential.mean(tracked).detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(mean, potential.mean(tracked).detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(value, potential.value(tracked).detach(), rtol=1e-12, atol=1e-13)


def test_flash_kernels_take_any_layout():
    keys, z = random(6, MANY, 2).permute(2, 1, 0), random(6, 4, 2, seed=1).permute(2, 1, 0)
    potential, plain = LogSumExp(keys, 0.7), LogSumExp(keys.contiguous(), 0.7)
    for got, expected in zip(potential.evaluate(z), plain.evaluate(z.contiguous()), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-14)
    flat = LogSumExp(random(MANY, 6), 0.7)
    torch.testing.assert_close(flat.mean(random(4, 6)), flat.mean(random(1, 1, 4, 6))[0, 0])


def test_without_the_private_kernel_the_result_is_the_same(monkeypatch):
    potential, z = LogSumExp(random(2, MANY, 5), 0.7), random(2, 3, 5, seed=1)
    with_kernel = potential.evaluate(z)
    monkeypatch.setattr("implicit_attention.ops.attention._FLASH_FOR_CPU", None)
    for got, expected in zip(potential.evaluate(z), with_kernel, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


COUNTS = pytest.mark.parametrize("count", [7, MANY])


def lowest_bias(count, dtype):
    """As Hugging Face masks: a query from all keys, one from some and one from none."""
    bias = torch.zeros(3, count, dtype=dtype)
    bias[0] = bias[1, 3:] = torch.finfo(dtype).min
    return bias


@COUNTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_of_lowest_biases_attends_to_all_keys_alike(count, dtype):
    keys, z, v = (random(2, n, 5, seed=n, dtype=dtype) for n in (count, 3, 3))
    potential = LogSumExp(keys, 2.0, bias=lowest_bias(count, dtype))
    mean = keys.mean(1)
    torch.testing.assert_close(potential.probabilities(z)[:, 0], torch.full((2, count), 1 / count, dtype=dtype))
    results = (
        potential.mean(z),
        potential.mean(z.clone().requires_grad_()),
        potential.evaluate(z)[1],
        potential.readout(z, keys),
    )
    for result in results:
        torch.testing.assert_close(result[:, 0], mean)
        torch.testing.assert_close(result, results[0])
    linear = potential.linearize(z)
    torch.testing.assert_close(linear.product(v), potential.covariance_product(z, v))
    kept = z.clone().requires_grad_()
    parts = torch.autograd.grad(LogSumExp(keys.requires_grad_(), 2.0, bias=potential.bias).mean(kept), keys, v)
    torch.testing.assert_close(linear.vjp_tensors(v)[0], parts[0])


@COUNTS
@pytest.mark.parametrize("solver", [Anderson(), Picard(), Broyden(), NewtonKrylov(), GradientDescent()], ids=str)
@pytest.mark.parametrize("beta", [0.125, 1.0])
def test_rows_of_lowest_biases_are_solved(count, solver, beta):
    keys, x = random(2, count, 5, dtype=torch.float32), random(2, 3, 5, seed=1, dtype=torch.float32)
    potential = LogSumExp(keys, beta, bias=lowest_bias(count, torch.float32))
    solution = solve(AnchoredEnergy(potential, x, 0.5), x, solver=solver, on_failure="ignore")
    assert solution.status[:, 0].eq(Status.CONVERGED).all()
    torch.testing.assert_close(solution.value[:, 0], (x[:, 0] + keys.mean(1)) / 2, rtol=1e-4, atol=1e-4)


def test_a_solve_of_whole_blocks_does_not_copy_the_mask_per_head():
    mask = torch.ones(2, 1, 32, 256, dtype=torch.bool).tril(100)
    x = random(2, 8, 32, 4)
    energy = AnchoredEnergy(LogSumExp(random(2, 8, 256, 4, seed=1), 0.5, mask=mask), x, 0.5)
    with Allocations() as seen:
        solve(energy, x)
    assert seen.largest < 2 * 8 * 32 * 256


def test_the_diameter_is_that_of_the_keys_whatever_they_have_in_common():
    for dtype in (torch.float32, torch.float64):
        keys = (random(3, 600, 5, dtype=torch.float32) + 1000).to(dtype)
        exact = (keys.double()[:, :, None] - keys.double()[:, None]).norm(dim=-1).amax((1, 2))
        found = LogSumExp(keys, 1.0).diameter()
        assert found.dtype == dtype
        assert (found.double() >= exact).all()
        assert (found.double() <= exact * (1 + 4 * torch.finfo(dtype).eps + 1e-12)).all()

"""LogSumExp: the contract in every form of mask, and what is special about softmax attention."""

import pytest
import torch
import torch.nn.functional as F
from key_pairs import KEYS, pairs

from implicit_attention import (
    AnchoredEnergy,
    LogSumExp,
    solve,
)
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import Allocations, PotentialContract


class TestPlain(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(*KEYS, dtype=dtype), **pairs(dtype))


class TestKeyPadding(PotentialContract):
    def make(self, dtype):
        mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
        return LogSumExp(random(*KEYS, dtype=dtype), 0.7, mask=mask[:, None])


class TestSharedKeysMaskAndBias(PotentialContract):
    def make(self, dtype):
        return LogSumExp(random(1, 7, 5, dtype=dtype), **pairs(dtype))


def test_mean_is_scaled_dot_product_attention():
    keys, z, beta = random(2, 3, 7, 5), random(2, 3, 4, 5, seed=1), torch.tensor([0.5, 1.0, 2.0]).double()
    mean = LogSumExp(keys, beta).mean(z)
    for h in range(3):
        expected = F.scaled_dot_product_attention(z[:, h], keys[:, h], keys[:, h], scale=float(beta[h]))
        torch.testing.assert_close(mean[:, h], expected)


def test_not_a_number_in_a_bias_is_not_taken_for_a_mask():
    bias = torch.zeros(2, 3, 7, dtype=torch.float64)
    bias[1, 2] = torch.nan
    mean = LogSumExp(random(*KEYS), 0.7, bias=bias).mean(random(2, 3, 5, seed=1))
    assert mean.isnan().nonzero()[:, :2].tolist() == [[1, 2]] * 5


@pytest.mark.parametrize("keys", [1, 7, 15, 63, 70, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_not_a_number_in_a_query_stays_visible(keys, dtype):
    """torch's CPU attention returns zeros for a query of NaN when there are few keys."""
    z = random(2, 3, 5, seed=1, dtype=dtype)
    z[0, 1] = torch.nan
    potential = LogSumExp(random(2, keys, 5, dtype=dtype), 0.7)
    for value in (potential.mean(z), potential.evaluate(z)[1], potential.evaluate(z)[0][..., None]):
        assert value[0, 1].isnan().all()
        assert value.isnan().sum() == value.shape[-1]


def test_large_scores_do_not_overflow():
    keys, z = 100 * random(*KEYS), 100 * random(2, 3, 5, seed=1)
    potential = LogSumExp(keys, 10.0)
    assert potential.value(z).isfinite().all()
    torch.testing.assert_close(potential.mean(z), keys.gather(1, (z @ keys.mT).argmax(-1)[..., None].expand(2, 3, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_diameter_is_that_of_the_keys_whatever_they_have_in_common(dtype):
    keys = (random(3, 600, 5, dtype=torch.float32) + 1000).to(dtype)
    exact = (keys.double()[:, :, None] - keys.double()[:, None]).norm(dim=-1).amax((1, 2))
    found = LogSumExp(keys, 1.0).diameter()
    assert found.dtype == dtype
    assert (found.double() >= exact).all()
    assert (found.double() <= exact * (1 + 4 * torch.finfo(dtype).eps + 1e-12)).all()


FORMS = {
    "plain": {},
    "mask": {"mask": (random(2, 1, 4, 70, seed=2) > 0).index_fill(2, torch.tensor(1), False)},
    "bias": {"bias": random(4, 70, seed=3)},
    "mask and bias": {"mask": random(2, 1, 4, 70, seed=2) > 0, "bias": random(4, 70, seed=3)},
    "padding": {"mask": random(2, 1, 1, 70, seed=4) > 0},
}


@pytest.mark.parametrize("form", FORMS)
def test_flash_kernels_equal_the_differentiable_path_in_any_layout(form):
    keys, beta = random(6, 70, 3, 2).permute(3, 2, 1, 0), torch.tensor([0.5, 1.0, 2.0]).double()
    z = random(6, 4, 3, 2, seed=1).permute(3, 2, 1, 0)
    potential, tracked = LogSumExp(keys, beta, **FORMS[form]), z.clone().requires_grad_()
    expected = potential.value(tracked).detach(), potential.mean(tracked).detach()
    check_close(tuple(potential.evaluate(z)), expected, 1e-12, 1e-13)
    check_close(potential.mean(z), expected[1], 1e-12, 1e-13)


def test_a_solve_of_whole_blocks_does_not_copy_the_mask_per_head():
    mask, x = torch.ones(2, 1, 32, 256, dtype=torch.bool).tril(100), random(2, 8, 32, 4)
    energy = AnchoredEnergy(LogSumExp(random(2, 8, 256, 4, seed=1), 0.5, mask=mask), x, 0.5)
    with Allocations() as seen:
        solve(energy, x)
    assert seen.largest < 2 * 8 * 32 * 256

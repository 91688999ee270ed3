"""Softmax1: the contract, log-sum-exp with a null key, and attention that may attend to nothing."""

import pytest
import torch
import torch.nn.functional as F
from key_pairs import KEYS, pairs, some_keys

from implicit_attention import ImplicitAttention, LogSumExp
from implicit_attention.potentials import Softmax1
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import PotentialContract


class TestPlain(PotentialContract):
    def make(self, dtype):
        return Softmax1(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        return Softmax1(random(*KEYS, dtype=dtype), **pairs(dtype))


@pytest.mark.parametrize("count", [7, 70])
def test_it_is_log_sum_exp_with_a_null_key(count):
    """With one key more, which is 0 and always attended to."""
    keys, values, beta = random(2, count, 5), random(2, count, 4, seed=3), torch.tensor([0.5, 1.3]).double()
    mask, bias, z, v = some_keys(count), random(3, count, seed=4), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    phi, more = Softmax1(keys, beta, mask=mask, bias=bias), {"mask": F.pad(mask, (0, 1), value=True)}
    null = LogSumExp(F.pad(keys, (0, 0, 0, 1)), beta, bias=F.pad(bias, (0, 1)), **more)
    check_close(phi.value(z), null.value(z), 1e-12)
    check_close(phi.mean(z), null.mean(z), 1e-12)
    check_close(phi.covariance_product(z, v), null.covariance_product(z, v), 1e-12)
    check_close(phi.probabilities(z), null.probabilities(z)[..., :-1], 1e-12)
    for dropout_p in (0.0, 0.4):
        torch.manual_seed(0)
        out = phi.readout(z, values, dropout_p=dropout_p)
        torch.manual_seed(0)
        check_close(out, null.readout(z, F.pad(values, (0, 0, 0, 1)), dropout_p=dropout_p), 1e-12)
    far = Softmax1(keys + 10, 0.5)
    check_close(far.lipschitz(), 0.5 * (keys + 10).norm(dim=-1).amax(-1).square() / 4, 1e-12)


def test_where_no_key_fits_it_attends_to_nothing():
    phi = Softmax1(10 * torch.eye(3).double(), 1.0)
    z = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]).double()
    near, far = phi.probabilities(z).sum(-1).tolist()
    assert near > 0.999
    assert far < 2e-4
    assert phi.bounded_below(1e9)


@pytest.mark.parametrize("readout", ["values", "state"])
def test_the_first_token_attends_to_itself_or_to_nothing(readout):
    torch.manual_seed(0)
    ours, plain = (
        ImplicitAttention(8, 2, potential=potential, readout=readout, causal=True)
        for potential in (Softmax1, LogSumExp)
    )
    plain.load_state_dict(ours.state_dict())
    x = random(2, 70, 8, dtype=torch.float32)
    assert ours(x)[:, 0].norm() < plain(x)[:, 0].norm()

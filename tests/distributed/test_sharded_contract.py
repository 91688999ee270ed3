"""The contract of potentials, for keys that are spread over a group of one process."""

from functools import partial

import pytest
import torch
from torch import distributed

from implicit_attention import AnchoredEnergy, ImplicitAttention, LogSumExp, Picard, equilibrium_attention, solve
from implicit_attention.distributed import ShardedLogSumExp, sequence_parallel
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import PotentialContract


@pytest.fixture(autouse=True, scope="module")
def group(tmp_path_factory):
    meeting = f"file://{tmp_path_factory.mktemp('group')}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class TestShardedLogSumExp(PotentialContract):
    """Keys of seven, a temperature and a bias per sample; not its second derivatives, which are refused, and vmap."""

    test_vmap_equals_a_loop = None

    def make(self, dtype):
        beta = torch.tensor([0.7, 1.3], dtype=dtype)
        mask = torch.arange(21).view(3, 7) % 4 != 1
        return ShardedLogSumExp(
            random(2, 7, 5, dtype=dtype), beta, group=None, mask=mask, bias=random(2, 1, 7, seed=9, dtype=dtype)
        )

    def test_first_and_second_derivatives(self):
        potential = self.make(torch.float64)
        keys, beta, mask, bias = potential.tensors()

        def functions(z, keys, beta, bias):
            changed = potential.replace(keys, beta, mask, bias)
            return *changed.evaluate(z), changed.readout(z, keys.sin())

        inputs = [t.detach().clone().requires_grad_() for t in (self.state(), keys, beta, bias)]
        assert torch.autograd.gradcheck(functions, inputs)


class TestWithoutPairs(TestShardedLogSumExp):
    """Without mask and bias, which other operations evaluate; one temperature."""

    def make(self, dtype):
        return ShardedLogSumExp(random(2, 7, 5, dtype=dtype), 0.8, group=None)

    def test_first_and_second_derivatives(self):
        potential = self.make(torch.float64)
        inputs = [t.detach().clone().requires_grad_() for t in (self.state(), potential.keys)]
        assert torch.autograd.gradcheck(lambda z, keys: potential.replace(keys).evaluate(z), inputs)


def test_no_process_knows_what_is_causal():
    potential = partial(ShardedLogSumExp, group=None)
    x = torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match=r"`is_causal` must be False.*sequence_parallel"):
        equilibrium_attention(x, x, x, is_causal=True, potential=potential)
    with pytest.raises(ValueError, match="`causal` must be False"):
        ImplicitAttention(8, 2, causal=True, potential=potential)(x)
    assert equilibrium_attention(x, x, x, potential=potential).shape == (1, 4, 8)


def test_many_numbers_and_whole_numbers_pass_through_one_process():
    query = torch.arange(1500 * 1000).reshape(1500, 1000).remainder(7).double()
    found = [
        solve(AnchoredEnergy(phi, query, 0.5), query, solver=Picard(max_steps=1), on_failure="ignore").value
        for keys in [random(3, 1000)]
        for phi in (ShardedLogSumExp(keys, 1.0, group=None), LogSumExp(keys, 1.0))
    ]
    torch.testing.assert_close(*found)
    x, numbers = torch.randn(1, 2, 3, 4), torch.arange(4)
    added = sequence_parallel(lambda query, key, value, numbers: query + numbers)
    assert torch.equal(added(x, x, x, numbers=numbers), x + numbers)


def test_what_is_no_group_is_refused(tmp_path):
    """A group that this process is not in, and a process without any group."""
    keys = torch.eye(3)
    with pytest.raises(ValueError, match="`group` must hold this process"):
        ShardedLogSumExp(keys, 1.0, group=distributed.GroupMember.NON_GROUP_MEMBER)
    distributed.destroy_process_group()
    try:
        with pytest.raises(ValueError, match="init_process_group first"):
            ShardedLogSumExp(keys, 1.0, group=None)
    finally:
        meeting = f"file://{tmp_path}/meeting"
        distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)

"""DistanceLogSumExp: the contract, softmax over distances, and precision far from the origin."""

import pytest
import torch
from key_pairs import KEYS, pairs

from implicit_attention import AnchoredEnergy, Anderson, MemoryLookup, equilibrium_attention, solve
from implicit_attention.potentials import DistanceLogSumExp
from implicit_attention.testing.numerics import check_close, random, relative_error
from implicit_attention.testing.potential import PotentialContract


class TestPlain(PotentialContract):
    def make(self, dtype):
        return DistanceLogSumExp(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        return DistanceLogSumExp(random(*KEYS, dtype=dtype), **pairs(dtype))


@pytest.mark.parametrize("count", [7, 70])
def test_weights_are_the_softmax_of_distances(count):
    keys, z, beta = random(2, count, 5), random(2, 3, 5, seed=1), torch.tensor([0.5, 1.3]).double()
    bias, mask = random(3, count, seed=4), random(2, 3, count, seed=9) > 0
    phi = DistanceLogSumExp(keys, beta, mask=mask, bias=bias)
    scores = bias - beta[:, None, None] * torch.cdist(z, keys).square() / 2
    p = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(phi.probabilities(z), p)
    torch.testing.assert_close(phi.mean(z), p @ keys)
    well = -scores.masked_fill(~mask, -torch.inf).logsumexp(-1) / beta[:, None]
    torch.testing.assert_close(z.square().sum(-1) / 2 - phi.value(z), well)


def test_keys_far_away_are_not_masked():
    mean = DistanceLogSumExp(torch.full((2, 3), 1e25), 1.0).mean(torch.zeros(1, 3))
    assert mean.isfinite().all()
    assert mean[0, 0] > 1e24


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("max_steps", [0, 50])
def test_attention_in_every_precision(dtype, tolerance, max_steps):
    query, keys, values = (random(2, 70, 8, seed=s, dtype=dtype) for s in range(3))
    options = {"scale": 0.5, "potential": DistanceLogSumExp, "max_steps": max_steps}
    found = equilibrium_attention(query, keys, values, **options)
    z, keys = query.double(), keys.double()
    for _ in range(200 if max_steps else 0):
        z = 0.5 * query.double() + 0.5 * (-0.25 * torch.cdist(z, keys).square()).softmax(-1) @ keys
    expected = (-0.25 * torch.cdist(z, keys).square()).softmax(-1) @ values.double()
    assert relative_error(found.double(), expected) < tolerance


@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1000.0, 10000.0])
def test_far_from_the_origin_weights_and_recall_are_those_at_it(offset):
    sign = torch.tensor([1.0, -1.0]).repeat(10)[:, None]
    keys = (0.2 * random(20, 4) + offset * sign).float()
    z = keys[:6] + 0.1 * random(6, 4, seed=1).float()
    exact = (-4 * (z.double()[:, None] - keys.double()).square().sum(-1)).softmax(-1)
    check_close(DistanceLogSumExp(keys, 8.0).probabilities(z).double(), exact, 0, 1e-5)
    patterns = 0.2 * random(20, 4)
    queries = patterns[:6] + 0.05 * random(6, 4, seed=1)
    near, far = MemoryLookup(4, beta=8.0, dtype=torch.float64), MemoryLookup(4, beta=8.0)
    near.store(patterns, patterns)
    far.store((patterns + offset).float(), (patterns + offset).float())
    # Numbers themselves are rounded there, and a tolerance relative to |z| is one of the offset.
    rounding = 4 * offset * torch.finfo(torch.float32).eps
    solver = Anderson(rtol=0.0, atol=1e-5 + rounding)
    state = far.retrieve((queries + offset).float(), solver=solver, on_failure="raise").double() - offset
    check_close(state, near.retrieve(queries, solver=Anderson(rtol=1e-9)), 0, 1e-3 + 40 * rounding)


def test_gradients_far_from_the_origin_are_those_at_it():
    keys, z, found = 0.2 * random(20, 4), 0.2 * random(6, 4, seed=1), []
    for offset, dtype in ((0.0, torch.float64), (128.0, torch.float32)):
        tensors = keys + offset, z + offset, torch.tensor(8.0)
        keys_there, z_there, beta = leaves = [t.to(dtype).requires_grad_() for t in tensors]
        p = DistanceLogSumExp(keys_there, beta).probabilities(z_there)
        found.append(torch.autograd.grad((p * torch.arange(20.0, dtype=dtype)).sum(), leaves))
    for exact, far in zip(*found, strict=True):
        check_close(far.double(), exact, 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("anchor", [0.0, 0.3])
def test_solves_do_not_know_where_the_origin_is(anchor, dtype):
    """An offset changes neither evaluations nor gradients, energies by a constant; all ended at their start before."""
    mask, weights, found = random(2, 1, 20, seed=2) > 0, random(2, 6, 4, seed=3), []
    keys = random(2, 20, 4)
    keys = keys - (keys * mask.mT).sum(-2, keepdim=True) / mask.sum(-1, keepdim=True)
    for offset, precision in ((0.0, torch.float64), (1e4, dtype)):
        # Nobody reads the keys that are masked.
        there = (keys + offset).masked_fill(~mask.mT, -7.0).to(precision).requires_grad_()
        query = (random(2, 6, 4, seed=1) + offset).to(precision)
        energy = AnchoredEnergy(DistanceLogSumExp(there, 2.0, mask=mask), query, anchor)
        solution = solve(energy, query, trace=True)
        value, course = solution.value, solution.trace
        torch.testing.assert_close(course.energy[-1], solution.energy)
        torch.testing.assert_close(course.value[-1], value.detach())
        (by_keys,) = torch.autograd.grad((value * weights.to(precision)).sum(), there)
        found.append((value.detach().double() - offset, by_keys.double(), solution.num_evals))
    (exact, by_exact, evals), (far, by_far, spent) = found
    near = 1e-9 if dtype == torch.float64 else 0.01
    assert int(evals.max()) > 5
    assert int((spent - evals).abs().max()) <= (0 if dtype == torch.float64 else 2)
    check_close(far, exact, 0, near)
    check_close(by_far, by_exact, 0, 20 * near)


def test_a_wide_memory_is_not_moved_and_a_compiled_or_mapped_one_is():
    keys, query = 100 * random(20, 4), 100 * random(6, 4, seed=1)
    energy = AnchoredEnergy(DistanceLogSumExp(keys - keys.mean(0), 2.0), query, 0.3)
    assert solve(energy, query).num_evals.max() <= 3

    def answer(query, keys):
        return solve(AnchoredEnergy(DistanceLogSumExp(keys, 2.0), query, 0.3), query).value

    keys, query = random(2, 20, 4) + 1e4, random(2, 6, 4, seed=1) + 1e4
    expected = torch.stack([answer(q, k) for q, k in zip(query, keys, strict=True)])
    torch.testing.assert_close(torch.vmap(answer)(query, keys), expected, rtol=0, atol=1e-4)
    tangent = torch.func.jvp(lambda q: answer(q, keys[0]), (query[0],), (torch.ones_like(query[0]),))[1]
    near = torch.func.jvp(lambda q: answer(q, keys[0] - 1e4), (query[0] - 1e4,), (torch.ones_like(query[0]),))[1]
    torch.testing.assert_close(tangent, near, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["mask", "bias", "causal", "vmap"])
def test_a_query_without_keys_stays_where_its_anchor_holds_it(how):
    keys, query, anchor = random(6, 3) + 100, random(6, 3, seed=1) + 100, 0.3
    mask = (
        torch.ones(6, 6, dtype=torch.bool).tril(-1) if how == "causal" else (torch.arange(6) != 1)[:, None].expand(6, 6)
    )
    bias = torch.zeros(6, 6).double().masked_fill(~mask, -torch.inf)
    options = {"bias": bias} if how == "bias" else {"mask": mask}

    def answer(query, keys, **options):
        return solve(AnchoredEnergy(DistanceLogSumExp(keys, 2.0, **options), query, anchor), query).value

    if how == "vmap":
        found = torch.vmap(lambda q, k, m: answer(q, k, mask=m))(query[None], keys[None], mask[None])[0]
    else:
        found = answer(query, keys, **options)
    alone = int((~mask.any(-1)).nonzero()[0])
    torch.testing.assert_close(found[alone], anchor * query[alone])
    rest = torch.arange(6) != alone
    scores = -torch.cdist(found, keys).square()
    mean = scores.masked_fill(~mask, -torch.inf)[rest].softmax(-1) @ keys
    torch.testing.assert_close(found[rest], anchor * query[rest] + (1 - anchor) * mean, rtol=0, atol=1e-3)


def test_a_causal_offset_goes_into_the_mask():
    with pytest.raises(TypeError, match="query_offset"):
        DistanceLogSumExp(torch.eye(3), 0.5, query_offset=1)

"""DistanceLogSumExp: the potential contract, softmax over distances, fused gradients of the squares, and memories."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    SolveOptions,
    solve,
)
from implicit_attention.attention.call import Call
from implicit_attention.attention.core import attend
from implicit_attention.ops.dispatch import solve_adjoint
from implicit_attention.potentials import DistanceLogSumExp
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)
BETAS = torch.tensor([0.5, 1.3], dtype=torch.float64)


def empty_row(count=7):
    mask = random(2, 3, count, seed=9) > 0
    mask[0, 1] = False
    return mask


class TestPlain(PotentialContract):
    def make(self, dtype):
        return DistanceLogSumExp(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        bias = random(2, 3, 7, seed=4, dtype=dtype)
        return DistanceLogSumExp(random(*KEYS, dtype=dtype), BETAS.to(dtype), mask=empty_row(), bias=bias)


@pytest.mark.parametrize("count", [7, 70])
@pytest.mark.parametrize("beta", [0.7, BETAS], ids=["number", "per head"])
def test_weights_are_the_softmax_of_distances(count, beta):
    keys, values, z = random(2, count, 5), random(2, count, 4, seed=3), random(2, 3, 5, seed=1)
    bias, mask = random(3, count, seed=4), random(2, 3, count, seed=9) > 0
    phi = DistanceLogSumExp(keys, beta, mask=mask, bias=bias)
    b = beta if isinstance(beta, float) else beta[:, None, None]
    scores = (bias - b * (z[:, :, None] - keys[:, None]).square().sum(-1) / 2).masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1)
    torch.testing.assert_close(phi.probabilities(z), p)
    torch.testing.assert_close(phi.mean(z), p @ keys)
    torch.testing.assert_close(phi.readout(z, values), p @ values)
    well = -scores.logsumexp(-1, keepdim=True) / b
    torch.testing.assert_close(z.square().sum(-1) / 2 - phi.value(z), well.squeeze(-1))


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_ground_truth():
    keys = double([1.0, 0.5], [-0.5, 1.2], [0.3, -1.0], [-1.0, -0.4])
    z, v = double([0.6, -0.3]), double([0.5, -1.0])
    phi, close = DistanceLogSumExp(keys, 1.5), {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(phi.value(z), double(0.457000683716), **close)
    torch.testing.assert_close(phi.mean(z), double([0.395525522636, -0.241124333075]), **close)
    torch.testing.assert_close(phi.covariance_product(z, v), double([0.048858706, -0.761042695]), **close)
    found = solve(AnchoredEnergy(phi, z, 0.3), z, solver=Anderson(rtol=1e-13, atol=1e-13))
    torch.testing.assert_close(found.value, double([0.340076372782, -0.287366143760]), **close)


def equilibrium(make, query, keys, beta, impl, **given):
    energy = AnchoredEnergy(make(keys, beta, **given), query, 0.4)
    solution = solve(energy, query.detach(), solver=Anderson(history=1, rtol=1e-12), impl=impl)
    assert solution.converged.all()
    return solution


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "grouped keys"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_fused_gradients_are_those_of_unrolled_steps(shared, masked):
    lead = (3, 1) if shared else (3, 2)
    query, keys, beta = random(3, 2, 4, 5), random(*lead, 70, 5, seed=1), BETAS.clone()
    query, keys, beta = (t.requires_grad_() for t in (query, keys, beta))
    bias = random(70, seed=6).requires_grad_()
    mask = random(4, 70, seed=7) > 0 if masked else None
    given = {"bias": bias} if mask is None else {"bias": bias, "mask": mask}
    solution = equilibrium(DistanceLogSumExp, query, keys, beta, "tiled", **given)
    z = query
    for _ in range(200):
        scores = bias - beta[:, None, None] * (z[..., :, None, :] - keys[..., None, :, :]).square().sum(-1) / 2
        z = 0.4 * query + 0.6 * (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ keys
    cotangent = random(3, 2, 4, 5, seed=8)
    tensors = [query, keys, beta, bias]
    got, expected = (torch.autograd.grad(out, tensors, cotangent) for out in (solution.value, z))
    for name, a, b in zip(("query", "keys", "beta", "bias"), got, expected, strict=True):
        assert relative_error(a, b) < 1e-7, name
    assert (solution.adjoint.status == 0).all()


def test_the_adjoint_in_many_tiles_adds_up_the_bias(monkeypatch):
    from implicit_attention.ops import dispatch
    from implicit_attention.ops.problem import Hopfield

    query, keys = random(3, 2, 40, 5), random(3, 1, 70, 5, seed=1)
    ones = torch.ones(1, 1, 1, 1).double()
    problem = Hopfield(query, keys, 0.5 * ones, 0.4 * ones, random(1, 1, 1, 70, seed=3))
    state, cotangent = random(3, 2, 40, 5, seed=4), random(3, 2, 40, 5, seed=5)
    whole, parts = (torch.zeros(3, 2, 70).double() for _ in range(2))
    dispatch.tiled_adjoint(problem, state, cotangent, dispatch.AdjointRule(1e-12, 100), by_bias=whole)
    dispatch.tiled_adjoint(problem, state, cotangent, dispatch.AdjointRule(1e-12, 100), by_bias=parts, size=70 * 8)
    torch.testing.assert_close(parts, whole)
    found = solve_adjoint(problem, state, cotangent, 1e-12, 100, "auto")

    def mapped(bias):
        return 0.6 * (0.5 * state @ keys.mT + bias[..., None, :]).softmax(-1) @ keys

    _, pullback = torch.func.vjp(mapped, random(1, 1, 70, seed=3).expand(3, 2, 70))
    torch.testing.assert_close(whole, pullback(found.value)[0])


def test_a_bias_per_key_has_its_gradient_fused(monkeypatch):
    query, keys, bias = random(2, 3, 5), random(2, 70, 5, seed=1), random(2, 1, 70, seed=2).requires_grad_()
    expected = torch.autograd.grad(
        equilibrium(LogSumExp, query, keys, 0.5, "reference", bias=bias).value.square().sum(), bias
    )
    monkeypatch.setattr(LogSumExp, "linearize", None)  # asked for by every other way
    got = torch.autograd.grad(equilibrium(LogSumExp, query, keys, 0.5, "auto", bias=bias).value.square().sum(), bias)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


def test_what_a_masked_key_holds_reaches_nothing():
    keys, beta, z = random(*KEYS).requires_grad_(), BETAS.clone().requires_grad_(), random(2, 3, 5, seed=1)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[:2, 4] = False
    bad = keys.detach().clone()
    bad[:, 4] = torch.nan
    bad.requires_grad_()
    clean = DistanceLogSumExp(keys, beta, mask=mask)
    for given in ({"mask": mask}, {"bias": torch.zeros(3, 7).double().masked_fill(~mask, -torch.inf)}):
        phi = DistanceLogSumExp(bad, beta, **given)
        mean = phi.mean(z)
        assert mean[:, 2].isnan().all()
        torch.testing.assert_close(mean[:, :2], clean.mean(z)[:, :2])
        by_beta = torch.autograd.grad(phi.mean(z)[:, :2].sum(), beta, retain_graph=True)[0]
        torch.testing.assert_close(by_beta, torch.autograd.grad(clean.mean(z)[:, :2].sum(), beta, retain_graph=True)[0])


def test_keys_far_away_are_not_masked():
    keys = torch.full((2, 3), 1e25)
    phi = DistanceLogSumExp(keys, 1.0)
    assert phi.mean(torch.zeros(1, 3)).isfinite().all()
    assert phi.mean(torch.zeros(1, 3))[0, 0] > 1e24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_steps", [0, 50])
def test_layers_take_it_in_every_precision(dtype, max_steps):
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2, potential=DistanceLogSumExp, causal=True, dtype=dtype, max_steps=max_steps)
    x = random(2, 70, 8, dtype=dtype).requires_grad_()
    out = layer(x)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters() if max_steps)
    query, keys, values = (random(2, 70, 8, seed=s, dtype=dtype) for s in range(3))
    options = SolveOptions(max_steps=max_steps)
    found = attend(Call(query, keys, values, torch.tensor(0.5), 0.5, options, potential=DistanceLogSumExp)).output
    z = query.double()
    for _ in range(200 if max_steps else 0):
        weights = (-0.25 * torch.cdist(z, keys.double()).square()).softmax(-1)
        z = 0.5 * query.double() + 0.5 * weights @ keys.double()
    expected = (-0.25 * torch.cdist(z, keys.double()).square()).softmax(-1) @ values.double()
    assert relative_error(found.double(), expected) < (1e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_layer_compiles():
    torch._dynamo.reset()
    layer, x = ImplicitAttention(8, 2, potential=DistanceLogSumExp), random(2, 70, 8, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))
    layer.requires_grad_(False)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))
    layer.requires_grad_(True)
    gradients = [
        torch.autograd.grad(f(x).sum(), list(layer.parameters()))
        for f in (torch.compile(layer, backend="eager"), layer)
    ]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_memories_by_distance_use_it():
    torch.manual_seed(0)
    memory = MemoryLookup(5, size=70, learned=True, anchor=0.4, dtype=torch.float64)
    queries = random(3, 5, seed=1)
    out, solution = memory.retrieve(queries, return_solution=True)
    z, b = queries, memory.beta()
    for _ in range(300):
        z = 0.4 * queries + 0.6 * (-b / 2 * torch.cdist(z, memory.patterns).square()).softmax(-1) @ memory.patterns
    assert solution.converged.all()
    assert relative_error(out, z) < 1e-3
    parameters = [memory.patterns, *memory.beta.parameters()]
    got, expected = (torch.autograd.grad(f.square().sum(), parameters) for f in (out, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-3


@pytest.mark.parametrize("clusters", [1, 2])
@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1000.0, 10000.0])
def test_weights_in_float32_are_right_far_from_the_origin(offset, clusters):
    sign = torch.tensor([1.0, 1.0 if clusters == 1 else -1.0]).repeat(10)[:, None]
    keys = (0.2 * random(20, 4) + offset * sign).float()
    z = keys[:6] + 0.1 * random(6, 4, seed=1).float()
    squares = (z.double()[:, None] - keys.double()).square().sum(-1)
    phi, exact = DistanceLogSumExp(keys, 8.0), (-4 * squares).softmax(-1)
    assert (phi.probabilities(z) - exact).abs().max() < 1e-5
    values = random(20, 3, seed=2).float()
    torch.testing.assert_close(phi.readout(z, values).double(), exact @ values.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", [10.0, 100.0, 1000.0, 10000.0])
def test_memories_far_from_the_origin_recall_what_they_recall_at_it(offset):
    patterns = 0.2 * random(20, 4)
    queries = patterns[:6] + 0.05 * random(6, 4, seed=1)
    near, far = MemoryLookup(4, beta=8.0, dtype=torch.float64), MemoryLookup(4, beta=8.0)
    near.store(patterns, patterns)
    moved = (patterns + offset).float()
    far.store(moved, moved)
    # Numbers themselves are rounded there, and a tolerance relative to |z| is one of the offset.
    rounding = 4 * offset * torch.finfo(torch.float32).eps
    solver = Anderson(rtol=0.0, atol=1e-5 + rounding)
    state = far.retrieve((queries + offset).float(), solver=solver, on_failure="raise")
    torch.testing.assert_close(
        state.double() - offset, near.retrieve(queries, solver=Anderson(rtol=1e-9)), rtol=0, atol=1e-3 + 40 * rounding
    )


def test_gradients_far_from_the_origin_are_those_at_it():
    keys, z = 0.2 * random(20, 4), 0.2 * random(6, 4, seed=1)
    found = []
    for offset, dtype in ((0.0, torch.float64), (128.0, torch.float32)):
        leaves = [(t + offset).to(dtype).requires_grad_() for t in (keys, z)]
        leaves.append(torch.tensor(8.0, dtype=dtype, requires_grad=True))
        phi = DistanceLogSumExp(leaves[0], leaves[2])
        p = phi.probabilities(leaves[1])
        loss = (p * torch.arange(20.0, dtype=dtype)).sum()
        found.append(torch.autograd.grad(loss, leaves))
        assert p.dtype == dtype
    for exact, far in zip(*found, strict=True):
        torch.testing.assert_close(far.double(), exact, rtol=2e-3, atol=2e-3)

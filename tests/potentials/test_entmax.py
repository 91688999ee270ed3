"""Entmax: the potential contract, its numbers by other routes, exact retrieval, learned orders."""

import functools
import math
import warnings

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    Picard,
    SolveOptions,
    solve,
)
from implicit_attention.attention.call import Call
from implicit_attention.attention.core import attend
from implicit_attention.linear import CG
from implicit_attention.potentials import Entmax
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)
DOUBLE = {"dtype": torch.float64}
EXAMPLE = torch.tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]], **DOUBLE)
STATE, DIRECTION = torch.tensor([[0.6, -0.3]], **DOUBLE), torch.tensor([[0.5, -1.0]], **DOUBLE)


def empty_row():
    mask = random(2, 3, 7, seed=9) > 0
    mask[0, 1] = False
    return mask


def orders(dtype=torch.float64):
    return torch.tensor([1.25, 1.6], **DOUBLE).to(dtype)


class TestDefault(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), 0.7)


class TestOrder13(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), 0.7, alpha=1.3)


class TestSparsemax(PotentialContract):
    def make(self, dtype):
        return Entmax(random(*KEYS, dtype=dtype), 0.7, alpha=2.0)


class TestOrderPerEntry(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], **DOUBLE).to(dtype)
        return Entmax(random(*KEYS, dtype=dtype), beta, alpha=orders(dtype))


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        bias = random(2, 3, 7, seed=4, dtype=dtype)
        beta = torch.tensor([0.5, 0.8], **DOUBLE).to(dtype)
        return Entmax(random(*KEYS, dtype=dtype), beta, mask=empty_row(), bias=bias)


class TestMaskAndBiasOrderPerEntry(PotentialContract):
    def make(self, dtype):
        bias = random(3, 7, seed=4, dtype=dtype)
        return Entmax(random(*KEYS, dtype=dtype), 0.7, alpha=orders(dtype), mask=empty_row(), bias=bias)


def by_sorting(scores, alpha):
    """Alpha-entmax at 2 and 1.5 from the closed form of the threshold on the first n sorted scores, for every n."""
    found = torch.zeros_like(scores)
    for row, out in zip(scores.reshape(-1, scores.shape[-1]), found.view(-1, scores.shape[-1]), strict=True):
        x = (row * (alpha - 1)).sort(descending=True).values
        for n in range(1, len(x) + 1):
            head = x[:n]
            if alpha == 2:
                tau = (head.sum() - 1) / n
            else:
                spread = (head - head.mean()).square().sum()
                tau = head.mean() - ((1 - spread).clamp(min=0) / n).sqrt()
            if n == len(x) or x[n] <= tau:
                break
        out.copy_((row * (alpha - 1) - tau).clamp(min=0) ** (1 / (alpha - 1)))
    return found


def by_bisection(scores, alpha):
    """The same for every alpha, the threshold to the last bit by halving."""
    x = (alpha - 1) * scores
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(200):
        middle = (low + high) / 2
        above = ((x - middle).clamp(min=0) ** (1 / (alpha - 1))).sum(-1, keepdim=True) >= 1
        low, high = middle.where(above, low), high.where(above, middle)
    p = (x - low).clamp(min=0) ** (1 / (alpha - 1))
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("alpha", "value", "mean", "product", "p", "equilibrium"),
    [
        (
            1.5,
            0.725588161270,
            (0.638864477803, -0.273861833278),
            (-0.426753607, -0.914472016),
            (0.484092111148, 0, 0.515907888852, 0),
            (0.807911417820, 0.125226769428),
        ),
        (2.0, 0.632004166667, (0.634250, -0.283750), (-0.603750, -1.293750), (0.4775, 0, 0.5225, 0), (0.88, 0.26)),
    ],
)
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_known_numbers(alpha, value, mean, product, p, equilibrium, tensor):
    phi = Entmax(EXAMPLE, 1.5, alpha=torch.tensor(alpha, **DOUBLE) if tensor else alpha)
    solution = solve(AnchoredEnergy(phi, STATE, 0.3), STATE, solver=Anderson(rtol=1e-14, atol=1e-14))
    for found, expected, digits in (
        (phi.value(STATE), value, 12),
        (phi.mean(STATE), mean, 12),
        (phi.covariance_product(STATE, DIRECTION), product, 9),
        (phi.probabilities(STATE), p, 12),
        (solution.value, equilibrium, 12),
    ):
        error = (found.flatten() - torch.tensor(expected, **DOUBLE)).abs().max()
        assert error <= 0.51 * 10**-digits + 1e-14


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_weights_equal_those_by_sorting_and_by_bisection(scale, count):
    scores = scale * random(6, count, seed=count)
    phi = functools.partial(Entmax, torch.eye(count, **DOUBLE), 1.0)
    for alpha in (1.5, 2.0):
        torch.testing.assert_close(
            phi(alpha=alpha).probabilities(scores), by_sorting(scores, alpha), rtol=0, atol=4e-15 * max(scale, 4)
        )
    for alpha in (1.1, 1.3, 1.5, 1.8, 2.0):
        found = phi(alpha=alpha).probabilities(scores)
        torch.testing.assert_close(found, by_bisection(scores, alpha), rtol=0, atol=4e-14 * max(scale, 4))
        learned = phi(alpha=torch.tensor(alpha, **DOUBLE)).probabilities(scores)
        torch.testing.assert_close(learned, found, rtol=0, atol=1e-13)


@pytest.mark.parametrize("alpha", [1.0001, 1.3, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_are_probabilities_whatever_the_scores(alpha, dtype):
    count = 300
    spaced = torch.stack(
        [
            torch.zeros(count),
            -torch.arange(count) / count,
            -(0.97 ** torch.arange(count).flip(0)),
            -(2.0 ** -torch.arange(count)),
            1e30 * torch.linspace(-1, 1, count),
            torch.full((count,), torch.finfo(torch.float32).min),
            torch.linspace(0, -3, count).exp().log2().where(torch.arange(count) % 2 == 0, -torch.inf),
        ]
    ).to(dtype)
    phi = Entmax(torch.zeros(count, 1, dtype=dtype), 1.0, alpha=alpha, bias=spaced)
    p = phi.probabilities(torch.zeros(len(spaced), 1, dtype=dtype))
    assert p.isfinite().all()
    assert (p >= 0).all()
    assert ((p.sum(-1) - 1).abs() <= 8 * torch.finfo(dtype).eps).all()
    assert (p[-1, 1::2] == 0).all()
    torch.testing.assert_close(p[0], torch.full_like(p[0], 1 / count))
    assert phi.value(torch.zeros(len(spaced), 1, dtype=dtype))[:4].isfinite().all()


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_the_steps_without_a_look_find_what_the_others_find(alpha):
    """Under torch.func the host does not stop the Newton steps: a fixed number of them has to do."""
    keys, z = random(60, 5), 4 * random(3, 2, 5, seed=1)
    phi = Entmax(keys, 0.9, alpha=alpha)
    torch.testing.assert_close(torch.vmap(phi.probabilities)(z), phi.probabilities(z), rtol=0, atol=1e-15)


@pytest.mark.parametrize("a", [1.0, 0.3, 0.5])
def test_value_is_the_maximum_over_the_simplex(a):
    alpha, scores = 1 + a, random(4, 9, seed=3)
    phi = Entmax(torch.eye(9, **DOUBLE), 1.0, alpha=alpha)

    def objective(p):
        return (p * scores).sum(-1) + (1 - (p**alpha).sum(-1)) / (alpha * (alpha - 1))

    value, p = phi.value(scores), phi.probabilities(scores)
    torch.testing.assert_close(value, objective(p), rtol=1e-13, atol=1e-14)
    for seed in range(30):
        other = random(4, 9, seed=seed).softmax(-1)
        assert (objective(0.99 * p + 0.01 * other) < value).all()


def test_near_one_it_is_log_sum_exp():
    keys, z, v = random(*KEYS), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    soft = LogSumExp(keys, 0.7, mask=empty_row())
    errors = []
    for a in (1e-3, 1e-4, 1e-5):
        phi = Entmax(keys, 0.7, alpha=1 + a, mask=empty_row())
        pairs = [
            (phi.value(z), soft.value(z)),
            (phi.mean(z), soft.mean(z)),
            (phi.covariance_product(z, v), soft.covariance_product(z, v)),
        ]
        errors.append([relative_error(found, expected) for found, expected in pairs])
    errors = torch.tensor(errors, **DOUBLE)
    assert (errors[-1] < 3e-5).all()
    # The difference is of first order in alpha - 1.
    torch.testing.assert_close(errors[:-1] / errors[1:], torch.full((2, 3), 10.0, **DOUBLE), rtol=0.05, atol=0)
    single = Entmax(keys.float(), 0.7, alpha=1 + 1e-6)
    assert relative_error(single.mean(z.float()), LogSumExp(keys, 0.7).mean(z)) < 1e-5


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_a_key_beyond_the_margin_is_retrieved_exactly(alpha):
    """Where k_i beats others by 1/((alpha - 1) beta) + 2 M eps, one step returns it without rounding."""
    keys, eps = random(12, 20, seed=5), 0.05
    lengths = keys.norm(dim=-1)
    products = keys @ keys.mT
    gaps = (products.diagonal()[:, None] - products).fill_diagonal_(math.inf).amin(-1)
    beta = float(1.0001 / ((alpha - 1) * (gaps.amin() - 2 * lengths.amax() * eps)))
    assert beta > 0
    noise = random(8, 12, 20, seed=6)
    z = keys + eps * noise / noise.norm(dim=-1, keepdim=True)
    phi = Entmax(keys, beta, alpha=alpha)
    assert torch.equal(phi.mean(z), keys.expand_as(z))
    # And there it neither moves nor bends: the solve ends with a residual of 0.
    assert phi.covariance_product(z, noise).eq(0).all()
    found = solve(AnchoredEnergy(phi, z, 0.0), z)
    assert torch.equal(found.value, keys.expand_as(z))
    assert (found.residual == 0).all()
    # Well below the margin others are read too.
    assert (Entmax(keys, 0.1 * beta, alpha=alpha).mean(z) != keys).any()


def test_masked_rows_and_what_masked_keys_hold_change_nothing():
    keys, mask = random(*KEYS), random(2, 3, 7, seed=9) > 0
    mask[0, 1], mask[..., 4], mask[1, 2, 4] = False, False, True
    z, bias = random(2, 3, 5, seed=1), random(2, 3, 7, seed=4)
    poisoned = keys.clone()
    poisoned[:, 4] = torch.nan
    clean, dirty = (Entmax(k, 0.7, alpha=orders(), mask=mask, bias=bias) for k in (keys, poisoned))
    reads = mask[..., 4]
    for method in ("value", "mean", "probabilities"):
        found, expected = getattr(dirty, method)(z), getattr(clean, method)(z)
        assert found[reads].isnan().all()
        torch.testing.assert_close(found[~reads], expected[~reads], rtol=0, atol=0)
    assert clean.value(z)[0, 1] == 0
    assert clean.mean(z)[0, 1].eq(0).all()
    assert clean.readout(z, random(2, 7, 4))[0, 1].eq(0).all()
    assert clean.linearize(z).product(z)[0, 1].eq(0).all()


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_gradients_are_finite_beside_masked_keys_and_rows(alpha):
    mask = empty_row()
    bias = random(2, 3, 7, seed=4).masked_fill(random(2, 3, 7, seed=5) > 1, -torch.inf)
    bias[1, 2] = -torch.inf
    inputs = [random(2, 3, 5, seed=1), random(*KEYS), bias, torch.tensor([alpha, alpha], **DOUBLE)]
    z, keys, bias, order = (t.requires_grad_() for t in inputs)
    phi = Entmax(keys, 50.0, alpha=order, mask=mask, bias=bias)
    value, mean = phi.evaluate(z)
    first = torch.autograd.grad(value.sum() + mean.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert all(g.isfinite().all() for g in (*first, *second))
    assert first[0][0, 1].eq(0).all()
    assert first[0][1, 2].eq(0).all()


def test_forward_mode_equals_reverse_mode():
    inputs = (random(2, 3, 5), random(*KEYS, seed=1), orders())
    tangents = (random(2, 3, 5, seed=2), random(*KEYS, seed=3), random(2, seed=4))

    def evaluated(z, keys, alpha):
        return Entmax(keys, 0.7, alpha=alpha).evaluate(z)

    _, forward = torch.func.jvp(evaluated, inputs, tangents)
    _, pullback = torch.func.vjp(evaluated, *inputs)
    _, pushed = torch.func.vjp(pullback, tuple(torch.zeros_like(t) for t in forward))
    for a, b in zip(forward, pushed(tangents)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_readout_reads_values_by_the_weights():
    values, z = random(2, 7, 4, seed=3), random(2, 3, 5, seed=1)
    phi = Entmax(random(*KEYS), 0.7, alpha=orders(), mask=empty_row())
    torch.testing.assert_close(phi.readout(z, values), phi.probabilities(z) @ values, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(phi.readout(z, phi.keys), phi.mean(z), rtol=1e-13, atol=1e-14)
    assert phi.readout(z, values, dropout_p=1.0).eq(0).all()
    half = Entmax(phi.keys.bfloat16(), 0.7, alpha=orders(torch.bfloat16))
    out = half.readout(z.bfloat16(), values.bfloat16())
    assert out.dtype == torch.bfloat16
    assert relative_error(out, Entmax(phi.keys, 0.7, alpha=orders()).readout(z, values)) < 0.05
    torch.manual_seed(0)
    dropped = phi.readout(z.expand(4000, *z.shape), values, dropout_p=0.3).mean(0)
    assert relative_error(dropped, phi.readout(z, values)) < 0.05


def test_equilibria_and_their_gradients():
    tensors = [
        random(2, 3, 5),
        0.6 * random(*KEYS, seed=1),
        torch.tensor([0.5, 0.8], **DOUBLE),
        orders(),
        random(7, seed=4),
    ]
    query, keys, beta, alpha, bias = (t.requires_grad_() for t in tensors)
    phi = Entmax(keys, beta, alpha=alpha, bias=bias, mask=empty_row())
    tight = Anderson(rtol=1e-13, atol=1e-13)
    found = solve(AnchoredEnergy(phi, query, 0.4), query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12)))
    assert found.converged.all()
    z = query
    for _ in range(400):
        z = 0.4 * query + 0.6 * phi.mean(z)
    assert relative_error(found.value, z) < 1e-11
    cotangent = random(2, 3, 5, seed=8)
    got, expected = (torch.autograd.grad(v, tensors, cotangent) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_attention_differentiates_as_an_unrolled_reference(alpha):
    """The reference writes the map out with weights by bisection, and unrolls one more step for the gradient of it."""
    query, keys = random(2, 2, 3, 4, seed=3).requires_grad_(), (0.3 * random(2, 2, 6, 4, seed=6)).requires_grad_()
    values = random(2, 2, 6, 3, seed=11).requires_grad_()
    inputs, beta, anchor = (query, keys, values), 0.6, 0.5

    def weights(z):
        scores = beta * z @ keys.mT
        support = by_bisection(scores.detach(), alpha) > 0
        x = (alpha - 1) * scores
        n = support.double().sum(-1, keepdim=True)
        mean = x.where(support, 0.0).sum(-1, keepdim=True) / n
        spread = (x - mean).square().where(support, 0.0).sum(-1, keepdim=True)
        tau = mean - (1 / n if alpha == 2 else ((1 - spread) / n).sqrt())
        return ((x - tau).where(support, 0.0)) ** round(1 / (alpha - 1))

    z = query
    for _ in range(200):
        z = anchor * query + (1 - anchor) * weights(z) @ keys
    expected = weights(z) @ values
    options = SolveOptions(solver=Anderson(rtol=1e-13, atol=1e-13), adjoint=Implicit(CG(rtol=1e-13)))
    make = functools.partial(Entmax, alpha=alpha)
    found = attend(Call(query, keys, values, beta, anchor, options, potential=make)).output
    assert relative_error(found, expected) < 1e-11
    cotangent = random(*found.shape, seed=12)
    got, truth = (torch.autograd.grad(v, inputs, cotangent) for v in (found, expected))
    for a, b in zip(got, truth, strict=True):
        assert relative_error(a, b) < 1e-8


@pytest.mark.parametrize("readout", ["values", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_trains_a_step_without_a_warning(readout, dtype):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        factory = functools.partial(Entmax, alpha=2.0)
        layer = ImplicitAttention(8, 2, potential=factory, readout=readout, causal=True, dtype=dtype)
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
        x, before = random(2, 30, 8, dtype=dtype), [p.detach().clone() for p in layer.parameters()]
        out = layer(x)
        assert layer.last_solve.converged.all()
        out.float().square().sum().backward()
        optimiser.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_an_order_can_be_learned():
    """The order that made the data is found again by descent."""
    keys, z = random(10, 5, seed=1), random(40, 5)
    target = Entmax(keys, 1.0, alpha=1.7).probabilities(z)
    free = torch.zeros((), **DOUBLE, requires_grad=True)
    optimiser = torch.optim.LBFGS([free], max_iter=50, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def loss():
        optimiser.zero_grad()
        found = (Entmax(keys, 1.0, alpha=1 + free.sigmoid()).probabilities(z) - target).square().sum()
        found.backward()
        return found

    optimiser.step(loss)
    assert abs(1 + float(free.detach().sigmoid()) - 1.7) < 1e-4


def test_the_bound_on_the_curvature_is_nearly_reached():
    # Two keys of equal weight: the Jacobian of p is 1/4 (alpha -> 1) to 1/2 (alpha = 2) times (v_1 - v_2).
    keys, z = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], **DOUBLE), torch.zeros(1, 2, **DOUBLE)
    for alpha in (1.1, 1.5, 2.0):
        phi = Entmax(keys, 3.0, alpha=alpha)
        curvature = phi.covariance_product(z, torch.tensor([[1.0, 0.0]], **DOUBLE))[0, 0]
        torch.testing.assert_close(phi.lipschitz(), curvature, rtol=1e-8, atol=0)
    assert Entmax(keys, 3.0).bounded_below(math.inf)


def test_log_sum_exps_over_parts_of_the_keys_are_not_offered():
    assert not hasattr(Entmax(random(*KEYS), 0.7), "readout_with_logsumexp")


@pytest.mark.parametrize("alpha", [1.0, 0.5, 2.0001, math.nan, math.inf, -1])
def test_an_order_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"`alpha` must be in \(1, 2\], got .*; alpha -> 1 is `LogSumExp`"):
        Entmax(random(*KEYS), 0.7, alpha=alpha)
    if not math.isnan(alpha):
        with pytest.raises(ValueError, match=r"`alpha` must be in \(1, 2\] everywhere, got .*; parametrise it"):
            Entmax(random(*KEYS), 0.7, alpha=torch.tensor([1.5, alpha], **DOUBLE))


def test_orders_that_do_not_fit_are_refused():
    keys = random(*KEYS)
    with pytest.raises(TypeError, match="`alpha` must be a number, got 'sparse'"):
        Entmax(keys, 0.7, alpha="sparse")
    with pytest.raises(ValueError, match=r"`alpha` must broadcast with the leading axes of `keys` = \(2,\)"):
        Entmax(keys, 0.7, alpha=torch.full((3,), 1.5, **DOUBLE))
    with pytest.raises(ValueError, match=r"`alpha` must have the dtype of `keys`.* convert it with"):
        Entmax(keys, 0.7, alpha=torch.tensor(1.5))
    with pytest.raises(ValueError, match="`alpha` must broadcast to the leading axes of `z`"):
        Entmax(keys[0], 0.7, alpha=torch.full((3,), 1.5, **DOUBLE)).check_state("z", random(2, 3, 5))
    with pytest.raises(ValueError, match=r"`mask` must broadcast to .* M = 7 keys"):
        Entmax(keys, 0.7, mask=torch.ones(6, dtype=torch.bool))


def test_an_order_that_leaves_its_range_later_is_told_by_its_rows():
    alpha = orders()
    phi = Entmax(random(*KEYS), 0.7, alpha=alpha)
    alpha[1] = 0.9
    mean = phi.mean(random(2, 3, 5))
    assert mean[0].isfinite().all()
    assert mean[1].isnan().all()


def test_two_solvers_that_differ_are_at_two_minima():
    """Sparsemax at beta 1.5: Anderson ends 1.04 from where plain steps end for one query of 16. Both are minima."""
    generator = torch.Generator().manual_seed(6)
    keys, query = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (8, 16))
    energy = AnchoredEnergy(Entmax(keys, 1.5, alpha=2.0), query, 0.5)
    plain = solve(energy, query, solver=Picard(rtol=1e-13, atol=1e-13, max_steps=1000)).value
    found = [
        solve(AnchoredEnergy(Entmax(keys.to(dtype), 1.5, alpha=2.0), query.to(dtype), 0.5), query.to(dtype)).value
        for dtype in (torch.float32, torch.float64)
    ]
    settled = solve(energy, found[0].double(), solver=Picard(rtol=1e-13, atol=1e-13, max_steps=1000)).value
    away = torch.linalg.vector_norm(settled - plain, dim=-1)
    assert (away > 1e-3).nonzero().flatten().tolist() == [10]
    assert abs(float(away[10]) - 1.037) < 1e-3
    for state in found:
        torch.testing.assert_close(state.double(), settled, rtol=0, atol=1e-3)
    for z, lowest in ((plain, -0.32799), (settled, -0.58385)):
        assert energy.gradient(z).abs().max() < 1e-12
        assert abs(float(energy.energy(z)[10]) - lowest) < 1e-5
        one = AnchoredEnergy(Entmax(keys, 1.5, alpha=2.0), query[10:11], 0.5)
        hessian = torch.autograd.functional.jacobian(lambda z, one=one: one.gradient(z[None])[0], z[10])
        assert torch.linalg.eigvalsh(hessian).min() > 0.4

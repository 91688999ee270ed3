"""Softmax1: the potential contract, log-sum-exp with a null key, and attention that may attend to nothing."""

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import AnchoredEnergy, Anderson, Implicit, ImplicitAttention, LogSumExp, Picard, solve
from implicit_attention.diagnostics import diagnose
from implicit_attention.linear import CG
from implicit_attention.potentials import Softmax1
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

KEYS = (2, 7, 5)
COUNTS = pytest.mark.parametrize("count", [7, 70], ids=["few", "many"])


def empty_row(count=7):
    mask = random(2, 3, count, seed=9) > 0
    mask[0, 1] = False
    return mask


class TestPlain(PotentialContract):
    def make(self, dtype):
        return Softmax1(random(*KEYS, dtype=dtype), 0.7)


class TestMaskAndBias(PotentialContract):
    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = random(2, 3, 7, seed=4, dtype=dtype)
        return Softmax1(random(*KEYS, dtype=dtype), beta, mask=empty_row(), bias=bias)


def with_null_key(keys, beta, mask, bias):
    """The same as LogSumExp over one key more, which is 0 and always attended to."""
    return LogSumExp(F.pad(keys, (0, 0, 0, 1)), beta, mask=F.pad(mask, (0, 1), value=True), bias=F.pad(bias, (0, 1)))


@COUNTS
def test_it_is_log_sum_exp_with_a_null_key(count):
    keys, values, beta = random(2, count, 5), random(2, count, 4, seed=3), torch.tensor([0.5, 1.3]).double()
    mask, bias, z, v = empty_row(count), random(3, count, seed=4), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    phi, null = Softmax1(keys, beta, mask=mask, bias=bias), with_null_key(keys, beta, mask, bias)
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(phi.value(z), null.value(z), **close)
    torch.testing.assert_close(phi.mean(z), null.mean(z), **close)
    torch.testing.assert_close(phi.covariance_product(z, v), null.covariance_product(z, v), **close)
    torch.testing.assert_close(phi.probabilities(z), null.probabilities(z)[..., :-1], **close)
    torch.testing.assert_close(phi.readout(z, values), null.readout(z, F.pad(values, (0, 0, 0, 1))), **close)
    torch.testing.assert_close(phi.readout(z, keys), phi.mean(z), **close)
    far = Softmax1(keys + 10, 0.5)
    torch.testing.assert_close(far.lipschitz(), 0.5 * (keys + 10).norm(dim=-1).amax(-1).square() / 4)


def test_a_query_whose_keys_are_all_masked_is_zero_with_zero_gradients():
    keys, z = random(*KEYS).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
    phi = Softmax1(keys, 0.7, mask=empty_row())
    value, mean = phi.evaluate(z)
    assert value[0, 1] == 0
    assert mean[0, 1].eq(0).all()
    assert phi.probabilities(z)[0, 1].eq(0).all()
    gradients = torch.autograd.grad(value.sum() + mean.square().sum(), (keys, z), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z))
    assert all(g.isfinite().all() for g in (*gradients, *second))
    assert gradients[1][0, 1].eq(0).all()


def test_where_no_key_fits_it_attends_to_nothing():
    phi = Softmax1(10 * torch.eye(3).double(), 1.0)
    z = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]).double()
    near, far = phi.probabilities(z).sum(-1).tolist()
    assert near > 0.999
    assert far < 2e-4
    assert phi.bounded_below(1e9)
    assert phi.convex


@COUNTS
def test_equilibria_and_their_gradients(count):
    tensors = [random(2, 3, 5), random(2, count, 5, seed=1), torch.tensor([0.5, 0.8]).double(), random(count, seed=4)]
    query, keys, beta, bias = (t.requires_grad_() for t in tensors)
    energy = AnchoredEnergy(Softmax1(keys, beta, bias=bias, mask=empty_row(count)), query, 0.4)
    tight = Anderson(rtol=1e-13, atol=1e-13)
    found = solve(energy, query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12)))
    assert found.converged.all()
    assert (diagnose(energy, found).smallest_curvature > 0).all()
    z = query
    for _ in range(150):
        z = 0.4 * query + 0.6 * energy.potential.mean(z)
    assert relative_error(found.value, z) < 1e-11
    cotangent = random(2, 3, 5, seed=8)
    got, expected = (torch.autograd.grad(v, [query, keys, beta, bias], cotangent) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9
    assert solve(energy, query.detach(), solver=Picard(rtol=1e-8)).converged.all()


@pytest.mark.parametrize("readout", ["values", "state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_solves_and_reads_out(readout, dtype):
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2, potential=Softmax1, readout=readout, causal=True, dtype=dtype)
    x = random(2, 70, 8, dtype=dtype).requires_grad_()
    out = layer(x)
    assert layer.last_solve.converged.all()
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    # The first token attends to itself or to nothing: its output shrinks, unlike that of softmax attention.
    plain = ImplicitAttention(8, 2, potential=LogSumExp, readout=readout, causal=True, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    assert out[:, 0].norm() < plain(x)[:, 0].norm()


@pytest.mark.parametrize("dropout_p", [0.4, 1.0])
def test_dropout_is_that_of_the_softmax(dropout_p):
    keys, values, z = random(2, 7, 5), random(2, 7, 4, seed=1), random(2, 3, 5, seed=2)
    phi, with_null = Softmax1(keys, 0.7), LogSumExp(F.pad(keys, (0, 0, 0, 1)), 0.7)
    torch.manual_seed(0)
    out = phi.readout(z, values, dropout_p=dropout_p)
    torch.manual_seed(0)
    torch.testing.assert_close(out, with_null.readout(z, F.pad(values, (0, 0, 0, 1)), dropout_p=dropout_p))
    kept = torch.stack([phi.readout(z, values, dropout_p=dropout_p) for _ in range(400)]).mean(0)
    expected = (0.0 if dropout_p == 1 else 1.0) * phi.readout(z, values)
    assert (kept - expected).abs().max() < 0.25


def test_values_that_do_not_fit_the_keys_are_told_of_the_keys_given():
    phi, z = Softmax1(random(2, 7, 5), 0.7), random(2, 3, 5)
    with pytest.raises(ValueError, match="one row for each of the 7 keys"):
        phi.readout(z, random(2, 8, 4))


@pytest.mark.parametrize("impl", ["auto", "tiled"])
def test_the_fused_operation_solves_it(impl, monkeypatch):
    tensors = [random(2, 3, 5), random(2, 70, 5, seed=1), torch.tensor([0.5, 0.8]).double()]
    mask = empty_row(70)

    def found(impl):
        query, keys, beta = (t.clone().requires_grad_() for t in tensors)
        energy = AnchoredEnergy(Softmax1(keys, beta, mask=mask), query, 0.4)
        solution = solve(energy, query.detach(), solver=Anderson(history=1, rtol=1e-12), impl=impl)
        return [solution.value, *torch.autograd.grad(solution.value.square().sum(), [query, keys, beta])]

    expected = found("reference")
    monkeypatch.setattr(Softmax1, "evaluate", None)  # the operation asks the potential for nothing
    monkeypatch.setattr(LogSumExp, "linearize", None)
    for got, want in zip(found(impl), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
def test_a_layer_compiles_into_one_graph():
    layer, x = ImplicitAttention(8, 2, potential=Softmax1), random(2, 70, 8, dtype=torch.float32)
    layer.requires_grad_(False)
    whole = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(x), layer(x))


@pytest.mark.parametrize(
    ("make", "value", "mean", "product", "equilibrium"),
    [
        (
            LogSumExp,
            1.056325512801,
            (0.391204117751, -0.168394524133),
            (0.102241420, -0.827617778),
            (0.353115500501, -0.097287651525),
        ),
        (
            Softmax1,
            1.180674378675,
            (0.324636522853, -0.139740381815),
            (0.115004917, -0.699772544),
            (0.290757987043, -0.100732140029),
        ),
    ],
)
def test_printed_numbers(make, value, mean, product, equilibrium):
    keys = torch.tensor([[1.0, 0.5], [-0.5, 1.2], [0.3, -1.0], [-1.0, -0.4]], dtype=torch.float64)
    z, v = (torch.tensor([row], dtype=torch.float64) for row in ((0.6, -0.3), (0.5, -1.0)))
    phi = make(keys, 1.5)
    found = solve(AnchoredEnergy(phi, z, 0.3), z, solver=Anderson(rtol=1e-13, atol=1e-13)).value
    for got, printed in ((phi.mean(z), mean), (phi.covariance_product(z, v), product), (found, equilibrium)):
        torch.testing.assert_close(got, torch.tensor([printed], dtype=torch.float64), rtol=0, atol=6e-10)
    assert phi.value(z).item() == pytest.approx(value, abs=6e-13)

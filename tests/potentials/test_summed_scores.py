"""Polynomial, Exponential and laws of units over keys: the contract, printed numbers, other routes, bounds, masks."""

import copy
import math
import pickle
import warnings
from functools import partial

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Implicit,
    ImplicitAttention,
    NewtonKrylov,
    Picard,
    SquaredScores,
    Status,
    solve,
)
from implicit_attention.linear import CG
from implicit_attention.potentials import (
    BernoulliUnits,
    ConstantUnits,
    DiscreteUnits,
    Exponential,
    ExponentialUnits,
    GaussianUnits,
    HiddenUnits,
    LaplaceUnits,
    PoissonUnits,
    Polynomial,
    ReadsOut,
    SignUnits,
    SphereUnits,
    Units,
    units_potential,
)
from implicit_attention.testing.numerics import random, relative_error
from implicit_attention.testing.potential import PotentialContract

tensor = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)

LAWS = [
    GaussianUnits(0.3, 1.7),
    BernoulliUnits(0.2),
    SignUnits(),
    PoissonUnits(0.7),
    ExponentialUnits(9.0),
    LaplaceUnits(0.1),
    ConstantUnits(1.3),
    SphereUnits(3),
    DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5)),
]
FACTORIES = {
    "polynomial 2": Polynomial,
    "polynomial 3": partial(Polynomial, degree=3),
    "polynomial 5": partial(Polynomial, degree=5),
    "exponential": Exponential,
    **{type(units).__name__: units_potential(units) for units in LAWS},
}
each = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
each_law = pytest.mark.parametrize("units", LAWS, ids=lambda units: type(units).__name__)


def keys_of(*shape, seed=0, dtype=torch.float64):
    """Keys at which every law is in its domain."""
    return 0.3 * random(*shape, seed=seed, dtype=dtype)


def empty_row(count=7):
    mask = random(2, 3, count, seed=9) > 0
    mask[0, 1] = False
    return mask


# The contract: every family plain, with one beta per batch entry, and with mask and bias.


class Contract(PotentialContract):
    factory: partial

    def make(self, dtype):
        return type(self).factory(keys_of(2, 7, 5, dtype=dtype), 0.7)


class MaskedContract(PotentialContract):
    factory: partial

    def make(self, dtype):
        beta = torch.tensor([0.5, 1.3], dtype=torch.float64).to(dtype)
        bias = 0.5 * random(2, 3, 7, seed=4, dtype=dtype)
        bias[..., 2] = -torch.inf
        return type(self).factory(keys_of(2, 7, 5, dtype=dtype), beta, mask=empty_row(), bias=bias)


class SharedContract(PotentialContract):
    """One set of keys for all entries of the batch, and a mask of keys alone."""

    factory: partial

    def make(self, dtype):
        mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
        return type(self).factory(keys_of(7, 5, dtype=dtype), torch.tensor(0.8, dtype=dtype), mask=mask)


class TestPolynomial2(Contract):
    factory = partial(Polynomial)


class TestPolynomial2Masked(MaskedContract):
    factory = partial(Polynomial)


class TestPolynomial3(Contract):
    factory = partial(Polynomial, degree=3)


class TestPolynomial3Masked(MaskedContract):
    factory = partial(Polynomial, degree=3)


class TestPolynomial4Shared(SharedContract):
    factory = partial(Polynomial, degree=4)


class TestExponential(Contract):
    factory = partial(Exponential)


class TestExponentialMasked(MaskedContract):
    factory = partial(Exponential)


class TestExponentialShared(SharedContract):
    factory = partial(Exponential)


class TestSigns(Contract):
    factory = units_potential(SignUnits())


class TestSignsMasked(MaskedContract):
    factory = units_potential(SignUnits())


class TestBernoulliShared(SharedContract):
    factory = units_potential(BernoulliUnits(0.2))


class TestGaussiansMasked(MaskedContract):
    factory = units_potential(GaussianUnits(0.3, 1.7))


class TestLaplaceMasked(MaskedContract):
    factory = units_potential(LaplaceUnits(0.1))


class TestSpheresMasked(MaskedContract):
    factory = units_potential(SphereUnits(3))


class TestConstantsMasked(MaskedContract):
    factory = units_potential(ConstantUnits(1.3))


# Numbers of the issue, and the definitions written out.


KEYS = tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1], [-1, -0.4]])


@pytest.mark.parametrize(
    ("make", "value", "mean", "product"),
    [
        (Polynomial, 0.324675, [0.891, -0.3825], [0.5175, -1.725]),
        (partial(Polynomial, degree=3), 0.1008585, [0.40743, -0.193725], [0.4968, -1.656]),
        (Exponential, 3.251196755731, [1.907822337692, -0.821225595816], [1.540271676, -4.484507317]),
    ],
    ids=["polynomial 2", "polynomial 3", "exponential"],
)
def test_printed_numbers(make, value, mean, product):
    potential, z, v = make(KEYS, 1.5), tensor([[0.6, -0.3]]), tensor([[0.5, -1.0]])
    printed(potential.value(z), tensor([value]))
    printed(potential.mean(z), tensor([mean]))
    torch.testing.assert_close(potential.covariance_product(z, v), tensor([product]), rtol=0, atol=5.1e-10)


@pytest.mark.parametrize(
    ("units", "values", "cumulants"),
    [
        (BernoulliUnits(0.3), (0.126033691328, -0.180564673935), (0.3, 0.21, 0.084, -0.0546)),
        (SignUnits(), (0.066942946299, 0.290753560328), (0, 1, 0, -2)),
        (PoissonUnits(2.5), (1.119336536658, -1.376677589707), (2.5, 2.5, 2.5, 2.5)),
        (
            ExponentialUnits(1.7),
            (0.245449308829, -0.385662480812),
            (0.588235294, 0.346020761, 0.407083249, 0.718382203),
        ),
        (LaplaceUnits(0.6), (0.050539894054, 0.261884379631), (0, 0.72, 0, 1.5552)),
        (SphereUnits(5), (0.013663334341, 0.063425703520), (0, 0.2, 0, -0.034285714)),
        (GaussianUnits(0.4, 2.25), (0.3020125, 0.4), (0.4, 2.25, 0, 0)),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Units) else "",
)
def test_printed_values_and_cumulants_of_laws(units, values, cumulants):
    """Over the one key 1 at beta 1 it is K itself, whose derivatives at 0 are the cumulants."""
    potential = units_potential(units)(tensor([[1.0]]), 1.0)
    printed(potential.value(tensor([[0.37], [-0.8]])), tensor(values))

    def derivative(order, t):
        if order == 0:
            return potential.value(t[None, None]).sum()
        return torch.func.grad(lambda t: derivative(order - 1, t))(t)

    found = torch.stack([derivative(order, tensor(0.0)) for order in (1, 2, 3, 4)])
    torch.testing.assert_close(found, tensor(cumulants), rtol=0, atol=5.1e-10)


DEFINITIONS = {
    "polynomial 2": lambda k, z, beta, bias: beta / 2 * ((z * k).sum(-1) + bias / beta).relu() ** 2,
    "polynomial 3": lambda k, z, beta, bias: beta / 3 * ((z * k).sum(-1) + bias / beta).relu() ** 3,
    "polynomial 5": lambda k, z, beta, bias: beta / 5 * ((z * k).sum(-1) + bias / beta).relu() ** 5,
    "exponential": lambda k, z, beta, bias: (beta * (z * k).sum(-1) + bias).exp() / beta,
    **{
        type(units).__name__: lambda k, z, beta, bias, units=units: units.cumulant(beta * (z * k).sum(-1) + bias) / beta
        for units in LAWS
    },
}


@pytest.mark.parametrize("name", FACTORIES)
def test_it_is_the_sum_over_the_keys_that_are_read(name):
    """Key by key, each left out that is masked, by -inf or by the mask; derivatives by autograd."""
    keys, z, v = keys_of(2, 7, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    bias = 0.5 * random(2, 3, 7, seed=4)
    bias[..., 2] = -torch.inf
    mask, beta = empty_row(), (0.5, 1.3)
    potential = FACTORIES[name](keys, tensor(beta), mask=mask, bias=bias)

    def total(b, n):
        def phi(row):
            terms = [
                DEFINITIONS[name](keys[b, j], row, beta[b], bias[b, n, j])
                for j in range(7)
                if mask[b, n, j] and bias[b, n, j] > -torch.inf
            ]
            return sum(terms, 0 * row.sum())

        return phi

    for b in range(2):
        for n in range(3):
            row, phi = z[b, n], total(b, n)
            close(potential.value(z)[b, n], phi(row))
            close(potential.mean(z)[b, n], torch.func.grad(phi)(row))
            hessian = torch.func.hessian(phi)(row)
            close(potential.covariance_product(z, v)[b, n], hessian @ v[b, n])


# Other potentials by the same numbers.


def same(a, b, z, v, shift=0.0):
    close(a.value(z) + shift, b.value(z))
    close(a.mean(z), b.mean(z))
    close(a.covariance_product(z, v), b.covariance_product(z, v))


def test_degree_2_is_the_memory_of_the_energy_transformer():
    """Its energy as published is -1/2 sum relu(xi g)^2, and the force relu(g xi^T) xi."""
    xi, g = random(7, 5), random(2, 3, 5, seed=1)
    potential = Polynomial(xi, 1.0)
    close(-potential.value(g), -0.5 * torch.einsum("md,bnd->bnm", xi, g).relu().square().sum(-1))
    close(potential.mean(g), (g @ xi.mT).relu() @ xi)


@pytest.mark.parametrize("masked", [False, True])
def test_squared_scores_are_degree_2_over_keys_and_their_opposites(masked):
    keys, z, v = random(2, 7, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool) if masked else None
    both = Polynomial(torch.cat([keys, -keys], -2), 0.4, mask=None if mask is None else mask.repeat(2))
    same(both, SquaredScores(keys, 0.4, mask=mask), z, v)


def test_gaussian_units_are_squared_scores():
    keys, z, v = random(2, 7, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    same(units_potential(GaussianUnits())(keys, 0.4), SquaredScores(keys, 0.4), z, v)


def test_poisson_units_are_the_exponential_but_for_a_constant():
    keys, z, v = random(2, 7, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    mask = empty_row()
    for options, count in (({}, tensor(7.0)), ({"mask": mask}, mask.sum(-1))):
        units, exponential = (f(keys, 0.4, **options) for f in (units_potential(PoissonUnits(1.0)), Exponential))
        same(units, exponential, z, v, shift=count / 0.4)


@each_law
def test_at_beta_1_it_is_hidden_units(units):
    keys, z, v = keys_of(2, 7, 5), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    same(units_potential(units)(keys, 1.0), HiddenUnits(keys.mT, units), z, v)


# Masks and bad data.


@each
def test_a_query_that_reads_no_key_is_zero_with_finite_gradients(make):
    keys, z = keys_of(2, 7, 5).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
    for options in ({"mask": empty_row()}, {"bias": torch.zeros(2, 3, 7).double().where(empty_row(), -torch.inf)}):
        value, mean = make(keys, 0.7, **options).evaluate(z)
        assert value[0, 1] == 0
        assert mean[0, 1].eq(0).all()
        gradients = torch.autograd.grad(value.sum() + mean.square().sum(), (keys, z), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradients), (keys, z), materialize_grads=True)
        assert all(g.isfinite().all() for g in (*gradients, *second))
        assert gradients[1][0, 1].eq(0).all()


@each
def test_what_is_not_read_changes_nothing(make):
    """Whatever a masked key holds, and a score that would overflow: the row, and its gradients."""
    keys, z = keys_of(2, 7, 5), random(2, 3, 5, seed=1).requires_grad_()
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    mask[:, 1:, 4] = False
    plain = make(keys, 0.7, mask=mask)
    expected, by_z = plain.evaluate(z), torch.autograd.grad(plain.mean(z)[:, 1:].square().sum(), z)[0]
    for poison in (torch.nan, torch.inf, 1e6):
        poisoned = keys.clone()
        poisoned[:, 4] = poison
        potential = make(poisoned, 0.7, mask=mask)
        for got, want in zip(potential.evaluate(z), expected, strict=True):
            assert torch.equal(got[:, 1:], want[:, 1:])
            assert not torch.equal(got[:, 0], want[:, 0])
        mean = potential.mean(z)
        assert poison == 1e6 or mean[:, 0].isnan().all()
        assert torch.equal(torch.autograd.grad(mean[:, 1:].square().sum(), z)[0][:, 1:], by_z[:, 1:])
        only = make(poisoned, 0.7, mask=mask[:, 1:2])
        assert only.lipschitz() is None or only.lipschitz().isfinite().all()


@pytest.mark.parametrize("units", [ExponentialUnits(2.0), LaplaceUnits(0.5)], ids=str)
def test_a_score_outside_the_domain_stays_in_its_row(units):
    keys = torch.eye(3).double()
    potential = units_potential(units)(keys, 1.0)
    z = tensor([[0.1, 0.2, 0.3], [2.5, 0.0, 0.0], [0.3, 0.1, 0.2]])
    assert potential.value(z).isnan().tolist() == [False, True, False]
    assert potential.mean(z)[1].isnan().all()
    solution = solve(AnchoredEnergy(potential, z, 0.5), z, solver=Picard(), on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    # Read by a query, that key is outside; masked, it is nothing.
    masked = units_potential(units)(keys, 1.0, mask=torch.tensor([False, True, True]))
    assert masked.value(z).isfinite().all()


@each
def test_keys_in_any_layout(make):
    keys, z, mask, expected = keys_of(2, 7, 5), random(2, 3, 5, seed=1), empty_row(), None
    strided = torch.zeros(2, 14, 10).double()
    strided[:, ::2, ::2] = keys
    for k in (keys, keys.mT.contiguous().mT, strided[:, ::2, ::2]):
        for x in (z, z.mT.contiguous().mT):
            potential = make(k, 0.7, mask=mask.mT.contiguous().mT)
            found = (*potential.evaluate(x), potential.covariance_product(x, x))
            expected = found if expected is None else expected
            for got, want in zip(found, expected, strict=True):
                close(got, want)
    one = make(keys[:1], tensor([0.7]), mask=mask[:1, :1])
    many = make(keys[:1].expand(2, 7, 5), tensor(0.7).expand(2), mask=mask[:1, :1].expand(2, 3, 7))
    close(one.mean(z), many.mean(z))


# Bounds.


def falls(potential, scale, far=1e4):
    """Whether |z|^2/2 - scale Phi(z) falls without end along a key, seen far out."""
    for key in potential.keys.reshape(-1, potential.keys.shape[-1]):
        direction = key / key.norm().clamp(min=1e-300)
        z = torch.stack([far * direction, 2 * far * direction]).expand(*potential.keys.shape[:-2], 2, -1)
        near, further = (z.square().sum(-1) / 2 - scale * potential.value(z)).unbind(-1)
        if bool(((further < near) & (near < -far)).any()) or bool(further.eq(-torch.inf).any()):
            return True
    return False


@each
def test_what_is_said_of_bounds_is_so(make):
    for scale in (0.05, 0.3, 1.0, 4.0):
        potential = make(keys_of(2, 7, 5), 0.7)
        answer, seen = potential.bounded_below(scale), falls(potential, scale)
        assert answer is None or answer != seen
    assert make(keys_of(2, 7, 5), 0.7).bounded_below(0.0) is True


def test_bounds_of_degree_2():
    keys = torch.eye(5)[None]
    assert (Polynomial(keys, 0.9).bounded_below(1.0), Polynomial(keys, 1.1).bounded_below(1.0)) == (True, False)
    assert Polynomial(keys, 1.1).bounded_below(0.8) is True
    # One key twice: each alone is short enough, together they are not.
    twice = torch.cat([keys, keys], -2)
    assert (Polynomial(twice, 0.9).bounded_below(1.0), Polynomial(twice, 0.49).bounded_below(1.0)) == (False, True)
    # Unless no query reads both; then nothing is known.
    halves = torch.arange(10) // 5 == torch.arange(2)[:, None]
    assert Polynomial(twice, 0.9, mask=halves).bounded_below(1.0) is None
    close(Polynomial(random(2, 7, 5), 0.3).lipschitz(), SquaredScores(random(2, 7, 5), 0.3).lipschitz())
    per_entry = Polynomial(keys.expand(2, 5, 5), torch.tensor([0.5, 1.1]))
    assert (per_entry.bounded_below(0.9), per_entry.bounded_below(1.0)) == (True, False)
    # A long key that no query reads does not count.
    long, mask = torch.eye(5) * torch.tensor([1.0, 1, 1, 1, 9]), torch.tensor([True, True, True, True, False])
    assert (Polynomial(long, 0.9).bounded_below(1.0), Polynomial(long, 0.9, mask=mask).bounded_below(1.0)) == (
        False,
        True,
    )


@pytest.mark.parametrize(
    "make", [partial(Polynomial, degree=3), Exponential, units_potential(PoissonUnits(1.0))], ids=str
)
def test_what_grows_faster_than_squares_is_unbounded_once_a_key_is_read(make):
    keys = torch.tensor([[0.0, 0.0], [0.1, 0.0]])
    assert make(keys, 1.0).bounded_below(1e-3) is False
    assert make(keys, 1.0, mask=torch.tensor([True, False])).bounded_below(1e9) is True
    assert make(keys, 1.0, mask=torch.tensor([[True, False], [True, True]])).bounded_below(1e-3) is False
    assert make(keys, 1.0, bias=torch.tensor([0.0, -torch.inf])).bounded_below(1e9) is True
    assert make(keys, 1.0).bounded_below(0.0) is True
    assert make(keys, 1.0).lipschitz() is None


def test_bounds_of_units():
    keys = torch.eye(3)
    variance = 1 / 0.36
    gaussian = units_potential(GaussianUnits(0.4, variance))(keys, 0.36)
    assert (gaussian.bounded_below(0.9), gaussian.bounded_below(1.1)) == (True, False)
    assert units_potential(SignUnits())(keys, 9.0).bounded_below(math.inf) is True
    assert units_potential(LaplaceUnits(0.1))(keys, 1.0).bounded_below(0.5) is None
    assert units_potential(LaplaceUnits(0.1))(keys, 1.0).lipschitz() is None


# As part of problems and layers.


@pytest.mark.parametrize("make", [Polynomial, units_potential(SignUnits())], ids=["polynomial", "signs"])
def test_equilibria_and_their_gradients(make):
    tensors = [random(2, 3, 5), keys_of(2, 7, 5, seed=1), tensor([0.5, 0.8]), 0.3 * random(7, seed=4)]
    query, keys, beta, bias = (t.requires_grad_() for t in tensors)
    energy = AnchoredEnergy(make(keys, beta, bias=bias, mask=empty_row()), query, 0.4)
    assert energy.potential.bounded_below(0.6)
    tight = Anderson(rtol=1e-13, atol=1e-13)
    found = solve(energy, query.detach(), solver=tight, adjoint=Implicit(CG(rtol=1e-12)))
    z = query
    for _ in range(200):
        z = 0.4 * query + 0.6 * energy.potential.mean(z)
    assert relative_error(found.value, z) < 1e-11
    cotangent = random(2, 3, 5, seed=8)
    got, expected = (torch.autograd.grad(v, [query, keys, beta, bias], cotangent) for v in (found.value, z))
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < 1e-9
    newton = solve(energy, query.detach(), solver=NewtonKrylov(rtol=1e-12, atol=1e-12))
    assert relative_error(newton.value, z) < 1e-10


@pytest.mark.parametrize(
    "make", [Polynomial, units_potential(SignUnits()), units_potential(BernoulliUnits(0.5))], ids=str
)
def test_a_layer_trains_a_step(make):
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2, potential=make, readout="state", causal=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    # Inputs so small that degree 2 is bounded below.
    x, losses = 0.5 * random(2, 6, 8, dtype=torch.float32), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            loss = (layer(x) - x).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
            optimizer.step()
    assert layer.last_solve.converged.all()
    assert losses[1] < losses[0]


def test_there_is_nothing_to_read_out():
    for potential in (Polynomial, Exponential):
        assert not issubclass(potential, ReadsOut)
        with pytest.raises(ValueError, match="`readout` must be 'state'"):
            ImplicitAttention(8, 2, potential=potential)
    made = units_potential(SignUnits())(torch.eye(3), 1.0)
    assert not isinstance(made, ReadsOut)


def test_a_factory_is_copied_with_the_layer():
    layer = ImplicitAttention(8, 2, potential=units_potential(BernoulliUnits(0.3)), readout="state")
    x = random(1, 3, 8, dtype=torch.float32)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_large_degrees_do_not_overflow():
    """(s/beta)^30 is a number where s^30 is none."""
    potential = Polynomial(torch.eye(2), 16.0, degree=30)
    z = torch.tensor([[2.0, 1.0]])
    torch.testing.assert_close(potential.mean(z), 16 * z**29)
    assert potential.value(z).isfinite().all()


# Bad input.


@pytest.mark.parametrize(
    ("degree", "error", "words"),
    [
        (1, ValueError, "`degree` must be >= 2, got 1"),
        (2.5, TypeError, "`degree` must be an integer, got 2.5"),
        (True, TypeError, "`degree` must be an integer, got True"),
        ("2", TypeError, "`degree` must be an integer, got '2'"),
    ],
)
def test_a_degree_is_an_integer_from_2(degree, error, words):
    with pytest.raises(error, match=words):
        Polynomial(torch.eye(2), 1.0, degree=degree)


def test_units_are_units():
    for units in (0.5, SignUnits, None):
        with pytest.raises(
            TypeError, match=r"`units` must be Units, got .*; (for example BernoulliUnits|pass an instance: SignUnits)"
        ):
            units_potential(units)
    with pytest.raises(ValueError, match=r"`units` must have a dimension.*for example SphereUnits\(3\)"):
        units_potential(SphereUnits())


@each
def test_arguments_of_keys_are_checked(make):
    keys = torch.zeros(2, 7, 5)
    with pytest.raises(ValueError, match="`beta` must be > 0, got 0"):
        make(keys, 0.0)
    with pytest.raises(TypeError, match="`mask` must be a boolean tensor"):
        make(keys, 1.0, mask=torch.zeros(7))
    with pytest.raises(ValueError, match=r"`bias` must broadcast to .* M = 7 keys"):
        make(keys, 1.0, bias=torch.zeros(6))
    with pytest.raises(ValueError, match="`z` must have the keys' dimension 5"):
        make(keys, 1.0).check_state("z", torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="`mask` must broadcast to"):
        make(keys, 1.0, mask=torch.ones(4, 7, dtype=torch.bool)).check_state("z", torch.zeros(2, 3, 5))
    assert make(keys[:0], 1.0).mean(torch.zeros(0, 3, 5)).shape == (0, 3, 5)
    assert make(keys, 1.0).value(torch.zeros(2, 0, 5)).shape == (2, 0)

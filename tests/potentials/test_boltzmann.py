"""RestrictedBoltzmannMachine: exact sums, closed forms, special cases, samples, gradients of the likelihood."""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import (
    BernoulliUnits,
    ConstantUnits,
    DiscreteUnits,
    ExponentialUnits,
    GaussianUnits,
    LaplaceUnits,
    PoissonUnits,
    RestrictedBoltzmannMachine,
    SignUnits,
    SphereUnits,
    annealed_importance_sampling,
    exact_gradient,
)
from implicit_attention.testing.numerics import check_derivatives, random

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)
printed = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)
nine = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-10)

WEIGHTS = tensor([[0.5, 0.1], [-0.3, 0.4], [0.2, -0.6]])
FIELD = tensor([0.1, -0.2, 0.3])
DATA = tensor([[1, -1, 1], [1, 1, -1], [-1, -1, 1], [1, -1, 1]])
SIGNS, BITS = SignUnits(), BernoulliUnits(0.5)
# Hidden and visible law, log Z, mean log p, d/dW by rows of W^T, d/da.
TABLE = {
    "Bernoulli, signs": (
        (BITS, SIGNS, 2.289397122185, -1.783242449342),
        [[0.046200527, -0.198757259, 0.249970364], [0.070874502, -0.037296175, 0.109215920]],
        [0.115518258, -0.333870414, 0.385389279],
    ),
    "Bernoulli, bits": (
        (BITS, BITS, 2.315778528125, -1.911480704355),
        [[0.099980030, -0.102559572, 0.158968409], [0.047578331, -0.089076558, 0.059004352]],
        [0.145361176, -0.206477743, 0.219709325],
    ),
    "signs, signs": (
        (SIGNS, SIGNS, 2.606059681171, -1.653285981342),
        [[-0.074426064, -0.049922032, 0.122101192], [0.069165557, 0.337560171, -0.198338672]],
        [0.361020945, -0.223234251, 0.158638087],
    ),
    "Gaussian, signs": (
        (GaussianUnits(), SIGNS, 2.677314981337, -1.622314981337),
        [[-0.067305507, -0.054852091, 0.139320211], [0.126814574, 0.404882506, -0.271030247]],
        [0.356899181, -0.210331403, 0.150054165],
    ),
    "Poisson, signs": (
        (PoissonUnits(1.0), SIGNS, 2.933664201384, -1.736979180373),
        [[-0.071132675, -0.618245770, 0.973844218], [-0.128806787, -0.196222886, 0.523244984]],
        [-0.163066686, -0.408329737, 0.575910154],
    ),
}
THREE = DiscreteUnits((-1, 0, 2.5), (1.0, 2.0, 0.5))
HIDDEN = [
    GaussianUnits(0.3, 1.7),
    BernoulliUnits(0.2),
    SIGNS,
    PoissonUnits(0.7),
    ExponentialUnits(3.0),
    LaplaceUnits(0.25),
    ConstantUnits(1.3),
    SphereUnits(3),
    THREE,
]
every_hidden = pytest.mark.parametrize("hidden", HIDDEN, ids=lambda u: type(u).__name__)
VISIBLE = {"signs": (SIGNS, [-1, 1]), "bits": (BITS, [0, 1]), "three": (THREE, [-1, 0, 2.5])}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def machine(hidden, visible=SIGNS, weights=WEIGHTS, field=FIELD):
    return RestrictedBoltzmannMachine(weights, field, visible, hidden)


def states(values, count):
    return tensor(list(itertools.product(values, repeat=count)))


def data_of(visible):
    return DATA if visible == SIGNS else (DATA + 1) / 2


@pytest.mark.parametrize(("numbers", "by_weights", "by_field"), TABLE.values(), ids=TABLE)
def test_the_machines_of_the_table(numbers, by_weights, by_field):
    hidden, visible, log_partition, log_prob = numbers
    made, data = machine(hidden, visible), data_of(visible)
    printed(made.log_partition(), tensor(log_partition))
    printed(made.log_prob(data).mean(), tensor(log_prob))
    gradient = exact_gradient(made, data)
    nine(gradient.weights, tensor(by_weights).mT)
    nine(gradient.field, tensor(by_field))
    # Another route: averages over visible states, by the words of the definition.
    v = states([-1, 1] if visible == SIGNS else [0, 1], 3)
    exponents = v @ FIELD + hidden.cumulant(v @ WEIGHTS).sum(-1)
    p = exponents.softmax(-1)
    close(made.log_partition(), exponents.logsumexp(-1))
    close(gradient.field, data.mean(0) - p @ v)
    pairs = data.mT @ hidden.mean(data @ WEIGHTS) / len(data) - (p[:, None] * v).mT @ hidden.mean(v @ WEIGHTS)
    close(gradient.weights, pairs)


def test_gaussian_visible_units_of_the_table():
    spreads = (0.8, 1.2, 0.5)
    made = machine(BITS, GaussianUnits(0.0, tuple(s * s for s in spreads)))
    printed(made.log_partition(), tensor(2.176467825979))
    # By quadrature: the density is integrated over three axes.
    x, w = np.polynomial.hermite_e.hermegauss(24)
    v = states(list(range(24)), 3).long()
    points = tensor(x.tolist())[v] * tensor(spreads)
    measure = tensor(w.tolist())[v].prod(-1) * math.prod(spreads)
    weight = torch.exp(points @ FIELD + BITS.cumulant(points @ WEIGHTS).sum(-1))
    close((measure * weight).sum().log(), made.log_partition())
    energy = made.effective_energy(points)
    close(energy, (points.square() / (2 * tensor(spreads).square())).sum(-1) - weight.log())


@every_hidden
@pytest.mark.parametrize(("visible", "values"), VISIBLE.values(), ids=VISIBLE)
def test_probabilities_of_all_states_add_up_to_one(hidden, visible, values):
    made = machine(hidden, visible, 0.5 * WEIGHTS)
    v = states(values, 3)
    close(made.log_prob(v).exp().sum(), tensor(1.0))
    # More visible than hidden units, and the other way round: the sum runs over either layer.
    for dim, count in ((2, 5), (5, 2)):
        weights, field = 0.1 * random(dim, count), 0.3 * random(dim, seed=1)
        close(machine(hidden, visible, weights, field).log_prob(states(values, dim)).exp().sum(), tensor(1.0))


def test_weights_of_visible_states_are_their_laws_times_their_number():
    p = 0.3
    made = machine(BITS, BernoulliUnits(p))
    moved = machine(BITS, BITS, field=FIELD + math.log(p / (1 - p)))
    v = states([0, 1], 3)
    close(made.log_prob(v), moved.log_prob(v))
    close(made.log_partition(), moved.log_partition() + 3 * math.log(2 * (1 - p)))
    assert machine(BITS).log_prob(tensor([[0.5, 1, 1], [1, 1, 1]])).isinf().tolist() == [True, False]
    assert machine(BITS).effective_energy(tensor([[torch.nan, 1, 1], [1, 1, 1]])).isnan().tolist() == [True, False]
    twice = DiscreteUnits((-1, -1, 1, 1))
    close(machine(BITS, twice).log_prob(DATA), machine(BITS).log_prob(DATA))


@every_hidden
def test_conditional_means_are_averages_over_the_joint_law(hidden):
    made, h = machine(hidden), tensor([[0.4, -1.0]])
    v = DATA.clone().requires_grad_()
    (slope,) = torch.autograd.grad(made.effective_energy(v).sum(), v)
    close(slope, -FIELD - made.hidden_mean(DATA) @ WEIGHTS.mT)
    for visible, values in VISIBLE.values():
        weights = tensor(THREE.weights if visible == THREE else [1] * len(values))
        p = ((FIELD + h @ WEIGHTS.mT)[..., None] * tensor(values) + weights.log()).softmax(-1)
        close(machine(hidden, visible).visible_mean(h), (p * tensor(values)).sum(-1))


# Sums in blocks, and derivatives.


def test_more_states_than_are_added_up_at_once():
    """Two blocks of 2^18 visible states, computed again in the backward pass, against all of them together."""
    weights, field = (0.1 * random(*shape, seed=len(shape)) for shape in ((18, 10), (18,)))
    inputs = weights.requires_grad_(), field.requires_grad_()
    found = machine(GaussianUnits(0.3, 0.5), SIGNS, *inputs).log_partition()
    v = ((torch.arange(2**18)[:, None] >> torch.arange(18)) % 2 * 2 - 1).double()
    t = v @ weights
    expected = (v @ field + (0.3 * t + 0.25 * t.square()).sum(-1)).logsumexp(-1)
    close(found, expected)
    close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize(
    ("hidden", "visible"),
    [
        (SIGNS, SIGNS),
        (BernoulliUnits(0.2), GaussianUnits(0.3, 0.7)),
        (GaussianUnits(0.2, 0.5), GaussianUnits(0.3, 0.7)),
    ],
    ids=["discrete", "mixed", "Gaussian"],
)
def test_derivatives_of_the_likelihood(hidden, visible):
    def total(weights, field, v):
        return machine(hidden, visible, weights, field).log_prob(v).sum()

    v = DATA[:2] if visible == SIGNS else random(2, 3)
    arguments = (WEIGHTS.clone().requires_grad_(), FIELD.clone().requires_grad_(), v)
    check_derivatives(total, arguments)
    by_func = torch.func.grad(total, argnums=(0, 1))(*(x.detach() for x in arguments))
    for ours, theirs in zip(by_func, exact_gradient(machine(hidden, visible), v), strict=True):
        close(ours / len(v), theirs)


def test_two_gaussian_layers_are_one_gaussian():
    visible, hidden = GaussianUnits(0.4, (0.64, 1.44, 0.25)), GaussianUnits(-0.3, (0.5, 0.9))
    variance = tensor([0.64, 1.44, 0.25])
    precision = torch.diag(1 / variance) - WEIGHTS @ torch.diag(tensor([0.5, 0.9])) @ WEIGHTS.mT
    mean = torch.linalg.solve(precision, 0.4 / variance + FIELD - 0.3 * WEIGHTS.sum(-1))
    v, law = random(5, 3), torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    close(machine(hidden, visible).log_prob(v), law.log_prob(v))


# Special cases.


def test_a_frozen_hidden_unit_is_one_component_of_the_mixture_of_attention():
    beta, keys = 1.5, tensor([[1, 0.5], [-0.5, 1.2], [0.3, -1]])
    v = random(6, 2)
    zero = torch.zeros(2, dtype=torch.float64)
    visible = GaussianUnits(0.0, 1 / beta)
    parts = [machine(ConstantUnits(1.0), visible, beta * key[:, None], zero) for key in keys]
    for part, key in zip(parts, keys, strict=True):
        law = torch.distributions.MultivariateNormal(key, torch.eye(2, dtype=torch.float64) / beta)
        close(part.log_prob(v), law.log_prob(v))
        close(part.visible_mean(torch.ones(1, 1, dtype=torch.float64)), key[None])
    # Together, by the weights of their own Z, they are exp(-beta E) of attention without anchor.
    log_z = torch.stack([part.log_partition() for part in parts])
    mixture = torch.logsumexp(torch.stack([part.log_prob(v) for part in parts], -1) + log_z.log_softmax(-1), -1)
    energy = v.square().sum(-1) / 2 - LogSumExp(keys, beta).value(v)
    close(mixture, -beta * energy - log_z.logsumexp(-1))


# Samples.


@every_hidden
def test_gibbs_samples_have_the_exact_probabilities(hidden):
    made, v = machine(hidden), states([-1, 1], 3)
    drawn = made.sample(20_000, steps=20, generator=seeded())
    expected = made.log_prob(v).exp().numpy() * len(drawn)
    # What was drawn from the exact law keeps it.
    for each in (drawn, made.gibbs(drawn, steps=1, generator=seeded(1))):
        seen = np.array([(each == state).all(-1).sum() for state in v])
        assert seen.sum() == len(drawn)
        assert scipy.stats.chisquare(seen, expected, sum_check=False).pvalue > 1e-3


def test_samples_of_gaussian_visible_units_have_the_exact_moments():
    spread = (0.64, 1.44, 0.25)
    made = machine(SIGNS, GaussianUnits(0.2, spread), 1.5 * WEIGHTS)
    drawn = made.sample(20_000, steps=30, generator=seeded())
    field = FIELD.clone().requires_grad_()
    (mean,) = torch.autograd.grad(machine(SIGNS, made.visible, made.weights, field).log_partition(), field)
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - mean).abs() < 5 * error).all()
    # Not the mean of the field alone.
    assert ((made.visible.mean(FIELD) - mean).abs() > 8 * error).any()


def test_chains_are_reproducible_and_keep_dtype_and_shape():
    made = machine(SIGNS)
    one, other = (made.sample(5, steps=3, generator=seeded(seed)) for seed in (0, 1))
    assert torch.equal(one, made.sample(5, steps=3, generator=seeded()))
    assert not torch.equal(one, other)
    assert made.sample(0, steps=3).shape == (0, 3)
    single = machine(SIGNS, weights=WEIGHTS.float().requires_grad_(), field=FIELD.float())
    drawn = single.gibbs(torch.ones(2, 4, 3), steps=2, generator=seeded())
    assert (drawn.dtype, drawn.shape, drawn.requires_grad) == (torch.float32, (2, 4, 3), False)
    assert torch.equal(made.gibbs(DATA, steps=0), DATA)
    poisoned = made.gibbs(tensor([[torch.nan, 1, 1], [1, 1, 1]]), steps=1, generator=seeded())
    assert poisoned.isnan().any(-1).tolist() == [True, False]


# Learning.


@pytest.mark.parametrize(
    ("hidden", "visible"),
    [(SIGNS, SIGNS), (PoissonUnits(0.7), BITS), (GaussianUnits(0.3, 1.2), SIGNS), (BITS, GaussianUnits(0.2, 0.8))],
    ids=["signs", "Poisson", "Hopfield", "Gaussian visible"],
)
def test_annealed_importance_sampling_is_as_far_off_as_it_says(hidden, visible):
    made = machine(hidden, visible, 1.5 * WEIGHTS)
    exact = made.log_partition()
    found = [annealed_importance_sampling(made, chains=64, steps=25, generator=seeded(seed)) for seed in range(20)]
    off = torch.stack([(each.value - exact) / each.error for each in found])
    assert off.abs().max() < 4.5
    assert 0.5 < off.square().mean() < 2.0
    assert max(float(each.error) for each in found) < 0.2
    assert all(1 < each.effective_samples <= 64 for each in found)


def test_annealing_says_when_it_is_too_fast():
    weights = 6 * random(12, 6).sign() / 12
    made = machine(SIGNS, weights=weights, field=torch.zeros(12, dtype=torch.float64))
    slow, fast = (annealed_importance_sampling(made, chains=64, steps=n, generator=seeded()) for n in (200, 1))
    assert fast.error > 3 * slow.error
    assert fast.effective_samples < slow.effective_samples
    assert (slow.value - made.log_partition()).abs() < 4 * slow.error


def test_layers_that_cannot_be_enumerated_are_estimated():
    weights, field = 0.05 * random(30, 30), 0.1 * random(30, seed=1)
    made = machine(SIGNS, weights=weights, field=field)
    found = annealed_importance_sampling(made, chains=64, steps=50, generator=seeded())
    # Weak weights: to second order in W, log Z of the layers is that of K = t^2/2 at independent visible units.
    mean = torch.tanh(field)
    second = ((mean @ weights).square() + (1 - mean.square()) @ weights.square()).sum() / 2
    leading = field.cosh().log().sum() + 30 * math.log(2) + second
    assert (found.value - leading).abs() < 5 * found.error + 0.05


# What cannot be normalised.


def test_two_gaussian_layers_need_a_positive_precision():
    largest = float(torch.linalg.matrix_norm(WEIGHTS, 2)) ** 2
    machine(GaussianUnits(0.0, 0.99 / largest), GaussianUnits())
    message = r"`weights` must leave the precision .* positive definite, got the eigenvalue -0.01; make them smaller"
    with pytest.raises(ValueError, match=message):
        machine(GaussianUnits(0.0, 1.01 / largest), GaussianUnits())
    barrier = LaplaceUnits(0.5, soft_barrier=0.5)
    machine(barrier, GaussianUnits(), WEIGHTS * (0.9 / (largest * barrier.largest_variance)) ** 0.5)
    with pytest.raises(ValueError, match="positive definite"):
        machine(barrier, GaussianUnits(), WEIGHTS * (1.1 / (largest * barrier.largest_variance)) ** 0.5)
    # Per unit: the unit with the large variance has no weight.
    weights = WEIGHTS.clone()
    weights[:, 1] = 0
    assert machine(GaussianUnits(0.0, (0.5, 1e3)), GaussianUnits(), weights).log_partition().isfinite()


def test_bounded_laws_are_refused_where_a_state_leaves_their_domain():
    # The largest tilts are sum_i |W_i mu| = 1 and 1.1.
    machine(ExponentialUnits(1.11), SIGNS)
    message = r"`weights` must keep every tilt W\^T v inside the domain of ExponentialUnits.* got a tilt of 1.1; make"
    with pytest.raises(ValueError, match=message):
        machine(ExponentialUnits(1.09), SIGNS)
    with pytest.raises(ValueError, match=r"got a tilt of -1\.1"):
        machine(LaplaceUnits(1 / 1.05), SIGNS)
    # Bits reach less far, and a soft barrier reaches everywhere.
    machine(ExponentialUnits(0.71), BITS)
    made = machine(ExponentialUnits(0.5, soft_barrier=0.2), SIGNS)
    close(made.log_prob(states([-1, 1], 3)).exp().sum(), tensor(1.0))
    assert made.sample(200, steps=5, generator=seeded()).isnan().any()


def test_nan_in_weights_is_bad_data():
    poisoned = WEIGHTS.clone()
    poisoned[0, 0] = torch.nan
    for visible in (SIGNS, GaussianUnits()):
        assert machine(GaussianUnits(0.0, 0.1), visible, poisoned).log_partition().isnan()

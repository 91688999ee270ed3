"""Lower bounds: an energy that falls without end is refused with the direction and the anchor that helps."""

import gc
import math
import re
import warnings
import weakref
from functools import partial

import pytest
import torch

from implicit_attention import AnchoredEnergy, ConvergenceWarning, GradientDescent, LogSumExp, SquaredScores, solve
from implicit_attention.potentials import (
    EluFeatures,
    Entmax,
    Exponential,
    GaussianMixture,
    GaussianUnits,
    HiddenUnits,
    KernelPotential,
    LaplaceUnits,
    NormalisedScores,
    PoissonUnits,
    Polynomial,
    SelfAttention,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    units_potential,
)
from implicit_attention.testing.numerics import random

tensor = partial(torch.tensor, dtype=torch.float64)
# In four dimensions a refusal names the whole direction.
KEYS, BETA, ZERO = random(2, 7, 4), tensor([0.3, 0.8]), torch.zeros(2, 3, 4, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)[:, None]
WIDTHS = torch.arange(1, 15).double().view(2, 7, 1, 1)

#: Potentials that grow like |z|^2, over two batch entries.
QUADRATIC = {
    "squared": SquaredScores(KEYS, BETA),
    "squared, masked": SquaredScores(KEYS, BETA, mask=MASK),
    "polynomial": Polynomial(KEYS, BETA),
    "polynomial, masked": Polynomial(KEYS, BETA, mask=MASK),
    "polynomial, a mask per query": Polynomial(KEYS, BETA, mask=MASK & (random(2, 3, 7, seed=3) > -0.5)),
    "gaussian units": units_potential(GaussianUnits(0.4, 2.0))(KEYS, BETA),
    "gaussian units, per query": units_potential(GaussianUnits(-3.0, 2.0))(KEYS, BETA, bias=random(2, 3, 7)),
    "hidden units": HiddenUnits(KEYS.mT, GaussianUnits(0.4, 2.0)),
    "mixture": GaussianMixture(KEYS, WIDTHS * torch.eye(4).double(), random(7)),
    "scaled": BETA * SquaredScores(KEYS, 0.5),
    "sum": SquaredScores(KEYS, BETA) + LogSumExp(random(7, 4), 3.0) + Polynomial(random(7, 4, seed=2), 0.4),
}
#: Potentials that grow faster.
FASTER = {
    "polynomial 3": Polynomial(KEYS, BETA, degree=3),
    "polynomial 6": Polynomial(KEYS, BETA, degree=6, bias=-random(7).abs()),
    "exponential": Exponential(KEYS, BETA),
    "poisson units": units_potential(PoissonUnits(0.1))(KEYS, BETA),
    "hidden units": HiddenUnits(KEYS.mT, PoissonUnits(0.1)),
    "scaled sum": 1e-3 * (Exponential(KEYS, BETA) + LogSumExp(KEYS, 1.0)),
}


class Halved(SquaredScores):
    """A value of a user, of which the ray of the squares says nothing."""

    def value(self, z):
        return super().value(z) / 2


#: Potentials of which no direction is known: nearly all are bounded at every scale.
WITHOUT = {
    "log-sum-exp": LogSumExp(KEYS, BETA),
    "softmax1": Softmax1(KEYS, BETA),
    "entmax": Entmax(KEYS, BETA),
    "softcap": SoftcapLogSumExp(KEYS, BETA, cap=2.0),
    "normalised": NormalisedScores(KEYS, BETA),
    "kernel": KernelPotential(KEYS, 0.5, features=EluFeatures()),
    "sign units": units_potential(SignUnits())(KEYS, BETA),
    "laplace units": units_potential(LaplaceUnits(0.1))(KEYS, BETA),
    "tokens that move together": SelfAttention(1.0),
    "beside a part that is not convex": SquaredScores(KEYS, BETA) + SoftcapLogSumExp(KEYS, BETA, cap=2.0),
    "a value of a user": Halved(KEYS, 1.0),
}


def refused(potential, anchor=0.0, field=ZERO):
    """The direction, the batch entry, the words and the anchor that a refusal names; None where no anchor helps."""
    with pytest.raises(ValueError, match=r"`potential` must leave .* a lower bound") as raised:
        AnchoredEnergy(potential, field, anchor)
    told = str(raised.value)
    direction = tensor([float(x) for x in re.search(r"without end along \[(.*?)(, \.\.\.)?\]", told)[1].split(",")])
    entry, needed = re.search(r"in batch entry \((\d+),", told), re.search(r"raise the anchor above ([\d.]+)", told)
    return direction, entry and int(entry[1]), told, needed and float(needed[1])


def lowest(potential, anchor, direction, distance):
    """The least energy of the three queries at a distance, per batch entry."""
    energy = AnchoredEnergy(potential, ZERO, anchor, unbounded="ignore")
    return energy.energy((distance * direction).expand(2, 3, 4)).amin(-1)


@pytest.mark.parametrize("potential", QUADRATIC.values(), ids=QUADRATIC)
def test_what_grows_like_a_square_is_refused_below_the_anchor_that_is_named(potential):
    potential = 8.0 * potential
    direction, entry, told, anchor = refused(potential)
    for words in ("lower beta", "normalise the keys", "SphereEnergy", "unbounded='warn'"):
        assert words in told
    near, far = (lowest(potential, anchor - 0.01 * (1 - anchor), direction, t)[entry] for t in (1e5, 1e6))
    assert far < 50 * near < 0
    AnchoredEnergy(potential, ZERO, anchor + 1e-4)
    refused(potential, anchor - 1e-4)
    # Beside other parts of a sum, and other keys of a query, a limit is only an upper bound.
    if "(at least)" not in told:
        assert potential.bounded_below(1 - anchor - 1e-5)
        assert lowest(potential, anchor + 0.01 * (1 - anchor), direction, 1e6)[entry] > 0


@pytest.mark.parametrize("potential", FASTER.values(), ids=FASTER)
def test_what_grows_faster_is_refused_along_its_longest_key_with_every_anchor(potential):
    longest = KEYS[0][KEYS[0].norm(dim=-1).argmax()]
    for anchor in (0.0, 0.999):
        direction, entry, told, needed = refused(potential, tensor([anchor, 1.0]))
        assert (entry, needed, "no anchor below 1 helps" in told) == (0, None, True)
        torch.testing.assert_close(direction, longest / longest.norm(), rtol=0, atol=5.1e-4)
    near, far = (lowest(potential, 0.99, direction, t)[0] for t in (1e3, 1e5))
    assert far < 100 * min(near, -1.0) or far == -math.inf
    AnchoredEnergy(potential, ZERO, 1.0)


@pytest.mark.parametrize("potential", WITHOUT.values(), ids=WITHOUT)
def test_others_are_never_refused(potential):
    AnchoredEnergy(potential, ZERO)


def test_the_limit_of_squares_is_that_of_the_largest_singular_value():
    expected = 1 - 1 / (4 * torch.linalg.svdvals(KEYS[0])[0].square())
    assert refused(SquaredScores(KEYS[0], 4.0))[3] == pytest.approx(float(expected), abs=1e-6)
    assert refused(SquaredScores(1e120 * KEYS, BETA))[3] == 1


def test_the_limit_of_rectified_squares_is_the_best_of_all_directions():
    angles = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    directions = torch.stack([angles.cos(), angles.sin()], -1)
    for seed in range(20):
        keys = random(6, 2, seed=seed)
        growth = (directions @ keys.mT).relu().square().sum(-1).max()
        # What is found is certain: never above the true anchor. That it is the best is no theorem.
        found = refused(Polynomial(keys, 4.0), field=ZERO[..., :2])[3]
        assert found == pytest.approx(float(1 - 1 / (4 * growth)), abs=1e-6)


def test_units_of_different_variance_fall_along_the_wide_ones():
    # max variance |k|^2 of either alone would be 4 * 9: neither falls before 1 / 9.
    keys, units = torch.diag(tensor([3.0, 1.0])), GaussianUnits(0.0, (1.0, 4.0))
    for potential in (units_potential(units)(keys, 1.0), HiddenUnits(keys.mT, units)):
        direction, _, _, anchor = refused(potential, field=ZERO[..., :2])
        assert (direction.abs().tolist(), anchor) == ([1, 0], pytest.approx(8 / 9, abs=1e-6))


def test_the_worst_entry_decides():
    keys = torch.eye(5).double().expand(2, 2, 5, 5) * tensor([1.0, 3.0])[:, None, None]
    field, potential = random(2, 2, 3, 5), SquaredScores(keys, 0.5)
    with pytest.raises(ValueError, match=r"anchor 0.1, .* in batch entry \(0, 1\); raise the anchor above 0.777778,"):
        AnchoredEnergy(potential, field, 0.1)
    AnchoredEnergy(potential, field, tensor([0.0, 0.8]))
    with pytest.raises(ValueError, match=r"anchor 0.2, .* in batch entry \(1, 1\); raise the anchor above 0.777778,"):
        AnchoredEnergy(potential, field, tensor([[0.8, 0.8], [0.8, 0.2]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_at_the_limit_itself_the_field_decides_and_nothing_is_refused(dtype):
    keys, field = 2 * torch.eye(4, dtype=dtype), ZERO.to(dtype)
    AnchoredEnergy(SquaredScores(keys, 0.25), field)
    refused(SquaredScores(keys, 0.26), field=field)


def test_what_no_query_reads_refuses_nothing():
    long, mask = torch.diag(tensor([1.0, 1, 1, 9])), torch.tensor([True, True, True, False])
    for make in (SquaredScores, Polynomial):
        AnchoredEnergy(make(long, 0.9, mask=mask), ZERO)
        refused(make(long, 0.9))
    wide = torch.stack([torch.eye(4), 9 * torch.eye(4)]).double()
    AnchoredEnergy(GaussianMixture(torch.zeros(2, 4).double(), wide, tensor([0.0, -torch.inf])), ZERO, 0.1)
    for make in (partial(Polynomial, degree=3), Exponential, units_potential(PoissonUnits(1.0))):
        AnchoredEnergy(make(torch.zeros(7, 4).double(), 1.0), ZERO)


@pytest.mark.parametrize("make", [SquaredScores, Polynomial, Exponential], ids=lambda make: make.__name__)
def test_numbers_that_are_not_finite_are_no_bad_argument(make):
    keys = 0.1 * KEYS
    keys[1] = torch.nan
    AnchoredEnergy(make(keys, 1.0), ZERO, tensor([1.0, 0.0]))
    keys[0] *= 100
    assert refused(make(keys, 1.0))[1] == 0
    AnchoredEnergy(make(keys, 1.0), ZERO, tensor([torch.nan, torch.nan]))
    AnchoredEnergy(make(torch.zeros(0, 7, 4).double(), 1.0), ZERO[:0])


def test_an_option_turns_the_refusal_into_a_warning():
    with pytest.warns(ConvergenceWarning, match=r"`potential` must leave .* raise the anchor above"):
        AnchoredEnergy(SquaredScores(KEYS, 1.0), ZERO, unbounded="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnchoredEnergy(SquaredScores(KEYS, 1.0), ZERO, unbounded="ignore")


def test_a_refusal_is_always_of_the_numbers_as_they_are():
    keys = 0.1 * KEYS
    potential = SquaredScores(keys, 1.0)
    AnchoredEnergy(potential, ZERO, 0.9)
    keys *= 3
    AnchoredEnergy(potential, ZERO, 0.9)
    # What was asked up to a scale says nothing of larger ones.
    refused(potential)
    # Written past torch.
    keys.data.mul_(0.1)
    AnchoredEnergy(potential, ZERO)
    kept = weakref.ref(potential)
    del potential
    gc.collect()
    assert kept() is None


def test_nothing_is_asked_where_the_host_cannot_look():
    def mapped(keys):
        return AnchoredEnergy(SquaredScores(keys, 1.0), ZERO).fixed_point_map(ZERO).sum()

    for run in (torch.vmap(mapped), torch.func.grad(lambda k: mapped(k[0]))):
        run(KEYS.expand(3, 2, 7, 4))
    torch.compile(mapped, backend="eager")(KEYS)
    AnchoredEnergy(SquaredScores(KEYS.to("meta"), 1.0), ZERO.to("meta"))


def test_a_subclass_of_the_energy_may_give_it_a_bound():
    class Confined(AnchoredEnergy):
        def energy(self, z):
            return super().energy(z) + z.square().sum(-1).square()

    energy = Confined(SquaredScores(KEYS, 1.0), random(2, 3, 4))
    assert solve(energy, energy.field, solver=GradientDescent(step_size=0.02, max_steps=2000)).converged.all()

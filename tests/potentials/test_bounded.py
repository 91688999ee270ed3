"""Lower bounds: rays fall, limits are sharp, and energies without a bound are refused with a remedy."""

import math
import re
import warnings
from functools import partial

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    ConvergenceWarning,
    GradientDescent,
    LogSumExp,
    SquaredScores,
    equilibrium_attention,
    solve,
)
from implicit_attention.energies import _bounds
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


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


KEYS = random(2, 7, 5)
BETA = tensor([0.3, 0.8])
MASK = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)

WIDTHS = torch.arange(1, 15).double().view(2, 7)

#: Potentials that grow like |z|^2, over two batch entries.
QUADRATIC = {
    "squared": SquaredScores(KEYS, BETA),
    "squared, masked": SquaredScores(KEYS, BETA, mask=MASK[:, None]),
    "polynomial": Polynomial(KEYS, BETA),
    "polynomial, masked": Polynomial(KEYS, BETA, mask=MASK[:, None]),
    "polynomial, a mask per query": Polynomial(KEYS, BETA, mask=MASK[:, None] & (random(2, 3, 7, seed=3) > -0.5)),
    "gaussian units": units_potential(GaussianUnits(0.4, 2.0))(KEYS, BETA),
    "gaussian units, per query": units_potential(GaussianUnits(-3.0, 2.0))(KEYS, BETA, bias=random(2, 3, 7)),
    "hidden units": HiddenUnits(KEYS.mT, GaussianUnits(0.4, 2.0)),
    "mixture": GaussianMixture(KEYS, WIDTHS[..., None, None] * torch.eye(5).double(), random(7)),
    "scaled": BETA * SquaredScores(KEYS, 0.5),
    "sum": SquaredScores(KEYS, BETA) + LogSumExp(random(7, 5), 3.0) + Polynomial(random(7, 5, seed=2), 0.4),
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
#: Potentials of which no ray is known: nearly all are bounded at every scale.
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
}
each_quadratic = pytest.mark.parametrize("potential", QUADRATIC.values(), ids=QUADRATIC)
each_faster = pytest.mark.parametrize("potential", FASTER.values(), ids=FASTER)


def largest_fall(potential, scale, far):
    """The least energy of the three queries at distance `far` along the ray, per batch entry."""
    z = far * potential.falling_ray().direction[:, None].expand(2, 3, 5)
    return (z.square().sum(-1) / 2 - scale[:, None] * potential.value(z)).amin(-1)


@each_quadratic
def test_energies_fall_along_the_ray_above_its_limit_and_rise_below(potential, request):
    ray = potential.falling_ray()
    torch.testing.assert_close(ray.direction.norm(dim=-1), torch.ones(2).double())
    above, below = (
        torch.stack([largest_fall(potential, f * ray.limit, 10.0**p) for p in (5, 6)]) for f in (1.01, 0.99)
    )
    assert (above[1] < 50 * above[0]).all()
    assert (above < 0).all()
    # Beside other parts of a sum, and other keys of a query, a limit is only an upper bound.
    if not any(word in request.node.name for word in ("sum", "query")):
        assert (below > 0).all()
    assert potential.bounded_below(float(ray.limit.min()) * 1.01) is not True


@each_faster
def test_energies_fall_along_the_longest_key_at_every_scale(potential):
    ray = potential.falling_ray()
    assert ray.limit.tolist() == [0, 0]
    longest = KEYS[torch.arange(2), KEYS.norm(dim=-1).argmax(-1)]
    torch.testing.assert_close(ray.direction, longest / longest.norm(dim=-1, keepdim=True))
    near, far = (largest_fall(potential, tensor([1e-2, 1e-2]), t) for t in (1e3, 1e5))
    assert ((far < 100 * near.clamp(max=-1.0)) | far.eq(-torch.inf)).all()


@pytest.mark.parametrize("potential", WITHOUT.values(), ids=WITHOUT)
def test_others_have_no_ray_and_are_never_refused(potential):
    assert potential.falling_ray() is None
    AnchoredEnergy(potential, random(2, 3, 5))


def test_the_limit_of_squares_is_that_of_the_largest_singular_value():
    expected = 1 / (BETA * torch.linalg.svdvals(KEYS)[:, 0].square())
    torch.testing.assert_close(SquaredScores(KEYS, BETA).falling_ray().limit, expected)
    long = SquaredScores(1e120 * KEYS, BETA).falling_ray().limit
    torch.testing.assert_close(long, 1e-240 * expected, rtol=1e-12, atol=0)


def test_the_limit_of_rectified_squares_is_the_best_of_all_directions():
    angles = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    directions = torch.stack([angles.cos(), angles.sin()], -1)
    for seed in range(20):
        keys = random(6, 2, seed=seed)
        growth = (directions @ keys.mT).relu().square().sum(-1).max()
        found = Polynomial(keys, 0.7).falling_ray().limit
        # What is found is certain: never below the true limit. That it is the best is no theorem.
        assert found >= (1 - 1e-7) / (0.7 * growth)
        torch.testing.assert_close(found, 1 / (0.7 * growth), rtol=1e-6, atol=0)


@each_quadratic
def test_the_refusal_names_the_ray_and_an_anchor_that_helps(potential):
    field = random(2, 3, 5)
    with pytest.raises(ValueError, match=r"`potential` must leave .* a lower bound") as raised:
        AnchoredEnergy(8.0 * potential, field)
    told = str(raised.value)
    limit = potential.falling_ray().limit.min() / 8
    entry = int(potential.falling_ray().limit.argmin())
    assert f"in batch entry ({entry},)" in told
    direction = [f"{x:.3g}" for x in potential.falling_ray().direction[entry, :4].tolist()]
    assert f"falls without end along [{', '.join(direction)}, ...]" in told
    for words in ("lower beta", "normalise the keys", "SphereEnergy", "unbounded='warn'"):
        assert words in told
    anchor = float(re.search(r"raise the anchor above ([\d.]+)", told).group(1))
    assert anchor == pytest.approx(1 - float(limit), abs=1e-6)
    AnchoredEnergy(8.0 * potential, field, anchor + 1e-4)
    if "(at least)" not in told:
        assert (8.0 * potential).bounded_below(1 - anchor - 1e-5)
    with pytest.raises(ValueError, match="a lower bound"):
        AnchoredEnergy(8.0 * potential, field, anchor - 1e-4)


@each_faster
def test_the_refusal_says_where_no_anchor_helps(potential):
    for anchor in (0.0, 0.999):
        with pytest.raises(ValueError, match=r"no anchor below 1 helps.*\(SphereEnergy\)"):
            AnchoredEnergy(potential, random(2, 3, 5), anchor)
    AnchoredEnergy(potential, random(2, 3, 5), 1.0)


def test_the_worst_entry_decides():
    keys = torch.eye(5).double().expand(2, 2, 5, 5) * tensor([1.0, 3.0])[:, None, None]
    field, potential = random(2, 2, 3, 5), SquaredScores(keys, 0.5)
    with pytest.raises(ValueError, match=r"anchor 0.1, .* in batch entry \(0, 1\); raise the anchor above 0.777778,"):
        AnchoredEnergy(potential, field, 0.1)
    AnchoredEnergy(potential, field, tensor([0.0, 0.8]))
    with pytest.raises(ValueError, match=r"anchor 0.2, .* in batch entry \(1, 1\); raise the anchor above 0.777778,"):
        AnchoredEnergy(potential, field, tensor([[0.8, 0.8], [0.8, 0.2]]))
    single = SquaredScores(3 * torch.eye(5), 0.5)
    with pytest.raises(ValueError, match=r"along \[.*\]; raise"):
        AnchoredEnergy(single, torch.zeros(1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_at_the_limit_itself_the_field_decides_and_nothing_is_refused(dtype):
    AnchoredEnergy(SquaredScores(2 * torch.eye(5, dtype=dtype), 0.25), torch.zeros(3, 5, dtype=dtype))
    with pytest.raises(ValueError, match="a lower bound"):
        AnchoredEnergy(SquaredScores(2 * torch.eye(5, dtype=dtype), 0.26), torch.zeros(3, 5, dtype=dtype))


def test_what_no_query_reads_refuses_nothing():
    long = torch.eye(5) * torch.tensor([1.0, 1, 1, 1, 9])
    mask = torch.tensor([True, True, True, True, False])
    for make in (SquaredScores, Polynomial):
        AnchoredEnergy(make(long, 0.9, mask=mask), torch.zeros(3, 5))
        with pytest.raises(ValueError, match="a lower bound"):
            AnchoredEnergy(make(long, 0.9), torch.zeros(3, 5))
    weights = torch.tensor([0.0, -torch.inf])
    wide = torch.stack([torch.eye(2), 9 * torch.eye(2)])
    AnchoredEnergy(GaussianMixture(torch.zeros(2, 2), wide, weights), torch.zeros(3, 2), 0.1)
    for make in (partial(Polynomial, degree=3), Exponential, units_potential(PoissonUnits(1.0))):
        AnchoredEnergy(make(torch.zeros(7, 5), 1.0), torch.zeros(3, 5))


@pytest.mark.parametrize("make", [SquaredScores, Polynomial, Exponential], ids=lambda make: make.__name__)
def test_numbers_that_are_not_finite_are_no_bad_argument(make):
    keys = 0.1 * random(2, 7, 5)
    keys[1] = torch.nan
    energy = AnchoredEnergy(make(keys, 1.0), random(2, 3, 5), unbounded="ignore")
    falls = energy.falls()
    assert falls.tolist() == [True, False] if make is Exponential else falls is None
    keys[0] *= 100
    with pytest.raises(ValueError, match=r"in batch entry \(0,\)"):
        AnchoredEnergy(make(keys, 1.0), random(2, 3, 5))
    AnchoredEnergy(make(keys, 1.0), random(2, 3, 5), torch.full((2,), torch.nan, dtype=torch.float64))
    AnchoredEnergy(make(torch.zeros(0, 7, 5), 1.0), torch.zeros(0, 3, 5))


def test_an_option_turns_the_refusal_into_a_warning():
    potential, field = SquaredScores(KEYS, 1.0), random(2, 3, 5)
    with pytest.warns(ConvergenceWarning, match="`potential` must leave .* raise the anchor above"):
        AnchoredEnergy(potential, field, unbounded="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnchoredEnergy(potential, field, unbounded="ignore")
    with pytest.raises(ValueError, match="`unbounded` must be one of 'raise', 'warn', 'ignore', got 'no'"):
        AnchoredEnergy(LogSumExp(KEYS, 1.0), field, unbounded="no")


def test_a_set_of_keys_is_asked_once(monkeypatch):
    asked = []
    falling_ray = SquaredScores.falling_ray
    monkeypatch.setattr(SquaredScores, "falling_ray", lambda self, s=math.inf: asked.append(s) or falling_ray(self, s))
    keys, field = 0.1 * random(2, 7, 5), random(2, 3, 5)
    potential = SquaredScores(keys, 1.0)
    for anchor in (0.0, 0.3, tensor([0.1, 0.2])):
        energy = AnchoredEnergy(potential, field, anchor)
    # Nor at a solve, nor for rows of it.
    assert energy.falls() is None
    assert energy.select(torch.tensor([[0], [1]])).falls() is None
    assert asked == [1.0]
    # What was asked up to a scale says nothing of larger ones.
    other = SquaredScores(keys * 3, 1.0)
    AnchoredEnergy(other, field, 0.9)
    with pytest.raises(ValueError, match="a lower bound"):
        AnchoredEnergy(other, field, 0.0)
    keys *= 100
    with pytest.raises(ValueError, match="a lower bound"):
        AnchoredEnergy(potential, field)
    potential.keys = 0.1 * random(2, 7, 5)
    AnchoredEnergy(potential, field)
    # Written past torch: a refusal is always of the numbers as they are.
    potential.keys = 10 * random(2, 7, 5)
    AnchoredEnergy(potential, field, unbounded="ignore")
    potential.keys.data.mul_(0.01)
    AnchoredEnergy(potential, field)


def test_the_memory_of_what_was_asked_holds_no_potential():
    before = len(_bounds._rays)
    for seed in range(5):
        AnchoredEnergy(SquaredScores(0.1 * random(2, 7, 5, seed=seed), 1.0), random(2, 3, 5))
    assert len(_bounds._rays) <= before + 1


def test_nothing_is_asked_where_the_host_cannot_look():
    field = random(2, 3, 5)

    def mapped(keys):
        return AnchoredEnergy(SquaredScores(keys, 1.0), field).fixed_point_map(field).sum()

    for run in (torch.vmap(mapped), torch.func.grad(lambda k: mapped(k[0]))):
        run(KEYS.expand(3, 2, 7, 5))
    torch.compile(mapped, backend="eager")(KEYS)
    AnchoredEnergy(SquaredScores(KEYS.to("meta"), 1.0), field.to("meta"))
    with pytest.raises(ValueError, match="a lower bound"):
        mapped(KEYS)


def test_an_energy_that_was_looked_at_keeps_its_closed_forms():
    energy = AnchoredEnergy(SquaredScores(0.1 * KEYS, 1.0), random(2, 3, 5), 0.3)
    polynomial = AnchoredEnergy(Polynomial(0.1 * KEYS, 1.0), random(2, 3, 5), 0.3)
    assert energy.select(torch.tensor([[0], [1]])) is not None
    # Written out it has no graph; that of the base class would record one.
    assert type(polynomial).linearize(polynomial, polynomial.field).jvp.__qualname__.startswith("AnchoredEnergy")


def test_a_subclass_with_another_value_has_no_ray():
    class Halved(SquaredScores):
        def value(self, z):
            return super().value(z) / 2

    assert Halved(KEYS, 1.0).falling_ray() is None


def test_a_subclass_of_the_energy_may_give_it_a_bound():
    class Confined(AnchoredEnergy):
        def energy(self, z):
            return super().energy(z) + z.square().sum(-1).square()

    energy = Confined(SquaredScores(KEYS, 1.0), random(2, 3, 5))
    assert energy.falls() is None
    assert solve(energy, energy.field, solver=GradientDescent(step_size=0.02, max_steps=2000)).converged.all()


def test_softmax_attention_asks_nothing(monkeypatch):
    monkeypatch.setattr(_bounds, "_beyond", None)
    x = random(2, 3, 5)
    equilibrium_attention(x, x, x)


def test_units_of_different_variance_fall_along_the_wide_ones():
    # max variance |k|^2 of either alone would be 4 * 9: neither falls before 1 / 9.
    keys = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    units = GaussianUnits(0.0, (1.0, 4.0))
    for phi in (units_potential(units)(keys, 1.0), HiddenUnits(keys.mT, units)):
        ray = phi.falling_ray()
        torch.testing.assert_close(ray.limit, torch.tensor(1 / 9, dtype=torch.float64))
        torch.testing.assert_close(ray.direction.abs(), torch.tensor([1.0, 0.0], dtype=torch.float64))
        AnchoredEnergy(phi, torch.zeros(1, 2, dtype=torch.float64), 0.9)

"""Known numbers of every method, and how its errors fall with the couplings, the temperature or the dimension."""

import itertools
import math

import numpy as np
import pytest
import torch
from solvable_models import (
    ASYMMETRIC,
    COUPLINGS,
    FIELD,
    STAR,
    chain,
    curie_weiss,
    double,
    four,
    four_vectors,
    one_spin,
    two_spins,
)

from implicit_attention import Picard
from implicit_attention.potentials import DiscreteUnits, SignUnits, SphereUnits
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    Enumeration,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    decompose,
    fit_ising_moments,
    free_energy,
    magnetization,
    stationary_law,
    stationary_state,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

LEADING, ONE_LOOP, SPHERICAL = SaddlePoint(), SaddlePoint(one_loop=True), SaddlePoint(shared=True)
THREE = DiscreteUnits((-1, 0, 2), (1.0, 2.0, 0.5))
#: What is read off a solution, in units of D and sqrt(D).
READ = {
    "F": lambda found, dim: found.free_energy / dim,
    "F counted": lambda found, dim: found.free_energy - len(found.magnetization) * math.log(2),
    "log Z": lambda found, dim: found.log_partition / dim,
    "U": lambda found, dim: found.internal_energy / dim,
    "S": lambda found, dim: found.entropy / dim,
    "C": lambda found, dim: found.heat_capacity / dim,
    "log Z/N": lambda found, dim: found.log_partition / dim / len(found.magnetization),
    "F/N": lambda found, dim: found.free_energy / dim / len(found.magnetization),
    "m": lambda found, dim: found.magnetization[:, 0] / dim**0.5,
    "m of the first": lambda found, dim: found.magnetization[0] / dim**0.5,
    "one m": lambda found, dim: found.magnetization[0, 0] / dim**0.5,
    "c01": lambda found, dim: found.correlations[0, 1] / dim,
    "chi01": lambda found, dim: found.susceptibility()[0, 0, 1, 0],
    "chi23": lambda found, dim: found.susceptibility()[2, 0, 3, 0],
    "chi00": lambda found, dim: found.susceptibility()[0, 0, 0],
}


#: D: one-loop values of log Z/D of one spin, and of two.
AROUND = {
    2: ("0.2846780451", "0.3556291200"),
    4: ("0.2722880455", "0.3393004633"),
    8: ("0.2660930458", "0.3311361349"),
    16: ("0.2629955459", "0.3270539707"),
    64: ("0.2606724209", "0.3239923476"),
    256: ("0.2600916397", "0.3232269418"),
    1024: ("0.2599464444", "0.3230355903"),
}
TAP_3, PRECISE = TAP(order=3), MeanField(solver=Picard(rtol=1e-12, atol=0.0, max_steps=5000))
COUNTED = {"measure": "counting"}
ROWS = (
    # Four Ising spins.
    (four(), Enumeration(), "F", "-2.988547292487"),
    (four(), Enumeration(), "U", "-0.395425067392"),
    (four(), Enumeration(), "C", "0.304736298487"),
    (four(), Enumeration(), "S", "2.593122225095"),
    (four(), Enumeration(), "m", "0.1428041181 -0.0093881480 0.2736346912 0.1582063146"),
    (four(), Enumeration(), "chi01", "0.2478560902"),
    (four(), Enumeration(), "chi23", "0.3169427602"),
    (four(2.0), Enumeration(), "F", "-1.759976874641"),
    (four(2.0), Enumeration(), "U", "-0.653291954888"),
    (four(2.0), Enumeration(), "C", "0.873387506237"),
    (four(2.0), Enumeration(), "m", "0.2364176176 0.0719093995 0.5205404265 0.4087957548"),
    (four(), MeanField(), "F", "-2.84420630320"),
    (four(), MeanField(), "m", "0.1514109954 -0.0003523460 0.3348150869 0.1965294424"),
    (four(), MeanField(), "chi23", "0.379414269"),
    (four(2.0), MeanField(), "F", "-1.5854298586"),
    (four(), TAP(), "F", "-3.021587929413"),
    (four(), TAP(), "m", "0.1392289589 -0.0136135989 0.2538196204 0.1409050997"),
    (four(), TAP(), "chi23", "0.2763758069"),
    (four(2.0), TAP(), "F", "-1.849399208130"),
    (four(), TAP_3, "F", "-2.9842808430"),
    (four(), TAP_3, "m", "0.1438932194 -0.0058493537 0.2810732453 0.1651425788"),
    (four(), Bethe(), "F", "-3.019265018365"),
    (four(), Bethe(), "m", "0.1386388768 -0.0097197215 0.2593715437 0.1500150834"),
    (four(2.0), Bethe(), "F", "-1.835106495364"),
    (four(), AdaTAP(), "F", "-2.985339987693"),
    (four(), AdaTAP(), "m", "0.1430017993 -0.0108118675 0.2721975824 0.1534187118"),
    (four(), AdaTAP(prior=SignUnits()), "F", "-2.985339987693"),
    (SpinSystem(COUPLINGS, FIELD), AdaTAP(prior=DiscreteUnits((-1, 1))), "F counted", "-2.985339987693"),
    (four(2.0), AdaTAP(), "F", "-1.745059348675"),
    (four(2.0), AdaTAP(), "m", "0.2360586186 0.0629455867 0.5167001076 0.3871640194"),
    # A star, on which Bethe is exact.
    (four(couplings=STAR), Enumeration(), "log Z", "3.519584901386"),
    (four(couplings=STAR), Enumeration(), "m", "0.0400270862 -0.0394556085 0.2160908170 0.0529932193"),
    (four(couplings=STAR), Bethe(), "log Z", "3.519584901386"),
    (four(couplings=STAR), Bethe(), "m", "0.0400270862 -0.0394556085 0.2160908170 0.0529932193"),
    # Chains of vectors.
    (chain(3), MeanField(), "log Z", "0.4253680091"),
    (chain(3), TransferMatrix(), "log Z", "0.9363628122"),
    (chain(3), TransferMatrix(), "m", "0.23139863 -0.18060247 0.38838510 0.31900208"),
    (chain(16), TransferMatrix(), "log Z", "0.9066638248"),
    (chain(16), TransferMatrix(), "m", "0.24465989 -0.17515716 0.37522397 0.29808882"),
    (chain(64), TransferMatrix(), "log Z", "0.9005359478"),
    (chain(16), LEADING, "log Z", "0.8984356059"),
    (chain(16), LEADING, "m", "0.24698687 -0.17356400 0.37123802 0.29268974"),
    (chain(16), ONE_LOOP, "log Z", "0.9068918886"),
    (chain(64), ONE_LOOP, "log Z", "0.9005496766"),
    # Per dimension, leading order is the same in every dimension.
    *((one_spin(dim), LEADING, "log Z", "0.2598980460") for dim in (1, 2, 3, 64, 1024)),
    *((one_spin(dim), LEADING, "one m", "0.5542476415") for dim in (1, 2, 3, 64, 1024)),
    *((two_spins(dim), LEADING, "log Z", "0.3229718065") for dim in (1, 2, 3, 64, 1024)),
    *((two_spins(dim), LEADING, "c01", "0.5915559826") for dim in (1, 2, 3, 64, 1024)),
    (two_spins(3, 0.25), LEADING, "c01", "0.1699457286"),
    (two_spins(3, 0.25), LEADING, "C", "0.0280708218"),
    (two_spins(3, 1.0), LEADING, "c01", "0.5146178953"),
    (two_spins(3, 1.0), LEADING, "C", "0.2093809031"),
    (two_spins(3, 4.0), LEADING, "c01", "0.8372473324"),
    (two_spins(3, 4.0), LEADING, "C", "0.4121046808"),
    # One loop around one spin, and around two.
    *((one_spin(dim), ONE_LOOP, "log Z", text) for dim, (text, _) in AROUND.items()),
    *((two_spins(dim), ONE_LOOP, "log Z", text) for dim, (_, text) in AROUND.items()),
    # Four vectors in any directions.
    (four_vectors(), LEADING, "log Z", "0.802844734342"),
    (four_vectors(), LEADING, "F", "-0.535229822894"),
    (four_vectors(), LEADING, "U", "-0.896773342614"),
    (four_vectors(), LEADING, "S", "-0.542315279579"),
    (four_vectors(), LEADING, "C", "0.725574743622"),
    (four_vectors(), LEADING, "m of the first", "0.314816529 -0.006661975 0.276762414"),
    (four_vectors(), LEADING, "c01", "0.211420534"),
    (four_vectors(), LEADING, "chi00", "1.026513529 0.006711388 -0.183379744"),
    (four_vectors(), LEADING, "chi01", "0.279714308"),
    (four_vectors(), SPHERICAL, "log Z", "0.804720978766"),
    # Curie and Weiss: mean field is exact for infinitely many; a field of 1e-12 only chooses the direction.
    (curie_weiss(10, 1, 1.2, 0.1, **COUNTED), Enumeration(), "log Z/N", "0.858439374330"),
    (curie_weiss(10, 1, 1.2, 0.1, **COUNTED), Enumeration(), "one m", "0.479736171845"),
    (curie_weiss(5, 1, 1.2, 0.1, **COUNTED), PRECISE, "log Z/N", "0.805196270991"),
    (curie_weiss(5, 1, 1.2, 0.1, **COUNTED), PRECISE, "one m", "0.78762861836"),
    (curie_weiss(5, 1, 1.5, 1e-14, **COUNTED), PRECISE, "F/N", "-0.538894232961"),
    (curie_weiss(5, 1, 1.5, 1e-14), PRECISE, "one m", "0.8585596366"),
    (curie_weiss(5, 2, 1.5, 1e-12), PRECISE, "one m", "0.724158718"),
    (curie_weiss(5, 3, 1.5, 1e-12), PRECISE, "one m", "0.675706900"),
    (curie_weiss(5, 8, 1.5, 1e-12), PRECISE, "one m", "0.613920538"),
    (curie_weiss(5, 64, 1.5, 1e-12), PRECISE, "one m", "0.581869504"),
    (curie_weiss(5, 1, 1.1, 1e-12), PRECISE, "one m", "0.502940575"),
    (curie_weiss(5, 3, 1.1, 1e-12), PRECISE, "one m", "0.379150146"),
    (curie_weiss(5, 1, 0.9, 0.0, **COUNTED), PRECISE, "log Z/N", f"{math.log(2):.14f}"),
    (curie_weiss(5, 3, 1.0, 0.0), PRECISE, "one m", "0.00000000000000"),
)
NAMES = [f"{k} {type(row[1]).__name__} {row[2]}" for k, row in enumerate(ROWS)]


@pytest.mark.cases(len(ROWS))
@pytest.mark.parametrize(("system", "method", "quantity", "digits"), ROWS, ids=NAMES)
def test_numbers(system, method, quantity, digits):
    """To the last of the digits that are given."""
    found = thermodynamics(system, method, check="none")
    value = READ[quantity](found, found.magnetization.shape[-1]).detach().flatten().tolist()
    places = len(digits.split()[0].split(".")[1])
    assert value == pytest.approx([float(number) for number in digits.split()], rel=0, abs=0.6 * 10.0**-places)


# Orders of the error.

DIMS = (64, 256, 1024)
# D: log Z/D and m of one spin; log Z/D and correlation of two.
EXACT = {
    2: (0.2798023624, 0.6198986494, 0.3505962734, 0.6658858792),
    4: (0.2712051281, 0.5889626042, 0.3382956175, 0.6296624422),
    8: (0.2658593182, 0.5717006865, 0.3309364972, 0.6104304895),
    16: (0.2629428043, 0.5629407144, 0.3270111829, 0.6009004965),
    64: (0.2606694053, 0.5564094845, 0.3239900078, 0.5938711114),
    256: (0.2600914557, 0.5547872468, 0.3232268007, 0.5921333618),
    1024: (0.2599464330, 0.5543824874, 0.3230355816, 0.5917002386),
}


def of_dimensions(method):
    """Of log Z/D and m of one spin, of log Z/D and the correlation of two."""

    def errors(dim):
        one, two = (thermodynamics(system(dim), method) for system in (one_spin, two_spins))
        wanted = (one, "log Z"), (one, "one m"), (two, "log Z"), (two, "c01")
        return torch.stack([READ[name](found, dim) for found, name in wanted]) - double(EXACT[dim])

    return errors


def against(truth, system, method):
    """Of the free energy of a system at a scale of its couplings."""
    return lambda scale: (free_energy(system(scale), method) - free_energy(system(scale), truth))[None]


def glass(field):
    couplings = random(4, 4, seed=3) / math.sqrt(8)
    couplings = (couplings + couplings.mT) * (1 - torch.eye(4))
    return lambda scale: SpinSystem(scale * couplings, field * random(4, 1, seed=4))


def spin_one(scale):
    """Spins of three values against all their states."""
    weights = double(THREE.weights) / sum(THREE.weights)
    index = torch.tensor(list(itertools.product(range(3), repeat=4)))
    states, logs = double(THREE.values)[index], weights.log()[index].sum(-1)
    energy = -scale * ((states @ COUPLINGS) * states).sum(-1) / 2 - states @ FIELD[:, 0]
    exact = (logs - 0.8 * energy).logsumexp(0)
    found = thermodynamics(SpinSystem(scale * COUPLINGS, FIELD, 0.8), AdaTAP(prior=THREE))
    return (found.log_partition - exact)[None]


def sphere(nodes, radius):
    """Points and log weights that integrate polynomials of degree 2 nodes - 1 over the sphere exactly."""
    z, weight = np.polynomial.legendre.leggauss(nodes)
    angle = np.pi * np.arange(2 * nodes) / nodes
    ring = np.sqrt(1 - z**2)
    points = [np.outer(ring, np.cos(angle)), np.outer(ring, np.sin(angle)), np.outer(z, np.ones(2 * nodes))]
    log_weight = np.log(np.repeat(weight, 2 * nodes) / (4 * nodes))
    return radius * torch.tensor(np.stack(points, -1).reshape(-1, 3)), torch.tensor(log_weight)


def three_vectors(order, block):
    """Three spins in three dimensions, of which the third is integrated in closed form."""
    radius, beta, field = 1.3, 1.2, random(3, 3, seed=1)
    drawn = random(*((3, 3, 3, 3) if block else (3, 3)), seed=7)
    couplings = (drawn + (drawn.permute(1, 0, 3, 2) if block else drawn.mT)) / 2
    couplings[range(3), range(3)] = 0.0
    matrices = couplings if block else couplings[..., None, None] * torch.eye(3)
    spins, log_weight = sphere(12, radius)

    def errors(scale):
        first, second = (beta * spins @ h + log_weight for h in field[:2])
        bonds = scale * matrices
        pair = first[:, None] + second + beta * spins @ bonds[0, 1] @ spins.mT
        seen = field[2] + (spins @ bonds[0, 2])[:, None] + spins @ bonds[1, 2]
        exact = (pair + SphereUnits().log_partition(seen, beta, radius)).flatten().logsumexp(0)
        system = SpinSystem(scale * couplings, field, beta, radius=radius)
        return (-beta * free_energy(system, TAP(order=order)) - exact)[None]

    return errors


def anisotropy(scale):
    """A lone spin with a matrix of its own, whose exact log Z is an integral over one sphere."""
    field, own = random(1, 3, seed=3), 0.3 * random(1, 1, 3, 3, seed=5)
    own = (own + own.mT) / 2
    spins, log_weight = sphere(16, 1.3)
    energy = scale / 2 * ((spins @ own[0, 0]) * spins).sum(-1) + spins @ field[0]
    found = -1.1 * free_energy(SpinSystem(scale * own, field, 1.1, radius=1.3), TAP())
    return (found - (1.1 * energy + log_weight).logsumexp(0))[None]


def onsager(scale):
    """-beta m_i sum_j J_ij^2 (1 - m_j^2), up to the next order in J."""
    couplings = scale * random(4, 4)
    couplings = (couplings + couplings.mT) * (1 - torch.eye(4)) / 2
    system = SpinSystem(couplings, random(4, 1, seed=1), 0.7)
    parts, m = decompose(system, Enumeration()), magnetization(system, Enumeration())
    known = -0.7 * m * (couplings.square() @ (1 - m.square()))
    return (parts.onsager / parts.gain[..., None] - known).abs().amax((0, 1))[None]


def inverse(method):
    """Of couplings and fields that are fitted to exact moments."""

    def errors(strength):
        couplings = strength * random(5, 5)
        couplings, field = (couplings + couplings.mT) * (1 - torch.eye(5)) / 2, 0.6 * random(5, 1, seed=1)
        exact = thermodynamics(SpinSystem(couplings, field), Enumeration())
        fit = fit_ising_moments(exact.magnetization[:, 0], exact.susceptibility()[:, 0, :, 0], method=method)
        return torch.stack([(fit.couplings - couplings).abs().max(), (fit.field - field).abs().max()])

    return errors


MEMORY = ASYMMETRIC + torch.diag(double([0.2, 0, 0.1, 0]))
MEMORY_FIELD = double([0.6, -0.5, 0.9, 0.4])
PLANAR, PLANAR_FIELD = double([[0.3, 0.9], [-0.5, 0.4]]), double([[0.5, 0.3], [-0.4, 0.8]])


def synchronous_ising(method):
    """Of m, of delayed correlations and of the entropy production of stationary states."""

    def errors(scale):
        law = stationary_law(scale * MEMORY, MEMORY_FIELD)
        state = stationary_state(SpinSystem(scale * MEMORY, MEMORY_FIELD[:, None], radius=1.0), method)
        parts = (
            state.magnetization[:, 0] - law.magnetization,
            state.delayed_correlations - law.delayed,
            state.entropy_production - law.entropy_production,
        )
        # The entropy production of first order changes the sign of its error in between.
        return torch.stack([part.norm() for part in parts[: method.order + 1]])

    return errors


def planar_law(couplings, field, points=24):
    """m and <s_i(t + 1) s_j(t)^T> - m_i m_j^T of two planar spins of length sqrt(2), by states at equal angles.

    Sums over the circle of smooth functions are exact to rounding. Couplings (2, 2, 2, 2).
    """
    angle = 2 * math.pi * torch.arange(points, dtype=torch.float64) / points
    circle = math.sqrt(2) * torch.stack([angle.cos(), angle.sin()], -1)
    first, second = torch.meshgrid(torch.arange(points), torch.arange(points), indexing="ij")
    states = torch.stack([circle[first.flatten()], circle[second.flatten()]], 1)
    local = field + torch.einsum("ijab,sjb->sia", couplings, states)
    rate = torch.softmax(local @ circle.mT, -1)
    law = torch.full((points**2,), 1 / points**2, dtype=torch.float64)
    for _ in range(60):
        law = ((law[:, None] * rate[:, 0]).mT @ rate[:, 1]).flatten()
    m = torch.einsum("s,sia->ia", law, states)
    later = torch.einsum("s,sia,sjb->ijab", law, rate @ circle, states)
    return m, later - torch.einsum("ia,jb->ijab", m, m)


def synchronous_planar(method, matrices=False):
    base = 0.3 * random(2, 2, 2, 2, seed=3) if matrices else PLANAR
    blocks = base if matrices else base[..., None, None] * torch.eye(2)

    def errors(scale):
        m, later = planar_law(scale * blocks, PLANAR_FIELD)
        state = stationary_state(SpinSystem(scale * base, PLANAR_FIELD), method)
        produced = scale * ((blocks - blocks.transpose(0, 1).mT) * later).sum()
        delayed = later.diagonal(dim1=-2, dim2=-1).sum(-1)
        parts = (
            state.magnetization - m,
            state.delayed_correlations - delayed,
            state.entropy_production - produced,
        )
        return torch.stack([part.norm() for part in parts])

    return errors


DOUBLED, WEAK, FINE = (0.02, 0.04, 0.08), (0.05, 0.1, 0.2), (0.005, 0.01, 0.02)
ORDERS = {
    "mean field": (against(Enumeration(), lambda s: four(1.0, COUPLINGS, s), MeanField()), DOUBLED, 2, 0.1),
    "TAP": (against(Enumeration(), lambda s: four(1.0, COUPLINGS, s), TAP()), (*DOUBLED, 0.16), 3, 0.1),
    "third": (against(Enumeration(), lambda s: four(1.0, COUPLINGS, s), TAP(order=3)), (*DOUBLED, 0.16), 4, 0.1),
    "AdaTAP": (against(Enumeration(), glass(0.0), AdaTAP()), FINE, 4, 0.3),
    "AdaTAP in a field": (against(Enumeration(), glass(0.35), AdaTAP()), FINE, 3, 0.3),
    "AdaTAP of three values": (spin_one, (0.01, 0.02, 0.04), 3, 0.3),
    "TAP of vectors": (three_vectors(2, False), (0.03, 0.06, 0.12), 3, 0.15),
    "TAP of matrices": (three_vectors(2, True), (0.03, 0.06, 0.12), 3, 0.15),
    "third of vectors": (three_vectors(3, False), (0.03, 0.06, 0.12), 4, 0.15),
    "third of matrices": (three_vectors(3, True), (0.03, 0.06, 0.12), 4, 0.15),
    "TAP of an anisotropy": (anisotropy, WEAK, 2, 0.15),
    "saddle point": (of_dimensions(LEADING), DIMS, -1, 0.03),
    "one loop": (of_dimensions(ONE_LOOP), DIMS, -2, 0.03),
    "Onsager": (onsager, (0.05, 0.1), 3, 0.3),
    "inverse mean field": (inverse("mean_field"), DOUBLED, 2, 0.15),
    "inverse TAP": (inverse("tap"), DOUBLED, 3, 0.15),
    "inverse AdaTAP": (inverse("adaptive_tap"), DOUBLED, 2, 0.15),
    "Plefka": (synchronous_ising(KineticPlefka()), WEAK, (2, 2), 0.1),
    "Plefka, second": (synchronous_ising(KineticPlefka(order=2)), WEAK, (3, 3, 4), 0.1),
    "Plefka of vectors": (synchronous_planar(KineticPlefka()), WEAK, (2, 2, 3.5), 0.15),
    "Plefka of vectors, second": (synchronous_planar(KineticPlefka(order=2)), WEAK, (3, 3, 4), 0.15),
    "Plefka of matrices": (synchronous_planar(KineticPlefka(), matrices=True), WEAK, (2, 2, 3), 0.2),
}


@pytest.mark.cases(100)
@pytest.mark.parametrize(("errors", "scales", "orders", "tolerance"), ORDERS.values(), ids=ORDERS)
def test_errors_fall_as_they_should(errors, scales, orders, tolerance):
    found = torch.stack([errors(scale) for scale in scales]).abs()
    slopes = np.polyfit(np.log(scales), found.log(), 1)[0]
    np.testing.assert_allclose(slopes, np.broadcast_to(orders, slopes.shape), atol=tolerance)
    # And not rounding.
    assert float(found.amin()) > 1e-13

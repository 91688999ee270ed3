"""Driven synchronous dynamics: against the exact law of all states, identities."""

import dataclasses
import itertools

import pytest
import torch
from driven_paths import PARTS, assert_close, every_case, example

from implicit_attention.spins import GaussianClosure, KineticPlefka, SpinSystem, drive, stationary_state
from implicit_attention.testing.numerics import random

# The truth, by sums over all states.


def exact(couplings, fields, beta, start, ways):
    """(m, sigma, housekeeping, field change) of spins that can point in few ways (K, D), from the field `start`.

    couplings: (N, N, D, D). All laws are vectors of the K^N states.
    """
    n = len(couplings)
    states = torch.stack([torch.stack(s) for s in itertools.product(ways, repeat=n)])

    def law(f):
        """log of prod_i exp(beta s_i . f_i)/Z_i of all states, (..., K^N)."""
        log_z = torch.logsumexp(beta * f @ ways.mT, -1).sum(-1)
        return beta * torch.einsum("...id,sid->...s", f, states) - log_z[..., None]

    p = law(start).exp()
    magnetizations, found = [torch.einsum("s,sid->id", p, states)], []
    for h in fields:
        forward = law(h + torch.einsum("ijab,sjb->sia", couplings, states))
        rate = forward.exp()
        pi = torch.ones_like(p) / len(p)
        for _ in range(60):
            pi = pi @ rate
        pi = pi / pi.sum()
        q = p @ rate
        ratio = forward - forward.mT
        flow = p[:, None] * rate
        sigma = (flow * (ratio + p.log()[:, None] - q.log())).sum()
        housekeeping = (flow * (ratio + pi.log()[:, None] - pi.log())).sum()
        change = (p * (p / pi).log()).sum() - (q * (q / pi).log()).sum()
        assert min(sigma, housekeeping, change) > 0
        found.append(torch.stack((sigma, housekeeping, change)))
        p = q
        magnetizations.append(torch.einsum("s,sid->id", p, states))
    return torch.stack(magnetizations), *torch.stack(found, -1)


SIGNS = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
# For strengths of fields as here an average over 16 angles is that over the circle to rounding.
ANGLES = torch.arange(16, dtype=torch.float64) * (torch.pi / 8)
CIRCLE = torch.stack((ANGLES.cos(), ANGLES.sin()), -1)


@pytest.mark.parametrize(
    ("method", "ways", "sites", "matrices", "orders"),
    [
        (KineticPlefka(), SIGNS, 4, False, (2, 2, 3, 2)),
        (GaussianClosure(), SIGNS, 4, False, (3, 3, 3, 3)),
        (KineticPlefka(), CIRCLE, 2, False, (2, 2, 3, 2)),
        (KineticPlefka(), CIRCLE, 2, True, (2, 2, 3, 2)),
        (GaussianClosure(), CIRCLE, 2, False, (2, 2, 3, 2)),
    ],
    ids=["first, Ising", "Gaussian, Ising", "first", "first, matrices", "Gaussian"],
)
def test_errors_fall_with_the_couplings_as_promised(method, ways, sites, matrices, orders):
    dim, beta = ways.shape[-1], 0.8
    base = random(sites, sites, *((dim, dim) if matrices else ()), seed=3)
    blocks = base if matrices else base[..., None, None] * torch.eye(dim)
    fields, start = 0.7 * random(4, sites, dim, seed=4), 0.4 * random(sites, dim, seed=5)
    errors, scales = [], torch.tensor([0.02, 0.01, 0.005], dtype=torch.float64)
    for scale in scales:
        truth = exact(scale * blocks, fields, beta, start, ways)
        path = drive(method, scale * base, fields, beta=beta, initial=truth[0][0], radius=1.0)
        found = (path.states, path.entropy_production, path.housekeeping, path.field_change)
        errors.append(torch.stack([(a - b).norm() for a, b in zip(found, truth, strict=True)]))
    slopes = (errors[0] / errors[-1]).log() / (scales[0] / scales[-1]).log()
    assert bool((slopes > torch.tensor(orders) - 0.25).all()), slopes
    # Housekeeping is itself of second order.
    assert all(float(error / part.norm()) < 0.05 for error, part in zip(errors[-1], truth, strict=True))


def test_causal_softmax_couplings_of_plane_spins():
    h = torch.tensor([[0.4, -0.2], [0.1, 0.5], [-0.3, 0.3]], dtype=torch.float64)
    couplings = torch.tensor(
        [[1, 0, 0], [0.517315572732, 0.482684427268, 0], [0.306582707822, 0.352657582548, 0.340759709630]],
        dtype=torch.float64,
    )
    times = torch.arange(4, dtype=torch.float64)
    path = drive(KineticPlefka(order=1), couplings, h * torch.cos(0.7 * times)[:, None, None], beta=0.8)
    first = [[0.3101784968, -0.1550892484], [0.0768466083, 0.3842330414], [-0.2333433124, 0.2333433124]]
    last = [[0.1569982477, -0.0784991238], [0.2260058706, -0.2341662202], [0.3134620721, -0.0887464292]]
    truth = torch.tensor([first, last], dtype=torch.float64)
    torch.testing.assert_close(path.states[[1, 4]], truth, rtol=0, atol=1e-8)
    assert not path.states[0].any()


# Identities.


@every_case
def test_the_parts_add_up_and_a_mismatch_is_not_negative(method, dim):
    path = drive(method, *example(dim, 2), beta=0.9)
    torch.testing.assert_close(path.entropy_production, path.housekeeping + path.field_change)
    assert bool((path.mismatch > 0).all())
    assert bool((torch.stack([getattr(path, name) for name in PARTS]) > 0).all())


@pytest.mark.by_name(slow=r"\[Gaussian")
@every_case
def test_a_field_that_stays_leads_to_the_stationary_state(method, dim):
    couplings, fields = example(dim, 2, steps=1)
    path = drive(method, couplings, fields.expand(60, -1, -1, -1), beta=0.9)
    settled = stationary_state(SpinSystem(couplings, fields[0], 0.9), method)
    for name in ("entropy_production", "housekeeping"):
        torch.testing.assert_close(getattr(path, name)[-1], settled.entropy_production, rtol=1e-9, atol=1e-11)
    assert bool((settled.entropy_production > 1e-2).all())
    torch.testing.assert_close(path.states[-1], settled.magnetization, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(path.stationary, settled.magnetization.expand(60, -1, -1, -1), rtol=1e-9, atol=1e-9)
    assert bool((path.field_change[-1].abs() < 1e-11).all())
    assert bool((path.mismatch[-1].abs() < 1e-11).all())
    # By differences of one step each in the place of products.
    m = settled.magnetization[0].flatten()
    steps = [
        drive(method, couplings, fields[:, 0], beta=0.9, initial=(m + sign * 1e-6 * unit).reshape(4, dim)).states[1]
        for sign in (1, -1)
        for unit in torch.eye(len(m), dtype=m.dtype)
    ]
    forth, back = torch.stack(steps).flatten(1).chunk(2)
    slowest = torch.linalg.eigvals((forth - back) / 2e-6).abs().max()
    torch.testing.assert_close(path.relaxation_time[0, 0], -1 / slowest.log(), rtol=1e-6, atol=0)


@every_case
def test_symmetric_couplings_need_no_housekeeping_in_their_stationary_state(method, dim):
    couplings, fields = example(dim, steps=1)
    symmetric = couplings + couplings.mT
    path = drive(method, symmetric, fields.expand(120, -1, -1), beta=0.8)
    assert float(path.housekeeping[-1].abs()) < 1e-11
    assert float(path.entropy_production[-1].abs()) < 1e-11
    # In exact dynamics it is 0 on the way as well; here to the order that is promised.
    worst = [
        float(drive(method, scale * symmetric, fields.expand(4, -1, -1)).housekeeping.abs().max())
        for scale in (0.04, 0.01)
    ]
    assert worst[0] / worst[1] > 4**2.7


def test_in_a_cycle_boundary_terms_sum_to_zero():
    couplings, beta = example(1)[0], 0.9
    fields = 0.6 * random(5, 4, 1, seed=3).repeat(30, 1, 1)
    path = drive(KineticPlefka(), couplings, fields, beta=beta)
    torch.testing.assert_close(path.states[-1], path.states[-6], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(path.entropy_production[-5:], path.entropy_production[-10:-5])
    # Without the entropies of the laws, written out for spins of length 1: what the bath receives.
    m, received = path.states[..., 0], 0.0
    for h, before, after in zip(fields[-5:, :, 0], m[-6:-1], m[-5:], strict=True):
        odd, variance = couplings - couplings.mT, [1 - s.square() for s in (before, after)]
        delayed = torch.outer(after, before) + beta * couplings * torch.outer(variance[1], variance[0])
        received += beta * (h @ (after - before) + (odd * delayed).sum())
        for sign, s, v in ((1, after, variance[1]), (-1, before, variance[0])):
            f = beta * (h + couplings @ s)
            received += sign * f.cosh().log().sum()
            received += sign * beta**2 / 2 * (1 - f.tanh().square()) @ couplings.square() @ v
    assert float(path.entropy_production[-5:].sum()) == pytest.approx(float(received), rel=1e-10)


def test_in_a_constant_field_all_but_the_asymmetry_telescopes():
    couplings, fields = example(3, steps=1)
    whole = drive(KineticPlefka(), couplings, fields.expand(6, -1, -1))
    parts = [drive(KineticPlefka(), couplings, fields.expand(3, -1, -1), initial=m) for m in (None, whole.states[3])]
    # KL to the one stationary law, which does not depend on the path: what is lost in 6 steps is lost in 3 and 3.
    torch.testing.assert_close(whole.field_change.sum(), sum(part.field_change.sum() for part in parts))
    far = drive(KineticPlefka(), couplings, fields.expand(60, -1, -1))
    other = drive(KineticPlefka(), couplings, fields.expand(60, -1, -1), initial=far.states[1])
    torch.testing.assert_close(far.field_change.sum() - other.field_change.sum(), far.field_change[0])


@every_case
def test_a_path_can_be_continued(method, dim):
    couplings, fields = example(dim, 2, steps=5)
    whole = drive(method, couplings, fields)
    rest = drive(method, couplings, fields[2:], initial=whole.states[2])
    torch.testing.assert_close(rest.states, whole.states[2:])
    # The start of a path is a law of lone spins, which is what the closure says but for the Gaussian one of vectors.
    same = not (isinstance(method, GaussianClosure) and dim > 1)
    for name in PARTS:
        torch.testing.assert_close(getattr(rest, name)[1 - same :], getattr(whole, name)[3 - same :])


@every_case
def test_the_radius_is_a_unit_and_only_beta_times_the_rest_counts(method, dim):
    couplings, fields = example(dim, 2)
    truth, r = drive(method, couplings, fields, beta=0.7, radius=1.0), 1.6
    scaled = drive(method, 0.7 * couplings / r**2, 0.7 * fields / r, radius=r)
    lengths = {name: r * getattr(truth, name) for name in ("states", "stationary")}
    assert_close(scaled, dataclasses.replace(truth, **lengths))


@every_case
def test_sites_may_be_renamed_and_space_turned(method, dim):
    couplings, fields = example(dim, 2)
    truth = drive(method, couplings, fields)
    order, turn = torch.tensor([2, 0, 3, 1]), torch.linalg.qr(random(dim, dim, seed=8))[0]
    moved = drive(method, couplings[order][:, order], fields[..., order, :] @ turn)
    turned = {name: getattr(truth, name)[..., order, :] @ turn for name in ("states", "stationary")}
    assert_close(moved, dataclasses.replace(truth, **turned))


def test_matrices_that_are_numbers_are_numbers():
    couplings, fields = example(3, 2)
    blocks = couplings[..., None, None] * torch.eye(3, dtype=torch.float64)
    assert_close(drive(KineticPlefka(), blocks, fields), drive(KineticPlefka(), couplings, fields))


def test_a_spin_at_its_full_length_has_an_entropy_for_one_dimension():
    # Without field and couplings: from one state of weight 1/2 each to both.
    path = drive(KineticPlefka(), torch.zeros(3, 3).double(), torch.zeros(1, 3, 1).double(), initial=torch.ones(3, 1))
    assert float(path.entropy_production) == pytest.approx(3 * torch.log(torch.tensor(2.0)).item(), rel=1e-6)


def test_a_deviation_that_grows_has_no_relaxation_time():
    couplings = torch.tensor([[0.0, 3.0], [3.0, 0.0]], dtype=torch.float64)
    path = drive(KineticPlefka(), couplings, torch.zeros(2, 2, 1, dtype=torch.float64))
    assert path.relaxation_time.isinf().all()
    alone = drive(KineticPlefka(), torch.zeros_like(couplings), torch.ones(2, 2, 1, dtype=torch.float64))
    assert not alone.relaxation_time.any()

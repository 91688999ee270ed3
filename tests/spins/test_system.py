"""SpinSystem: what it accepts, and which system it then describes."""

import itertools
import math
import re

import pytest
import torch

from implicit_attention import Status
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    Enumeration,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    free_energy,
    magnetization,
    stationary_state,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(2)

B, N, D = 2, 3, 5


def symmetric(*shape, seed=0):
    """Couplings (*batch, N, N) with a diagonal."""
    couplings = random(*shape, seed=seed)
    return (couplings + couplings.mT) / 2


def blocks(n=N, d=D, seed=0):
    """Couplings (N, N, D, D) with J_ji = J_ij^T."""
    couplings = random(n, n, d, d, seed=seed)
    return (couplings + couplings.transpose(0, 1).mT) / 2


def log_partition_by_states(couplings, field, beta, radius=1.0):
    """log mean exp(-beta E) of one Ising system, state by state, as the energy is written."""
    n = len(field)
    weights = []
    for signs in itertools.product((-radius, radius), repeat=n):
        pairs = sum(signs[i] * signs[j] * float(couplings[i, j]) for i in range(n) for j in range(n))
        weights.append(beta * (pairs / 2 + sum(s * float(h) for s, h in zip(signs, field, strict=True))))
    top = max(weights)
    return top + math.log(sum(math.exp(w - top) for w in weights) / 2**n)


def ising(couplings, field, beta=1.0, **options):
    return SpinSystem(couplings, field[..., None], beta, **options)


# What is symmetric.


def test_a_matrix_coupling_is_symmetric_with_the_transpose_of_its_twin():
    field = random(B, N, D)
    SpinSystem(blocks(), field).check_symmetric("a method")
    # Symmetric in the pair alone is not what an energy needs.
    untransposed = (lambda j: j + j.transpose(0, 1))(random(N, N, D, D))
    with pytest.raises(ValueError, match="symmetric"):
        SpinSystem(untransposed, field).check_symmetric("a method")


def test_rounding_is_no_asymmetry():
    couplings = symmetric(N, N).clone()
    couplings[0, 1] *= 1 + 4 * torch.finfo(torch.float64).eps
    SpinSystem(couplings, random(B, N, D)).check_symmetric("a method")


# What it describes.


@pytest.mark.parametrize(
    ("radius", "dim", "value"),
    [("sqrt_dim", 1, 1.0), ("sqrt_dim", 16, 4.0), ("bessel", 3, math.sqrt(0.5)), ("bessel", 10, 2.0), (2.5, 7, 2.5)],
)
def test_radii(radius, dim, value):
    assert SpinSystem(symmetric(N, N), random(N, dim), radius=radius).radius == pytest.approx(value, rel=1e-15)


def test_sizes_are_read_from_the_field():
    system = SpinSystem(symmetric(N, N), random(4, B, N, D))
    assert (system.num_sites, system.dim, system.batch, system.block) == (N, D, (4, B), False)
    assert SpinSystem(blocks(), random(4, B, N, D)).block


@pytest.mark.parametrize("radius", [1.0, 1.7])
@pytest.mark.parametrize("beta", [0.4, 2.0])
def test_both_orders_of_a_pair_and_the_diagonal_count_half(beta, radius):
    couplings, field = symmetric(4, 4), random(4, seed=1)
    value = -beta * free_energy(ising(couplings, field, beta, radius=radius), Enumeration())
    assert float(value) == pytest.approx(log_partition_by_states(couplings, field, beta, radius), abs=1e-13)


def test_the_counting_measure_adds_log_two_for_every_site_that_exists():
    couplings, field = symmetric(4, 4), random(B, 4, seed=1)
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    for given, sites in ((None, [4.0, 4.0]), (mask, [3.0, 1.0]), (mask[0], [3.0, 3.0])):
        systems = [ising(couplings, field, 0.7, measure=m, mask=given) for m in ("counting", "uniform")]
        counting, uniform = (thermodynamics(system, Enumeration()) for system in systems)
        log_two = math.log(2.0) * torch.tensor(sites, dtype=torch.float64)
        torch.testing.assert_close(counting.log_partition - uniform.log_partition, log_two, rtol=0, atol=1e-14)
        torch.testing.assert_close(counting.entropy - uniform.entropy, log_two, rtol=0, atol=1e-14)
        torch.testing.assert_close(counting.magnetization, uniform.magnetization, rtol=0, atol=0)


def test_from_full_counts_each_order_of_a_pair_fully():
    couplings, field = random(4, 4), random(4, seed=1)
    full = SpinSystem.from_full(couplings, field[:, None], 0.8)
    torch.testing.assert_close(full.couplings, couplings + couplings.mT, rtol=0, atol=0)
    value = -0.8 * float(free_energy(full, Enumeration()))
    assert value == pytest.approx(log_partition_by_states(2 * couplings, field, 0.8), abs=1e-13)


def test_from_full_turns_blocks_around_and_keeps_options():
    couplings, field = random(N, N, D, D), random(B, N, D)
    system = SpinSystem.from_full(couplings, field, radius=2.0)
    torch.testing.assert_close(system.couplings[0, 1], couplings[0, 1] + couplings[1, 0].mT, rtol=0, atol=0)
    system.check_symmetric("a method")
    assert system.radius == 2.0


def test_from_full_turns_what_a_function_returns():
    couplings, field = random(B, N, N), random(B, N, 1)
    through = SpinSystem.from_full(lambda h: couplings * h.mT, field)
    direct = SpinSystem.from_full(couplings * field.mT, field)
    torch.testing.assert_close(through.couplings, direct.couplings, rtol=0, atol=0)


def test_a_coupling_function_is_evaluated_once():
    calls = []

    def function(h):
        calls.append(h)
        return 0.1 * h @ h.mT

    system = SpinSystem(function, random(B, N, 1))
    free_energy(system, Enumeration())
    thermodynamics(system, Enumeration())
    assert len(calls) == 1


def test_where_sites_and_dimensions_agree_couplings_per_sample_go_first():
    field = random(N, N, N, N)
    assert not SpinSystem(symmetric(N, N, N, N), field).block
    assert SpinSystem(blocks(N, N), field[0]).block


def test_couplings_that_are_numbers_are_blocks_of_the_identity():
    couplings, field = symmetric(N, N), random(B, N, D)
    block = couplings[..., None, None] * torch.eye(D, dtype=torch.float64)
    numbers, matrices = SpinSystem(couplings, field), SpinSystem(block, field)
    torch.testing.assert_close(numbers.coupled(field), matrices.coupled(field), rtol=1e-14, atol=1e-14)
    by_loops = sum(couplings[1, j] * field[:, j] for j in range(N))
    torch.testing.assert_close(numbers.coupled(field)[:, 1], by_loops, rtol=1e-14, atol=1e-14)
    by_loops = sum(field[:, j] @ blocks()[1, j].mT for j in range(N))
    torch.testing.assert_close(SpinSystem(blocks(), field).coupled(field)[:, 1], by_loops, rtol=1e-13, atol=1e-13)


def test_every_sample_has_its_own_beta_and_couplings():
    couplings, field = symmetric(B, 4, 4), random(B, 4, 1)
    beta = torch.tensor([0.3, 1.9], dtype=torch.float64)
    together = free_energy(SpinSystem(couplings, field, beta), Enumeration())
    alone = [free_energy(SpinSystem(couplings[b], field[b], float(beta[b])), Enumeration()) for b in range(B)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-15, atol=1e-15)
    one = beta[1:]
    torch.testing.assert_close(
        free_energy(SpinSystem(couplings, field, one), Enumeration()),
        free_energy(SpinSystem(couplings, field, float(one)), Enumeration()),
        rtol=1e-15,
        atol=1e-15,
    )


def test_leading_axes_may_be_many_or_none():
    couplings, field = symmetric(4, 4), random(3, B, 4, 1)
    many = free_energy(SpinSystem(couplings, field), Enumeration())
    assert many.shape == (3, B)
    alone = free_energy(SpinSystem(couplings, field[2, 1]), Enumeration())
    torch.testing.assert_close(many[2, 1], alone, rtol=1e-15, atol=1e-15)


# Sites that do not exist.


def padded(couplings, field, more):
    """The system with `more` sites full of NaN behind it, and the mask that leaves them out."""
    n = couplings.shape[-1]
    wide = couplings.new_full((*couplings.shape[:-2], n + more, n + more), math.nan)
    wide[..., :n, :n] = couplings
    long = torch.cat([field, field.new_full((*field.shape[:-2], more, 1), math.nan)], dim=-2)
    return wide, long, torch.arange(n + more) < n


def test_masked_sites_get_the_gradient_zero_and_pass_no_nan_on():
    wide, long, mask = padded(symmetric(B, 4, 4), random(B, 4, 1), 2)
    wide.requires_grad_(), long.requires_grad_()
    free_energy(SpinSystem(wide, long, mask=mask), Enumeration()).sum().backward()
    assert torch.isfinite(wide.grad).all()
    assert torch.isfinite(long.grad).all()
    assert (wide.grad[:, 4:] == 0).all()
    assert (wide.grad[..., 4:] == 0).all()
    assert (long.grad[:, 4:] == 0).all()
    assert (long.grad[:, :4] != 0).all()


@pytest.mark.parametrize(
    "method",
    [MeanField(), TAP(), AdaTAP(), SaddlePoint(), SaddlePoint(one_loop=True), SaddlePoint(shared=True), Bethe()],
    ids=repr,
)
def test_a_sample_without_any_site_is_nothing(method):
    mask = torch.tensor([[True, True, False], [False, False, False]])
    system = SpinSystem(torch.full((3, 3), 0.2).double(), random(2, 3, 1, seed=1), 0.8, mask=mask, measure="counting")
    found = thermodynamics(system, method)
    assert float(found.free_energy[1]) == pytest.approx(0.0, abs=1e-14)
    assert not found.magnetization[1].any()


def test_every_sample_has_its_own_mask():
    couplings, field = symmetric(4, 4), random(B, 4, 1)
    mask = torch.tensor([[True, True, False, True], [False, True, True, False]])
    together = magnetization(SpinSystem(couplings, field, mask=mask), Enumeration())
    for b in range(B):
        kept = mask[b]
        alone = magnetization(SpinSystem(couplings[kept][:, kept], field[b, kept]), Enumeration())
        torch.testing.assert_close(together[b, kept], alone, rtol=1e-14, atol=1e-14)
        assert (together[b, ~kept] == 0).all()


def test_masked_blocks_are_cut_out():
    mask = torch.tensor([[True, False, True], [True, True, False]])
    live = SpinSystem(blocks(), random(B, N, D), mask=mask).live_couplings
    assert live.shape == (B, N, N, D, D)
    torch.testing.assert_close(live[1, 0, 1], blocks()[0, 1], rtol=0, atol=0)
    assert (live[0, 1] == 0).all()
    assert (live[0, :, 1] == 0).all()


def test_couplings_of_masked_sites_need_not_be_symmetric():
    wide, long, mask = padded(symmetric(4, 4), random(B, 4, 1), 2)
    wide[0, 5] = 3.0
    wide[5, 0] = 0.0
    free_energy(SpinSystem(wide, long, mask=mask), Enumeration())


# Derivatives and copies.


def test_a_system_declares_its_tensors():
    beta = torch.ones(B, dtype=torch.float64)
    system = SpinSystem(symmetric(N, N), random(B, N, D), beta, mask=torch.ones(N, dtype=torch.bool))
    assert [name for name, _ in system.named_tensors()] == ["couplings", "field", "beta", "mask"]


def test_at_reads_other_numbers_and_leaves_the_system_alone():
    system = ising(symmetric(4, 4), random(4), 0.5, measure="counting", radius=1.5)
    other = system.at(random(4, 1, seed=3), symmetric(4, 4, seed=4), 2.0)
    fresh = ising(symmetric(4, 4, seed=4), random(4, seed=3), 2.0, measure="counting", radius=1.5)
    assert free_energy(other, Enumeration()) == free_energy(fresh, Enumeration())
    assert system.beta == 0.5


def test_a_beta_that_leaves_its_range_inside_a_transform_gives_nan_to_its_sample_alone():
    couplings, field = symmetric(4, 4), random(4, 1)

    def value(beta):
        return Enumeration().log_partition(SpinSystem(couplings, field, beta)).value

    values = torch.vmap(value)(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert torch.isnan(values[0])
    torch.testing.assert_close(values[1], value(1.0), rtol=1e-15, atol=1e-15)


SKEW = random(N, N, seed=8)
TRANSFORMED = {
    "grad": lambda value, couplings, field: torch.func.grad(lambda h: value(couplings, h).sum())(field),
    "grad by couplings": lambda value, couplings, field: torch.func.grad(lambda j: value(j, field).sum())(couplings),
    "jvp": lambda value, couplings, field: torch.func.jvp(lambda j: value(j, field), (couplings,), (couplings,)),
    "vmap": lambda value, couplings, field: torch.vmap(lambda h: value(couplings, h))(field),
    "vmap by couplings": lambda value, couplings, field: torch.vmap(value, in_dims=(1, 0))(
        couplings[:, None].expand(N, B, N), field
    ),
    "hessian": lambda value, couplings, field: torch.func.hessian(lambda h: value(couplings, h).sum())(field),
    "vmap of grad": lambda value, couplings, field: torch.vmap(torch.func.grad(value, argnums=1), in_dims=(None, 0))(
        couplings, field
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_asymmetric_couplings_are_refused_inside_every_transform(transform):
    def value(couplings, field):
        return free_energy(SpinSystem(couplings, field), MeanField())

    field = random(B, N, D)
    transform(value, SKEW + SKEW.mT, field)
    apart = float((SKEW - SKEW.mT).abs().max())
    with pytest.raises(ValueError, match=re.escape(f"(J_ij = J_ji^T) for MeanField, got a difference of {apart:.1e}")):
        transform(value, SKEW, field)


def test_small_couplings_are_asymmetric_beside_large_ones():
    couplings = torch.stack([1e15 * (SKEW + SKEW.mT), SKEW])
    with pytest.raises(ValueError, match="`couplings` must be symmetric"):
        free_energy(SpinSystem(couplings, random(B, N, D), 1e-16), SaddlePoint())


@pytest.mark.parametrize("method", [MeanField(), SaddlePoint()], ids=repr)
@pytest.mark.parametrize("block", [False, True])
def test_where_the_host_cannot_look_asymmetric_couplings_lose_their_sample_alone(method, block, monkeypatch):
    """As on an accelerator, which the host does not wait for."""
    couplings = (blocks() if block else symmetric(B, N, N, seed=4)) / 5
    field = random(B, N, D, seed=5).requires_grad_()
    truth = thermodynamics(SpinSystem(couplings, field, 0.4), method)
    for module in ("system", "_request"):
        monkeypatch.setattr(f"implicit_attention.spins.{module}.readable", lambda *_, **__: None)
    skew = couplings.clone()
    skew[1, 0] += 0.1
    found = thermodynamics(SpinSystem(skew, field, 0.4), method, on_failure="ignore")
    lost = [True, True] if block else [False, True]
    assert (found.report.status == Status.NONFINITE).tolist() == lost
    assert found.free_energy.isnan().tolist() == lost
    assert found.magnetization.isnan().all(-1).all(-1).tolist() == lost
    if not block:
        assert torch.equal(found.free_energy[0], truth.free_energy[0])
        slopes = [torch.autograd.grad(x.free_energy[0], field)[0][0] for x in (found, truth)]
        assert torch.equal(*slopes)
    spared = KineticPlefka()
    assert bool(stationary_state(SpinSystem(skew, field, 0.4), spared).magnetization.isfinite().all())


@pytest.mark.parametrize("where", [(0, 1), (0, 299), (120, 130), (127, 128), (298, 299)])
def test_one_pair_that_differs_is_seen_wherever_it_stands(where):
    couplings, field = random(2, 300, 300), random(2, 300, 1)
    couplings = couplings + couplings.mT
    SpinSystem(couplings, field).check_symmetric("MeanField")
    couplings[(1, *where)] += 1.0
    with pytest.raises(ValueError, match=r"`couplings` must be symmetric .* a difference of 1.0e\+00"):
        SpinSystem(couplings, field).check_symmetric("MeanField")


def test_a_field_of_numbers_alone_is_that_of_spins_of_dimension_one():
    couplings, field = 0.3 * torch.ones(4, 4).double(), random(4).requires_grad_()
    plain, whole = SpinSystem(couplings, field, 0.8), SpinSystem(couplings, field[:, None], 0.8)
    assert plain.field.shape == (4, 1)
    found, expected = (magnetization(system, MeanField()) for system in (plain, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gradients = [torch.autograd.grad(m.sum(), field)[0] for m in (found, expected)]
    assert gradients[0].shape == (4,)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    full = SpinSystem.from_full(couplings / 2, field.detach())
    torch.testing.assert_close(full.couplings, couplings, rtol=0, atol=0)
    assert full.field.shape == (4, 1)


def test_a_system_shows_that_it_counts_states():
    system = SpinSystem(torch.zeros(2, 2), torch.zeros(2), measure="counting")
    assert repr(system) == "SpinSystem(batch (), N = 2, D = 1, beta 1, states counted)"
    assert "counted" not in repr(SpinSystem(torch.zeros(2, 2), torch.zeros(2)))

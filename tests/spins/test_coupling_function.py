"""Couplings that are a function of the field: m = -dF/dh in total, and its parts."""

import functools

import pytest
import torch
from torch import nn

from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bethe,
    DynamicalMethod,
    Enumeration,
    GaussianClosure,
    GaussianUnits,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    free_energy,
    magnetization,
    thermodynamics,
)
from implicit_attention.testing.numerics import check_derivatives, random

B, N = 2, 4
BETA = torch.tensor([0.6, 1.3], dtype=torch.float64)


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


def test_magnetization_is_the_total_slope_of_the_free_energy():
    couple, field = 0.3 * random(N, N), random(B, N, 1, seed=1)

    def follow(h):
        return torch.tanh(couple + couple.mT + h @ h.mT) / 4

    def free(field):
        return free_energy(SpinSystem(follow, field, BETA), Enumeration())

    live = field.clone().requires_grad_()
    (total,) = torch.autograd.grad(-free(live).sum(), live)
    moving = SpinSystem(follow, field, BETA)
    close(magnetization(moving, Enumeration()), total)
    spins, through = magnetization(moving, Enumeration(), split=True)
    close(spins + through, total)
    # At fixed couplings: the first part alone, as in the bundle.
    close(spins, magnetization(SpinSystem(follow(field), field, BETA), Enumeration()))
    close(spins, thermodynamics(moving, Enumeration()).magnetization)
    assert through.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("method", "dim"),
    [(MeanField(), 3), (TAP(), 1), (AdaTAP(), 1), (SaddlePoint(), 3), (Bethe(), 1), (TransferMatrix(), 1)],
    ids=repr,
)
def test_every_method_has_the_total_slope(method, dim):
    """Of a chain whose bonds are made of the field."""
    neighbours = torch.diag(torch.ones(N - 1), 1).double()

    def follow(h):
        return (neighbours + neighbours.mT) * torch.tanh(0.4 + h @ h.mT) / 2

    field = random(N, dim, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(-free_energy(SpinSystem(follow, field, 1.1), method), field)
    close(magnetization(SpinSystem(follow, field, 1.1), method), slope, 1e-8)


@pytest.mark.parametrize("split", [False, True])
def test_the_total_slope_has_derivatives(split):
    def found(field, couplings, beta):
        half = (couplings + couplings.mT) / 2
        system = SpinSystem(lambda h: half + 0.2 * torch.tanh(h @ h.mT), field, beta)
        return magnetization(system, Enumeration(), split=split)

    inputs = [random(B, 2, 1, seed=1), 0.3 * random(B, 2, 2), BETA.clone()]
    check_derivatives(found, [t.requires_grad_() for t in inputs])


def test_without_a_function_nothing_comes_through_the_couplings():
    system = SpinSystem(random(N, N).diagonal().diag(), random(B, N, 1, seed=1), BETA)
    spins, through = magnetization(system, Enumeration(), split=True)
    assert (through == 0).all()
    close(magnetization(system, Enumeration()), spins, 0.0)


def test_parameters_of_a_coupling_function_learn():
    class Couplings(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

        def forward(self, h):
            return self.scale * torch.tanh(h @ h.mT)

    module, field = Couplings(), random(B, N, 1, seed=1)
    magnetization(SpinSystem(module, field, BETA), Enumeration()).square().sum().backward()

    def loss(shift):
        live = field.clone().requires_grad_()
        moving = SpinSystem(lambda h: (0.3 + shift) * torch.tanh(h @ h.mT), live, BETA)
        (total,) = torch.autograd.grad(free_energy(moving, Enumeration()).sum(), live)
        return total.square().sum()

    step = 1e-5
    near, far = loss(step) - loss(-step), loss(2 * step) - loss(-2 * step)
    close(module.scale.grad, (8 * near - far) / (12 * step), 1e-8)


def test_couplings_shared_by_a_batch_may_follow_all_of_it():
    field = random(B, N, 1, seed=1)

    def follow(h):
        return 0.2 * torch.tanh(h @ h.mT).mean(0)

    live = field.clone().requires_grad_()
    value = free_energy(SpinSystem(follow, live, BETA), Enumeration())
    # dF/dh of all samples together: log Z of every sample counts by its own beta.
    (total,) = torch.autograd.grad((value * BETA).sum(), live)
    found = magnetization(SpinSystem(follow, field, BETA), Enumeration())
    close(found, -total / BETA[:, None, None])


def test_magnetization_can_be_transformed():
    batch = random(3, N, 1, seed=4)

    def function(field):
        couplings = lambda h: 0.2 * torch.tanh(h @ h.mT)  # noqa: E731
        return magnetization(SpinSystem(couplings, field, 0.9), Enumeration()).square().sum()

    field = batch[0].clone().requires_grad_()
    (truth,) = torch.autograd.grad(function(field), field)
    close(torch.func.grad(function)(batch[0]), truth)
    close(torch.vmap(torch.func.grad(function))(batch)[0], truth)


def test_a_half_precision_module_may_give_the_couplings():
    module = nn.Linear(1, 3, dtype=torch.bfloat16)
    field = random(B, N, 1, seed=1).bfloat16()
    magnetization(SpinSystem(lambda h: module(h) @ module(h).mT, field), Enumeration())


# Sites that do not exist.

METHODS = [
    (MeanField(), 2),
    (TAP(), 2),
    (TAP(order=3), 1),
    (AdaTAP(), 2),
    (AdaTAP(prior=GaussianUnits()), 2),
    (SaddlePoint(), 2),
    (SaddlePoint(one_loop=True), 2),
    (SaddlePoint(shared=True), 2),
    (Bethe(), 1),
    (Enumeration(), 1),
    (TransferMatrix(), 1),
    (GaussianClosure(), 2),
    (KineticPlefka(), 2),
    (KineticPlefka(order=2), 2),
]
LIVE = torch.tensor([[True, True, True, False, False], [True, True, True, True, False]])


def neighbours(h, mask=None):
    """Couplings of a chain that are divided by a mean over sites."""
    live = torch.ones_like(h[..., 0]) if mask is None else mask.to(h.dtype)
    size = 1 + (h.square().sum(-1) * live).sum(-1) / live.sum(-1)
    bonds = torch.tanh((h[..., 1:, :] * h[..., :-1, :]).sum(-1)) + 0.3
    upper = torch.diag_embed(bonds / size[..., None], 1)
    return upper + upper.mT


def one_way(h, *, mask):
    """Asymmetric couplings of every spin to all, normalised over sites."""
    return 0.4 * torch.softmax((h @ (h * h).roll(1, -1).mT).masked_fill(~mask[..., None, :], -torch.inf), -1)


def turned(h, mask):
    """One matrix for each pair, for all samples, from a mean over all sites of all of them."""
    strength = 0.1 * torch.tanh(h.sum((0, 1)) / mask.sum())
    bonds = strength[:, None] * strength + 0.1 * torch.eye(h.shape[-1], dtype=h.dtype)
    return (1 - torch.eye(h.shape[-2], dtype=h.dtype))[..., None, None] * bonds


def padded(dim, what):
    field = 0.5 * random(2, 5, dim, seed=3)
    return torch.where(LIVE[..., None], field, 0.0 if what is None else what * torch.ones(2, 5, dim).double())


def fits(function, method):
    if function is one_way:
        return isinstance(method, DynamicalMethod)
    matrices = not isinstance(method, TransferMatrix | GaussianClosure) and method != KineticPlefka(order=2)
    return function is neighbours or matrices


CASES = [(f, *case) for f in (neighbours, one_way, turned) for case in METHODS if fits(f, case[0])]


@pytest.mark.by_name(slow=r"\[(?!turned)|\[turned TAP.*SphereUnits")
@pytest.mark.parametrize(("function", "method", "dim"), CASES, ids=[f"{f.__name__} {m!r}" for f, m, _ in CASES])
def test_what_stands_where_there_is_no_site_changes_no_bit(function, method, dim):
    def found(what):
        field = padded(dim, what).requires_grad_()
        system = SpinSystem(function, field, BETA, mask=LIVE)
        m = magnetization(system, method)
        (gradient,) = torch.autograd.grad((m * random(2, 5, dim, seed=4)).sum(), field)
        return m.detach(), gradient

    truth, slope = found(None)
    assert not truth[~LIVE].any()
    assert not slope[~LIVE].any()
    assert bool(truth[LIVE].all())
    for what in (1.7, torch.nan):
        m, gradient = found(what)
        assert torch.equal(m, truth)
        assert torch.equal(gradient, slope)
    if function is turned:
        return
    for index in range(2):
        few = LIVE[index]
        alone = SpinSystem(function, padded(dim, None)[index, few], float(BETA[index]))
        close(truth[index, few], magnetization(alone, method), 1e-8)


def test_a_mask_is_passed_on_only_to_functions_that_name_it():
    class Named(nn.Module):
        def forward(self, h, mask):
            assert torch.equal(mask, LIVE)
            return couple(h)

    def couple(h, **options):
        assert not options
        assert not h[~LIVE].any()
        return 0.1 * h @ h.mT

    field = random(2, 5, 1)
    for function in (couple, Named(), functools.partial(couple), lambda h, *mask: couple(h, *mask)):
        magnetization(SpinSystem(function, field, mask=LIVE), MeanField())
    # Without a mask all sites exist.
    SpinSystem(lambda h, *, mask: h @ h.mT * (1.0 if mask.shape == (2, 5) and mask.all() else torch.nan), field)


def test_couplings_of_both_orders_know_the_mask_as_well():
    field = padded(1, 1.7)
    half = SpinSystem(lambda h, mask: 2 * neighbours(h, mask), field, BETA, mask=LIVE)
    full = SpinSystem.from_full(neighbours, field, BETA, mask=LIVE)
    assert torch.equal(magnetization(full, MeanField()), magnetization(half, MeanField()))

"""spins.sweep: one solve at many temperatures says what a solve at each of them says, and what it leaves out."""

import pytest
import torch

from implicit_attention.spins import (
    TAP,
    Bethe,
    Enumeration,
    GaussianClosure,
    MeanField,
    SpinSystem,
    sweep,
    thermodynamics,
)
from implicit_attention.testing.numerics import random


def pairs(n=4, batch=(), seed=0):
    couplings = 0.3 * random(*batch, n, n, seed=seed)
    return couplings + couplings.mT - 2 * torch.diag_embed(couplings.diagonal(dim1=-2, dim2=-1))


BETAS = torch.tensor([0.3, 0.7, 1.2], dtype=torch.float64)


def test_two_spins_are_what_is_known_of_them():
    # Z = 4 cosh(beta J) against the uniform measure cosh(beta J); chi = beta (1 + tanh(beta J)) for the sum.
    system = SpinSystem(torch.tensor([[0.0, 0.8], [0.8, 0.0]], dtype=torch.float64), torch.zeros(2, 1).double())
    curves = sweep(system, [Enumeration()], beta=BETAS).curves["Enumeration"]
    x = 0.8 * BETAS
    torch.testing.assert_close(curves["free_energy"], -x.cosh().log() / BETAS, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curves["internal_energy"], -0.8 * x.tanh(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curves["heat_capacity"], x.square() / x.cosh().square(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(curves["largest_susceptibility"], BETAS * (1 + x.tanh()), rtol=1e-10, atol=1e-12)
    assert curves["mean_length"].abs().max() < 1e-12


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_sweep_is_the_answers_at_every_temperature(batch):
    system = SpinSystem(pairs(batch=batch), 0.5 * random(*batch, 4, 1, seed=1))
    found = sweep(system, {"naive": MeanField(), "Bethe": Bethe()}, beta=BETAS)
    assert list(found.curves) == ["naive", "Bethe"]
    for name, method in (("naive", MeanField()), ("Bethe", Bethe())):
        assert found.failed[name].shape == (3, *batch)
        assert found.reports[name].status.shape == (3, *batch)
        for index, beta in enumerate(BETAS.tolist()):
            alone = thermodynamics(system.at(system.field, system.couplings, beta), method)
            expected = {
                "free_energy": alone.free_energy,
                "heat_capacity": alone.heat_capacity,
                "mean_length": alone.magnetization.norm(dim=-1).mean(-1),
                "largest_susceptibility": torch.linalg.eigvalsh(alone.susceptibility().reshape(*batch, 4, 4))[..., -1],
            }
            for quantity, value in expected.items():
                got = found.curves[name][quantity][index]
                torch.testing.assert_close(got, value.expand(batch), rtol=1e-5, atol=1e-6)


def test_what_is_no_minimum_is_a_gap():
    magnet = SpinSystem((torch.ones(10, 10) - torch.eye(10)).double() / 10, torch.zeros(10, 1).double())
    found = sweep(magnet, [MeanField()], beta=torch.tensor([0.5, 1.0, 1.5]).double())
    assert found.failed["MeanField"].tolist() == [False, False, True]
    for values in found.curves["MeanField"].values():
        assert values.isnan().tolist() == [False, False, True]


def test_dynamics_have_an_entropy_production_and_others_say_why_not():
    system = SpinSystem(0.3 * random(4, 4), 0.5 * random(4, 1, seed=1))
    found = sweep(system, [GaussianClosure(), MeanField()], beta=BETAS)
    assert set(found.curves) == {"GaussianClosure"}
    assert set(found.curves["GaussianClosure"]) == {"entropy_production", "mean_length"}
    assert "symmetric" in found.refused["MeanField"]


def test_nothing_has_a_graph():
    system = SpinSystem(pairs().requires_grad_(), random(4, 1, seed=1))
    curves = sweep(system, [MeanField()], beta=BETAS.clone().requires_grad_()).curves["MeanField"]
    assert not any(values.requires_grad for values in curves.values())


def test_the_picture_is_of_means_over_samples_and_marks_what_failed():
    couplings = torch.stack([(torch.ones(4, 4) - torch.eye(4)).double() * 2, pairs()])
    system = SpinSystem(couplings, torch.zeros(2, 4, 1).double())
    found = sweep(system, [MeanField(), Enumeration()], beta=BETAS)
    assert found.exact == ["Enumeration"]
    figure = found.plot(title="mine")
    assert figure.get_suptitle() == "mine"
    axes = {a.get_ylabel(): a for a in figure.axes}
    lines = {line.get_label(): line for line in axes["heat capacity C"].lines}
    drawn = torch.as_tensor(lines["Enumeration"].get_ydata())
    torch.testing.assert_close(drawn, found.curves["Enumeration"]["heat_capacity"].mean(-1))
    assert lines["Enumeration"].get_linewidth() > 3 > lines["MeanField"].get_linewidth()
    assert found.failed["MeanField"].any()
    assert any(line.get_marker() == "x" for line in axes["heat capacity C"].lines)
    thin = {line.get_label(): line for line in found.plot(exact=()).axes[0].lines}
    assert thin["Enumeration"].get_linewidth() < 3


def test_names_are_kinds_or_options():
    system = SpinSystem(pairs(), random(4, 1, seed=1))
    names = list(sweep(system, [TAP(order=2), TAP(order=3), Bethe()], beta=BETAS).curves)
    assert ["order=2" in names[0], "order=3" in names[1], names[2]] == [True, True, "Bethe"]

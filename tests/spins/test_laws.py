"""One law, whoever takes it: hidden units, responses of mean-field methods, priors of AdaTAP."""

import pytest
import torch

import implicit_attention.potentials
from implicit_attention.potentials import (
    DiscreteUnits,
    HiddenUnits,
    SignUnits,
    SphereUnits,
)
from implicit_attention.spins import TAP, AdaTAP, MeanField, SpinSystem, free_energy
from implicit_attention.testing.numerics import random


def system(dim, n=4):
    couplings = 0.2 * random(n, n).triu(1)
    return SpinSystem(couplings + couplings.mT, random(n, dim, seed=1), beta=0.7)


def test_all_that_potentials_exports_is_there_and_documented():
    for name in implicit_attention.potentials.__all__:
        assert getattr(implicit_attention.potentials, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'BesselResponse'"):
        implicit_attention.potentials.BesselResponse  # noqa: B018


@pytest.mark.parametrize("make", [MeanField, TAP], ids=lambda m: m.__name__)
@pytest.mark.parametrize(("law", "dim"), [(SignUnits(), 1), (SphereUnits(3), 3)], ids=repr)
def test_a_law_of_hidden_units_is_a_response(make, law, dim):
    expected = free_energy(system(dim), make(response=SphereUnits()))
    assert torch.equal(free_energy(system(dim), make(response=law)), expected)


@pytest.mark.parametrize(("law", "dim"), [(SignUnits(), 1), (SphereUnits(3), 3)], ids=repr)
def test_a_law_of_hidden_units_is_a_prior(law, dim):
    expected = free_energy(system(dim), AdaTAP(prior=SphereUnits()))
    assert torch.equal(free_energy(system(dim), AdaTAP(prior=law)), expected)
    assert AdaTAP(prior=law).site_response() == law


def test_hidden_units_of_a_finite_law_are_those_of_the_closed_forms():
    weights, v = random(3, 4), random(2, 3)
    for two, closed in ((DiscreteUnits((-1, 1)), SignUnits()), (DiscreteUnits((5,)), None)):
        found = HiddenUnits(weights, two).value(v)
        expected = HiddenUnits(weights, closed).value(v) if closed else 5 * (v @ weights).sum(-1)
        torch.testing.assert_close(found, expected)

"""One law, whoever takes it: hidden units, responses of mean-field methods, priors of AdaTAP."""

import pytest
import torch

import implicit_attention.potentials
from implicit_attention.potentials import (
    AmosResponse,
    DiscreteUnits,
    GaussianUnits,
    HiddenUnits,
    PoissonUnits,
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


def test_a_law_that_does_not_fit_is_refused_with_the_one_that_does():
    with pytest.raises(TypeError, match=r"`prior` must be a SiteLaw, got PoissonUnits"):
        AdaTAP(prior=PoissonUnits(1.0))
    with pytest.raises(TypeError, match=r"`response` must be a SphericalLaw, got GaussianUnits.*; for example Sphere"):
        MeanField(response=GaussianUnits())
    with pytest.raises(ValueError, match=r"`prior` must be GaussianUnits\(\) of mean 0.*got GaussianUnits\(mean=1.0"):
        free_energy(system(2), AdaTAP(prior=GaussianUnits(1.0, 2.0)))
    with pytest.raises(ValueError, match=r"`system` must have spins of dimension 3 for SphereUnits, got D = 2"):
        free_energy(system(2), MeanField(response=SphereUnits(3)))
    with pytest.raises(ValueError, match="`system` must have spins of dimension 1 for SignUnits, got D = 2"):
        free_energy(system(2), MeanField(response=SignUnits()))
    # Its moments belong to no law: |m|^2 + D c is not R^2.
    with pytest.raises(TypeError, match=r"`prior` must be a SiteLaw, got AmosResponse"):
        AdaTAP(prior=AmosResponse())

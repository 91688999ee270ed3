"""Driven spins that several files of tests look at."""

import pytest
import torch

from implicit_attention.spins import GaussianClosure, KineticPlefka
from implicit_attention.testing.numerics import random

CASES = {
    "first order, Ising": (KineticPlefka(), 1),
    "first order": (KineticPlefka(), 3),
    "Gaussian field, Ising": (GaussianClosure(), 1),
    "Gaussian field": (GaussianClosure(), 3),
}
PARTS = ("entropy_production", "housekeeping", "field_change")
OUTPUTS = ("states", *PARTS, "stationary", "mismatch", "relaxation_time")
every_case = pytest.mark.parametrize(("method", "dim"), CASES.values(), ids=CASES)


def example(dim, *batch, steps=4, sites=4, seed=0):
    """Couplings that are not symmetric, with a diagonal, and fields that change."""
    return 0.2 * random(sites, sites, seed=seed), 0.7 * random(steps, *batch, sites, dim, seed=seed + 1)


def assert_close(path, truth, names=OUTPUTS, tolerance=1e-9):
    for name in names:
        a, b = getattr(path, name), getattr(truth, name)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")

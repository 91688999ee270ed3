"""The table of the docs that says which method supports what: every entry is tried."""

import re
from pathlib import Path

import pytest
import torch

from implicit_attention import ConvergenceError, spins
from implicit_attention.spins import (
    DynamicalMethod,
    GaussianUnits,
    SpinSystem,
    Status,
    free_energy,
    magnetization,
    stationary_state,
)
from implicit_attention.testing.numerics import random

PAGE = (Path(__file__).parents[2] / "docs" / "spin_systems.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.search(r"(\| method \| log Z .*?)\n\n", PAGE, re.DOTALL)[1].splitlines()
]
FEATURES = ROWS[0][2:-1]
TABLE = {row[0].strip("`"): dict(zip(ROWS[0][1:], row[1:], strict=True)) for row in ROWS[2:]}
N = 3


def make(text):
    return eval(text, {**vars(spins), "GaussianUnits": GaussianUnits})


def system(feature, chain):
    """A system with the one feature that is asked for; a chain in collinear fields for the method that needs one."""
    dim = 3 if feature in ("D > 1", "matrices J_ij") else 1
    field = 0.5 * random(N, 1, seed=1) * torch.ones(dim)
    upper = 0.3 * random(N, N, seed=2)
    upper = torch.diag(upper.diagonal(1), 1) if chain else upper.triu(1)
    couplings = upper + upper.mT
    mask = None
    if feature == "asymmetric J":
        couplings = upper - 0.5 * upper.mT
    if feature == "matrices J_ij":
        turn = torch.eye(dim) + 0.2 * random(dim, dim, seed=3) * (1 - torch.eye(dim))
        turned = upper[..., None, None] * turn
        couplings = turned + turned.permute(1, 0, 3, 2)
    if feature == "a diagonal":
        couplings = couplings + torch.diag(torch.tensor([0.2, -0.3, 0.4]).double())
    if feature == "masks":
        mask = torch.tensor([True, True, False])
    return SpinSystem(couplings, field.double(), 0.8, mask=mask)


def test_every_method_is_in_the_table():
    named = {type(make(text)) for text in TABLE}
    known = {
        value for value in vars(spins).values() if isinstance(value, type) and issubclass(value, spins.Approximation)
    }
    assert known - {spins.Approximation, spins.FixedPointApproximation, DynamicalMethod} == named


@pytest.mark.parametrize("text", TABLE)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_method_supports_what_the_table_says(text, feature):
    method = make(text)
    given = system(feature, chain=text == "TransferMatrix()" or text == "Bethe()")
    if text in ("Bethe()", "Enumeration()") and feature == "matrices J_ij":
        assert given.dim == 1 or TABLE[text]["D > 1"] == "no"
        given = SpinSystem(given.couplings[..., :1, :1], given.field[..., :1], 0.8)
    said = TABLE[text][feature]
    assert said in ("yes", "no")
    if said == "no":
        with pytest.raises((TypeError, ValueError), match=r"must .*; "):
            magnetization(given, method)
        return
    if TABLE[text]["log Z"] == "yes":
        m = magnetization(given, method)
        assert bool(free_energy(given, method).isfinite())
    else:
        m = stationary_state(given, method).magnetization
        torch.testing.assert_close(magnetization(given, method), m)
    assert bool(m.isfinite().all())
    assert bool((m.norm(dim=-1) < given.radius * 2).all())
    if given.mask is not None:
        assert not m[~given.mask].any()


@pytest.mark.parametrize("text", [text for text in TABLE if TABLE[text]["log Z"] == "no"])
def test_dynamics_have_no_free_energy(text):
    for function in (free_energy, spins.thermodynamics):
        with pytest.raises((TypeError, ValueError), match="free energy"):
            function(system("D = 1", chain=False), make(text))


@pytest.mark.parametrize("text", [*TABLE, "DynamicalMethod()"])
def test_every_method_says_a_remedy_of_its_own_for_every_failure(text):
    method = make(text) if text in TABLE else DynamicalMethod()
    assert set(method.remedies) >= {status for status in Status if status.failed}
    assert all("anchor" not in remedy for remedy in method.remedies.values())


def test_out_of_nodes_a_transfer_matrix_asks_for_more():
    chain = SpinSystem(50 * torch.ones(3, 3).tril(1).triu(-1).fill_diagonal_(0).double(), torch.zeros(3, 3).double())
    with pytest.raises(ConvergenceError, match="raise `nodes`"):
        free_energy(chain, spins.TransferMatrix(nodes=8))

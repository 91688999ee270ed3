"""The table of the docs that says which method supports what: every entry is tried."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from implicit_attention import ConvergenceError, spins
from implicit_attention.spins import (
    DynamicalMethod,
    SpinSystem,
    Status,
    free_energy,
    magnetization,
    stationary_state,
)

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "spin_systems" / "methods.py"))
PAGE = (DOCS / "spin_systems.md").read_text().split(SCRIPT["START"])[1].split(SCRIPT["END"])[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
ALL = re.split(", | and ", re.search(r"^All methods support (.*?)\.", PAGE, re.MULTILINE)[1])
FEATURES = [*ROWS[0][2:-1], *ALL]
TABLE = {
    row[0].strip("`"): dict(zip(ROWS[0][1:], row[1:], strict=True), **dict.fromkeys(ALL, "yes")) for row in ROWS[2:]
}
METHODS = {text: eval(text, vars(spins)) for text in TABLE}


def test_every_method_is_in_the_table():
    known = {
        value for value in vars(spins).values() if isinstance(value, type) and issubclass(value, spins.Approximation)
    }
    named = {type(method) for method in METHODS.values()}
    assert known - {spins.Approximation, spins.FixedPointApproximation, DynamicalMethod} == named


@pytest.mark.slow
def test_the_guide_has_the_table_and_the_reference_has_the_classes():
    command = "run python docs/spin_systems/methods.py"
    assert SCRIPT["table"]() in PAGE, command
    assert SCRIPT["classes"]() in (DOCS / "reference" / "spin_methods.md").read_text(), command


@pytest.mark.parametrize("text", TABLE)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_method_supports_what_the_table_says(text, feature):
    method, said = METHODS[text], TABLE[text][feature]
    systems = SCRIPT["systems"](method, feature)
    if said == "no":
        for given in systems:
            with pytest.raises((TypeError, ValueError), match=r"must .*; "):
                magnetization(given, method)
        return
    if said != "yes":
        with pytest.raises(ValueError, match=r"must have at most .*; use "):
            magnetization(SCRIPT["chain"](int(said.removeprefix("N <= ").replace(",", "")) + 1), method)
    given = systems[isinstance(method, spins.TransferMatrix)]
    if TABLE[text]["log Z"] == "yes":
        m = magnetization(given, method)
        assert bool(free_energy(given, method).isfinite())
    else:
        m = magnetization(given, method)
        # The other answers of dynamics are sums over all pairs.
        if feature != "bonds":
            torch.testing.assert_close(m, stationary_state(given, method).magnetization)
    assert bool(m.isfinite().all())
    assert bool((m.norm(dim=-1) < given.radius * 2).all())
    if given.mask is not None:
        assert not m[~given.mask].any()


@pytest.mark.parametrize("text", [text for text in TABLE if TABLE[text]["log Z"] == "no"])
def test_dynamics_have_no_free_energy(text):
    for function in (free_energy, spins.thermodynamics):
        with pytest.raises((TypeError, ValueError), match="free energy"):
            function(SCRIPT["system"]("D = 1"), METHODS[text])


@pytest.mark.parametrize("text", [*TABLE, "DynamicalMethod()"])
def test_every_method_says_a_remedy_of_its_own_for_every_failure(text):
    method = METHODS[text] if text in TABLE else DynamicalMethod()
    assert set(method.remedies) >= {status for status in Status if status.failed}
    assert all("anchor" not in remedy for remedy in method.remedies.values())


def test_out_of_nodes_a_transfer_matrix_asks_for_more():
    chain = SpinSystem(50 * torch.ones(3, 3).tril(1).triu(-1).fill_diagonal_(0).double(), torch.zeros(3, 3).double())
    with pytest.raises(ConvergenceError, match="raise `nodes`"):
        free_energy(chain, spins.TransferMatrix(nodes=8))

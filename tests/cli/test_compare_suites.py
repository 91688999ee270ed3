"""`compare --potential` and `compare --suite`: names, refusals, rates that are those of solves, moments of tokens."""

import inspect

import pytest
import torch
from commands import by_method, done, invoke, refused, strict

from implicit_attention import energies, potentials, solve
from implicit_attention.cli import compare_distribution, compare_retrieval
from implicit_attention.cli.compare import Compare
from implicit_attention.solvers import Anderson
from implicit_attention.studies import bounds, token_moments
from implicit_attention.studies.potentials import POTENTIALS, energy_of
from implicit_attention.testing.numerics import random


def test_every_potential_and_energy_over_keys_has_a_name():
    made = {type(part) for part in map(_parts_of, POTENTIALS) for part in part}
    for module in (potentials, energies):
        for name in module.__all__:
            kind = getattr(module, name)
            if inspect.isclass(kind) and list(inspect.signature(kind).parameters)[:2] == ["keys", "beta"]:
                assert kind in made, name
    assert energies.SphereEnergy in made


def _parts_of(name):
    energy = energy_of(
        0.1 * random(4, 6), random(3, 6), torch.ones(4, dtype=torch.bool), beta=0.01, anchor=1.0, potential=name
    )
    return [energy, *([energy.potential] if hasattr(energy, "potential") else [])]


def test_a_name_that_is_none_lists_all(tmp_path):
    refused("compare", "--potential", "sofmax1", "--quick", "--out", tmp_path, parts=list(POTENTIALS))


def test_a_potential_without_a_bound_is_refused_with_its_remedy(tmp_path):
    result = invoke("compare", "--potential", "exponential", "--quick", "--out", tmp_path)
    assert result.exit_code != 0
    assert "no anchor below 1 helps" in " ".join(result.output.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entmax", "epanechnikov"])
def test_solvers_meet_at_the_equilibrium_of_a_potential(name, tmp_path):
    done("compare", "--potential", name, "--quick", "--patterns", 30, "--out", tmp_path)
    content = strict(tmp_path / "compare.json")
    assert content["settings"]["potential"] == name
    assert by_method(content)["Anderson"]["status"].get("CONVERGED", 0) > 0
    assert {"convergence.png", "rates.png", "retrieval.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite")
    kept = {name: POTENTIALS[name] for name in ("log-sum-exp", "entmax", "exponential", "polynomial-2")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_retrieval, "POTENTIALS", kept)
        patch.setattr(bounds, "RATIOS", (0.5, 1.0))
        patch.setattr(bounds, "THEOREM", bounds.THEOREM[:1])
        options = ("--suite", "retrieval", "--quick", "--patterns", 30, "--out", out)
        result = done("compare", *options, COLUMNS=160)
    return result, out, strict(out / "retrieval.json")


@pytest.mark.slow
def test_the_retrieval_suite_writes_everything(retrieval):
    result, out, content = retrieval
    assert (out / "potentials.png").stat().st_size > 20_000
    methods = list(dict.fromkeys(row["method"] for row in content["rows"]))
    assert methods[:4] == ["log-sum-exp", "entmax", "exponential", "polynomial-2"]
    assert "identity" in methods[4:]
    places = {(row["data"], row["curve"], row["at"]) for row in content["rows"]}
    assert len(content["rows"]) == len(places) * len(methods)
    assert [row["ratio"] for row in content["bounds"]["near_threshold"]] == [0.5, 1.0]
    assert "0 violations" in " ".join(result.output.split())


def test_refused_potentials_say_so(retrieval):
    result, _, content = retrieval
    refused = [row for row in content["rows"] if row["method"] == "exponential"]
    assert all("no anchor below 1 helps" in row["refused"] for row in refused)
    assert "exponential refused" in " ".join(result.output.split())


def test_rates_are_those_of_solves_at_the_best_beta(retrieval):
    row = next(
        row
        for row in retrieval[2]["rows"]
        if (row["method"], row["data"], row["curve"]) == ("entmax", "digits", "capacity") and row["at"] == 30
    )
    assert row["mean"] == max(entry["mean"] for entry in row["tried"])
    settings, data = Compare(quick=True, patterns=30).load()
    (point,) = [
        point
        for point in compare_retrieval._points(settings, "digits", data)
        if (point.curve, point.at) == ("capacity", 30)
    ]
    sample = point.sample
    energy = energy_of(sample.keys, sample.queries, sample.usable, beta=row["beta"], anchor=0.0, potential="entmax")
    found = solve(energy, sample.queries, solver=Anderson(rtol=1e-6, atol=1e-6), on_failure="ignore").value
    error = (found - sample.targets).norm(dim=-1) / sample.targets.norm(dim=-1)
    assert (error < 1e-2).double().mean().item() == pytest.approx(row["mean"], abs=0.02)


# Distribution.


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_moments, "COUNTS", (50, 200))
        patch.setattr(compare_distribution, "sizes", lambda settings: {"seeds": 3, "trainings": 2, "updates": 60})
        result = done("compare", "--suite", "distribution", "--quick", "--out", out, COLUMNS=160)
    return result, out, strict(out / "distribution.json")


@pytest.mark.slow
def test_the_suite_writes_numbers_and_a_picture(distribution):
    result, out, content = distribution
    assert (out / "distribution.png").stat().st_size > 20_000
    assert len(content["rows"]) == 2 * 3 * 2 * (token_moments.STEPS + 1)
    assert {row["matrix"] for row in content["layers"]} == set(compare_distribution.trained_layer.COMPARED)
    assert len(content["layers"]) == 2 * len(compare_distribution.trained_layer.COMPARED)
    assert all(row["accuracy"] > 0.2 for row in content["layers"])
    assert "infinite 1.353" in " ".join(result.output.split())


def test_attention_collapses_residuals_expand_and_renormalised_tokens_stay(distribution):
    def entropies(way):
        rows = [row for row in distribution[2]["rows"] if row["way"] == way and row["tokens"] == 200]
        return [[row["entropy"] for row in rows if row["law"] == law] for law in dict.fromkeys(r["law"] for r in rows)]

    for falling, rising, steady in zip(
        *map(entropies, (token_moments.ATTENTION, token_moments.RESIDUAL, token_moments.RENORMALISED)), strict=True
    ):
        assert falling == sorted(falling, reverse=True)
        assert rising == sorted(rising)
        assert steady[1:] == pytest.approx([steady[1]] * 3, abs=1e-6)


def test_potentials_are_no_choice_of_this_suite(tmp_path):
    options = ("--suite", "distribution", "--potential", "entmax", "--out", tmp_path)
    refused("compare", *options, parts="--potential")

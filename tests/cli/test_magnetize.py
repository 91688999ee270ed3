import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import by_method, done, invoke, refused, strict

from implicit_attention.spins import (
    Enumeration,
    SaddlePoint,
    SpinSystem,
    stationary_law,
    sweep,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

STATIC = ["mean-field", "tap-2", "tap-3", "saddle-point", "one-loop", "spherical", "adatap", "bethe", "enumeration"]


def system(sites=5, dim=1, batch=(), *, strength=0.3, seed=0):
    couplings = strength * random(*batch, sites, sites, seed=seed).numpy()
    couplings = (couplings + np.swapaxes(couplings, -1, -2)) / 2
    return {"J": couplings, "h": 0.5 * random(sites, dim, seed=seed + 1).numpy(), "beta": np.array(0.8)}


def saved(folder, name="file.npz", **arrays):
    np.savez(folder / name, **arrays)
    return folder / name


@pytest.fixture(scope="module")
def ising(tmp_path_factory):
    """A file of five Ising spins, with a sweep: (result, folder, JSON)."""
    folder = tmp_path_factory.mktemp("ising")
    file = saved(folder, **system())
    result = done("magnetize", file, "--quick", "--sweep", "beta=0.2:1:3", "--out", folder / "made" / "here")
    return result, folder / "made" / "here", strict(folder / "made" / "here" / "thermodynamics.json")


def test_all_methods_that_apply_are_side_by_side_and_agree_with_the_library(ising):
    content = ising[2]
    rows = by_method(content)
    assert [*rows] == [*STATIC, "heat-bath"]
    given = system()
    exact = thermodynamics(
        SpinSystem(torch.from_numpy(given["J"]), torch.from_numpy(given["h"]), 0.8, measure="counting"), Enumeration()
    )
    for name in ("free_energy", "internal_energy", "entropy", "heat_capacity"):
        assert rows["enumeration"][name] == float(getattr(exact, name))
    m = torch.tensor(rows["enumeration"]["magnetization"], dtype=torch.float64)
    torch.testing.assert_close(m, exact.magnetization, rtol=1e-7, atol=1e-9)
    assert rows["enumeration"]["mean_length"] == pytest.approx(float(exact.magnetization.abs().mean()), rel=1e-12)
    assert rows["mean-field"]["free_energy"] > rows["enumeration"]["free_energy"]
    for name in STATIC:
        assert rows[name]["status"] == {"CONVERGED": 1}
        assert rows[name]["seconds"] > 0
    for name in STATIC[:-1]:
        apart = torch.tensor(rows[name]["magnetization"], dtype=torch.float64) - m
        assert rows[name]["distance"] == pytest.approx(float(apart.square().mean().sqrt()), rel=1e-6, abs=1e-8)
        assert rows[name]["distance_from"] == "enumeration"


def test_the_heat_bath_agrees_within_its_errors(ising):
    rows = by_method(ising[2])
    sampled, exact = rows["heat-bath"], rows["enumeration"]
    assert abs(sampled["internal_energy"] - exact["internal_energy"]) < 4 * sampled["internal_energy_error"]
    error = np.array(sampled["magnetization_error"])
    assert (np.abs(np.array(sampled["magnetization"]) - exact["magnetization"]) < 4 * error).all()
    assert "free_energy" not in sampled


def test_what_does_not_apply_is_one_line_with_the_reason(ising):
    result, _, content = ising
    lines = [line for line in result.stdout.splitlines() if "does not apply" in line]
    assert len(lines) == len(content["refused"]) == 1
    assert lines[0].startswith("  transfer-matrix does not apply: `couplings` must be zero except between neighbours")
    assert "put the sites in the order of the chain" in content["refused"]["transfer-matrix"]


def test_one_readable_table_with_notes_and_plain_progress(ising):
    result = ising[0]
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    for name in [*STATIC, "heat-bath"]:
        assert sum(line.startswith(name) for line in lines) == 1
    assert "file.npz: 5 spins in 1 dimension, R = 1, beta 0.8, counting measure, float64" in result.stdout
    assert "|dm|: root mean square distance of m/R from enumeration's" in result.stdout
    told = [line for line in result.stderr.splitlines() if not line.endswith("s so far")]
    assert [line[:20].rstrip() for line in told] == [*STATIC, "heat-bath"]
    assert "\x1b" not in result.output


def test_files_are_written_and_name_no_folder(ising):
    _, out, content = ising
    assert sorted(p.name for p in out.iterdir()) == ["phase.png", "spins.png", "thermodynamics.json"]
    for name in ("phase.png", "spins.png"):
        assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = (out / "thermodynamics.json").read_text()
    assert str(out.parent.parent) not in text
    assert {"python", "torch", "numpy", "implicit_attention"} <= set(content["versions"])
    assert content["settings"]["source"] == "file.npz"
    assert content["settings"]["seed"] == 0


def test_the_sweep_is_what_the_methods_say_at_every_temperature(ising):
    sweep = ising[2]["sweep"]
    assert sweep["beta"] == pytest.approx([0.2, 0.6, 1.0])
    given = system()
    rows = {row["method"]: row for row in sweep["rows"]}
    assert list(rows) == STATIC
    for name, method in (("enumeration", Enumeration()), ("saddle-point", SaddlePoint())):
        for index, beta in enumerate(sweep["beta"]):
            alone = thermodynamics(
                SpinSystem(torch.from_numpy(given["J"]), torch.from_numpy(given["h"]), beta, measure="counting"), method
            )
            chi = alone.susceptibility().reshape(5, 5)
            largest = float(torch.linalg.eigvalsh(chi)[-1])
            assert rows[name]["largest_susceptibility"][index] == pytest.approx(largest, rel=1e-9)
            assert rows[name]["heat_capacity"][index] == pytest.approx(float(alone.heat_capacity), rel=1e-9)
            assert rows[name]["mean_length"][index] == pytest.approx(float(alone.magnetization.abs().mean()), rel=1e-9)
        assert rows[name]["failed"] == [False] * 3


def test_lanczos_and_the_matrix_give_the_same_largest_susceptibility():
    given = system(66, 1, (3,), strength=0.02)
    spins = SpinSystem(torch.from_numpy(given["J"]), torch.from_numpy(given["h"]).expand(3, 66, 1))
    largest = sweep(spins, {"saddle": SaddlePoint()}, beta=torch.tensor([1.0])).curves["saddle"]
    chi = thermodynamics(spins, SaddlePoint()).susceptibility().reshape(3, 66, 66)
    found = largest["largest_susceptibility"][0].double()
    torch.testing.assert_close(found, torch.linalg.eigvalsh(chi)[:, -1], rtol=1e-6, atol=0)


def test_saddles_are_crosses_in_a_sweep_and_a_line_of_text(tmp_path):
    """Without a field m = 0 solves mean field at every temperature; below the transition it is no minimum."""
    file = saved(tmp_path, J=(np.ones((10, 10)) - np.eye(10)) / 10, h=np.zeros(10), beta=3.0)
    options = ("--quick", "--methods", "mean-field", "--sweep", "beta=0.5:3:6", "--out", tmp_path)
    result = done("magnetize", file, *options)
    (row,) = strict(tmp_path / "thermodynamics.json")["sweep"]["rows"]
    assert row["status"] == {"CONVERGED": 2, "UNSTABLE": 4}
    assert row["failed"] == [False, False, True, True, True, True]
    for name in ("heat_capacity", "mean_length"):
        assert [value is None for value in row[name]] == row["failed"]
    assert "mean-field has no answer at 4 of 6 points of the sweep, crosses there" in result.stdout


def test_a_method_that_raises_stays_in_the_table(tmp_path, monkeypatch):
    def broken(self, system):
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setattr(Enumeration, "log_partition", broken)
    options = ("--quick", "--methods", "enumeration,one-loop", "--sweep", "beta=0.1:1:2", "--out", tmp_path)
    result = done("magnetize", saved(tmp_path, **system()), *options)
    line = next(line for line in result.stdout.splitlines() if line.startswith("enumeration "))
    assert line.split()[-1] == "ERROR"
    assert "enumeration failed with RuntimeError: it broke" in result.stdout
    assert "enumeration is not in the sweep: it broke" in result.stdout
    assert "enumeration          failed: RuntimeError: it broke" in result.stderr


@pytest.mark.slow
def test_a_log_is_told_what_goes_on_where_nothing_was_written_for_seconds(tmp_path, monkeypatch):
    """A terminal has a bar instead."""
    usual, waits = Enumeration.log_partition, []

    def slow(self, system):
        if not waits:
            waits.append(time.sleep(5.5))
        return usual(self, system)

    monkeypatch.setattr(Enumeration, "log_partition", slow)
    file, options = saved(tmp_path, **system()), ("--quick", "--methods", "enumeration", "--out", tmp_path)
    (told,) = (line for line in done("magnetize", file, *options).stderr.splitlines() if "so far" in line)
    assert told == "enumeration          5 s so far"
    waits.clear()
    assert "so far" not in done("magnetize", file, *options, FORCE_COLOR=1).stderr


def test_vectors_in_a_batch_with_their_own_temperatures(tmp_path):
    arrays = system(4, 3, (2,)) | {"beta": np.array([0.5, 1.0])}
    names = "mean-field-amos,saddle-point,one-loop,heat-bath,bethe"
    result = done("magnetize", saved(tmp_path, **arrays), "--quick", "--methods", names, "--out", tmp_path)
    content = strict(tmp_path / "thermodynamics.json")
    rows = by_method(content)
    assert list(rows) == ["mean-field-amos", "saddle-point", "one-loop", "heat-bath"]
    assert "spins of dimension 1 for Bethe, got D = 3" in content["refused"]["bethe"]
    assert content["settings"]["batch"] == [2]
    assert content["settings"]["measure"] == "uniform"
    assert content["settings"]["radius"] == pytest.approx(3**0.5)
    assert len(rows["saddle-point"]["free_energy"]) == 2
    assert content["reference"] == "heat-bath"
    better = np.array(rows["one-loop"]["distance"]) < np.array(rows["saddle-point"]["distance"])
    assert better.all()
    # Both in units of the radius.
    m = {name: torch.tensor(row["magnetization"], dtype=torch.float64) / 3**0.5 for name, row in rows.items()}
    lengths = m["one-loop"].norm(dim=-1).mean(-1)
    assert rows["one-loop"]["mean_length"] == pytest.approx(lengths.tolist(), rel=1e-6)
    apart = (m["one-loop"] - m["heat-bath"]).norm(dim=-1).square().mean(-1).sqrt()
    assert rows["one-loop"]["distance"] == pytest.approx(apart.tolist(), rel=1e-5)
    assert "2 systems of 4 spins in 3 dimensions, R = 1.73205, beta 0.5 to 1, uniform measure" in result.stdout
    assert "samples to which all methods have an answer" in result.stdout


def test_blocks_and_options_are_obeyed(tmp_path):
    blocks = 0.1 * random(3, 3, 2, 2).numpy()
    blocks = (blocks + blocks.transpose(1, 0, 3, 2)) / 2
    file = saved(tmp_path, J=blocks, h=random(3, 2).numpy(), beta=0.7)
    options = ("--radius", "1.5", "--dtype", "float32", "--methods", " saddle-point , spherical ", "--seed", 3)
    done("magnetize", file, "--quick", *options, "--out", tmp_path)
    content = strict(tmp_path / "thermodynamics.json")
    assert [row["method"] for row in content["rows"]] == ["saddle-point", "spherical"]
    assert (content["settings"]["radius"], content["settings"]["dtype"]) == (1.5, "float32")
    expected = thermodynamics(
        SpinSystem(torch.from_numpy(blocks), random(3, 2), 0.7, radius=1.5), SaddlePoint()
    ).free_energy
    assert by_method(content)["saddle-point"]["free_energy"] == pytest.approx(float(expected), rel=1e-5)
    assert by_method(content)["saddle-point"]["free_energy"] != float(expected)


def test_asymmetric_couplings_get_their_dynamics(tmp_path):
    couplings = 0.4 * random(6, 6, seed=4).numpy()
    field = 0.3 * random(6, seed=5).numpy()
    file = saved(tmp_path, J=couplings, h=field, beta=0.9)
    result = done("magnetize", file, "--quick", "--sweep", "beta=0.2:0.9:3", "--out", tmp_path)
    content = strict(tmp_path / "thermodynamics.json")
    rows = by_method(content)
    assert list(rows) == ["plefka-1", "plefka-2", "gaussian-field", "markov-chain", "synchronous"]
    law = stationary_law(torch.from_numpy(couplings), torch.from_numpy(field), 0.9)
    np.testing.assert_allclose(
        np.array(rows["markov-chain"]["magnetization"])[:, 0], law.magnetization, rtol=1e-7, atol=1e-9
    )
    assert rows["markov-chain"]["entropy_production"] == pytest.approx(law.entropy_production, rel=1e-12)
    assert rows["plefka-2"]["distance"] < rows["plefka-1"]["distance"]
    sampled = rows["synchronous"]
    apart = abs(sampled["entropy_production"] - law.entropy_production)
    assert apart < 4 * sampled["entropy_production_error"]
    assert all("free_energy" not in row for row in rows.values())
    for name in (*STATIC, "transfer-matrix"):
        assert "must be symmetric" in content["refused"][name]
    lines = [line for line in result.stdout.splitlines() if "does not apply" in line]
    assert len(lines) == len(STATIC) + 1
    swept = {row["method"]: row for row in content["sweep"]["rows"]}
    assert list(swept) == ["plefka-1", "plefka-2", "gaussian-field"]
    assert swept["plefka-2"]["entropy_production"][-1] == pytest.approx(
        rows["plefka-2"]["entropy_production"], rel=1e-9
    )


def test_a_radius_scales_the_exact_chain(tmp_path):
    """Spins of length 2 are spins of length 1 with four times the couplings and twice the field."""
    couplings, field = 0.1 * random(4, 4, seed=4).numpy(), 0.2 * random(4, seed=5).numpy()
    found = []
    for radius, j, h in ((2.0, couplings, field), (1.0, 4 * couplings, 2 * field)):
        options = ("--quick", "--radius", radius, "--methods", "markov-chain,plefka-1", "--out", tmp_path)
        done("magnetize", saved(tmp_path, J=j, h=h, beta=1.0), *options)
        found.append(by_method(strict(tmp_path / "thermodynamics.json")))
    for name in found[0]:
        ratio = np.array(found[0][name]["magnetization"]) / np.array(found[1][name]["magnetization"])
        np.testing.assert_allclose(ratio, 2.0, rtol=1e-6)
        assert found[0][name]["entropy_production"] == pytest.approx(found[1][name]["entropy_production"], rel=1e-6)


def test_a_sample_with_nan_is_flagged_and_touches_no_other(tmp_path):
    arrays = system(4, 1, (2,))
    options = ("--quick", "--methods", "enumeration,one-loop", "--out")
    done("magnetize", saved(tmp_path, **arrays), *options, tmp_path / "a")
    arrays["J"][1, 0, 1] = arrays["J"][1, 1, 0] = np.nan
    result = done("magnetize", saved(tmp_path, **arrays), *options, tmp_path / "b")
    before, after = (by_method(strict(tmp_path / f / "thermodynamics.json")) for f in "ab")
    for name, row in after.items():
        assert row["free_energy"][0] == pytest.approx(before[name]["free_energy"][0], rel=1e-14)
        assert row["free_energy"][1] is None
        assert row["status"] == {"CONVERGED": 1, "NONFINITE": 1}
    assert "1 NONFINITE" in result.stdout


def test_it_is_said_how_many_systems_are_not_finite_and_where(tmp_path):
    arrays = system(4, 1, (3,))
    arrays["J"][1, 0, 1] = arrays["J"][1, 1, 0] = np.nan
    arrays["beta"] = np.array([0.8, 0.8, np.inf])
    options = ("--quick", "--methods", "mean-field", "--out", tmp_path / "out")
    result = done("magnetize", saved(tmp_path, **arrays), *options)
    assert "2 of 3 systems get no answer: NaN or infinity in J and beta" in result.stdout
    arrays["J"][:] = np.nan
    refused("magnetize", saved(tmp_path, **arrays), *options, parts="in J and beta of every system; check")
    whole = invoke("magnetize", saved(tmp_path, **system(4)), *options)
    assert "NaN" not in whole.output


@pytest.mark.parametrize(
    ("measure", "words"), [("counting", "F and S count states"), ("uniform", "as those of SpinSys")]
)
def test_the_measure_of_the_command_and_of_the_library_is_said(tmp_path, measure, words):
    arrays = system(4)
    options = ("--quick", "--methods", "enumeration", "--measure", measure, "--out", tmp_path)
    result = done("magnetize", saved(tmp_path, **arrays), *options)
    assert words in result.stdout
    row = by_method(strict(tmp_path / "thermodynamics.json"))["enumeration"]
    numbers = (torch.from_numpy(arrays[name]) for name in ("J", "h"))
    found = thermodynamics(SpinSystem(*numbers, 0.8), Enumeration())
    log_states = 4 * math.log(2.0) if measure == "counting" else 0.0
    assert row["free_energy"] == pytest.approx(float(found.free_energy) - log_states / 0.8, rel=1e-12)
    assert row["entropy"] == pytest.approx(float(found.entropy) + log_states, rel=1e-10)


def test_a_sample_with_nan_has_no_exact_chain_and_touches_no_other(tmp_path):
    couplings = 0.4 * random(2, 4, 4, seed=4).numpy()
    couplings[1, 0, 0] = np.nan
    options = ("--quick", "--methods", "markov-chain,plefka-1,synchronous", "--out", tmp_path)
    done("magnetize", saved(tmp_path, J=couplings, h=np.zeros(4), beta=1.0), *options)
    rows = by_method(strict(tmp_path / "thermodynamics.json"))
    law = stationary_law(torch.from_numpy(couplings[0]), torch.zeros(4).double(), 1.0)
    assert rows["markov-chain"]["entropy_production"] == [pytest.approx(law.entropy_production, rel=1e-12), None]
    assert rows["markov-chain"]["status"] == {"EXACT": 1, "NONFINITE": 1}
    assert rows["plefka-1"]["status"] == {"CONVERGED": 1, "NONFINITE": 1}
    assert rows["synchronous"]["entropy_production"][1] is None
    assert rows["synchronous"]["status"] == {"SAMPLED": 1, "NONFINITE": 1}


# Files and words.


@pytest.mark.parametrize(
    ("j", "h", "beta", "field"),
    [
        ((4, 4), (4,), (), (4, 1)),
        ((3, 4, 4), (4,), (3,), (3, 4, 1)),
        ((4, 4), (3, 4, 2), (), (3, 4, 2)),
        ((4, 4, 2, 2), (4, 2), (3,), (3, 4, 2)),
        ((1, 4, 4), (3, 4, 2), (1,), (3, 4, 2)),
    ],
)
def test_arrays_are_read_in_all_their_shapes(tmp_path, j, h, beta, field):
    file = saved(tmp_path, J=np.zeros(j), h=np.zeros(h), beta=np.ones(beta), more=np.zeros(2))
    done("magnetize", file, "--quick", "--methods", "mean-field", "--out", tmp_path)
    content = strict(tmp_path / "thermodynamics.json")
    assert np.shape(by_method(content)["mean-field"]["magnetization"]) == field
    assert content["settings"]["measure"] == ("counting" if field[-1] == 1 else "uniform")


def test_the_files_of_the_page_are_read(tmp_path):
    script = Path(__file__).parents[2] / "docs" / "magnetize" / "systems.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    for name, words in (("ising", "12 spins in 1 dimension"), ("vortex", "36 spins in 2 dimensions")):
        file = tmp_path / f"{name}.npz"
        assert words in done("magnetize", file, "--quick", "--methods", "mean-field", "--out", tmp_path).stdout
    # The field runs around the border, and is nowhere else.
    field = np.load(file)["h"].reshape(6, 6, 2)
    assert (field[1:-1, 1:-1] == 0).all()
    assert (field[5, :, 0] > 0).all()
    assert (field[0, :, 0] < 0).all()


def bad_files(folder):
    good = {"J": np.zeros((4, 4)), "h": np.zeros((4, 2)), "beta": 1.0}
    saved(folder, "good.npz", **good)
    saved(folder, "nobeta.npz", J=good["J"], h=good["h"])
    saved(folder, "nothing.npz")
    saved(folder, "cold.npz", **good | {"beta": np.array([1.0, -2.0])})
    saved(folder, "sites.npz", **good | {"h": np.zeros((5, 2))})
    saved(folder, "batch.npz", **good | {"J": np.zeros((3, 4, 4)), "beta": np.ones(2)})
    saved(folder, "axes.npz", **good | {"J": np.zeros(4)})
    saved(folder, "empty.npz", **good | {"J": np.zeros((0, 0)), "h": np.zeros((0, 1))})
    saved(folder, "complex.npz", **good | {"J": 1j * np.zeros((4, 4))})
    np.savez(folder / "object.npz", **good | {"h": np.array([{}, 1], dtype=object)})
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04 not a zip")
    (folder / "table.csv").write_text("1,2")
    good = system(4)
    for name, value in (("J", np.nan), ("J", np.inf), ("h", np.nan), ("beta", np.inf)):
        array = good[name].copy()
        array.flat[0] = value
        saved(folder, f"{value} in {name}.npz", **good | {name: array})
    saved(folder, "states.npz", J=np.zeros((18, 18)), h=np.zeros((40, 18, 1)), beta=1.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.npz"], ["`FILE` nowhere.npz must be an existing file", "check the path"]),
        (["table.csv"], ["must end in .npz", "'.csv'", "numpy.savez"]),
        (["damaged.npz"], ["must hold plain arrays"]),
        (["object.npz"], ["must hold plain arrays"]),
        (["complex.npz"], ["must hold real numbers", "complex128 in J"]),
        (["nobeta.npz"], ["must hold the arrays J, h and beta, got J, h; add beta"]),
        (["nothing.npz"], ["got no array; add J and h and beta"]),
        (["cold.npz"], ["must have beta > 0 everywhere, got -2"]),
        (["sites.npz"], ["arrays of shapes that fit, got J (4, 4), h (5, 2), beta ()", "J is (N, N)"]),
        (["batch.npz"], ["arrays of shapes that fit", "J (3, 4, 4)", "beta (2,)", "beta is a number or (B,)"]),
        (["axes.npz"], ["arrays of shapes that fit", "J (4,)"]),
        (["empty.npz"], ["arrays of shapes that fit, got J (0, 0)", "N, D >= 1"]),
        (["good.npz", "--radius", "bessel"], ["good.npz: `radius` must be 'sqrt_dim' or a number for D <= 2"]),
        (["good.npz", "--measure", "counting"], ["`measure` must be 'uniform' for D > 1"]),
        (["good.npz", "--radius", "-1"], ["`--radius` must be sqrt_dim, bessel or a number > 0, got '-1'"]),
        (["good.npz", "--radius", "long"], ["`--radius`", "'long'"]),
        (["good.npz", "--methods", "bethe,magic"], ["`--methods` must list some of mean-field", "got 'magic'"]),
        (["good.npz", "--methods", "bethe"], ["`--methods` must list one that holds", "dimension 1 for Bethe"]),
        (["good.npz", "--sweep", "beta=1:2"], ["`--sweep` must be beta=LOW:HIGH:COUNT, got 'beta=1:2'"]),
        (["good.npz", "--sweep", "field=1:2:3"], ["`--sweep` must be beta=LOW:HIGH:COUNT"]),
        (["good.npz", "--sweep", "beta=1:2:x"], ["`--sweep` must be beta=LOW:HIGH:COUNT"]),
        (["good.npz", "--sweep", "beta=0:2:3"], ["must go from a beta > 0 to a larger one, got 0:2"]),
        (["good.npz", "--sweep", "beta=2:1:3"], ["must go from a beta > 0 to a larger one, got 2:1"]),
        (["good.npz", "--sweep", "beta=1:nan:3"], ["must go from a beta > 0"]),
        (["good.npz", "--sweep", "beta=1:2:1"], ["must have 2 to 1000 points, got 1"]),
        (["good.npz", "--out", "table.csv"], ["`--out` must be a writable folder"]),
        (["--radius", "2"], ["`--radius` must come with a FILE, got '2'"]),
        (["--measure", "uniform"], ["`--measure` must come with a FILE"]),
        *(
            ([f"{value} in {name}.npz"], [f"must hold finite numbers, got NaN or infinity in {name}; check"])
            for name, value in (("J", np.nan), ("J", np.inf), ("h", np.nan), ("beta", np.inf))
        ),
        (["states.npz", "--methods", "markov-chain"], ["the exact chain is for at most", "got N = 18, D = 1"]),
        (
            ["states.npz", "--methods", "enumeration"],
            ["40 samples of 2^18 states are more than 2^22, which take minutes"],
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, monkeypatch, arguments, expected):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    refused("magnetize", *arguments, parts=expected)


# The digits.


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("digits")
    result = done("magnetize", "--quick", "--methods", "saddle-point,one-loop,heat-bath", "--out", out)
    return result, out, strict(out / "thermodynamics.json")


@pytest.mark.slow
def test_without_a_file_the_fitted_digits_are_solved_named_and_completed(digits):
    result, out, content = digits
    assert sorted(p.name for p in out.iterdir()) == ["completions.png", "spins.png", "thermodynamics.json"]
    rows = by_method(content)
    for name in ("saddle-point", "one-loop"):
        assert rows[name]["status"] == {"CONVERGED": 10}
        assert rows[name]["named"] > 0.9
    assert "named" not in rows["heat-bath"]
    right = {row["method"]: row["right"] for row in content["digits"]["completions"]}
    assert set(right) == {"mean of the images", "heat-bath", "saddle-point", "one-loop"}
    assert min(right.values()) > 0.8
    assert content["digits"]["images"] + content["digits"]["held_out"] == 1797
    assert "without any physics" in result.stdout
    assert "10 systems of 64 spins in 1 dimension" in result.stdout


# The square lattice.


def test_a_lattice_beside_onsagers_magnetization(tmp_path):
    result = done("magnetize", "--lattice", "--size", 12, "--quick", "--out", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lattice.json", "lattice.png"]
    rows = strict(tmp_path / "lattice.json")["rows"]
    for row in rows:
        k = row["beta"]
        exact = (1 - math.sinh(2 * k) ** -4) ** (1 / 8) if math.sinh(2 * k) > 1 else 0.0
        assert row["onsager"] == pytest.approx(exact, abs=1e-6)
        # Where only Bethe and mean-field order.
        ordered = {"mean-field": k > 1 / 4, "bethe": k > math.atanh(1 / 3)}
        assert {name: row[name] > 0.1 for name in ordered} == ordered
        assert row["error"] > 0
    cold, hot = rows[-1], rows[0]
    assert abs(cold["heat-bath"] - cold["onsager"]) < 5 * cold["error"] + 1e-3
    assert abs(hot["heat-bath"]) < 5 * hot["error"] + 1e-3
    assert cold["mean-field"] > cold["bethe"] > cold["onsager"]
    assert "the lattice orders at beta J = ln(1 + sqrt 2)/2 = 0.4407" in " ".join(result.stdout.split())


def test_options_that_a_lattice_does_not_read_are_refused(tmp_path):
    refused("magnetize", "--size", 12, parts="`--size` must come with --lattice, got 12; add it")
    file = saved(tmp_path, **system())
    refused("magnetize", file, "--lattice", parts="`--lattice` must come without FILE, got")
    refused(
        "magnetize", "--lattice", "--methods", "bethe", parts="`--lattice` must come without --methods, got 'bethe'"
    )

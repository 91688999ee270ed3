"""`implicit-attention magnetize FILE --drive FIELDS`."""

import numpy as np
import pytest
import torch
from commands import done, refused, strict

from implicit_attention.spins import GaussianClosure, KineticPlefka, drive
from implicit_attention.testing.numerics import random


def files(folder, *, steps=6, sites=3, dim=1, batch=(), name="fields.npy"):
    couplings, field = 0.3 * random(*batch, sites, sites).numpy(), random(sites, dim, seed=1).numpy()
    np.savez(folder / "system.npz", J=couplings, h=field, beta=np.array(0.8))
    fields = 0.6 * random(steps, sites, dim, seed=2).numpy()
    (np.savez if name.endswith("z") else np.save)(folder / name, fields)
    return folder / "system.npz", folder / name, torch.from_numpy(couplings), torch.from_numpy(fields)


def lines_of(result, method):
    """The rows of the table under the title of a method, as lists of words."""
    lines = result.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{method} in the "))
    rule = next(i for i in range(start, len(lines)) if lines[i].startswith("───"))
    rows = lines[rule + 1 :]
    return [row.split() for row in rows[: rows.index("")]]


def test_a_table_of_steps_a_figure_and_all_numbers(tmp_path):
    system, fields, couplings, h = files(tmp_path)
    options = ("--quick", "--methods", "plefka-1,gaussian-field", "--out", tmp_path)
    result = done("magnetize", system, "--drive", fields, *options)
    content = strict(tmp_path / "thermodynamics.json")["drive"]
    assert content["source"] == "fields.npy"
    names = ("entropy_production", "housekeeping", "field_change", "mismatch", "relaxation_time")
    methods = {"plefka-1": KineticPlefka(), "gaussian-field": GaussianClosure()}
    assert [row["method"] for row in content["rows"]] == list(methods)
    for row, (name, method) in zip(content["rows"], methods.items(), strict=True):
        path = drive(method, couplings, h, beta=0.8)
        for key in names:
            assert row[key] == pytest.approx(getattr(path, key).tolist(), rel=1e-9, abs=1e-12)
        assert row["mean_length"] == pytest.approx(path.states[1:].abs().mean((-1, -2)).tolist(), rel=1e-9)
        assert row["status"] == {"CONVERGED": 6}
        shown = lines_of(result, name)
        assert [int(line[0]) for line in shown] == [1, 2, 3, 4, 5, 6]
        for line, step in zip(shown, range(6), strict=True):
            numbers = [row[key][step] for key in (*names, "mean_length")]
            assert [float(word) for word in line[1:]] == pytest.approx(numbers, rel=1e-5)
        assert (tmp_path / f"driven-{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "sigma: entropy production per synchronous step" in result.stdout
    assert str(tmp_path) not in (tmp_path / "thermodynamics.json").read_text()


@pytest.mark.slow
def test_many_steps_are_shown_in_part_and_samples_as_means(tmp_path):
    system, fields, couplings, h = files(tmp_path, steps=50, dim=2, batch=(2,), name="fields.npz")
    result = done("magnetize", system, "--drive", fields, "--quick", "--methods", "plefka-1", "--out", tmp_path)
    shown = lines_of(result, "plefka-1")
    assert [int(line[0]) for line in shown] == list(range(1, 51, 3))
    assert "17 of 50 steps are shown; thermodynamics.json has all" in result.stdout
    path = drive(KineticPlefka(), couplings, h[:, None].expand(-1, 2, -1, -1), beta=0.8)
    assert float(shown[1][1]) == pytest.approx(float(path.entropy_production[3].mean()), rel=1e-5)


def test_a_closure_that_does_not_hold_is_a_line_with_the_reason(tmp_path):
    blocks, fields = 0.2 * random(2, 2, 3, 3).numpy(), np.zeros((2, 2, 3))
    np.savez(tmp_path / "blocks.npz", J=blocks, h=np.zeros((2, 3)), beta=1.0)
    np.save(tmp_path / "fields.npy", fields)
    options = ("--drive", tmp_path / "fields.npy", "--methods", "plefka-1,gaussian-field", "--quick")
    result = done("magnetize", tmp_path / "blocks.npz", *options, "--out", tmp_path)
    assert "gaussian-field is not driven: `couplings` must have a number for each pair" in " ".join(
        result.stdout.split()
    )
    assert len(lines_of(result, "plefka-1")) == 2


@pytest.mark.slow
def test_without_methods_both_closures_are_driven_whatever_the_couplings(tmp_path):
    np.savez(tmp_path / "symmetric.npz", J=0.3 * (1 - np.eye(3)), h=np.zeros(3), beta=1.0)
    np.save(tmp_path / "fields.npy", np.ones((2, 3)))
    options = ("--drive", tmp_path / "fields.npy", "--quick", "--out", tmp_path)
    done("magnetize", tmp_path / "symmetric.npz", *options)
    content = strict(tmp_path / "thermodynamics.json")
    assert [row["method"] for row in content["drive"]["rows"]] == ["plefka-1", "gaussian-field"]


@pytest.mark.parametrize(
    ("shape", "field", "view"),
    [
        ((5, 3), (3, 1), (5, 3, 1)),
        ((5, 3, 2), (3, 2), (5, 3, 2)),
        ((5, 3, 2), (4, 3, 2), (5, 1, 3, 2)),
        ((5, 4, 3, 2), (4, 3, 2), (5, 4, 3, 2)),
    ],
)
def test_fields_are_read_in_all_their_shapes(tmp_path, shape, field, view):
    given, couplings = random(*shape), 0.3 * random(3, 3)
    np.save(tmp_path / "fields.npy", given.numpy())
    np.savez(tmp_path / "system.npz", J=couplings.numpy(), h=np.zeros(field), beta=1.0)
    options = ("--drive", tmp_path / "fields.npy", "--methods", "plefka-1", "--quick", "--out", tmp_path)
    done("magnetize", tmp_path / "system.npz", *options)
    (row,) = strict(tmp_path / "thermodynamics.json")["drive"]["rows"]
    path = drive(KineticPlefka(), couplings, given.reshape(view).expand(5, *field), beta=1.0)
    torch.testing.assert_close(torch.tensor(row["entropy_production"]), path.entropy_production.float())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["system.npz", "--drive", "nowhere.npy"], ["`--drive` nowhere.npy must be an existing file"]),
        (["system.npz", "--drive", "fields.pt"], ["must end in .npy or .npz, got '.pt'", "numpy.save"]),
        (["system.npz", "--drive", "two.npz"], ["exactly one array, got 2: a, b"]),
        (["system.npz", "--drive", "object.npy"], ["must hold plain arrays", "running its code"]),
        (["system.npz", "--drive", "short.npy"], ["must have shape (T, N, D) = (T, 3, 2), got (6, 2, 2)"]),
        (["system.npz", "--drive", "none.npy"], ["must have shape (T, N, D) = (T, 3, 2), got (0, 3, 2)", "T >= 1"]),
        (["system.npz", "--drive", "number.npy"], ["must have shape (T, N, D) = (T, 3, 2), got ()"]),
        (
            ["system.npz", "--drive", "fields.npy", "--methods", "plefka-2"],
            ["`--methods` must list plefka-1 or gaussian-field beside --drive, got 'plefka-2'"],
        ),
        (["--drive", "fields.npy"], ["`--drive` must come with a FILE, got 'fields.npy'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, monkeypatch, arguments, expected):
    files(tmp_path, dim=2)
    np.savez(tmp_path / "two.npz", a=np.zeros((6, 3, 2)), b=np.zeros(1))
    np.save(tmp_path / "object.npy", np.array([{}, 1], dtype=object))
    for name, shape in (("short", (6, 2, 2)), ("none", (0, 3, 2)), ("number", ())):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape))
    monkeypatch.chdir(tmp_path)
    refused("magnetize", *arguments, parts=expected)


@pytest.mark.slow
def test_a_field_that_is_not_finite_is_a_step_without_numbers(tmp_path):
    system, fields, _, h = files(tmp_path)
    h[3, 0] = torch.nan
    np.save(fields, h.numpy())
    result = done("magnetize", system, "--drive", fields, "--quick", "--methods", "plefka-1", "--out", tmp_path)
    shown = lines_of(result, "plefka-1")
    assert [line[1:] == ["-"] * 6 for line in shown] == [False] * 3 + [True] * 3
    assert "3 NONFINITE" in result.stdout

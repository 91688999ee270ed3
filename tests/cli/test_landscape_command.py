import json
import math
import os

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from implicit_attention.cli import errors, landscape, main
from implicit_attention.cli.landscape import Landscape
from implicit_attention.studies.errors import InputError
from implicit_attention.studies.landscape import SCENES
from implicit_attention.studies.landscape import points as landscape_points
from implicit_attention.studies.landscape import steps as landscape_steps
from implicit_attention.studies.landscape.plane import PATTERNS

ROOT = math.sqrt(2)
X = torch.tensor(
    [(1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6)],
    dtype=torch.float64,
)
QUERIES = torch.tensor([(1.5, 1.5), (-1.5, 0.5), (0.0, -0.2)], dtype=torch.float64)


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["landscape", *map(str, arguments)], env={"COLUMNS": "120"})


def strict(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def plane():
    return Landscape().plane


def close(found, wanted, *, atol=1e-8):
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), wanted, atol=atol, rtol=0)


def attention(z, beta, keys=X):
    return (beta * z @ keys.mT).softmax(-1) @ keys


def energy(z, beta, keys=X):
    return z.square().sum(-1) / 2 - (beta * z @ keys.mT).logsumexp(-1) / beta


def stepped(z, beta, size, steps):
    """The path of plain gradient steps, by autograd of the energy."""
    path = [z]
    for _ in range(steps):
        z = path[-1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(energy(z, beta).sum(), z)
        path.append((z - size * gradient).detach())
    return torch.stack(path)


# ------------------------------------------------------------------ numbers of the scenes


def test_patterns_and_queries_are_those_of_the_published_numbers(plane):
    close(plane.patterns, X)
    close(plane.queries[:3], QUERIES)
    assert plane.reach == 2
    assert plane.beta == pytest.approx(1 / ROOT, rel=1e-15)
    assert (plane.queries.abs() <= 1.5).all()


def test_one_big_step_is_softmax_attention(plane):
    numbers = landscape_steps.one_step(plane).numbers
    assert numbers["difference_from_softmax_attention"] < 1e-15
    close(numbers["softmax_attention"], attention(plane.queries, 1 / ROOT), atol=1e-14)
    # Measured independently.
    ends = [(0.579122830801, 0.324605411318), (-0.742177723355, 0.263801833434), (-0.021027850679, -0.148847504199)]
    close(numbers["path"][1, :3], ends, atol=1e-11)
    before, after = [-1.007868596, -1.982948429, -2.533789964], [-2.383450778, -2.416352482, -2.536154540]
    close(numbers["energy"][:, :3], [before, after])


@pytest.mark.parametrize(
    ("make", "beta", "size", "steps"),
    [
        (landscape_steps.one_step, 1 / ROOT, 1.0, 1),
        (landscape_steps.small_steps, 1 / ROOT, 0.1, 1),
        (landscape_steps.many_steps, 1 / ROOT, 1.0, 10),
        (landscape_steps.higher_temperature, 0.1 * ROOT, 1.0, 1),
        (landscape_steps.lower_temperature, 5 * ROOT, 1.0, 5),
        (landscape_steps.critical, 2 * ROOT, 1.0, 60),
        (landscape_steps.surface, 2 * ROOT, 1.0, 5),
    ],
)
def test_paths_are_gradient_steps_of_the_energy_they_name(plane, make, beta, size, steps):
    numbers = make(plane).numbers
    assert (numbers["beta"], numbers["step_size"], numbers["steps"]) == (pytest.approx(beta), size, steps)
    wanted = stepped(plane.queries, beta, size, steps)
    close(numbers["path"], wanted, atol=1e-12)
    close(numbers["energy"], energy(wanted, beta), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (landscape_steps.one_step, (1, 0, 0)),
        (landscape_steps.higher_temperature, (1, 0, 0)),
        (landscape_steps.critical, (3, 3, 1)),
        (landscape_steps.lower_temperature, (5, 5, 1)),
    ],
)
def test_stationary_points_are_as_many_as_were_counted(plane, make, kinds):
    numbers = make(plane).numbers
    found, beta = numbers["stationary_points"], numbers["beta"]
    assert tuple(found["kind"].count(kind) for kind in ("minimum", "saddle", "maximum")) == kinds
    close(attention(found["value"], beta), found["value"])
    close(energy(found["value"], beta), found["energy"])


def test_a_pattern_inside_of_the_others_is_forgotten_by_dot_products_alone(plane):
    scene = landscape_steps.lower_temperature(plane)
    assert scene.numbers["patterns_with_an_attractor"].tolist() == [True] * 5 + [False]
    assert "(0.20, 0.60) has none" in scene.sentence
    assert landscape_points.by_distance(plane).numbers["patterns_with_an_attractor"].all()
    numbers = landscape_points.sparse(plane).numbers
    close(numbers["distance_of_patterns_from_an_attractor"][:5], torch.zeros(5), atol=1e-12)
    assert numbers["distance_of_patterns_from_an_attractor"][5] > 0.1


def test_the_sparse_scene_projects_scores_on_the_simplex(plane):
    path = landscape_points.sparse(plane).numbers["path"]
    z = plane.queries
    for states in path:
        close(states, z, atol=1e-12)
        scores = 5 * ROOT * z @ X.mT
        ranked = scores.sort(descending=True).values
        totals, counts = ranked.cumsum(-1), torch.arange(1, 7)
        support = (1 + counts * ranked > totals).sum(-1, keepdim=True)
        threshold = (totals.gather(-1, support - 1) - 1) / support
        z = (scores - threshold).clamp(min=0) @ X


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (landscape_points.by_solver, [2569, 2523, 1469]),
        (landscape_points.by_distance, [1177, 1173, 1139, 1132, 995, 945]),
        (landscape_points.sparse, [1642, 1508, 1297, 1174, 940]),
    ],
)
def test_as_many_starts_end_at_an_attractor_as_were_counted(plane, make, counts):
    numbers = make(plane).numbers
    found = sorted(numbers["starts_that_end_there"].tolist(), reverse=True)
    assert len(found) == len(counts)
    assert found == pytest.approx(counts, rel=0.02)


def test_only_solvers_without_a_safeguard_end_at_saddles(plane):
    rows = landscape_points.by_solver(plane).numbers["solvers"]
    lost = {name: int(row["at_no_minimum"]) for name, row in rows.items()}
    unguarded = lost.pop("Anderson, unguarded")
    # The starts on a line through a saddle are led there by any step.
    assert max(lost.values()) < 0.01 * 81**2 < unguarded
    assert rows["Anderson"]["mean_evaluations"] < rows["plain steps"]["mean_evaluations"]


@pytest.mark.parametrize(("anchor", "end"), [(0.3, (1.2896382296, 0.6598920799)), (0.7, (1.4098412421, 1.1400464875))])
def test_anchored_equilibria_are_those_that_were_measured(plane, anchor, end):
    numbers = landscape_points.anchored(plane, anchor).numbers
    close(numbers["equilibrium"], end, atol=1e-9)
    x = numbers["query"]
    close(anchor * x + (1 - anchor) * attention(numbers["equilibrium"], 5 * ROOT), end, atol=1e-9)
    points = numbers["stationary_points"]["value"]
    close(anchor * x + (1 - anchor) * attention(points, 5 * ROOT), points)


def test_self_attention_and_its_full_gradient_are_those_that_were_measured(plane):
    moving = landscape_steps.self_moving(plane).numbers
    close(moving["attention"][0], (0.56161198, 0.00872358))
    close(moving["full_gradient"][0], (0.06972114, 0.24059527))
    tokens = X
    for states in moving["path"]:
        close(states, tokens, atol=1e-13)
        tokens = attention(tokens, 1 / ROOT, tokens)
    frozen = landscape_steps.self_frozen(plane).numbers
    close(frozen["path"][1], moving["attention"], atol=1e-14)
    assert moving["largest_distance_between_ends"] < 0.01 < moving["frozen"]["largest_distance_between_ends"]


def test_values_are_read_at_the_end_with_the_weights_of_the_keys(plane):
    numbers = landscape_steps.with_maps(plane).numbers
    by = numbers["maps"]
    keys, beta = X @ by["key"].mT, ROOT
    end = attention(plane.queries @ by["query"].mT, beta, keys)
    close(numbers["path"][-1], end, atol=1e-13)
    read = (beta * end @ keys.mT).softmax(-1) @ (X @ by["value"].mT)
    close(numbers["read_out"], read, atol=1e-13)
    close(numbers["energy_read_out"], energy(read, beta, keys), atol=1e-13)


def test_step_norms_lie_between_the_quartiles_that_were_measured(plane):
    numbers = landscape_steps.norms(plane).numbers
    median = {
        (dim, scale): float(numbers["median"][i, j])
        for i, scale in enumerate(numbers["beta_scales"])
        for j, dim in enumerate(numbers["dims"])
    }
    # The quartiles have one digit after the point.
    assert 2.75 < median[2, 1.0] < 3.25
    assert 7.45 < median[8, 1.0] < 7.85
    assert 1.65 < median[64, 1.0] < 2.25
    assert 17.05 < median[64, 0.5] < 18.35
    assert 3e-6 < median[512, 1.0] < 6e-6
    assert 0.076 < median[512, 0.5] < 0.097


# ------------------------------------------------------------------ patterns of users


def test_beta_and_picture_follow_the_size_of_the_patterns(tmp_path, plane):
    np.save(tmp_path / "p.npy", 100 * np.array(PATTERNS))
    large = Landscape(patterns=tmp_path / "p.npy").plane
    close(large.queries, 100 * plane.queries, atol=1e-10)
    assert large.reach == pytest.approx(200)
    assert large.beta == pytest.approx(plane.beta / 1e4)
    a, b = landscape_steps.critical(plane).numbers, landscape_steps.critical(large).numbers
    close(b["path"] / 100, a["path"])
    assert b["stationary_points"]["kind"].count("saddle") == 3
    given = Landscape(patterns=tmp_path / "p.npy", beta=3.0).plane
    assert given.beta == 3


@pytest.mark.parametrize("patterns", [np.zeros((1, 2)), np.array([[5.0, 0.0]]), np.tile([1.0, 2.0], (7, 1))])
def test_patterns_that_are_all_alike_are_no_error(tmp_path, patterns):
    np.save(tmp_path / "p.npy", patterns)
    plane = Landscape(patterns=tmp_path / "p.npy").plane
    for make in SCENES[:-1]:
        scene = make(plane)
        assert scene.sentence.endswith(".")
        assert "nan" not in scene.sentence + scene.description + str(scene.facts)
    own = landscape_steps.lower_temperature(plane).numbers["patterns_with_an_attractor"]
    assert own.tolist() == [len(patterns) == 1] * len(patterns)


def test_the_seed_draws_queries_and_maps_and_leaves_those_that_are_given():
    one, two = (Landscape(seed=seed).plane for seed in (1, 2))
    close(one.queries[:3], two.queries[:3])
    assert not torch.equal(one.queries[3:], two.queries[3:])
    assert not torch.equal(one.maps, two.maps)
    again = Landscape(seed=1).plane
    assert torch.equal(one.queries, again.queries)
    assert torch.equal(one.maps, again.maps)


# ------------------------------------------------------------------ the command


@pytest.mark.slow
def test_a_quick_run_writes_four_scenes_and_what_is_asked_for(tmp_path):
    out = tmp_path / "made" / "here"
    result = invoke("--quick", "--animate", "--beta", "0.5", "--seed", "3", "--out", out)
    assert result.exit_code == 0, result.output
    content = strict(out / "landscape.json")
    assert list(content["scenes"]) == ["one-step", "many-steps", "lower-temperature", "anchor-0.3"]
    pictures = {scene["picture"] for scene in content["scenes"].values()}
    assert {path.name for path in out.iterdir()} == {"landscape.json", "descent.gif"} | pictures
    for name in pictures:
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert content["settings"]["beta"] == 0.5
    assert content["settings"]["seed"] == 3
    close(
        content["scenes"]["one-step"]["path"][1], attention(torch.tensor(content["queries"], dtype=torch.float64), 0.5)
    )
    assert "landscape.json, descent.gif written to" in " ".join(result.stdout.split())
    assert str(tmp_path) not in json.dumps(content)
    for name in content["scenes"]:
        assert name in result.stdout
        assert f"{name} " in result.stderr  # progress, where nobody watches a terminal


def test_the_animation_follows_the_descent_to_its_end(tmp_path, plane, monkeypatch):
    from PIL import Image

    from implicit_attention.studies.landscape import animation as landscape_animation

    monkeypatch.setattr(landscape_animation, "STEPS", 6)
    landscape_animation.write_gif(tmp_path / "d.gif", plane)
    with Image.open(tmp_path / "d.gif") as film:
        shown = []
        for index in range(film.n_frames):
            film.seek(index)
            shown += [(film.convert("RGB").tobytes(), film.info["duration"])]
    # Frames that are alike may be kept as one that stays longer.
    assert sum(time for _, time in shown) == 6 * 100 + 2000
    assert len({picture for picture, _ in shown}) == 7
    # The ways, which are orange, grow.
    frames = [np.frombuffer(picture, np.uint8).reshape(-1, 3).astype(int) for picture, _ in shown]
    orange = [int((np.abs(frame - (0xD5, 0x5E, 0x00)).max(-1) < 20).sum()) for frame in frames]
    assert orange[-1] > orange[1] + 100


def bad_files(folder):
    np.save(folder / "three.npy", np.zeros((5, 3)))
    np.save(folder / "none.npy", np.zeros((0, 2)))
    np.save(folder / "flat.npy", np.zeros(6))
    np.save(folder / "nan.npy", np.array([[1.0, np.nan], [0.0, 1.0]]))
    np.save(folder / "huge.npy", np.array([[1e300, 0.0], [0.0, 1.0]]))
    (folder / "file").write_text("no folder")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--patterns", "three.npy"], ["`--patterns` three.npy must have shape (M, 2)", "(5, 3)", "principal_figure"]),
        (["--patterns", "flat.npy"], ["`--patterns` flat.npy must have shape (count, D)", "(6,)"]),
        (["--patterns", "none.npy"], ["must hold 1 to 10000 patterns, got 0"]),
        (["--patterns", "nan.npy"], ["must hold finite numbers, got NaN or inf in 1 of 2 patterns"]),
        (["--patterns", "huge.npy"], ["largest coordinate between 1e-06 and 1e+06, got 1e+300"]),
        (["--patterns", "nowhere.npy"], ["`--patterns` nowhere.npy must be an existing file"]),
        (["--beta", "0"], ["`--beta` must be > 0 and finite, got 0"]),
        (["--beta", "nan"], ["`--beta` must be > 0 and finite, got nan"]),
        (["--beta", "inf"], ["`--beta` must be > 0 and finite, got inf"]),
        (["--out", "file"], ["`--out` must be a writable folder", "'file'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, monkeypatch, arguments, expected):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = invoke("--quick", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: `--")
    assert "; " in result.stderr
    for part in expected:
        assert part in result.stderr
    assert not (tmp_path / "landscape").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    result = invoke("--quick", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert "`--out` must be a writable folder" in result.stderr


def test_without_matplotlib_the_line_that_installs_it(monkeypatch):
    found = errors.importlib.util.find_spec
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    result = invoke("--quick")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [f"error: {errors.missing('matplotlib')}"]
    assert "pip install" in result.stderr


def test_without_pillow_the_line_that_installs_it(monkeypatch, tmp_path):
    found = landscape.importlib.util.find_spec
    monkeypatch.setattr(landscape.importlib.util, "find_spec", lambda name: None if name == "PIL" else found(name))
    result = invoke("--quick", "--animate", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["error: `--animate` needs pillow, not installed here; pip install pillow"]
    assert not (tmp_path / "new").exists()


def test_input_errors_name_the_option(tmp_path):
    np.save(tmp_path / "p.npy", np.zeros((4, 7)))
    with pytest.raises(InputError, match=r"`--patterns` p.npy must have shape \(M, 2\), got \(4, 7\)"):
        Landscape(patterns=tmp_path / "p.npy").check()

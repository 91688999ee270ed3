import math
import sys

import numpy as np
import pytest
import torch
from commands import done, refused, strict
from PIL import Image

ROOT = math.sqrt(2)
X = torch.tensor(
    [(1.2, 0.3), (-0.8, 1.1), (-0.4, -1.3), (0.9, -0.9), (-1.3, -0.1), (0.2, 0.6)],
    dtype=torch.float64,
)
QUERIES = torch.tensor([(1.5, 1.5), (-1.5, 0.5), (0.0, -0.2)], dtype=torch.float64)


#: The scenes of a quick run.
QUICK = ("one-step", "many-steps", "lower-temperature", "anchor-0.3")


def scenes(*cases):
    """Cases that begin with the name of a scene; those of scenes that a quick run leaves out are slow."""
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*case, marks=marks[case[0] in QUICK], id=case[0]) for case in cases]


@pytest.fixture
def scene(request):
    """Finds the numbers of a scene by its name."""
    return lambda name: request.getfixturevalue("quick" if name in QUICK else "whole")[1]["scenes"][name]


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.fixture
def queries(quick):
    return tensor(quick[1]["queries"])


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


def test_patterns_and_queries_are_those_of_the_published_numbers(quick, queries):
    close(quick[1]["patterns"], X)
    close(queries[:3], QUERIES)
    assert quick[1]["reach"] == 2
    assert quick[1]["settings"]["beta"] == pytest.approx(1 / ROOT, rel=1e-15)
    assert (queries.abs() <= 1.5).all()


def test_one_big_step_is_softmax_attention(scene, queries):
    numbers = scene("one-step")
    assert numbers["difference_from_softmax_attention"] < 1e-15
    close(numbers["softmax_attention"], attention(queries, 1 / ROOT), atol=1e-14)
    # Measured independently.
    ends = [(0.579122830801, 0.324605411318), (-0.742177723355, 0.263801833434), (-0.021027850679, -0.148847504199)]
    close(numbers["path"][1][:3], ends, atol=1e-11)
    before, after = [-1.007868596, -1.982948429, -2.533789964], [-2.383450778, -2.416352482, -2.536154540]
    close(tensor(numbers["energy"])[:, :3], [before, after])


@pytest.mark.parametrize(
    ("name", "beta", "size", "steps"),
    scenes(
        ("one-step", 1 / ROOT, 1.0, 1),
        ("small-steps", 1 / ROOT, 0.1, 1),
        ("many-steps", 1 / ROOT, 1.0, 10),
        ("higher-temperature", 0.1 * ROOT, 1.0, 1),
        ("lower-temperature", 5 * ROOT, 1.0, 5),
        ("stationary-points", 2 * ROOT, 1.0, 60),
        ("surface", 2 * ROOT, 1.0, 5),
    ),
)
def test_paths_are_gradient_steps_of_the_energy_they_name(scene, queries, name, beta, size, steps):
    numbers = scene(name)
    assert (numbers["beta"], numbers["step_size"], numbers["steps"]) == (pytest.approx(beta), size, steps)
    wanted = stepped(queries, beta, size, steps)
    close(numbers["path"], wanted, atol=1e-12)
    close(numbers["energy"], energy(wanted, beta), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "kinds"),
    scenes(
        ("one-step", (1, 0, 0)),
        ("higher-temperature", (1, 0, 0)),
        ("stationary-points", (3, 3, 1)),
        ("lower-temperature", (5, 5, 1)),
    ),
)
def test_stationary_points_are_as_many_as_were_counted(scene, name, kinds):
    numbers = scene(name)
    found, beta = numbers["stationary_points"], numbers["beta"]
    assert tuple(found["kind"].count(kind) for kind in ("minimum", "saddle", "maximum")) == kinds
    places = tensor(found["value"])
    close(attention(places, beta), places)
    close(energy(places, beta), found["energy"])


def test_a_pattern_inside_of_the_others_is_forgotten_by_dot_products(scene):
    found = scene("lower-temperature")
    assert found["patterns_with_an_attractor"] == [True] * 5 + [False]
    assert "(0.20, 0.60) has none" in found["sentence"]


@pytest.mark.slow
def test_distances_forget_no_pattern_and_sparse_attention_ends_at_patterns(scene, queries):
    assert all(scene("distance")["patterns_with_an_attractor"])
    numbers = scene("sparse")
    close(numbers["distance_of_patterns_from_an_attractor"][:5], torch.zeros(5), atol=1e-12)
    assert numbers["distance_of_patterns_from_an_attractor"][5] > 0.1
    z = queries
    for states in numbers["path"]:
        close(states, z, atol=1e-12)
        scores = 5 * ROOT * z @ X.mT
        ranked = scores.sort(descending=True).values
        totals, counts = ranked.cumsum(-1), torch.arange(1, 7)
        support = (1 + counts * ranked > totals).sum(-1, keepdim=True)
        threshold = (totals.gather(-1, support - 1) - 1) / support
        z = (scores - threshold).clamp(min=0) @ X


@pytest.mark.parametrize(
    ("name", "counts"),
    scenes(
        ("basins", [2569, 2523, 1469]),
        ("distance", [1177, 1173, 1139, 1132, 995, 945]),
        ("sparse", [1642, 1508, 1297, 1174, 940]),
    ),
)
def test_as_many_starts_end_at_an_attractor_as_were_counted(scene, name, counts):
    found = sorted(scene(name)["starts_that_end_there"], reverse=True)
    assert len(found) == len(counts)
    assert found == pytest.approx(counts, rel=0.02)


@pytest.mark.slow
def test_only_solvers_without_a_safeguard_end_at_saddles(scene):
    rows = scene("basins")["solvers"]
    lost = {name: int(row["at_no_minimum"]) for name, row in rows.items()}
    unguarded = lost.pop("Anderson, unguarded")
    # The starts on a line through a saddle are led there by any step.
    assert max(lost.values()) < 0.01 * 81**2 < unguarded
    assert rows["Anderson"]["mean_evaluations"] < rows["plain steps"]["mean_evaluations"]


@pytest.mark.parametrize(
    ("name", "end"),
    scenes(("anchor-0.3", (1.2896382296, 0.6598920799)), ("anchor-0.7", (1.4098412421, 1.1400464875))),
)
def test_anchored_equilibria_are_those_that_were_measured(scene, name, end):
    numbers = scene(name)
    close(numbers["equilibrium"], end, atol=1e-9)
    x, anchor = tensor(numbers["query"]), numbers["anchor"]
    close(anchor * x + (1 - anchor) * attention(tensor(numbers["equilibrium"]), 5 * ROOT), end, atol=1e-9)
    points = tensor(numbers["stationary_points"]["value"])
    close(anchor * x + (1 - anchor) * attention(points, 5 * ROOT), points)


@pytest.mark.slow
def test_self_attention_and_its_full_gradient_are_those_that_were_measured(scene):
    moving = scene("self-moving")
    close(moving["attention"][0], (0.56161198, 0.00872358))
    close(moving["full_gradient"][0], (0.06972114, 0.24059527))
    tokens = X
    for states in moving["path"]:
        close(states, tokens, atol=1e-13)
        tokens = attention(tokens, 1 / ROOT, tokens)
    frozen = scene("self-frozen")
    close(frozen["path"][1], moving["attention"], atol=1e-14)
    assert moving["largest_distance_between_ends"] < 0.01 < moving["frozen"]["largest_distance_between_ends"]


@pytest.mark.slow
def test_values_are_read_at_the_end_with_the_weights_of_the_keys(scene, queries):
    numbers = scene("maps")
    by = {name: tensor(each) for name, each in numbers["maps"].items()}
    keys, beta = X @ by["key"].mT, ROOT
    end = attention(queries @ by["query"].mT, beta, keys)
    close(numbers["path"][-1], end, atol=1e-13)
    read = (beta * end @ keys.mT).softmax(-1) @ (X @ by["value"].mT)
    close(numbers["read_out"], read, atol=1e-13)
    close(numbers["energy_read_out"], energy(read, beta, keys), atol=1e-13)


# ------------------------------------------------------------------ patterns of users


def of_patterns(folder, patterns, *options):
    np.save(folder / "p.npy", patterns)
    done("landscape", "--patterns", folder / "p.npy", "--out", folder, *options)
    return strict(folder / "landscape.json")


def test_beta_and_picture_follow_the_size_of_the_patterns(tmp_path, quick, queries):
    large, small = of_patterns(tmp_path, 100 * X.numpy(), "--quick"), quick[1]
    close(large["queries"], 100 * queries, atol=1e-10)
    assert large["reach"] == pytest.approx(200)
    assert large["settings"]["beta"] == pytest.approx(small["settings"]["beta"] / 1e4)
    a, b = (content["scenes"]["lower-temperature"] for content in (small, large))
    close(tensor(b["path"]) / 100, a["path"])
    assert b["stationary_points"]["kind"].count("saddle") == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patterns", "options"),
    [(np.zeros((1, 2)), ()), (np.array([[5.0, 0.0]]), ("--quick",)), (np.tile([1.0, 2.0], (7, 1)), ("--quick",))],
)
def test_patterns_that_are_all_alike_are_no_error(tmp_path, patterns, options):
    found = of_patterns(tmp_path, patterns, *options)["scenes"]
    for scene in found.values():
        assert scene["sentence"].endswith(".")
        assert "nan" not in scene["sentence"] + scene["description"]
    own = found["lower-temperature"]["patterns_with_an_attractor"]
    assert own == [len(patterns) == 1] * len(patterns)


# ------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def animated(tmp_path_factory):
    """A quick run with options: its folder, what it printed and its numbers."""
    out = tmp_path_factory.mktemp("animated") / "made" / "here"
    result = done("landscape", "--quick", "--animate", "--beta", "0.5", "--seed", "3", "--out", out)
    return out, result, strict(out / "landscape.json")


@pytest.mark.slow
def test_a_quick_run_writes_four_scenes_and_what_is_asked_for(animated, quick):
    out, result, content = animated
    assert tuple(content["scenes"]) == QUICK
    pictures = {scene["picture"] for scene in content["scenes"].values()}
    assert {path.name for path in out.iterdir()} == {"landscape.json", "descent.gif"} | pictures
    for name in pictures:
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert (content["settings"]["beta"], content["settings"]["seed"]) == (0.5, 3)
    queries = tensor(content["queries"])
    close(content["scenes"]["one-step"]["path"][1], attention(queries, 0.5))
    # The seed draws queries, and leaves those that are given.
    close(queries[:3], QUERIES)
    assert content["queries"][3:] != quick[1]["queries"][3:]
    assert "landscape.json, descent.gif written to" in " ".join(result.stdout.split())
    assert str(out.parent) not in (out / "landscape.json").read_text()
    for name in content["scenes"]:
        assert name in result.stdout
        assert f"{name} " in result.stderr  # progress, where nobody watches a terminal


@pytest.mark.slow
def test_the_animation_follows_the_descent_to_its_end(animated):
    with Image.open(animated[0] / "descent.gif") as film:
        shown = []
        for index in range(film.n_frames):
            film.seek(index)
            shown += [(film.convert("RGB").tobytes(), film.info["duration"])]
    # Frames that are alike may be kept as one that stays longer.
    assert sum(time for _, time in shown) == 40 * 100 + 2000
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
    refused("landscape", "--quick", *arguments, parts=expected)
    assert not (tmp_path / "landscape").exists()


@pytest.mark.parametrize(
    ("absent", "options", "expected"),
    [
        ("matplotlib", (), "this command needs matplotlib, not installed here; in the checkout: pip install"),
        ("PIL", ("--animate",), "`--animate` needs pillow, not installed here; pip install pillow"),
    ],
)
def test_what_is_not_installed_is_named_with_its_remedy(tmp_path, monkeypatch, absent, options, expected):
    monkeypatch.setitem(sys.modules, absent, None)
    refused("landscape", "--quick", *options, "--out", tmp_path / "new", parts=expected)
    assert not (tmp_path / "new").exists()

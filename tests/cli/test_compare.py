import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import by_method, done, strict
from sklearn.datasets import load_digits

from implicit_attention import MemoryLookup
from implicit_attention.kernels import native_status
from implicit_attention.solvers import TorchDEQ
from implicit_attention.studies import retrieval
from implicit_attention.studies.data import draw

METHODS = [
    "one-step softmax",
    "unrolled GD, 5",
    "unrolled GD, 20",
    "Picard",
    "Anderson",
    "Broyden",
    "Newton-Krylov",
    "torchdeq Anderson",
    "torchdeq Broyden",
]
OWN = METHODS[3:7]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "made" / "here"
    before = torch.get_num_threads()
    result = done("compare", "--quick", "--out", out)
    assert torch.get_num_threads() == before
    return result, out, strict(out / "compare.json")


@pytest.fixture
def patterns():
    return np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)


def test_every_method_has_a_row_with_all_numbers(digits):
    rows = by_method(digits[2])
    assert list(rows) == METHODS
    for row in rows.values():
        assert sum(row["status"].values()) == row["queries"] == 100
        for name in ("forward_seconds", "backward_seconds", "peak_memory_bytes", "gradient_error", "residual_max"):
            assert row[name] > 0, (row["method"], name)
        assert set(row["tasks"]) == {"half-masked", "noisy"}
        assert sum(part["queries"] for part in row["tasks"].values()) == 100
        assert sum(part["saddles"] for part in row["tasks"].values()) == row["saddles"]


def test_solvers_converge_to_the_tolerance_without_saddles_and_fixed_budgets_say_so(digits):
    content = digits[2]
    rows, settings = by_method(content), content["settings"]
    longest = math.sqrt(64) * 1.0
    for name in OWN:
        assert rows[name]["status"] == {"CONVERGED": 100}
        assert rows[name]["residual_max"] <= settings["atol"] + settings["rtol"] * longest
        assert rows[name]["saddles"] == 0
        assert rows[name]["converged"] == 1
    for name in METHODS[:3]:
        assert rows[name]["status"] == {"BUDGET": 100}
    assert [rows[name]["evaluations_max"] for name in METHODS[:3]] == [2, 6, 21]


def test_exact_adjoints_beat_unconverged_unrolling_and_one_step(digits):
    rows = by_method(digits[2])
    for name in OWN:
        # One query at another fixed point is a large error of an exact gradient.
        assert rows[name]["gradient_error"] < (5e-3 if rows[name]["other_fixed_point"] == 0 else 1)
    assert rows["Anderson"]["other_fixed_point"] == 0
    assert rows["one-step softmax"]["gradient_error"] > 0.1
    assert rows["unrolled GD, 5"]["gradient_error"] > 0.1
    assert rows["unrolled GD, 20"]["gradient_error"] < 1e-3
    assert rows["unrolled GD, 20"]["peak_memory_bytes"] > 2 * rows["unrolled GD, 5"]["peak_memory_bytes"]


def test_retrieval_rates_agree_with_the_reference_within_three_deviations(digits):
    result, _, content = digits
    block = {(e["task"], e["state"]): e for e in content["retrieval"] if "reference_mean" in e}
    assert list(block) == list(retrieval.REFERENCE)
    for entry in block.values():
        assert entry["beta"] == 8
        assert len(entry["rates"]) == 8
        assert entry["within_three"]
        assert abs(entry["mean"] - entry["reference_mean"]) <= 3 * entry["reference_std"]
    half_one, half_all, noisy_one, noisy_all = (e["mean"] for e in block.values())
    assert half_all > half_one + 0.1
    assert noisy_all > noisy_one
    assert result.stdout.count("within 3 sd") == 4
    assert "NOT within" not in result.stdout


@pytest.fixture(scope="module")
def first_draw():
    data = torch.from_numpy(load_digits().data) / 8 - 1
    sample = draw(data, patterns=200, queries=200, noise=0.5, draws=8, seed=0).first(200)
    keys, queries, targets = (t.numpy() for t in (sample.keys, sample.queries, sample.targets))
    assert (queries[:200, 32:] == 0).all()
    assert (queries[:200, :32] == keys[:, :32]).all()
    assert abs((queries[200:] - keys).std() - 0.5) < 0.01
    return keys, queries, targets


def agrees(content, first_draw, states, beta):
    measured = {(e["task"], e["state"]): e["rates"][0] for e in content["retrieval"] if e["beta"] == beta}
    assert {state for _, state in measured} == set(states)
    for name, z in states.items():
        targets = first_draw[2]
        hit = np.linalg.norm(z - targets, axis=-1) < 1e-2 * np.linalg.norm(targets, axis=-1)
        assert measured["half-masked", name] == pytest.approx(hit[:200].mean(), abs=0.011), name
        assert measured["noisy", name] == pytest.approx(hit[200:].mean(), abs=0.011), name


@pytest.mark.parametrize("beta", [2, 8, 32, 128, 512])
def test_rates_of_the_first_draw_agree_with_softmax_written_in_numpy(digits, first_draw, beta):
    keys, queries, _ = first_draw

    def step(z):
        scores = beta * z @ keys.T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ keys

    one = equilibrium = step(queries)
    for _ in range(100):
        equilibrium = step(equilibrium)
    states = {"one step": one, "two steps": step(one), "equilibrium": equilibrium}
    agrees(digits[2], first_draw, states, beta)


def test_nearest_keys_agree_with_distances_written_in_numpy(digits, first_draw):
    keys, queries, _ = first_draw
    differences = np.square(queries[:, None] - keys)
    whole = differences.sum(-1)
    known = np.concatenate([differences[:200, :, :32].sum(-1), whole[200:]])
    scores = {"dot product": -(queries @ keys.T), "distance": whole, "distance, known": known}
    agrees(digits[2], first_draw, {f"nearest by {name}": keys[s.argmin(-1)] for name, s in scores.items()}, None)


def test_every_method_is_shown_at_every_beta_and_at_its_own_best(digits):
    result, _, content = digits
    lines = result.stdout.split("retrieval rate")[1].splitlines()
    for task in ("half-masked", "noisy"):
        for state in ("one step", "two steps", "equilibrium"):
            entries = [e for e in content["retrieval"] if (e["task"], e["state"]) == (task, state)]
            assert [e["beta"] for e in entries] == [2, 4, 8, 16, 32, 64, 128, 256, 512]
            means = [e["mean"] for e in entries]
            line = next(line for line in lines if line.split() and line.startswith(task) and f" {state} " in line)
            best, _, std, beta, *rates = line.removeprefix(task).strip().removeprefix(state).split()
            top = means.index(max(means))
            assert (float(best), float(beta)) == (pytest.approx(max(means), abs=6e-4), entries[top]["beta"])
            assert float(std) == pytest.approx(entries[top]["std"], abs=6e-4)
            assert [float(rate) for rate in rates] == pytest.approx(means, abs=6e-4)


def test_one_sentence_says_what_the_rates_say(digits):
    result, _, content = digits
    sentence = content["summary"]
    assert sentence in " ".join(result.stdout.split())
    tasks = ("half-masked", "noisy")
    rates = {}
    for e in content["retrieval"]:
        rates.setdefault((e["task"], e["state"]), []).append((e["beta"], np.array(e["rates"])))

    def moved(state):
        means = [[r.mean() for beta, r in rates[task, state] if beta >= 8] for task in tasks]
        return [round(100 * (max(m) - min(m)), 1) for m in means]

    best = {key: max((r for _, r in found), key=np.mean) for key, found in rates.items()}
    gains = [best[task, "equilibrium"] - best[task, "one step"] for task in tasks]
    assert all(abs(gain.mean()) < 2 * gain.std(ddof=1) / 8**0.5 for gain in gains)
    points = ", ".join(f"{100 * g.mean():+.1f} +- {100 * g.std(ddof=1) / 8**0.5:.1f}" for g in gains)
    known = " and ".join(f"{100 * best[task, 'nearest by distance, known'].mean():.1f}" for task in tasks)
    equilibrium, one = (" and ".join(map(str, moved(state))) for state in ("equilibrium", "one step"))
    assert sentence == (
        f"From beta 8 to 512 the equilibrium's rate moves by {equilibrium} points (half-masked and noisy), that of one "
        f"step by {one}; each at its own best beta, the equilibrium is as good as one step ({points} points), and the "
        f"nearest key over the known entries retrieves {known} %."
    )
    # What a reader may take away: the equilibrium hardly depends on beta, and the way to compare matters more.
    assert max(moved("equilibrium")) < 5 < moved("one step")[0]
    assert best["half-masked", "nearest by distance, known"].min() == 1


def test_one_readable_table_of_at_most_120_columns_with_notes(digits):
    result = digits[0]
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum(line.lstrip().startswith("method") for line in lines) == 1
    for name in METHODS:
        assert sum(line.startswith(name) for line in lines) == 1
    assert "one tolerance for all" in result.stdout
    assert "grad. error: relative error" in result.stdout
    assert "\x1b" not in result.output


def test_progress_is_a_plain_line_per_method_where_there_is_no_terminal(digits):
    lines = [line for line in digits[0].stderr.splitlines() if not line.endswith("s so far")]
    assert [line[:20].rstrip() for line in lines] == METHODS
    assert all("evaluations" in line for line in lines)


def test_files_are_written_and_tell_nothing_of_the_machine_beyond_versions(digits):
    result, out, content = digits
    pictures = ["convergence.png", "rates.png", "retrieval.png"]
    assert sorted(p.name for p in out.iterdir()) == ["compare.json", *pictures]
    for name in pictures:
        image = (out / name).read_bytes()
        assert image[:8] == b"\x89PNG\r\n\x1a\n"
        assert len(image) > 20_000
    text = (out / "compare.json").read_text()
    assert str(out) not in text
    assert os.path.expanduser("~") + "/" not in text
    assert {"python", "torch", "numpy", "torchdeq"} <= set(content["versions"])
    assert content["native"] == str(native_status())
    isa = native_status().isa
    assert content["device"]["native"] == isa
    assert (f"native {isa}" in result.stdout) == (isa is not None)
    assert content["status_counts"]["Anderson"] == {"CONVERGED": 100}


@pytest.mark.parametrize(("width", "tables", "terminal"), [(20, 24, {}), (80, 3, {"FORCE_COLOR": 1, "TERM": "dumb"})])
def test_narrow_terminals_get_several_tables_with_every_column(width, tables, terminal, tmp_path):
    command = ("compare", "--quick", "--patterns", 5, "--out", tmp_path)
    lines = done(*command, COLUMNS=width, **terminal).stdout.splitlines()
    assert max(map(len, lines)) <= width
    # A header has two lines above its rule.
    rules = [index for index, line in enumerate(lines) if set(line.strip()) == {"─"}]
    shown = " ".join(" ".join(lines[index - 2 : index]) for index in rules)
    # Of a terminal of 20 columns every column but those that name the row has a table of its own.
    assert len(rules) >= tables
    if width > 20:
        solvers = ("evals", "resid.", "conv", "dles", "pts", "retr.", "other", "grad.", "fwd", "bwd", "peak", "status")
        for header in (*solvers, "best +- std", "at beta", *(f" {2**power}" for power in range(1, 10))):
            assert header in shown


@pytest.mark.nightly
def test_own_data_without_reference_and_with_other_settings(tmp_path, patterns):
    torch.save({"patterns": torch.from_numpy(patterns).double()}, tmp_path / "mine.pt")
    arguments = ("--anchor", 0.3, "--beta", 2, "--dtype", "float64", "--seed", 3, "--out", tmp_path / "out")
    result = done("compare", "--quick", "--data", tmp_path / "mine.pt", "--patterns", 15, *arguments)
    content = strict(tmp_path / "out" / "compare.json")
    assert content["settings"]["data"] == "mine.pt"
    assert content["settings"]["noise"] == pytest.approx(0.5 * patterns.std(), rel=1e-3)
    assert all("reference_mean" not in entry for entry in content["retrieval"])
    assert "independently" not in result.stdout
    assert min(e["beta"] for e in content["retrieval"] if e["beta"] is not None) == 0.5
    assert by_method(content)["Anderson"]["gradient_error"] < 5e-3
    assert str(tmp_path) not in (tmp_path / "out" / "compare.json").read_text()


@pytest.mark.slow
def test_patterns_that_are_not_finite_are_reported_and_touch_no_other(tmp_path, patterns):
    patterns[3, 2], patterns[7, 0] = np.nan, np.inf
    np.save(tmp_path / "holes.npy", patterns)
    result = done("compare", "--quick", "--data", tmp_path / "holes.npy", "--patterns", 20, "--out", tmp_path)
    content = strict(tmp_path / "compare.json")
    rows = by_method(content)
    assert list(rows) == METHODS
    for name in METHODS:
        assert rows[name]["status"]["NONFINITE"] == 4
        assert rows[name]["gradient_error"] is not None
    assert rows["Anderson"]["status"] == {"CONVERGED": 36, "NONFINITE": 4}
    assert rows["Anderson"]["converged"] == 0.9
    assert rows["Anderson"]["gradient_error"] < 1e-2
    assert content["unusable_patterns"] == 2
    assert "4 NONFINITE" in result.stdout
    assert "2 of 20 patterns hold NaN or infinity" in result.stdout


@pytest.mark.slow
def test_numbers_that_do_not_exist_are_null(tmp_path, patterns):
    np.save(tmp_path / "mine.npy", patterns)
    options = ("--quick", "--patterns", 5, "--out", tmp_path)
    done("compare", "--data", tmp_path / "mine.npy", "--anchor", 1, *options)
    # With anchor 1 the patterns have no influence: their gradient is 0, and it has no relative error.
    assert by_method(strict(tmp_path / "compare.json"))["Picard"]["gradient_error"] is None

    np.save(tmp_path / "nothing.npy", np.full_like(patterns, np.nan))
    done("compare", "--data", tmp_path / "nothing.npy", *options)
    row = by_method(strict(tmp_path / "compare.json"))["torchdeq Anderson"]
    assert row["status"] == {"NONFINITE": 10}
    assert row["residual_max"] is None


@pytest.mark.slow
def test_a_method_that_raises_stays_in_the_table(tmp_path, patterns, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setattr(TorchDEQ, "__init__", broken)
    np.savez(tmp_path / "one.npz", patterns)
    result = done("compare", "--quick", "--data", tmp_path / "one.npz", "--patterns", 10, "--out", tmp_path)
    row = by_method(strict(tmp_path / "compare.json"))["torchdeq Broyden"]
    assert (row["error"], row["message"]) == ("RuntimeError", "it broke")
    line = next(line for line in result.stdout.splitlines() if line.startswith("torchdeq Broyden"))
    assert line.split()[-1] == "ERROR"
    assert "torchdeq Broyden failed with RuntimeError: it broke" in result.stdout
    assert "torchdeq Broyden     failed: RuntimeError: it broke" in result.stderr


def test_module_shows_version_and_imports_nothing_heavy():
    code = (
        "import sys, runpy, implicit_attention.plotting\n"
        "from importlib.metadata import entry_points\n"
        "next(iter(entry_points(group='console_scripts', name='implicit-attention'))).load()\n"
        "assert not {'rich.table', 'matplotlib', 'sklearn', 'torchdeq'} & set(sys.modules), 'heavy'\n"
        "sys.argv = ['implicit-attention', '--version']\n"
        "runpy.run_module('implicit_attention', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("implicit-attention 0.")


@pytest.mark.nightly
@pytest.mark.parametrize("potential", ["log-sum-exp", "distance"])
def test_rates_of_own_data_do_not_depend_on_their_unit(tmp_path, potential):
    """8 bits of grey, and the same divided by 255: fewer rows than the default number of patterns, all of them."""
    grey = np.random.default_rng(0).integers(0, 256, (60, 30)).astype("uint8")
    contents = []
    for name, data in (("bytes", grey), ("units", grey / 255)):
        np.save(tmp_path / f"{name}.npy", data)
        arguments = ("--potential", potential, "--dtype", "float64")
        result = done("compare", "--quick", "--data", tmp_path / f"{name}.npy", *arguments, "--out", tmp_path / name)
        content = strict(tmp_path / name / "compare.json")
        assert "60 patterns" in result.stdout
        assert f"beta {content['settings']['beta']:.4g} is auto" in " ".join(result.stdout.split())
        assert (content["settings"]["patterns"], content["settings"]["beta_auto"]) == (60, True)
        contents.append(content)
    first, second = (content["settings"]["beta"] for content in contents)
    assert second == pytest.approx(255**2 * first, rel=1e-6)
    rates = [[(e["task"], e["state"], e["mean"]) for e in content["retrieval"]] for content in contents]
    for (task, state, one), (_, _, other) in zip(*rates, strict=True):
        assert one == pytest.approx(other, abs=0.02), (task, state)
    # The beta of a memory of these patterns.
    memory = MemoryLookup(30, similarity="dot" if potential == "log-sum-exp" else "distance", dtype=torch.float64)
    memory.store(torch.as_tensor(grey).double())
    assert first == pytest.approx(float(memory.found_beta), rel=1e-6)


@pytest.mark.slow
def test_beta_of_the_digits_is_found_where_it_is_asked_for(tmp_path):
    result = done("compare", "--quick", "--patterns", 20, "--beta", "auto", "--out", tmp_path)
    content = strict(tmp_path / "compare.json")
    assert content["settings"]["beta_auto"] is True
    assert content["settings"]["beta"] != 8
    assert "is auto: from the similarities" in result.stdout
    assert content["settings"]["patterns"] == 20

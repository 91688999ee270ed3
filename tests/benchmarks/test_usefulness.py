"""The suite `usefulness` compares what costs the same, on data that are as described, and prints what was found."""

import dataclasses
import hashlib
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import guard, report, useful_tasks, useful_training, usefulness  # noqa: E402
from benchmarks.environment import environment  # noqa: E402
from benchmarks.useful_models import (  # noqa: E402
    Block,
    Model,
    Shape,
    counted_flops,
    evaluations_for,
    forward_flops,
    models,
)
from benchmarks.useful_tables import tables, verdict  # noqa: E402
from benchmarks.useful_training import Plan, evaluations_of, loss, scored, trial  # noqa: E402

SHAPE = Shape(length=16, inputs=4, classes=10, discrete=False, causal=False, per_token=False)
CAUSAL = Shape(length=32, inputs=24, classes=12, discrete=True, causal=True, per_token=True)
TINY = Plan(steps=3, batch=4, rates=(1e-2,), seeds=(0, 1), held=8)


def block_of(model, shape, seed=0):
    torch.manual_seed(seed)
    return Block(model, shape).eval()


def inputs_for(shape, count=3):
    generator = torch.Generator().manual_seed(1)
    if shape.discrete:
        return torch.randint(shape.inputs, (count, shape.length), generator=generator)
    return torch.rand(count, shape.length, shape.inputs, generator=generator)


# ------------------------------------------------------------------ what is compared


@pytest.mark.parametrize("model", models(SHAPE, (2, 4), spins=True), ids=lambda model: model.name)
def test_the_formula_counts_the_flops_that_torch_counts(model):
    for shape, slack in ((SHAPE, 0.0), (CAUSAL, 0.03)):
        block = block_of(model, shape)
        counted = counted_flops(block, inputs_for(shape))
        evaluations, most = evaluations_of(block)
        formula = forward_flops(model, shape, evaluations)
        if model.stops:
            # Finished queries wait for others of their block of rows, at worst for the slowest of all.
            assert formula <= counted <= (1 + slack) * forward_flops(model, shape, most)
        else:
            assert formula == pytest.approx(counted, rel=slack, abs=0)


@pytest.mark.parametrize("task", useful_tasks.TASKS)
def test_what_is_held_against_each_other_has_the_same_flops(task):
    shape = usefulness.load(task, 8).shape
    for k in usefulness.GROUPS:
        own, shared, *rest = [model for model in models(shape, usefulness.GROUPS) if model.group == k]
        equal = Model("budget", evaluations_for(k, shape), k)
        assert equal in rest
        flops = [forward_flops(model, shape, model.count) for model in (own, shared, equal)]
        assert flops[0] == flops[1] == flops[2]
        assert Model("budget", k, k) in rest
        assert forward_flops(Model("budget", k, k), shape, k) < flops[0]


def test_parameters_are_counted():
    dim, heads = SHAPE.dim, SHAPE.heads
    embedding, positions, feed_forward = (SHAPE.inputs + 1) * dim, SHAPE.length * dim, 4 * dim * dim + 3 * dim
    norms, head = 2 * 2 * dim, (dim + 1) * SHAPE.classes
    layer = 4 * dim * dim + heads + 2 * dim  # projections, temperatures, and its norm
    same = embedding + positions + feed_forward + norms + head
    for model, expected in (
        (Model("stack", 1, 1), same + layer),
        (Model("stack", 4, 4), same + 4 * layer),
        (Model("shared", 4, 4), same + layer),
        (Model("budget", 4, 4), same + layer + heads),  # the anchors
        (Model("solved", 0, 0), same + layer + heads),
        # Maps to and from heads and, in each, to queries and keys; temperatures; norms of the field and of the layer.
        (Model("spins", 0, 0), same + 2 * dim * dim + 2 * dim * dim // heads + heads + dim // heads + 2 * dim),
        (Model("stack", 0, 0), same),
    ):
        assert sum(p.numel() for p in Block(model, SHAPE).parameters()) == expected


def test_models_of_one_seed_begin_with_the_same_weights():
    floor, *others = (block_of(model, CAUSAL) for model in models(CAUSAL, (2, 4), spins=True))
    for other in others:
        weights = dict(other.named_parameters())
        for name, value in floor.named_parameters():
            # Spins have other maps, or there is no layer.
            if (
                other.model.count == 0
                and other.model.kind != "solved"
                and not name.startswith(("embed", "mlp", "head"))
            ):
                continue
            if other.model.kind != "spins" or not name.startswith("attention"):
                assert torch.equal(weights[name], value)


@pytest.mark.parametrize("kind", ["stack", "shared"])
def test_explicit_steps_are_softmax_attention_repeated(kind):
    block, inputs = block_of(Model(kind, 3, 3), CAUSAL), inputs_for(CAUSAL)
    x = block.embed(inputs) + block.positions
    for step in range(3):
        layer = step if kind == "stack" else 0
        attention, normed = block.attention[layer], block.norms[layer](x)
        q, k, v = (p(normed).unflatten(-1, (2, 16)).transpose(1, 2) for p in _projections(attention))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.out_proj(read.transpose(1, 2).flatten(-2))
    x = x + block.mlp(block.mlp_norm(x))
    torch.testing.assert_close(block(inputs), block.head(block.head_norm(x)), rtol=1e-4, atol=1e-5)


def test_a_budget_is_that_many_evaluations_of_the_map():
    block, inputs = block_of(Model("budget", 4, 4), SHAPE), inputs_for(SHAPE)
    attention, normed = block.attention[0], block.norms[0](block.embed(inputs) + block.positions)
    q, k, v = (p(normed).unflatten(-1, (2, 16)).transpose(1, 2) for p in _projections(attention))
    z, anchor = q, attention.anchor()[:, None, None]
    for _ in range(3):
        z = anchor * q + (1 - anchor) * F.scaled_dot_product_attention(z, k, k)
    read = F.scaled_dot_product_attention(z, k, v).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(attention(normed), attention.out_proj(read), rtol=1e-4, atol=1e-5)
    assert evaluations_of(block) == (4.0, 4)


def test_a_cap_is_kept_and_without_one_all_queries_are_solved():
    inputs = inputs_for(SHAPE)
    for model, least in ((Model("capped", 2, 2), 0.0), (Model("solved", 0, 0), 1.0)):
        block = block_of(model, SHAPE)
        block(inputs)
        assert float(block.attention[0].last_solve.converged.double().mean()) >= least
        assert evaluations_of(block)[1] <= (2 if model.kind == "capped" else 100)


def _projections(attention):
    return attention.q_proj, attention.k_proj, attention.v_proj


# ------------------------------------------------------------------ the tasks


def test_digits_are_split_into_parts_that_share_no_image():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    parts = useful_tasks.digit_split(len(labels))
    assert [len(part) for part in parts] == [1097, 350, 350]
    assert sorted(torch.cat(parts).tolist()) == list(range(1797))
    task = useful_tasks.digits()
    for part, held in zip(parts[1:], (task.validation, task.test), strict=True):
        assert torch.equal(held.targets, torch.from_numpy(labels)[part])
        whole = torch.from_numpy(images / 16).float()[part].reshape(-1, 8, 8)
        for row in range(4):
            for column in range(4):
                patch = whole[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
                assert torch.equal(held.inputs[:, 4 * row + column], patch)
    known = {tuple(image) for image in images[parts[0].numpy()]}
    drawn = task.draw(100, torch.Generator().manual_seed(0)).inputs.reshape(-1, 4, 4, 2, 2).transpose(2, 3)
    assert all(tuple(image) in known for image in (16 * drawn.reshape(-1, 64)).numpy())


def test_the_answer_of_a_retrieval_is_the_value_behind_its_key():
    task = usefulness.load("retrieval", 64)
    for examples in (task.validation, task.test, task.draw(32, torch.Generator().manual_seed(3))):
        for tokens, targets in zip(examples.inputs.tolist(), examples.targets.tolist(), strict=True):
            stored = {}
            for index in range(0, 2 * useful_tasks.PAIRS, 2):
                assert tokens[index] < useful_tasks.KEYS <= tokens[index + 1]
                stored[tokens[index]] = tokens[index + 1] - useful_tasks.KEYS
            assert len(stored) == useful_tasks.PAIRS
            assert set(targets[: 2 * useful_tasks.PAIRS]) == {useful_tasks.IGNORED}
            assert targets[2 * useful_tasks.PAIRS :] == [stored[key] for key in tokens[2 * useful_tasks.PAIRS :]]


def test_held_out_retrievals_are_not_trained_on():
    task = useful_tasks.retrieval()
    assert len(task.test.inputs) == useful_tasks.HELD
    parts = [{tuple(row) for row in part.inputs[:, :8].tolist()} for part in (task.validation, task.test)]
    for seed in usefulness.PLANS["retrieval"].seeds:
        generator = torch.Generator().manual_seed(seed)
        parts.append({tuple(row) for row in task.draw(4000, generator).inputs[:, :8].tolist()})
    assert len(set().union(*parts)) == sum(map(len, parts))


def test_the_text_is_that_of_its_hash_and_its_parts_do_not_overlap():
    from pydoc_data.topics import topics

    task = useful_tasks.text()
    written = "\n".join(body for _, body in sorted(topics.items()))
    assert task.data["sha256"] == hashlib.sha256(written.encode()).hexdigest()
    assert task.data["characters"] == len(written) > 400_000
    (_, end), (begin, middle), (last, whole) = task.data["parts"]
    assert 0.79 < end / len(written) < 0.81
    assert (begin, last, whole) == (end, middle, len(written))
    alphabet = sorted(set(written))

    def decoded(row):
        return "".join(alphabet[code] for code in row)

    for part, start, stop in ((task.validation, begin, middle), (task.test, last, whole)):
        length = part.inputs.shape[1]
        read = "".join(map(decoded, part.inputs.tolist()))
        assert read == written[start : start + len(read)]
        assert stop - start - len(read) <= length
        assert decoded(part.targets.flatten().tolist()) == written[start + 1 : start + 1 + len(read)]
    drawn = task.draw(50, torch.Generator().manual_seed(0))
    for inputs, targets in zip(drawn.inputs.tolist(), drawn.targets.tolist(), strict=True):
        assert decoded(inputs + targets[-1:]) in written[:end]
        assert inputs[1:] == targets[:-1]


def test_every_model_sees_the_same_batches(monkeypatch):
    task, seen = usefulness.load("retrieval", 8), []
    drawing = dataclasses.replace(task, draw=lambda n, g: seen.append(task.draw(n, g)) or seen[-1])
    for model in (Model("stack", 2, 2), Model("solved", 0, 0)):
        trial(drawing, model, TINY, 0, 1e-2)
    first, second = seen[:3], seen[3:]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0].inputs, first[1].inputs)


# ------------------------------------------------------------------ scores


@pytest.mark.parametrize("kind", ["stack", "solved"])
def test_an_untrained_model_retrieves_by_chance(kind):
    task = useful_tasks.retrieval(validation=8, test=256)
    found = scored(task, block_of(Model(kind, 1, 1), task.shape), task.test)
    assert found["score"] == pytest.approx(task.chance, abs=0.03)
    assert found["loss"] == pytest.approx(math.log(16), abs=0.4)


@pytest.mark.parametrize("task", useful_tasks.TASKS)
def test_a_model_that_says_nothing_scores_what_guessing_does(task):
    task = usefulness.load(task, 300)
    block = block_of(Model("stack", 1, 1), task.shape)
    torch.nn.init.zeros_(block.head.weight)
    torch.nn.init.zeros_(block.head.bias)
    found = scored(task, block, task.test)
    assert found["loss"] == pytest.approx(math.log(task.shape.classes), rel=1e-5)
    assert found["score"] == pytest.approx(task.chance, rel=1e-5 if task.score == "bits" else 0.5)


@pytest.mark.parametrize("task", useful_tasks.TASKS)
def test_scores_are_those_of_all_examples_at_once(task, monkeypatch):
    task = usefulness.load(task, 20)
    block = block_of(Model("budget", 3, 2), task.shape)
    monkeypatch.setattr(useful_training, "AT_ONCE", 7)
    found = scored(task, block, task.test)
    with torch.no_grad():
        scores = block(task.test.inputs)
        right = [
            row.argmax(-1) == wanted
            for row, wanted in zip(scores.flatten(0, -2), task.test.targets.flatten(), strict=True)
            if wanted != useful_tasks.IGNORED
        ]
        mean_loss = float(loss(block, task.test))
    assert found["loss"] == pytest.approx(mean_loss, rel=1e-5)
    expected = sum(map(float, right)) / len(right) if task.score == "accuracy" else mean_loss / math.log(2)
    assert found["score"] == pytest.approx(expected, rel=1e-5)
    assert (found["evaluations_mean"], found["evaluations_max"]) == (3.0, 3)


def test_a_budget_has_converged_where_its_residual_is_small():
    task = usefulness.load("digits", 20)
    parts = []
    for count in (1, 2, 3, 4, 12):
        block = block_of(Model("budget", count, 2), task.shape)
        parts.append(scored(task, block, task.test)["converged"])
        attention = block.attention[0]
        with torch.no_grad():
            normed = block.norms[0](block.embed(task.test.inputs) + block.positions)
            _, solution = attention(normed, return_solution=True)
        small = solution.residual <= useful_training.RTOL * solution.value.norm(dim=-1)
        assert parts[-1] == pytest.approx(float(small.double().mean()), abs=0.02)
    assert parts[0] == 0
    assert parts[-1] == 1
    assert 0 < parts[2] < 1


def test_training_learns():
    task = usefulness.load("digits", 100)
    plan = Plan(steps=120, batch=32, rates=(1e-6, 1e-2), seeds=(0,))
    row, weights = useful_training.learned(task, Model("stack", 1, 1), plan)
    assert row["learning_rate"] == 1e-2
    assert row["validation_by_rate"]["1e-06"] < 0.3 < 0.5 < row["validation_by_rate"]["0.01"]
    assert row["evidence"]["score"] == row["runs"][0]["score"] > 0.5
    block = useful_training.restored(Model("stack", 1, 1), task, weights)
    assert scored(task, block, task.test)["score"] == row["evidence"]["score"]


def test_gradients_of_the_solved_model_are_those_of_its_unrolled_solution():
    batch = usefulness.load("digits", 8).draw(4, torch.Generator().manual_seed(0))
    gradients = []
    for model in (Model("solved", 0, 0), Model("budget", 60, 2)):
        block = block_of(model, SHAPE)
        block.attention[0].beta.set(2.0)  # at the initial one, one step back is nearly exact
        loss(block, batch).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in block.attention.parameters()]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 5e-3


# ------------------------------------------------------------------ the run and its report


@pytest.fixture(scope="module")
def rows():
    compared = [usefulness.Learned("retrieval", model, TINY) for model in models(CAUSAL, (2,))]
    return usefulness.run([*compared, usefulness.Costs("retrieval", TINY)], repeats=1, max_seconds=0.1)


@pytest.fixture
def run(rows):
    options = {"metrics": list(usefulness.METRICS), "repeats": 1}
    return report.document("usefulness", rows, (), complete=True, quick=False, options=options, where=environment())


@pytest.mark.slow
def test_every_model_has_its_row_with_evidence(rows):
    *compared, costs = rows
    assert [row["model"]["name"] for row in compared] == [model.name for model in models(CAUSAL, (2,))]
    for row in compared:
        scores = [trained["score"] for trained in row["runs"]]
        assert [trained["seed"] for trained in row["runs"]] == [0, 1]
        assert row["evidence"]["score"] == pytest.approx(sum(scores) / 2)
        assert row["evidence"]["score_std"] == pytest.approx(abs(scores[0] - scores[1]) / math.sqrt(2))
        assert row["threads"] == 1
        for what in ("forward", "training"):
            name = f"{row['model']['name']} {what}"
            assert costs["seconds"][name]["median"] > 0
            assert costs["peak_memory_bytes"][name] > 0
    steps = {row["model"]["kind"]: costs["peak_memory_bytes"][f"{row['model']['name']} training"] for row in compared}
    assert steps["stack"] > costs["peak_memory_bytes"]["explicit, 1 step training"]
    assert torch.get_num_threads() == environment()["threads"]


@pytest.mark.slow
def test_processes_find_what_one_process_finds(monkeypatch, rows):
    settings = [usefulness.Learned("retrieval", model, TINY) for model in models(CAUSAL, (2,))[:2]]
    monkeypatch.setattr(usefulness, "WORTH_A_PROCESS", 0)
    monkeypatch.setattr(usefulness, "WORKERS", 1)
    found = [row for row, _ in usefulness._in_processes(usefulness.trained_row, settings, 1)]
    for row, alone in zip(found, rows, strict=False):
        assert [trained["loss"] for trained in row["runs"]] == [trained["loss"] for trained in alone["runs"]]
        assert row["threads"] == 1


def test_nothing_is_trained_whose_tests_are_red(monkeypatch):
    monkeypatch.setattr(guard, "red", lambda tests: "not timed, its tests are red")
    monkeypatch.setattr(usefulness, "_in_processes", lambda settings: pytest.fail("trained"))
    seen = []
    monkeypatch.setattr(usefulness.puzzles, "run", lambda *given, **options: pytest.fail("trained"))
    rows = usefulness.run(usefulness.settings_of(True), progress=seen.append)
    assert rows == seen
    assert {row["error"] for row in rows} == {"not timed, its tests are red"}
    run = {"rows": rows}
    assert tables(run) == []
    assert report.refusals(run)
    assert all((ROOT / path).is_file() for path in usefulness.TESTS)


def _scored(scores, test=10_000, kind="accuracy"):
    return {"score": kind, "runs": [{"score": score} for score in scores], "data": {"test": test}}


def test_a_verdict_needs_two_standard_errors_of_seeds_and_of_tests():
    assert verdict(_scored([0.9, 0.91, 0.92]), _scored([0.8, 0.81, 0.82])) == "better"
    assert verdict(_scored([0.8, 0.81, 0.82]), _scored([0.9, 0.91, 0.92])) == "worse"
    assert verdict(_scored([0.9, 0.7, 0.92]), _scored([0.8, 0.81, 0.82])) == "as good"
    assert verdict(_scored([0.9, 0.91, 0.92], test=50), _scored([0.8, 0.81, 0.82], test=50)) == "as good"
    assert verdict(_scored([2.5, 2.51, 2.52], kind="bits"), _scored([2.6, 2.61, 2.62], kind="bits")) == "better"
    assert verdict(_scored([0.9]), _scored([0.1])) == "one seed decides nothing"


def test_tables_hold_what_was_measured(run, tmp_path):
    console = Console(width=260, record=True, file=io.StringIO())
    report.show(run, usefulness.NOTES, console, tables)
    shown = console.export_text()
    row = run["rows"][2]
    for text in ("explicit, 2 steps, shared weights", "equilibrium, solved", str(row["parameters"]), "retrieval"):
        assert text in shown
    assert "verdict" not in shown
    text = _rewritten(run, tmp_path)
    assert "| task, k |" in text
    line = next(line for line in text.splitlines() if line.startswith("| explicit, 2 steps, shared weights |"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1].startswith(f"{100 * row['evidence']['score']:.1f} +- ")
    assert float(cells[4]) == pytest.approx(row["forward_flops"] / 1e6, abs=0.006)
    costs = run["rows"][-1]
    seconds = costs["seconds"]["explicit, 2 steps, shared weights training"]["median"]
    assert float(cells[10]) == pytest.approx(1000 * seconds, abs=0.06)


def _rewritten(run, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results of usefulness -->\na stale table\n<!-- end of usefulness -->\nafter\n")
    report.write(run, tmp_path / "results")
    report.rewrite("usefulness", usefulness.NOTES, tables=tables, readme=readme, folder=tmp_path / "results")
    assert "a stale table" not in readme.read_text()
    return readme.read_text()


NULLS = ("DIGITS", "RETRIEVAL", "TEXT")


def test_the_committed_results_hold_all_settings():
    found = report.newest_by_metric("usefulness", usefulness.METRICS)
    rows = {row["name"]: row for _, run in found for row in run["rows"]}
    names = {setting.name for setting in usefulness.settings_of(False) if setting.metric in NULLS}
    assert names <= set(rows)
    for row in rows.values():
        if "model" in row:
            assert len(row["runs"]) == 3
            scores = [trained["score"] for trained in row["runs"]]
            assert row["evidence"]["score"] == pytest.approx(sum(scores) / 3)


@pytest.mark.slow
def test_the_command_runs_the_task_it_is_asked_for(tmp_path):
    done = CliRunner().invoke(command.app, ["usefulness", "--quick", "--only", "digits", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("usefulness-partial-*.json")
    written = json.loads(path.read_text())
    assert {row["metric"] for row in written["rows"]} == {"DIGITS"}
    assert {row["name"] for row in written["rows"]} == {
        setting.name for setting in usefulness.settings_of(True) if setting.metric == "DIGITS"
    }
    refused = CliRunner().invoke(command.app, ["usefulness", "--only", "C1"])
    assert refused.exit_code == 2

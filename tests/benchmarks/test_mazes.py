"""Mazes are what they are said to be, answers are judged as said, and a quick run tells all of it."""

import collections
import dataclasses
import functools
import hashlib
import io
import json
import math
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks.puzzles import contenders, mazes, mazes_image, solvers, suite, training  # noqa: E402
from benchmarks.puzzles import tables as puzzle_tables  # noqa: E402
from benchmarks.puzzles.models import IGNORED, NONE, Examples, Model, flops, mask_of  # noqa: E402
from benchmarks.puzzles.training import Answer, Fixed, Loop, Recipe, Solved, answered, scored  # noqa: E402

NAMES = ("Prim", "Wilson", "depth-first")


def drawn(name="depth-first", size=5, count=6):
    return mazes.mazes(name, size, count, "for a test")


# ------------------------------------------------------------------ mazes


def trees(name, size, count):
    """How often each tree is drawn."""
    return collections.Counter(map(mazes.drawing, mazes.mazes(name, size, count, "trees").edges))


@pytest.mark.parametrize("name", NAMES)
def test_every_tree_of_the_smallest_grid_is_drawn(name):
    found = trees(name, 2, 1200)
    assert len(found) == 4
    assert min(found.values()) > 240


def test_wilson_draws_the_trees_of_a_larger_grid_equally_often():
    found = trees("Wilson", 3, 3840)
    assert len(found) == 192  # Kirchhoff's number of spanning trees
    chi = sum((count - 20) ** 2 / 20 for count in found.values())
    assert chi < 191 + 4 * math.sqrt(2 * 191)
    # Those of a depth-first search are not: it has fewer branches.
    others = trees("depth-first", 3, 3840)
    assert sum((others[tree] - 20) ** 2 / 20 for tree in found) > 400


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_the_one_way_from_corner_to_corner(name):
    examples = drawn(name, 7, 8)
    for inputs, edges, targets in zip(*examples, strict=True):
        assert inputs.nonzero().tolist() == [[0, 0], [48, 1], [49, 2], [50, 2], [51, 2], [52, 2]]
        assert edges[49:].tolist() == [[49 + wall, NONE, NONE, NONE] for wall in range(4)]
        assert set(targets[49:].tolist()) == {IGNORED}
        seen = [{int(n) for n in row if n < 49} for row in edges[:49]]
        assert all(cell in seen[other] for cell, near in enumerate(seen) for other in near)
        assert sum(map(len, seen)) == 2 * 48
        for cell in range(49):
            # On each side the cell beside it, or the wall of that side.
            above, below, left, right = edges[cell].tolist()
            row, column = divmod(cell, 7)
            assert above == 49 or (above == cell - 7 and row > 0)
            assert below == 50 or (below == cell + 7 and row < 6)
            assert left == 51 or (left == cell - 1 and column > 0)
            assert right == 52 or (right == cell + 1 and column < 6)
        # Breadth-first search knows no parents of the generator.
        before, queue = {0: None}, collections.deque([0])
        while queue:
            cell = queue.popleft()
            for other in seen[cell] - set(before):
                before[other] = cell
                queue.append(other)
        assert len(before) == 49
        path, cell = set(), 48
        while cell is not None:
            path.add(cell)
            cell = before[cell]
        assert path == set((targets == 1).nonzero().flatten().tolist())


def test_mazes_follow_from_their_seed_and_the_first_are_the_same_in_a_larger_count():
    for a, b in zip(drawn(count=9).at(slice(0, 4)), drawn(count=4), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(mazes.mazes("depth-first", 5, 4, "other").targets, drawn(count=4).targets)


@pytest.mark.parametrize(
    ("name", "size", "count", "seed", "crossed", "expected"),
    [
        ("depth-first", 5, 40, "to train", False, "3ab3a4b54da55dd4"),
        ("depth-first", 5, 10, "to train, crossed", True, "d80c4578986957db"),
        ("Prim", 9, 10, "held out", False, "e00dfaafc742cfbc"),
        ("Wilson", 13, 5, "held out", False, "f6652a2dd0efda68"),
    ],
)
def test_mazes_are_those_of_results_that_were_written_before(name, size, count, seed, crossed, expected):
    parts = mazes.mazes(name, size, count, seed, crossed=crossed)
    assert hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16] == expected


def test_held_out_mazes_are_not_learnt_from(monkeypatch):
    few = mazes.mazes(mazes.TRAIN_GENERATOR, mazes.TRAIN_SIZE, 10, mazes.HELD_OUT)
    monkeypatch.setattr(mazes, "learnt", lambda: (few, few.at(slice(0, 2))))
    known = {mazes.drawing(maze) for maze in few.edges}
    for name in NAMES:
        asked = mazes.held_out.__wrapped__(name, 5, 20)
        assert len(asked.targets) == 20
        assert not known & {mazes.drawing(maze) for maze in asked.edges}
    asked = mazes.held_out.__wrapped__("Wilson", 5, 20)
    assert torch.equal(asked.edges[0], mazes.mazes("Wilson", 5, 1, mazes.HELD_OUT).edges[0])
    asked = mazes.held_out.__wrapped__(mazes.TRAIN_GENERATOR, 5, 20)
    assert torch.equal(asked.edges[0], mazes.mazes(mazes.TRAIN_GENERATOR, 5, 11, mazes.HELD_OUT).edges[-1])


def test_guesses_are_what_they_say():
    examples = drawn(size=5, count=4)
    kept = mazes.no_dead_ends(examples)
    for inputs, edges, guess in zip(examples.inputs, examples.edges, kept, strict=True):
        for cell in range(25):
            alone = int((edges[cell] < 25).sum()) == 1
            assert int(guess[cell]) == int(not alone or bool(inputs[cell, :2].any()))
    assert bool((kept >= examples.targets)[:, :25].all())
    assert not mazes.no_cell(examples).any()


# ------------------------------------------------------------------ models


def model_of(blocks=1, seed=0):
    torch.manual_seed(seed)
    return Model(mazes.Mazes.shape, blocks).eval()


def test_attention_over_lists_is_attention_with_their_mask():
    model, examples = model_of(), drawn(size=5)
    z, x = torch.randn(2, 6, 29, 32)
    mask = mask_of(examples.edges)
    for number in range(6):
        for cell in range(29):
            near = {int(other) for other in examples.edges[number, cell] if other != NONE}
            assert set(mask[number, cell].nonzero().flatten().tolist()) == near
    given = [z.clone().requires_grad_() for _ in range(2)]
    answers = [model.block(state, x, edges) for state, edges in zip(given, (examples.edges, mask), strict=True)]
    torch.testing.assert_close(*answers)
    for answer in answers:
        answer.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-4)


def test_a_block_is_attention_and_feed_forward_each_added_and_normalised():
    model, examples = model_of(), drawn().dense()
    block, z, x = model.block, torch.randn(6, 29, 32), model.embed(examples.inputs)
    q, k, v = (t.unflatten(-1, (model.shape.heads, -1)) for t in block.attention.project(z).chunk(3, -1))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~examples.edges[:, None], -torch.inf).softmax(-1)
    read = block.attention.out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))
    once = F.layer_norm(z + x + read, (32,), block.attention_norm.weight, block.attention_norm.bias)
    expected = F.layer_norm(once + block.mlp(once), (32,), block.mlp_norm.weight, block.mlp_norm.bias)
    torch.testing.assert_close(block(z, x, examples.edges), expected, rtol=1e-4, atol=1e-5)


def test_cells_have_no_numbers():
    model, examples = model_of(), drawn().dense()
    order = torch.randperm(29)
    other = Examples(examples.inputs[:, order], examples.edges[:, order][:, :, order], examples.targets[:, order])
    (a, right), (b, other_right) = (answered(model, each, Fixed(5)) for each in (examples, other))
    torch.testing.assert_close(a.state[:, order], b.state, rtol=1e-4, atol=1e-5)
    assert torch.equal(right[:, order], other_right)


@pytest.mark.parametrize("blocks", [1, 3])
def test_flops_are_those_of_the_matrix_products(blocks):
    model, examples = model_of(blocks), drawn()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.head(model.steps(torch.zeros(6, 29, 32), model.embed(examples.inputs), examples.edges, 3))
    # Sums over lists are no matrix products for the counter: 2 K d for scores, and as many for values.
    scores = 29 * 3 * 4 * 4 * 32
    assert counter.get_total_flops() / 6 + scores == flops(model.shape, 29, 4, 3)


def test_a_stack_begins_with_the_weights_of_the_tied_model():
    tied, stack = model_of().state_dict(), model_of(3).state_dict()
    assert all(torch.equal(stack[name], value) for name, value in tied.items())
    assert sum(p.numel() for p in model_of(3).blocks.parameters()) == 3 * sum(
        p.numel() for p in model_of().blocks.parameters()
    )


def test_repeated_self_attention_is_the_energy_of_the_library():
    torch.manual_seed(0)
    model, examples = mazes.Repeated(mazes.Mazes.shape), drawn()
    x, z, block = torch.randn(6, 29, 32), torch.randn(6, 29, 32), model.block
    anchor = block.anchor_logit.sigmoid()
    scores = (z @ z.mT).masked_fill(~mask_of(examples.edges), -torch.inf)
    expected = anchor * x + (1 - anchor) * scores.softmax(-1) @ z
    torch.testing.assert_close(block(z, x, examples.edges), expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ training and answers


def test_a_loop_draws_its_steps():
    model, examples = model_of(), drawn().dense()
    counted = []
    model.block.register_forward_hook(lambda *given: counted.append(1))
    seen, draw = set(), random.Random(0)
    for _ in range(40):
        counted.clear()
        (z,) = Loop(range(2, 5)).states(model, examples, draw, 1.0)
        assert z.requires_grad
        seen.add(len(counted))
    assert seen == {2, 3, 4}


@pytest.mark.parametrize(
    ("steps", "every", "asked"), [(8, 2, (4, 6, 8)), (7, 2, (5, 7)), (6, 5, (6,)), (5, 1, (3, 4, 5))]
)
def test_a_loss_at_several_states_is_at_those_of_the_later_half(steps, every, asked):
    model, examples = model_of(), drawn().dense()
    x = model.embed(examples.inputs)
    (states,) = Loop(steps, every).states(model, examples, random.Random(0), 0.0)
    expected = [model.steps(torch.zeros_like(x), x, examples.edges, count) for count in asked]
    torch.testing.assert_close(states, torch.stack(expected) if len(asked) > 1 else expected[0])


def test_states_are_asked_to_rest_from_the_middle_of_the_training_on():
    model, examples = model_of(), drawn().dense()
    weights = []
    for done in (0.0, 0.5, 0.625, 0.75, 1.0):
        (found,) = Loop(3, settle=0.5).states(model, examples, random.Random(0), done)
        weights.append(float(found[1].detach()) if isinstance(found, tuple) else 0.0)
    assert weights == pytest.approx([weights[-1] * part for part in (0, 0, 0.5, 1, 1)])
    assert weights[-1] > 0


def test_the_last_change_is_a_part_of_the_loss_where_states_are_to_settle():
    model, examples = model_of(), drawn().dense()
    x = model.embed(examples.inputs)
    ((z, more),) = Loop(3, settle=0.5).states(model, examples, random.Random(0), 1.0)
    before = model.steps(torch.zeros_like(x), x, examples.edges, 2)
    torch.testing.assert_close(z, model.block(before, x, examples.edges))
    changes = [float((b - a).detach().norm() / b.detach().norm()) for a, b in zip(before, z, strict=True)]
    assert float(more.detach()) == pytest.approx(0.5 * sum(changes) / 6, rel=1e-4)
    plain = training.loss(model, z, examples.targets)
    torch.testing.assert_close(training.loss(model, (z, more), examples.targets), plain + more)


def test_training_learns_and_follows_from_its_seed():
    recipe = Recipe(Loop(4), updates=12, batch=16)
    found = []
    for _ in range(2):
        model = model_of()
        told = training.train(Small(), model, recipe, 0)
        found.append((told["loss"], model.head.weight.detach().clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    batch = Small().draw(64, torch.Generator().manual_seed(5)).dense()

    @torch.no_grad()
    def error(model):
        z = model.steps(torch.zeros(64, 13, 32), model.embed(batch.inputs), batch.edges, 4)
        return float(training.loss(model, z, batch.targets))

    assert error(model) < error(model_of()) - 0.05


class Small(mazes.Mazes):
    """3 x 3 mazes, drawn anew."""

    def draw(self, count, generator):
        return mazes.mazes("depth-first", 3, count, str(int(torch.randint(10**9, (), generator=generator))))


def test_answers_are_those_of_all_puzzles_at_once(monkeypatch):
    model, examples = model_of(), drawn(size=5, count=7)
    whole = answered(model, examples, Solved())
    monkeypatch.setattr(training, "AT_ONCE", 70)
    parts = answered(model, examples, Solved())
    torch.testing.assert_close(whole[0].state, parts[0].state, rtol=1e-3, atol=1e-4)
    assert torch.equal(whole[0].converged, parts[0].converged)
    z, x = whole[0].state, model.embed(examples.inputs)
    with torch.no_grad():
        change = (model.block(z, x, examples.edges) - z).flatten(1).norm(dim=1)
    assert bool((change <= 1.1e-3 * z.flatten(1).norm(dim=1)).all())
    assert bool(whole[0].converged.all())
    long, _ = answered(model, examples, Fixed(300))
    torch.testing.assert_close(long.state, z, rtol=0.05, atol=0.05)
    assert bool(long.converged.all())
    assert not answered(model, examples, Fixed(1))[0].converged.any()


def test_scores_by_hand():
    targets = torch.tensor([[0, 1, IGNORED], [1, 1, 0], [0, 0, 0], [1, IGNORED, 1]])
    right = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)
    answer = Answer(torch.zeros(4, 3, 1), torch.tensor([3, 5, 9, 3]), torch.tensor([True, True, True, False]))
    found = scored(answer, right, targets)
    assert (found["exact"], found["converged"]) == (0.5, 0.75)
    assert found["cells"] == pytest.approx(0.8)
    assert (found["evaluations_mean"], found["evaluations_max"]) == (5.0, 9)
    assert found["exact_converged"] == pytest.approx(2 / 3)
    assert found["exact_unconverged"] == 0.0
    none = scored(answer._replace(converged=torch.ones(4, dtype=torch.bool)), right, targets)
    assert none["exact_unconverged"] is None


def test_fixed_points_are_counted_among_settled_states():
    z, settled = torch.ones(3, 4, 2), torch.tensor([True, True, False])
    ends = [Answer(z, settled, settled), Answer(z + 1e-4, settled, settled), Answer(-z, settled, settled)]
    assert solvers.distinct(ends).tolist() == [2, 2, 0]
    ends[2] = ends[2]._replace(converged=torch.tensor([False, True, True]))
    assert solvers.distinct(ends).tolist() == [1, 2, 1]


def test_solvers_that_settle_on_the_same_state_are_said_to():
    found = solvers.compared_solvers(model_of(), drawn(size=3, count=3))
    for name in solvers.SOLVERS:
        assert found[name]["converged"] == 1.0
        assert found[name]["evaluations_mean"] > 1
    assert found["distinct"] == {"mean": 1.0, "max": 1}
    assert found["Broyden"]["elsewhere"] == 0.0


# ------------------------------------------------------------------ claims, runs, tables


def _runs(values, way="solved", name="depth-first 9"):
    return [{"ways": {way: {name: {"exact": value}}}} for value in values]


def test_a_claim_is_held_by_two_standard_errors():
    claim = contenders.Claim("tied", "solved", "depth-first 9", ">=", 0.95)
    error = 0.01 / math.sqrt(3)
    assert contenders.lower(_runs([0.97, 0.98, 0.99]), claim) == pytest.approx(0.98 - 2 * error)
    below = dataclasses.replace(claim, sense="<=")
    assert contenders.lower(_runs([0.97, 0.98, 0.99]), below) == pytest.approx(0.98 + 2 * error)
    assert contenders.lower(_runs([0.97]), dataclasses.replace(claim, set="Prim 13")) == "absent"
    target = claim.target("MAZES")
    row = {"metric": "MAZES", "contender": "tied", "ratios": {claim.ratio: 0.96}}
    assert target.judge([row])["verdict"] == "met"
    assert target.judge([{**row, "ratios": {claim.ratio: 0.94}}])["verdict"] == "missed"
    assert target.judge([{**row, "contender": "stack"}])["verdict"] == "not measured"


def test_a_verdict_needs_two_standard_errors_of_seeds_and_of_puzzles():
    assert contenders.verdict([0.9, 0.91, 0.92], [0.8, 0.81, 0.82], 10_000) == "better"
    assert contenders.verdict([0.8, 0.81, 0.82], [0.9, 0.91, 0.92], 10_000) == "worse"
    assert contenders.verdict([0.9, 0.6, 0.92], [0.8, 0.81, 0.82], 10_000) == "as good"
    assert contenders.verdict([0.9, 0.91, 0.92], [0.8, 0.81, 0.82], 50) == "as good"
    assert contenders.verdict([0.9], [0.1], 500) == "one seed decides nothing"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mazes, "TRAIN_MAZES", 40)
        patch.setattr(mazes, "TRAIN_CROSSED", 10)
        for name in ("learnt", "masked", "held_out"):
            patch.setattr(mazes, name, functools.cache(getattr(mazes, name).__wrapped__))
        # TIMES are those of all puzzles.
        patch.setattr(mazes_image, "LEARNT", 60)
        patch.setattr(mazes_image, "CROSSED", 6)
        patch.setattr(mazes_image, "learnt", functools.cache(mazes_image.learnt.__wrapped__))
        done = CliRunner().invoke(command.app, ["usefulness", "--quick", "--only", "mazes,times", "--out", str(folder)])
    assert done.exit_code == 0, done.output
    (path,) = folder.glob("usefulness-partial-*.json")
    return json.loads(path.read_text())


@pytest.mark.nightly
def test_a_quick_run_has_every_contender(written):
    rows = [row for row in written["rows"] if row["metric"] == "MAZES"]
    costs = next(row for row in written["rows"] if row["metric"] == "TIMES")
    assert [row["contender"] for row in rows] == [contender.name for contender in mazes.CONTENDERS]
    for row, contender in zip(rows, mazes.CONTENDERS, strict=True):
        (run,) = row["runs"]
        assert set(run["ways"]) == {way.name for way in contender.ways} or set(run["ways"]) == {"guess"}
        assert ("solvers" in run) == contender.solvers
        if contender.recipe is not None:
            assert run["training"]["seconds"] > 0
            assert costs["seconds"][f"{contender.name} training"]["median"] > 0
            assert costs["peak_memory_bytes"][f"{contender.name} training"] > 0
    judged = {target["claim"]: target["verdict"] for target in written["targets"] if target["id"] == "MAZES"}
    assert len(judged) == len(mazes.PLAN.claims)


@pytest.mark.nightly
def test_tables_and_figure_hold_what_was_measured(written, tmp_path):
    plan = mazes.PLAN.quick()
    console = Console(width=300, record=True, file=io.StringIO())
    rows, timed = ([row for row in written["rows"] if row["metric"] == metric] for metric in ("MAZES", "TIMES"))
    made = [*puzzle_tables.tables(plan, rows), *puzzle_tables.times(timed)]
    for _, _, header, lines in made:
        assert all(len(line) == len(header) for line in lines)
    report.show(written, (), console, lambda run: made)
    shown = console.export_text()
    for text in ("stack of 12", "all but dead ends", "NewtonKrylov", mazes.TIED):
        assert text in shown
    found = puzzle_tables.figure(plan, written, tmp_path)
    assert [(tmp_path / name).stat().st_size > 1000 for name, _ in found] == [True]


@pytest.mark.nightly
def test_a_training_that_ends_with_an_error_is_told_and_stops_no_other(monkeypatch):
    quick = mazes.PLAN.quick()
    claim = dataclasses.replace(quick.claims[0], set=quick.sets[0])
    plan = dataclasses.replace(quick, seeds=(0, 1), claims=(claim,))
    sound = contenders.train

    def singular(task, model, recipe, seed):
        if seed == 1:
            raise torch.linalg.LinAlgError("the matrix is singular")
        return sound(task, model, recipe, seed)

    monkeypatch.setattr(contenders, "train", singular)
    tied, stack = (next(c for c in plan.contenders if c.name == name) for name in (mazes.TIED, "stack of 12"))
    entries = [contenders.Entry(plan, contender) for contender in (tied, stack)]
    rows = suite.run(entries, repeats=1, max_seconds=0.1, progress=lambda row: None)
    for row in rows:
        assert [run["seed"] for run in row["runs"]] == [0]
        assert row["error"] == "not trained: from seed 1 (_LinAlgError: the matrix is singular)"
    assert rows[0]["ratios"] == {claim.ratio: None}
    (told,) = report.refusals({"rows": rows})
    assert "2 rows" in told
    monkeypatch.setattr(contenders, "train", lambda *given: singular(*given[:3], 1))
    (row,) = suite.run(entries[:1], repeats=1, max_seconds=0.1, progress=lambda row: None)
    assert puzzle_tables.tables(plan, [row])[0].lines == []


def test_tables_give_the_mean_and_spread_of_the_seeds():
    assert puzzle_tables.percent([0.5, 0.7]) == "60.0 +- 14.1"
    assert puzzle_tables.percent([]) == "-"


def test_the_newest_run_of_each_metric_is_reported(tmp_path):
    def run(stamp, metrics, quick=False):
        return {
            **{"suite": "usefulness", "finished": f"2030-01-0{stamp}T00:00:00+00:00", "quick": quick},
            **{"complete": False, "environment": {"device": "cpu"}, "options": {"metrics": metrics}},
            "rows": [{"metric": metric, "stamp": stamp} for metric in metrics],
            "targets": [{"id": metric} for metric in metrics],
        }

    for stamp, metrics, quick in ((1, ["A", "B"], False), (2, ["B"], False), (3, ["A", "B"], True)):
        report.write(run(stamp, metrics, quick), tmp_path)
    found = report.newest_by_metric("usefulness", ("A", "B", "C"), tmp_path)
    assert [(each["options"]["metrics"], [row["stamp"] for row in each["rows"]]) for _, each in found] == [
        (["A"], [1]),
        (["B"], [2]),
    ]
    assert [[target["id"] for target in each["targets"]] for _, each in found] == [["A"], ["B"]]


@pytest.mark.nightly
def test_what_is_run_side_by_side_is_what_one_process_finds(monkeypatch):
    plan = dataclasses.replace(mazes.PLAN.quick(), contenders=mazes.CONTENDERS[-1:])
    jobs = [(plan, contender, 0) for contender in plan.contenders]
    monkeypatch.setattr(suite, "WORTH_A_PROCESS", 0)
    monkeypatch.setattr(suite, "WORKERS", 1)
    (found,) = list(suite._trials(jobs))
    alone = contenders.trial(*jobs[0])
    assert found["ways"] == alone["ways"]


@pytest.mark.slow
def test_what_is_kept_is_not_trained_again(monkeypatch, tmp_path):
    plan = mazes.PLAN.quick()
    entries = [contenders.Entry(plan, c) for c in plan.contenders if c.name in ("stack of 12", "no cell")]
    options = {"repeats": 1, "max_seconds": 0.1, "progress": lambda row: None, "keep": tmp_path}
    first = suite.run(entries, **options)
    assert len(list(tmp_path.glob("mazes-*-0.json"))) == 2
    monkeypatch.setattr(suite, "trial", None)
    assert json.dumps(suite.run(entries, **options)) == json.dumps(first)
    monkeypatch.undo()
    # Another number of puzzles is another question.
    other = [dataclasses.replace(entry, plan=dataclasses.replace(plan, puzzles=4)) for entry in entries]
    assert {row["puzzles"] for row in suite.run(other, **options)} == {4}
    assert json.dumps(suite.run(other, **options)) != json.dumps(first)

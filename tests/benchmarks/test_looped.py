"""LOOPED of the suite `usefulness`: repeated layers beside stacks and counts, and decoding with one slot or many."""

import dataclasses
import math
import shutil

import pytest
import torch

from benchmarks import report, usefulness
from benchmarks.looped import data, guide, suite, tables, training
from benchmarks.looped.models import Contender, OneSlot, Reader, Slots
from benchmarks.looped.suite import SAME_FLOPS, SAME_PARAMETERS, TIED
from benchmarks.looped.training import Plan
from benchmarks.useful_tables import verdict
from benchmarks.useful_tasks import Examples, drawn_windows, help_texts, windows
from implicit_attention import Picard
from implicit_attention.layers import Exit

QUICK = dataclasses.replace(Plan().quick(), updates=2, seeds=(0, 1))


def reader_of(contender, seed=0):
    torch.manual_seed(seed)
    return Reader(contender, len(help_texts().alphabet)).eval()


@pytest.fixture
def written():
    return help_texts().test[None, :6]


@pytest.fixture(scope="module")
def rows():
    trained = [suite.trained_row(suite.Trained(one, QUICK)) for one in suite.CONTENDERS]
    decoding = suite.decoding_row(suite.Decoding(QUICK), repeats=1, max_seconds=0.01)
    return [*trained, suite.counted_row(suite.Counted(QUICK)), decoding]


# ------------------------------------------------------------------ what is compared


def test_contenders_are_equal_in_what_they_are_compared_by():
    tied, flops, parameters = (
        sum(p.numel() for p in reader_of(one).parameters()) for one in (TIED, SAME_FLOPS, SAME_PARAMETERS)
    )
    assert tied == parameters < flops / 3
    assert training.flops(TIED, 4) == training.flops(SAME_FLOPS, 1)
    assert training.flops(TIED, 1) == training.flops(SAME_PARAMETERS, 1)


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
def test_a_slot_for_every_step_decodes_what_the_loop_reads(written, steps):
    reader = reader_of(TIED)
    decoder = Slots(reader, 6, steps)
    found = torch.cat([decoder(written[:, i : i + 1]) for i in range(6)], dim=1)
    torch.testing.assert_close(found, reader(written, steps=steps), rtol=1e-4, atol=1e-5)
    assert decoder.num_bytes == steps * 2 * 2 * 6 * 96 * 4  # layers, keys and values


@torch.no_grad()
def test_a_stack_decodes_what_it_reads(written):
    reader = reader_of(SAME_FLOPS)
    decoder = Slots(reader, 6)
    found = torch.cat([decoder(written[:, i : i + 1]) for i in range(6)], dim=1)
    torch.testing.assert_close(found, reader(written), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_slot_has_the_bytes_of_one_step_and_reads_the_same_once_all_have_settled(written):
    reader, count = reader_of(TIED), 40
    endless = Picard(rtol=0, atol=0, max_steps=count + 1)
    one, every = OneSlot(reader, solver=endless, exit=Exit(evaluations=count)), Slots(reader, 6, count)
    found, beside = (torch.cat([d(written[:, i : i + 1]) for i in range(6)], dim=1) for d in (one, every))
    torch.testing.assert_close(found, beside, rtol=1e-3, atol=1e-4)
    assert every.num_bytes == count * one.num_bytes
    assert (one.cache.num_evals == count).all()


# ------------------------------------------------------------------ counts


def by_hand(train, window, targets, context, size):
    """Witten and Bell's interpolation for one window, by dictionaries."""
    text, bits = list(train), 0.0
    for place, target in enumerate(targets):
        before, likely = window[: place + 1], 1 / size
        for length in range(min(context, len(before)) + 1):
            held = before[len(before) - length :]
            follow = [text[i + length] for i in range(len(text) - length) if text[i : i + length] == held]
            if follow:
                kinds = len(set(follow))
                likely = (follow.count(target) + kinds * likely) / (len(follow) + kinds)
        bits -= math.log2(likely)
    return bits / len(targets)


@pytest.mark.parametrize("context", [0, 1, 3])
def test_counts_are_those_of_a_count_by_hand(context):
    codes = torch.randint(4, (60,), generator=torch.Generator().manual_seed(0))
    train, window = codes[:50], codes[50:]
    model = data.Counts(train, 5, context)
    found = model.bits(Examples(window[None, :-1], window[None, 1:]))
    assert found == pytest.approx(by_hand(train.tolist(), window[:-1].tolist(), window[1:].tolist(), context, 5))


def test_probabilities_of_counts_sum_to_one():
    model, inputs = data.Counts(torch.tensor([0, 1, 2, 0, 1, 0]), 3, 2), torch.tensor([[0, 1]])
    single = [model.bits(Examples(inputs, torch.tensor([[1, c]]))) for c in range(3)]
    # The first target is always 1: its bits are known from a window of it alone.
    first = model.bits(Examples(inputs[:, :1], torch.tensor([[1]])))
    assert sum(2 ** -(2 * each - first) for each in single) == pytest.approx(1)


def test_windows_do_not_overlap_and_targets_follow():
    given = help_texts()
    inputs, targets = windows(given.test, data.LENGTH, None)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert len(windows(given.test, data.LENGTH, 7).inputs) == 7
    assert len(given.train) + len(given.validation) + len(given.test) == data.described(4)["characters"]


# ------------------------------------------------------------------ training, and what is asked


@torch.no_grad()
def test_the_loss_asks_for_rest_late_in_the_training(monkeypatch):
    reader, batch = reader_of(TIED), drawn_windows(help_texts().train, data.LENGTH, 2, torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch, "randint", lambda *given: torch.tensor(1))
    early, middle, late = (float(training.loss(reader, batch, done)) for done in (0.5, 0.625, 1.0))
    x = reader.embed(batch.inputs)
    before, z = (reader.body(x, steps=steps) for steps in (2, 3))
    change = float(((z - before).norm(dim=-1) / z.norm(dim=-1)).mean())
    assert late - early == pytest.approx(training.REST * change, rel=1e-3)
    assert middle - early == pytest.approx(training.REST * change / 2, rel=1e-3)


def test_a_training_that_is_kept_is_not_repeated(tmp_path, monkeypatch):
    given = (SAME_PARAMETERS, QUICK, 0, "post", 4e-3)
    first, seconds = training.kept(tmp_path, *given)
    monkeypatch.setattr(training, "trained", lambda *given: pytest.fail("trained"))
    again, told = training.kept(tmp_path, *given)
    assert told == seconds
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


@pytest.mark.slow
def test_every_way_has_its_evidence(rows):
    tied = rows[0]
    assert [run["seed"] for run in tied["runs"]] == [0, 1]
    for way, found in tied["evidence"].items():
        assert 0 < found["bits"] < 20
        assert ("evaluations" in found) != way.startswith("loop")
    asked = tied["evidence"]
    assert asked["exit, 2 evaluations"]["bits"] == pytest.approx(asked["loop, 2"]["bits"], rel=1e-5)
    assert asked["exit, mean 3"]["evaluations"] <= 3
    # Of the windows that are decoded.
    assert asked["decoded, 1"]["bits"] == pytest.approx(asked["decoded, 1"]["every step"], rel=1e-5)
    scores = [run["ways"]["solved, Picard"]["bits"] for run in tied["runs"]]
    assert asked["solved, Picard"]["bits"] == pytest.approx(sum(scores) / 2)


# ------------------------------------------------------------------ tables


@pytest.mark.slow
def test_tables_hold_every_row(rows):
    contenders, exits, slots, chunks, decoding = tables.tables(rows, verdict)
    for table in (contenders, exits, slots, chunks, decoding):
        assert all(len(line) == len(table.header) for line in table.lines)
    names = [line[0] for line in contenders.lines]
    assert {"2 tied layers, 1 step", "2 tied layers, solved, Picard", "stack of 8 layers"} <= set(names)
    assert len(slots.lines) == len(training.DECODED) + 3
    assert [line[0] for line in chunks.lines] == ["at once", *suite.CUT]
    assert chunks.lines[0][2] == " ".join(["1.00"] * len(chunks.lines[0][2].split()))
    assert [line[0] for line in exits.lines if line[0].startswith("mean")] == ["mean 2", "mean 2.5", "mean 3", "mean 4"]
    ratio = {line[0]: line[2] for line in decoding.lines}
    assert ratio["one slot, 16 steps"] == "1"
    assert ratio["a slot for every step, 16 steps"] == "16"
    assert tables.tables([], verdict) == []


def test_the_loop_of_equal_bits_lies_between_two_loops():
    ways = {f"loop, {steps}": {"bits": value} for steps, value in ((1, 3.0), (2, 2.5), (4, 2.4))}
    assert tables.loop_of(ways, 2.75) == 1.5
    assert tables.loop_of(ways, 2.45) == pytest.approx(3)
    assert tables.loop_of(ways, 2.3) is None


def test_the_page_is_that_of_the_newest_run(tmp_path):
    page = tmp_path / guide.PAGE.name
    shutil.copy(guide.PAGE, page)
    guide.rewrite(page)
    assert page.read_text() == guide.PAGE.read_text()
    guide.rewrite(page, tmp_path)
    assert page.read_text().count("Not run yet") == 4


def test_the_suite_runs_it(tmp_path):
    settings = [setting for setting in usefulness.settings_of(True) if setting.metric == suite.METRIC]
    assert [type(setting).__name__ for setting in settings] == ["Trained"] * 3 + ["Counted", "Decoding"]
    full = [setting for setting in usefulness.settings_of(False) if setting.metric == suite.METRIC]
    assert all(setting.plan.seeds == (0, 1, 2) for setting in full)
    assert suite.updates_of([setting for setting in full if isinstance(setting, suite.Trained)]) > 1000
    assert Contender("stack", 3).name == "stack, 3 layers"


def test_what_the_guide_says_is_what_the_committed_run_shows():
    found = report.newest_by_metric("usefulness", (suite.METRIC,))
    if not found:
        pytest.skip("not run yet")
    rows = {row["name"]: row for row in found[0][1]["rows"]}
    tied, deep, wide = (rows[f"looped: {one.name}"] for one in suite.CONTENDERS)
    page = " ".join(guide.PAGE.read_text().split())
    asked = tied["evidence"]
    four = asked["loop, 4"]["bits"]
    eight, two = (row["evidence"]["stack"]["bits"] for row in (deep, wide))
    counts = rows["looped: counts"]["counts"]
    assert counts["best"] == 4
    said = (
        f"reach {eight:.2f} bits, the two repeated ones {four:.2f}",
        f"a stack of two, with the same parameters: {two:.2f} bits",
        f"After 64 steps, or solved, bits are {asked['loop, 64']['bits']:.2f}, as after 4",
        f"`Picard` settles {100 * asked['solved, Picard']['settled']:.0f} % of them",
        f"Relative steps of .3 take {asked['exit, change 0.3']['evaluations']:.1f} evaluations",
        f"Counts of four characters reach {counts['bits']['4']:.2f} bits",
    )
    assert [each for each in said if each not in page] == []
    assert eight < four < two
    assert asked["exit, mean 3"]["bits"] == pytest.approx(asked["loop, 3"]["bits"], abs=0.005)

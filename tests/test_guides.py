"""The guides say what the library says, and what the committed runs show."""

import ast
import json
import math
import re
import statistics
import sys
from pathlib import Path

import pytest
import typer
from commands import app as commands

from implicit_attention import Status

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import guides, report, useful_tables  # noqa: E402
from benchmarks.__main__ import app as benchmarks  # noqa: E402

TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text()
CHOICES = (ROOT / "docs" / "choosing.md").read_text()
PACKAGE = ROOT / "implicit_attention"
#: Functions with strings that a user reads, by the positions of these.
TOLD = {"warn": [0], "ConvergenceError": [0], "warn_at": [3], "tell": [2, 3]}
SYMPTOMS = (
    "All outputs are equal",
    "Query weights do not train",
    "NaN",
    "It is slow",
    "The gradient is off",
    "Out of memory",
)


def sections(page, level="###"):
    """Headings and what stands below each, up to the next of the same level or above."""
    parts = re.split(rf"^(#{{2,{len(level)}}}) (.+)$", page, flags=re.MULTILINE)[1:]
    return {name: text for marks, name, text in zip(*(parts[i::3] for i in range(3)), strict=True) if marks == level}


def seen(text):
    """The block that a section begins with."""
    begin = re.match(r"\s*```\n(.*?)\n```", text, re.DOTALL)
    assert begin is not None, text[:60]
    return begin[1]


def literal(node, names):
    """The first words of the message that an expression makes; None if all of it comes from elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if len(node.value.split()) > 2 else None
    if isinstance(node, ast.Name):
        return next((words for found in names.get(node.id, ()) if (words := literal(found, {}))), None)
    if isinstance(node, ast.FormattedValue):
        return literal(node.value, names)
    if isinstance(node, ast.JoinedStr):
        return next((words for part in node.values if (words := literal(part, names))), None)
    if isinstance(node, ast.BinOp):
        return literal(node.left, names) or literal(node.right, names)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "message":
        return next((f"must {words}" for found in node.args[1:2] if (words := literal(found, names))), None)
    return None


def messages(tree):
    """First words of every warning and `ConvergenceError` of a module."""
    for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
        names = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.setdefault(node.targets[0].id, []).append(node.value)
            if isinstance(node, ast.FunctionDef):
                names[node.name] = [n.value for n in ast.walk(node) if isinstance(n, ast.Return)]
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                for place in TOLD.get(name, ()):
                    if len(node.args) > place and (words := literal(node.args[place], names)):
                        yield " ".join(words.split())


def test_every_status_has_a_section_that_begins_with_its_message():
    found = sections(TROUBLES)
    for status in Status:
        pattern = re.escape(status.sentence)
        for place in re.findall(r"\\\{(\w+)(?::[^}]*)?\\\}", pattern):
            number = r"\d+" if place == "steps" else r"\d\.\de[+-]\d\d"
            pattern = re.sub(rf"\\\{{{place}(:[^}}]*)?\\\}}", lambda _, number=number: number, pattern)
        assert re.match(pattern, seen(found[status.name])), status


@pytest.mark.parametrize("name", [*(status.name for status in Status), *SYMPTOMS])
def test_every_section_begins_with_what_is_seen_and_has_code(name):
    text = sections(TROUBLES)[name]
    assert len(seen(text)) > 20
    assert "```python\n" in text
    assert "assert " in text


def test_the_first_words_of_every_message_are_there():
    page, found = " ".join(TROUBLES.split()), {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for words in messages(ast.parse(file.read_text())):
            found.setdefault(words, file.relative_to(ROOT))
    assert len(found) > 12, found
    missing = {words: file for words, file in found.items() if " ".join(words.split(" ")[:4]) not in page}
    assert not missing


def anchor_of(heading):
    """What a link to a heading says, on the site and where the page is read as it is."""
    return re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")


def test_every_question_ends_at_a_leaf_with_something_to_run():
    tree = CHOICES.partition("## The questions")[2].partition("\n## ")[0]
    leaves = {anchor_of(name): text for name, text in sections(CHOICES).items()}
    linked = re.findall(r"\]\(#([\w-]+)\)", tree)
    assert sorted(linked) == sorted(leaves)
    assert not [leaf for leaf, text in leaves.items() if "```python\n" not in text and "```\nimplicit" not in text]
    asked = [line for line in tree.splitlines() if re.match(r"\d\. \*\*.+\?\*\*", line)]
    assert len(asked) == 7
    unanswered = [line for line in re.split(r"^    - ", tree, flags=re.MULTILINE)[1:] if "](#" not in line]
    assert not unanswered


def test_the_links_between_the_guides_lead_somewhere():
    docs = ROOT / "docs"
    for name in ("choosing", "troubleshooting", "performance", "energy_minimization", "recurrent_depth"):
        text = (docs / f"{name}.md").read_text()
        for target in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", text):
            # The site holds what lies in its folder, and the page of the benchmarks.
            assert not target or (docs / target).is_file(), (name, target)
            assert not target.startswith("..") or target == "../benchmarks/README.md", (name, target)
        headings = {anchor_of(found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= headings, name


@pytest.mark.parametrize(
    "page", ["choosing", "troubleshooting", "performance", "energy_minimization", "recurrent_depth"]
)
def test_the_commands_of_the_guides_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for line in re.findall(r"(?:^|`)((?:implicit-attention|python -m benchmarks) [^`\n]*)", text, re.MULTILINE):
        app = benchmarks if line.startswith("python") else commands
        words = line.removeprefix("python -m benchmarks").removeprefix("implicit-attention").split()
        group = typer.main.get_command(app)
        command = group.commands[words[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_pages_are_those_of_the_newest_runs(tmp_path):
    copies = {}
    for number, page in enumerate((guides.COSTS, guides.STEPS, guides.README, report.README)):
        copies[page] = tmp_path / f"{number}.md"
        copies[page].write_text(page.read_text())
    guides.rewrite(*copies.values())
    for page, copy in copies.items():
        assert copy.read_text() == page.read_text(), page.name
    guides.rewrite(*copies.values(), folder=tmp_path)
    told = [
        copy.read_text().count("Not run yet") - page.read_text().count("Not run yet") for page, copy in copies.items()
    ]
    assert told == [len(guides.PARTS), 1, 1, len(guides.KERNELS)]


def test_the_short_tables_hold_the_numbers_of_the_runs():
    page = guides.COSTS.read_text()
    runs = {suite: run["rows"] for suite, (_, run) in guides.newest().items()}
    long = [row["ratios"] for row in runs["attention"] if row["metric"] == "LENGTH" and row["shape"]["length"] == 4096]
    told = "/".join(f"{ratios['ours']:.1f}" for ratios in long)
    assert f"| 4096 | {told} |" in page
    (layer, *_) = (row["ratios"] for row in runs["native"] if row["metric"] == "LAYER")
    told = " | ".join(f"{layer[name]:.2f}" for name in ("explicit", "solve", "training"))
    assert f"| layer, H 1, N = M = 8, width 16 | {told} |" in page
    blocks = [row for row in runs["train"] if row["metric"] == "EQUILIBRIUM"]
    told = [f"{row['ratios']['ours / torchdeq']:.2f} | {row['ratios']['ours / by hand']:.2f} |" for row in blocks]
    assert all(cells in page for cells in told)
    assert len(blocks) == len(re.findall(r"^\| (?:block|convolution), B ", page, re.MULTILINE))


def test_the_five_lines_are_what_the_runs_hold():
    runs = {suite: json.loads(path.read_text()) for suite, (path, _) in guides.newest().items()}
    rows = [row for row in runs["solve"]["rows"] if row.get("evidence")]

    def told(ours, theirs):
        logs = [math.log(row["seconds"][ours]["median"] / row["seconds"][theirs]["median"]) for row in rows]
        return f"{math.exp(sum(logs) / len(logs)):.1f} ({math.exp(min(logs)):.1f} to {math.exp(max(logs)):.1f}) x"

    forward, training, memory, torchdeq, never = guides.five_lines()
    assert told("ours_forward", "sdpa_forward") in forward
    assert told("ours_training", "sdpa_training") in training
    evaluations = [row["evidence"]["ours_forward"]["evaluations_mean"] for row in rows]
    assert f"{sum(evaluations) / len(evaluations):.1f} evaluations" in forward
    judged = [target for run in runs.values() for target in run["targets"]]
    of = {target["claim"]: target["measured"] for target in judged if target["rows"]}
    peak = of["peak memory of a training step at N = M = 4096 above its inputs / SDPA's"]
    assert f"4096 keys: {peak:.2f} x" in memory
    llama = of["converted Llama, anchor .9, 1024 tokens: training step / torch's attention"]
    assert f"anchor .9 {llama:.2f} x" in training
    names = ("Anderson", "fixed-point iteration")
    rivals = [of[f"torchdeq's {name} / ours, forward, a row per query"] for name in names]
    assert f"{rivals[0]:.0f} x (Anderson) and {rivals[1]:.1f} x" in torchdeq
    assert all(name in never for name in ("G1", "G2", "G3", "G4", "G5", "G6", "BLOCK"))


def test_what_was_measured_on_a_card_is_no_longer_said_to_be_unknown(tmp_path):
    for path, run in guides.newest().values():
        (tmp_path / path.name).write_text(json.dumps(run))
    first = {"part": "run", "name": "run", "began": 0.0, "dry": False, "environment": {"device": "cuda"}}
    about = {"device": "cuda", "shape": {"dim": 64}}
    rows = [{"part": "targets", "name": name, "ratios": {name: 1.0}, **about} for name in ("G1", "G5")]
    (tmp_path / "card-1.jsonl").write_text("\n".join(map(json.dumps, [first, *rows])))
    never = guides.five_lines(tmp_path)[-1]
    assert "the targets of a GPU (G2, G3, G4, G6, BLOCK)" in never


def test_a_contender_that_was_compiled_while_it_was_timed_is_left_out(tmp_path):
    def row(length, ours, turns):
        seconds = {"ours_forward": {"turns": turns}, "picard": {"turns": 3}}
        ratios = {"ours": ours, "Picard": 20.0}
        return {
            "metric": "LENGTH",
            "dtype": "float32",
            "shape": {"length": length},
            "ratios": ratios,
            "seconds": seconds,
        }

    where = {"device": "cuda", "gpu": {"name": "a card"}}
    run = {"suite": "attention", "finished": "now", "quick": False, "options": {"metrics": ["LENGTH"]}, "targets": []}
    assert guides.on_a_card(tmp_path) == []
    rows = [row(1024, 5000.0, 1), row(2048, 4.0, 3), row(4096, 9.0, 3)]
    rows += [{**each, "dtype": "bfloat16"} for each in rows]
    (tmp_path / "attention-1.json").write_text(json.dumps({**run, "environment": where, "rows": rows}))
    (told,) = guides.on_a_card(tmp_path)
    assert "on one a card" in told
    assert "float32, N = M from 1024 to 4096: ours 6.0 (4.0 to 9.0), Picard 20.0 (20.0 to 20.0); bfloat16" in told
    assert "5000" not in told


def test_no_equilibrium_over_fixed_keys_is_better_in_the_committed_runs():
    for metric in ("DIGITS", "RETRIEVAL", "TEXT"):
        (_, run), *_ = report.newest_by_metric("usefulness", (metric,))
        rows = {row["model"]["name"]: row for row in run["rows"] if "model" in row}
        settled = [row for name, row in rows.items() if name.startswith("equilibrium")]
        assert len(settled) > 3
        for row in settled:
            for other in guides.MODELS[:2]:
                assert useful_tables.verdict(row, rows[other]) != "better", (metric, row["name"], other)
    (_, run), *_ = report.newest_by_metric("usefulness", ("RETRIEVAL",))
    accuracy = {
        row["model"]["name"]: statistics.mean(r["score"] for r in row["runs"]) for row in run["rows"] if "model" in row
    }
    one, two, settled = (accuracy[name] for name in guides.MODELS)
    assert two > 0.95 > 0.5 > max(one, settled)

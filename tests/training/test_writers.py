"""Writers: what they put down is what was observed, row by row, and a run that goes on goes on in its file."""

import csv
import io
import json
import math

import pytest
from watched_layers import HEADS, ROWS, TOKENS, layer_of, model_of, tokens

from implicit_attention import Picard
from implicit_attention.training import CSVFile, JSONLines, ProgressLine, TensorBoard, watch

SIDE = ("calls", "problems", "mean", "p99", "most", "worst", "failed")
STATUSES = ("MAX_STEPS", "STALLED", "DIVERGED", "NONFINITE", "OUT_OF_RANGE")
COLUMNS = ["step", "layer"]
for way in ("forward", "backward"):
    COLUMNS += [f"{way}_{name}" for name in SIDE] + [f"{way}_failed_{status}" for status in STATUSES]
COLUMNS += ["backward_lost", "anchor", "beta", "spectral_radius"]


def looks(count=2, model=None, backward=True):
    """What was observed in some steps."""
    model = model_of(on_failure="ignore", solver=Picard(rtol=1e-5, max_steps=3)) if model is None else model
    with watch(model) as seen:
        found = []
        for step in range(count):
            output = model(tokens(step, scale=2.0))
            if backward:
                output.square().sum().backward()
            found.append(seen.take(10 * step))
        return found


def values(observed):
    """The numbers of an observation by column, read field by field."""
    rows = []
    for seen in (*observed.layers, observed.total):
        row = {"step": observed.step, "layer": seen.layer}
        for way in ("forward", "backward"):
            side = getattr(seen, way)
            row |= {f"{way}_{name}": getattr(side, name) for name in SIDE}
            row |= {f"{way}_failed_{status}": side.failures[status] for status in STATUSES}
        row |= {"backward_lost": seen.backward.lost, "anchor": seen.anchor, "beta": seen.beta}
        rows.append(row | {"spectral_radius": seen.spectral_radius})
    return rows


def same(told, value):
    return told == value or (isinstance(value, float) and math.isnan(value) and math.isnan(float(told)))


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_has_a_head_and_all_rows(tmp_path):
    path, found = tmp_path / "seen.csv", looks()
    writer = CSVFile(path)
    for observed in found:
        writer.write(observed)
    rows, expected = csv_rows(path), [row for observed in found for row in values(observed)]
    assert [list(row) for row in rows] == [COLUMNS] * 6
    for row, told in zip(rows, expected, strict=True):
        for name in COLUMNS:
            kind = type(told[name])
            assert same(kind(row[name]), told[name]), name


def test_a_run_that_is_resumed_goes_on_in_its_file(tmp_path):
    found = looks(3)
    for kind, name in ((CSVFile, "seen.csv"), (JSONLines, "seen.jsonl")):
        whole, parts = tmp_path / f"whole_{name}", tmp_path / f"parts_{name}"
        once = kind(whole)
        for observed in found:
            once.write(observed)
            kind(str(parts)).write(observed)
        assert whole.read_bytes() == parts.read_bytes()
        lines = parts.read_bytes().splitlines()
        assert len(lines) == 3 * 3 + (kind is CSVFile)
        assert all(lines)


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_row_that_a_killed_run_left_unfinished_stays_alone(tmp_path, cut):
    first, second = looks()
    for kind, name in ((CSVFile, "seen.csv"), (JSONLines, "seen.jsonl")):
        path = tmp_path / name
        kind(path).write(first)
        before = path.read_bytes()
        path.write_bytes(before[:-cut])
        kind(path).write(second)
        kind(tmp_path / f"other_{name}").write(second)
        rows = (tmp_path / f"other_{name}").read_bytes().splitlines(keepends=True)[-3:]
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[-3:] == rows
        assert lines[-4].rstrip() == before.splitlines()[-1][: len(lines[-4].rstrip())]


def test_a_file_of_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("step,loss\n1,2.0\n")
    with pytest.raises(ValueError, match=r"`path` must be a file of this writer, got .*other.csv with the columns"):
        CSVFile(path).write(looks(1)[0])
    assert path.read_text() == "step,loss\n1,2.0\n"
    path.write_text("")
    CSVFile(path).write(looks(1)[0])
    assert len(csv_rows(path)) == 3


def test_json_lines_are_strict_json_with_null_for_what_is_no_number(tmp_path):
    path = tmp_path / "seen.jsonl"
    given = tokens()
    given[0, 0] = math.nan
    model = layer_of(on_failure="ignore")
    with watch(model) as seen:
        model(given)
        observed = seen.take(3)
    assert observed.total.forward.worst == math.inf
    JSONLines(path).write(observed)

    def refuse(word):
        raise AssertionError(word)

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    for row, expected in zip(rows, values(observed), strict=True):
        assert list(row) == COLUMNS
        for name, value in expected.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            assert row[name] == (value if finite else None), name
    assert rows[0]["forward_worst"] is None
    assert rows[0]["backward_mean"] is None
    assert rows[0]["forward_problems"] == ROWS * HEADS * TOKENS


class Scalars:
    """A writer of scalars that keeps them."""

    def __init__(self):
        self.added = {}

    def add_scalar(self, name, value, step):
        assert (name, step) not in self.added
        self.added[name, step] = value


def test_scalars_have_the_names_of_layers_and_columns():
    scalars = Scalars()
    found = looks()
    for observed in found:
        TensorBoard(scalars).write(observed)
    expected = {}
    for observed in found:
        for row in values(observed):
            for name in COLUMNS[2:]:
                number = row[name]
                if "_failed_" not in name and not math.isnan(number):
                    expected[f"equilibrium/{row['layer']}/{name}", observed.step] = number
    assert scalars.added == expected
    assert ("equilibrium/1/forward_failed", 10) in scalars.added
    assert not any("spectral" in name for name, _ in scalars.added)


def test_a_model_that_is_the_layer_has_a_name_among_scalars():
    scalars = Scalars()
    TensorBoard(scalars).write(looks(1, layer_of())[0])
    assert {name.split("/")[1] for name, _ in scalars.added} == {"(model)", "all"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(text):
    """The line that a terminal shows after what was written to it."""
    line = ""
    for part in text.split("\r"):
        line = part + line[len(part) :]
    return line


def test_lines_below_each_other_in_a_file_and_over_each_other_in_a_terminal():
    found = looks(12, layer_of(), backward=False)
    # A shorter one after longer ones leaves nothing of them behind.
    found.insert(5, looks(1, backward=True)[0])
    file, terminal = io.StringIO(), Terminal()
    lines, line = ProgressLine(file), ProgressLine(terminal)
    for observed in found:
        lines.write(observed)
        line.write(observed)
        assert shown(terminal.getvalue()).rstrip() == observed.line()
    assert file.getvalue().splitlines() == [observed.line() for observed in found]
    assert "\n" not in terminal.getvalue()


def test_by_default_lines_go_to_where_standard_error_is_now(capsys):
    line = ProgressLine()
    (observed,) = looks(1)
    line.write(observed)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{observed.line()}\n")

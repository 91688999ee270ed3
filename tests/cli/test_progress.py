"""What a log is told while a command works."""

import io
import time

import pytest
from rich.console import Console

from implicit_attention.cli import progress
from implicit_attention.cli.progress import Progress

LINES = "s so far"


def shown(monkeypatch, work, *, quiet=0.1, terminal=False, ago=0.0):
    monkeypatch.setattr(progress, "QUIET", quiet)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
    with Progress(lambda row: row["line"], console) as bar:
        bar.began -= ago
        work(bar)
    return [line for line in console.file.getvalue().splitlines() if LINES in line]


def slow(bar):
    bar.begin("bethe against beta", 3, 7)
    time.sleep(0.35)


def test_a_log_is_told_what_goes_on_every_few_seconds(monkeypatch):
    lines = shown(monkeypatch, slow)
    assert 1 <= len(lines) <= 3
    assert lines[0] == "bethe against beta   3 of 7, 0 s so far"


def test_what_has_no_parts_has_no_count(monkeypatch):
    def work(bar):
        bar.begin("figures")
        time.sleep(0.25)

    assert shown(monkeypatch, work)[0] == "figures              0 s so far"


@pytest.mark.parametrize("options", [{"terminal": True}, {"quiet": 5.0}, {"ago": 100.0}])
def test_a_terminal_a_short_run_and_a_long_one_get_no_line(monkeypatch, options):
    assert shown(monkeypatch, slow, **options) == []


def test_lines_of_finished_methods_put_it_off(monkeypatch):
    def work(bar):
        bar.begin("many short ones")
        for _ in range(60):
            time.sleep(0.02)
            bar.end("short", {"line": "done"})

    assert shown(monkeypatch, work, quiet=1.0) == []


def test_the_thread_ends_with_the_work(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    with pytest.raises(KeyError), Progress(str, Console(file=io.StringIO())) as bar:
        raise KeyError
    assert not bar.teller.is_alive()

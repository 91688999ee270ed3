"""The command line as a user has it: the console script that the package declares."""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner


def script() -> Any:
    """What `implicit-attention` calls."""
    return next(iter(entry_points(group="console_scripts", name="implicit-attention"))).load()


app = script()


def invoke(*arguments: Any, **environment: Any) -> Result:
    """The result of a command; with FORCE_COLOR it writes to a terminal of COLUMNS and LINES."""
    env = {"COLUMNS": "120", **{name: str(value) for name, value in environment.items()}}
    return CliRunner().invoke(app, [*map(str, arguments)], env=env)


def done(*arguments: Any, **environment: Any) -> Result:
    """The result of a command that succeeds."""
    result = invoke(*arguments, **environment)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: Any, parts: list[str] | tuple[str, ...] | str) -> None:
    """A command ends with code 2, nothing printed and one line that has these parts."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.exception or result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.isprintable()
    assert len(line) < 1000
    for part in [parts] if isinstance(parts, str) else parts:
        assert part in line


def strict(path: Path) -> Any:
    """The content of a JSON file, which has no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def by_method(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a file by their methods."""
    return {row["method"]: row for row in content["rows"]}

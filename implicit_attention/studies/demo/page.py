"""The page of `demo`: one file with its pictures inside, which needs no script and loads nothing."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from .experiment import Experiment

FOLDER = Path(__file__).parent
#: The style that pages share.
STYLE = FOLDER.parent / "page.css"


def page(parts: Sequence[Experiment], pictures: Mapping[str, bytes], commands: Mapping[str, str], made: str) -> str:
    """Return the HTML of all parts.

    Args:
        parts: in their order.
        pictures: the bytes of files, by the names of the parts.
        commands: what each does, to go on with.
        made: the time, the versions and the machine, in words.
    """
    sections = [_section(part, pictures[part.name]) for part in parts]
    further = (f"<dt><code>{escape(name)}</code></dt><dd>{escape(text)}</dd>" for name, text in commands.items())
    return _template("page.html").substitute(
        style="\n" + STYLE.read_text(encoding="utf-8"),
        parts="\n".join(sections),
        commands="\n".join(further),
        made=escape(made),
    )


def _section(part: Experiment, picture: bytes) -> str:
    name, *others = ('<th scope="col">' + escape(header) + "</th>" for header in part.headers)
    rows = (
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in part.rows
    )
    return _template("section.html").substitute(
        {key: escape(getattr(part, key)) for key in ("name", "title", "text", "ending", "description", "code")},
        data=base64.b64encode(picture).decode(),
        headers=name + "".join(others),
        rows="\n".join(rows),
        notes="\n".join(f"<li>{escape(note)}</li>" for note in part.notes),
        further=", ".join(f"<code>{escape(command)}</code>" for command in part.further),
    )


def _template(name: str) -> Template:
    return Template((FOLDER / name).read_text(encoding="utf-8"))

"""The page of `landscape`: one file with its pictures inside, which needs no script and loads nothing."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from .plane import Plane, PlaneScene, number, points

#: The script of the part that a reader can touch, in a file of its own, so that tests can run it alone.
SCRIPT = Path(__file__).with_name("landscape.js")
#: The scene of this part, and the number of patterns up to which it can be touched.
TOUCHED, MOST_TOUCHED = "anchor-0.3", 40

#: Above this width in pixels a picture keeps its size, and is scrolled from side to side in the page.
WIDE = 1000


def _text(name: str) -> str:
    """Read the text of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def page(plane: Plane, scenes: Sequence[PlaneScene], pictures: Mapping[str, bytes]) -> str:
    """Return the HTML of all scenes; `pictures` are PNG files by the names of the scenes."""
    contents = "\n".join(f'<li><a href="#{escape(scene.name)}">{escape(scene.title)}</a></li>' for scene in scenes)
    touched = next((scene for scene in scenes if scene.name == TOUCHED and len(plane.patterns) <= MOST_TOUCHED), None)
    return Template(_text("page.html")).substitute(
        style="\n" + _text("page.css"),
        patterns=number(len(plane.patterns), "stored pattern"),
        places=points(plane.patterns),
        contents=contents,
        scenes="\n".join(_section(scene, pictures[scene.name], plane, scene is touched) for scene in scenes),
        script="" if touched is None else _script(plane, touched),
    )


def _section(scene: PlaneScene, picture: bytes, plane: Plane, touched: bool) -> str:
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in scene.facts.items()
    )
    # A PNG begins with eight bytes, the length and the name of its first part, width and height.
    width, height = struct.unpack(">II", picture[16:24])
    wide = f' class="wide" role="region" aria-label="{escape(scene.title)}" tabindex="0"' if width > WIDE else ""
    return Template(_text("scene.html")).substitute(
        {name: escape(getattr(scene, name)) for name in ("name", "title", "sentence", "description")},
        shape=wide,
        width=width,
        height=height,
        data=base64.b64encode(picture).decode(),
        rows="\n".join(rows),
        touch=_touch(plane.reach) if touched else "",
    )


def _touch(reach: float) -> str:
    lengths = {"reach": reach, "side": 2 * reach, "thin": reach / 80, "thick": reach / 50, "arm": reach / 25}
    # Without a script this part stays hidden, below the still picture.
    return Template(_text("touch.html")).substitute({name: f"{length:.6g}" for name, length in lengths.items()})


def _script(plane: Plane, scene: PlaneScene) -> str:
    """Return the script and its problem. JSON of numbers alone cannot end a script."""
    problem = {
        "keys": plane.patterns.tolist(),
        "query": scene.numbers["query"].tolist(),
        "beta": scene.numbers["beta"],
        "anchor": scene.numbers["anchor"],
        "reach": plane.reach,
    }
    start = f'<script type="application/json" id="touch-problem">{json.dumps(problem)}</script>'
    return f"{start}\n<script>\n{SCRIPT.read_text(encoding='utf-8')}</script>"

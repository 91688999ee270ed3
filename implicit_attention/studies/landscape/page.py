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

#: The scripts of the part that a reader can touch, in files of their own: what is computed, and what is shown.
SCRIPTS = tuple(Path(__file__).with_name(name) for name in ("landscape.js", "touch.js"))
#: The style that pages share; this one has more in a file of its own.
STYLE = Path(__file__).parents[1] / "page.css"
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
        style="\n" + STYLE.read_text(encoding="utf-8") + _text("page.css"),
        patterns=number(len(plane.patterns), "stored pattern"),
        places=points(plane.patterns),
        number=number(len(scenes), "scene").capitalize(),
        contents=contents,
        touch="" if touched is None else _touch(plane, touched),
        scenes="\n".join(_section(scene, pictures[scene.name]) for scene in scenes),
    )


def _section(scene: PlaneScene, picture: bytes) -> str:
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
    )


def _touch(plane: Plane, scene: PlaneScene) -> str:
    """Return the part to touch with its problem and its script, which begins before the pictures below are read."""
    problem = {
        "keys": plane.patterns.tolist(),
        "query": scene.numbers["query"].tolist(),
        "beta": scene.numbers["beta"],
        "anchor": scene.numbers["anchor"],
        "reach": plane.reach,
    }
    reach, arm = plane.reach, f"{plane.reach / 25:.6g}"
    lengths = {"reach": reach, "side": 2 * reach, "thin": reach / 90, "thick": reach / 50}
    lengths |= {"wide": reach / 30, "dot": reach / 36}
    # Without a script this part stays hidden. JSON of numbers alone cannot end a script.
    return Template(_text("touch.html")).substitute(
        {name: f"{length:.6g}" for name, length in lengths.items()},
        cross=f"M-{arm} -{arm}L{arm} {arm}M-{arm} {arm}L{arm} -{arm}",
        problem=json.dumps(problem),
        script="\n".join(file.read_text(encoding="utf-8") for file in SCRIPTS),
    )

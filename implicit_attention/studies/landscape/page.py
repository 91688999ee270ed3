"""The page of `landscape`: one file that needs no script and loads nothing, with its pictures inside."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from .plane import Plane, PlaneScene, number, points

#: The part of the page that a reader can touch; beside this file, so that tests can run it alone.
SCRIPT = Path(__file__).with_name("landscape.js")
#: The scene that it belongs to, and the number of patterns up to which it can be touched.
TOUCHED, MOST_TOUCHED = "anchor-0.3", 40

#: Pixels from which on a picture keeps its size, and is moved from side to side in the page.
WIDE = 1000

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1b2733; --soft: #5a6875; --line: #d5dde3; --link: #0067a3; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #12181f; --text: #e6ecf1; --soft: #a3b1bd; --line: #34424e; --link: #7cc4f0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 42rem; background: var(--ground); color: var(--text);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1, h2 { line-height: 1.25; }
h2 { margin: 3rem 0 .5rem; }
a { color: var(--link); }
.soft, figcaption { color: var(--soft); }
figure { margin: 1rem 0; }
img { display: block; max-width: 100%; height: auto; margin: auto; background: #fff; border-radius: .4rem; }
.wide { overflow-x: auto; }
.wide img { max-width: none; }
.numbers { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
th { width: 34%; min-width: 7rem; font-weight: 600; }
code { overflow-wrap: anywhere; }
nav ol { columns: 2 15rem; column-gap: 3rem; padding-left: 1.5rem; }
#touch { max-width: 30rem; }
#touch .plane { position: relative; aspect-ratio: 1; border: 1px solid var(--line); }
#touch canvas, #touch svg { position: absolute; inset: 0; width: 100%; height: 100%; }
#touch circle { cursor: grab; touch-action: none; stroke: #000; stroke-width: 1.5px;
  vector-effect: non-scaling-stroke; }
#touch circle:focus-visible { outline: 3px solid #e69f00; outline-offset: 2px; }
#touch .key { fill: #fff; }
#touch .query { fill: #e69f00; }
#touch .way { fill: none; stroke: #d55e00; }
#touch label { display: block; }
#touch input { width: 100%; }
"""

DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Energies of attention in the plane</title>
<style>$style</style>
</head>
<body>
<header>
<h1>Energies of attention in the plane</h1>
<p>Softmax attention is one step down an energy. This page shows the energy of $patterns in the plane, at $places, where
steps lead, and what changes with temperature, anchor and potential.</p>
<p><code>E(z) = |z|² / 2 − anchor ⟨x, z⟩ − (1 − anchor) Φ(z)</code>, and for softmax attention
<code>Φ(z) = (1 / β) log Σⱼ exp(β ⟨kⱼ, z⟩)</code>. A gradient step of size 1 goes to
<code>anchor x + (1 − anchor) softmax(β z Kᵀ) K</code>.</p>
</header>
<nav aria-label="Scenes">
<ol>
$contents
</ol>
</nav>
<main>
$scenes
</main>
<footer><p class="soft">Made by <code>implicit-attention landscape --html</code>; every number is in
<code>landscape.json</code>.</p></footer>
$script
</body>
</html>
""")

#: The scene that a reader can touch. Without a script it stays hidden, and the still picture above it is all there is.
TOUCH = Template("""<figure id="touch" hidden>
<figcaption>Drag the orange query and the white patterns, or move them by arrow keys: the line shows plain steps, the
cross where they end.</figcaption>
<div class="plane">
<canvas data-part="ground" aria-hidden="true"></canvas>
<svg data-part="points" viewBox="-$reach -$reach $side $side" role="group" aria-label="Query and stored patterns">
<polyline data-part="path" class="way" stroke-width="$thin"/>
<path data-part="end" class="way" stroke-width="$thick" d="M-$arm -${arm}L$arm ${arm}M-$arm ${arm}L$arm -$arm"/>
</svg>
</div>
<label>beta <span data-part="beta-value"></span>
<input data-part="beta" type="range" min="-2" max="1" step="0.02" value="0"></label>
<label>anchor <span data-part="anchor-value"></span>
<input data-part="anchor" type="range" min="0" max="1" step="0.01"></label>
<p data-part="said" role="status"></p>
</figure>
""")

SECTION = Template("""<section id="$name">
<h2>$title</h2>
<p>$sentence</p>
<figure$shape>
<img width="$width" height="$height" src="data:image/png;base64,$data" alt="$description">
</figure>
$touch<div class="numbers" role="region" aria-label="Numbers of: $title" tabindex="0">
<table>
$rows
</table>
</div>
</section>""")


def page(plane: Plane, scenes: Sequence[PlaneScene], pictures: Mapping[str, bytes]) -> str:
    """The HTML of all scenes; `pictures` are PNG files by the names of the scenes."""
    contents = "\n".join(f'<li><a href="#{escape(scene.name)}">{escape(scene.title)}</a></li>' for scene in scenes)
    touched = next((scene for scene in scenes if scene.name == TOUCHED and len(plane.patterns) <= MOST_TOUCHED), None)
    return DOCUMENT.substitute(
        style=STYLE,
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
    return SECTION.substitute(
        shape=wide,
        width=width,
        height=height,
        name=escape(scene.name),
        title=escape(scene.title),
        sentence=escape(scene.sentence),
        description=escape(scene.description),
        data=base64.b64encode(picture).decode(),
        rows="\n".join(rows),
        touch=_touch(plane.reach) if touched else "",
    )


def _touch(reach: float) -> str:
    lengths = {"reach": reach, "side": 2 * reach, "thin": reach / 80, "thick": reach / 50, "arm": reach / 25}
    return TOUCH.substitute({name: f"{length:.6g}" for name, length in lengths.items()})


def _script(plane: Plane, scene: PlaneScene) -> str:
    """The script and what it starts from. JSON of numbers alone cannot end a script."""
    problem = {
        "keys": plane.patterns.tolist(),
        "query": scene.numbers["query"].tolist(),
        "beta": scene.numbers["beta"],
        "anchor": scene.numbers["anchor"],
        "reach": plane.reach,
    }
    source = SCRIPT.read_text(encoding="utf-8")
    start = f'<script type="application/json" id="touch-problem">{json.dumps(problem)}</script>'
    return f"{start}\n<script>\n{source}</script>"

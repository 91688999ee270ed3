import base64
import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve
from implicit_attention.cli import main
from implicit_attention.cli.landscape import Landscape
from implicit_attention.studies.landscape import SCENES
from implicit_attention.studies.landscape import page as landscape_page
from implicit_attention.studies.landscape.plane import PlaneScene

NODE = shutil.which("node")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
#: The beginning of a picture of 640 x 480.
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x02\x80\0\0\x01\xe0"
#: Elements without an end.
VOID = {"meta", "img", "input", "link", "br", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, the text, and whether every element is closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.text.append(data)

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def made(out, *options):
    result = CliRunner().invoke(main.app, ["landscape", "--html", "--out", str(out), *map(str, options)])
    assert result.exit_code == 0, result.output
    return (out / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return made(tmp_path_factory.mktemp("page"), "--quick")


def check(text, scenes):
    """What a page has to have, whatever it shows."""
    page = Page(text)
    pictures = page.all("img")
    assert len(pictures) == scenes
    for picture in pictures:
        assert len(picture["alt"]) > 80
        kind, data = picture["src"].split(",", 1)
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            assert image.format == "PNG"
            assert (str(image.width), str(image.height)) == (picture["width"], picture["height"])
    assert len({picture["alt"] for picture in pictures}) == scenes
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base"), tag
        assert tag != "script" or "src" not in attributes
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes[name][:80])
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\s\"')]*", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not a place
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in page.all("a")} <= set(ids)
    return page


def test_the_page_of_all_scenes_is_one_file_with_every_picture_and_number(tmp_path):
    page = check(made(tmp_path), len(SCENES))
    assert len(SCENES) >= 12
    content = json.loads((tmp_path / "landscape.json").read_text())
    shown = "".join(page.text)
    assert len(page.all("section")) == len(content["scenes"])
    for name, scene in content["scenes"].items():
        assert scene["sentence"] in shown
        assert scene["description"] in {picture["alt"] for picture in page.all("img")}
        assert {"href": f"#{name}"} in page.all("a")
        assert (tmp_path / scene["picture"]).is_file()
    assert (tmp_path / "index.html").stat().st_size < 2**21


def test_a_quick_page_has_four_scenes(quick):
    check(quick, 4)


def test_the_page_reads_on_a_phone_and_in_the_dark(quick):
    page = Page(quick)
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("html") == [{"lang": "en"}]
    assert "@media (prefers-color-scheme: dark)" in quick
    assert "color-scheme: light dark" in quick


def test_without_a_script_nothing_is_missing_but_the_scene_to_touch(quick):
    page = Page(quick)
    hidden = [attributes for _, attributes in page.tags if "hidden" in attributes]
    assert [attributes["id"] for attributes in hidden] == ["touch"]
    shown = Page(re.sub(r"<script.*?</script>", "", quick, flags=re.DOTALL))
    assert shown.all("img") == page.all("img")
    assert "".join(shown.text).split() == "".join(page.text).split()


def test_names_of_files_and_texts_are_no_markup(tmp_path):
    # Nothing of the page comes from the user but numbers; a scene with such words would show them.
    plane = Landscape().plane
    scene = PlaneScene("a", "<b>", "1 < 2 & 3", 'a "quoted" <i>', {"<u>": "&amp;"}, {}, lambda: None)
    page = Page(landscape_page.page(plane, [scene], {"a": PNG}))
    assert page.all("img")[0]["alt"] == 'a "quoted" <i>'
    assert {"b", "i", "u"}.isdisjoint(tag for tag, _ in page.tags)
    assert "1 < 2 & 3" in page.text
    assert "&amp;" in page.text


def test_many_patterns_are_drawn_and_not_touched(tmp_path):
    numbers = {"query": torch.zeros(2), "beta": 1.0, "anchor": 0.3}
    scene = PlaneScene(landscape_page.TOUCHED, "title", "sentence.", "description", {}, numbers, lambda: None)
    for count in (landscape_page.MOST_TOUCHED, landscape_page.MOST_TOUCHED + 1):
        np.save(tmp_path / "many.npy", draw(count, 0).numpy())
        plane = Landscape(patterns=tmp_path / "many.npy").plane
        page = Page(landscape_page.page(plane, [scene], {scene.name: PNG}))
        touched = count == landscape_page.MOST_TOUCHED
        assert len(page.all("script")) == 2 * touched
        assert ("touch" in {attributes.get("id") for _, attributes in page.tags}) == touched
        assert f"{count} stored patterns" in "".join(page.text)


# ------------------------------------------------------------------ the script


def in_node(program, **values):
    """What `program` returns, in which `code` is the script's text and `given` the values."""
    values["code"] = landscape_page.SCRIPT.read_text()
    source = f"const given = {json.dumps(values)}; const code = given.code;\n"
    source += f"console.log(JSON.stringify((() => {{ {program} }})()));"
    found = subprocess.run([NODE, "-"], input=source, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64)


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_script_finds_the_equilibria_of_the_library():
    problems = []
    for seed, (count, beta, anchor) in enumerate(
        [(6, 7.0, 0.3), (6, 0.7, 0.0), (3, 2.0, 0.7), (1, 5.0, 0.5), (9, 30.0, 0.05), (6, 2.8, 1.0), (5, 1e-2, 0.0)]
    ):
        keys, query = draw(count, seed), draw(1, 100 + seed)[0]
        problems.append({"keys": keys.tolist(), "query": query.tolist(), "beta": beta, "anchor": anchor})
    program = """
      const { equilibrium, energyOf } = new Function(`${code}; return { equilibrium, energyOf };`)();
      return given.problems.map((problem) => {
        const { value, converged, path } = equilibrium(problem);
        return { value, converged, energy: energyOf(problem, value), start: path[0] };
      });
    """
    for problem, found in zip(problems, in_node(program, problems=problems), strict=True):
        keys, query = (torch.tensor(problem[name], dtype=torch.float64) for name in ("keys", "query"))
        energy = AnchoredEnergy(LogSumExp(keys, problem["beta"]), query[None], problem["anchor"])
        # Of several minima both take the one that plain steps lead to.
        solution = solve(energy, query[None], solver=Picard(max_steps=20000, atol=1e-10, rtol=1e-10))
        value = torch.tensor(found["value"], dtype=torch.float64)
        assert found["converged"]
        assert found["start"] == problem["query"]
        torch.testing.assert_close(value, solution.value[0], atol=1e-6, rtol=0)
        assert found["energy"] == pytest.approx(float(energy.energy(value[None])[0]), abs=1e-9)


#: As little of a browser as the script asks for.
BROWSER_PARTS = """
  const nodes = {};
  const node = (name) => ({
    name, attributes: {}, listeners: {}, children: [], hidden: true, textContent: "", value: "",
    setAttribute(key, value) { this.attributes[key] = String(value); },
    addEventListener(kind, act) { this.listeners[kind] = act; },
    append(child) { this.children.push(child); },
    setPointerCapture(id) { this.held = id; },
    hasPointerCapture(id) { return this.held === id; },
    getBoundingClientRect: () => ({ left: 10, top: 20, width: 200, height: 200 }),
    getContext: () => ({
      createImageData: (w, h) => ({ data: new Uint8ClampedArray(4 * w * h) }),
      putImageData(image) { nodes.image = image; },
    }),
    querySelector: (query) => part(query.match(/data-part="(.*)"/)[1]),
  });
  const part = (name) => (nodes[name] ??= node(name));
  part("touch-problem").textContent = JSON.stringify(given.problem);
  const document = { getElementById: part, createElementNS: (space, name) => node(name) };
  new Function("document", "requestAnimationFrame", code)(document, (act) => act());
"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_dragging_keys_and_sliders_move_the_equilibrium():
    keys, reach = draw(4, 7), 2.0
    problem = {"keys": keys.tolist(), "query": [1.5, 1.5], "beta": 3.0, "anchor": 0.3, "reach": reach}
    program = f"""{BROWSER_PARTS}
      const said = () => part("said").textContent;
      const dots = part("points").children;
      const told = [said()];
      const first = [...nodes.image.data.slice(0, 400)];
      dots[4].listeners.pointermove({{ pointerId: 1, clientX: 60, clientY: 170 }});
      told.push(said());
      dots[4].listeners.pointerdown({{ pointerId: 1 }});
      dots[4].listeners.pointermove({{ pointerId: 1, clientX: 60, clientY: 170 }});
      told.push(said());
      let prevented = 0;
      const press = (key) => dots[0].listeners.keydown({{ key, preventDefault: () => (prevented += 1) }});
      for (const key of ["ArrowUp", "ArrowLeft", "a", "Tab"]) press(key);
      told.push(said());
      part("beta").value = "0.5";
      part("beta").listeners.input();
      told.push(said());
      part("anchor").value = "0.8";
      part("anchor").listeners.input();
      told.push(said());
      const painted = nodes.image.data;
      return {{ told, prevented, hidden: part("touch").hidden, count: dots.length, dots: dots.map((d) => d.attributes),
        changed: first.some((x, i) => x !== painted[i]), levels: new Set(painted).size, end: part("end").attributes,
        path: part("path").attributes.points, beta: part("beta-value").textContent }};
    """
    found = in_node(program, problem=problem)
    assert not found["hidden"]
    assert found["count"] == 5
    moved = keys.clone()
    moved[0] += torch.tensor([-reach / 40, reach / 40])
    dragged = (-1.0, -1.0)
    states = [
        (keys, (1.5, 1.5), 3.0, 0.3),
        (keys, (1.5, 1.5), 3.0, 0.3),  # a pointer that holds nothing
        (keys, dragged, 3.0, 0.3),
        (moved, dragged, 3.0, 0.3),
        (moved, dragged, 3.0 * math.sqrt(10), 0.3),
        (moved, dragged, 3.0 * math.sqrt(10), 0.8),
    ]
    for said, (k, q, beta, anchor) in zip(found["told"], states, strict=True):
        query = torch.tensor([q], dtype=torch.float64)
        energy = AnchoredEnergy(LogSumExp(k, beta), query, anchor)
        end = solve(energy, query, solver=Picard(max_steps=20000, atol=1e-10, rtol=1e-10)).value
        numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", said)]
        assert numbers == pytest.approx([*end[0].tolist(), float(energy.energy(end)[0])], abs=1e-3)
    assert found["prevented"] == 2
    assert found["changed"]
    assert found["levels"] > 20
    assert found["beta"] == "9.49"
    x, y = (float(n) for n in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", found["end"]["transform"]))
    assert (x, -y) == pytest.approx(end[0].tolist(), abs=1e-6)
    assert found["path"].startswith("-1,1 ")
    assert all("arrow keys move it" in dot["aria-label"] for dot in found["dots"])


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_renders_the_page(quick, tmp_path, width):
    (tmp_path / "index.html").write_text(quick, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},900",
        "--virtual-time-budget=4000",
    ]
    command = [BROWSER, *options, "--dump-dom", (tmp_path / "index.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'data-part="said"[^>]*>(.*?)</p>', shown)[1]
    assert [float(x) for x in re.findall(r"-?\d+\.\d+", said)[:2]] == pytest.approx([1.2896, 0.6599], abs=1e-3)

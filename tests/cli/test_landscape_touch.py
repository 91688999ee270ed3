"""The part of the landscape page that a reader touches, in a real browser."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from browser import BROWSER, MISSING, SHIFT, browser

from implicit_attention import AnchoredEnergy, LogSumExp, Picard, solve

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)
COMMITTED = Path(__file__).parents[2] / "docs" / "landscape" / "index.html"
#: Width, height, and whether it is a phone.
WINDOWS = {"desk": (1280, 900, False), "phone": (390, 844, True)}
BOXES = """
  [...document.querySelectorAll("h1, .plane, #touch input, [data-part=said], #touch-how")].map((part) => {
    const { left, top, right, bottom } = part.getBoundingClientRect();
    return { name: part.dataset.part ?? part.className ?? part.tagName, left, top, right, bottom };
  })
"""
#: All that a change shows: the query, its way, its end, the basin, the words. Once it is at rest.
STATE = """new Promise((done) => setTimeout(() => {
  const part = (name) => document.querySelector(`[data-part="${name}"]`);
  const ground = part("ground");
  const dots = [...document.querySelectorAll("#touch [tabindex]")];
  const pixels = ground.getContext("2d").getImageData(0, 0, ground.width, ground.height).data;
  done({
    side: ground.width,
    blue: pixels.filter((_, i) => i % 4 === 2 && pixels[i] > pixels[i - 2] + 25).length,
    pixels: pixels.reduce((sum, x, i) => (sum + x * ((i % 1009) + 1)) % 4294967291, 0),
    dots: dots.map((dot) => dot.getAttribute("aria-label")),
    places: dots.map((dot) => dot.parentNode.transform.baseVal[0].matrix).map(({ e, f }) => [e, -f]),
    path: part("path").getAttribute("points"),
    end: part("end").getAttribute("transform"),
    said: part("said").textContent,
    beta: part("beta").getAttribute("aria-valuetext"),
    focus: document.activeElement.getAttribute("aria-label"),
    scrolled: scrollY,
  });
}, 250))"""
#: The least contrast of a text with what is behind it, in each colour of text.
CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if ((color[3] ?? 1) > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const written = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!written || node.closest("script, svg") || !node.checkVisibility()) continue;
    const color = getComputedStyle(node).color;
    const [a, b] = [light(numbers(color)), light(behind(node))].sort((x, y) => y - x);
    found[color] = Math.min(found[color] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def started():
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(started):
    yield started
    assert started.faults() == []


@pytest.fixture(scope="session")
def address(quick):
    return (quick[0] / "index.html").as_uri()


def opened(tab, address, window="desk", **options):
    width, height, phone = WINDOWS[window]
    tab.open(address, width, height, phone=phone, **options)


def on_screen(tab, x, y):
    """The place on the screen of a place in the plane."""
    box = tab.run(
        "(({ left, top, width }) => ({ left, top, width }))(document.querySelector('.plane').getBoundingClientRect())"
    )
    reach = tab.run("JSON.parse(document.getElementById('touch-problem').textContent).reach")
    return [box["left"] + box["width"] * (x / reach + 1) / 2, box["top"] + box["width"] * (1 - y / reach) / 2]


def end_of(keys, query, beta, anchor):
    """The end of the query, its energy, and the plain steps."""
    query = torch.tensor([query], dtype=torch.float64)
    energy = AnchoredEnergy(LogSumExp(torch.as_tensor(keys, dtype=torch.float64), beta), query, anchor)
    end = solve(energy, query, solver=Picard(max_steps=20000, atol=1e-10, rtol=1e-10)).value
    return end[0].tolist(), float(energy.energy(end)[0])


def agrees(state, beta, anchor):
    """What is said, drawn and told of a state is what the library finds."""
    query, *keys = state["places"]
    end, energy = end_of(keys, query, beta, anchor)
    assert [float(x) for x in re.findall(r"-?\d+\.\d+", state["said"])] == pytest.approx([*end, energy], abs=1.1e-3)
    x, y = (float(n) for n in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", state["end"]))
    assert (x, -y) == pytest.approx(end, abs=1e-5)
    way = [[float(n) for n in place.split(",")] for place in state["path"].split()]
    assert (way[0][0], -way[0][1]) == pytest.approx(query, abs=1e-5)
    assert (way[-1][0], -way[-1][1]) == pytest.approx(end, abs=1e-5)
    share = int(re.search(r"(\d+) % of the plane", state["said"])[1]) / 100
    assert state["blue"] / state["side"] ** 2 == pytest.approx(share, abs=0.03)  # but borders
    label = re.findall(r"-?\d+\.\d+", state["dots"][0])
    assert [float(n) for n in label] == pytest.approx(query, abs=6e-3)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_scene_is_all_there_without_scrolling(tab, window):
    opened(tab, COMMITTED.as_uri(), window)
    width, height, _ = WINDOWS[window]
    boxes = tab.run(BOXES)
    assert len(boxes) == 6
    for box in boxes:
        assert box["left"] >= 0, box
        assert box["top"] >= 0, box
        assert box["right"] <= width, box
        assert box["bottom"] <= height, box
        assert box["bottom"] > box["top"], box
    (plane,) = (box for box in boxes if box["name"] == "plane")
    assert plane["right"] - plane["left"] == pytest.approx(plane["bottom"] - plane["top"], abs=1)
    assert plane["right"] - plane["left"] > 0.45 * width
    assert tab.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(tab, scheme):
    opened(tab, COMMITTED.as_uri(), scheme=scheme)
    tab.run("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    found = tab.run(CONTRAST)
    assert len(found) >= 3
    assert min(found.values()) >= 4.5, found
    assert (tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_committed_page_is_there_within_a_second(tab):
    entry = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    took = []
    for _ in range(4):  # other processes are at work, too
        opened(tab, COMMITTED.as_uri())
        tab.until(f"{entry} > 0")
        took.append(tab.run(entry))
    assert min(took) < 1000


@pytest.mark.parametrize("window", WINDOWS)
def test_without_a_script_the_first_still_is_there(tab, window):
    opened(tab, COMMITTED.as_uri(), window, scripts=False)
    found = tab.run("""(() => {
      const box = document.querySelector("img").getBoundingClientRect();
      const touch = document.getElementById("touch").checkVisibility();
      return { touch, top: box.top, width: box.width, words: document.querySelector("section p").checkVisibility() };
    })()""")
    assert not found["touch"]
    assert found["words"]
    assert found["width"] > 300
    assert found["top"] < WINDOWS[window][1]


def test_the_mouse_drags_the_query_and_a_pattern(tab, address):
    opened(tab, address)
    before = tab.run(STATE)
    agrees(before, beta := 10 / math.sqrt(2), 0.3)
    tab.drag(on_screen(tab, 1.5, 1.5), on_screen(tab, -1.0, -1.0))
    after = tab.run(STATE)
    assert after["places"][0] == pytest.approx([-1, -1], abs=0.02)
    assert after["places"][1:] == before["places"][1:]
    agrees(after, beta, 0.3)
    for part in ("said", "path", "end", "pixels", "blue"):
        assert after[part] != before[part], part
    tab.drag(on_screen(tab, *after["places"][3]), on_screen(tab, 1.0, 1.5))
    moved = tab.run(STATE)
    assert moved["places"][3] == pytest.approx([1, 1.5], abs=0.02)
    assert moved["places"][:3] == after["places"][:3]
    agrees(moved, beta, 0.3)
    assert moved["pixels"] != after["pixels"]
    tab.run("document.querySelector('[data-part=again]').click()")
    assert tab.run(STATE) | {"focus": None} == before


def test_a_mouse_that_holds_nothing_moves_nothing_and_a_click_brings_the_query(tab, address):
    opened(tab, address)
    before = tab.run(STATE)
    for x, y in ((1.5, 1.5), (0.0, 0.0)):
        place = on_screen(tab, x, y)
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    assert tab.run(STATE) == before
    there = on_screen(tab, -1.2, 1.6)
    tab.drag(there, there, steps=1)
    after = tab.run(STATE)
    assert after["places"][0] == pytest.approx([-1.2, 1.6], abs=0.02)
    agrees(after, 10 / math.sqrt(2), 0.3)


def test_a_finger_drags_the_query_and_the_page_stays(tab, address):
    opened(tab, address, "phone")
    before = tab.run(STATE)
    tab.swipe(on_screen(tab, 1.5, 1.5), on_screen(tab, -0.5, -1.6))
    after = tab.run(STATE)
    assert after["places"][0] == pytest.approx([-0.5, -1.6], abs=0.03)
    assert after["scrolled"] == 0
    assert after["pixels"] != before["pixels"]
    agrees(after, 10 / math.sqrt(2), 0.3)


def test_keys_move_what_has_the_focus(tab, address):
    opened(tab, address)
    first = tab.run(STATE)
    tab.press("Tab")
    rings = "[...document.querySelectorAll('.ring')].map((ring) => getComputedStyle(ring).visibility)"
    assert tab.run(rings) == ["visible", *["hidden"] * 6]
    # Around the point, and over nothing else: an outline would be as wide as so many units of the plane.
    around = "(({ width }) => width)(document.querySelector('.ring').getBoundingClientRect())"
    assert 40 < tab.run(around) < 80
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "none"
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        tab.press(key)
    tab.press("ArrowDown", SHIFT)
    query = tab.run(STATE)
    assert query["focus"].startswith("Query at 1.40, 1.30")
    assert query["places"][0] == pytest.approx([1.5 - 2 * 0.05, 1.5 + 0.05 - 0.25], abs=1e-6)
    assert query["places"][1:] == first["places"][1:]
    agrees(query, 10 / math.sqrt(2), 0.3)
    assert query["pixels"] != first["pixels"]
    tab.press("Tab")
    tab.press("ArrowRight", SHIFT)
    pattern = tab.run(STATE)
    assert pattern["focus"].startswith("Stored pattern 1")
    assert pattern["places"][1] == pytest.approx([1.2 + 0.25, 0.3], abs=1e-6)
    agrees(pattern, 10 / math.sqrt(2), 0.3)
    assert pattern["scrolled"] == 0
    assert all("arrow keys move it" in label for label in pattern["dots"])


def test_sliders_turn_beta_and_the_anchor(tab, address):
    opened(tab, address)
    before = tab.run(STATE)
    tab.run("document.querySelector('[data-part=beta]').focus()")
    for _ in range(25):
        tab.press("ArrowRight")
    beta = tab.run(STATE)
    assert beta["beta"] == f"{10 / math.sqrt(2) * math.sqrt(10):.1f}"
    agrees(beta, 10 / math.sqrt(2) * math.sqrt(10), 0.3)
    assert beta["pixels"] != before["pixels"]
    tab.run("document.querySelector('[data-part=anchor]').focus()")
    for _ in range(20):
        tab.press("ArrowLeft")
    anchor = tab.run(STATE)
    agrees(anchor, 10 / math.sqrt(2) * math.sqrt(10), 0.1)
    assert anchor["blue"] < beta["blue"]
    labels = tab.run("[...document.querySelectorAll('#touch input')].map((part) => part.labels[0].textContent.trim())")
    assert labels == ["beta, inverse temperature: 22.4", "anchor, weight of the query: 0.10"]


def test_words_are_said_aloud_once_nothing_moves(tab, address):
    opened(tab, address)
    aloud = "document.querySelector('[data-part=aloud]')"
    assert tab.run(f"{aloud}.getAttribute('role')") == "status"
    tab.run(
        f"window.told = []; new MutationObserver(() => told.push({aloud}.textContent))"
        f".observe({aloud}, {{ childList: true }})"
    )
    tab.drag(on_screen(tab, 1.5, 1.5), on_screen(tab, 0.3, -1.5), steps=20)
    tab.until("told.length")
    assert tab.run("told.length") <= 2  # while the machine is busy a drag may rest
    said = tab.run("told.at(-1)")
    assert said == tab.run(STATE)["said"]
    assert re.match(
        r"The query ends at \(-?\d\.\d+, -?\d\.\d+\), (near|nearest to) pattern \d, after \d+ plain steps;", said
    )
    assert re.search(r"Its basin is \d+ % of the plane; there (are \d basins|is no other)\.$", said)


# ------------------------------------------------------------------ what is computed


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator, dtype=torch.float64)


def in_browser(tab, address, program, **values):
    """What `program` returns, beside the script of the page and with the values as `given`."""
    opened(tab, address)
    return tab.run(f"(() => {{ const given = {json.dumps(values)}; {program} }})()")


def test_the_script_finds_the_equilibria_of_the_library(tab, address):
    problems = []
    for seed, (count, beta, anchor) in enumerate(
        [(6, 7.0, 0.3), (6, 0.7, 0.0), (3, 2.0, 0.7), (1, 5.0, 0.5), (9, 30.0, 0.05), (6, 2.8, 1.0), (5, 1e-2, 0.0)]
    ):
        keys, query = draw(count, seed), draw(1, 100 + seed)[0]
        problems.append({"keys": keys.tolist(), "query": query.tolist(), "beta": beta, "anchor": anchor})
    # An end at 0, and a query on a border, which comes to a saddle.
    opposite = {"keys": [[1.0, 0.5], [-1.0, -0.5]], "anchor": 0.0}
    problems += [opposite | {"query": [0.3, 0.2], "beta": 0.4}, opposite | {"query": [0.5, -1.0], "beta": 3.0}]
    program = """
      return given.problems.map((problem) => {
        const { value, converged, path, attracts } = equilibrium(problem);
        return { value, converged, attracts, energy: energyOf(problem, value), start: path[0] };
      });
    """
    for problem, found in zip(problems, in_browser(tab, address, program, problems=problems), strict=True):
        end, energy = end_of(problem["keys"], problem["query"], problem["beta"], problem["anchor"])
        # Of several minima both take the one that plain steps lead to.
        assert found["converged"]
        assert found["attracts"] == (problem is not problems[-1])
        assert found["start"] == problem["query"]
        assert found["value"] == pytest.approx(end, abs=1e-6)
        assert found["energy"] == pytest.approx(energy, abs=1e-9)


@pytest.mark.parametrize(
    ("beta", "anchor", "attractors"), [(7.07, 0.3, 2), (7.07, 0.0, 5), (2.0, 0.05, None), (0.7, 0.0, 1)]
)
def test_basins_are_where_plain_steps_of_the_library_end(tab, address, quick, beta, anchor, attractors):
    (patterns, (query, *_)), reach, side = (quick[1][name] for name in ("patterns", "queries")), quick[1]["reach"], 50
    problem = {"keys": patterns, "query": query, "beta": beta, "anchor": anchor}
    program = """
      const { ends, attractors, energies } = basins(given.problem, given.reach, given.side);
      return { ends: [...ends], attractors, energies: [...energies] };
    """
    found = in_browser(tab, address, program, problem=problem, reach=reach, side=side)
    centres = reach * ((2 * torch.arange(side, dtype=torch.float64) + 1) / side - 1)
    starts = torch.cartesian_prod(-centres, centres).flip(-1)
    keys, field = (torch.tensor(numbers, dtype=torch.float64) for numbers in (patterns, query))
    energy = AnchoredEnergy(LogSumExp(keys, beta), field.expand(starts.shape), anchor)
    torch.testing.assert_close(torch.tensor(found["energies"], dtype=torch.float64), energy.energy(starts))
    ends = solve(energy, starts, solver=Picard(max_steps=5000, atol=1e-9, rtol=1e-9)).value
    assert min(found["ends"]) >= 0
    if attractors is not None:
        assert len(found["attractors"]) == attractors
    reached = torch.tensor(found["attractors"], dtype=torch.float64)[torch.tensor(found["ends"])]
    wrong = int((torch.linalg.vector_norm(reached - ends, dim=-1) > 1e-4).sum())
    assert wrong <= side // 10  # of 2500, along borders

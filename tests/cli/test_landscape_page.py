import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from implicit_attention.cli import main
from implicit_attention.cli.landscape import Landscape
from implicit_attention.studies.landscape import SCENES
from implicit_attention.studies.landscape import page as landscape_page
from implicit_attention.studies.landscape.plane import PlaneScene

#: The beginning of a picture of 640 x 480.
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x02\x80\0\0\x01\xe0"
#: Elements without an end.
VOID = {"meta", "img", "input", "link", "br", "hr"}
COMMITTED = Path(__file__).parents[2] / "docs" / "landscape" / "index.html"


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_quick_page_has_four_scenes(quick):
    check(quick, 4)


def test_the_committed_page_has_the_scripts_and_the_style_of_today():
    text = COMMITTED.read_text(encoding="utf-8")
    folder = Path(landscape_page.__file__).parent
    for file in (*landscape_page.SCRIPTS, landscape_page.STYLE, folder / "page.css"):
        assert file.read_text(encoding="utf-8") in text, f"{file.name}: run implicit-attention landscape --html"


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
        np.save(tmp_path / "many.npy", np.random.default_rng(0).standard_normal((count, 2)))
        plane = Landscape(patterns=tmp_path / "many.npy").plane
        page = Page(landscape_page.page(plane, [scene], {scene.name: PNG}))
        touched = count == landscape_page.MOST_TOUCHED
        assert len(page.all("script")) == 2 * touched
        assert ("touch" in {attributes.get("id") for _, attributes in page.tags}) == touched
        assert f"{count} stored patterns" in "".join(page.text)

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import done
from PIL import Image

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


def text_of(run):
    return (run[0] / "index.html").read_text(encoding="utf-8")


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
def test_the_page_of_all_scenes_is_one_file_with_every_picture_and_number(whole):
    out, content = whole
    assert len(content["scenes"]) >= 12
    page = check(text_of(whole), len(content["scenes"]))
    shown = "".join(page.text)
    assert len(page.all("section")) == len(content["scenes"])
    for name, scene in content["scenes"].items():
        assert scene["sentence"] in shown
        assert scene["description"] in {picture["alt"] for picture in page.all("img")}
        assert {"href": f"#{name}"} in page.all("a")
        assert (out / scene["picture"]).is_file()
    assert (out / "index.html").stat().st_size < 2**21


def code_of(text):
    """The scripts and the style of a page, but for its numbers."""
    parts = re.findall(r"<(?:script(?! type)|style)[^>]*>(.*?)</", text, flags=re.DOTALL)
    assert len(parts) == 2
    return parts


def test_the_page_is_whole_reads_on_a_phone_and_in_the_dark_and_needs_no_script(quick):
    text = text_of(quick)
    page = check(text, 4)
    assert code_of(text) == code_of(COMMITTED.read_text(encoding="utf-8")), "run implicit-attention landscape --html"
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert page.all("html") == [{"lang": "en"}]
    assert "@media (prefers-color-scheme: dark)" in text
    assert "color-scheme: light dark" in text
    hidden = [attributes for _, attributes in page.tags if "hidden" in attributes]
    assert [attributes["id"] for attributes in hidden] == ["touch"]
    shown = Page(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    assert shown.all("img") == page.all("img")
    assert "".join(shown.text).split() == "".join(page.text).split()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "touched"), [(40, True), (41, False)])
def test_many_patterns_are_drawn_and_not_touched(tmp_path, count, touched):
    np.save(tmp_path / "many.npy", np.random.default_rng(0).standard_normal((count, 2)))
    done("landscape", "--quick", "--html", "--patterns", tmp_path / "many.npy", "--out", tmp_path)
    page = Page((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert len(page.all("script")) == 2 * touched
    assert ("touch" in {attributes.get("id") for _, attributes in page.tags}) == touched
    assert f"{count} stored patterns" in "".join(page.text)

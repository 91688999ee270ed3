"""The built pages hold every formula of their sources, and no tag that is none."""

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# What Markdown, mkdocstrings and the theme write. Elements that formulas look like (s, q, u, var) are not among them.
TAGS = {
    *(
        "a",
        "abbr",
        "aside",
        "b",
        "blockquote",
        "body",
        "br",
        "button",
        "code",
        "col",
        "colgroup",
        "dd",
        "details",
        "div",
    ),
    *(
        "dl",
        "dt",
        "em",
        "footer",
        "form",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "head",
        "hr",
        "html",
        "i",
        "img",
        "input",
    ),
    *("label", "li", "link", "main", "meta", "nav", "noscript", "ol", "p", "path", "pre", "script", "section", "small"),
    *(
        "span",
        "strong",
        "style",
        "sub",
        "summary",
        "sup",
        "svg",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
    ),
}
# What Markdown would take for a tag, or for emphasis.
FORMULA = re.compile(r"<[A-Za-z][^<>=:]*>|\(\*\w+[,)]")


def words(text):
    return " ".join(text.split())


def formulas(text):
    return Counter(words(found) for found in FORMULA.findall(text))


class Page(HTMLParser):
    """The text, the tags and the names (ids) of a page."""

    def __init__(self, path):
        super().__init__()
        self.text, self.tags, self.names = "", set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names.add(dict(attrs).get("id"))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return {str(path.relative_to(folder)): Page(path) for path in folder.rglob("*.html")}


def test_no_page_holds_a_tag_that_nobody_wrote(site):
    assert {name: page.tags - TAGS for name, page in site.items() if page.tags - TAGS} == {}


def test_every_formula_of_a_docstring_is_in_the_reference(site):
    package = griffe.load("implicit_attention", search_paths=[ROOT])
    page = site["reference/index.html"]
    sources = Counter()
    for name in filter(None, page.names):
        if name.startswith("implicit_attention."):
            docstring = package[name.removeprefix("implicit_attention.")].docstring
            sources += formulas(docstring.value if docstring else "")
    assert sources.total() > 80
    assert sources - formulas(page.text) == Counter()


def test_every_formula_of_a_page_is_on_the_site(site):
    for page in (ROOT / "docs").glob("*.md"):
        source = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
        built = site["index.html" if page.stem == "index" else f"{page.stem}/index.html"]
        assert formulas(source) - formulas(built.text) == Counter(), page


def test_pages_that_are_read_elsewhere_too_hold_formulas_in_code_only():
    for page in PAGES:
        text = re.sub(r"<!--.*?-->|^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"</?[A-Za-z][^>]*>?", text) == [], page

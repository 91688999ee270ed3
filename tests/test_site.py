"""The built pages hold every formula, every public name and every source, and load nothing from elsewhere."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import griffe
import pytest
from filelock import FileLock

from implicit_attention.solution import AdjointReport, Record, Trace

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
# What Markdown, mkdocstrings and the theme write. Elements that formulas look like (s, q, u, var) are not among them.
TAGS = re.compile(
    "a|article|aside|b|blockquote|body|br|button|code|dd|details|div|dl|dt|em|footer|form|h[1-6]|head|header|hr|html|img"
    "|input|label|li|link|main|meta|nav|noscript|ol|p|path|pre|script|section|small|span|strong|style|sub|summary|sup"
    "|svg|table|tbody|td|th|thead|title|tr|ul"
)
MATHML = re.compile(
    "math|m(frac|[inor]|over|root|row|space|sqrt|style|sub|sup|subsup|table|t[drx]|text|under|underover)"
)
# Formulas that are plain text, which Markdown would take for a tag, or for emphasis.
FORMULA = re.compile(r"<[A-Za-z][^<>=:]*>|\(\*\w+[,)]")
DISPLAY = re.compile(r"^ *```math\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w`])\$(?![\s$])([^$`\n]+?(?:\n[^$`\n]+?)?)(?<!\s)\$(?![\d$])")
#: Elements without an end.
VOID = {"br", "hr", "img", "input", "link", "meta"}
#: The pages of a reader stay short: bytes of HTML.
LONGEST = 150 * 1024
#: The parts of the package with a list of public names.
FACES = {
    *(
        "",
        "adjoints",
        "attention",
        "diagnostics",
        "distributed",
        "energies",
        "integrations.transformers",
        "kernels",
        "layers",
        "linear",
    ),
    *(
        "models",
        "models.reasoners",
        "plotting",
        "potentials",
        "solvers",
        "spins",
        "spins.sampling",
        "training",
    ),
}


def words(text):
    return " ".join(text.split())


def formulas(text):
    return Counter(words(found) for found in FORMULA.findall(text))


def latex(markdown):
    """The formulas in LaTeX of a page or docstring, on display and inside sentences."""
    text = DISPLAY.sub("", markdown)
    # Code: fenced blocks, examples up to the next empty line, and spans.
    text = re.sub(r"^```.*?^```|^ *>>>.*?(?:\n *$|\Z)|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(DISPLAY.findall(markdown)), len(INLINE.findall(text))


class Page(HTMLParser):
    """What a page holds: its text, the part of it outside of code and formulas, tags, names and addresses."""

    def __init__(self, path):
        super().__init__()
        self.size, self.text, self.prose, self.math = path.stat().st_size, "", "", ""
        self.unknown, self.strays, self.names, self.loaded = set(), set(), [], []
        self.displays = self.inlines = 0
        self.open = []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if MATHML.fullmatch(tag):
            self.strays |= {tag} if tag != "math" and "math" not in self.open else set()
        else:
            self.unknown |= {tag} if not TAGS.fullmatch(tag) else set()
        if tag == "math":
            self.displays += attrs.get("display") == "block"
            self.inlines += attrs.get("display") != "block"
        if "doc-heading" in (attrs.get("class") or "").split():
            self.names.append((tag, attrs.get("id")))
        if tag != "a":
            self.loaded += [attrs[key] for key in ("src", "href", "srcset", "data", "poster") if attrs.get(key)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if "math" in self.open:
            self.math += data
        else:
            self.text += data
            if not {"code", "pre", "script", "style"} & set(self.open):
                self.prose += data


@pytest.fixture(scope="session")
def folder(tmp_path_factory, worker_id):
    """The site, built once whatever the number of processes of a test session."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    site = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (shared / "site.built").exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
            subprocess.run(command, cwd=ROOT, check=True)
            (shared / "site.built").touch()
    return site


@pytest.fixture(scope="session")
def site(folder):
    """The pages that mkdocs makes, without those that lie finished in docs."""
    names = [path.relative_to(folder) for path in folder.rglob("*.html")]
    return {str(name): Page(folder / name) for name in names if not (ROOT / "docs" / name).exists()}


@pytest.fixture(scope="session")
def reference(site):
    return {name: page for name, page in site.items() if name.startswith("reference/")}


@pytest.fixture(scope="session")
def package():
    return griffe.load("implicit_attention", search_paths=[ROOT], resolve_aliases=True)


def built(site, page):
    name = page.relative_to(ROOT / "docs").with_suffix("")
    return site[str((name.parent if name.name == "index" else name) / "index.html")]


@pytest.mark.slow
def test_no_page_holds_a_tag_that_nobody_wrote(site):
    assert {name: page.unknown for name, page in site.items() if page.unknown} == {}
    assert {name: page.strays for name, page in site.items() if page.strays} == {}


@pytest.mark.slow
def test_every_plain_formula_of_a_docstring_is_in_the_reference(reference, package):
    total = 0
    for name, page in reference.items():
        sources = Counter()
        for _, identifier in page.names:
            docstring = package[identifier.removeprefix("implicit_attention.")].docstring
            sources += formulas(DISPLAY.sub("", docstring.value) if docstring else "")
        assert sources - formulas(page.text) == Counter(), name
        total += sources.total()
    assert total > 80


@pytest.mark.slow
def test_every_plain_formula_of_a_page_is_on_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        source = re.sub(r"<!--.*?-->", "", DISPLAY.sub("", page.read_text()), flags=re.DOTALL)
        assert formulas(source) - formulas(built(site, page).text) == Counter(), page


@pytest.mark.slow
def test_every_formula_in_latex_is_drawn(site, reference, package):
    counts = Counter()
    for source in (ROOT / "docs").rglob("*.md"):
        page, texts = built(site, source), [source.read_text()]
        for _, identifier in page.names:
            docstring = package[identifier.removeprefix("implicit_attention.")].docstring
            texts.append(docstring.value if docstring else "")
        displays, inlines = (sum(each) for each in zip(*map(latex, texts), strict=True))
        assert (page.displays, page.inlines) == (displays, inlines), source
        counts.update(displays=displays, inlines=inlines, docstrings=displays if page.names else 0)
    assert counts["displays"] > 40
    assert counts["inlines"] > 40
    assert counts["docstrings"] > 12


@pytest.mark.slow
def test_no_command_of_latex_is_left_over(site):
    for name, page in site.items():
        # What the converter does not know it leaves as it is.
        assert re.findall(r"\\\w+|[&\\]", page.math) == [], name
        assert re.findall(r"\\[A-Za-z]{2,}|\$[^\s\d]", page.prose) == [], name


def test_pages_that_are_read_elsewhere_too_hold_formulas_in_code_only():
    for page in PAGES:
        text = re.sub(r"<!--.*?-->|^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        text = INLINE.sub("", text)
        assert re.findall(r"</?[A-Za-z][^>]*>?", text) == [], page


def found(path):
    """The object that is imported from a public path."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AssertionError(path)


@pytest.mark.slow
def test_every_public_name_is_on_exactly_one_page_of_the_reference(reference):
    pages = {}
    for page, parsed in reference.items():
        for tag, identifier in parsed.names:
            if tag == "h2":
                assert "._" not in identifier, identifier
                pages.setdefault(id(found(identifier)), []).append(page)
    assert {key: where for key, where in pages.items() if len(where) > 1} == {}
    for face in FACES:
        module = importlib.import_module(f"implicit_attention.{face}".rstrip("."))
        assert [name for name in module.__all__ if id(getattr(module, name)) not in pages] == [], face


def test_the_parts_with_a_list_of_names_are_those_that_are_tested():
    files = (ROOT / "implicit_attention").rglob("__init__.py")
    lists = {
        ".".join(file.parent.relative_to(ROOT / "implicit_attention").parts)
        for file in files
        if re.search(r"^__all__", file.read_text(), re.MULTILINE)
    }
    assert {face for face in lists if "._" not in f".{face}"} == FACES


@pytest.mark.slow
def test_every_class_and_function_shows_its_arguments(folder, reference):
    checked = 0
    for name in reference:
        text = (folder / name).read_text()
        # A function that is called like its module has to be asked for by both names.
        assert "doc-symbol-heading doc-symbol-module" not in text, name
        _, *parts = re.split(r'<h2 id="(implicit_attention[^"]*)"', text)
        for identifier, part in zip(parts[::2], parts[1::2], strict=True):
            value = found(identifier)
            # A class without `__init__` takes what its base takes; nobody makes a protocol.
            if inspect.isfunction(value) or ("__init__" in vars(value) and Protocol not in value.__bases__):
                _, signature = part.split('<div class="doc-signature', 1)
                shown = re.sub(r"<[^>]*>", "", signature.split("</div>")[0])
                wanted = [argument for argument in inspect.signature(value).parameters if argument[0] != "_"]
                assert [each for each in wanted if not re.search(rf"\b{each}\b", shown)] == [], identifier
                checked += bool(wanted)
    assert checked > 150


@pytest.mark.slow
def test_the_record_of_a_solve_is_in_the_reference(folder):
    text = (folder / "reference" / "solve" / "index.html").read_text()
    for name in (Record, Trace, AdjointReport):
        for field in getattr(name, "_fields", ("status", "residual", "tolerance", "num_steps", "gradient_error")):
            assert f'title="implicit_attention.solution.{name.__name__}.{field}"' in text, (name, field)


@pytest.mark.slow
def test_no_page_is_too_long_to_read(site):
    # That of the benchmarks is all tables, for whom one number is not enough.
    assert {name: page.size for name, page in site.items() if page.size > LONGEST and "benchmarks" not in name} == {}


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(folder, site):
    for name, page in site.items():
        assert [address for address in page.loaded if urlsplit(address).netloc] == [], name
        # The configuration of the theme's script names no other host either.
        (settings,) = re.findall(r'<script id="__config".*?>(.*?)</script>', (folder / name).read_text())
        assert "//" not in settings, name
    for page in (ROOT / "docs").rglob("*.html"):
        assert [address for address in Page(page).loaded if urlsplit(address).netloc] == [], page
    for style in folder.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()) == [], style
    assert not list(folder.rglob("*.woff*"))
    # The theme would fetch a program for diagrams; no page has one.
    assert not [page for page in PAGES if "```mermaid" in page.read_text()]


NAME = r"(?:de |Van den )?[A-Z][\w'’-]+(?: Team)?"
CITATION = re.compile(rf"({NAME})(?:(?:, and |, | and ){NAME})*(?:,? et al\.)?,? \(?((?:19|20)\d\d)\)")


def citations(text):
    """(first author, year) of every "Name (year)", "Name and Name (year)", "Name et al. (year)", "(Name, year)"."""
    return {(match[1], match[2]) for match in CITATION.finditer(words(text))}


def bibliography():
    lines = re.findall(r"^- (.*?) \((\d{4})\)\. ", (ROOT / "docs" / "references.md").read_text(), re.MULTILINE)
    return [(re.split(r",| and | et al", names)[0], year) for names, year in lines]


def test_every_source_of_a_docstring_is_in_the_bibliography():
    known, used = bibliography(), set()
    assert len(known) == len(set(known)) > 70
    for file in (ROOT / "implicit_attention").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                named = citations(ast.get_docstring(node) or "")
                assert named <= set(known), file
                used |= named
    assert len(used) > 60


def test_every_entry_of_the_bibliography_is_cited():
    files = [*(ROOT / "implicit_attention").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    text = words("\n".join(file.read_text() for file in files if file.name != "references.md"))
    for name, year in bibliography():
        assert re.search(rf"{name}[^().]*?(et al\.)?[ (,]+{year}", text), (name, year)

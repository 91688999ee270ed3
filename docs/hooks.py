"""What mkdocs does differently here: LaTeX becomes MathML while the site is built, and plain formulas are text.

A display formula is a fenced block with the language `math`, one inside a sentence stands between dollars: GitHub shows
both, too. A browser draws MathML by itself, without a script or a font from elsewhere.

Markdown alone takes `<k_j, z>` for a tag, which no browser shows, and `(*batch, N)` for the start of emphasis.
"""

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor, SimpleTextInlineProcessor
from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def display(source: str, *_: Any, **__: Any) -> str:
    """A fenced block; a wide formula scrolls."""
    return f'<div class="formula" tabindex="0">{convert(source.strip(), display="block")}</div>'


class Inline(InlineProcessor):
    """Between dollars: no space inside of them, no digit behind, so that prices stay text."""

    def __init__(self, md: Markdown) -> None:
        super().__init__(r"(?<![\\$\w])\$(?![\s$])([^$\n]+?(?:\n[^$\n]+?)?)(?<!\s)\$(?![\d$])", md)

    # The base class names its arguments in camel case, and this way.
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Formulas(Extension):
    """LaTeX is drawn; elsewhere every `<` is a character, and so is the star of a shape."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")
        # Code spans have 190; backslashes have a meaning of their own in Markdown, from 180 down.
        md.inlinePatterns.register(Inline(md), "latex", 185)
        # Before the patterns of emphasis, which have 60 and less.
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(?<=\()(\*)(?=\w+[,)])"), "star_of_a_shape", 75)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Formulas())
    fence = {"name": "math", "class": "math", "format": display}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: Any) -> Files:
    """The page of the benchmarks lies beside what writes it, outside of docs, and is a page of the site as well."""
    for path in (BENCHMARKS / "README.md", *sorted((BENCHMARKS / "figures").glob("*.png"))):
        name = path.relative_to(BENCHMARKS.parent).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Comments, the only HTML of the pages, mark the tables that commands write; a reader needs none."""
    markdown = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    return markdown.replace("](../benchmarks/", "](benchmarks/")

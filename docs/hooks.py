"""What mkdocs does differently here: formulas are text.

Markdown alone takes `<k_j, z>` for a tag, which no browser shows, and `(*batch, N)` for the start of emphasis.
"""

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import SimpleTextInlineProcessor


class Formulas(Extension):
    """Every `<` is a character, and so is the star of a shape."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.deregister("html_block")
        md.inlinePatterns.deregister("html")
        # Before the patterns of emphasis, which have 60 and less.
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(?<=\()(\*)(?=\w+[,)])"), "star_of_a_shape", 75)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Formulas())
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Comments, the only HTML of the pages, mark the tables that commands write; a reader needs none."""
    return re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)

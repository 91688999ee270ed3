"""The hosts, one line each, from which messages about missing libraries, documents and tests take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Host(NamedTuple):
    """A library whose models may hold equilibria.

    title: its name in the documents.
    entry: the call that puts equilibria into a model.
    requirement: the oldest release, whose name is that of an extra of pyproject.toml; empty if nothing is imported.
    """

    title: str
    entry: str
    requirement: str = ""

    @property
    def install_command(self) -> str:
        """The command that installs the library, in the checkout."""
        return f'pip install -e ".[{self.requirement.partition(">=")[0]}]"'


# By the names of their modules in this folder.
HOSTS = {
    "transformers": Host("Hugging Face transformers", "attach(model)", "transformers>=5.23"),
    "multihead": Host(
        "`nn.MultiheadAttention`, `nn.TransformerEncoder`, `nn.TransformerDecoder`, `nn.Transformer`",
        "replace_attention(model)",
    ),
    "xtransformers": Host("x-transformers", "replace_attend(model)", "x-transformers>=2.31"),
    "timm": Host("timm", "create_model(..., attn_layer=EquilibriumAttention)"),
}


@contextmanager
def library_of(module: str) -> Iterator[None]:
    """A context for the imports of a host's library; an error says how to install one that is missing or too old."""
    try:
        yield
    except ImportError as error:
        host = HOSTS[module]
        raise ImportError(
            f"`implicit_attention.integrations.{module}` needs {host.requirement.replace('>=', ' ')} or newer; "
            f"in the checkout: {host.install_command}"
        ) from error

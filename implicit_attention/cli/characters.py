"""`implicit-attention train characters`: a causal Energy Transformer on the help texts that come with Python."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from typer import Option

from .command import Console, Files, Progress
from .train import TrainCommand, numbers, updates

if TYPE_CHECKING:
    from ..studies.characters import Text
    from ..studies.training import Trained


class CharactersRun(NamedTuple):
    """The text, the training and the bits of `train characters`."""

    text: Text
    trained: Trained
    bits: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Characters(TrainCommand):
    """Train a causal Energy Transformer on the help texts of Python, and compare it with counts of characters.

    Reported are bits per character of held-out text, beside those of the frequencies of characters and of pairs.
    """

    name: ClassVar[str] = "train characters"

    out: Annotated[Path, Option(help="Folder for metrics.json and checkpoint.pt.")] = Path("characters")

    def run(self, progress: Progress) -> CharactersRun:
        """Train or go on, and measure."""
        from ..studies import characters

        text = characters.load()
        model, rate = characters.CharacterModel(text.size), self.rate or characters.RATE
        identity = {"text": text.source["sha256"], "seed": self.seed, "rate": rate}
        trained = self.train(model, characters.training_loss(text), characters.EPOCH, rate, progress, identity)
        progress.begin("held-out text")
        count = characters.QUICK_WINDOWS if self.quick else characters.WINDOWS
        return CharactersRun(text, trained, characters.measured(text, model, count))

    def files(self, result: CharactersRun) -> Files:
        from ..studies.characters import BIGRAM, MODEL, UNIGRAM
        from .report import options_of

        bits = result.bits
        content = {
            "settings": options_of(self, "resume"),
            "data": result.text.source,
            "training": numbers(result.trained),
            "bits_per_character": bits,
            "verdicts": [{"baseline": name, "holds": bits[MODEL] < bits[name]} for name in (UNIGRAM, BIGRAM)],
        }
        return "metrics.json", content, {}

    def show(self, result: CharactersRun, console: Console) -> None:
        """Print the bits as a table."""
        from rich.table import Column, Table

        from ..studies.characters import LENGTH

        headers = "predicted by", Column("bits per character", justify="right")
        table = Table(*headers, title=f"held-out text, windows of {LENGTH} characters", title_justify="left")
        for name, value in result.bits.items():
            table.add_row(name, f"{value:.3f}")
        console.print(table)
        console.print(updates(result.trained))
        console.print(f"text {result.text.source['sha256'][:12]}")

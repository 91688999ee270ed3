"""The base of all commands: options, work, output and files, and the one way in which every command runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from typer import Option

from ..studies.errors import InputError
from .errors import missing, writable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich import console

    from . import progress

#: The types of `run` and `show`, imported when a command runs.
Console: TypeAlias = "console.Console"
Progress: TypeAlias = "progress.Progress"
#: The name of the JSON file, its content, and by name the pictures and other files.
Files: TypeAlias = "tuple[str, Mapping[str, Any], Mapping[str, Figure | bytes]]"


def seed_option(of: str) -> Any:
    return Option(min=0, max=2**63 - 2, help=f"Seed of {of}.")


class Command:
    """A command with its options, which are the fields of a subclass: a frozen dataclass whose docstring is the help.

    Attributes:
        name: in the terminal; that of a command in a group begins with the group.
        out: the folder of the files, of a command that writes some.
        seed: of torch's random numbers while it works.
    """

    name: ClassVar[str]
    out: Path | None = None
    seed: int

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the optional dependencies, beside rich and typer, that these options need."""
        return ()

    def check(self) -> None:
        """Raise `InputError` for the first option that cannot be used."""

    def line(self, row: dict[str, Any]) -> str:
        """Return the line that is printed when a part of the work has ended with this row of numbers."""
        return str(row["line"])

    def run(self, progress: Progress) -> Any:
        """Do the work."""
        raise NotImplementedError

    def files(self, result: Any) -> Files:
        """Build the files from what `run` returned; the command's name and its time are added to the JSON file."""
        raise NotImplementedError

    def show(self, result: Any, console: Console) -> None:
        """Print what `run` returned."""

    def listed(self, names: list[str]) -> str:
        """Return the list of the files that were written."""
        return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """Make the folder of the files; what was made for it is removed if the work ends without any."""
        if self.out is None:
            yield
            return
        made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        try:
            with writable("--out", self.out, "folder"):
                self.out.mkdir(parents=True, exist_ok=True)
                TemporaryFile(dir=self.out).close()
            yield
        finally:
            for folder in made:
                # One that holds files stays.
                with suppress(OSError):
                    folder.rmdir()

    def kept(self) -> str:
        """Return the words on what an interrupted command leaves in its folder."""
        if self.out is None:
            return ""
        names = sorted(path.name for path in self.out.iterdir()) if self.out.is_dir() else []
        more = "; go on with --resume" if "checkpoint.pt" in names else ""
        return f": {self.out} holds {', '.join(names)}{more}" if names else ": nothing was written"

    def execute(self) -> None:
        """Check the options, work with progress, write the files, print the result.

        Raises:
            InputError: an option, the file or the folder cannot be used, or an optional dependency is missing.
        """
        if (line := missing("rich", *self.modules)) is not None:
            raise InputError(line)
        import torch

        from .progress import Progress, make_console
        from .report import write

        self.check()
        names: list[str] = []
        with self._folder(), torch.random.fork_rng(devices=[]), Progress(self.line) as progress:
            begin = time.perf_counter()
            torch.manual_seed(self.seed)
            result = self.run(progress)
            seconds = time.perf_counter() - begin
            if self.out is not None:
                progress.begin("figures")
                name, content, others = self.files(result)
                with writable("--out", self.out, "folder"):
                    names = write(self.out, name, {"command": self.name, **content, "seconds": seconds}, others)
        console = make_console()
        self.show(result, console)
        if names:
            console.print(f"{self.listed(names)} written to {self.out} after {seconds:.1f} s", markup=False)

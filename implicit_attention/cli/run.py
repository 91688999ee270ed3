"""The run of a command: check the options, work with progress, write the files, print the tables."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import report, table
from .errors import require_modules, writable
from .progress import Progress, make_console
from .settings import CharactersSettings, InpaintSettings, LandscapeSettings, MagnetizeSettings, MazeSettings, Settings


def run(settings: Settings) -> None:
    """Run the command that has these settings.

    Raises:
        InputError: an option, the file or the folder cannot be used, or an optional dependency is missing.
    """
    if isinstance(settings, LandscapeSettings):
        require_modules("rich", "matplotlib")
        from . import landscape

        return landscape.run(settings)
    if isinstance(settings, MazeSettings):
        require_modules("rich", *(() if settings.gif is None else ("matplotlib",)))
        from . import maze

        return maze.run(settings)
    if isinstance(settings, InpaintSettings):
        require_modules("rich", "matplotlib", "sklearn", "scipy")
        from . import inpaint_report

        return inpaint_report.run(settings)
    if isinstance(settings, CharactersSettings):
        require_modules("rich")
        from . import characters

        return characters.run(settings)
    require_modules("rich", "matplotlib", *(("sklearn",) if settings.needs_digits else ()))
    command: Any
    line: Any
    show: Any
    files: Any
    if isinstance(settings, MagnetizeSettings):
        from . import magnetize as command

        command.check(settings)
        line, show, files = table.magnetize_line, table.show_magnetization, report.magnetization_files
    else:
        from . import compare

        compare.check(settings)
        if settings.suite == "solvers":
            command = compare
            line, show, files = table.compare_line, table.show_comparison, report.comparison_files
        else:
            command = import_module(f".suite_{settings.suite}", __package__)
            line, show, files = command.line, command.show, command.files
    out = settings.out
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
    with Progress(line) as progress:
        result = command.run(settings, progress)
        progress.begin("figures")
        with writable(out):
            written = report.write(out, *files(result))
    console = make_console()
    show(result, console)
    names = f"{', '.join(written[:-1])} and {written[-1]}"
    console.print(f"{names} written to {out} after {result.seconds:.1f} s", markup=False)

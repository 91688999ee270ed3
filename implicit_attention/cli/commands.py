"""The commands. The work is done elsewhere, imported when a command runs."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_type_hints

import typer

from .errors import InputError
from .settings import (
    CharactersSettings,
    CompareSettings,
    InpaintSettings,
    LandscapeSettings,
    MagnetizeSettings,
    MazeSettings,
    Settings,
)

commands = typer.Typer(
    name="implicit-attention", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"implicit-attention {__version__}")
        raise typer.Exit


@commands.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Equilibrium attention: solve for fixed points of attention, with evidence."""


def _add_command(settings: type[Settings], to: typer.Typer = commands) -> None:
    """Add the command whose options are the fields of `settings`. An `InputError` is one line and exit code 2."""

    def command(**options: Any) -> None:
        from .run import run

        try:
            run(settings(**options))
        except InputError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    # Where typer looks for options.
    vars(command)["__signature__"] = inspect.signature(settings, eval_str=True)
    command.__annotations__ = get_type_hints(settings, include_extras=True)
    to.command(settings.command, help=inspect.getdoc(settings))(command)


_add_command(CompareSettings)
_add_command(MagnetizeSettings)
_add_command(LandscapeSettings)
_add_command(MazeSettings)

train = typer.Typer(name="train", no_args_is_help=True, help="Train an Energy Transformer on data that is installed.")
_add_command(InpaintSettings, train)
_add_command(CharactersSettings, train)
commands.add_typer(train)

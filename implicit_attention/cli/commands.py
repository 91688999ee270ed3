"""The table of the commands, and the app with all of them; a command imports its work when it runs."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from ..studies.errors import InputError
from .command import Command

#: The commands, each `file:class`, in the order of the help. To add one: its file in this folder, and its line here.
COMMANDS = (
    "demo:Demo",
    "compare:Compare",
    "magnetize:Magnetize",
    "landscape:Landscape",
    "maze:Maze",
    "think:Think",
    "inpaint:Inpaint",
    "characters:Characters",
)
#: Groups of commands, with their help.
GROUPS = {"train": "Train an Energy Transformer on data that is installed."}


class _Group(typer.core.TyperGroup):
    """A group whose commands say what is wrong with an option without words on how it was read."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ").replace("Input should", "it must")
            raise


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"implicit-attention {__version__}")
        raise typer.Exit


def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Equilibrium attention: solve for fixed points of attention, with evidence."""


def _add(command: type[Command], to: typer.Typer) -> None:
    """Add a command whose options are the fields of its class. An `InputError` is one line and exit code 2."""

    def called(**options: Any) -> None:
        try:
            command(**options).execute()
        except InputError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo(f"interrupted{command(**options).kept()}", err=True)
            raise typer.Exit(130) from None

    # Typer reads the options from here. A field of a base class is resolved with the names of its own file.
    hints = get_type_hints(command, include_extras=True)
    fields = inspect.signature(command).parameters.values()
    vars(called)["__signature__"] = inspect.Signature([p.replace(annotation=hints[p.name]) for p in fields])
    called.__annotations__ = hints
    to.command(command.name.split()[-1], help=inspect.getdoc(command))(called)


def commands_in_words() -> dict[str, str]:
    """Return every command as it is typed, with the first sentence of its help."""
    classes: list[type[Command]] = [pkgutil.resolve_name(f"{__package__}.{place}") for place in COMMANDS]
    return {f"implicit-attention {each.name}": (inspect.getdoc(each) or "").split("\n")[0] for each in classes}


def _app() -> typer.Typer:
    app = typer.Typer(
        name="implicit-attention",
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(main)
    groups = {name: typer.Typer(name=name, no_args_is_help=True, help=text) for name, text in GROUPS.items()}
    for place in COMMANDS:
        command: type[Command] = pkgutil.resolve_name(f"{__package__}.{place}")
        group = command.name.split()[0]
        _add(command, groups.get(group, app))
    for added in groups.values():
        app.add_typer(added)
    return app


commands = _app()

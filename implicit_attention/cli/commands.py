"""The commands and their options; the work is done elsewhere, imported when a command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .errors import InputError

commands = typer.Typer(
    name="implicit-attention",
    help="Equilibrium attention: solve for fixed points of attention, with evidence.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
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


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an `InputError` into one line on stderr and exit code 2."""
    try:
        yield
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@commands.command()
def compare(
    patterns: Annotated[int, typer.Option(help="Number of patterns to store.")] = 200,
    beta: Annotated[float, typer.Option(help="Inverse temperature, > 0; it multiplies the scores <pattern, z>.")] = 8.0,
    anchor: Annotated[float, typer.Option(help="Weight of the query in the energy, in [0, 1]; 0 is retrieval.")] = 0.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of patterns and noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for compare.json, convergence.png and retrieval.png.")] = Path(
        "compare"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer queries and repeats, in a few seconds.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Your patterns, .npy, .npz or .pt of shape (count, D), instead of scikit-learn's digits."),
    ] = None,
) -> None:
    """Retrieve stored images from half-masked and noisy ones with every solver, and show what each of them costs.

    Compares one step of softmax attention, unrolled gradient descent, Picard, Anderson, Broyden, Newton-Krylov and
    torchdeq's Anderson and Broyden: evaluations, residual, saddles, retrieval, gradient error, time and memory.
    """
    with one_line_errors():
        from .compare import Settings, compare_to_files

        settings = Settings(
            patterns=patterns, beta=beta, anchor=anchor, device=device, dtype=dtype, seed=seed, quick=quick, data=data
        )
        compare_to_files(settings, out)


@commands.command()
def magnetize(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="An .npz file with the arrays J, (N, N), (B, N, N) or (N, N, D, D); h, (N,), (N, D) or (B, N, D); "
            "beta, a number or (B,). E = -1/2 sum_ij s_i J_ij s_j - sum_i h_i s_i.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="beta=LOW:HIGH:COUNT, draws the phase diagram; the file's beta is not used there."),
    ] = None,
    radius: Annotated[str, typer.Option(help="Length of a spin: sqrt_dim, bessel or a number.")] = "sqrt_dim",
    measure: Annotated[
        str | None, typer.Option(help="uniform, or counting of states, which is usual for D = 1.", show_default=False)
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Comma-separated names, such as bethe,adatap; else all that apply.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for thermodynamics.json and the pictures.")] = Path("magnetize"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and repeats.")] = False,
) -> None:
    """Ask every method for the free energy and the magnetizations of a spin system, side by side, with evidence.

    Free energy, energy, entropy, heat capacity, magnetizations; for asymmetric couplings magnetizations and entropy
    production of the synchronous dynamics. Without a file: Ising systems that are fitted to scikit-learn's digits.
    """
    with one_line_errors():
        from .magnetize import Settings, magnetize_to_files

        settings = Settings(
            file=file,
            sweep=sweep,
            radius=radius,
            measure=measure,
            methods=methods,
            dtype=dtype,
            seed=seed,
            quick=quick,
        )
        magnetize_to_files(settings, out)

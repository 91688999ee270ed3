"""The options of the commands, with their defaults, ranges and help texts: a command is made from each dataclass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from typer import Argument, Option

#: Names of methods of `magnetize` that are no approximations: Monte Carlo, and the exact law of a small chain.
SAMPLER, SYNCHRONOUS, CHAIN = "heat-bath", "synchronous", "markov-chain"
#: Names of methods that `--drive` asks.
DRIVEN = ("plefka-1", "gaussian-field")
#: The potential of softmax attention.
LOG_SUM_EXP = "log-sum-exp"
#: What `--beta` is called that is found from the patterns.
AUTO = "auto"
DEFAULT_PATTERNS = 200
#: Magnetizations are compared with those of the first of these that is there.
REFERENCES = ("enumeration", "transfer-matrix", CHAIN, SAMPLER, SYNCHRONOUS)


def seed_option(of: str) -> Any:
    return Option(min=0, max=2**63 - 2, help=f"Seed of {of}.")


@dataclasses.dataclass(frozen=True)
class CompareSettings:
    """Retrieve stored images from half-masked and noisy ones with every solver, and show what each of them costs.

    Compares one step of softmax attention, unrolled gradient descent, Picard, Anderson, Broyden, Newton-Krylov and
    torchdeq's Anderson and Broyden: evaluations, residual, saddles, retrieval, gradient error, time and memory. Then
    retrieval at nine inverse temperatures, `--beta`/4 to 64 `--beta`, beside the nearest stored pattern.

    `--suite retrieval` compares potentials in place of solvers: how many patterns each of them stores, from how far it
    finds them, and the published bounds. `--suite distribution` needs no patterns: tokens as samples of a Gaussian
    under repeated attention, and W_q^T W_k of layers trained on digits beside the inverse covariance.
    """

    command: ClassVar[str] = "compare"

    patterns: Annotated[
        int | None,
        Option(min=1, help="Number of patterns to store.", show_default="200, or as many as --data has"),
    ] = None
    beta: Annotated[
        str | None,
        Option(
            help="Inverse temperature, > 0; it multiplies the scores <pattern, z>. 'auto' finds one for the scale of "
            "the patterns.",
            show_default="8 for log-sum-exp; else the potential's own; with --data auto where there is one",
        ),
    ] = None
    anchor: Annotated[float, Option(help="Weight of the query in the energy, in [0, 1]; 0 is retrieval.")] = 0.0
    device: Annotated[str, Option(help="cpu, cuda or cuda:N.")] = "cpu"
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], Option(help="Type of all numbers.")] = (
        "float32"
    )
    seed: Annotated[int, seed_option("patterns and noise")] = 0
    out: Annotated[Path, Option(help="Folder for compare.json, or SUITE.json, and pictures.")] = Path("compare")
    quick: Annotated[bool, Option("--quick", help="Fewer queries and repeats, in a few seconds.")] = False
    data: Annotated[
        Path | None,
        Option(help="Your patterns, .npy, .npz or .pt of shape (count, D), instead of scikit-learn's digits."),
    ] = None
    potential: Annotated[
        str | None,
        Option(
            help="Whose equilibrium is solved for: softmax1, entmax, polynomial-2, ...; a wrong name lists all.",
            show_default="log-sum-exp; all of them in --suite retrieval",
        ),
    ] = None
    suite: Annotated[Literal["solvers", "retrieval", "distribution"], Option(help="What is compared; see above.")] = (
        "solvers"
    )

    @property
    def needs_digits(self) -> bool:
        return self.data is None

    @property
    def potential_name(self) -> str:
        """The potential whose equilibrium all solvers are asked for."""
        return self.potential or LOG_SUM_EXP

    @property
    def other_potential(self) -> str:
        """Return the potential for titles where it is not softmax attention's."""
        return "" if self.potential_name == LOG_SUM_EXP else f"{self.potential_name}, "

    @property
    def stored(self) -> int:
        """Return the number of patterns to store, if there are so many."""
        return DEFAULT_PATTERNS if self.patterns is None else self.patterns

    @property
    def queries(self) -> int:
        """Queries of each task in the comparison of solvers."""
        return min(self.stored, 50 if self.quick else 200)

    @property
    def descents(self) -> tuple[int, ...]:
        """Step counts of unrolled gradient descent."""
        return (5, 20) if self.quick else (5, 20, 50)

    @property
    def repeats(self) -> int:
        return 2 if self.quick else 5

    @property
    def max_seconds(self) -> float:
        """After this time no further timed run of a method begins."""
        return 0.3 if self.quick else 1.0

    @property
    def has_reference(self) -> bool:
        """Whether retrieval rates of these settings were measured independently."""
        softmax = self.potential_name == LOG_SUM_EXP and (self.beta is None or float(self.beta) == 8)
        return self.needs_digits and softmax and (self.stored, self.anchor) == (DEFAULT_PATTERNS, 0.0)


@dataclasses.dataclass(frozen=True)
class MagnetizeSettings:
    """Ask every method for the free energy and the magnetizations of a spin system, side by side, with evidence.

    Free energy, energy, entropy, heat capacity, magnetizations; for asymmetric couplings magnetizations and entropy
    production of the synchronous dynamics. Without a file: Ising systems that are fitted to scikit-learn's digits.
    """

    command: ClassVar[str] = "magnetize"

    file: Annotated[
        Path | None,
        Argument(
            metavar="[FILE]",
            help="An .npz file with the arrays J, (N, N), (B, N, N) or (N, N, D, D); h, (N,), (N, D) or (B, N, D); "
            "beta, a number or (B,). E = -1/2 sum_ij s_i J_ij s_j - sum_i h_i s_i.",
        ),
    ] = None
    sweep: Annotated[
        str | None, Option(help="beta=LOW:HIGH:COUNT, draws the phase diagram; the file's beta is not used there.")
    ] = None
    drive: Annotated[
        Path | None,
        Option(
            help="An .npy or .npz file with fields (T, N, D), one for every step of synchronous dynamics from m = 0, "
            "asked of plefka-1 and gaussian-field; FILE's h is not used there.",
            show_default=False,
        ),
    ] = None
    radius: Annotated[str, Option(help="Length of a spin: sqrt_dim, bessel or a number.")] = "sqrt_dim"
    measure: Annotated[
        Literal["uniform", "counting"] | None,
        Option(help="Uniform, or counting of states, which is usual for D = 1.", show_default=False),
    ] = None
    methods: Annotated[str | None, Option(help="Comma-separated names, such as bethe,adatap; else all that apply.")] = (
        None
    )
    dtype: Annotated[Literal["float64", "float32"], Option(help="Type of all numbers.")] = "float64"
    seed: Annotated[int, seed_option("the samples")] = 0
    out: Annotated[Path, Option(help="Folder for thermodynamics.json and the pictures.")] = Path("magnetize")
    quick: Annotated[bool, Option("--quick", help="Fewer samples and repeats.")] = False

    @property
    def needs_digits(self) -> bool:
        return self.file is None

    @property
    def source(self) -> str:
        return "Ising systems fitted to scikit-learn's digits" if self.file is None else self.file.name

    @property
    def max_seconds(self) -> float:
        """After this time no further timed run of a method begins."""
        return 0.1 if self.quick else 1.0

    @property
    def chosen(self) -> list[str] | None:
        """The names that `--methods` lists, or None for all."""
        return None if self.methods is None else [name.strip() for name in self.methods.split(",")]


@dataclasses.dataclass(frozen=True)
class MazeSettings:
    """Watch a maze while it is solved: a block, trained on 5 x 5 ones for a minute, is repeated until it settles.

    The block is repeated as often as the maze asks for, and its residual says when the answer has settled. Where there
    is no terminal, what was found is told in plain text.
    """

    command: ClassVar[str] = "maze"

    size: Annotated[
        str, Option(help="Cells along a side, 3 to 40; several, such as 9,17,25, are shown one after the other.")
    ] = "17"
    generator: Annotated[
        Literal["depth-first", "Prim", "Wilson"],
        Option(help="How mazes to solve are made; those to learn from are depth-first."),
    ] = "depth-first"
    seed: Annotated[int, seed_option("the maze")] = 0
    gif: Annotated[Path | None, Option(help="Write an animated GIF to this file, too.", show_default=False)] = None
    speed: Annotated[float, Option(min=0.1, max=1000, help="Evaluations shown in a second.")] = 10.0
    quick: Annotated[bool, Option("--quick", help="Hardly train: a look at the command, with a wrong answer.")] = False

    @property
    def updates(self) -> int:
        return 10 if self.quick else 600


@dataclasses.dataclass(frozen=True)
class _TrainSettings:
    """The settings that all trainings have in common."""

    minutes: Annotated[
        float | None,
        Option(
            min=0.01,
            max=10_000,
            help="Time to train, turned into a number of updates by timing a few.",
            show_default="5; with --quick 10 updates",
        ),
    ] = None
    updates: Annotated[int | None, Option(min=1, help="Updates to train, in place of --minutes.")] = None
    rate: Annotated[float | None, Option(help="Peak learning rate.", show_default="of the data")] = None
    seed: Annotated[int, seed_option("weights and batches")] = 0
    resume: Annotated[bool, Option("--resume", help="Go on from the last checkpoint in --out.")] = False
    quick: Annotated[bool, Option("--quick", help="Hardly train: a look at the command, with bad answers.")] = False


@dataclasses.dataclass(frozen=True)
class InpaintSettings(_TrainSettings):
    """Train an Energy Transformer to fill in hidden patches of images, and compare it with two simple fillings.

    Half of the patches of every image are hidden. Reported are root mean square errors over the hidden pixels of
    held-out images, beside the mean of the visible pixels and harmonic interpolation. A training that was killed goes
    on with --resume, and ends with the same weights to the bit.
    """

    command: ClassVar[str] = "inpaint"

    data: Annotated[
        Literal["digits", "photos"],
        Option(help="scikit-learn's digits, or crops of its two photographs; the right third of both is held out."),
    ] = "digits"
    mode: Annotated[
        Literal["published", "equilibrium"],
        Option(help="Twelve steps down the energy, as published, or the minimum of the energy with its field."),
    ] = "published"
    out: Annotated[Path, Option(help="Folder for metrics.json, the pictures and checkpoint.pt.")] = Path("inpaint")


@dataclasses.dataclass(frozen=True)
class CharactersSettings(_TrainSettings):
    """Train a causal Energy Transformer on the help texts of Python, and compare it with counts of characters.

    Reported are bits per character of held-out text, beside those of the frequencies of characters and of pairs.
    """

    command: ClassVar[str] = "characters"

    out: Annotated[Path, Option(help="Folder for metrics.json and checkpoint.pt.")] = Path("characters")


@dataclasses.dataclass(frozen=True)
class LandscapeSettings:
    """Look at energies of attention in the plane: contours, where steps lead, which fixed points there are.

    Seventeen scenes, from one step of softmax attention to basins of every solver, each a picture with a sentence, its
    numbers and a description. Without a file: six patterns.
    """

    command: ClassVar[str] = "landscape"

    patterns: Annotated[
        Path | None,
        Option(help="Your stored patterns, .npy, .npz or .pt of shape (M, 2).", show_default="six patterns"),
    ] = None
    seed: Annotated[int, seed_option("five of the eight queries, and of the maps")] = 0
    beta: Annotated[
        float | None,
        Option(
            help="Inverse temperature, > 0, of most scenes; the others have .2 to 10 times of it.",
            show_default="1/sqrt 2; for your patterns by their size",
        ),
    ] = None
    out: Annotated[Path, Option(help="Folder for landscape.json and the pictures.")] = Path("landscape")
    html: Annotated[bool, Option("--html", help="Write everything as one page, index.html, too.")] = False
    animate: Annotated[bool, Option("--animate", help="Write the descent as an animated GIF, too.")] = False
    quick: Annotated[bool, Option("--quick", help="Four scenes.")] = False


Settings: TypeAlias = (
    CompareSettings | MagnetizeSettings | LandscapeSettings | MazeSettings | InpaintSettings | CharactersSettings
)

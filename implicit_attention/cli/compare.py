"""`implicit-attention compare`: solvers, potentials or laws of tokens on the same task, with evidence."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typer import Option

from ..studies.errors import InputError
from .command import Command, Console, Files, Progress, seed_option

if TYPE_CHECKING:
    from torch import Tensor

#: The potential of softmax attention.
LOG_SUM_EXP = "log-sum-exp"
#: This value of `--beta` stands for the one that suits the patterns.
AUTO = "auto"
DEFAULT_PATTERNS = 200


@dataclasses.dataclass(frozen=True)
class Compare(Command):
    """Retrieve stored images from half-masked and noisy ones with every solver, and show what each of them costs.

    Compares one step of softmax attention, unrolled gradient descent, Picard, Anderson, Broyden, Newton-Krylov and
    torchdeq's Anderson and Broyden: evaluations, residual, saddles, retrieval, gradient error, time and memory. Then
    retrieval at nine inverse temperatures, `--beta`/4 to 64 `--beta`, beside the nearest stored pattern.

    `--suite retrieval` compares potentials in place of solvers: how many patterns each of them stores, from how far it
    finds them, and the published bounds. `--suite distribution` needs no patterns: tokens as samples of a Gaussian
    under repeated attention, and W_q^T W_k of layers trained on digits beside the inverse covariance.
    """

    name: ClassVar[str] = "compare"

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
    def modules(self) -> tuple[str, ...]:
        return ("matplotlib", "sklearn") if self.data is None else ("matplotlib",)

    @property
    def potential_name(self) -> str:
        """Return the potential whose equilibrium all solvers look for."""
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
        """Return the number of queries of each task in the comparison of solvers."""
        return min(self.stored, 50 if self.quick else 200)

    @property
    def repeats(self) -> int:
        """Return the number of timed runs of a solver."""
        return 2 if self.quick else 5

    @property
    def has_reference(self) -> bool:
        """Return whether retrieval rates of these settings were measured independently."""
        softmax = self.potential_name == LOG_SUM_EXP and (self.beta is None or float(self.beta) == 8)
        return self.data is None and softmax and (self.stored, self.anchor) == (DEFAULT_PATTERNS, 0.0)

    @property
    def inverse_temperature(self) -> float:
        """Return `--beta` as a number, or the value that suits the potential."""
        from ..studies.potentials import POTENTIALS

        return POTENTIALS[self.potential_name].beta if self.beta is None else float(self.beta)

    def check(self) -> None:
        import torch

        from ..studies.potentials import POTENTIALS

        if (name := self.potential_name) not in POTENTIALS:
            raise InputError(f"`--potential` must be one of {', '.join(POTENTIALS)}, got {name!r}; choose one of these")
        if self.suite == "distribution":
            self._refuse_unused()
        self._check_beta()
        if not 0 <= self.anchor <= 1:
            raise InputError(f"`--anchor` must be in [0, 1], got {self.anchor:g}; 0 is retrieval")
        remedy = "use cpu, cuda or cuda:N"
        try:
            device = torch.device(self.device)
        except RuntimeError:
            raise InputError(f"`--device` must name a device, got {self.device!r}; {remedy}") from None
        if device.type not in ("cpu", "cuda"):
            raise InputError(f"`--device` must be cpu or cuda, got {self.device!r}; {remedy}")
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= count:
            received = f"{self.device!r} with {count} CUDA devices here"
            raise InputError(f"`--device` must be present, got {received}; use --device cpu")

    def _check_beta(self) -> None:
        from ..studies.potentials import SIMILARITIES

        if self.beta == AUTO:
            names = " or ".join(SIMILARITIES)
            if self.suite != "solvers" or self.potential_name not in SIMILARITIES:
                what = self.potential_name if self.suite == "solvers" else f"--suite {self.suite}"
                raise InputError(f"`--beta` must be a number for {what}, got auto; auto is for solvers and {names}")
            return
        try:
            beta = self.inverse_temperature
        except ValueError:
            raise InputError(f"`--beta` must be a number > 0 or auto, got {self.beta!r}; try auto") from None
        if not (beta > 0 and math.isfinite(beta)):
            raise InputError(f"`--beta` must be > 0 and finite, got {beta:g}; it is an inverse temperature, try 8")

    def _refuse_unused(self) -> None:
        """Raise `InputError` for an option that `--suite distribution` would ignore."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("suite", "seed", "out", "quick") and value != field.default:
                required = f"be left out in --suite distribution, which draws its own tokens in float64, got {value}"
                raise InputError(f"`--{field.name}` must {required}; only --seed, --out and --quick are used")

    def load(self) -> tuple[Compare, Tensor]:
        """Return the options with the number of patterns to store, and all patterns, (count, D) float64."""
        from ..studies.data import load_digits
        from .files import load_patterns

        data = load_digits() if self.data is None else load_patterns(self.data)
        # At least 1, so that empty data get the message below.
        count = max(min(self.stored, len(data)), 1) if self.patterns is None else self.patterns
        if len(data) < count:
            source = "the digits" if self.data is None else f"`--data` {self.data.name}"
            required = f"<= {len(data)}, the rows of {source}"
            raise InputError(f"`--patterns` must be {required}, got {count}; lower --patterns")
        return dataclasses.replace(self, patterns=count), data

    @property
    def _suite(self) -> Any:
        """Import the module with `line`, `run`, `files` and `show` of `--suite`."""
        return import_module(f".compare_{self.suite}", __package__)

    def line(self, row: dict[str, Any]) -> str:
        return str(self._suite.line(row))

    def run(self, progress: Progress) -> Any:
        return self._suite.run(self, progress)

    def files(self, result: Any) -> Files:
        files: Files = self._suite.files(result)
        return files

    def show(self, result: Any, console: Console) -> None:
        self._suite.show(result, console)

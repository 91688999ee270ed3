"""Who competes at a puzzle: models with recipes and ways to answer, the rows of their runs, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from implicit_attention.studies.measure import peak_memory

from ..measure import interleaved, once
from ..targets import Row, Target
from .checks import PUZZLES, compared_checks
from .models import IGNORED, Examples, Model, Shape
from .solvers import compared_solvers
from .training import Answer, Fixed, Recipe, Task, Way, answered, loss, scored, train

Guess = Callable[[Examples], Tensor]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model, how it is trained, and the ways in which its weights answer.

    recipe: None for one that learns nothing, whose answer is `guess` (puzzles -> classes (B, N)).
    ways: to answer; the first is the one that costs are told of.
    sets: held-out sets that it is asked; none for all of the plan.
    make: (shape) -> the model.
    """

    name: str
    recipe: Recipe | None
    ways: tuple[Way, ...] = ()
    sets: tuple[str, ...] = ()
    make: Callable[[Shape], Model] = Model
    guess: Guess | None = None
    #: Whether its trained blocks are solved by every solver that is compared.
    solvers: bool = False
    #: The most evaluations of a puzzle where checks beside the residual are compared; 0 compares none.
    checks: int = 0


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a contender is said to reach: mean over seeds, less (for <=: plus) two standard errors, against a bound."""

    contender: str
    way: str
    set: str
    sense: Literal["<=", ">="]
    bound: float
    field: str = "exact"

    @property
    def ratio(self) -> str:
        return f"{self.way}, {self.set}" + ("" if self.field == "exact" else f", {self.field}")

    def target(self, metric: str) -> Target:
        bound = "less" if self.sense == ">=" else "plus"
        told = {"exact": "exact", "exact_converged": "exact given converged", "exact_unconverged": "exact given not"}
        what = f"{self.contender}, {self.way}, {self.set}: {told.get(self.field, self.field)}"
        return Target(
            metric,
            f"{what}, mean {bound} two standard errors",
            self.ratio,
            "worst",
            self.sense,
            self.bound,
            lambda row: row["metric"] == metric and row.get("contender") == self.contender,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is measured of a task: a metric of the suite.

    told: the task in a sentence. sets: held-out sets by name. costs: the set that is told in detail, and of which a
    batch is timed. solver_set: the one that solvers are compared on. leader: contender and way that the others are held
    against. drawn: contenders and ways in the figure.
    """

    metric: str
    task: Task
    told: str
    contenders: tuple[Contender, ...]
    sets: tuple[str, ...]
    costs: str
    solver_set: str
    leader: tuple[str, str]
    drawn: tuple[tuple[str, str], ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    puzzles: int = 500
    solver_puzzles: int = 200
    cost_puzzles: int = 32

    def quick(self) -> Plan:
        """A look: one seed, few updates, few puzzles of the smallest sets."""
        first = self.sets[:1]
        few = tuple(dataclasses.replace(c, recipe=c.recipe and c.recipe.quick(), sets=first) for c in self.contenders)
        small = {"costs": first[0], "solver_set": first[0], "puzzles": 8, "solver_puzzles": 4, "cost_puzzles": 4}
        return dataclasses.replace(self, contenders=few, sets=first, seeds=self.seeds[:1], **small)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A contender of a plan: one row."""

    plan: Plan
    contender: Contender

    @property
    def metric(self) -> str:
        return self.plan.metric

    @property
    def name(self) -> str:
        return f"{self.plan.metric.lower()}: {self.contender.name}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time and memory of all contenders of a plan: one row, of a metric of its own, for a machine that does no else."""

    plan: Plan
    metric: str = "TIMES"

    @property
    def name(self) -> str:
        return f"{self.plan.metric.lower()}: costs"


def model_of(task: Task, contender: Contender, seed: int) -> Model:
    torch.manual_seed(seed)
    return contender.make(task.shape)


def trial(plan: Plan, contender: Contender, seed: int, weights: Path | None = None) -> dict[str, Any]:
    """One training from one seed with its scores, or the error that a rival's solver ended it with.

    weights: a file that keeps what was trained, so that it is asked other questions without a training.
    """
    begin = time.perf_counter()
    found: dict[str, Any] = {"seed": seed, "training": None, "ways": {}}
    model = model_of(plan.task, contender, seed)
    if contender.recipe is not None:
        try:
            found["training"] = _trained(plan.task, model, contender.recipe, seed, weights)
        except torch.linalg.LinAlgError as error:
            # torchdeq's Anderson, where its least-squares problem is singular.
            said = f"{type(error).__name__}: {error}"[:200]
            return found | {"error": said, "wall_seconds": time.perf_counter() - begin}
    for name in contender.sets or plan.sets:
        examples = plan.task.test(name, plan.puzzles)
        if contender.guess is not None:
            right = (contender.guess(examples) == examples.targets) | (examples.targets == IGNORED)
            nothing = torch.zeros(len(right), dtype=torch.long)
            found["ways"].setdefault("guess", {})[name] = scored(
                Answer(nothing, nothing, nothing == 1), right, examples.targets
            )
        for way in contender.ways:
            start = time.process_time()
            answer, right = answered(model, examples, way)
            score = scored(answer, right, examples.targets) | {"process_seconds": time.process_time() - start}
            found["ways"].setdefault(way.name, {})[name] = score
    if contender.solvers:
        examples = plan.task.test(plan.solver_set, plan.puzzles).at(slice(0, plan.solver_puzzles))
        found["solvers"] = compared_solvers(model, examples)
    if contender.checks:
        found["checks"] = {
            name: compared_checks(model, plan.task.test(name, plan.puzzles).at(slice(0, PUZZLES)), contender.checks)
            for name in contender.sets or plan.sets
        }
    return found | {"wall_seconds": time.perf_counter() - begin}


def _trained(task: Task, model: Model, recipe: Recipe, seed: int, weights: Path | None) -> dict[str, float]:
    """Train a model in place, or give it the weights that the same recipe had from the same seed."""
    asked = repr((recipe, seed, {name: tuple(w.shape) for name, w in model.state_dict().items()}))
    if weights is not None and weights.exists():
        kept = torch.load(weights, weights_only=True)
        if kept["asked"] == asked:
            model.load_state_dict(kept["weights"])
            model.eval()
            return dict(kept["training"])
    training = train(task, model, recipe, seed)
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"asked": asked, "training": training, "weights": model.state_dict()}, weights)
    return training


def entry_row(entry: Entry, runs: list[dict[str, Any]]) -> Row:
    """The row of a contender from the runs of all seeds."""
    plan, contender = entry.plan, entry.contender
    model = model_of(plan.task, contender, 0)
    failed = [f"from seed {run['seed']} ({run['error']})" for run in runs if "error" in run]
    # A row of none, if all failed.
    runs = [run for run in runs if "error" not in run] or runs[:1]
    claimed = {
        claim.ratio: lower(runs, claim) for claim in plan.claims if claim.contender == contender.name and claim.way
    }
    tokens = {name: plan.task.test(name, plan.puzzles) for name in contender.sets or plan.sets}
    return {
        "name": entry.name,
        "metric": entry.metric,
        "contender": contender.name,
        "tied": contender.recipe is not None and len(model.blocks) == 1,
        "parameters": 0 if contender.recipe is None else sum(p.numel() for p in model.parameters()),
        "recipe": None if contender.recipe is None else repr(contender.recipe),
        "puzzles": plan.puzzles,
        "flops": {
            way: {
                name: model.flops(
                    tokens[name].inputs.shape[1],
                    tokens[name].edges.shape[-1],
                    statistics.mean(run["ways"][way][name]["evaluations_mean"] for run in runs),
                )
                for name in sets
            }
            for way, sets in runs[0]["ways"].items()
            if way != "guess"
        },
        "runs": runs,
        "evidence": {},
        **({"error": f"not trained: {', '.join(failed)}"} if failed else {}),
        # What some seeds did not reach is no mean over all.
        "ratios": {key: None if failed else value for key, value in claimed.items() if value != "absent"},
        "wall_seconds": sum(run["wall_seconds"] for run in runs),
    }


def values(runs: list[dict[str, Any]], way: str, name: str, field: str = "exact") -> list[float]:
    """What every seed found; seeds that found nothing to take a mean of are left out."""
    found = [run["ways"].get(way, {}).get(name, {}).get(field) for run in runs]
    return [value for value in found if value is not None]


def lower(runs: list[dict[str, Any]], claim: Claim) -> float | str | None:
    """Mean less (for <=: plus) two standard errors; "absent" where nothing was asked, None without a value."""
    if not any(claim.set in run["ways"].get(claim.way, {}) for run in runs):
        return "absent"
    found = values(runs, claim.way, claim.set, claim.field)
    if not found:
        # Where all puzzles have settled nothing is at odds with a bound on the others.
        return 0.0 if claim.sense == "<=" else None
    mean, error = mean_and_error(found)
    return mean - 2 * error if claim.sense == ">=" else mean + 2 * error


def mean_and_error(found: list[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error, 0 for one seed."""
    return statistics.mean(found), statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0


def verdict(ours: list[float], theirs: list[float], puzzles: int) -> str:
    """Whether ours are better by two standard errors, of the seeds or of the puzzles, whichever are larger."""
    if min(len(ours), len(theirs)) < 2:
        return "one seed decides nothing"
    (ours_mean, ours_error), (their_mean, their_error) = mean_and_error(ours), mean_and_error(theirs)
    share = (ours_mean + their_mean) / 2
    error = max(math.hypot(ours_error, their_error), math.sqrt(2 * share * (1 - share) / puzzles))
    gain = ours_mean - their_mean
    return "as good" if abs(gain) <= 2 * error else "better" if gain > 0 else "worse"


def costs_row(setting: Costs, repeats: int, max_seconds: float) -> Row:
    """A training step of all contenders, and fixed numbers of their steps, in turns; the peak memory of the former.

    All with the weights of the beginning: what is trained changes how many evaluations a solve makes, and those are
    counted where it is asked.
    """
    begin, plan, task = time.perf_counter(), setting.plan, setting.plan.task
    functions: dict[str, Callable[[], Any]] = {}
    for contender in plan.contenders:
        if contender.recipe is None:
            continue
        model = model_of(task, contender, 0)
        functions[f"{contender.name} training"] = functools.partial(one_step, task, model, contender.recipe)
        examples = task.test(plan.costs, plan.puzzles).at(slice(0, plan.cost_puzzles))
        for way in contender.ways:
            if isinstance(way, Fixed):
                functions[f"{contender.name}, {way.name}"] = functools.partial(answered, model.eval(), examples, way)
    memory = {
        name: peak_memory(function, torch.device("cpu"))
        for name, function in functions.items()
        if name.endswith(" training")
    }
    first = {name: once(function)[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    return {
        "name": setting.name,
        "metric": setting.metric,
        "set": plan.costs,
        "batch": plan.cost_puzzles,
        "evidence": {},
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "peak_memory_bytes": memory,
        "ratios": {},
        "wall_seconds": time.perf_counter() - begin,
    }


def one_step(task: Task, model: Model, recipe: Recipe) -> None:
    """Forward and backward of the first batch."""
    batch = task.draw(recipe.batch, torch.Generator().manual_seed(0)).dense()
    model.zero_grad()
    states = iter(recipe.training.states(model, batch, random.Random(0), 1.0))
    loss(model, next(states), batch.targets).backward()

"""The suite `scale`: keys that processes of one machine hold together, beside the fused operation of one process.

All processes are started once. Each number of them has a group of its own, and the groups take turns while the rest
waits. The rank 0 of every group is the same process, which also runs the fused operation.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, multiprocessing

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Picard, solve

from . import guard, problems
from .problems import Data, Setting, Shape
from .scale_tables import PAGE, rewrite, tables
from .scale_team import COLLECTIVES, Calls, Team, Traffic, counted
from .targets import SCALE as TARGETS
from .targets import Row

if TYPE_CHECKING:
    from implicit_attention import Potential, Solution

__all__ = ["METRICS", "NOTES", "PAGE", "TARGETS", "rewrite", "run", "settings_of", "tables"]

Metric = Literal["EVALUATION", "SOLVE", "TRAINING", "COLLECTIVE"]
METRICS: tuple[Metric, ...] = ("EVALUATION", "SOLVE", "TRAINING", "COLLECTIVE")
TESTS = ("tests/distributed/test_sharded.py",)
PROCESSES = (1, 2, 4)
#: States of sharded keys and of the fused operation may be as far apart, relative to their size, as the tolerance.
APART = problems.RTOL
GRADIENT_APART = 10 * APART
#: Budgets of Picard's iteration: what a solve begins with is in both.
FEW, MANY = 2, 10
#: So much longer than other suites it may measure: processes wait for the latest of them, whose times vary.
LONGER = 5
#: Longer than any process lets the others wait on a busy machine.
PATIENCE = datetime.timedelta(minutes=10)

NOTES = (
    "All processes run on one machine, with one thread each, and talk by gloo over the loopback interface. Efficiency: "
    "seconds of one process / (P x seconds of P processes). Where P exceeds the cores, processes share them.",
    "`local`: from a call's beginning to its end, less the time in collectives, of the process where that is longest. "
    "`collective`: the rest, which is messages and waiting for processes that are later.",
    "EVALUATION: a solve by Picard's iteration with a budget of 11 evaluations, over 11; bytes and collectives are "
    "those of one more evaluation. The loop fills queries up to blocks, of 8 at D 64, so that a single one sends the "
    "numbers of 8. SOLVE: `Anderson()` to 1e-4 from the queries, anchor .5, and all collectives of the "
    "solve. Fused: the same with `LogSumExp` on one process and one thread. TRAINING: the solve and its exact gradient "
    "for queries and keys. COLLECTIVE: an all-reduce by itself.",
    "A solve has times only if every query is CONVERGED, float64 agrees, all processes hold the same bits, and the "
    "state is that of the fused operation to the tolerance.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The problem of one row, whose keys are sharded over processes; for COLLECTIVE the messages between them."""

    metric: Metric
    problem: Setting
    processes: tuple[int, ...] = PROCESSES

    @property
    def name(self) -> str:
        shape = self.problem.shape
        if self.metric == "COLLECTIVE":
            return f"COLLECTIVE: all-reduce of {shape.length} x {shape.dim}"
        kind = self.problem.name.replace(" keys", "")
        queries = "1 query" if shape.length == 1 else f"{shape.length} queries"
        return f"{self.metric}: {queries}, {shape.num_keys} keys, D {shape.dim}, {kind}"


def _case(metric: Metric, queries: int, keys: int = 1, kind: Literal["gaussian", "clustered"] = "gaussian") -> Case:
    dim = 70 if metric == "COLLECTIVE" else 64
    return Case(metric, Setting(kind, 2.0, 0.5, Shape(batch=1, heads=1, length=queries, dim=dim, num_keys=keys)))


FULL = (
    _case("EVALUATION", 64, 200_000),
    _case("EVALUATION", 64, 20_000),
    _case("EVALUATION", 1, 200_000),
    _case("SOLVE", 64, 200_000),
    _case("SOLVE", 64, 200_000, "clustered"),
    _case("TRAINING", 64, 20_000),
    *(_case("COLLECTIVE", queries) for queries in (1, 64, 1024, 16384)),
)
QUICK = (
    _case("EVALUATION", 64, 20_000),
    _case("EVALUATION", 64, 5_000),
    _case("SOLVE", 64, 20_000),
    _case("TRAINING", 64, 5_000),
    *(_case("COLLECTIVE", queries) for queries in (64, 1024)),
)


def settings_of(quick: bool) -> tuple[Case, ...]:
    return QUICK if quick else FULL


def run(
    settings: Iterable[Case],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 3.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure all cases of these metrics in one team of processes; `progress` is called with each row, at the end.

    max_seconds: a case has fewer rounds where one of its functions would take `LONGER` times this in all of them.
    """
    wanted = set(metrics)
    cases = [case for case in settings if case.metric in wanted]
    if (reason := guard.red(TESTS)) is not None:
        refused = {name: None for name in ("efficiency 2", "sharded / fused", "collectives", "bytes")}
        empty = {"evidence": {"ours": {"error": reason}}, "seconds": {}, "ratios": refused, "wall_seconds": 0.0}
        rows: list[Row] = [described(case) | empty for case in cases]
    else:
        with tempfile.TemporaryDirectory() as folder:
            count = max((max(case.processes) for case in cases), default=1)
            arguments = (count, folder, cases, repeats, LONGER * max_seconds)
            multiprocessing.spawn(member, args=arguments, nprocs=count)
            rows = json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        progress(row)
    return rows


def described(case: Case) -> Row:
    return {"name": case.name, "metric": case.metric, **dataclasses.asdict(case.problem), "cores": cores()}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# In every process.


def member(rank: int, count: int, folder: str, cases: list[Case], repeats: int, max_seconds: float) -> None:
    """Do the work of process `rank`; the first one writes the rows."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=PATIENCE)
    sizes = sorted({size for case in cases for size in case.processes})
    team = Team(rank, {size: distributed.new_group(list(range(size))) for size in sizes}, repeats, max_seconds)
    rows = []
    for case in cases:
        begin = time.perf_counter()
        row = described(case) | MEASURES[case.metric](case, team)
        rows.append({**row, "wall_seconds": time.perf_counter() - begin})
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows, allow_nan=False))
    # Nobody may leave while another still reads what it was sent.
    distributed.barrier()
    distributed.destroy_process_group()


def evaluation(case: Case, team: Team) -> Row:
    """One evaluation by so many processes: a part of a solve whose budget every query uses up."""
    data, setting = problems.draw(case.problem), case.problem
    functions: dict[str, Calls] = {}
    found: dict[str, Any] = {}

    def of(potential_of: Callable[[Tensor], Potential], keys: Tensor, budget: int) -> Callable[[], Solution]:
        @torch.no_grad()
        def call() -> Solution:
            energy = AnchoredEnergy(potential_of(keys), data.queries, setting.anchor)
            return solve(energy, data.queries, solver=Picard(rtol=0.0, atol=0.0, max_steps=budget))

        return call

    fused = of(partial(LogSumExp, beta=setting.beta), data.keys, MANY)
    right = fused().value if team.rank == 0 else None
    for size in case.processes:
        call: Callable[[], Any] = idle
        if team.rank < size:
            potential_of = partial(sharded, beta=setting.beta, group=team.groups[size])
            part, traffic, done = team.part(data.keys, size), [], []
            for budget in (FEW, MANY):
                call = of(potential_of, part, budget)
                with counted() as seen_here:
                    solution = call()
                done.append(evaluations_of(solution, budget))
                traffic.append(seen_here)
            more = Traffic(traffic[1].calls - traffic[0].calls, traffic[1].bytes - traffic[0].bytes)
            found[f"{size}"] = {
                "keys held": part.shape[-2],
                **seen(more, size, done[1] - done[0]),
                "bytes": more.bytes / (done[1] - done[0]) / setting.shape.length,
                **{"evaluations": done[1], "calls": traffic[1].calls, "sent": traffic[1].bytes},
            }
            if right is not None and distance(solution.value, right) > APART:
                found[f"{size}"]["error"] = "not timed: the state is not that of the fused operation"
        functions[f"{size}"] = (size, call)
    functions["fused"] = (1, fused)
    times = team.turns(functions)
    if team.rank:
        return {}
    last = found[f"{max(case.processes)}"]
    ratios = {name: last[name] for name in ("collectives", "bytes")} | compared(case, times["seconds"])
    return unless_wrong(found, times, ratios)


def evaluations_of(solution: Solution, budget: int) -> int:
    """The evaluations of every query, which must be those of the budget."""
    if not bool((solution.num_evals == budget + 1).all()):
        raise RuntimeError(f"every query must use up its {budget + 1} evaluations, got {solution.num_evals}")
    return budget + 1


def solved(case: Case, team: Team) -> Row:
    """The same solve, or training step, by so many processes: the times, once the answer is right."""
    data, setting = problems.draw(case.problem), case.problem
    training = case.metric == "TRAINING"
    functions: dict[str, Calls] = {}
    found: dict[str, Any] = {}

    def of(potential_of: Callable[[Tensor], Potential], keys: Tensor) -> Callable[[], Answer]:
        def call() -> Answer:
            x, k = (t.detach().requires_grad_(training) for t in (data.queries, keys))
            energy = AnchoredEnergy(potential_of(k), x, setting.anchor)
            solution = solve(energy, x.detach(), solver=Anderson(atol=problems.ATOL, rtol=setting.rtol))
            with counted() as backward:
                if training:
                    (solution.value * data.cotangent).sum().backward()
            return Answer(solution, x.grad, k.grad, backward)

        return call

    fused = of(partial(LogSumExp, beta=setting.beta), data.keys)
    right = fused() if team.rank == 0 else None
    for size in case.processes:
        call: Callable[[], Any] = idle
        if team.rank < size:
            group = team.groups[size]
            call = of(partial(sharded, beta=setting.beta, group=group), team.part(data.keys, size))
            with counted() as traffic:
                answer = call()
            backward = answer.backward
            traffic.calls -= backward.calls
            evaluations = int(answer.solution.num_evals.max())
            found[f"{size}"] = seen(traffic, size, evaluations) | checked(data, answer, right, group)
            found[f"{size}"] |= {"backward calls": backward.calls, "backward bytes": backward.bytes}
        functions[f"{size}"] = (size, call)
    functions["fused"] = (1, fused)
    times = team.turns(functions)
    if team.rank:
        return {}
    ratios: dict[str, float | None] = compared(case, times["seconds"])
    if not training:
        ratios["collectives"] = found[f"{max(case.processes)}"]["collectives"]
    return unless_wrong(found, times, ratios)


def unless_wrong(found: dict[str, Any], times: dict[str, Any], ratios: dict[str, float | None]) -> Row:
    """Evidence, times and ratios, of which an answer with an error has only the first."""
    if wrong := [reason for part in found.values() if (reason := part.get("error"))]:
        return {"evidence": {"ours": {"error": wrong[0]}, **found}, "seconds": {}, "ratios": dict.fromkeys(ratios)}
    return {"evidence": found, **times, "ratios": ratios}


def collective(case: Case, team: Team) -> Row:
    """All-reduces by themselves."""
    sizes = [size for size in case.processes if size > 1]
    numbers = torch.zeros(case.problem.shape.length, case.problem.shape.dim)
    functions: dict[str, Calls] = {}
    for size in sizes:
        group = team.groups[size]
        functions[f"{size}"] = (size, partial(distributed.all_reduce, numbers, group=group))
    times = team.turns(functions)
    return {"evidence": {"bytes": numbers.nbytes}, **times, "ratios": {}}


MEASURES: dict[Metric, Callable[[Case, Team], Row]] = {
    "EVALUATION": evaluation,
    "SOLVE": solved,
    "TRAINING": solved,
    "COLLECTIVE": collective,
}


def idle() -> None:
    """Do the work of a process that is not in a group."""


def sharded(keys: Tensor, beta: float, group: Any) -> Potential:
    """The potential of all keys of a group, of which this process holds `keys`."""
    from implicit_attention.distributed import ShardedLogSumExp

    return ShardedLogSumExp(keys, beta, group=group)


class Answer(NamedTuple):
    """The result of a solve or training step; the gradient for keys is that of the keys of this process."""

    solution: Solution
    by_queries: Tensor | None
    by_keys: Tensor | None
    backward: Traffic


def seen(traffic: Traffic, size: int, evaluations: int) -> dict[str, Any]:
    """Collectives of an evaluation, in the mean over a solve."""
    if size > 1 and not traffic.calls:
        raise RuntimeError(f"{size} processes must exchange something, but called none of {', '.join(COLLECTIVES)}")
    return {"evaluations": evaluations, "calls": traffic.calls, "collectives": traffic.calls / evaluations}


def checked(data: Data, answer: Answer, right: Answer | None, group: Any) -> dict[str, Any]:
    """Measure on the first process how well a group agrees with itself and with the fused operation."""
    solution = answer.solution
    everywhere: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everywhere, (solution.value.detach(), answer.by_queries, answer.by_keys), group=group)
    states, by_queries, by_keys = zip(*everywhere, strict=True)
    if right is None:
        return {}
    found = problems.evidence(data, states[0])
    found["bits"] = all(torch.equal(state, states[0]) for state in states)
    found["apart"] = distance(states[0], right.solution.value)
    reasons = {
        "not all queries are CONVERGED": not bool(solution.converged.all()),
        "float64 finds queries above the tolerance": found["converged"] < 1,
        "processes hold other states": not found["bits"],
        "the state is not that of the fused operation": found["apart"] > APART,
    }
    if right.by_queries is not None and right.by_keys is not None:
        found["gradient apart"] = max(
            distance(by_queries[0], right.by_queries), distance(torch.cat(by_keys, dim=-2), right.by_keys)
        )
        reasons["the gradient is not that of the fused operation"] = found["gradient apart"] > GRADIENT_APART
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        found["error"] = f"not timed: {', '.join(wrong)}"
    return found


def distance(found: Tensor, right: Tensor) -> float:
    """Relative, of the whole."""
    found, right = found.detach(), right.detach()
    return float((found - right).norm() / right.norm())


def compared(case: Case, seconds: dict[str, dict[str, float]]) -> dict[str, float | None]:
    """Efficiency, where every process has a core, and one process over the fused operation."""
    one = seconds["1"]["median"]
    sizes = [size for size in case.processes if 1 < size <= cores()]
    ratios: dict[str, float | None] = {
        f"efficiency {size}": one / (size * seconds[f"{size}"]["median"]) for size in sizes
    }
    return ratios | {"sharded / fused": one / seconds["fused"]["median"]}

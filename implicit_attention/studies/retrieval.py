"""Retrieval by inverse temperature: one step, two steps and the equilibrium beside the nearest key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import solve
from ..solvers import Anderson
from .contenders import STOP
from .data import TASKS, DataSample
from .evaluate import SUCCESS, relative_error
from .potentials import LOG_SUM_EXP, energy_of

#: Retrieval is tried at these multiples of `--beta`.
FACTORS = tuple(2.0**power for power in range(-2, 7))
ONE, TWO, EQUILIBRIUM = "one step", "two steps", "equilibrium"
#: The methods without beta: the stored pattern nearest to the query, by three measures.
NEAREST = ("nearest by dot product", "nearest by distance", "nearest by distance, known")
#: Retrieval rates of digits measured independently of this command: log-sum-exp, beta 8, 200 patterns, anchor 0,
#: mean and standard deviation over 8 draws.
REFERENCE = {
    ("half-masked", ONE): (0.701, 0.015),
    ("half-masked", EQUILIBRIUM): (0.854, 0.028),
    ("noisy", ONE): (0.895, 0.019),
    ("noisy", EQUILIBRIUM): (0.916, 0.021),
}

Rates = list[dict[str, Any]]


@torch.no_grad()
def states(sample: DataSample, *, beta: float, anchor: float, potential: str = LOG_SUM_EXP) -> dict[str, Tensor]:
    """Return every method's states of all queries, (*draws, N, D) each.

    All solvers have one equilibrium, up to their tolerance: Anderson stands for them.
    """
    energy = energy_of(sample.keys, sample.queries, sample.usable, beta=beta, anchor=anchor, potential=potential)
    one = energy.fixed_point_map(sample.queries)
    solution = solve(energy, sample.queries, solver=Anderson(**STOP), on_failure="ignore")
    return {ONE: one, TWO: energy.fixed_point_map(one), EQUILIBRIUM: solution.value}


def nearest(sample: DataSample) -> dict[str, Tensor]:
    """Return the stored patterns with the largest <pattern, query> or the smallest distance, (*draws, N, D) each.

    The last distance leaves out the masked entries, which no other method knows.
    """
    if sample.keys.ndim > 2:
        # Draw by draw: the scores of all at once are large.
        draws = [nearest(sample.draw(index)) for index in range(len(sample.keys))]
        return {name: torch.stack([answers[name] for answers in draws]) for name in NEAREST}
    closest = (score.masked_fill(~sample.usable, torch.inf).argmin(-1) for score in _scores(sample))
    return {name: sample.keys[index] for name, index in zip(NEAREST, closest, strict=True)}


def _scores(sample: DataSample) -> Iterator[Tensor]:
    """Yield (N, M) for each of `NEAREST`, smallest where the key is nearest; one at a time, as they are large."""
    keys, queries, known = sample.keys.double(), sample.queries.double(), sample.known.double()
    yield -(queries @ keys.mT)
    for weight in (torch.ones_like(known), known):
        # sum_i weight_i (query_i - key_i)^2, less what is the same for all keys.
        yield weight @ keys.square().mT - 2 * (weight * queries) @ keys.mT


def sweep(
    drawn: DataSample, part: Callable[[int, int], None], *, beta: float, anchor: float, potential: str, reference: bool
) -> Rates:
    """Measure the retrieval rates of every method at every beta, with mean and standard deviation over the draws.

    Args:
        drawn: all draws.
        part: gets how many of how many betas are done.
        beta: inverse temperature that `FACTORS` multiply.
        anchor: weight of the query in the energy.
        potential: one of `POTENTIALS`.
        reference: whether rates at `beta` are put beside `REFERENCE`.
    """
    hits: list[tuple[str, float | None, Tensor]] = []
    refused: dict[float | None, str] = {}

    def add(answers: dict[str, Tensor], beta: float | None) -> None:
        hits.extend((name, beta, retrieved(z, drawn)) for name, z in answers.items())

    for done, factor in enumerate(FACTORS):
        part(done, len(FACTORS))
        try:
            add(states(drawn, beta=factor * beta, anchor=anchor, potential=potential), factor * beta)
        except ValueError as error:
            # An energy without a lower bound has no answer: nothing is retrieved.
            refused[factor * beta] = str(error)
            add(dict.fromkeys((ONE, TWO, EQUILIBRIUM), torch.full_like(drawn.queries, torch.nan)), factor * beta)
    add(nearest(drawn), None)
    entries = []
    for task, rows in zip(TASKS, drawn.parts, strict=True):
        for name, sharpness, hit in hits:
            rates = hit[..., rows].double().mean(-1)
            mean, std = float(rates.mean()), float(rates.std())
            entry = {"task": task, "state": name, "beta": sharpness, "rates": rates.tolist(), "mean": mean, "std": std}
            if sharpness in refused:
                entry["refused"] = refused[sharpness]
            if reference and sharpness == beta and (task, name) in REFERENCE:
                expected, deviation = REFERENCE[task, name]
                deviations = (mean - expected) / deviation
                entry |= {"reference_mean": expected, "reference_std": deviation}
                entry |= {"deviations": deviations, "within_three": abs(deviations) <= 3}
            entries.append(entry)
    return entries


def retrieved(z: Tensor, sample: DataSample) -> Tensor:
    """Return for every state whether it is the pattern that its query was made from."""
    return relative_error(z, sample.targets) < SUCCESS


def examples(sample: DataSample, entries: Rates, *, beta: float, anchor: float, potential: str) -> dict[str, Tensor]:
    """Return states (N, D) of one draw to look at: one step at `beta`, and methods at their own best betas."""

    def at(beta: float, state: str) -> Tensor:
        return states(sample, beta=beta, anchor=anchor, potential=potential)[state]

    def at_best(state: str) -> Tensor:
        rows = zip(TASKS, sample.parts, strict=True)
        return torch.cat([at(best(entries, task, state)["beta"], state)[part] for task, part in rows])

    return {
        f"{ONE},\nbeta {beta:g}": at(beta, ONE),
        f"{ONE},\nbest beta": at_best(ONE),
        f"{EQUILIBRIUM},\nbest beta": at_best(EQUILIBRIUM),
        "nearest,\nknown entries": nearest(sample)[NEAREST[-1]],
    }


def betas_of(entries: Rates) -> list[float]:
    """Return the betas of the sweep, rising."""
    return sorted({entry["beta"] for entry in entries} - {None})


def of(entries: Rates, task: str, state: str) -> Rates:
    """Return the entries of one method on one task, in the order of beta; one if it has no beta."""
    return [entry for entry in entries if (entry["task"], entry["state"]) == (task, state)]


def best(entries: Rates, task: str, state: str) -> dict[str, Any]:
    """Return the entry of the method's own best beta, of equal ones the smallest."""
    return max(of(entries, task, state), key=lambda entry: entry["mean"])


def verdict(entries: Rates, task: str) -> tuple[float, float, str]:
    """Return (gain, its standard error, word) of the equilibrium over one step, each at its own best beta.

    Both have the same draws: the standard error is that of their differences, and a word needs two of them. Draws that
    all gain the same, as those of few patterns do, say nothing of the error.
    """
    pairs = (best(entries, task, state)["rates"] for state in (EQUILIBRIUM, ONE))
    gains = torch.tensor([ours - theirs for ours, theirs in zip(*pairs, strict=True)], dtype=torch.float64)
    gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    word = "as good as one step" if abs(gain) <= 2 * error else "better" if gain > 0 else "worse"
    if gain != 0 and error < 1e-9:
        word = "not told apart from one step by draws that are all alike"
    return gain, error, word


def summary(entries: Rates, beta: float) -> str:
    """Summarise the sweep in one sentence of numbers that were measured."""

    def moved(state: str) -> str:
        spreads = []
        for task in TASKS:
            means = [entry["mean"] for entry in of(entries, task, state) if entry["beta"] >= beta]
            spreads.append(f"{100 * (max(means) - min(means)):.1f}")
        return " and ".join(spreads)

    verdicts = [verdict(entries, task) for task in TASKS]
    words = [word for _, _, word in verdicts]
    each = " and ".join(f"{word} for {task} queries" for task, word in zip(TASKS, words, strict=True))
    outcome = each if len({*words}) > 1 else words[0]
    gains = ", ".join(f"{100 * gain:+.1f} +- {100 * error:.1f}" for gain, error, _ in verdicts)
    known = " and ".join(f"{100 * best(entries, task, NEAREST[-1])['mean']:.1f}" for task in TASKS)
    return (
        f"From beta {beta:.4g} to {betas_of(entries)[-1]:.4g} the equilibrium's rate moves by {moved(EQUILIBRIUM)} "
        f"points ({' and '.join(TASKS)}), that of one step by {moved(ONE)}; each at its own best beta, the equilibrium "
        f"is {outcome} ({gains} points), and the nearest key over the known entries retrieves {known} %."
    )

"""`report` and `last_solves`: evidence of the equilibria of a model's last forward, layer by layer."""

from __future__ import annotations

import dataclasses
import math
from itertools import starmap
from typing import Any

from torch import Tensor, nn

from ...diagnostics import distinct_fixed_points, effective_keys
from ...diagnostics.diagnosis import table
from ...layers.block import Equilibrium
from ...layers.remembering import report_from_graph
from ...solution import Record, SolveReport, Status, status_counts
from ...training.observed import or_dash
from .anchors import PART
from .attach import attention_of, is_ours
from .attention import LAST, Last
from .reach import attention_names, listed
from .saved import names


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer's last forward: of attention, or of the block of `tie` or `settle`, which has no queries.

    Attributes:
        name: the name of the module in the model.
        anchor: how much of the queries stays (the mean over heads); NaN for a block.
        num_evals: evaluations of the map per query, or per problem of a block (the mean).
        max_evals: the largest number of evaluations that a query took.
        residual: the largest |f(z) - z|; NaN where nothing was solved.
        converged: share of the queries that reached their tolerance; NaN if none had a tolerance to reach.
        gradient: the same for the backward solves; NaN before a backward pass, and if it solves nothing.
        effective_keys: exp(entropy) of the attention weights, the mean over heads and a sample of queries.
        distinct: number of different fixed points among the queries of the sample (the mean over heads).
        queries: the number of queries in that sample, which is of the first sequence. Masked queries count.
        statuses: how many problems ended with each status, by its name.
        relative_residual: the largest |f(z) - z| / |f(z)|; NaN where that was not measured.
        rtol: the tolerance that it had to reach; NaN for a fixed budget.

    Examples:
        >>> from implicit_attention.integrations.transformers import LayerReport
        >>> layer = LayerReport("model.layers.0.self_attn", 0.9, 4.5, 6, 1e-6, 1.0, 1.0, 3.2, 7.5, 8)
        >>> layer.max_evals
        6

    Not for making by hand: `report` returns one for each layer.
    """

    name: str
    anchor: float
    num_evals: float
    max_evals: int
    residual: float
    converged: float
    gradient: float
    effective_keys: float
    distinct: float
    queries: int
    statuses: dict[str, int] = dataclasses.field(default_factory=dict)
    relative_residual: float = math.nan
    rtol: float = math.nan


def last_solves(model: nn.Module) -> dict[str, SolveReport]:
    """The `SolveReport` of the last call of every attention layer, and of every block of `tie` and `settle`, by name.

    Args:
        model: a model, after a forward. Layers with another attention are left out.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, last_solves
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = attach(LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes)), anchor=0.9)
        >>> output = model(torch.randint(10, (1, 5)))
        >>> {name: bool(solve.converged.all()) for name, solve in last_solves(model).items()}
        {'model.layers.0.self_attn': True, 'model.layers.1.self_attn': True}

    Not for looking at in a terminal: `report` prints a table, with effective keys and distinct fixed points.
    """
    return {name: report_of(last) for name, last in _calls(model)} | _solves_of_blocks(model)


class LayerReports(list[LayerReport]):
    """The rows of a report, of which a notebook shows one line: their table was printed.

    Not for making by hand: `report` returns it.

    Examples:
        >>> from implicit_attention.integrations.transformers.report import LayerReports
        >>> LayerReports()
        LayerReports(0 layers)
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layer{'' if len(self) == 1 else 's'})"


def report(model: nn.Module) -> LayerReports:
    """Print and return a row for every attention layer and block, about the last forward of the model.

    Of a model with many layers the table has the first and the last ones, and those where a solve failed. Below it are
    the statuses of blocks (of `tie` and `settle`), the number of layers whose learned anchors require a gradient, and,
    where attention was replaced, the names of attention that took no part in that forward.

    Args:
        model: a model with equilibria, after a forward. A module that is called several times reports its
            last call.

    Raises:
        ValueError: if no layer of the model has called equilibrium attention, and no block was solved.

    Examples:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from implicit_attention.integrations.transformers import attach, report
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = attach(LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes)), anchor=0.9)
        >>> output = model(torch.randint(10, (1, 5)))
        >>> rows = report(model)
        layer                     anchor  evals  max  residual  relative ...
        >>> [row.queries for row in rows]
        [5, 5]

    Not for every step of a training loop, as it reads all numbers on the host: `last_solves` leaves them on the device.
    """
    blocks = _solves_of_blocks(model)
    calls = _calls(model) if blocks else last_calls(model)
    rows = LayerReports([*(_row(name, last) for name, last in calls), *starmap(_row_of_block, blocks.items())])
    failed = [row.converged < 1 or row.gradient < 1 for row in rows]
    shown = [row for i, row in enumerate(rows) if min(i, len(rows) - 1 - i) < SHOWN or failed[i]][:MOST]
    print(table([_HEAD, *map(_cells, shown)]))
    if left := len(rows) - len(shown):
        print(f"and {left} layers more, which are in the list that is returned")
    for row in rows:
        if row.name in blocks:
            print(f"{row.name}: {', '.join(f'{count} {status}' for status, count in row.statuses.items())}")
    parts = (getattr(model.get_submodule(name), PART, None) for name, _ in calls)
    if learned := [any(p.requires_grad for p in part.parameters()) for part in parts if part is not None]:
        print(f"learned anchors: trainable in {sum(learned)} of {len(learned)} layers")
    reported = {row.name for row in rows}
    if calls and (others := {name: kind for name, kind in attention_names(model).items() if name not in reported}):
        print(f"not in this forward, or with attention of their own: {listed(others)}")
    return rows


def last_calls(model: nn.Module) -> list[tuple[str, Last]]:
    """The attention modules that have called equilibrium attention, by name, with their `Last`."""
    calls = _calls(model)
    if not calls:
        remedy = "after `attach(model)`, call the model"
        if saved := names(getattr(model, "config", None)):
            remedy = f"its configuration has anchors for {saved[0]!r}: load it with `load`, then call it"
        raise ValueError(f"no layer of {type(model).__name__} has called equilibrium attention; {remedy}")
    return calls


def _calls(model: nn.Module) -> list[tuple[str, Last]]:
    # A module whose configuration names another attention now is left out.
    current = {
        name: getattr(module, LAST, None)
        for name, module in model.named_modules()
        if getattr(module, "config", None) is None or is_ours(attention_of(module))
    }
    return [(name, last) for name, last in current.items() if last is not None and last.report]


def report_of(last: Last) -> SolveReport:
    """The report of a call; if that was compiled, and could not warn of failures, this does."""
    assert last.settings is not None
    if isinstance(last.report, Record):
        last.report = report_from_graph(last.report, last.settings.options, last.site)
    assert last.report is not None
    return last.report


def _row(name: str, last: Last) -> LayerReport:
    solve, sample = report_of(last), last.sample
    assert sample is not None
    statuses = status_counts(solve.status)
    anchor = last.anchor.mean() if isinstance(last.anchor, Tensor) else last.anchor
    states, evals = sample.state, solve.num_evals
    if evals.numel() == 0 or states.numel() == 0:
        nan = math.nan
        return LayerReport(name, float(anchor), 0.0, 0, nan, nan, nan, nan, nan, 0, statuses)
    potential: Any = sample.problem(last.anchor).potential
    return LayerReport(
        name=name,
        anchor=float(anchor),
        num_evals=float(evals.double().mean()),
        max_evals=int(evals.max()),
        residual=float(solve.residual.max()),
        converged=_converged(solve),
        gradient=_share(solve.adjoint.status),
        effective_keys=float(effective_keys(potential, states).mean()),
        distinct=float(distinct_fixed_points(states).double().mean()),
        queries=states.shape[-2],
        statuses=statuses,
        **_relative(solve),
    )


def _solves_of_blocks(model: nn.Module) -> dict[str, SolveReport]:
    """The last solves of blocks of `tie` and `settle`, by name."""
    blocks = {name: part for name, part in model.named_modules() if isinstance(part, Equilibrium)}
    return {name: block.last_solve for name, block in blocks.items() if block.last_solve is not None}


def _row_of_block(name: str, solve: SolveReport) -> LayerReport:
    nan, evals = math.nan, solve.num_evals
    mean, most = (float(evals.double().mean()), int(evals.max())) if evals.numel() else (0.0, 0)
    residual = float(solve.residual.max()) if evals.numel() else nan
    shares = _converged(solve), _share(solve.adjoint.status)
    told: dict[str, Any] = {"statuses": status_counts(solve.status), **_relative(solve)}
    return LayerReport(name, nan, mean, most, residual, *shares, nan, nan, 0, **told)


def _relative(solve: SolveReport) -> dict[str, float]:
    relative, (rtol, _) = solve.relative_residual, solve.tolerances or (0.0, 0.0)
    return {"relative_residual": float(relative.max()) if relative.numel() else math.nan, "rtol": rtol or math.nan}


def _converged(solve: SolveReport) -> float:
    """The share of problems that converged among those that had a tolerance to reach."""
    aims = (solve.status != Status.EXPLICIT) & (solve.status != Status.BUDGET)
    return float(solve.converged[aims].double().mean())


def _share(backward: Tensor | None) -> float:
    """The share of backward solves that converged."""
    return math.nan if backward is None else float((backward <= Status.UNSTABLE).double().mean())


#: How many layers a table has from either end, and in all where many failed.
SHOWN, MOST = 6, 24
_HEAD = (
    *("layer", "anchor", "evals", "max", "residual", "relative", "rtol"),
    *("converged", "gradient", "eff. keys", "distinct"),
)


def _cells(row: LayerReport) -> tuple[str, ...]:
    residuals = (or_dash(row.residual, ".1e"), or_dash(row.relative_residual, ".1e"), or_dash(row.rtol, "g"))
    numbers = (or_dash(row.anchor, ".3g"), f"{row.num_evals:.3g}", f"{row.max_evals}", *residuals)
    shares = (percent(row.converged), percent(row.gradient))
    distinct = f"{or_dash(row.distinct, '.1f')} of {row.queries}" if row.queries else "-"
    sample = (or_dash(row.effective_keys, ".1f"), distinct)
    return (row.name, *numbers, *shares, *sample)


def percent(share: float) -> str:
    """A share in [0, 1] as text; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.4g} %"

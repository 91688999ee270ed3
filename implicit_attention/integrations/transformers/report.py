"""What the attention layers of a model did in their last forward, layer by layer."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor, nn

from ...attention.core import report_from_graph
from ...attention.read_out import made_by
from ...diagnostics import distinct_fixed_points, effective_keys
from ...solution import Record, SolveReport
from ...status import Status
from .attention import LAST, Last, Sample
from .reach import attention_names
from .registration import is_ours
from .saved import names


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One attention layer's last forward.

    Attributes:
        name: of the module in the model.
        anchor: how much of the queries stays (the mean over heads).
        num_evals: evaluations of the map per query, the mean.
        max_evals: the most that a query took.
        residual: the largest |f(z) - z|; NaN where nothing was solved.
        converged: share of the queries that reached their tolerance; NaN where nothing was to be reached.
        gradient: the same for the backward solves; NaN before a backward pass, and where there is none.
        effective_keys: exp(entropy) of the attention weights, the mean over heads and a sample of queries.
        distinct: number of different fixed points among the queries of the sample, the mean over heads.
        queries: how many queries of the first sequence that sample has; those that attend to nothing count.
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


def last_solves(model: nn.Module) -> dict[str, SolveReport]:
    """The evidence of every attention layer's last call, by its name in the model: what a training loop watches.

    Args:
        model: a model, after a forward. Layers with another attention are not there.
    """
    found = {}
    for name, last in _calls(model):
        if isinstance(last.report, Record):
            assert last.settings is not None
            last.report = report_from_graph(last.report, last.settings.options.on_failure)
        assert last.report is not None
        found[name] = last.report
    return found


def report(model: nn.Module) -> list[LayerReport]:
    """Print and return what every attention layer did in the last forward of the model.

    Attention that took no part in it is named below.

    Args:
        model: a model with a name of `register` as its attention, after a forward. A module that is called several
            times reports its last call.

    Raises:
        ValueError: if no layer of the model has called equilibrium attention; the message names the model.
    """
    rows = []
    found = last_solves(model)
    for name, last in last_calls(model):
        assert last.sample is not None
        assert last.settings is not None
        rows.append(_row(name, found[name], last.sample, _mean(last.settings.anchor)))
    print(_table(rows))
    if others := [name for name in attention_names(model) if name not in found]:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        print(f"not in this forward, or with attention of their own: {listed}")
    return rows


def last_calls(model: nn.Module) -> list[tuple[str, Last]]:
    """The attention modules that have called equilibrium attention, by name, with what they remember."""
    found = _calls(model)
    if not found:
        saved = names(getattr(model, "config", None))
        remedy = (
            f"its configuration has anchors for {saved[0]!r}: load it with `load`, then call it"
            if saved
            else "after `attach(model)`, call the model"
        )
        raise ValueError(f"no layer of {type(model).__name__} has called equilibrium attention; {remedy}")
    return found


def _calls(model: nn.Module) -> list[tuple[str, Last]]:
    named = [(name, module, getattr(module, LAST, None)) for name, module in model.named_modules()]
    return [(name, last) for name, module, last in named if last is not None and last.report and _is_current(module)]


def _is_current(module: nn.Module) -> bool:
    """Whether its model has not been given another attention since."""
    config = getattr(module, "config", None)
    return config is None or is_ours(getattr(config, "_attn_implementation", None))


def _row(name: str, evidence: SolveReport, sample: Sample, anchor: float) -> LayerReport:
    evals = evidence.num_evals.flatten()
    solved = evidence.status != Status.EXPLICIT
    backward = evidence.adjoint.status
    states, keys = sample.state, _shared(sample.keys, sample.state)
    potential = made_by(sample.make, keys, sample.beta, sample.mask, sample.bias)
    if evals.numel() == 0 or states.numel() == 0:
        return LayerReport(name, anchor, 0.0, 0, math.nan, math.nan, math.nan, math.nan, math.nan, 0)
    return LayerReport(
        name=name,
        anchor=anchor,
        num_evals=float(evals.double().mean()),
        max_evals=int(evals.max()),
        residual=float(evidence.residual.max()),
        converged=_share(evidence.converged[solved & (evidence.status != Status.BUDGET)]),
        gradient=math.nan if backward is None else _share(backward <= Status.UNSTABLE),
        effective_keys=float(effective_keys(potential, states).mean()),  # type: ignore[arg-type]
        distinct=float(distinct_fixed_points(states).double().mean()),
        queries=states.shape[-2],
    )


def _shared(keys: Tensor, states: Tensor) -> Tensor:
    """Keys (1, Hkv, M, D) for all heads of the states, in their precision."""
    heads = states.shape[1]
    return keys.to(states.dtype).repeat_interleave(heads // keys.shape[1], dim=1)


def _share(which: Tensor) -> float:
    return float(which.double().mean()) if which.numel() else math.nan


def _mean(anchor: float | Tensor) -> float:
    return float(anchor.detach().mean()) if isinstance(anchor, Tensor) else float(anchor)


_HEAD = ("layer", "anchor", "evals", "max", "residual", "converged", "gradient", "eff. keys", "distinct")


def _table(rows: list[LayerReport]) -> str:
    cells: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        cells.append(
            (
                row.name,
                f"{row.anchor:.3g}",
                f"{row.num_evals:.3g}",
                f"{row.max_evals}",
                _or_dash(row.residual, ".1e"),
                _or_dash(row.converged, ".4g", percent=True),
                _or_dash(row.gradient, ".4g", percent=True),
                _or_dash(row.effective_keys, ".1f"),
                f"{_or_dash(row.distinct, '.1f')} of {row.queries}",
            )
        )
    return aligned(cells)


def aligned(cells: list[tuple[str, ...]]) -> str:
    """Rows under each other, the first column to the left."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _or_dash(value: float, style: str, *, percent: bool = False) -> str:
    if math.isnan(value):
        return "-"
    return f"{100 * value:{style}} %" if percent else f"{value:{style}}"

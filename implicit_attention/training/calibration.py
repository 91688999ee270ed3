"""Whether a settled answer is a right one: how often, by size of problem, and by which checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import _validate
from ..layers.block import Equilibrium
from ..layers.confirm import Confirm, Confirmation, ConfirmReport, checked_confirm
from .settling import classes_last

#: The quantile of the normal law for an interval of 95 %.
NORMAL = 1.959964


@dataclasses.dataclass(frozen=True)
class Share:
    """A share `hits` / `count` with its interval of 95 % by Wilson's formula; NaN of none.

    Examples:
        >>> from implicit_attention.training.calibration import Share
        >>> print(Share(49, 50))
        98.0 (89.5 to 99.6)

    Not for means of numbers that are not 0 or 1.
    """

    hits: int
    count: int

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The bounds of the share."""
        if not self.count:
            return math.nan, math.nan
        n, p, z = self.count, self.value, NORMAL
        middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
        # Rounding may put a bound a little outside.
        return max(0.0, (middle - half) / (1 + z**2 / n)), min(1.0, (middle + half) / (1 + z**2 / n))

    def __str__(self) -> str:
        if not self.count:
            return "-"
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The answers to the problems of one set, each with what is known of it.

    Attributes:
        settled: which samples have converged, (n,).
        exact: which answers are right in all parts that are asked for, (n,).
        evaluations: (n,).
        agreement: the share of further solves that gave the same answer, (n,); None where none was made.
        confirm_evals: evaluations of those solves, (n,).

    Examples:
        >>> import torch
        >>> from implicit_attention.training.calibration import Calibration
        >>> settled, exact = torch.tensor([True, True, True, False]), torch.tensor([True, True, False, False])
        >>> found = Calibration(settled, exact, torch.tensor([4, 5, 9, 50]))
        >>> print(found.given(settled), "|", found.given(~settled))
        66.7 (20.8 to 93.9) | 0.0 (0.0 to 79.3)
        >>> found.risk()[1].tolist()
        [0.0, 0.0, 0.3333333333333333, 0.5]

    Not for answers whose parts count one by one: it asks whether a whole sample is right.
    """

    settled: Tensor
    exact: Tensor
    evaluations: Tensor
    agreement: Tensor | None = None
    confirm_evals: Tensor | None = None

    def given(self, which: Tensor | None = None) -> Share:
        """The share of right answers among `which` samples, (n,), or all."""
        exact = self.exact if which is None else self.exact[which]
        return Share(int(exact.sum()), len(exact))

    @property
    def confirmed(self) -> Tensor:
        """Which samples have converged to an answer that all further solves gave, (n,)."""
        return self.settled if self.agreement is None else self.settled & (self.agreement == 1)

    def risk(self) -> tuple[Tensor, Tensor]:
        """Coverage and risk, (n,): the share of wrong answers among those that are kept, the surest ones first.

        Settled answers are surer than others, then those on which more starts agree, then those of fewer evaluations.
        """
        order = self.evaluations.argsort(stable=True)
        # By the lesser criterion first: stable sorts keep its order among equals.
        for criterion in (self.agreement, self.settled.byte()):
            if criterion is not None:
                order = order[criterion[order].argsort(descending=True, stable=True)]
        numbers = torch.arange(1, len(order) + 1, dtype=torch.double, device=order.device)
        return numbers / max(len(order), 1), (~self.exact[order]).double().cumsum(0) / numbers


def calibrate(
    layer: Equilibrium,
    readout: Callable[[Any], Tensor],
    sets: Mapping[str, Iterable[tuple[tuple[Any, ...] | dict[str, Any], Tensor]]],
    *,
    exact: Callable[[Tensor, Tensor], Tensor] | None = None,
    axis: int = -1,
    confirm: Confirmation = None,
    **options: Any,
) -> dict[str, Calibration]:
    """Solve the problems of several sets, and compare what the solves say with what is right.

    A status says that a state is a fixed point; training decides whether that is the answer. With `confirm` each
    problem is solved again: a second check, which turns up states that drift on and fixed points that are one of
    several.

    Args:
        layer: the trained block; it is solved in evaluation mode, one with steps=k by its solver too. Not causal.
        readout: of a state: logits.
        sets: for each size of problem batches of (inputs, target): inputs is the tuple (x, *args) of a call of the
            layer, or the dict of its keyword arguments.
        exact: of (logits, target): which samples are right, boolean, (B,); None compares the largest logits with the
            targets, where those below 0 are not asked for and logits with NaN are wrong.
        axis: that of logits which numbers classes.
        confirm: further solves of each problem, as of `Equilibrium`; None is those of the layer. What they agree on is
            the answer, the largest logits where something is asked for, unless a `Confirm` has a read-out.
        **options: of each call, such as `solver`.

    Returns:
        A `Calibration` for each set; `calibration_table` and `plotting.risk_figure` show them.

    Raises:
        TypeError, ValueError: arguments that do not fit, with the remedy.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from implicit_attention.models.reasoners import ConvolutionalReasoner
        >>> from implicit_attention.training import calibrate
        >>> torch.manual_seed(0)
        <...>
        >>> layer, readout = ConvolutionalReasoner(8, inputs=1, axes=1), nn.Conv1d(8, 2, 1)
        >>> bits = torch.randint(2, (16, 1, 12))
        >>> sets = {"12 bits": [((bits.float(),), bits[:, 0].cumsum(-1) % 2)]}
        >>> found = calibrate(layer, readout, sets, axis=1, confirm=2)
        >>> found["12 bits"].exact.shape, found["12 bits"].agreement.shape
        (torch.Size([16]), torch.Size([16]))

    Not for the set of the training: weights are right there, and settle.
    """
    _validate.check_instance("layer", layer, Equilibrium, "be an Equilibrium", "wrap the block: Equilibrium(block)")
    required, remedy = "be a layer whose samples have one status each", "compare its tokens with the targets by hand"
    _validate.require(not layer.causal, "layer", required, "causal=True", remedy)
    further = layer.confirm if confirm is None else checked_confirm(confirm)
    _validate.check_instance("sets", sets, Mapping, "be a dict from names to batches", "for example {'9 x 9': batches}")
    modules = [part for part in (layer, readout) if isinstance(part, nn.Module)]
    # Of each part: one that is kept in evaluation mode while the others train stays so.
    modes = [(part, part.training) for module in modules for part in module.modules()]
    options = {"on_failure": "ignore"} | options
    if isinstance(layer.steps, int) and not options.keys() & {"solver", "steps"}:
        options["solver"] = layer.options.effective_solver
    try:
        for module in modules:
            module.eval()
        with torch.no_grad():
            found = {}
            for name, batches in sets.items():
                parts = []
                for inputs, target in batches:
                    answer = _Answer(layer, readout, inputs, target, exact, axis, options)
                    parts.append(answer.judged(further))
                _validate.require(bool(parts), f"sets[{name!r}]", "hold at least one batch", "none")
                fields = zip(*parts, strict=True)
                found[name] = Calibration(*(None if f[0] is None else torch.cat(f) for f in fields))  # type: ignore[arg-type]
            return found
    finally:
        for part, mode in modes:
            part.training = mode


@dataclasses.dataclass
class _Answer:
    """The answers of a layer to a batch."""

    layer: Equilibrium
    readout: Callable[[Any], Tensor]
    inputs: Any
    target: Tensor
    exact: Callable[[Tensor, Tensor], Tensor] | None
    axis: int
    options: dict[str, Any]

    def judged(self, further: tuple[Confirm, ...]) -> tuple[Any, ...]:
        """The fields of a `Calibration` for the batch."""
        asked = self._asked
        further = tuple(
            dataclasses.replace(how, readout=asked if how.readout is None else how.readout) for how in further
        )
        state = self._called(confirm=further) if further or self.layer.confirm else self._called()
        report = self.layer.last_solve
        assert report is not None
        settled, evaluations = report.converged.clone(), report.num_evals.clone()
        required, received = "have one sample an entry of the first axis", f"a status of shape {tuple(settled.shape)}"
        _validate.require(settled.ndim == 1, "layer", required, received, "pass event_ndim, or batches with one axis")
        logits = self.readout(state)
        right = self._right(logits, self.target)
        if not isinstance(report, ConfirmReport):
            return settled, right, evaluations, None, None
        return settled, right, evaluations, report.agreement, report.confirm_evals

    def _called(self, **options: Any) -> Any:
        options = self.options | options
        required, remedy = "be a tuple (x, *args) or a dict of keyword arguments", "pass ((x,), target) as a batch"
        _validate.check_instance("inputs", self.inputs, (tuple, list, dict), required, remedy)
        if isinstance(self.inputs, dict):
            return self.layer(**self.inputs, **options)
        return self.layer(*self.inputs, **options)

    def _asked(self, state: Any) -> Tensor:
        """The classes of an answer, 0 where none is asked for."""
        logits = self.readout(state)
        _validate.check_float_tensor("readout(z)", logits, min_ndim=2)
        classes = logits.movedim(self.axis, -1).argmax(-1)
        return classes.where(self.target >= 0, 0) if classes.shape == self.target.shape else classes

    def _right(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.exact is None:
            logits = classes_last(logits, target, self.axis)
            right = ((logits.argmax(-1) == target) & ~logits.isnan().any(-1)) | (target < 0)
            return right.flatten(1).all(-1) if right.ndim > 1 else right
        right = self.exact(logits, target)
        fits = isinstance(right, Tensor) and right.dtype == torch.bool and right.shape == (len(target),)
        received = f"{right.dtype} of shape {tuple(right.shape)}" if isinstance(right, Tensor) else type(right).__name__
        _validate.require(fits, "exact", f"return booleans of shape {(len(target),)}", received)
        return right


def calibration_table(found: Mapping[str, Calibration]) -> str:
    """Calibrations as a table of text: shares in %, with their intervals of 95 %.

    Examples:
        >>> import torch
        >>> from implicit_attention.training import Calibration, calibration_table
        >>> some = torch.tensor([True, True, False])
        >>> print(calibration_table({"9 x 9": Calibration(some, some, torch.tensor([9, 7, 90]))}))
        set                  9 x 9
        problems             3
        settled              66.7 (20.8 to 93.9)
        exact                66.7 (20.8 to 93.9)
        exact, settled       100.0 (34.2 to 100.0)
        exact, not settled   0.0 (0.0 to 79.3)
        evaluations          35.3, at most 90

    Not for pictures: see `plotting.risk_figure`.
    """
    columns = [_column(str(name), row) for name, row in found.items()]
    heads = list(dict.fromkeys(head for column in columns for head in column))
    widths = [max(24, 2 + max(map(len, column.values()))) for column in columns]
    lines = []
    for head in heads:
        cells = [column.get(head, "-").ljust(width) for column, width in zip(columns, widths, strict=True)]
        lines.append(f"{head:21}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _column(name: str, row: Calibration) -> dict[str, str]:
    count = len(row.settled)
    shares = {
        "settled": Share(int(row.settled.sum()), count),
        "exact": row.given(),
        "exact, settled": row.given(row.settled),
        "exact, not settled": row.given(~row.settled),
    }
    if row.agreement is not None:
        shares["confirmed"] = Share(int(row.confirmed.sum()), count)
        shares["exact, confirmed"] = row.given(row.confirmed)
    mean, most = (float(row.evaluations.double().mean()), int(row.evaluations.max())) if count else (math.nan, 0)
    texts = {head: str(share) for head, share in shares.items()}
    return {"set": name, "problems": str(count)} | texts | {"evaluations": f"{mean:.1f}, at most {most}"}

"""Checks beside the residual: do they turn up settled answers that are wrong, and what do they cost?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attention import Equilibrium, Picard
from implicit_attention.layers import Confirm
from implicit_attention.training import calibrate

from .models import IGNORED, Examples, Model
from .training import AT_ONCE, RTOL

#: Puzzles of a set, and further solves of each.
PUZZLES, COUNT = 100, 2


def _checks() -> dict[str, Confirm]:
    found = {
        f"{COUNT} starts beside the {around}, noise {noise:g}": Confirm(count=COUNT, around=around, noise=noise)
        for around in ("start", "answer")
        for noise in (0.1, 1.0)
    }
    return found | {"steps damped by half": Confirm(around="start"), TIGHTER: Confirm()}


#: The trivial check: the smallest probability of a class that is answered.
SURE = 0.9
CONFIDENCE, TIGHTER = f"every probability >= {SURE:g}", "solved on, to a tenth of the tolerance"


@torch.no_grad()
def compared_checks(model: Model, examples: Examples, most: int) -> dict[str, Any]:
    """Per check the part of settled puzzles that passes it, how many of either are right, and its evaluations."""
    layer = Equilibrium(model.block, solver=Picard(rtol=RTOL, max_steps=most), on_failure="ignore")
    at_once = max(AT_ONCE // examples.inputs.shape[1], 1)
    parts = [examples.at(slice(begin, begin + at_once)) for begin in range(0, len(examples.inputs), at_once)]
    batches = [((model.embed(part.inputs), part.edges), part.targets) for part in parts]
    found: dict[str, Any] = {}
    for name, how in _checks().items():
        known = calibrate(layer, model.head, {"all": batches}, confirm=how)["all"]
        assert known.agreement is not None
        assert known.confirm_evals is not None
        found[name] = _told(known.settled, known.exact, known.agreement == 1, known.confirm_evals, known.evaluations)
    sure = [
        ((model.head(layer(*inputs)).softmax(-1).amax(-1) >= SURE) | (targets == IGNORED)).all(-1)
        for inputs, targets in batches
    ]
    none = torch.zeros_like(known.evaluations)
    found[CONFIDENCE] = _told(known.settled, known.exact, torch.cat(sure), none, known.evaluations)
    return found


def _told(settled: Tensor, exact: Tensor, passed: Tensor, further: Tensor, own: Tensor) -> dict[str, Any]:
    def share(which: Tensor, among: Tensor) -> float | None:
        return float(which[among].double().mean()) if among.any() else None

    return {
        "settled": int(settled.sum()),
        "passed": share(passed, settled),
        "exact_settled": share(exact, settled),
        "exact_passed": share(exact, settled & passed),
        "exact_refused": share(exact, settled & ~passed),
        "evaluations_ratio": float(further.double().mean() / own.double().mean()),
    }

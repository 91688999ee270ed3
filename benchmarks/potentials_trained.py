"""A small block trained on digits with each potential: what `DIGITS` of the suite `potentials` measures."""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from implicit_attention import LogSumExp, Potential, SquaredScores
from implicit_attention.potentials import (
    BernoulliUnits,
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    Exponential,
    KernelPotential,
    NormalisedScores,
    Polynomial,
    PositiveFeatures,
    ReluFeatures,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    units_potential,
)

from .targets import Row
from .useful_models import Model
from .useful_tasks import Task, digits
from .useful_training import Plan, trial

FEATURES = 64
Factory = Callable[..., Potential]
#: Features of heads of the width that `DIGITS` has.
KERNELS: dict[str, Factory] = {
    "KernelPotential, positive features": lambda keys, beta, **pairs: KernelPotential(
        keys, beta, features=positive(keys), **pairs
    ),
    "KernelPotential, elu + 1": partial(KernelPotential, features=EluFeatures()),
    "KernelPotential, ReLU": partial(KernelPotential, features=ReluFeatures()),
}
#: Where the quadratic ones stay bounded below while their keys grow.
NEAR = {"beta": 0.001, "anchor": 0.95}
#: Trained: name -> factory and options of the layer.
TRAINED: dict[str, tuple[Factory, dict[str, Any]]] = {
    "LogSumExp": (LogSumExp, {}),
    "Softmax1": (Softmax1, {}),
    "DistanceLogSumExp": (DistanceLogSumExp, {}),
    "SoftcapLogSumExp, cap 5": (partial(SoftcapLogSumExp, cap=5.0), {}),
    "Entmax, alpha 1.5": (Entmax, {}),
    "Entmax, alpha 2": (partial(Entmax, alpha=2.0), {}),
    "SquaredScores, beta .001": (SquaredScores, NEAR),
    "Polynomial, degree 2, beta .001": (Polynomial, NEAR),
    "Polynomial, degree 3": (partial(Polynomial, degree=3), {}),
    "Exponential": (Exponential, {}),
    "units_potential, Bernoulli": (units_potential(BernoulliUnits(0.5)), {}),
    "units_potential, sign": (units_potential(SignUnits()), {}),
    "NormalisedScores": (NormalisedScores, {}),
    **{name: (make, {}) for name, make in KERNELS.items()},
}
#: Beside them: what costs one step, and nothing.
BESIDE = {"one explicit step": Model("stack", 1, 1), "no attention": Model("stack", 0, 0)}


def positive(keys: Tensor) -> PositiveFeatures:
    """The same features for all keys of this width."""
    return PositiveFeatures(keys.shape[-1], FEATURES, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True)
class Of(Model):
    """The solved equilibrium with a potential, read out as it is: not every potential has weights."""

    potential: str = "LogSumExp"

    def options(self) -> dict[str, Any]:
        make, options = TRAINED[self.potential]
        return {**super().options(), "potential": make, "readout": "state", **options}


def learned(name: str, steps: int) -> Row:
    """Three trainings on digits with the best of two learning rates, or why there are none."""
    torch.set_num_threads(1)
    quick = steps < 100
    task: Task = digits(validation=64, test=64) if quick else digits()
    plan = Plan(steps=steps, batch=32, rates=(3e-3, 1e-2))
    plan = dataclasses.replace(plan.quick(), steps=steps) if quick else plan
    model = BESIDE.get(name) or Of("solved", 0, 0, potential=name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trained = {rate: trial(task, model, plan, plan.seeds[0], rate)[1] for rate in plan.rates}
            best = max(trained, key=lambda rate: trained[rate]["validation"])
            runs = [trained[best]] + [trial(task, model, plan, seed, best)[1] for seed in plan.seeds[1:]]
    except ValueError as error:
        return {"evidence": {"error": str(error)}, "seconds": {}, "ratios": {"accuracy": None}}
    scores = [run["score"] for run in runs]
    evidence = {
        "accuracy": statistics.mean(scores),
        "accuracy_std": statistics.stdev(scores) if len(scores) > 1 else None,
        "learning_rate": best,
        "solves": len(runs) * plan.steps * plan.batch * task.shape.length * task.shape.heads,
        **{
            key: statistics.mean(run[key] for run in runs)
            for key in ("gradient_norm", "evaluations_mean", "evaluations_max")
        },
        **{f"failed_{kind}": sum(run["failed_in_training"][kind] for run in runs) for kind in ("forward", "backward")},
        "converged": None if model.explicit else statistics.mean(run["converged"] for run in runs),
        "runs": runs,
    }
    return {"evidence": evidence, "seconds": {}, "ratios": {"accuracy": evidence["accuracy"]}}


def cells(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return ["refused", *["-"] * 6]
    percent = [found[name] and 100 * found[name] for name in ("accuracy", "accuracy_std", "converged")]
    solves = found["solves"]
    failed = (f"{found[f'failed_{kind}']} of {solves}" for kind in ("forward", "backward"))
    rest = [found["gradient_norm"], found["evaluations_mean"] or None]
    if percent[2] is None:
        failed = iter("--")
    return [
        f"{percent[0]:.1f}",
        *("-" if x is None else f"{x:.2g}" for x in (percent[1], *rest)),
        ("-" if percent[2] is None else f"{percent[2]:.1f}"),
        *failed,
    ]

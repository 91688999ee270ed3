"""Small spin systems: forwards beside loops by hand that reach the same residual, and frames of Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicit_attention.spins import (
    TAP,
    AdaTAP,
    KineticPlefka,
    LargeDResponse,
    MeanField,
    SpinSystem,
    magnetization,
    thermodynamics,
)
from implicit_attention.spins.approximation import FixedPointApproximation

from . import by_hand
from .by_hand import Ends
from .measure import interleaved_clocks
from .native_layers import frames
from .targets import Row

METHODS: dict[str, FixedPointApproximation] = {
    "MeanField()": MeanField(),
    "KineticPlefka()": KineticPlefka(),
    "KineticPlefka(order=2)": KineticPlefka(order=2),
    "TAP()": TAP(),
    "AdaTAP()": AdaTAP(),
}
#: Methods whose equation the published module has, by its law and its own formula.
PUBLISHED: dict[str, FixedPointApproximation] = {
    "MeanField()": MeanField(response=LargeDResponse()),
    "KineticPlefka()": KineticPlefka(response=LargeDResponse()),
}
SHAPES = ((1, 8, 16), (4, 32, 16), (16, 128, 32))
#: Numbers of past steps that Anderson's method by hand combines; steps after which a loop is given up.
HISTORY, MOST = 5, 2000
#: No residual below this is asked of a loop by hand.
LEAST = 1e-14


@dataclasses.dataclass(frozen=True)
class Small:
    """Forwards of one method on glasses at beta 1/2, with couplings of variance 1/N and standard normal fields."""

    method: str
    batch: int
    sites: int
    dim: int
    seed: int = 0
    metric: ClassVar[str] = "SMALL"

    @property
    def name(self) -> str:
        return f"{self.method}, B {self.batch}, N {self.sites}, D {self.dim}"


@dataclasses.dataclass(frozen=True)
class Frames:
    """thermodynamics() of one such glass by `AdaTAP`."""

    dim: int
    sites: int = 16
    seed: int = 0
    metric: ClassVar[str] = "FRAMES"

    @property
    def name(self) -> str:
        return f"thermodynamics by AdaTAP(), N {self.sites}, D {self.dim}"


def settings(*, quick: bool) -> tuple[Small | Frames, ...]:
    if quick:
        return Small("MeanField()", *SHAPES[0]), Small("TAP()", *SHAPES[0]), Frames(3)
    return (*(Small(name, *shape) for name in METHODS for shape in SHAPES), *(Frames(dim) for dim in (1, 3, 8)))


def glass(batch: tuple[int, ...], sites: int, dim: int, seed: int, radius: str = "sqrt_dim") -> SpinSystem:
    generator = torch.Generator().manual_seed(seed)
    couplings = torch.randn(*batch, sites, sites, generator=generator, dtype=torch.float64)
    couplings = (couplings + couplings.mT) / math.sqrt(2 * sites)
    couplings.diagonal(dim1=-2, dim2=-1).zero_()
    field = torch.randn(*batch, sites, dim, generator=generator, dtype=torch.float64)
    return SpinSystem(couplings, field, 0.5, radius=radius)


def residual(mapped: Tensor, z: Tensor) -> float:
    """The largest |f(z) - z| / |f(z)| over the samples."""
    sizes = [torch.linalg.vector_norm(t.flatten(-2), dim=-1) for t in (mapped - z, mapped)]
    return float((sizes[0] / sizes[1]).max())


def plain(f: Callable[[Tensor], Tensor], z: Tensor, goal: float) -> tuple[Tensor, int] | None:
    """z = f(z) for all samples until the last has its residual; evaluations with it. None where that takes too long."""
    for evaluations in range(1, MOST):
        mapped = f(z)
        if (left := residual(mapped, z)) <= goal:
            return z, evaluations
        if not math.isfinite(left):
            break
        z = mapped
    return None


def anderson(f: Callable[[Tensor], Tensor], z: Tensor, goal: float) -> tuple[Tensor, int] | None:
    """The same, where every step combines the last ones by least squares of their residuals."""
    states: list[Tensor] = []
    steps: list[Tensor] = []
    for evaluations in range(1, MOST):
        mapped = f(z)
        if (left := residual(mapped, z)) <= goal:
            return z, evaluations
        if not math.isfinite(left):
            break
        states, steps = (
            [*states, mapped.flatten(-2)][-HISTORY - 1 :],
            [*steps, (mapped - z).flatten(-2)][-HISTORY - 1 :],
        )
        if len(steps) == 1:
            z = mapped
            continue
        moves, turns = (torch.stack(t, -1).diff(dim=-1) for t in (states, steps))
        weights = torch.linalg.lstsq(turns, steps[-1][..., None]).solution
        z = (states[-1] - (moves @ weights)[..., 0]).reshape(z.shape)
    return None


LOOPS = {"plain": plain, "anderson": anderson}


def plain_ends(f: Callable[[Tensor], Tensor], z: Tensor, goal: float) -> Ends:
    """Plain steps of which each sample keeps its state, residual, status and evaluations once it has its residual."""
    return by_hand.plain(f, z, goal, most=MOST, atol=0.0)


def anderson_ends(f: Callable[[Tensor], Tensor], z: Tensor, goal: float) -> Ends:
    """The same, where every step combines the last ones, with a safeguard."""
    return by_hand.anderson(f, z, goal, history=HISTORY, most=MOST, atol=0.0)


#: The loops that end with the evidence that ours gives.
WITH_EVIDENCE = {"plain, evidence": plain_ends, "anderson, evidence": anderson_ends}


def published(system: SpinSystem) -> Callable[[Tensor], Tensor]:
    """m -> beta f/(1 + sqrt(1 + beta^2 |f|^2/R^2)) with f = h + J m: the large-D law of the published module."""
    couplings, field, beta, square = system.couplings, system.field, system.beta, system.radius**2

    def mapped(m: Tensor) -> Tensor:
        local = field + couplings @ m
        length = 1 + torch.sqrt(1 + beta**2 / square * local.square().sum(-1, keepdim=True))
        return beta * local / length

    return mapped


def compared(
    method: FixedPointApproximation, system: SpinSystem, f: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    """The forward and the loops by hand that reach its residual, with what each of them needs."""
    answer, start = method.answer(system), method.start(system)
    assert answer.state is not None
    goal = max(residual(f(answer.state), answer.state), LEAST)
    found: dict[str, Any] = {
        "residual": goal,
        "evaluations": int(answer.report.num_evals.max()),
        "converged": float(answer.report.converged.double().mean()),
    }
    functions: dict[str, Callable[[], Any]] = {"ours": lambda: magnetization(system, method, on_failure="ignore")}
    for name, loop in LOOPS.items():
        if (end := loop(f, start, goal)) is not None:
            found[f"{name} evaluations"] = end[1]
            functions[name] = partial(loop, f, start, goal)
    for name, with_evidence in WITH_EVIDENCE.items():
        if (ends := with_evidence(f, start, goal)).converged.all():
            found[f"{name} evaluations"] = int(ends.evaluations.max())
            functions[name] = partial(with_evidence, f, start, goal)
    return functions, found


def measured(setting: Small | Frames, *, repeats: int, max_seconds: float) -> Row:
    """Process time of forwards in turns with the loops, or frames and process time of `thermodynamics`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = _counted if isinstance(setting, Frames) else _timed
    row = found(setting, rounds=3 * repeats, max_seconds=max_seconds)  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    return {**dataclasses.asdict(setting), **row}


def _counted(setting: Frames, *, rounds: int, max_seconds: float) -> Row:
    system = glass((), setting.sites, setting.dim, setting.seed)
    call = partial(thermodynamics, system, AdaTAP())
    status = call().report
    process, _ = interleaved_clocks({"ours": call}, rounds=rounds, max_seconds=max_seconds)
    found = {"residual": float(status.residual), "evaluations": int(status.num_evals)}
    return {
        "evidence": {"ours": found},
        "seconds": _plain(process),
        "ratios": {f"frames, D {setting.dim}": float(frames(call))},
    }


@torch.no_grad()
def _timed(setting: Small, *, rounds: int, max_seconds: float) -> Row:
    size = (setting.batch,), setting.sites, setting.dim, setting.seed
    system, method = glass(*size), METHODS[setting.method]
    functions, found = compared(method, system, method.problem(system).fixed_point_map)
    evidence = {"ours": found}
    if setting.method in PUBLISHED:
        wide = glass(*size, radius="bessel")
        others, evidence["large D"] = compared(PUBLISHED[setting.method], wide, published(wide))
        functions |= {f"large D, {name}": call for name, call in others.items()}
    solved = all(found["converged"] == 1 for found in evidence.values())
    if not solved:
        evidence["ours"]["error"] = "not timed, a sample did not converge"
    process = interleaved_clocks(functions, rounds=rounds, max_seconds=max_seconds)[0] if solved else {}
    kinds = {"by hand": ""} | ({"published": "large D, "} if setting.method in PUBLISHED else {})
    ratios = {}
    for name, kind in kinds.items():
        ratios[f"forward / {name}"] = _ratio(process, kind, LOOPS)
        ratios[f"forward / {name}, evidence"] = _ratio(process, kind, WITH_EVIDENCE)
    return {"evidence": evidence, "seconds": _plain(process), "ratios": ratios}


def _ratio(process: dict[str, Any], kind: str, names: Iterable[str]) -> float | None:
    """Ours over the faster of these loops, by lower quartiles; None where no loop gets there."""
    loops = [process[kind + name].low for name in names if kind + name in process]
    return process[f"{kind}ours"].low / min(loops) if loops else None


def _plain(process: dict[str, Any]) -> dict[str, Any]:
    return {name: dataclasses.asdict(timing) for name, timing in process.items()}

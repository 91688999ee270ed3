"""INPAINT of the suite `usefulness`: hidden patches of digits, and their labels, by blocks that descend an energy.

The Energy Transformer with its published steps, its equilibrium and the same map unrolled stand beside an ordinary
block of as many parameters, once and repeated; and beside two that learn nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from implicit_attention import Anderson, Implicit, Phantom, Picard, Unrolled
from implicit_attention.linear import CG
from implicit_attention.models import ImageEnergyTransformer, scatter_mask
from implicit_attention.studies.inpainting_data import harmonic, hidden_pixels, visible_mean
from implicit_attention.studies.measure import peak_memory

from .measure import interleaved, once
from .targets import Row
from .useful_tasks import _sha256, digit_split

METRIC = "INPAINT"
WIDTH, HEADS, MEMORIES, STEPS, PATCHES, HIDDEN = 64, 4, 256, 12, 16, 8
RTOL, TRAINING_RTOL = 1e-3, 1e-2

Aim = Literal["inpainting", "labels"]
Kind = Literal["published", "equilibrium", "unrolled", "explicit"]

NOTES = (
    "INPAINT: scikit-learn's digits (1097 to train, 350 to validate, 350 to test, pixels in [0, 1]) as 16 patches of "
    f"2 x 2, {HIDDEN} of which are hidden; error is the root mean square over hidden pixels. Labels are told from a "
    "CLS token, no patch hidden. Seen and answered are differences from the mean image. Linear encoder, learned "
    "positions, one block of width "
    f"{WIDTH}, its norm, linear decoder; an Energy Transformer of {HEADS} heads and {MEMORIES} memories, or softmax "
    "attention with values and an MLP (ReLU), pre-norm, of as many parameters. AdamW (weight decay .05, clipped at "
    "norm 1), one cycle; of two rates the better one on the validation part with the first seed.",
    f"`published`: {STEPS} steps of the size that is told. `equilibrium`: Anderson() to {RTOL:g}, in training to "
    f"{TRAINING_RTOL:g} with the implicit gradient. "
    "`unrolled`: plain steps of the equilibrium's map, recorded, and the same weights solved. "
    f"`repeated`: the ordinary block {STEPS} times with the same weights.",
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The training of every contender; `held` limits the held-out images."""

    updates: int = 300
    batch: int = 64
    rates: tuple[float, ...] = (2e-3, 6e-3)
    seeds: tuple[int, ...] = (0, 1, 2)
    held: int | None = None

    def quick(self) -> Plan:
        return dataclasses.replace(self, updates=4, batch=8, rates=self.rates[:1], seeds=self.seeds[:1], held=24)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One block. `steps` are those of training and test; for a repeated explicit block how often it is applied."""

    kind: Kind
    steps: int = STEPS
    step_size: float = 1.0

    @property
    def name(self) -> str:
        return {
            "published": f"published, {self.steps} steps of {self.step_size:g}",
            "equilibrium": "equilibrium",
            "unrolled": f"equilibrium's map, {self.steps} steps unrolled",
            "explicit": "explicit block" + (f", repeated {self.steps} times" if self.steps > 1 else ""),
        }[self.kind]

    def options(self) -> dict[str, Any]:
        """Return the options of the `EnergyTransformer`."""
        if self.kind == "published":
            return {"mode": "published", "steps": self.steps, "step_size": self.step_size}
        if self.kind == "unrolled":
            fixed = Picard(rtol=0, atol=0, max_steps=self.steps)
            return {"solver": fixed, "adjoint": Unrolled(), "on_failure": "ignore"}
        return {"solver": Anderson(rtol=RTOL), "on_failure": "ignore"}

    def training_options(self) -> dict[str, Any]:
        """Return the options of a call in training: a tolerance of a hundredth is enough for a gradient."""
        if self.kind != "equilibrium":
            return {}
        solver = Anderson(rtol=TRAINING_RTOL, max_steps=60)
        return {"solver": solver, "adjoint": Implicit(CG(rtol=TRAINING_RTOL), fallback=Phantom(5))}


CONTENDERS = (
    Contender("published", step_size=0.1),
    Contender("equilibrium"),
    Contender("unrolled", steps=4),
    Contender("explicit", steps=1),
    Contender("explicit"),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """One contender that learns one task."""

    aim: Aim
    contender: Contender
    plan: Plan
    metric: str = METRIC

    @property
    def name(self) -> str:
        return f"{self.aim}: {self.contender.name}"


@dataclasses.dataclass(frozen=True)
class Untrained:
    """The fillings that learn nothing."""

    plan: Plan
    metric: str = METRIC
    name: str = "inpainting: without learning"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time and memory of all contenders, in turns, with the weights of the beginning."""

    plan: Plan
    metric: str = METRIC
    name: str = "inpainting: costs"


Setting = Trained | Untrained | Costs


def settings_of(quick: bool) -> tuple[Setting, ...]:
    plan = Plan().quick() if quick else Plan()
    aims: tuple[Aim, ...] = ("inpainting", "labels")
    return (Untrained(plan), *(Trained(aim, one, plan) for aim in aims for one in CONTENDERS), Costs(plan))


# Data.


@functools.cache
def digits(held: int | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """Images (count, 1, 8, 8) in [0, 1] and labels, to train, validate and test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.from_numpy(images / 16).float().reshape(-1, 1, 8, 8)
    train, *others = ((pixels[part], torch.from_numpy(labels)[part]) for part in digit_split(len(labels)))
    return (train, *((x[:held], y[:held]) for x, y in others))


@functools.cache
def mean_and_scale() -> tuple[Tensor, Tensor]:
    """The mean image (1, 1, 8, 8) of those to train on, and the usual distance of a pixel from it."""
    (images, _), *_ = digits(None)
    mean = images.mean(0, keepdim=True)
    return mean, (images - mean).square().mean().sqrt()


def hidden_patches(count: int, seed: int) -> Tensor:
    """Hide patches of held-out images, the same for all contenders."""
    return scatter_mask(count, PATCHES, replaced=HIDDEN, kept=0, generator=torch.Generator().manual_seed(seed))[0]


# Models.


class ExplicitBlock(nn.Module):
    """x <- x + attention(norm(x)), x <- x + mlp(norm(x)), repeatedly with the same weights."""

    def __init__(self, parameters: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.norm, self.first, self.second = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True)
        rest = parameters - sum(p.numel() for p in self.parameters())
        inner = max(rest // (2 * WIDTH), 1)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, inner, bias=False), nn.ReLU(), nn.Linear(inner, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            tokens = self.first(x)
            x = x + self.attention(tokens, tokens, tokens, need_weights=False)[0]
            x = x + self.mlp(self.second(x))
        return x


class Reader(nn.Module):
    """A block between patches and what is asked for: hidden patches, or a label from the CLS token."""

    def __init__(self, aim: Aim, contender: Contender) -> None:
        super().__init__()
        energy = contender.options() if contender.kind != "explicit" else {}
        self.model = ImageEnergyTransformer(8, 2, 1, WIDTH, HEADS, WIDTH // HEADS, MEMORIES, **energy)
        # From the published initial weights a few hundred updates learn a mean image alone.
        nn.init.normal_(self.model.embedding.positions, std=0.5)
        for weight in (self.model.block.w_query, self.model.block.w_key, self.model.block.memories):
            nn.init.normal_(weight, std=0.1)
        nn.init.normal_(self.model.decoder.weight, std=0.01)
        self.mean, self.scale = mean_and_scale()
        if contender.kind == "explicit":
            count = sum(p.numel() for p in self.model.block.parameters())
            self.model.block = ExplicitBlock(count, contender.steps)
        self.aim = aim
        self.classes = nn.Linear(WIDTH, 10) if aim == "labels" else None

    def forward(self, images: Tensor, masked: Tensor, **options: Any) -> Tensor:
        """Patches (B, 16, 4), or scores (B, 10)."""
        seen = (images - self.mean) / self.scale
        if self.classes is None:
            patches: Tensor = self.model.patches(self.mean) + self.scale * self.model(seen, masked, **options)
            return patches
        tokens = self.model.block(self.model.embedding(self.model.patches(seen)), **options)
        scores: Tensor = self.classes(self.model.block.norm(tokens)[:, 0])
        return scores


def loss(reader: Reader, images: Tensor, labels: Tensor, masked: Tensor, **options: Any) -> Tensor:
    found = reader(images, masked, **options)
    if reader.aim == "labels":
        return F.cross_entropy(found, labels)
    return squared_error(found, reader.model.patches(images), masked)


def squared_error(found: Tensor, patches: Tensor, masked: Tensor) -> Tensor:
    """Mean square over the hidden pixels."""
    return (found - patches)[masked].square().mean()


# Training and test.


def trained_row(setting: Trained) -> Row:
    """The row of a contender with its trainings."""
    begin, plan = time.perf_counter(), setting.plan
    by_rate = {rate: trial(setting, plan.seeds[0], rate) for rate in plan.rates}
    sign = 1 if setting.aim == "labels" else -1
    best = max(by_rate, key=lambda rate: sign * by_rate[rate]["validation"])
    runs = [by_rate[best], *(trial(setting, seed, best) for seed in plan.seeds[1:])]
    scores = [run["score"] for run in runs]
    evidence = {
        "score": statistics.mean(scores),
        "score_std": statistics.stdev(scores) if len(scores) > 1 else None,
        **{name: statistics.mean(run[name] for run in runs) for name in ("seconds", "evaluations", "converged")},
    }
    if setting.contender.kind == "unrolled":
        evidence["solved"] = statistics.mean(run["solved"] for run in runs)
    reader = Reader(setting.aim, setting.contender)
    return {
        "name": setting.name,
        "metric": METRIC,
        "aim": setting.aim,
        "contender": {**dataclasses.asdict(setting.contender), "name": setting.contender.name},
        "score": "accuracy" if setting.aim == "labels" else "error",
        "data": _described(plan),
        "plan": dataclasses.asdict(plan),
        "parameters": sum(p.numel() for p in reader.parameters()),
        "parameters_of_block": sum(p.numel() for p in reader.model.block.parameters()),
        "rate": best,
        "runs": runs,
        "evidence": evidence,
        "ratios": {setting.aim: evidence["score"]},
        "wall_seconds": time.perf_counter() - begin,
    }


def trial(setting: Trained, seed: int, rate: float) -> dict[str, Any]:
    """One training, and its scores."""
    plan = setting.plan
    (images, labels), validation, test = digits(plan.held)
    torch.manual_seed(seed)
    reader = Reader(setting.aim, setting.contender)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=rate, weight_decay=0.05, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=plan.updates)
    generator, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    for _ in range(plan.updates):
        index = torch.randint(len(images), (plan.batch,), generator=generator)
        masked = scatter_mask(plan.batch, PATCHES, replaced=HIDDEN, kept=0, generator=generator)[0]
        optimizer.zero_grad()
        loss(reader, images[index], labels[index], masked, **setting.contender.training_options()).backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - begin
    reader.eval()
    found = {"seed": seed, "seconds": seconds, "validation": scored(reader, *validation, 1), **asked(reader, *test)}
    if setting.contender.kind == "unrolled":
        solving = copy.deepcopy(reader)
        solving.model.block.options = solving.model.block.options.override(
            solver=Anderson(rtol=RTOL), adjoint=Implicit()
        )
        found["solved"] = scored(solving, *test, 2)
    return found


def asked(reader: Reader, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """The score on the test part, with the evaluations of a sample and the part that converged."""
    score = scored(reader, images, labels, 2)
    report = getattr(reader.model.block, "last_solve", None)
    if report is None:
        return {"score": score, "evaluations": 0.0, "converged": 0.0}
    evaluations, converged = (float(t.double().mean()) for t in (report.num_evals, report.converged))
    return {"score": score, "evaluations": evaluations, "converged": converged}


@torch.no_grad()
def scored(reader: Reader, images: Tensor, labels: Tensor, seed: int) -> float:
    """Accuracy, or the root mean square error over hidden pixels."""
    masked = hidden_patches(len(images), seed)
    found = reader(images, masked)
    if reader.aim == "labels":
        return float((found.argmax(-1) == labels).double().mean())
    return math.sqrt(float(squared_error(found, reader.model.patches(images), masked)))


def untrained_row(setting: Untrained) -> Row:
    """The mean of the visible pixels, harmonic interpolation between them, and the mean of all images."""
    begin, (images, _) = time.perf_counter(), digits(setting.plan.held)[2]
    masked = hidden_patches(len(images), 2)
    pixels = hidden_pixels(masked, side=8, patch=2)
    errors = {
        name: math.sqrt(float((fill(images, pixels) - images)[pixels].square().mean()))
        for name, fill in (
            ("visible mean", visible_mean),
            ("harmonic interpolation", harmonic),
            ("mean image", mean_image),
        )
    }
    row = {"name": setting.name, "metric": METRIC, "errors": errors, "data": _described(setting.plan), "evidence": {}}
    return {**row, "ratios": errors, "wall_seconds": time.perf_counter() - begin}


def mean_image(images: Tensor, hidden: Tensor) -> Tensor:
    """The images with each hidden pixel replaced by its mean over the images to train on."""
    return images.where(~hidden, mean_and_scale()[0])


def costs_row(setting: Costs, repeats: int, max_seconds: float) -> Row:
    """Forward and training step of a batch, of all contenders in turns, and the peak memory of a training step."""
    begin, plan = time.perf_counter(), setting.plan
    (images, labels), *_ = digits(plan.held)
    batch = images[: plan.batch], labels[: plan.batch], hidden_patches(plan.batch, 0)
    functions: dict[str, Callable[[], Any]] = {}
    for contender in CONTENDERS:
        torch.manual_seed(0)
        reader = Reader("inpainting", contender)
        functions[f"{contender.name} forward"] = functools.partial(_forward, reader, batch)
        functions[f"{contender.name} training"] = functools.partial(
            _training_step, reader, batch, contender.training_options()
        )
    memory = {name: peak_memory(function, torch.device("cpu")) for name, function in functions.items()}
    first = {name: once(function)[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    floor = next(contender for contender in CONTENDERS if contender == Contender("explicit", steps=1))
    return {
        "name": setting.name,
        "metric": METRIC,
        "evidence": {},
        "times": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "peak_memory_bytes": memory,
        "ratios": {
            f"{one.name}, training step": times[f"{one.name} training"].median / times[f"{floor.name} training"].median
            for one in CONTENDERS
        },
        "wall_seconds": time.perf_counter() - begin,
    }


@torch.no_grad()
def _forward(reader: Reader, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    reader(batch[0], batch[2])


def _training_step(reader: Reader, batch: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> None:
    reader.zero_grad()
    loss(reader, *batch, **options).backward()


def _described(plan: Plan) -> dict[str, Any]:
    (images, _), _, (test, _) = digits(plan.held)
    return {"source": "sklearn.datasets.load_digits", "test": len(test), "sha256": _sha256(images.numpy().tobytes())}

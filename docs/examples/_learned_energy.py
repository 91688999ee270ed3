"""Energies that are learned by both kinds of gradient, on digits and on parities, and what is measured of them."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.profiler import profile

from implicit_attention import Anderson, EnergyFunction, GradientDescent, Implicit, PerSample, Solution, Unrolled, solve
from implicit_attention.solvers import Solver
from implicit_attention.studies.thinking.prefix import strings

#: The standard deviation of the noise, for pixels from 0 to 1, the step of descent, and the learning rate.
NOISE, STEP, RATE = 0.3, 0.3, 1e-2
#: Bits of the strings to learn from, and of those that are asked.
LENGTH, LENGTHS = 16, (16, 32, 64)
#: Answers are +1 and -1, of which this multiple is the logit.
SHARPNESS = 4
FAR = 300
IMPLICIT, BOUNDED, BOTH = "implicit", "implicit, spectral norm", "unrolled, then implicit"


class Plan(NamedTuple):
    """How long is trained: updates of energies, those `after` by implicit gradients, and how many times as many of the
    cheaper networks; and how many strings are asked.
    """

    digits: int = 250
    parity: int = 300
    after: int = 30
    times: int = 5
    strings: int = 100


QUICK = Plan(digits=12, parity=6, after=2, times=1, strings=10)


class Denoiser(nn.Module):
    """E(z, x) = weight |z - x|^2/2 + |z - g(z)|^2/2 of images of 64 pixels; it cannot fall below 0."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, 64))

    def prior(self, z: Tensor) -> Tensor:
        return (z - self.net(z)).square().sum(-1) / 2

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.log_weight.exp() * (z - x).square().sum(-1) / 2 + self.prior(z)


class Parity(nn.Module):
    """E(z, x) = |z|^2/2 + sum_i g(z_(i-1), z_i, x_i): a convolution; g grows no faster than |z|, so E has a minimum."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        windows = torch.cat([torch.stack([F.pad(z, (1, -1)), z], -1), x], -1)
        return z.square().sum(-1) / 2 + self.net(windows).sum((-1, -2))


class Convolutions(nn.Module):
    """The feed-forward network for parities: it sees the 16 bits up to each."""

    def __init__(self, width: int = 14) -> None:
        super().__init__()
        sizes = [2, *[width] * 4]
        self.layers = nn.ModuleList(nn.Conv1d(sizes[i], width, 2, dilation=2**i) for i in range(4))
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.mT
        for i, layer in enumerate(self.layers):
            h = F.silu(layer(F.pad(h, (2**i, 0)))) + (h if i else 0)
        return self.head(h)[:, 0]


#: How an energy is solved in training by implicit gradients. That of parities has many minima, of which long steps find
#: others than short ones.
SOLVERS: dict[type, Solver] = {
    Denoiser: Anderson(rtol=1e-3),
    Parity: GradientDescent(STEP, rtol=1e-3, max_steps=400),
}


def steps(count: int) -> Solver:
    """So many steps of descent, whatever they reach."""
    return GradientDescent(STEP, max_steps=count, rtol=0, atol=0)


def answer(energy: nn.Module, x: Tensor, start: Tensor, unrolled: int | None = None) -> Solution:
    """The minimum, or what a number of steps reaches, with gradients through them."""
    problem = EnergyFunction(energy, PerSample(x), event_ndim=1)
    solver, adjoint = (SOLVERS[type(energy)], Implicit()) if unrolled is None else (steps(unrolled), Unrolled())
    return solve(problem, start, solver=solver, adjoint=adjoint, on_failure="ignore")


def fit(model: nn.Module, loss: Callable[[], Tensor], updates: int, rate: float) -> float:
    """Minimise with AdamW, in one cycle of the learning rate; the seconds of the processor."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=updates)
    begin = time.process_time()
    for _ in range(updates):
        optimizer.zero_grad()
        found = loss()
        if not bool(found.isfinite()):
            break
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return round(time.process_time() - begin, 1)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def held_bytes(make: Callable[[], Tensor]) -> int:
    """The bytes that a loss holds until its backward pass."""
    with profile(profile_memory=True) as seen:
        loss = make()
    held = sum(event.self_cpu_memory_usage for event in seen.key_averages())
    del loss
    return held


class Images(NamedTuple):
    """Digits to learn from, (count, 64); then halves of the others, to choose settings by and to report."""

    train: Tensor
    labels: Tensor
    chosen: Tensor
    test: Tensor
    sha256: str


def images(seed: int) -> Images:
    raw = load_digits()
    pixels, labels = torch.from_numpy(raw.data).float() / 16, torch.from_numpy(raw.target)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    train, chosen, test = order.tensor_split([1197, 1497])
    digest = hashlib.sha256(raw.data.tobytes()).hexdigest()
    return Images(pixels[train], labels[train], pixels[chosen], pixels[test], digest)


def noisy(clean: Tensor, seed: int) -> Tensor:
    return clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))


def denoise(plan: Plan, seed: int, data: Images) -> tuple[list[dict[str, Any]], Denoiser, nn.Module]:
    """Errors of every way to denoise, and the energy that implicit gradients trained, and the network."""
    test, x = data.test, noisy(data.test, seed)

    def error(found: Tensor) -> float:
        return round(float((found - test).square().mean()), 5)

    mean = data.train.mean(0)
    spread = torch.cov(data.train.T)
    filtered = mean + (x - mean) @ torch.linalg.solve(spread + NOISE**2 * torch.eye(64), spread)
    nearest = data.train[torch.cdist(x, data.train).argmin(-1)]
    trivial = {"noisy image": x, "mean image": mean, "nearest image": nearest, "best linear filter": filtered}
    rows: list[dict[str, Any]] = [{"model": name, "error": error(found)} for name, found in trivial.items()]

    def draw() -> tuple[Tensor, Tensor]:
        clean = data.train[torch.randint(len(data.train), (64,))]
        return clean, clean + NOISE * torch.randn_like(clean)

    torch.manual_seed(seed)
    network = Denoiser().net

    def plain_loss() -> Tensor:
        clean, x = draw()
        return (network(x) - clean).square().sum(-1).mean()

    seconds = fit(network, plain_loss, plan.times * plan.digits, RATE)
    with torch.no_grad():
        found = error(network(x))
    rows.append({"model": "feed-forward", "error": found, "parameters": size(network), "seconds": seconds})
    trained: dict[str, Denoiser] = {}
    counts = {"unrolled, 3 steps": 3, "unrolled, 10 steps": 10, IMPLICIT: None, BOUNDED: None}
    for name, count in counts.items():
        torch.manual_seed(seed)
        energy = trained[name] = Denoiser()
        if name == BOUNDED:
            for layer in (energy.net[0], energy.net[2]):
                nn.utils.parametrizations.spectral_norm(layer)
        last: list[Solution] = []

        def loss(energy: nn.Module = energy, count: int | None = count, last: list[Solution] = last) -> Tensor:
            clean, x = draw()
            last[:] = [answer(energy, x, x, count)]
            return (last[0].value - clean).square().sum(-1).mean()

        row: dict[str, Any] = {"model": name, "seconds": fit(energy, loss, plan.digits, RATE)}
        row |= {"parameters": size(energy)} | work(last[0]) | {"bytes": held_bytes(loss) // 64}
        energy.eval()
        with torch.no_grad():
            row["error"] = error(answer(energy, x, x, count).value)
            problem = EnergyFunction(energy, PerSample(x), event_ndim=1)
            far = error(solve(problem, x, solver=steps(FAR), on_failure="ignore").value)
            # Where the curvature is beyond 2/STEP, steps grow without end.
            row["far"] = far if far < 1 else None
            row |= settled(solution := answer(energy, x, x)) | {"solved": error(solution.value)}
        rows.append(row)
        print(f"  seed {seed}: {row}", flush=True)
    return rows, trained[IMPLICIT], network


def work(last: Solution) -> dict[str, Any]:
    """Evaluations and products of the last update, means over its problems."""
    products = last.adjoint.num_steps
    evals = round(float(last.num_evals.float().mean()), 1)
    return {"evaluations": evals, "products": None if products is None else round(float(products.float().mean()), 1)}


def settled(solution: Solution) -> dict[str, Any]:
    """The share that converged, and the evaluations of the median problem."""
    return {
        "converged": round(float(solution.converged.float().mean()), 4),
        "taken": int(solution.num_evals.median()),
    }


def asked(bits: Tensor) -> tuple[Tensor, Tensor]:
    """What a network is given, (count, N, 2): the bits as -1 and 1, and which is the first; and the parities."""
    first = torch.zeros_like(bits)
    first[:, 0] = 1
    return torch.stack([2 * bits - 1, first], -1).float(), (bits.cumsum(-1) % 2).float()


def parity(plan: Plan, seed: int) -> list[dict[str, Any]]:
    """Shares of bits and of whole strings that are right, by the length of the strings."""
    sets = {n: asked(strings(plan.strings, n, torch.Generator().manual_seed(seed), test=True)) for n in LENGTHS}
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, Tensor]:
        return asked(strings(64, LENGTH, generator, test=False))

    def judged(found: Callable[[Tensor, Tensor], Tensor]) -> dict[str, list[float]]:
        right = [(found(x, torch.zeros_like(y)) > 0) == (y > 0.5) for x, y in sets.values()]
        bits = [round(float(r.float().mean()), 4) for r in right]
        return {"bits": bits, "strings": [round(float(r.all(-1).float().mean()), 4) for r in right]}

    odd = 2 * (draw()[1].mean() > 0.5).float() - 1
    rows: list[dict[str, Any]] = [{"model": "majority", "as trained": judged(lambda x, start: odd + start)}]
    torch.manual_seed(seed)
    network = Convolutions()

    def plain_loss() -> Tensor:
        x, y = draw()
        return F.binary_cross_entropy_with_logits(network(x), y)

    row = {"model": "feed-forward", "parameters": size(network)}
    row["seconds"] = fit(network, plain_loss, plan.times * plan.parity, RATE)
    with torch.no_grad():
        rows.append(row | {"as trained": judged(lambda x, start: network(x))})
    energy = Parity()
    for name, count in ((IMPLICIT, None), ("unrolled, 20 steps", 20), (BOTH, None)):
        if name != BOTH:
            torch.manual_seed(seed)
            energy = Parity()
        last: list[Solution] = []
        made: list[float] = []

        def loss(
            energy: nn.Module = energy,
            count: int | None = count,
            last: list[Solution] = last,
            made: list[float] = made,
        ) -> Tensor:
            x, y = draw()
            last[:] = [answer(energy, x, torch.zeros_like(y), count)]
            made.append(float(last[0].failed.float().mean()))
            if made[-1] > 0.5:
                # No answers, no gradients: the training ends here.
                return torch.tensor(math.nan)
            return F.binary_cross_entropy_with_logits(SHARPNESS * last[0].value, y)

        updates, rate = (plan.after, RATE / 10) if name == BOTH else (plan.parity, 2 * RATE)
        row = {"model": name, "seconds": fit(energy, loss, updates, rate), "parameters": size(energy)}
        row |= {"updates": updates, "stopped": len(made) if made[-1] > 0.5 else None}
        rows.append(row)
        if row["stopped"] is None:
            row |= work(last[0]) | {"bytes": held_bytes(loss) // 64} | read(energy, count, judged)
        print(f"  seed {seed}: {row}", flush=True)
    return rows


@torch.no_grad()
def read(energy: nn.Module, count: int | None, judged: Callable[[Any], dict[str, list[float]]]) -> dict[str, Any]:
    """The answers of an energy of parities after as many steps as in training, and where descent and Anderson end."""
    found: list[Solution] = []

    def solved(x: Tensor, start: Tensor) -> Tensor:
        found.append(answer(energy, x, start))
        return found[-1].value

    def by_anderson(x: Tensor, start: Tensor) -> Tensor:
        problem = EnergyFunction(energy, PerSample(x), event_ndim=1)
        return solve(problem, start, solver=Anderson(rtol=1e-3), on_failure="ignore").value

    row: dict[str, Any] = {"solved": judged(solved), "settled": [settled(solution) for solution in found]}
    if count is not None:
        row["as trained"] = judged(lambda x, start: answer(energy, x, start, count).value)
    return row | {"by Anderson": judged(by_anderson)}

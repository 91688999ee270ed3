"""The suite `energy_transformer`: one evaluation, a solve, and a training step, in time and peak memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attention import Anderson, EnergyTransformer, solve
from implicit_attention.energies import LegendreEnergy
from implicit_attention.potentials import LayerNormPotential, Polynomial, TokenAttention, TokenMemory
from implicit_attention.studies.measure import peak_memory

from . import guard
from .measure import interleaved, once, rows_of
from .report import HERE, RESULTS, Table, between, newest, number, spread
from .targets import ENERGY_TRANSFORMER as TARGETS
from .targets import Row

__all__ = ["METRICS", "NOTES", "TARGETS", "run", "settings_of", "tables"]

METRICS = ("EVALUATION", "LONG", "SOLVE", "TRAINING")
TESTS = ("tests/potentials/test_token_attention.py", "tests/energies/test_legendre.py")
PAGE = HERE.parent / "docs" / "energy_transformer.md"
#: The ratios that the page shows.
SHOWN = (
    *("gradient / autograd", "memory / autograd", "evaluation / explicit block", "solve / evaluations"),
    *("equilibrium, 40 / 5 evaluations", "published, 12 / 1 steps", "checkpointed, 12 / 1 steps"),
)

NOTES = (
    "EVALUATION: the gradient of the energy in closed form (`mean` of Phi at normalised tokens) over autograd of "
    "the energy written out (log-sum-exp of einsum scores, squared relu), over an explicit block of the same "
    "widths (softmax attention with values and an output projection by torch's fused kernel, and a ReLU MLP), and "
    "one product with its Hessian at a state that is linearised, over double backward; `anew`: a product that "
    "begins at the state. LONG: the same gradient of more tokens. Weights with standard deviation .02, no norms "
    "on either side.",
    "SOLVE: `Anderson()` to 1e-4 from the field over its evaluations times one evaluation with its energy. "
    "TRAINING: peak memory of forward and backward of `EnergyTransformer`; equilibria are stopped after so many "
    "evaluations.",
    "Peak memory: all that torch holds at once beyond what it held before, by its profiler.",
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The metric and the sizes of one row."""

    metric: str
    tokens: int = 196
    dim: int = 768
    heads: int = 12
    head_dim: int = 64
    memories: int = 3072
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.metric}: {self.tokens} tokens"


def settings_of(quick: bool, device: str | None = None) -> tuple[Setting, ...]:
    """The rows of a run; all on a CPU."""
    small = {"dim": 48, "heads": 3, "head_dim": 16, "memories": 192} if quick else {}
    count = {"LONG": 600 if quick else 1024}
    return tuple(Setting(metric, **{"tokens": count.get(metric, 40 if quick else 196), **small}) for metric in METRICS)


def run(
    settings: Iterable[Setting],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""
    wanted, threads = set(metrics), torch.get_num_threads()
    chosen = [setting for setting in settings if setting.metric in wanted]
    red = guard.red(TESTS) if chosen else None
    timers = {"EVALUATION": evaluation, "LONG": long, "SOLVE": solved, "TRAINING": training}

    def measured(setting: Setting) -> Row:
        row: Row = {"name": setting.name, **dataclasses.asdict(setting)}
        if red:
            return row | {"evidence": {"ours": {"error": red}}, "seconds": {}, "ratios": {}}
        return row | timers[setting.metric](setting, repeats, max_seconds)

    torch.set_num_threads(1)
    rows = rows_of(chosen, METRICS, measured, progress)
    torch.set_num_threads(threads)
    return rows


class Weights:
    """The weights of a block, states, and what is measured at them."""

    def __init__(self, setting: Setting) -> None:
        generator = torch.Generator().manual_seed(setting.seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        heads = (setting.heads, setting.head_dim, setting.dim)
        self.wq, self.wk, self.wv = (0.02 * drawn(*heads) for _ in range(3))
        self.out = 0.02 * drawn(setting.heads * setting.head_dim, setting.dim)
        self.xi = 0.02 * drawn(setting.memories, setting.dim)
        self.g, self.v = (drawn(1, setting.tokens, setting.dim) for _ in range(2))
        self.beta = setting.head_dim**-0.5
        self.phi = TokenAttention(self.wq, self.wk, self.beta) + TokenMemory(Polynomial(self.xi, 1.0))

    def written_out(self, g: Tensor) -> Tensor:
        """The published energy."""
        q, k = (torch.einsum("bnd,hyd->bhny", g, w) for w in (self.wq, self.wk))
        scores = self.beta * torch.einsum("bhcy,bhky->bhck", q, k)
        return -scores.logsumexp(-1).sum() / self.beta - 0.5 * (g @ self.xi.mT).relu().square().sum()

    def by_autograd(self) -> Tensor:
        g = self.g.clone().requires_grad_()
        return torch.autograd.grad(self.written_out(g), g)[0]

    def by_double_backward(self) -> Tensor:
        g = self.g.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.written_out(g), g, create_graph=True)
        return torch.autograd.grad(gradient, g, self.v)[0]

    @torch.no_grad()
    def explicit_block(self) -> Tensor:
        weights = (self.wq, self.wk, self.wv)
        q, k, v = ((self.g @ w.flatten(0, 1).mT).unflatten(-1, w.shape[:2]).transpose(1, 2) for w in weights)
        read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2) @ self.out
        return read + (self.g @ self.xi.mT).relu() @ self.xi


def _timed(functions: dict[str, Callable[[], Any]], repeats: int, max_seconds: float) -> tuple[Row, dict[str, float]]:
    first = {name: once(function)[1] for name, function in functions.items()}
    times = interleaved(functions, first, repeats=repeats, max_seconds=max_seconds)
    return {name: dataclasses.asdict(timing) for name, timing in times.items()}, {n: t.median for n, t in times.items()}


def _peaks(functions: dict[str, Callable[[], Any]]) -> dict[str, int]:
    return {name: peak_memory(function, torch.device("cpu")) for name, function in functions.items()}


def evaluation(setting: Setting, repeats: int, max_seconds: float) -> Row:
    """Gradient and Hessian product in closed form, beside autograd and an explicit block."""
    at = Weights(setting)
    linear = at.phi.linearize(at.g)
    assert linear is not None
    functions: dict[str, Callable[[], Any]] = {
        "gradient": torch.no_grad()(lambda: at.phi.mean(at.g)),
        "autograd": at.by_autograd,
        "explicit block": at.explicit_block,
        "Hessian product": torch.no_grad()(lambda: linear.product(at.v)),
        "Hessian product, anew": torch.no_grad()(lambda: at.phi.covariance_product(at.g, at.v)),
        "double backward": at.by_double_backward,
    }
    seconds, t = _timed(functions, 2 * repeats, 2 * max_seconds)
    peaks = _peaks({name: functions[name] for name in ("gradient", "autograd")})
    agree = {
        "gradient": _apart(-at.phi.mean(at.g), at.by_autograd()),
        "Hessian product": _apart(-linear.product(at.v), at.by_double_backward()),
    }
    ratios = {
        "gradient / autograd": t["gradient"] / t["autograd"],
        "memory / autograd": peaks["gradient"] / peaks["autograd"],
        "Hessian product / double backward": t["Hessian product"] / t["double backward"],
        "anew / double backward": t["Hessian product, anew"] / t["double backward"],
        "evaluation / explicit block": t["gradient"] / t["explicit block"],
    }
    return {"evidence": {"apart": agree}, "seconds": seconds, "peak_bytes": peaks, "ratios": ratios}


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def long(setting: Setting, repeats: int, max_seconds: float) -> Row:
    """Peak memory of the gradient of many tokens over that of autograd."""
    at = Weights(setting)
    functions: dict[str, Callable[[], Any]] = {
        "gradient": torch.no_grad()(lambda: at.phi.mean(at.g)),
        "autograd": at.by_autograd,
    }
    seconds, t = _timed(functions, repeats, max_seconds)
    peaks = _peaks(functions)
    ratios = {
        "memory / autograd, long": peaks["gradient"] / peaks["autograd"],
        "time, long": t["gradient"] / t["autograd"],
    }
    agree = {"gradient": _apart(-at.phi.mean(at.g), at.by_autograd())}
    return {"evidence": {"apart": agree}, "seconds": seconds, "peak_bytes": peaks, "ratios": ratios}


def solved(setting: Setting, repeats: int, max_seconds: float) -> Row:
    """A solve over its evaluations."""
    at = Weights(setting)
    problem = LegendreEnergy(LayerNormPotential(), at.phi, at.g)

    @torch.no_grad()
    def equilibrium() -> Any:
        return solve(problem, at.g, solver=Anderson(rtol=1e-4, max_steps=1000), on_failure="ignore")

    found = equilibrium()
    count = int(found.num_evals)
    functions = {
        "solve": equilibrium,
        "evaluation": torch.no_grad()(lambda: problem.evaluate(at.g, energy=True)),
    }
    # One evaluation is timed for as long as one solve.
    seconds, t = _timed(functions, repeats, 4 * max_seconds)
    evidence = {"evaluations": count, "converged": bool(found.converged), "residual": float(found.residual)}
    ratios = {"solve / evaluations": t["solve"] / (count * t["evaluation"])}
    return {"evidence": {"solve": evidence}, "seconds": seconds, "ratios": ratios}


def training(setting: Setting, repeats: int, max_seconds: float) -> Row:
    """Peak memory of training steps by the number of evaluations, steps, and checkpointing."""
    sizes = setting.dim, setting.heads, setting.head_dim, setting.memories
    x = Weights(setting).g
    functions: dict[str, Callable[[], Any]] = {}

    def add(name: str, **options: Any) -> None:
        torch.manual_seed(setting.seed)
        layer = EnergyTransformer(*sizes, on_failure="ignore", **options)
        for parameter in (layer.w_query, layer.w_key, layer.memories):
            torch.nn.init.normal_(parameter, std=0.02)

        def step() -> None:
            layer.zero_grad()
            layer(x).square().mean().backward()

        functions[name] = step

    for count in (5, 40):
        # No tolerance that float32 could reach.
        add(f"equilibrium, {count} evaluations", solver=Anderson(rtol=1e-12, atol=0.0, max_steps=count - 1))
    add("published, 1 step", mode="published", steps=1)
    add("published, 12 steps", mode="published", steps=12)
    add("published, 12 steps, checkpointed", mode="published", steps=12, checkpoint=True)
    for function in functions.values():
        function()
    peaks = _peaks(functions)
    one = peaks["published, 1 step"]
    ratios = {
        "equilibrium, 40 / 5 evaluations": peaks["equilibrium, 40 evaluations"] / peaks["equilibrium, 5 evaluations"],
        "published, 12 / 1 steps": peaks["published, 12 steps"] / one,
        "checkpointed, 12 / 1 steps": peaks["published, 12 steps, checkpointed"] / one,
    }
    return {
        "evidence": {"peak MB": {n: p / 1e6 for n, p in peaks.items()}},
        "seconds": {},
        "peak_bytes": peaks,
        "ratios": ratios,
    }


def tables(run: dict[str, Any]) -> list[Table]:
    """One line for each ratio."""
    lines = [
        [row["metric"], str(row["tokens"]), name, number(value), spread(row["seconds"]) if row["seconds"] else "-"]
        for row in run["rows"]
        for name, value in row["ratios"].items()
    ]
    row = run["rows"][0]
    sizes = f"D {row['dim']}, H {row['heads']}, Y {row['head_dim']}, M {row['memories']}"
    return [Table("ratios", f"{sizes}, float32, one thread:", ["metric", "N", "ratio", "measured", "spread"], lines)]


def rewrite(page: Path = PAGE, folder: Path = RESULTS) -> None:
    """Put the newest complete run into the page of the Energy Transformer."""
    content = "Not run yet."
    if (found := newest("energy_transformer", folder, "cpu")) is not None:
        path, run = found
        (table,) = tables(run)
        measured = ", ".join(f"{name} {value}" for _, _, name, value, _ in table.lines if name in SHOWN)
        tokens = run["rows"][0]["tokens"]
        content = f"N {tokens}, {table.intro} {measured}. From `benchmarks/results/{path.name}`."
    between(page, "<!-- speed: python -m benchmarks report -->", "<!-- end of speed -->", content)

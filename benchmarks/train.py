"""The suite `train`: training steps of ours, explicit attention, unrolled autograd and torchdeq."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from .baselines import picard_counts
from .block import BlockSetting, block_row
from .block_compiled import CompiledSetting, compiled_row
from .block_equilibrium import TEN, EquilibriumSetting, equilibrium_row
from .block_forward import SETTINGS as FORWARDS
from .block_forward import ForwardSetting, forward_row
from .block_memory import MemorySetting, memory_row
from .compare import compared, ratios
from .decoding import SETTINGS as DECODINGS
from .decoding import DecodingSetting, decoding_row
from .environment import default_device
from .figures import train_figures as figures
from .llama import SMALL, LlamaSetting, llama_row
from .measure import rows_of
from .problems import Setting, Shape, draw
from .targets import TRAIN as TARGETS
from .targets import Row
from .train_tables import tables

__all__ = ["COMPOSED", "METRICS", "NOTES", "TARGETS", "figures", "run", "settings_of", "tables"]

METRICS = ("STEP", "LENGTH", "BLOCK", "LLAMA", "EQUILIBRIUM", "FORWARD", "COMPILED", "MEMORY", "DECODING")
#: Each metric comes from its own newest run.
COMPOSED = True

RATIOS = {
    "ours / SDPA": ("ours_training", "sdpa_training"),
    "unrolled / ours": ("unrolled", "ours_training"),
    "torchdeq fpi / ours": ("torchdeq_training_fixed_point_iter", "ours_training"),
    "torchdeq anderson / ours": ("torchdeq_training_anderson", "ours_training"),
}

NOTES = (
    "A training step is the forward pass and the gradient of sum(c * state), c fixed, for queries and keys. All solve "
    "to the same residual for every query: unrolled autograd by as many steps as Picard's slowest query needs, at most "
    "200; torchdeq with stop_mode='rel', a row per query, forward and backward by the same solver to the same "
    "tolerance, at most 100 evaluations each.",
    "Gradient errors are those of one head against dense float64 solves. Rivals are timed whatever theirs is.",
    "BLOCK: training step of a pre-norm transformer block, width 256, 4 heads, causal, by ImplicitAttention with its "
    "defaults / with max_steps=0.",
    "LLAMA: a converted Llama / the same with torch's attention, with no mask in either: forward pass with "
    "max_steps=0, forward pass and training step of equilibria with the default solver; the same step with "
    "`training.watch` / without it, the median over 30 pairs in turn. Peaks of memory are those of "
    "fresh processes, of one small layer, so that attention is most of it; growth is from the fewest tokens to the "
    "most, per token.",
    "EQUILIBRIUM: training step of a whole post-norm block (attention, MLP, the input added at every step), or of a "
    "block of two convolutions, as a fixed point per sample, by `Equilibrium` with Anderson(history=2) or plain steps, "
    "and the default adjoint; `ours / torchdeq` is the faster of both over the faster of theirs; torchdeq with the "
    "loosest tolerances at which the largest residuals of its states and adjoints, measured anew, are within it; a "
    "stack of as many untied blocks as ours makes evaluations; `bare`: as many calls without a graph and products with "
    "the Jacobian as ours makes, in a row; `by hand`: the same two methods in as few calls of torch as they need, with "
    "no safeguard, status or check. On a GPU products are in bfloat16 and peak memory is measured.",
    "FORWARD: forward pass of the same without autograd, on one thread, by process time, over a bare loop of as many "
    "evaluations as the slowest sample has; `by hand` and `anderson by hand`: the same steps with the same evidence "
    "(state, residual and evaluations of each sample at its end) and Anderson's with the safeguard of the layer, in as "
    "few calls of torch and numpy as they need: the bound of what a loop of such calls can reach; `by torch`: the "
    "layer without the native function `step`.",
    "COMPILED: forward pass and training step of a pre-norm block as a fixed point by Picard, with `compiled=True` / "
    "without, and with a block that torch.compile compiled alone; graphs are made before any call is timed.",
    "MEMORY: peak of one training step of such a block in a fresh process, by evaluations, converged or not.",
    "DECODING: one token of a causal block with a cache, without autograd, on one thread, by process time, over as "
    "many plain one-token steps of the block, each of which appends its keys to those of the past: `solve` measures "
    "all residuals but has no tolerance, `steps` are the layer's plain steps; bytes of caches are those after 8 "
    "tokens.",
    "Nothing is timed whose tests fail, nor an answer of ours that is wrong.",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The metric of one row, and its problem."""

    metric: str
    problem: Setting | BlockSetting | CompiledSetting | DecodingSetting | EquilibriumSetting | LlamaSetting

    @property
    def name(self) -> str:
        return f"{self.metric}: {self.problem.name}"


def settings_of(quick: bool, device: str | None = None) -> tuple[Case, ...]:
    """The rows of a run, on the GPU if there is one."""
    device = default_device() if device is None else device
    where = {"device": device}
    chosen = (("gaussian", 2.0, 0.5), ("gaussian", 4.0, 0.0), ("clustered", 2.0, 0.5), ("clustered", 8.0, 0.0))
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    shape, block = Shape(), BlockSetting(device=device)
    equilibria: tuple[EquilibriumSetting, ...] = TEN
    memory, compiled = MemorySetting(device=device), CompiledSetting(device=device)
    llamas = [LlamaSetting(256, device=device), LlamaSetting(1024, device=device)]
    llamas.append(LlamaSetting(**SMALL, memory=(4096, 8192, 16384, 32768), device=device))  # type: ignore[arg-type]
    if device != "cpu":
        # A tolerance that bfloat16 resolves, on a block that fills a card.
        card: dict[str, Any] = {"length": 512, "dim": 512, "heads": 8, "rtol": 1e-2, "dtype": "bfloat16"}
        equilibria, memory = (EquilibriumSetting(batch=32, device=device, **card),), dataclasses.replace(memory, **card)
    if quick:
        small = {"batch": 1, "length": 64}
        equilibria, memory = (dataclasses.replace(equilibria[0], **small),), dataclasses.replace(memory, **small)  # type: ignore[arg-type]
        compiled = dataclasses.replace(compiled, batch=2, length=16)
        chosen, lengths = chosen[:1], (64, 128)
        llamas = [LlamaSetting(64, **SMALL, memory=m, device=device) for m in ((), (128, 256))]  # type: ignore[arg-type]
        shape, block = Shape(length=64), BlockSetting(length=64, batch=1, device=device)
    cases = [
        *(Case("STEP", Setting(*problem, shape, **where)) for problem in chosen),  # type: ignore[arg-type]
        *(Case("LENGTH", Setting("gaussian", 2.0, 0.5, Shape(1, 4, length), **where)) for length in lengths),  # type: ignore[arg-type]
        Case("BLOCK", block),
        *(Case("LLAMA", llama) for llama in llamas),
        *(Case("EQUILIBRIUM", setting) for setting in equilibria),
        *(Case("FORWARD", setting) for setting in (FORWARDS[:1] if quick else FORWARDS) if device == "cpu"),
        Case("COMPILED", compiled),
        Case("MEMORY", memory),
        *(Case("DECODING", setting) for setting in (DECODINGS[:1] if quick else DECODINGS) if device == "cpu"),
    ]
    return tuple(cases)


def run(
    settings: Iterable[Case],
    *,
    metrics: Iterable[str] = METRICS,
    repeats: int = 5,
    max_seconds: float = 4.0,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure every setting of these metrics; `progress` is called with each finished row."""

    def measured(case: Case) -> Row:
        row: Row = {"name": case.name, "metric": case.metric, **dataclasses.asdict(case.problem)}
        measure = MEASURES.get(type(case.problem), step_row)
        return row | measure(case.problem, repeats=repeats, max_seconds=max_seconds)

    return rows_of(settings, metrics, measured, progress)


#: The measurement of a problem by its class; of others it is `step_row`.
MEASURES: dict[type, Callable[..., Row]] = {
    BlockSetting: block_row,
    CompiledSetting: compiled_row,
    DecodingSetting: decoding_row,
    LlamaSetting: llama_row,
    MemorySetting: memory_row,
    EquilibriumSetting: equilibrium_row,
    ForwardSetting: forward_row,
}


def step_row(problem: Setting, *, repeats: int, max_seconds: float) -> Row:
    """All training steps on one problem."""
    data = draw(problem)
    counts = picard_counts(data)
    names = list(dict.fromkeys(name for pair in RATIOS.values() for name in pair))
    found, times = compared(names, data, counts, repeats=repeats, max_seconds=max_seconds)
    return {
        "picard": counts._asdict(),
        "evidence": found,
        "seconds": {name: dataclasses.asdict(timing) for name, timing in times.items()},
        "ratios": ratios(RATIOS, times),
    }

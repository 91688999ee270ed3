"""The targets of a run: statistics over its rows with a bound, as data, and their verdicts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Literal

Row = dict[str, Any]


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values)


@dataclasses.dataclass(frozen=True)
class Target:
    """A statistic of the ratio `ratio` over the rows that `where` admits, which must be at most or at least `bound`.

    `ambition` is a sharper bound that decides nothing: what a fused operation of our own is hoped to reach on a CPU.
    Rows count that were measured on `device`.
    """

    id: str
    claim: str
    ratio: str
    statistic: Literal["geometric mean", "worst"]
    sense: Literal["<=", ">="]
    bound: float
    where: Callable[[Row], bool] = lambda row: True
    ambition: float | None = None
    device: Literal["cpu", "cuda"] = "cpu"

    def judge(self, rows: list[Row]) -> dict[str, Any]:
        """The measured statistic with its verdict.

        Where no row has the ratio it is "not measured". A row whose answer was wrong has the ratio None: it is counted
        in `wrong`, and the target is missed.
        """
        here = [row for row in rows if row.get("device", "cpu") == self.device and self.where(row)]
        concerned = [row["ratios"][self.ratio] for row in here if self.ratio in row["ratios"]]
        values = [value for value in concerned if value is not None]
        wrong = len(concerned) - len(values)
        measured = None
        if values and self.statistic == "geometric mean":
            measured = geometric_mean(values)
        elif values:
            measured = max(values) if self.sense == "<=" else min(values)
        met = measured is not None and not wrong and self._within(measured, self.bound)
        return {
            "id": self.id,
            "claim": self.claim,
            "statistic": self.statistic,
            "sense": self.sense,
            "bound": self.bound,
            "measured": measured,
            "rows": len(concerned),
            "wrong": wrong,
            "verdict": "met" if met else "missed" if concerned else "not measured",
            "ambition": self.ambition,
            "reached": None
            if self.ambition is None or measured is None
            else not wrong and self._within(measured, self.ambition),
        }

    def _within(self, measured: float, bound: float) -> bool:
        return measured <= bound if self.sense == "<=" else measured >= bound


def _gaussian(row: Row) -> bool:
    return row["keys"] == "gaussian"


def _clustered(row: Row) -> bool:
    return row["keys"] == "clustered"


_C1 = "forward solve / (Picard's mean evaluations x one SDPA forward)"
_C2 = "torchdeq's {} / ours, forward, a row per {}"
_C3 = "training step with the exact gradient / explicit SDPA training step"
_C5 = "unrolled autograd / ours, training step"

SOLVE = (
    Target("C1", _C1, "C1", "geometric mean", "<=", 0.8),
    Target("C1", _C1, "C1", "worst", "<=", 1.1),
    Target("C2", _C2.format("Anderson", "query"), "C2 anderson", "geometric mean", ">=", 25.0),
    Target("C2", _C2.format("fixed-point iteration", "query"), "C2 fpi", "geometric mean", ">=", 6.0),
    Target("C2", _C2.format("Anderson", "batch entry"), "C2 anderson entry", "geometric mean", ">=", 8.0),
    Target("C2", _C2.format("fixed-point iteration", "batch entry"), "C2 fpi entry", "geometric mean", ">=", 4.5),
    Target("C3", f"{_C3}, Gaussian", "C3", "geometric mean", "<=", 3.2, _gaussian, 2.9),
    Target("C3", f"{_C3}, Gaussian", "C3", "worst", "<=", 5.6, _gaussian, 5.0),
    Target("C3", f"{_C3}, clustered", "C3", "geometric mean", "<=", 4.6, _clustered, 4.3),
    Target("C3", f"{_C3}, clustered", "C3", "worst", "<=", 6.8, _clustered, 6.4),
    Target("C5", f"{_C5}, time, all queries converged", "C5", "geometric mean", ">=", 8.0),
    Target("C5", f"{_C5}, time, all queries converged", "C5", "worst", ">=", 1.6, ambition=2.5),
    Target("C5", f"{_C5}, peak memory, 32 steps", "C5 memory", "worst", ">=", 4.0),
    Target("C7", "import of the package / import of torch", "C7", "worst", "<=", 1.05),
)

_C6 = "saddle point and its gradient, Newton with explicit inverses / ours, float64"


def _double(row: Row) -> bool:
    return row.get("dtype") == "float64"


_SMALL = "forward of a mean field, N 8 to 128, to its residual"


def _bethe(sites: int, graph: str = "torus", **more: Any) -> Callable[[Row], bool]:
    """Rows of Bethe on a graph."""
    wanted = {"method": "Bethe()", "sites": sites, "graph": graph, **more}
    return lambda row: all(row.get(name) == value for name, value in wanted.items())


def _graphs(claim: str, ratio: str, bound: float, where: Callable[[Row], bool] = lambda row: True) -> Target:
    return Target("GRAPHS", claim, ratio, "worst", "<=", bound, where)


_LARGE, _SINGLE = "Bethe, 1,000 x 1,000 sites", {"rtol": 1e-6, "dtype": "float32"}
_DOUBLE, _EXACT = {"rtol": 1e-6, "dtype": "float64"}, {"rtol": 1e-11}

SPINS = (
    Target("C6", _C6, "C6", "worst", ">=", 3.0, _double),
    Target("C6", _C6, "C6", "geometric mean", ">=", 3.0, _double),
    Target("C6", "failures of the saddle point in these settings", "C6 failures", "worst", "<=", 0.0),
    Target("RANDOM", "failures of the saddle point on the random systems", "failures", "worst", "<=", 0.0),
    Target("SMALL", f"{_SMALL} / the faster loop by hand", "forward / by hand", "geometric mean", "<=", 1.3),
    Target("SMALL", f"{_SMALL} / the faster loop by hand", "forward / by hand", "worst", "<=", 1.3),
    Target("SMALL", f"{_SMALL} / the published module's formula", "forward / published", "worst", "<=", 1.0),
    *(
        Target(
            "FRAMES", f"frames of thermodynamics by AdaTAP, 16 spins, D {dim}", f"frames, D {dim}", "worst", "<=", most
        )
        for dim, most in ((3, 36000.0), (8, 35000.0))
    ),
    _graphs("Bethe, 45 x 45 sites, to 1e-11, seconds", "seconds", 0.05, _bethe(45**2)),
    _graphs(f"{_LARGE}, to 1e-11, seconds", "seconds", 5.0, _bethe(10**6, **_EXACT)),
    _graphs(f"{_LARGE}, to 1e-11 by steps of messages alone, seconds", "plain seconds", 8.0, _bethe(10**6, **_EXACT)),
    _graphs(f"{_LARGE}, to 1e-6, seconds", "seconds", 4.0, _bethe(10**6, **_DOUBLE)),
    _graphs(f"{_LARGE}, to 1e-6, float32, seconds", "seconds", 2.0, _bethe(10**6, **_SINGLE)),
    _graphs(f"{_LARGE}, a sweep / the same in NumPy", "sweep / numpy", 0.8, _bethe(10**6)),
    _graphs(f"{_LARGE}, gradient / forward", "gradient / forward", 0.5, _bethe(10**6)),
    _graphs(f"{_LARGE}, float64, peak GB", "GB", 1.3, _bethe(10**6, dtype="float64")),
    _graphs(f"{_LARGE}, float32, peak GB", "GB", 0.8, _bethe(10**6, dtype="float32")),
    _graphs("Bethe, 3-regular, N 1e5, beta .5, seconds", "seconds", 0.3, _bethe(10**5, "regular", beta=0.5)),
    _graphs("Bethe, 3-regular, N 1e5, beta 1, seconds", "seconds", 1.0, _bethe(10**5, "regular", beta=1.0)),
    _graphs("MeanField, TAP at 1e6 sites / sparse products of torch", "forward / products", 1.5),
    _graphs("a step of messages / pgmax's, 316 x 316 sites, float32", "sweep / pgmax", 0.5),
    _graphs("64 graphs of 200 sites as one batch / one by one", "batch / one by one", 0.25),
)


def _sized(**sizes: int) -> Callable[[Row], bool]:
    """Rows whose shape has these sizes."""
    return lambda row: all(row.get("shape", {}).get(name) == size for name, size in sizes.items())


_C4 = "peak memory of a training step at N = M = 4096 above its inputs"

ATTENTION = (
    Target("C4", f"{_C4} / SDPA's", "C4", "worst", "<=", 1.0, _sized(length=4096), 0.8),
    Target("C4", f"{_C4}, 20 evaluations / 5", "C4 growth", "worst", "<=", 1.3, _sized(length=4096), 1.0),
)


def _metric(name: str) -> Callable[[Row], bool]:
    return lambda row: row.get("metric") == name


def _short(**sizes: int) -> Callable[[Row], bool]:
    return lambda row: _metric("SHORT")(row) and _sized(**sizes)(row)


_LAYER = _metric("LAYER")
_C8 = "equilibrium_attention, one thread, {} / SDPA's"

NATIVE = (
    *(
        Target("C8", f"{_C8.format('forward')}, H 8, N = M = {n}", "forward", "worst", "<=", bound, _short(length=n))
        for n, bound in ((64, 12.0), (128, 10.0), (256, 8.0))
    ),
    *(
        Target(
            "C8", f"{_C8.format('training step')}, H 8, N = M = {n}", "training", "worst", "<=", bound, _short(length=n)
        )
        for n, bound in ((64, 5.5), (256, 5.0))
    ),
    Target("C8", f"{_C8.format('forward')}, decode, H 8, N 1", "forward", "worst", "<=", 5.5, _short(length=1)),
    Target("C8", f"{_C8.format('max_steps=0')}, H 1, N = M = 16", "explicit", "worst", "<=", 3.0, _short(length=16)),
    *(
        Target("C10", f"ImplicitAttention, one thread, {what} / that of the same layer of SDPA", name, *bound, _LAYER)
        for what, name, *bound in (
            ("max_steps=0", "explicit", "worst", "<=", 1.6),
            ("forward", "solve", "worst", "<=", 3.0),
            ("training step", "training", "worst", "<=", 3.0),
        )
    ),
    Target("C10", "frames of Python in a forward of the layer", "frames of a call", "worst", "<=", 90.0, _LAYER),
    Target(
        "C8",
        f"{_C8.format('forward with its solution')}, its own without",
        "solution",
        "worst",
        "<=",
        1.2,
        _metric("SHORT"),
    ),
    *(
        Target(
            "C9",
            f"{what} on two threads beside a busy neighbour / without it",
            name,
            "worst",
            "<=",
            2.5,
            _metric("NEIGHBOUR"),
        )
        for what, name in (("solve", "solve"), ("training step", "training"))
    ),
)

_BLOCK = "training step of a block as a fixed point"
_FASTER = f"{_BLOCK} / torchdeq's faster solver at equal measured residuals"

_FORWARD = "forward of a block as a fixed point / a bare loop of as many evaluations"
#: Sizes of a block, and the bounds for plain steps and Anderson(history=2).
_FORWARDS: tuple[tuple[str, dict[str, Any], float, float], ...] = (
    ("B 1, N 8, D 32", {"batch": 1, "kind": "block"}, 1.4, 2.0),
    ("B 8, N 8, D 32", {"batch": 8, "length": 8, "kind": "block"}, 1.25, 1.6),
    ("B 8, N 32, D 64", {"batch": 8, "length": 32}, 1.15, 1.3),
    ("B 32, N 32, D 128", {"batch": 32}, 1.05, 1.1),
    ("convolutions, 8 x 8, 32 channels", {"kind": "convolution"}, 1.4, 2.0),
)


def _forward(**sizes: Any) -> Callable[[Row], bool]:
    """Rows of forward passes of these sizes."""
    return lambda row: row.get("metric") == "FORWARD" and all(row.get(name) == size for name, size in sizes.items())


_LLAMA = "converted Llama, anchor .9, 1024 tokens"


def _llama(row: Row) -> bool:
    return row.get("metric") == "LLAMA" and row.get("tokens") == 1024


TRAIN = (
    Target("LLAMA", f"{_LLAMA}: max_steps=0 / torch's attention", "explicit / sdpa", "worst", "<=", 1.2, _llama),
    Target("LLAMA", f"{_LLAMA}: training step / torch's attention", "training / sdpa", "worst", "<=", 3.5, _llama),
    Target(
        "LLAMA",
        "its training step watched by training.watch / unwatched, 30 pairs, 256 and 1024 tokens",
        "watched / training",
        "worst",
        "<=",
        1.03,
        _metric("LLAMA"),
    ),
    Target(
        "LLAMA",
        "peak memory of its training step per token, 32768 tokens / 4096",
        "memory growth",
        "worst",
        "<=",
        1.2,
        _metric("LLAMA"),
    ),
    Target("EQUILIBRIUM", _FASTER, "ours / torchdeq", "geometric mean", "<=", 0.75, _metric("EQUILIBRIUM")),
    Target("EQUILIBRIUM", _FASTER, "ours / torchdeq", "worst", "<=", 1.0, _metric("EQUILIBRIUM")),
    *(
        Target("FORWARD", f"{_FORWARD}, {name}, {sizes}", f"{name} / bare", "worst", "<=", bound, _forward(**where))
        for sizes, where, *bounds in _FORWARDS
        for name, bound in zip(("picard", "anderson"), bounds, strict=True)
    ),
    Target(
        "EQUILIBRIUM",
        f"{_BLOCK} / its evaluations and products with the Jacobian, made in a row",
        "ours / bare",
        "worst",
        "<=",
        1.25,
        _metric("EQUILIBRIUM"),
    ),
    *(
        Target(
            "COMPILED",
            f"{what} of a block as a fixed point, B 8, N 32, D 64: compiled=True / eager",
            ratio,
            "worst",
            "<=",
            bound,
            _metric("COMPILED"),
        )
        for what, ratio, bound in (
            ("training step", "compiled step / eager", 0.7),
            ("forward pass", "compiled forward / eager", 0.95),
        )
    ),
    Target(
        "MEMORY",
        f"peak memory of the {_BLOCK}, 80 evaluations / 5",
        "memory growth",
        "worst",
        "<=",
        1.2,
        _metric("MEMORY"),
    ),
    Target(
        "MEMORY",
        "peak memory of the same by Reversible(damping=0.5), 64 steps / 8",
        "memory growth, reversible",
        "worst",
        "<=",
        1.1,
        _metric("MEMORY"),
    ),
    Target(
        "MEMORY",
        "its time, 8 steps / the same steps recorded by autograd",
        "reversible / unrolled",
        "worst",
        "<=",
        1.6,
        _metric("MEMORY"),
    ),
    Target(
        "DECODING",
        "a token of a causal block by 16 evaluations / 16 plain one-token steps of the block",
        "solve / plain",
        "worst",
        "<=",
        1.3,
        _metric("DECODING"),
    ),
    Target(
        "DECODING", "bytes of its cache, 16 evaluations / 1", "cache bytes", "worst", "<=", 1.0, _metric("DECODING")
    ),
    Target("EQUILIBRIUM", _FASTER, "ours / torchdeq", "worst", "<=", 1.0, _metric("EQUILIBRIUM"), device="cuda"),
)

_SPIN_STEP = "training step of the spin layer, {} answer / explicit SDPA training step"


def _length(*lengths: int) -> Callable[[Row], bool]:
    return lambda row: row.get("length") in lengths


SPIN_LAYERS = (
    Target("SPIN", "one evaluation of mean field / SDPA forward", "evaluation", "worst", "<=", 0.8),
    Target("SPIN", "solve / its evaluations, N 256", "solve", "worst", "<=", 2.5, _length(64, 256)),
    Target("SPIN", "solve / its evaluations, N 1024", "solve", "worst", "<=", 1.5, _length(1024)),
    Target("SPIN", _SPIN_STEP.format("explicit"), "training", "worst", "<=", 10.0, ambition=6.0),
    Target("SPIN", _SPIN_STEP.format("total"), "total training", "worst", "<=", 16.0, ambition=10.0),
    Target("SPIN", "training step unrolled to the same residual / ours", "unrolled / ours", "worst", ">=", 2.0),
    Target("SPIN", "GaussianClosure / MeanField", "closure / mean field", "worst", "<=", 2.0),
    Target("SPIN", "saddle point / slope of F, as in C6", "saddle point / slope of F", "worst", "<=", 1.0),
    Target("GROWTH", "peak memory of a training step, 40 evaluations / 5", "GROWTH", "worst", "<=", 1.1),
    Target("LONG", "peak memory, low rank / all pairs, N 4096", "LONG", "worst", "<=", 0.1),
)

_OVER = "{} of `Softmax1` and `DistanceLogSumExp` / of `LogSumExp`"


def _named(*starts: str) -> Callable[[Row], bool]:
    return lambda row: row.get("potential", "").startswith(starts)


POTENTIALS = (
    Target("FUSED", _OVER.format("solve"), "solve", "worst", "<=", 1.1, _metric("FUSED")),
    Target("FUSED", _OVER.format("training step"), "training", "worst", "<=", 1.1, _metric("FUSED")),
    Target(
        "UNFUSED",
        "evaluation of `Entmax` / of `LogSumExp`, written out",
        "evaluation",
        "worst",
        "<=",
        4.0,
        _named("Ent"),
    ),
    Target(
        "UNFUSED",
        "solve to 1e-6 with `Entmax` / with `LogSumExp`, written out, anchor .5",
        "solve",
        "worst",
        "<=",
        1.5,
        _named("Ent"),
    ),
    Target("UNFUSED", "the same from noisy keys, anchor 0, beta 1", "retrieval", "worst", "<=", 1.5),
    Target(
        "UNFUSED",
        "evaluation of `Polynomial` and `NormalisedScores` / of `LogSumExp`, written out",
        "evaluation",
        "worst",
        "<=",
        1.2,
        _named("Poly", "Norm"),
    ),
    Target("KERNEL", "evaluation by 64 features / `LogSumExp`, fused", "evaluation / fused", "worst", "<=", 0.1),
    Target("KERNEL", "peak memory by 64 features / `LogSumExp`, fused", "memory / fused", "worst", "<=", 0.1),
    Target("KERNEL", "evaluation by 64 features / written out", "evaluation / written out", "worst", "<=", 0.1),
    Target("KERNEL", "peak memory by 64 features / written out", "memory / written out", "worst", "<=", 0.1),
)

ENERGY_TRANSFORMER = (
    Target("EVALUATION", "closed gradient / autograd of the energy", "gradient / autograd", "worst", "<=", 0.95),
    Target("EVALUATION", "its peak memory / autograd's", "memory / autograd", "worst", "<=", 0.5),
    Target("EVALUATION", "Hessian product / double backward", "Hessian product / double backward", "worst", "<=", 0.5),
    Target("EVALUATION", "one evaluation / an explicit block", "evaluation / explicit block", "worst", "<=", 1.3),
    Target("LONG", "peak memory / autograd's, 1024 tokens", "memory / autograd, long", "worst", "<=", 0.3),
    Target("SOLVE", "solve to 1e-4 / (its evaluations x one evaluation)", "solve / evaluations", "worst", "<=", 1.15),
    Target(
        "TRAINING",
        "peak memory of an equilibrium training step, 40 evaluations / 5",
        "equilibrium, 40 / 5 evaluations",
        "worst",
        "<=",
        1.1,
    ),
    Target("TRAINING", "the same, published, 12 steps / one", "published, 12 / 1 steps", "worst", "<=", 13.0),
    Target("TRAINING", "the same, checkpointed", "checkpointed, 12 / 1 steps", "worst", "<=", 4.0),
)


_SHARDED = "64 queries, 200,000 keys"


def _large(row: Row) -> bool:
    """Evaluations and solves over many keys with many queries."""
    return row["metric"] in ("EVALUATION", "SOLVE") and row["shape"]["length"] * row["shape"]["num_keys"] >= 12_800_000


SCALE = (
    Target(
        "SCALE",
        f"evaluation by one process / (2 x by two), {_SHARDED}",
        "efficiency 2",
        "worst",
        ">=",
        0.8,
        lambda row: row["metric"] == "EVALUATION" and _large(row),
    ),
    Target(
        "SCALE",
        f"solves by one process / (2 x by two), {_SHARDED}",
        "efficiency 2",
        "worst",
        ">=",
        0.8,
        lambda row: row["metric"] == "SOLVE" and _large(row),
    ),
    Target(
        "SCALE",
        f"evaluation and solves by one process / by the fused operation, {_SHARDED}",
        "sharded / fused",
        "worst",
        "<=",
        1.15,
        _large,
    ),
    Target(
        "EVALUATION",
        "collectives of one more evaluation",
        "collectives",
        "worst",
        "<=",
        2.0,
        _metric("EVALUATION"),
        1.0,
    ),
    Target("SOLVE", "collectives of a solve / its evaluations", "collectives", "worst", "<=", 2.0, _metric("SOLVE")),
    Target(
        "EVALUATION",
        "bytes of a query in one more evaluation of 64, D 64: (D + 6) x 4",
        "bytes",
        "worst",
        "<=",
        280.0,
        lambda row: row["shape"]["length"] == 64,
    ),
)


def _card(metric: str, claim: str, bounds: dict[int, tuple[float, float]]) -> tuple[Target, ...]:
    """A target of the kernels on a card, by head dimension: its bound and its aim."""
    return tuple(
        Target(metric, f"{claim}, D {dim}", metric, "worst", "<=", bound, _sized(dim=dim), aim, "cuda")
        for dim, (bound, aim) in bounds.items()
    )


CARD = (
    *_card("G1", "one evaluation with its step / the fastest SDPA forward", {64: (1.2, 1.0), 128: (1.5, 1.2)}),
    *_card("G2", "solve to 1e-3 / the fastest SDPA forward", {64: (12.0, 9.0), 128: (15.0, 12.0)}),
    *_card("G3", "one product with its step / the fastest SDPA forward", {64: (1.6, 1.6), 128: (1.8, 1.8)}),
    *_card("G4", "training step, exact gradient / explicit SDPA training step", {64: (5.0, 4.0), 128: (6.0, 5.0)}),
    Target("G5", "largest N = M of a training step, D 64, one head", "G5", "worst", ">=", 131072, device="cuda"),
    Target("G5", "exponent of its memory in N", "G5 exponent", "worst", "<=", 1.1, device="cuda"),
    Target("G6", "looks of the host in one solve by the kernels", "G6", "worst", "<=", 0.0, device="cuda"),
    Target(
        "BLOCK",
        "forward of `Equilibrium` by plain steps, B 32, N 512, width 512 / its bare loop",
        "picard forward / bare",
        "worst",
        "<=",
        1.3,
        device="cuda",
        ambition=1.15,
    ),
)

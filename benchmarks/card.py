"""All that a card is asked, in one call of at most seven minutes: `bash benchmarks/gpu.sh OUT`.

The parts follow each other by the clock. Every row is appended to OUT/rows.jsonl as soon as it is measured, so that
nothing is lost where the call is cut short. Where a row ends the process, the next process goes on behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from implicit_attention import Anderson, Equilibrium, Picard, equilibrium_attention
from implicit_attention._solve import solve_by_kernel
from implicit_attention.failure import UnsupportedImplementation
from implicit_attention.kernels import hopfield_solve, trust
from implicit_attention.kernels.problem import RTOL, THERE, AdjointRule, Attention, FusedRule
from implicit_attention.kernels.triton import layout
from implicit_attention.kernels.triton.layout import Tiles

from . import block_equilibrium, card_tables, memory
from .baselines import BACKENDS, CONTENDERS, PicardCounts, Run, picard_counts, sdpa, training_step, unrolled
from .block_equilibrium import HISTORY, EquilibriumSetting
from .compare import CONVERGED, GRADIENT_ERROR, statuses
from .environment import environment
from .measure import ROOT, Timing, interleaved, once
from .problems import ATOL, Data, Setting, Shape, draw, evidence, exact_adjoint, gradient_error, last_head
from .targets import Row

#: The parts in their order, and the second of the call after which no row of each is begun.
PARTS = {
    "ceilings": 25,
    "smoke": 45,
    "tests": 130,
    "attention": 270,
    "evaluation": 285,
    "targets": 345,
    "block": 385,
    "tiles": 395,
}
#: The second from which on nothing is begun: problems of the main table that were late have until then.
END = 390
#: Seconds after which a row is broken off; a rival that is expected to take more than RIVAL is not called.
LONGEST, RIVAL = 15.0, 1.5
#: Exit statuses: the first kernel does not compile; a row has left the card unusable for this process.
NO_KERNEL, AGAIN = 3, 75
#: Each contender is timed in so many turns; seconds of all its turns together, and of one.
ROUNDS, SECONDS, TURN = 3, 0.4, 0.02
#: Precisions of keys, those first that matter most.
DTYPES = ("bfloat16", "float32", "float16")
#: By device torch's operations that give the log-sum-exp beside the mean, and what they take behind the values.
TORCHS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cuda": {
        "flash": ("_scaled_dot_product_flash_attention",),
        "efficient": ("_scaled_dot_product_efficient_attention", None, True),
        "cudnn": ("_scaled_dot_product_cudnn_attention", None, True),
    },
    "cpu": {"flash": ("_scaled_dot_product_flash_attention_for_cpu",)},
}
#: Queries times sets of the main table; the longest where rivals run beside us; evaluations at which they give up.
QUERIES, RIVALS_TO, CAP = 2**18, 2**14, 100
#: Of longer problems the gradient is checked for so many queries, and not for keys.
CHECKED = 2048
#: Steps in G1; products in G3, whose difference is timed; as in `Anderson()`, the plain steps of a solve.
BUDGET, PRODUCTS, PLAIN_STEPS = 8, (2, 10), 3
#: Lengths that G5 tries until one does not fit, and the one from where on memory is fitted.
LENGTHS, FIT_LENGTH = tuple(2**power for power in range(14, 19)), 2**15
#: Tiles of evaluations to try beside those in use, by head dimension, for keys in half precision.
CANDIDATES = {
    64: (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3)),
    128: (Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3)),
}
#: Solvers of a block, ours and torchdeq's.
OURS, DEQS = ("picard", "anderson"), tuple(f"torchdeq {name}" for name in block_equilibrium.RIVALS)
SHARDS = 14
#: Whose tests, if they are marked gpu, run beside those of the kernels.
OTHER_TESTS = (
    "tests/test_solve.py",
    "tests/layers/test_mean_field_attention.py",
    "tests/layers/test_spin.py",
    "tests/benchmarks/test_train_suite.py",
)


class Smoke(NamedTuple):
    """Queries, keys, head dimension, precision, and how queries choose keys.

    "masked": by one mask for all queries; "pairs": by one for each. But for these, queries that fill more than a tile
    are listed when others have ended.
    """

    rows: int
    count: int
    dim: int
    dtype: str
    kind: str

    @property
    def name(self) -> str:
        return f"N {self.rows}, M {self.count}, D {self.dim}, {self.dtype}, {self.kind}"


#: One for each process; the first is what most people use.
SMOKE = (
    Smoke(300, 300, 64, "bfloat16", "plain"),
    Smoke(37, 300, 128, "bfloat16", "causal"),
    Smoke(300, 37, 256, "bfloat16", "masked"),
    Smoke(300, 300, 64, "bfloat16", "pairs"),
    Smoke(1, 16, 17, "float16", "plain"),
    Smoke(16, 5, 80, "float16", "causal"),
    Smoke(300, 300, 160, "float16", "masked"),
    Smoke(5, 1, 64, "float16", "plain"),
    Smoke(16, 16, 256, "float16", "plain"),
    Smoke(300, 16, 17, "float32", "causal"),
    Smoke(37, 300, 128, "float32", "masked"),
    Smoke(300, 300, 80, "float32", "plain"),
)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the rows are: as a card has them, or the smallest, for Triton's interpreter on a CPU (`dry`)."""

    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def smoke(self) -> tuple[Smoke, ...]:
        return (Smoke(5, 16, 17, "bfloat16", "causal"),) if self.dry else SMOKE

    def attention(self) -> tuple[Setting, ...]:
        """The problems of the main table, those first that matter most."""
        if self.dry:
            return (self.setting(16, 20, 2, "bfloat16", causal=True),)
        lengths = (1024, 4096, 16384, 65536)
        return tuple(
            self.setting(dim, length, QUERIES // length, dtype, causal=causal)
            for dtype in DTYPES
            for causal in (False, True)
            for dim in (64, 128)
            for length in (lengths[:3] if dtype == "float32" else lengths)
        )

    def short(self) -> tuple[Setting, ...]:
        """Problems of which launches are the larger part: few queries over few keys, and one over more."""
        if self.dry:
            return (self.setting(16, 1, 2, "float32", num_keys=20),)
        sizes = ((64, 64), (1, 512))
        return tuple(
            self.setting(64, length, 8, dtype, num_keys=count) for dtype in DTYPES[:2] for length, count in sizes
        )

    def evaluations(self) -> tuple[Setting, ...]:
        """The problems of one evaluation."""
        if self.dry:
            return tuple(self.setting(16, 20, 2, dtype) for dtype in ("bfloat16", "float32"))
        return tuple(self.setting(dim, 4096, 64, dtype) for dtype in DTYPES for dim in (64, 128))

    def setting(
        self, dim: int, length: int, heads: int, dtype: str, *, anchor: float = 0.5, sharpness: float = 2.0, **more: Any
    ) -> Setting:
        """A problem on the device, to the tolerance that people ask of its precision."""
        rtol = 1e-4 if dtype == "float32" else 1e-3
        shape = Shape(more.pop("batch", 1), heads, length, dim, more.pop("num_keys", None))
        return Setting("gaussian", sharpness, anchor, shape, dtype=dtype, device=self.device, rtol=rtol, **more)

    def target(self, dim: int, **options: Any) -> Setting:
        """The problem of the G rows."""
        if self.dry:
            return self.setting(16, 20, 2, "bfloat16", **options)
        return self.setting(dim, 4096, 16, "bfloat16", batch=4, **options)

    @property
    def block(self) -> EquilibriumSetting:
        if self.dry:
            return EquilibriumSetting(2, 4, 16, 2, rtol=1e-2)
        return EquilibriumSetting(32, 512, 512, 8, rtol=1e-2, dtype="bfloat16", device=self.device)


# The run.


class Rows:
    """The rows of a call in OUT/rows.jsonl, and the seconds since it began."""

    def __init__(self, out: Path, scale: Scale) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path, self.begun, self.scale = out / "rows.jsonl", out / "begun.json", scale
        self.began = float(os.environ.get("BEGAN", time.time()))
        self.written: list[Row] = []
        if self.path.exists():
            self.written = [json.loads(line) for line in self.path.read_text().splitlines()]
        else:
            where = environment(scale.device)
            self.add({"part": "run", "name": "run", "began": self.began, "dry": scale.dry, "environment": where})
        if self.begun.exists():
            self.add({**json.loads(self.begun.read_text()), "error": "the process ended in this row"})
            self.begun.unlink()

    def add(self, row: Row) -> None:
        self.written.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def left(self, part: str, until: float | None = None) -> float:
        """Seconds until no row of the part is begun."""
        return math.inf if self.scale.dry else self.began + (until or PARTS[part]) - time.time()

    def measure(
        self, part: str, jobs: Iterable[tuple[str, Callable[[Row], None]]], *, until: float | None = None
    ) -> list[str]:
        """Let each job fill its row, unless it has one or the time of the part (or `until`) is over; those left out."""
        done = {row["name"] for row in self.written if row["part"] == part}
        late = []
        for name, job in jobs:
            if name in done:
                continue
            if self.left(part, until) <= 0:
                late.append(name)
                continue
            self.begun.write_text(json.dumps({"part": part, "name": name}))
            # The interpreter takes its time.
            row = filled(job, LONGEST * (20 if self.scale.dry else 1))
            self.add({"part": part, "name": name, **row})
            self.begun.unlink()
            print(f"[{time.time() - self.began:3.0f} s] {part}: {name}: {told(row)}", flush=True)
            if self.scale.device == "cuda" and context_is_broken():
                # Not by an exception: torch may abort where it takes down what is broken.
                os._exit(AGAIN)
        return late

    def skip(self, part: str, late: list[str]) -> None:
        """Say which rows of a part had no time."""
        if late:
            self.add({"part": part, "name": "skipped", "skipped": late})
            print(f"{part}: skipped, as its time was over: {', '.join(late)}", flush=True)


def filled(job: Callable[[Row], None], longest: float) -> Row:
    """The row of a job, up to where it failed or took more than so many seconds."""
    begin, row = time.perf_counter(), Row()
    try:
        with alarm(longest):
            job(row)
    except Exception as error:
        row["error"] = short(error)
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    return {**row, "wall_seconds": time.perf_counter() - begin}


def short(error: BaseException | str) -> str:
    """The error with the beginning and the end of its message: compilers name the cause last."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text if len(text) < 900 else f"{text[:300]} ... {text[-600:]}"


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so many seconds.

    That takes until the thread is back in Python. Where a kernel does not end, the process does, 5 s later.
    """

    def ring(signum: int, frame: Any) -> None:
        raise TimeoutError(f"the row took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 5, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def context_is_broken() -> bool:
    """Whether a kernel has left the card in a state in which this process can use it no more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def told(row: Row) -> str:
    """The row in a few words."""
    if "error" in row:
        return str(row["error"])
    return ", ".join(f"{name} {number:.3g}" for name, number in row.get("ratios", {}).items() if number is not None)


# Ceilings, smoke and tests.


def ceilings(scale: Scale) -> Iterator[tuple[str, Callable[[Row], None]]]:
    """Bytes a second of a copy, and operations a second of a matrix product."""
    size, side = (2**20, 256) if scale.dry else (2**31, 8192)

    def copied(row: Row) -> None:
        given = torch.randint(0, 255, (size,), dtype=torch.uint8, device=scale.device)
        taken = torch.empty_like(given)
        seconds = alone(lambda: taken.copy_(given), scale)
        row |= {"seconds": {"copy": dataclasses.asdict(seconds)}, "ratios": {"TB/s": 2e-12 * size / seconds.median}}

    def multiplied(dtype: torch.dtype, row: Row) -> None:
        a, b = (torch.randn(side, side, device=scale.device).to(dtype) for _ in range(2))
        seconds = alone(lambda: a @ b, scale)
        row |= {"seconds": {"product": dataclasses.asdict(seconds)}}
        row["ratios"] = {"TFLOP/s": 2e-12 * side**3 / seconds.median}

    yield "copy", copied
    for dtype in (torch.bfloat16, torch.float16):
        yield f"matrix product, {dtype}", functools.partial(multiplied, dtype)


def alone(function: Callable[[], Any], scale: Scale) -> Timing:
    return in_turns({"": function}, {"": once(function, scale.device)[1]}, scale.device)[""]


def in_turns(
    functions: dict[str, Callable[[], Any]], first: dict[str, float], device: str, seconds: float = SECONDS
) -> dict[str, Timing]:
    """Times of all functions, each for so many seconds at most; on a CPU of one call, to show that it runs."""
    repeats, most = (ROUNDS, seconds) if torch.device(device).type == "cuda" else (1, 0.0)
    return interleaved(functions, first, repeats=repeats, max_seconds=most, device=device, turn_seconds=TURN)


def of_kernels(scale: Scale) -> dict[str, str]:
    """The variables of a process that runs kernels."""
    return {**os.environ, "TRITON_INTERPRET": "1" if scale.dry else "0", "OMP_NUM_THREADS": "1"}


class SmokeTests:
    """A process for each smoke test, which goes on to compile what is timed later."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.rows, self.folder, scale = rows, folder, rows.scale
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        if any(row["part"] == "smoke" for row in rows.written):
            return
        for index in range(len(scale.smoke)):
            command = [sys.executable, "-m", "benchmarks.card", str(self.file(index)), "--smoke", str(index)]
            command += ["--dry"] if scale.dry else []
            with self.file(index, "txt").open("w") as told:
                self.processes[index] = subprocess.Popen(command, cwd=ROOT, env=of_kernels(scale), stderr=told)

    def file(self, index: int, kind: str = "json") -> Path:
        return self.folder / f"smoke_{index}.{kind}"

    def collect(self, part: str) -> None:
        """Write the rows of those that answer before the part is over; those of the others once the tests are."""
        asked = {row["name"] for row in self.rows.written if row["part"] == "smoke"}
        for index, process in self.processes.items():
            case = self.rows.scale.smoke[index]
            if case.name in asked:
                continue
            while not self.file(index).exists() and process.poll() is None and self.rows.left(part) > 0:
                time.sleep(0.05)
            if self.file(index).exists():
                found = json.loads(self.file(index).read_text())
            elif process.poll() is not None:
                found = {"error": short(self.file(index, "txt").read_text())}
            elif part == "tests":
                found = {"error": f"no answer after {PARTS['tests']} s", "errors": {}}
            else:
                continue
            self.rows.add({"part": "smoke", "name": case.name, **found})
            print(f"smoke: {case.name}: {found.get('error') or 'right'}", flush=True)
            # Where errors were measured it compiled; that a kernel is wrong stops nothing.
            if index == 0 and "error" in found and "errors" not in found:
                wait(self.processes.values(), 0.0)
                raise typer.Exit(NO_KERNEL)

    def end(self) -> None:
        """End the processes that are still compiling when the tests are over."""
        wait(self.processes.values(), None if self.rows.scale.dry else max(self.rows.left("tests"), 0.0))


def smoked(case: Smoke, device: str) -> Row:
    """Errors of a solve and of its gradient against float64, and what is wrong with them."""
    from implicit_attention.kernels.triton.adjoint import solve_adjoint
    from implicit_attention.kernels.triton.solve import solve

    def empty(size: int) -> Tensor:
        return torch.empty(2, size, case.dim, dtype=getattr(torch, case.dtype), device=device)

    each = {"masked": 1, "pairs": case.rows}.get(case.kind)
    mask = None if each is None else torch.ones(2, each, case.count, dtype=torch.bool, device=device)
    kind = Attention.of(empty(case.rows), empty(case.count), 1.0, 1.0, mask, 0 if case.kind == "causal" else None)
    small = trust.small_problem(kind, case.rows, case.count)

    errors = {**trust.solve_errors(small, solve), **trust.adjoint_errors(small, solve, solve_adjoint)}
    wrong = [name for name, (error, allowed) in errors.items() if not error <= allowed]
    return {"errors": errors, **({"error": f"wrong: {', '.join(wrong)}"} if wrong else {})}


def one_smoke(file: Path, scale: Scale, index: int) -> None:
    """What the process of a smoke test does: it writes its row, then compiles what others are going to time."""
    try:
        row = smoked(scale.smoke[index], scale.device)
    except Exception as error:
        row = {"error": short(error)}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(row))
    part.rename(file)
    # Longer ones have the kernels of the shortest.
    kinds = {(s.shape.dim, s.dtype, s.causal): s for s in reversed(scale.attention())}
    for setting in [*kinds.values(), *scale.short()][index :: len(scale.smoke)]:
        with contextlib.suppress(Exception):
            data = draw(setting, on=scale.device)
            training_step(data, functools.partial(by_kernel, data))()
            by_door(data)
    candidates = [(dim, tile) for dim, several in CANDIDATES.items() for tile in several]
    for dim, tile in [] if scale.dry else candidates[index :: len(scale.smoke)]:
        with contextlib.suppress(Exception):
            tile_rows(dim, (tile,), scale.device, length=1024, sets=16)


def tests(rows: Rows, folder: Path) -> None:
    """The tests marked gpu, in shards side by side; cases of the kernels that fail flag the rows of the kernels."""
    if any(row["part"] == "tests" for row in rows.written):
        return
    scale, began = rows.scale, time.perf_counter()
    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    from triton_cases import CASES  # type: ignore[import-not-found]

    # Layouts of the list of tiles, which the host makes, are tested in the interpreter alone.
    # Each case is compiled: those that a nightly run has beside these would take longer than the call.
    names = [name for name in CASES if not name.startswith("solve_mask_laid_out") and "_shape_pair_" not in name]
    shards = SHARDS
    if scale.dry:
        names, shards = ["solve_shape_value_1", "adjoint_shape_value_1"], 2
    files = [folder / f"cases_{shard}.json" for shard in range(shards)]
    processes = [
        subprocess.Popen(
            [sys.executable, "tests/kernels/triton_cases.py", str(file), scale.device, *names[shard::shards]],
            cwd=ROOT,
            env=of_kernels(scale),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for shard, file in enumerate(files)
    ]
    log = folder / "pytest.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider"]
    # torchdeq's strings have escapes of which newer Pythons warn when they compile them.
    command += ["-W", "ignore::SyntaxWarning"]
    with log.open("w") as told:
        others = subprocess.Popen([*command, *OTHER_TESTS[: 1 if scale.dry else None]], cwd=ROOT, stdout=told)
    limit = None if scale.dry else max(rows.left("tests"), 0.0)
    wait([*processes, others], limit)
    found = {}
    for file in files:
        if file.exists():
            found |= json.loads(file.read_text())
    row: Row = {
        "part": "tests",
        "name": "kernels",
        "passed": sum(not wrong for wrong in found.values()),
        "failed": {name: wrong[-700:] for name, wrong in found.items() if wrong},
        "not_reached": [name for name in names if name not in found],
        "wall_seconds": time.perf_counter() - began,
    }
    rows.add(row)
    print(f"tests: {row['passed']} passed, failed: {', '.join(row['failed']) or 'none'}", flush=True)
    summary = log.read_text().strip().splitlines()[-12:]
    code = others.returncode
    passed = code == 0 or (scale.dry and code == 5)
    rows.add({"part": "tests", "name": "others", "failed": {} if passed else {"pytest": "\n".join(summary)[-1500:]}})


def wait(processes: Iterable[subprocess.Popen[bytes]], limit: float | None) -> None:
    """Wait until all processes have ended, and end those that have not after so many seconds."""
    end = None if limit is None else time.perf_counter() + limit
    for process in processes:
        try:
            process.wait(None if end is None else max(end - time.perf_counter(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Attention.


def by_kernel(data: Data, queries: Tensor | None = None, keys: Tensor | None = None) -> Run:
    """The equilibria by the Triton kernels, in the precision of the keys."""
    s = data.setting
    queries, keys = data.queries if queries is None else queries, data.keys if keys is None else keys
    found = hopfield_solve(
        queries,
        keys,
        beta=s.beta,
        anchor=s.anchor,
        is_causal=s.causal,
        rtol=s.rtol,
        atol=ATOL,
        impl="triton",
    )
    return Run(found.state, found.num_evals, found.status)


def by_door(data: Data) -> Run:
    """The same by `equilibrium_attention`, with its read-out."""
    s, keys = data.setting, data.keys
    with torch.no_grad():
        _, solution = equilibrium_attention(
            data.queries,
            keys,
            keys,
            is_causal=s.causal,
            scale=s.beta,
            anchor=s.anchor,
            solver=Anderson(rtol=s.rtol, atol=ATOL),
            on_failure="ignore",
            return_solution=True,
        )
    return Run(solution.value, solution.num_evals, solution.status)


class Contest:
    """Contenders for one problem, whose evidence, times and ratios fill a row."""

    def __init__(self, data: Data, row: Row) -> None:
        self.data, self.row, self.device = data, row, data.setting.device
        self.functions: dict[str, Callable[[], Any]] = {}
        self.first: dict[str, float] = {}
        self.results: dict[str, Run] = {}
        row |= {**dataclasses.asdict(data.setting), "evidence": {}, "seconds": {}, "peak_bytes": {}}
        row.setdefault("ratios", {})

    def enter(self, name: str, make: Callable[[], Callable[[], Run]]) -> None:
        """Make and call a contender, and have it timed if it runs."""
        try:
            function = make()
            self.results[name], self.first[name] = once(function, self.device)
        except (RuntimeError, ValueError, ImportError) as error:
            self.row["evidence"][name] = {"error": short(error)}
        else:
            self.functions[name] = function

    def check(self, name: str) -> bool:
        """Check one head of an answer in float64; whether it is right, or the answer of a rival."""
        result = self.results.pop(name, None)
        if result is None:
            return False
        head, found = last_head(self.data), {"evaluations_mean": float(result.evaluations.double().mean())}
        self.row["evidence"][name] = found
        found |= evidence(head, result.state[-1:, -1:])
        if result.status is not None:
            found["status"] = statuses(result.status)
        if not name.startswith("ours"):
            return True
        if result.gradients is not None:
            most = None if self.data.setting.shape.length <= RIVALS_TO else CHECKED
            found["gradient_error"] = gradient_error(self.data, result.state, *result.gradients, most=most)
        right = found["converged"] >= CONVERGED
        right &= found.get("gradient_error", 0.0) <= GRADIENT_ERROR[self.data.setting.dtype]
        if not right:
            found["error"] = "not counted, the answer is wrong"
        return right

    def pay(self, name: str) -> None:
        """Measure the peak memory of one more call."""
        if name in self.functions:
            before = memory.begin(self.device)
            self.functions[name]()
            self.row["peak_bytes"][name] = memory.peak(self.device) - before

    def time(self, *names: str, seconds: float = SECONDS) -> dict[str, Timing]:
        """Time the contenders with these names that run, in turns."""
        functions = {name: self.functions[name] for name in names if name in self.functions}
        times = in_turns(functions, self.first, self.device, seconds)
        for name, timing in times.items():
            self.row["seconds"].setdefault(name, dataclasses.asdict(timing))
        return times


def attention(setting: Setting, row: Row, *, rivals: float) -> None:
    """A solve and its training step beside one explicit step, and beside rivals that take no longer than that."""
    data = draw(setting, on=setting.device)
    contest, no_counts = Contest(data, row), PicardCounts(0.0, 0, 0, 0.0)
    # On a card the explicit step that is written out is never the fastest, and needs the whole matrix of scores.
    kernels = [label for label in BACKENDS if label != "math" or setting.device == "cpu"]
    for label in kernels:
        contest.enter(f"sdpa_{label}", functools.partial(CONTENDERS[f"sdpa_{label}"].make, data, no_counts))
    contest.enter("ours", lambda: functools.partial(without_graph, data))
    contest.enter("ours_door", lambda: functools.partial(by_door, data))
    forward = contest.time(*contest.functions)
    best = fastest_sdpa(forward)
    row["best_sdpa"], ratios = best, row["ratios"]
    for name, label in (("ours", "forward"), ("ours_door", "equilibrium_attention")):
        ratios[label] = quotient(forward, name, best) if contest.check(name) else None
    for label in kernels:
        contest.enter(f"sdpa_training_{label}", functools.partial(explicit_step, data, BACKENDS[label]))
    contest.enter("ours_training", lambda: training_step(data, functools.partial(by_kernel, data)))
    steps = [name for name in contest.functions if "training" in name]
    training = contest.time(*steps)
    explicit = fastest_sdpa(training)
    row["best_sdpa_training"], peaks = explicit, row["peak_bytes"]
    for name in (explicit, "ours_training"):
        contest.pay(name)
    right = contest.check("ours_training")
    ratios["training"] = quotient(training, "ours_training", explicit) if right else None
    ratios["memory"] = peaks["ours_training"] / peaks[explicit] if right and peaks[explicit] else None
    if rivals and setting.shape.length <= RIVALS_TO:
        beside(contest, BACKENDS[best.removeprefix("sdpa_")], forward[best].median, rivals)


def fastest_sdpa(times: dict[str, Timing]) -> str:
    """The fastest of torch's kernels."""
    return min((name for name in times if name.startswith("sdpa")), key=lambda name: times[name].median)


def without_graph(data: Data) -> Run:
    with torch.no_grad():
        return by_kernel(data)


def explicit_step(data: Data, backend: str) -> Callable[[], Run]:
    """The training step of one explicit attention by a kernel of torch."""
    return by_backend(backend, training_step(data, lambda queries, keys: (sdpa(data, queries, keys), torch.ones(()))))


def by_backend(backend: str, run: Callable[[], Run]) -> Callable[[], Run]:
    """The call with one of torch's kernels for explicit attention."""

    def called() -> Run:
        with sdpa_kernel(SDPBackend.__members__[backend]):
            return run()

    return called


def beside(contest: Contest, backend: str, one: float, most: float) -> None:
    """torchdeq's solvers, its training steps and unrolled ones, unless they would take more than `most` seconds.

    backend: the fastest of torch's kernels, by which they all make their explicit steps, `one` second each.
    """
    # States of half precision do not get within the tolerance, and torchdeq's Anderson does not know them.
    data, ratios = contest.data, contest.row["ratios"]
    data = data._replace(queries=data.queries.float(), cotangent=data.cotangent.float())
    counts = picard_counts(data, CAP)
    contest.row["picard"] = counts._asdict()
    solvers = ("anderson", "fixed_point_iter")
    forwards, trainings = ([f"torchdeq_{way}{name}" for name in solvers] for way in ("", "training_"))
    forecasts = {**dict.fromkeys(forwards, 2.0), **dict.fromkeys(trainings, 8.0), "unrolled": 4.0}
    for name, steps in forecasts.items():
        seconds = steps * counts.most * one
        if seconds > most:
            contest.row["evidence"][name] = {"error": f"not timed, it takes about {seconds:.0f} s"}
            continue
        make: Callable[[], Callable[[], Run]] = functools.partial(unrolled, data, counts.most)
        if name != "unrolled":
            make = functools.partial(CONTENDERS[name].make, data, counts)
        contest.enter(name, lambda make=make: by_backend(backend, make()))  # type: ignore[misc]
        contest.check(name)
    contest.pay("unrolled")
    peaks, right = contest.row["peak_bytes"], ratios["training"] is not None
    unrolled_peak, ours_peak = peaks.get("unrolled"), peaks.get("ours_training")
    ratios["unrolled memory"] = unrolled_peak / ours_peak if right and unrolled_peak and ours_peak else None
    for label, ours, names in (
        ("torchdeq", "ours", forwards),
        ("torchdeq training", "ours_training", trainings),
        ("unrolled", "ours_training", ["unrolled"]),
    ):
        timed = contest.time(ours, *names, seconds=SECONDS / 3)
        ratios[label] = fastest(timed, ours) if ratios["forward" if ours == "ours" else "training"] else None


def quotient(times: dict[str, Timing], one: str, other: str) -> float | None:
    return times[one].median / times[other].median if one in times and other in times else None


def fastest(times: dict[str, Timing], ours: str) -> float | None:
    """The fastest of the others over ours."""
    rivals = [timing.median for name, timing in times.items() if name != ours]
    return min(rivals) / times[ours].median if rivals and ours in times else None


# One evaluation.


def evaluations(scale: Scale) -> Iterator[tuple[str, Callable[[Row], None]]]:
    for setting in scale.evaluations():
        yield title(setting), functools.partial(beside_torch, setting)


def beside_torch(setting: Setting, row: Row) -> None:
    """Mean and log-sum-exp of all queries, by our kernel and by torch's operations: seconds, and errors of both."""
    begun(row, "torch / ours", setting)
    # States are float32, as a solve has them; torch's operations take them in the precision of the keys.
    data = draw(dataclasses.replace(setting, dtype="float32"), on=setting.device)
    data = data._replace(setting=setting, keys=data.keys.to(getattr(torch, setting.dtype)))
    functions: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"ours": evaluation(data, data.queries)}
    for name, (operation, *more) in TORCHS[torch.device(setting.device).type].items():
        functions[name] = functools.partial(by_operation, operation, more, data)
    first = {}
    for name, function in list(functions.items()):
        try:
            _, first[name] = once(function, setting.device)
        except (RuntimeError, AttributeError) as error:
            row["evidence"][name] = {"error": short(error)}
            del functions[name]
    times = in_turns(functions, first, setting.device)
    row["seconds"] = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    z, keys = (t[-1, -1].double() for t in (data.queries, data.keys))
    scores = setting.beta * z @ keys.mT
    mean, logsumexp = scores.softmax(-1) @ keys, scores.logsumexp(-1)
    for name, function in functions.items():
        found, level = (t[-1, -1].double() for t in function())
        row["evidence"][name] = {
            "mean_error": float(((found - mean).norm(dim=-1) / mean.norm(dim=-1)).max()),
            # Some of torch's are padded.
            "logsumexp_error": float((level.flatten()[: len(logsumexp)] - logsumexp).abs().max()),
        }
    row["ratios"]["torch / ours"] = fastest(times, "ours")


def by_operation(operation: str, more: list[object], data: Data) -> tuple[Tensor, Tensor]:
    """The same by an operation of torch, which takes `more` behind the values."""
    z, keys = data.queries.to(data.keys.dtype), data.keys
    mean, logsumexp, *_ = getattr(torch.ops.aten, operation)(z, keys, keys, *more, scale=data.setting.beta)
    return mean, logsumexp


# The targets of a card.


def targets(scale: Scale) -> Iterator[tuple[str, Callable[[Row], None]]]:
    dims = (64, 128)[: 1 if scale.dry else None]
    sharpnesses = (2.0,) if scale.dry else (1.0, 2.0, 4.0, 8.0)
    for dim in dims:
        yield f"G1, D {dim}", functools.partial(per_evaluation, scale.target(dim))
        yield f"G3, D {dim}", functools.partial(per_product, scale.target(dim))
        yield f"G4, D {dim}", functools.partial(step, scale.target(dim))
        for sharpness in sharpnesses:
            setting = scale.target(dim, sharpness=sharpness, anchor=0.0)
            yield f"G2, D {dim}, beta*sqrt(D) {sharpness:g}", functools.partial(solved, setting)
    lengths = (32, 64) if scale.dry else LENGTHS
    yield "G5", functools.partial(longest, scale, lengths)
    yield "G6", functools.partial(waits, scale.target(64))


def as_problem(data: Data) -> Attention:
    """The problem as the kernels take it."""
    s = data.setting
    return Attention(data.queries, data.keys, s.beta, s.anchor, first=0 if s.causal else None)


def over_keys(data: Data, kind: str, state: Tensor, *given: Tensor) -> Callable[[], None]:
    """One launch of a kernel over the keys for all queries: "evaluate" or "product", of the state and `given`:

    mean and log-sum-exp, and for a product the vector, and where it is written.
    """
    from implicit_attention.kernels.triton.adjoint import Directions
    from implicit_attention.kernels.triton.attend import OverKeys
    from implicit_attention.kernels.triton.layout import InMemory, Left

    problem = as_problem(data)
    kernel = OverKeys(InMemory.of(problem), kind)
    left = Left(problem, torch.empty(state.shape[:-1], dtype=torch.int8, device=state.device), kernel.chosen)
    names = "state", "mean", "logsumexp", "search", "spread"
    queries = dict.fromkeys(Directions._fields, state) | dict(zip(names, (state, *given), strict=False))
    return functools.partial(kernel, left, Directions(**queries))


def evaluation(data: Data, state: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """The means and log-sum-exps of the states by our kernel, the latter from the second call on by those before."""
    mean, logsumexp = torch.empty_like(state), state.new_full(state.shape[:-1], torch.nan)
    launched = over_keys(data, "evaluate", state, mean, logsumexp)

    def called() -> tuple[Tensor, Tensor]:
        launched()
        return mean, logsumexp

    return called


def solved_by_triton(data: Data, initial: Tensor, rule: FusedRule) -> Any:
    return solve_by_kernel(as_problem(data), initial, rule, "triton")


def fused(data: Data, rtol: float, max_steps: int) -> Any:
    """A solve as the kernel alone makes it; with rtol 0 exactly `max_steps` steps."""
    rule = FusedRule(rtol, 0.0, max_steps, PLAIN_STEPS)
    return solved_by_triton(data, data.queries.float(), rule)


def rotation(setting: Setting) -> list[Data]:
    """Copies of a problem that differ in their numbers and together are too large for the cache of the card."""
    copies = 2
    if torch.device(setting.device).type == "cuda":
        s, cache = setting.shape, torch.cuda.get_device_properties(setting.device).L2_cache_size
        copies = 1 + math.ceil(2 * cache / (4 * s.batch * s.heads * s.length * s.dim))
    return [draw(dataclasses.replace(setting, seed=seed), on=setting.device) for seed in range(copies)]


def against_sdpa(copies: list[Data], functions: dict[str, Callable[[Data], Any]], row: Row) -> dict[str, Timing]:
    """Times of functions and of torch's kernels on one copy after the other; the fastest of torch's is `sdpa`."""
    data = copies[0]
    called: dict[str, Callable[[], Any]] = {name: rotated(copies, function) for name, function in functions.items()}
    first = {name: once(function, data.setting.device)[1] for name, function in called.items()}
    for label in BACKENDS:
        made = [CONTENDERS[f"sdpa_{label}"].make(copy, PicardCounts(0.0, 0, 0, 0.0)) for copy in copies]
        turns = rotated(made, lambda function: function())
        with contextlib.suppress(RuntimeError):
            first[f"sdpa_{label}"] = once(turns, data.setting.device)[1]
            called[f"sdpa_{label}"] = turns
    times = in_turns(called, first, data.setting.device)
    row["seconds"] = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    row["best_sdpa"] = fastest_sdpa(times)
    return {**times, "sdpa": times[row["best_sdpa"]]}


def rotated(copies: list[Any], function: Callable[[Any], Any]) -> Callable[[], Any]:
    """The function on one copy after the other."""
    turns = itertools.cycle(copies)
    return lambda: function(next(turns))


def begun(row: Row, ratio: str, setting: Any) -> None:
    """A row of a target, which is missed until its ratio has a number."""
    row |= {**dataclasses.asdict(setting), "evidence": {}, "seconds": {}, "ratios": {ratio: None}}


def per_evaluation(setting: Setting, row: Row) -> None:
    """G1: one evaluation and the step behind it, from a fixed budget, in forwards of SDPA; the evaluation alone."""
    begun(row, "G1", setting)
    copies = rotation(setting)
    found = fused(copies[0], 0.0, BUDGET)
    launches = {id(data): evaluation(data, data.queries.float()) for data in copies}
    functions = {"fused": lambda data: fused(data, 0.0, BUDGET), "evaluate": lambda data: launches[id(data)]()}
    times = against_sdpa(copies, functions, row)
    evaluations = float(found.num_evals.double().mean())
    row["evidence"]["fused"] = evidence(last_head(copies[0]), found.state[-1:, -1:])
    row["evidence"]["fused"]["evaluations_mean"] = evaluations
    row["ratios"]["G1"] = times["fused"].median / evaluations / times["sdpa"].median
    row["ratios"]["G1 alone"] = quotient(times, "evaluate", "sdpa")


def solved(setting: Setting, row: Row) -> None:
    """G2: a solve in forwards of SDPA."""
    begun(row, "G2", setting)
    copies = rotation(setting)
    found = fused(copies[0], setting.rtol, 100)
    times = against_sdpa(copies, {"fused": lambda data: fused(data, setting.rtol, 100)}, row)
    checked = evidence(last_head(copies[0]), found.state[-1:, -1:])
    row["evidence"]["fused"] = {**checked, "evaluations_mean": float(found.num_evals.double().mean())}
    if checked["converged"] >= CONVERGED:
        row["ratios"]["G2"] = times["fused"].median / times["sdpa"].median


def per_product(setting: Setting, row: Row) -> None:
    """G3: one product and the step behind it in forwards of SDPA, from what more of them take; the product alone."""
    from implicit_attention.kernels.triton.adjoint import COARSE_RTOL, solve_adjoint

    begun(row, "G3", setting)
    copies = rotation(setting)
    states = {id(data): fused(data, setting.rtol, 100).state for data in copies}
    there = {id(data): solved_by_triton(data, states[id(data)], THERE) for data in copies}

    # To a finer tolerance all products would be fine ones.
    coarse = 0.0 if setting.dtype == "float32" else COARSE_RTOL

    def products(data: Data, most: int, rtol: float = coarse) -> Any:
        at, g, rule = there[id(data)], data.cotangent.float(), AdjointRule(rtol, most)
        return solve_adjoint(as_problem(data), states[id(data)], g, at.mean, at.logsumexp, rule)

    few, many = (functools.partial(products, most=most) for most in PRODUCTS)
    made = [float(function(copies[0]).num_steps.double().mean()) for function in (few, many)]
    launches = {}
    for data in copies:
        at, g = there[id(data)], data.cotangent.float()
        given = states[id(data)], at.mean, at.logsumexp, g, torch.empty_like(g)
        launches[id(data)] = over_keys(data, "product", *given)
    times = against_sdpa(copies, {"few": few, "many": many, "product": lambda data: launches[id(data)]()}, row)
    head = (-1, -1)
    z, keys, g = (t[head].double() for t in (states[id(copies[0])], copies[0].keys, copies[0].cotangent))
    exact, _ = exact_adjoint(setting, z, keys, g)
    found = products(copies[0], CAP, RTOL[copies[0].keys.dtype]).value[head].double()
    error = float((found - exact).norm() / exact.norm())
    row["evidence"]["fused"] = {"products": made, "gradient_error": error}
    if error <= GRADIENT_ERROR[setting.dtype]:
        seconds = (times["many"].median - times["few"].median) / (made[1] - made[0])
        row["ratios"] |= {"G3": seconds / times["sdpa"].median, "G3 alone": quotient(times, "product", "sdpa")}


def step(setting: Setting, row: Row) -> None:
    """G4: a training step over that of one explicit step."""
    begun(row, "G4", setting)
    attention(setting, row, rivals=0.0)
    row["ratios"]["G4"] = row["ratios"]["training"]


def longest(scale: Scale, lengths: Iterable[int], row: Row) -> None:
    """G5: training steps at doubled lengths until one does not fit, and the exponent of their memory."""
    points: list[dict[str, float]] = []
    ratios: dict[str, float | None] = {"G5": None, "G5 exponent": None}
    row |= {"device": scale.device, "ratios": ratios, "points": points}
    for length in lengths:
        data = draw(scale.setting(16 if scale.dry else 64, length, 1, "bfloat16"), on=scale.device)
        run = training_step(data, functools.partial(by_kernel, data))
        try:
            before = memory.begin(scale.device)
            result, seconds = once(run, scale.device)
        except torch.OutOfMemoryError:
            break
        peak = memory.peak(scale.device) - before
        checked = evidence(last_head(data), result.state[-1:, -1:])
        if checked["converged"] < CONVERGED:
            row["error"] = f"not counted, the answer is wrong at {length}"
            break
        points.append({"length": length, "peak_bytes": peak, "seconds": seconds, **checked})
        ratios["G5"] = float(length)
        del data, run, result
        if scale.device == "cuda":
            torch.cuda.empty_cache()
    fitted = [point for point in points if point["length"] >= FIT_LENGTH]
    if len(fitted) > 1:
        growth = math.log(fitted[-1]["peak_bytes"] / fitted[0]["peak_bytes"])
        ratios["G5 exponent"] = growth / math.log(fitted[-1]["length"] / fitted[0]["length"])


def waits(setting: Setting, row: Row) -> None:
    """G6: how often the host waits for the card in one solve by the kernel."""
    begun(row, "G6", setting)
    data = draw(setting, on=setting.device)
    found = fused(data, setting.rtol, 100)
    row["evidence"] = {"fused": evidence(last_head(data), found.state[-1:, -1:])}
    if torch.device(setting.device).type == "cuda":
        row["ratios"]["G6"] = float(synchronisations(lambda: fused(data, setting.rtol, 100)))


def synchronisations(function: Callable[[], Any]) -> int:
    """Count how often torch waits for the device in a call that is not the first."""
    function()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Turning the mode on warns, too.
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


# A block.


def blocks(scale: Scale) -> Iterator[tuple[str, Callable[[Row], None]]]:
    yield "forward", functools.partial(block, scale.block, training=False)
    yield "training", functools.partial(block, scale.block, training=True)


def block(setting: EquilibriumSetting, row: Row, *, training: bool) -> None:
    """A block as a fixed point by our solvers and torchdeq's at one tolerance, beside its bare loop."""
    data, rtol = block_equilibrium.draw(setting), setting.rtol
    label = "training" if training else "forward"
    begun(row, f"{OURS[0]} {label} / bare", setting)
    functions: dict[str, Callable[[], Any]] = {}
    for name, (forward, run) in block_contenders(data, rtol).items():
        try:
            found = block_equilibrium.measured(data, run) if training else looked_at(data, forward)
        except (RuntimeError, ValueError, ImportError) as error:
            row["evidence"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        row["evidence"][name] = found
        if name in OURS:
            if max(found["state_residual"], found.get("adjoint_residual", 0.0)) > rtol:
                found["error"] = "not timed, the measured residuals are above the tolerance"
                continue
            functions[f"bare, {name}"] = block_equilibrium.bare(data, found["evaluations"], found.get("products", 0))
        functions[name] = run if training else functools.partial(forward, data.block)
    first = {name: once(function, setting.device)[1] for name, function in functions.items()}
    times = in_turns(functions, first, setting.device, 4 * SECONDS)
    row["seconds"] = {name: dataclasses.asdict(timing) for name, timing in times.items()}
    for name in OURS:
        row["ratios"][f"{name} {label} / bare"] = quotient(times, name, f"bare, {name}")
    ours, rivals = ([t.median for name, t in times.items() if name in names] for names in (OURS, DEQS))
    row["ratios"][f"torchdeq {label} / ours"] = min(rivals) / min(ours) if ours and rivals else None


def block_contenders(
    data: block_equilibrium.Data, rtol: float
) -> dict[str, tuple[Callable[[torch.nn.Module], Tensor], Callable[..., Tensor]]]:
    """Of each contender the state of a block without a graph, and its training step."""
    solvers: dict[str, Any] = {"picard": Picard(rtol=rtol), "anderson": Anderson(history=HISTORY, rtol=rtol)}
    made: dict[str, Any] = {}
    for name, solver in solvers.items():
        layers: dict[torch.nn.Module, Equilibrium] = {}

        def forward(block: torch.nn.Module, solver: Any = solver, layers: Any = layers) -> Tensor:
            if block not in layers:
                layers[block] = Equilibrium(block, solver=solver, on_failure="ignore")
            with torch.no_grad():
                state: Tensor = layers[block](data.x)
                return state

        made[name] = forward, block_equilibrium.ours(data, rtol=rtol, plain=name == "picard")
    for name in block_equilibrium.RIVALS:
        try:
            deq = block_equilibrium.torchdeq_state(data, name, forward=rtol, backward=rtol)
        except ImportError:
            continue
        made[f"torchdeq {name}"] = (
            torch.no_grad()(deq),
            block_equilibrium.torchdeq(data, name, forward=rtol, backward=rtol),
        )
    return made


def looked_at(data: block_equilibrium.Data, forward: Callable[[torch.nn.Module], Tensor]) -> Row:
    """Evaluations of a solve without a graph, and the largest relative residual of its states."""
    counted = block_equilibrium.Counted(data)
    # Once before: a layer looks at what a new block reads.
    forward(counted)
    counted.counts["evaluations"] = 0
    state = forward(counted)
    with torch.no_grad():
        residual = block_equilibrium.relative_residual(data, state)
    return {"evaluations": counted.counts["evaluations"], "state_residual": residual}


# Tiles.


def tiles(scale: Scale) -> Iterator[tuple[str, Callable[[Row], None]]]:
    for dim, candidates in list(CANDIDATES.items())[: 1 if scale.dry else None]:
        yield f"evaluate, D {dim}", functools.partial(try_tiles, dim, candidates[: 1 if scale.dry else None], scale)


def try_tiles(dim: int, candidates: tuple[Tiles, ...], scale: Scale, row: Row) -> None:
    """Evaluations by the tiles in use and by others: seconds of a budget, which is checked before it is timed."""
    sizes = {"length": 20, "sets": 1} if scale.dry else {"length": 4096, "sets": 64}
    row |= {"dim": dim, "tiles": tile_rows(dim, candidates, scale.device, **sizes)}


def tile_rows(dim: int, candidates: Iterable[Tiles], device: str, *, length: int, sets: int) -> list[Row]:
    """The tiles in use and the candidates: seconds, or why the kernel with them cannot be trusted."""
    data = draw(Setting("gaussian", 2.0, 0.5, Shape(1, sets, length, dim), dtype="bfloat16", device=device), on=device)
    functions: dict[str, Callable[[], Any]] = {}
    first, refused = {}, {}
    for tile in dict.fromkeys((layout.TILES["evaluate", True][dim], *candidates)):
        name = ", ".join(map(str, tile))
        function = functools.partial(with_tiles, dim, tile, functools.partial(fused, data, 0.0, BUDGET))
        try:
            _, first[name] = once(function, device)
            functions[name] = function
        except UnsupportedImplementation as error:
            refused[name] = str(error)
    times = in_turns(functions, first, device)
    return [
        *({"tiles": name, "seconds": timing.median, "refused": ""} for name, timing in times.items()),
        *({"tiles": name, "seconds": None, "refused": reason} for name, reason in refused.items()),
    ]


def with_tiles(dim: int, tile: Tiles, run: Callable[[], Any]) -> Any:
    """What a call gives while evaluations have these tiles for heads of this dimension."""
    table = layout.TILES["evaluate", True]
    before, table[dim] = table[dim], tile
    try:
        return run()
    finally:
        table[dim] = before


def run(out: Path, scale: Scale) -> None:
    """Measure all parts that OUT has no rows of."""
    rows = Rows(out, scale)
    rows.skip("ceilings", rows.measure("ceilings", ceilings(scale)))
    with tempfile.TemporaryDirectory() as folder:
        smoke = SmokeTests(rows, Path(folder))
        smoke.collect("smoke")
        try:
            tests(rows, Path(folder))
        except Exception as error:
            rows.add({"part": "tests", "name": "kernels", "passed": 0, "failed": {}, "error": short(error)})
        smoke.collect("tests")
        smoke.end()
    main_table = [
        (title(s), functools.partial(attention, s, rivals=math.inf if scale.dry else RIVAL))
        for s in (*scale.short(), *scale.attention())
    ]
    rows.measure("attention", main_table)
    parts = {"evaluation": evaluations, "targets": targets, "block": blocks, "tiles": tiles}
    for part, jobs in parts.items():
        rows.skip(part, rows.measure(part, jobs(scale)))
    rows.skip("attention", rows.measure("attention", main_table, until=END))


def title(setting: Setting) -> str:
    shape, causal = setting.shape, ", causal" if setting.causal else ""
    keys = "" if shape.num_keys is None else f", M {shape.num_keys}"
    return f"N {shape.length}{keys}, D {shape.dim}, {setting.dtype}{causal}"


def main(
    out: Annotated[Path, typer.Argument(help="Folder of rows.jsonl.")],
    dry: Annotated[bool, typer.Option("--dry", help="The smallest sizes, on a CPU, by Triton's interpreter.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Only print the tables of the rows that are there.")] = False,
    smoke_index: Annotated[int, typer.Option("--smoke", hidden=True)] = -1,
) -> None:
    """Measure a card; `bash benchmarks/gpu.sh OUT` calls this until all is done."""
    scale = Scale(dry)
    if dry:
        # Triton looks at it when it is imported, which the library does at the first call.
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    if smoke_index >= 0:
        one_smoke(out, scale, smoke_index)
        return
    if not show:
        if not dry and not torch.cuda.is_available():
            raise typer.BadParameter("torch finds no CUDA device; try --dry", param_hint="OUT")
        run(out, scale)
    card_tables.show(out / "rows.jsonl")


if __name__ == "__main__":
    typer.run(main)

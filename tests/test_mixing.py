"""Blocks that mix samples, drawn at random: what is said to have converged is a fixed point of the whole batch.

A case is a block, a layer or a `FixedPointMap` of it, and some calls. After each call the block is evaluated here, on
the whole batch at the returned state, in the mode of that call. Blocks that leave samples alone are drawn as well: for
those finished samples must leave the work.
"""

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from implicit_attention import (
    Anderson,
    Equilibrium,
    FixedPointMap,
    Implicit,
    PerSample,
    Phantom,
    Picard,
    Shared,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.linear import GMRES
from implicit_attention.solvers import Broyden

#: Plain steps that are the truth: every joint map contracts by about .9 at most.
STEPS, CONTRACTION = 400, 0.9
MAX_STEPS = 500
TIGHT = Picard(rtol=1e-9, atol=0.0, max_steps=MAX_STEPS)
#: The first seeds, which are drawn again in every run; another start draws other cases.
FIRST = int(os.environ.get("MIXING_SEED", "0"))
#: How many failures are shown of a kind.
SHOWN = 60


class Draw:
    """Numbers drawn by a seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low, high):
        return low + (high - low) * float(torch.rand((), generator=self.generator))

    def numbers(self, low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def integer(self, low, high):
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def integers(self, low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def often(self, share):
        return self.number(0, 1) < share

    def of(self, *choices):
        return choices[self.integer(0, len(choices) - 1)]

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def order(self, count):
        return torch.randperm(count, generator=self.generator)

    def weight(self, size):
        """(size, size), such that z @ weight is no longer than z in its largest entry."""
        weight = self.normal(size, size)
        return nn.Parameter(weight / weight.abs().sum(0, keepdim=True).amax())

    def symmetric(self, size):
        """(size, size), symmetric, with eigenvalues from .2 to 1, and one of 1."""
        turn = torch.linalg.qr(self.normal(size, size)).Q
        values = self.numbers(0.2, 1, size)
        values[0] = 1
        return nn.Parameter(turn * values @ turn.mT)

    def slopes(self, count):
        """Slopes (count,) of samples that finish at very different steps."""
        kind = self.of("uniform", "few", "two")
        if kind == "uniform":
            return self.numbers(0.05, CONTRACTION, count)
        hard = self.numbers(0, 1, count) < (0.25 if kind == "few" else 0.5)
        return self.numbers(0.05, 0.2, count).where(~hard, self.numbers(0.5, CONTRACTION, count))


@dataclasses.dataclass
class Call:
    """One call: x and further arguments, and what is done to the layer before it."""

    x: torch.Tensor
    args: tuple[Any, ...] = ()
    before: Callable[[Any], object] | None = None

    def to(self, dtype):
        args = [changed(t, lambda t: t.to(dtype) if t.is_floating_point() else t) for t in self.args]
        return dataclasses.replace(self, x=self.x.to(dtype), args=tuple(args))


@dataclasses.dataclass
class Case:
    """A block, how it is solved, and the calls."""

    kind: str
    seed: int
    block: nn.Module
    calls: list[Call]
    solver: Any = None
    #: Whether by `solve` and `FixedPointMap`, in place of a layer.
    by_map: bool = False
    causal: bool = False
    #: Places of arguments that are not wrapped in `PerSample` for `FixedPointMap`.
    plain: tuple[int, ...] = ()
    #: How often the strength of mixing was lowered until plain steps settled.
    softened: int = 0

    def __post_init__(self):
        self.layer = Equilibrium(self.block, causal=self.causal, on_failure="ignore")

    def __str__(self):
        how, dtype = "map" if self.by_map else "layer", f"{self.calls[0].x.dtype}".removeprefix("torch.")
        solver = f"{type(self.solver).__name__} to {self.solver.rtol:.1e}"
        return f"{self.kind} seed {self.seed} ({how}, {dtype}, {solver})"

    def begin(self, call):
        if call.before is not None:
            call.before(self.layer)

    def run(self, call, adjoint=None):
        """The state and its evidence."""
        if self.by_map:
            inputs = [t if i in self.plain else PerSample(bare(t)) for i, t in enumerate((call.x, *call.args))]
            problem = FixedPointMap(self.block, *inputs, event_ndim=call.x.ndim - 1)
            start = torch.zeros_like(call.x)
            found = solve(problem, start, solver=self.solver, adjoint=adjoint, on_failure="ignore")
            return found.value, found
        value = self.layer(call.x, *call.args, solver=self.solver, adjoint=adjoint)
        return value, self.layer.last_solve

    def truth(self, call):
        """f of the whole batch in the present mode; statistics are kept by a copy of the block that shares weights."""
        block = copy.deepcopy(self.block, {id(p): p for p in self.block.parameters()})
        args = tuple(map(bare, call.args))
        return lambda z: block(z, call.x, *args)

    def norm(self, z):
        """Of samples, or of the tokens of a causal block."""
        return torch.linalg.vector_norm(z.detach().double().flatten(2 if self.causal else 1), dim=-1)


def bare(argument):
    return argument.value if isinstance(argument, PerSample | Shared) else argument


def changed(argument, change):
    """The argument with other tensors."""
    if isinstance(argument, PerSample | Shared):
        return type(argument)(changed(argument.value, change))
    if isinstance(argument, dict):
        return {key: changed(value, change) for key, value in argument.items()}
    return change(argument)


def plain_steps(f, z, steps=STEPS, damping=0.0):
    for _ in range(steps):
        mapped = f(z)
        z = mapped + damping * (z - mapped) if damping else mapped
    return z


@torch.no_grad()
def settles(case, call):
    """Whether plain steps of the whole batch reach the fixed point."""
    f, z = case.truth(call), torch.zeros_like(call.x)
    for _ in range(STEPS):
        z, before = f(z), z
        if (z - before).abs().max() <= 1e-14:
            return True
    return bool((f(z) - z).abs().max() <= 1e-13)


# Blocks that mix samples.


class Graphs(nn.Module):
    """Nodes read the sum over their graph."""

    def __init__(self, draw, size, count):
        super().__init__()
        self.weight, self.count = draw.weight(size), count

    def forward(self, z, x, ids, own, mix):
        total = z.new_zeros(self.count, z.shape[-1]).index_add(0, ids, z @ self.weight)
        return torch.tanh(x + own * z + mix * total[ids])


class Mean(nn.Module):
    """Samples read a weighted sum over the batch."""

    def __init__(self, draw, size):
        super().__init__()
        self.weight = draw.weight(size)

    def forward(self, z, x, own, mix, share):
        shape = (-1, *(1,) * (z.ndim - 1))
        own, mix, share = (t.view(shape) for t in (own, mix, share))
        return torch.tanh(x + own * z + mix * (share * (z @ self.weight)).sum(0))


class Sorted(nn.Module):
    """Samples read the states in order of size, entry by entry: the one of their number, the median or the largest."""

    def __init__(self, draw, size):
        super().__init__()
        self.weight, self.what = draw.weight(size), draw.of("all", "median", "largest")

    def forward(self, z, x, own, mix):
        ranked = (z @ self.weight).sort(0).values
        read = {"all": ranked, "median": ranked[len(z) // 2], "largest": ranked[-1]}[self.what]
        return torch.tanh(x + own * z + mix * read)


class BetweenSamples(nn.Module):
    """Attention between samples, whose scores depend on the inputs, and a little on the states."""

    def __init__(self, draw, size):
        super().__init__()
        self.weight, self.query = draw.weight(size), nn.Parameter(draw.normal(size, size) / size)
        self.sharp, self.moved = draw.number(0.5, 6), draw.of(0.0, 0.05)

    def forward(self, z, x, own, mix):
        key = x + self.moved * z
        weights = torch.softmax(self.sharp * (x @ self.query) @ key.mT, -1)
        return torch.tanh(x + own * z + mix * (weights @ (z @ self.weight)))


class Normed(nn.Module):
    """Batch normalisation, once or twice, of rows (B, D) or of tokens (B, D, N)."""

    def __init__(self, draw, size):
        super().__init__()
        count = draw.of(1, 1, 2)
        self.norms = nn.ModuleList(nn.BatchNorm1d(size, dtype=torch.float64) for _ in range(count))
        for norm in self.norms:
            norm.running_mean.copy_(0.3 * draw.normal(size))
            norm.running_var.copy_(draw.numbers(0.5, 1.5, size))

    def forward(self, z, x, own, mix):
        shape = (-1, *(1,) * (z.ndim - 1))
        own, mix = own.view(shape), mix.view(shape)
        h = x + own * z
        for norm in self.norms:
            h = h + mix * norm(z) / len(self.norms)
        return torch.tanh(h)


class Table(nn.Module):
    """Samples read rows of a table, which has as many rows as there are samples, by their codes."""

    def __init__(self, draw, matrices):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(draw.number(0.5, 1), dtype=torch.float64))
        self.matrices = matrices

    def forward(self, z, x, table, codes, own, mix):
        table = table["rows"] if isinstance(table, dict) else table
        read = self.scale * table[codes]
        read = torch.einsum("bd,bde->be", z, read) if self.matrices else read
        return torch.tanh(x + own * z + mix * read)


class WithPast(nn.Module):
    """A causal block that reads settled tokens by `past`, and the mean over the batch. x (B, N, D) holds its slopes."""

    def __init__(self, draw, size, reads):
        super().__init__()
        self.query, self.key = (nn.Parameter(draw.normal(size, size) / size) for _ in range(2))
        self.weight, self.gain = draw.weight(size), draw.number(1, 3)
        self.parts, self.reads = draw.number(0.2, 0.6), reads

    def forward(self, z, x, past=None):
        slope = CONTRACTION * torch.sigmoid(self.gain * x[..., :1])
        query, key, value = (t.unsqueeze(-3) for t in (x @ self.query, x @ self.key, z @ self.weight))
        how = {"is_causal": True}
        if past is not None:
            key, value = past.update(key, value)
            how = {"attn_mask": past.mask, "is_causal": past.is_causal}
        h = F.scaled_dot_product_attention(query, key, value, **how).squeeze(-3)
        h = self.parts * h + (1 - self.parts) * (z.mean(0, keepdim=True) if self.reads else z)
        return torch.tanh(x + slope * h)


# Cases.


def drawn_solver(draw, dtype, causal):
    low = -9 if dtype == torch.float64 else -6
    options = {"rtol": 10 ** draw.number(low, -3), "atol": draw.of(0.0, 1e-10, 1e-8), "max_steps": MAX_STEPS}
    match draw.of(*("picard", "picard", "anderson", "history"), *(() if causal else ("damped", "broyden"))):
        case "picard":
            return Picard(**options)
        case "damped":
            return Picard(damping=draw.number(0, 0.4), **options)
        case "anderson":
            return Anderson(**options)
        case "history":
            return Anderson(history=draw.integer(1, 3), **options)
        case _:
            return Broyden(**options)


def sizes(draw, small):
    """Samples and entries; never as many of these, where the shape of an argument says nothing."""
    size = draw.integer(2, 4 if small else 8)
    return draw.integer(size + 1, 10) if small else draw.integer(max(6, size + 1), 32), size


def parts(draw, slopes):
    """Slopes (count, 1) by which samples read themselves and others, together `slopes`."""
    share = draw.numbers(0.3, 1, len(slopes))
    return ((1 - share) * slopes)[:, None], (share * slopes)[:, None]


def graphs(draw, small):
    count, size = sizes(draw, small)
    number = draw.integer(2, max(2, count // 3))
    block = Graphs(draw, size, number)
    calls = []
    for _ in range(draw.integer(1, 2)):
        ids = draw.integers(0, number - 1, count)
        slopes = draw.slopes(count)
        if draw.often(0.85):
            # Graphs with a third of the nodes, and more, finish first; later the nodes of one graph one by one.
            order = draw.order(number)
            easy = order[(torch.bincount(ids, minlength=number)[order].cumsum(0) - 1) * 3 < 2 * count]
            easy = torch.isin(ids, easy[: max(1, number - 1)])
            slow = draw.numbers(0.1, 0.4, count).where(draw.numbers(0, 1, count) < 0.6, draw.numbers(0.7, 0.9, count))
            slopes = draw.numbers(0.02, 0.08, count).where(easy, slow)
        own, mix = parts(draw, slopes)
        mix = mix / torch.bincount(ids, minlength=number)[ids][:, None]
        x = draw.number(0.2, 1) * draw.normal(count, size)
        # Nodes may read their graph with any sign.
        calls.append(Call(x, (ids, own, mix * x.sign() if draw.often(0.5) else mix)))
    return Case("graphs", 0, block, calls)


def means(draw, small):
    count, size = sizes(draw, small)
    event = (draw.integer(2, 4), size) if draw.often(0.3) and count > 4 else (size,)
    calls = []
    for _ in range(draw.integer(1, 2)):
        slopes = draw.slopes(count)
        share = draw.numbers(0, 1, count)
        if draw.often(0.5):
            # Nobody reads the samples that finish first.
            share = share.where(slopes > slopes.median(), torch.zeros(()))
        own, mix = parts(draw, slopes)
        x = draw.number(0.2, 1) * draw.normal(count, *event)
        calls.append(Call(x, (own, mix, share[:, None] / share.sum().clamp_min(1e-3))))
    return Case("means", 0, Mean(draw, size), calls)


def sortings(draw, small):
    count, size = sizes(draw, small)
    calls = []
    for _ in range(draw.integer(1, 2)):
        x = draw.number(0.2, 1) * draw.normal(count, size)
        calls.append(Call(x, parts(draw, draw.slopes(count))))
    return Case("sorting", 0, Sorted(draw, size), calls)


def attentions(draw, small):
    count, size = sizes(draw, small)
    calls = []
    for _ in range(draw.integer(1, 2)):
        x = draw.number(0.2, 1) * draw.normal(count, size)
        calls.append(Call(x, parts(draw, draw.slopes(count))))
    return Case("attention", 0, BetweenSamples(draw, size), calls)


def freeze(layer):
    layer.train()
    for norm in layer.block.norms:
        norm.eval()


def freeze_first(layer):
    layer.train()
    layer.block.norms[0].eval()


def freeze_last(layer):
    layer.train()
    layer.block.norms[-1].eval()


def evaluate(layer):
    layer.eval()


def train(layer):
    layer.train()


def train_norms(layer):
    layer.eval()
    for norm in layer.block.norms:
        norm.train()


#: Modes of the calls of one layer.
MODES = (
    (freeze, train),
    (freeze, freeze, train),
    (train, freeze),
    (train, evaluate, train),
    (freeze, freeze_first, freeze_last),
    (evaluate, train_norms),
    (evaluate, freeze, train, train_norms),
)


def normalisations(draw, small):
    count, size = sizes(draw, small)
    count, calls = max(count, 4), []
    event = (size, draw.integer(2, 4)) if draw.often(0.3) else (size,)
    for before in draw.of(*MODES):
        own, mix = parts(draw, draw.slopes(count))
        x = draw.number(0.5, 1.5) * draw.normal(count, *event)
        calls.append(Call(x, (own, 0.5 * mix), before))
    return Case("norms", 0, Normed(draw, size), calls)


def tables(draw, small):
    count, size = sizes(draw, small)
    matrices, code = draw.often(0.5), draw.of(0, 0, 1, 2)
    wrap = draw.of(*[lambda t: t] * 4, PerSample, Shared, lambda t: {"rows": t})
    names = draw.of(("one", "any"), ("one", "last"), ("own", "any"), ("one", "own", "any"), ("any", "any"))
    calls = []
    for name in names:
        slopes = draw.slopes(count)
        if name in ("one", "own"):
            # The first samples stay longest: for these codes a part of the table does as well as all of it.
            slopes = slopes.sort(descending=True).values
        codes = {
            "one": torch.full((count,), code),
            "own": torch.arange(count),
            "last": torch.full((count,), count - 1),
            "any": draw.integers(0, count - 1, count),
        }[name]
        table = draw.normal(count, size, size) if matrices else draw.normal(count, size)
        if matrices:
            table = table / table.abs().sum(1).amax(-1)[:, None, None]
        own, mix = parts(draw, slopes)
        calls.append(Call(0.5 * draw.normal(count, size), (wrap(table), codes, own, mix)))
    return Case("tables", 0, Table(draw, matrices), calls, plain=(1,) if draw.often(0.5) else ())


def pasts(draw, small):
    count, tokens, size = draw.integer(2, 6), draw.integer(3, 6 if small else 12), draw.integer(2, 5)
    block = WithPast(draw, size, reads=True)
    calls = [Call(draw.number(0.5, 1.5) * draw.normal(count, tokens, size)) for _ in range(draw.integer(1, 2))]
    return Case("past", 0, block, calls, causal=True)


MIXING = {
    "graphs": graphs,
    "means": means,
    "sorting": sortings,
    "attention": attentions,
    "norms": normalisations,
    "tables": tables,
    "past": pasts,
}
#: Of these nothing but an evaluation says whether plain steps settle.
UNPROVEN = ("attention", "norms")


def drawn(kind, seed, *, small=False):
    """A case; `small` ones are float64, for gradients."""
    draw = Draw(1000 * seed + 17 * list(MIXING).index(kind))
    case = MIXING[kind](draw, small)
    while kind in UNPROVEN and not all(settled_in_its_mode(case)):
        # The slopes of others, the last argument.
        calls = [dataclasses.replace(call, args=(*call.args[:-1], 0.7 * call.args[-1])) for call in case.calls]
        case = dataclasses.replace(case, calls=calls, softened=case.softened + 1)
    dtype = torch.float64 if small or draw.often(0.6) else torch.float32
    by_map = kind not in ("norms", "past") and draw.often(0.4)
    case.block.to(dtype)
    solver = drawn_solver(draw, dtype, kind == "past")
    calls = [call.to(dtype) for call in case.calls]
    return dataclasses.replace(case, seed=seed, calls=calls, by_map=by_map, solver=solver)


def settled_in_its_mode(case):
    for call in case.calls:
        case.begin(call)
        yield settles(case, call)


# What is found.


@dataclasses.dataclass
class Tally:
    """What was found of the cases of one kind."""

    cases: int = 0
    rows: int = 0
    converged: int = 0
    softened: int = 0
    #: Cases with a failure, and those where it is no matter of the last digits.
    wrong: set[int] = dataclasses.field(default_factory=set)
    gross: set[int] = dataclasses.field(default_factory=set)
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, case, text, gross):
        self.failures.append(f"{case}, {text}")
        self.wrong.add(case.seed)
        if gross:
            self.gross.add(case.seed)

    def __str__(self):
        share = self.converged / max(self.rows, 1)
        text = f"{len(self.wrong)} of {self.cases} cases wrong, {len(self.gross)} grossly; {share:.1%} of {self.rows}"
        return f"{text} rows converged; {self.softened} cases softened"

    def check(self, title, settled=0.9, last=True):
        """Fail with a list of all that is wrong, or where too few have converged; unless `last`, return the list."""
        print(f"\n{title}: {self}", end="")
        few = ["too few have converged"] if self.converged < settled * self.rows else []
        if not self.failures and not few:
            return []
        listed = [f"{title}: {self}", *few, *self.failures[:SHOWN]]
        if last:
            pytest.fail("\n".join(listed), pytrace=False)
        return listed


@torch.no_grad()
def judge(tally, case, call, at, value, report):
    """Compare what is said of a state with f of the whole batch."""
    mapped = case.truth(call)(value)
    residual, size = case.norm(mapped - value), case.norm(mapped)
    solver, eps = case.solver, torch.finfo(value.dtype).eps
    slack, rounding = (1e-6, 4 * eps * size) if value.dtype == torch.float64 else (1e-3, 4 * eps * size)
    tolerance = solver.atol + solver.rtol * size
    converged = report.status == Status.CONVERGED
    tally.rows += converged.numel()
    tally.converged += int(converged.sum())
    assert (report.num_evals > report.num_steps)[converged].all()
    over = converged & ~(residual <= tolerance * (1 + slack) + rounding)
    if over.any():
        worst = (residual / tolerance).where(over, 0.0).max()
        text = f"call {at}: {int(over.sum())} of {over.numel()} CONVERGED with residuals up to {worst:.3g} tolerances"
        tally.add(case, f"{text} ({float(residual.where(over, 0.0).max()):.2g})", bool(worst > 10))
    said, known = report.residual.double(), ~report.residual.isnan()
    off = (said - residual).abs()
    off = known & ~(off <= slack * residual.maximum(tolerance) + 2 * rounding)
    if off.any():
        worst = int((residual / said).where(off, 0.0).argmax())
        text = f"call {at}: {int(off.sum())} of {off.numel()} residuals are not those of the state:"
        numbers = f"{float(said.flatten()[worst]):.3g} said, {float(residual.flatten()[worst]):.3g} true"
        tally.add(case, f"{text} {numbers}", False)


def examine(tally, case):
    """Make all calls of a case, judge each, and return the reports."""
    tally.cases += 1
    tally.softened += case.softened > 0
    reports = []
    for at, call in enumerate(case.calls):
        case.begin(call)
        try:
            with torch.no_grad():
                value, report = case.run(call)
        except Exception as error:
            tally.add(case, f"call {at}: {type(error).__name__}: {str(error)[:120]}", True)
            break
        judge(tally, case, call, at, value, report)
        reports.append(report)
    return reports


@pytest.mark.parametrize("count", [9, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", MIXING)
def test_what_has_converged_is_a_fixed_point_of_the_whole_batch(kind, count):
    tally = Tally()
    for seed in range(FIRST, FIRST + count):
        examine(tally, drawn(kind, seed))
    tally.check(kind)


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", MIXING)
def test_plain_steps_settle(kind, count):
    cases = [drawn(kind, seed, small=True) for seed in range(FIRST, FIRST + count)]
    assert [str(case) for case in cases if not all(settled_in_its_mode(case))] == []
    assert sum(case.softened > 0 for case in cases) <= max(1, count // 4)


# Blocks that leave samples alone.


class Counted(nn.Module):
    """A block that counts the rows of its calls."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, z, *args):
        self.rows.append(len(z))
        return self.map(z, *args)


class Perceptron(Counted):
    def __init__(self, draw, size):
        super().__init__()
        self.first = draw.symmetric(size)
        self.second = nn.Parameter(torch.eye(size, dtype=torch.float64))

    def map(self, z, x, slope):
        return torch.tanh(x + slope * torch.tanh(z @ self.first) @ self.second)


class WithinSamples(Counted):
    """Attention between the tokens of each sample."""

    def __init__(self, draw, size):
        super().__init__()
        self.query, self.key = (nn.Parameter(draw.normal(size, size) / size) for _ in range(2))
        self.weight = draw.symmetric(size)

    def map(self, z, x, slope):
        h = F.scaled_dot_product_attention(x @ self.query, x @ self.key, z @ self.weight)
        return torch.tanh(x + slope * h)


class OwnTable(Counted):
    """Each sample reads a row of a table of its own."""

    def map(self, z, x, slope, table, codes):
        return torch.tanh(x + slope * z + 0.3 * table[torch.arange(len(z)), codes])


class SharedTable(Counted):
    """All samples read rows of one table."""

    def map(self, z, x, slope, table, codes):
        return torch.tanh(x + slope * z + 0.3 * table[codes])


def alone(kind, seed):
    """A case of a block that leaves samples alone, in float32, a few samples of which are hard."""
    draw = Draw(1000 * seed + 501 + 17 * ALONE.index(kind))
    count, size = draw.integer(12, 64), draw.integer(2, 8)
    hard = draw.numbers(0, 1, count) < draw.number(0.05, 0.25)
    hard[draw.integer(0, count - 1)] = True
    slope = draw.numbers(0.05, 0.2, count).where(~hard, draw.numbers(0.9, 0.98, count))
    event = (draw.integer(2, 6), size) if kind == "tokens" else (size,)
    # Small inputs, as tanh contracts by itself elsewhere.
    x = 0.01 * draw.normal(count, *event)
    plain, args = (), (slope.reshape(-1, *(1,) * len(event)),)
    match kind:
        case "perceptron":
            block = Perceptron(draw, size)
        case "tokens":
            block = WithinSamples(draw, size)
        case "own table":
            block, length = OwnTable(), draw.integer(2, 5)
            table, codes = 0.02 * draw.normal(count, length, size), draw.integers(0, length - 1, count)
            args += (draw.of(PerSample, lambda t: t)(table), codes)
        case _:
            block, plain = SharedTable(), (2,)
            same = draw.often(0.5)
            length = count if same else draw.of(count - draw.integer(1, 6), count + draw.integer(1, 6))
            table, codes = 0.02 * draw.normal(length, size), draw.integers(0, length - 1, count)
            # Only a wrapper tells it from a table of rows of samples.
            args += (Shared(table) if same else table, codes)
    block.float()
    call = Call(x, args).to(torch.float32)
    options = {"rtol": 10 ** draw.number(-7, -3), "atol": draw.of(0.0, 1e-8), "max_steps": MAX_STEPS}
    solver = draw.of(Picard, Picard, Anderson, Broyden)(**options)
    return Case(kind, seed, block, [call], solver, by_map=draw.often(0.4), plain=plain)


ALONE = ["perceptron", "tokens", "own table", "shared table"]


def rows_beyond(case, report):
    """How many rows the block was given beyond those needed, how many if all were kept, and late calls with all.

    The rows are in batches; late calls are those after the first with a part of the batch.
    """
    rows, needed, count = case.block.rows, int(report.num_evals.sum()), len(report.num_evals)
    leaving = next((i for i, number in enumerate(rows) if number < count), len(rows))
    kept = count * int(report.num_evals.max())
    return (sum(rows) - 1.3 * needed) / count, (kept - 1.3 * needed) / count, rows[leaving:].count(count)


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ALONE)
def test_samples_that_are_left_alone_leave_the_work(kind, count):
    tally, told = Tally(), 0
    for seed in range(FIRST, FIRST + count):
        case = alone(kind, seed)
        tally.cases += 1
        with torch.no_grad():
            value, report = case.run(case.calls[0])
        beyond, kept, whole = rows_beyond(case, report)
        told += kept > 4
        # The most in 2,000 cases were 2.1 batches and one call, at the state that is returned.
        if beyond > 4 or whole > 3:
            text = f"{beyond:.1f} batches more than needed, {whole} calls with all after the first leave"
            tally.add(case, text, True)
        judge(tally, case, case.calls[0], 0, value, report)
    tally.check(kind)
    # Mostly a layer that keeps all samples to the end would fail.
    assert told >= 0.6 * count


# Gradients.


def with_gradients(call):
    """The call with tensors that require grad, and these tensors."""
    found = []

    def kept(tensor):
        if tensor.is_floating_point():
            found.append(tensor.clone().requires_grad_())
            return found[-1]
        return tensor

    return dataclasses.replace(call, x=kept(call.x), args=tuple(changed(t, kept) for t in call.args)), found


def by_hand(case, call, tensors, cotangent, adjoint):
    """The gradients by plain steps of the whole batch: all from 0, or those of `Phantom` from where they lead."""
    f, z = case.truth(call), torch.zeros_like(call.x)
    if isinstance(adjoint, Phantom):
        with torch.no_grad():
            z = plain_steps(f, z)
        z = plain_steps(f, z, adjoint.steps, adjoint.damping)
    else:
        z = plain_steps(f, z)
    return torch.autograd.grad(z, tensors, cotangent, allow_unused=True)


def compare_gradients(tallies, case, name, draw):
    solver = Anderson if name == "implicit" and draw.often(0.3) else Picard
    adjoint = {
        "implicit": Implicit(GMRES(rtol=1e-10)),
        "unrolled": Unrolled(),
        "phantom": Phantom(draw.integer(1, 6), damping=draw.of(0.0, 0.3)),
    }[name]
    case.solver, case.kind = solver(rtol=1e-10, atol=0.0, max_steps=MAX_STEPS), f"{name} {case.kind}"
    states, tally = tallies["states"], tallies[name]
    states.cases, tally.cases = states.cases + 1, tally.cases + 1
    for at, call in enumerate(case.calls):
        case.begin(call)
        call, tensors = with_gradients(call)
        tensors += case.block.parameters()
        cotangent = draw.normal(*call.x.shape)
        expected = by_hand(case, call, tensors, cotangent, adjoint)
        try:
            value, report = case.run(call, adjoint)
            found = torch.autograd.grad(value, tensors, cotangent, allow_unused=True)
        except Exception as error:
            tally.add(case, f"call {at}: {type(error).__name__}: {str(error)[:120]}", True)
            return
        judge(states, case, call, at, value, report)
        tally.rows += 1
        if not (report.status == Status.CONVERGED).all():
            continue
        tally.converged += 1
        pairs = [(0.0 * e if f is None else f, e) for f, e in zip(found, expected, strict=True) if e is not None]
        off = max(float((f - e).abs().max() / e.abs().max().clamp_min(1e-10)) for f, e in pairs)
        if not off <= 1e-5:
            tally.add(case, f"call {at}: gradients are off by {off:.2g} of their largest entry", off > 1e-3)


@pytest.mark.parametrize("count", [21, pytest.param(210, marks=pytest.mark.nightly)])
def test_gradients_are_those_of_plain_steps_of_the_whole_batch(count):
    tallies = {name: Tally() for name in ("states", "implicit", "unrolled", "phantom")}
    kinds, adjoints = list(MIXING), list(tallies)[1:]
    for seed in range(FIRST, FIRST + count):
        case = drawn(kinds[seed % len(kinds)], seed, small=True)
        compare_gradients(tallies, case, adjoints[seed % len(adjoints)], Draw(seed))
    failed = [text for name, tally in tallies.items() for text in tally.check(f"gradients, {name}", last=False)]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


# Cases of their own.


def examined(block, *calls, kind, solver=TIGHT, **how):
    """Fail unless what converges in these calls of one layer are fixed points; returns the last report."""
    tally = Tally()
    case = Case(kind, 0, block, list(calls), solver, **how)
    reports = examine(tally, case)
    tally.check(kind, 0.0)
    return reports


class Nodes(nn.Module):
    def forward(self, z, x, g):
        total = z.new_zeros(3, z.shape[-1]).index_add(0, g, z)
        return torch.tanh(0.25 * total[g] * x.sign() + x)


def nodes(seed):
    draw = Draw(seed)
    return Call(draw.normal(8, 4), (draw.integers(0, 2, 8),))


@pytest.mark.parametrize("by_map", [False, True])
def test_nodes_of_graphs_that_finish_one_after_the_other(by_map):
    tally = Tally()
    for seed in range(40):
        examine(tally, Case("nodes", seed, Nodes(), [nodes(seed)], TIGHT, by_map=by_map))
    tally.check("nodes", 0.5)


def test_steps_that_are_unrolled_keep_the_graph_of_samples_that_others_read():
    tally = Tally()
    for seed in range(40):
        case = Case("nodes", seed, Nodes(), [nodes(seed)], TIGHT)
        if settles(case, case.calls[0]):
            call, tensors = with_gradients(case.calls[0])
            cotangent = Draw(seed).normal(8, 4)
            expected = by_hand(case, call, tensors, cotangent, Unrolled())
            value, report = case.run(call, Unrolled())
            found = torch.autograd.grad(value, tensors, cotangent)
            tally.cases, tally.rows = tally.cases + 1, tally.rows + 8
            tally.converged += int((report.status == Status.CONVERGED).sum())
            off = float((found[0] - expected[0]).abs().max() / expected[0].abs().max())
            if (report.status == Status.CONVERGED).all() and not off <= 1e-5:
                tally.add(case, f"gradients are off by {off:.2g}", off > 1e-3)
    assert tally.cases > 20
    tally.check("unrolled nodes")


def uneven(draw, count, hard):
    """Slopes by which samples read themselves and others: some of them finish late."""
    slope = torch.full((count, 1), 0.05, dtype=torch.float64)
    slope[:hard] = draw.numbers(0.6, 0.9, hard, 1)
    return 0.5 * slope, 0.5 * slope


@pytest.mark.parametrize("hard", [1, 3])
def test_a_normalisation_that_is_frozen_first_and_trained_later(hard):
    # With one hard sample a part of the batch would be one row, which cannot be normalised.
    draw = Draw(3)
    block = Normed(draw, 4)
    calls = [Call(draw.normal(12, 4), uneven(draw, 12, hard), before) for before in (freeze, freeze, train, freeze)]
    for report in examined(block, *calls, kind="norms"):
        assert (report.status == Status.CONVERGED).all()


@pytest.mark.parametrize("codes", ["one", "any", "last"])
def test_codes_of_a_table_that_change_between_calls(codes):
    # Those of the first call lead to the row of the sample that stays longest, which stays where it is.
    draw = Draw(4)
    zeros, table = torch.zeros(12, dtype=torch.int64), draw.normal(12, 3)
    later = {"one": zeros + 1, "any": draw.integers(0, 11, 12), "last": zeros + 11}[codes]
    slope = draw.numbers(0.02, 0.9, 12, 1).sort(0, descending=True).values
    calls = [Call(0.5 * draw.normal(12, 3), (table, which, 0.7 * slope, 0.3 * slope)) for which in (zeros, later)]
    for report in examined(Table(draw, False), *calls, kind="tables"):
        assert (report.status == Status.CONVERGED).all()


@pytest.mark.parametrize("wrap", [Shared, PerSample])
def test_wrapped_tables(wrap):
    draw = Draw(5)
    codes = draw.integers(0, 11, 12)
    call = Call(0.5 * draw.normal(12, 3), (wrap(draw.normal(12, 3)), codes, *uneven(draw, 12, 3)))
    report = examined(Table(draw, False), call, kind="tables")[0]
    assert (report.status == Status.CONVERGED).all()


@pytest.mark.parametrize("by_map", [False, True])
def test_a_table_is_read_beside_a_sample_that_is_not_finite(by_map):
    draw = Draw(5)
    call, tensors = with_gradients(Call(0.5 * draw.normal(4, 3), (draw.normal(4, 3), torch.full((4,), 3))))
    own, mix = torch.full((2, 4, 1), 0.3, dtype=torch.float64)
    bad = torch.zeros_like(own).masked_fill(torch.arange(4)[:, None] == 3, torch.nan)
    calls = [dataclasses.replace(call, x=x, args=(*call.args, own, mix)) for x in (call.x + bad, call.x)]
    case = Case("table", 0, Table(draw, False), calls, Picard(rtol=1e-12, atol=0.0), by_map=by_map)
    found, expected = (torch.autograd.grad(value[:3].square().sum(), tensors) for value, _ in map(case.run, calls))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_causal_block_with_a_past_that_reads_the_mean_of_the_batch(chunk):
    draw = Draw(6)
    calls = [Call(draw.normal(4, 8, 3)) for _ in range(2)]
    tally = Tally()
    case = Case("past", 0, WithPast(draw, 3, reads=True), calls, TIGHT, causal=True)
    case.layer.chunk = chunk
    for report in examine(tally, case):
        assert (report.status == Status.CONVERGED).all()
    tally.check("past")


def test_a_token_that_fails_alone_leaves_the_keys_of_the_state_that_is_returned():
    draw = Draw(7)
    block, x = WithPast(draw, 3, reads=False), draw.normal(2, 3, 3)

    def decoded(x):
        layer = Equilibrium(block, causal=True, solver=Picard(rtol=1e-8, max_steps=2), on_failure="ignore")
        cache = layer.new_cache()
        return torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], dim=1)

    with torch.no_grad():
        torch.testing.assert_close(decoded(x[:1]), decoded(x)[:1], rtol=1e-12, atol=1e-12)


class Pairs(nn.Module):
    """Pairs of samples that settle together, while each would run away beside one that stands still."""

    def forward(self, z, x):
        first, second = z.view(-1, 2, z.shape[-1]).unbind(1)
        turned = 1.3 * first + 2**0.5 * second, -(2**0.5) * first - 1.2 * second
        return torch.stack(turned, 1).view_as(z) + x


@pytest.mark.parametrize("how", ["layer", "map", "unwrapped map", "unrolled"])
def test_samples_that_settle_together_only(how):
    x = Draw(9).normal(12, 3) * 10.0 ** torch.arange(-6, 6, dtype=torch.float64)[:, None]
    by_map, plain = how.endswith("map"), (0,) if how == "unwrapped map" else ()
    solver = Picard(rtol=1e-9, atol=0.0, max_steps=90)
    case = Case(how, 0, Pairs(), [Call(x)], solver, by_map=by_map, plain=plain)
    value, report = case.run(case.calls[0], Unrolled() if how == "unrolled" else None)
    assert (report.status == Status.CONVERGED).all()
    tally = Tally()
    judge(tally, case, case.calls[0], 0, value, report)
    tally.check(how)


def test_samples_beside_one_that_is_not_finite():
    def f(z, x, slope):
        return torch.tanh(x + slope * z + 0.3 * z.mean(0))

    x, slope = Draw(2).normal(8, 3), torch.linspace(0.05, 0.6, 8, dtype=torch.float64)[:, None]
    problem = FixedPointMap(f, PerSample(x.index_fill(0, torch.tensor(2), torch.nan)), PerSample(slope), event_ndim=1)
    for adjoint in (None, Unrolled()):
        for trace in (False, True):
            solution = solve(problem, 0 * x, solver=TIGHT, adjoint=adjoint, trace=trace, on_failure="ignore")
            assert solution.status.tolist() == [0, 0, int(Status.NONFINITE), 0, 0, 0, 0, 0]


def test_a_residual_that_overflows_among_all_is_not_small():
    def f(z, x, slope):
        return x + slope * z + torch.exp(40 * (z.sum() - 30.5))

    slope = torch.zeros(12, 1).index_fill(0, torch.arange(3), 0.9)
    problem = FixedPointMap(f, PerSample(torch.ones(12, 1)), PerSample(slope), event_ndim=1)
    assert not solve(problem, torch.zeros(12, 1), solver=Picard(rtol=1e-5), on_failure="ignore").converged.any()


def test_forward_mode_through_a_block_that_mixes():
    x, slope = Draw(3).normal(6, 3), torch.linspace(0.02, 0.6, 6, dtype=torch.float64)[:, None]

    def value(t):
        problem = FixedPointMap(lambda z, t: torch.tanh(t * x + slope * z + 0.3 * z.mean(0)), t, event_ndim=1)
        return (
            solve(problem, 0 * x, solver=Picard(rtol=1e-12), adjoint=Implicit(GMRES(rtol=1e-12))).value.square().sum()
        )

    at = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(torch.func.jacfwd(value)(at), torch.func.jacrev(value)(at), rtol=1e-9, atol=0)


class OfOneNumber(nn.Module):
    """A block that takes so many samples only, and mixes them or not."""

    def __init__(self, draw, count, size, how, mixes):
        super().__init__()
        self.count, self.size, self.how = count, size, how
        wide = draw.weight(count * size).detach()
        self.weight = wide if mixes else torch.diag(torch.diag(wide))

    def forward(self, z, x, own, mix):
        if self.how == "assert":
            assert len(z) == self.count
        elif self.how == "raise" and len(z) != self.count:
            raise KeyError(f"{self.count} samples, not {len(z)}")
        all_of_it = (z.reshape(1, self.count * self.size) @ self.weight).reshape(self.count, self.size)
        return torch.tanh(x + own * z + mix * all_of_it)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("how", ["reshape", "assert", "raise"])
@pytest.mark.parametrize("by_map", [False, True])
@pytest.mark.cases(12)
def test_a_block_of_one_number_of_samples(how, mixes, by_map):
    draw = Draw(8)
    block = OfOneNumber(draw, 12, 3, how, mixes)
    calls = [Call(0.5 * draw.normal(12, 3), uneven(draw, 12, 3)) for _ in range(2)]
    for report in examined(block, *calls, kind=how, by_map=by_map):
        assert (report.status == Status.CONVERGED).all()


class MeanOfBatch(nn.Module):
    def forward(self, z, x, own, mix):
        return torch.tanh(x + own * z + mix * z.mean(0))


@pytest.mark.parametrize("max_steps", [2, 6])
@pytest.mark.parametrize("by_map", [False, True])
def test_samples_that_fail_have_the_gradient_of_steps_of_the_whole_batch(max_steps, by_map):
    draw = Draw(9)
    call, tensors = with_gradients(Call(0.5 * draw.normal(12, 3), uneven(draw, 12, 5)))
    solver = Picard(rtol=1e-4, atol=0.0, max_steps=max_steps)
    case = Case("fallback", 0, MeanOfBatch(), [call], solver, by_map=by_map)
    value, report = case.run(call, Implicit(GMRES(rtol=1e-10), fallback=Phantom(3)))
    failed = report.status == Status.MAX_STEPS
    assert failed.any()
    assert failed.all() == (max_steps == 2)
    cotangent = draw.normal(12, 3) * failed[:, None]
    expected = torch.autograd.grad(plain_steps(case.truth(call), value.detach(), 3), tensors, cotangent)
    found = torch.autograd.grad(value, tensors, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["none", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_compiled_layer_with_a_block_that_mixes(backend, monkeypatch):
    if backend == "none":
        # By the same loop of graphs, which nobody compiles: that takes ten seconds for each block.
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    tally, draw = Tally(), Draw(10)
    calls = [Call(0.5 * draw.normal(12, 3), uneven(draw, 12, 3)) for _ in range(2)]
    graphs = [nodes(seed) for seed in range(2 if backend == "inductor" else 20)]
    for block, own in ((MeanOfBatch(), calls), (Nodes(), graphs)):
        case = Case("compiled", 0, block, own, TIGHT)
        case.layer = Equilibrium(block, on_failure="ignore", solver=TIGHT, compiled=True)
        examine(tally, case)
    tally.check("compiled", 0.5)

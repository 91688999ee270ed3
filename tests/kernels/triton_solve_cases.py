"""Cases for the solve: what it returns and the path of every query, against the oracle; and for users' maps.

For these what stands between two evaluations, and in the backward pass between two products, is compared with torch's.
"""

import collections
import contextlib
import functools
import itertools
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
import triton_harness as harness
from half_emulation import FLOOR, Half
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_harness import (
    BF16,
    FP16,
    FP32,
    MAGIC,
    MASKS,
    SHAPES,
    TILED_MASKS,
    Poison,
    case,
    cases,
    check_error,
    error,
    large,
    masked_problem,
    problem_of,
    shape_problem,
    sign_aside,
    tiled_problem,
)
from triton_oracle import Dense, follow

import implicit_attention as ia
from implicit_attention import (
    Anderson,
    Equilibrium,
    FixedPointMap,
    PerSample,
    Picard,
    Status,
    UnsupportedImplementation,
    _solve,
)
from implicit_attention.kernels import hopfield_solve, trust
from implicit_attention.kernels import rule as rule_in_torch
from implicit_attention.kernels.problem import THERE, Attention, FusedRule, Solved
from implicit_attention.kernels.triton import gmres
from implicit_attention.kernels.triton.solve import EPS, LEAST, SMALLEST_NORMAL, decide
from implicit_attention.kernels.triton.step import TritonStep
from implicit_attention.linear import GMRES, MINRES

STOP = FusedRule(rtol=1e-3, atol=0.0, max_steps=12, plain_steps=2)


def solve(problem, initial, stop=STOP):
    from implicit_attention.kernels.triton.solve import solve as kernel

    with Poison():
        solved = kernel(problem, initial, stop)
    written = [solved.status != MAGIC, solved.num_steps != MAGIC, solved.num_evals != MAGIC]
    assert all(bool(t.all()) for t in written), "not written"
    return solved


def check_solved(problem, solved, stop=STOP, initial=None):
    """Everything that a solve returns, against float64 at the very state, and the path against the oracle."""
    dense, dtype = Dense.of(problem), problem.keys.dtype
    initial = problem.query if initial is None else initial
    if dtype == FP32:
        attend, path = dense.attend_in(dtype), follow(dense, initial.double(), stop)
        rough = follow(dense, initial.float(), stop, attend)
    else:
        half = Half(dense, dtype)
        attend, rough = half.finely, half.solve(initial, stop)
        path = follow(dense, initial.double(), stop, lambda z, fine: dense.attend(z), half=True)
    fine = solved.status != Status.NONFINITE
    assert bool(solved.state[fine].isfinite().all())
    z = solved.state.double().nan_to_num()
    mean, logsumexp = dense.attend(z)
    rough_mean, rough_logsumexp = attend(z.float())
    check_error("mean", solved.mean[fine], rough_mean[fine], mean[fine])
    # The interpreter sums one product after the other.
    order = 0.0 if dtype == FP32 else 4 * torch.finfo(FP32).eps
    check_error("logsumexp", solved.logsumexp[fine], rough_logsumexp[fine], logsumexp[fine], slack=order)
    f = dense.mapped(mean)
    rough_f = dense.mapped(rough_mean)
    residual, tolerance = (f - z).norm(dim=-1), stop.atol + stop.rtol * f.norm(dim=-1)
    rough_residual = (rough_f - z.float()).norm(dim=-1)
    length = f[fine].norm(dim=-1).square().mean().sqrt().item()
    check_error("residual", solved.residual[fine], rough_residual[fine], residual[fine], terms=length)
    check_error(
        "tolerance", solved.tolerance[fine], stop.atol + stop.rtol * rough_f.norm(dim=-1)[fine], tolerance[fine]
    )
    converged = solved.status == Status.CONVERGED
    assert bool((solved.residual <= solved.tolerance)[converged].all())
    # A query that stops a step earlier or later is as far from another as its tolerance lets it be.
    alike = fine if dtype == FP32 else fine & (solved.num_steps == path.num_steps) & (rough.num_steps == path.num_steps)
    if alike.any():
        check_error("state", solved.state[alike], rough.state[alike], path.state[alike], slack=1e-5)
    other = path if dtype == FP32 else rough
    same = (solved.num_steps == other.num_steps) & (solved.num_evals == other.num_evals)
    share = (same & (solved.status == other.status)).float().mean().item()
    # Near a fine tolerance residuals may be rounding.
    least = 1.0 if harness.DEVICE == "cpu" and dtype == FP32 else 0.85 if 0 < stop.rtol < 1e-3 else 0.95
    assert share >= least, f"another path for {1 - share:.1%} of the queries"
    return path


@cases(tiny=dict(size=1e-25), small=dict(size=1e-19), huge=dict(size=1e25))
def solve_numbers_whose_squares_are_none(size):
    torch.manual_seed(0)
    field, keys = torch.randn(2, 9, 16, dtype=torch.float64), torch.randn(2, 20, 16, dtype=torch.float64)
    keys, beta = (keys, 1e-30) if size > 1 else (size * keys, min(1 / size**2, 1e38))
    held = [t.to(harness.DEVICE, FP32) for t in (size * field, keys, torch.tensor(beta))]
    found = solve(Attention(*held, 0.5), held[0], FusedRule(rtol=1e-4, atol=0.0, max_steps=300, plain_steps=3))
    assert bool((found.status == Status.CONVERGED).all())
    z, wide = found.state.double() / size, held[1].double()
    f = 0.5 * field.to(z) + 0.5 * (beta * size * z @ wide.mT).softmax(-1) @ (wide / size)
    true, length = (t.norm(dim=-1) for t in (f - z, f))
    assert bool((true <= 2e-3 * length).all())
    assert bool(((found.residual.double() / size - true).abs() <= 1e-3 * length).all())


@cases(**SHAPES)
def solve_shape(**shape):
    problem = shape_problem(**shape)
    for stop in (THERE, STOP):
        check_solved(problem, solve(problem, problem.query, stop), stop)


@cases(**{name: dict(name=name) for name in MASKS})
def solve_mask(name):
    problem = masked_problem(name, first=2 if name == "per_sample" else None)
    solved = solve(problem, problem.query)
    check_solved(problem, solved)
    dense = Dense.of(problem)
    empty = (dense.bias == -torch.inf).all(-1)
    assert bool(empty.any()) == (name in ("padding", "per_query", "per_sample"))
    assert bool((solved.mean[empty] == 0).all())
    assert bool((solved.logsumexp[empty] == 0).all())


# The queries that are left: listed where they may change places, or else marked.


@contextlib.contextmanager
def noted():
    """How many queries of each set were noted as left after every evaluation, and which."""
    from implicit_attention.kernels.triton import layout

    found, after = [], layout.Left.next

    def tell(left):
        going = after(left)
        found.append((left.listed, *(t.clone() for t in left.notes[0])))
        return going

    layout.Left.next = tell
    try:
        yield found
    finally:
        layout.Left.next = after


def check_noted(found, solved):
    """Every list holds the queries that are evaluated once more, once: coarsely at the start, finely at the end."""
    sets, rows = solved.num_evals.flatten(0, -2), solved.num_evals.shape[-1]
    for evaluations, (listed, order, counts) in enumerate(found, 1):
        going = sets > evaluations
        assert torch.equal(counts.sum(-1, dtype=torch.int32), going.sum(-1, dtype=torch.int32))
        for numbers, (first, last), left in zip(order.view(-1, rows), counts, going, strict=listed):
            numbers = torch.cat([numbers[:first], numbers[rows - last :]])
            assert torch.equal(numbers.sort().values.long(), left.nonzero()[:, 0])


def tile_by_tile(problem, rows, stop):
    """The answers where the queries of each tile are a problem of their own."""
    parts = []
    for start in range(0, problem.query.shape[-2], rows):
        part = problem._replace(query=problem.query[..., start : start + rows, :])
        if problem.first is not None:
            part = part._replace(first=problem.first + start)
        if problem.pairs is not None and problem.pairs.shape[-2] > 1:
            part = part.paired(problem.pairs[..., start : start + rows, :])
        with noted() as found:
            parts.append(solve(part, part.query, stop))
        assert not any(listed for listed, *_ in found)
    return Solved(*(torch.cat(fields, 1) for fields in zip(*parts, strict=True)))


LISTED = {
    "shape": dict(),
    "causal": dict(first=20),
    "bf16": dict(dtype=BF16),
    "fp16": dict(dtype=FP16),
    "at_the_edge": dict(beta=3.0, seed=2),
    "budget": dict(max_steps=8),
    "fixed_budget": dict(max_steps=3, rtol=0.0),
    "mask_of_keys": dict(mask=lambda n, m: torch.rand(2, 1, m) < 0.6),
    "bias_of_keys": dict(mask=lambda n, m: torch.randn(1, 1, m)),
    "mask_of_pairs": dict(mask=lambda n, m: torch.rand(1, n, m) < 0.6, listed=False),
    "mask_of_keys_causal": dict(mask=lambda n, m: torch.rand(2, 1, m) < 0.6, first=20, listed=False),
}


@cases(**LISTED)
def solve_listed(max_steps=16, rtol=STOP.rtol, mask=None, listed=True, **options):
    stop = STOP._replace(max_steps=max_steps, rtol=rtol)
    tile = harness.tile_of("evaluate", options.get("dtype", FP32))
    n, m = 2 * tile.rows, tile.keys + 8
    problem = problem_of(lead=(2,), exact=True, **{"n": n, "m": m, "dim": 16, "beta": 1.5, "anchor": 0.2, **options})
    problem.query[1, 7, 3] = torch.nan
    if mask is not None:
        problem = problem.paired(mask(n, m).to(harness.DEVICE))
    with noted() as found:
        whole = solve(problem, problem.query, stop)
    assert {told for told, *_ in found} == {listed}
    check_noted(found, whole)
    assert len(whole.num_evals.unique()) > (1 if rtol == 0 else 2)
    parts = tile_by_tile(problem, tile.rows, stop)
    for name, field, before in zip(whole._fields, whole, parts, strict=True):
        if harness.DEVICE == "cpu":
            assert torch.equal(field.nan_to_num(7.0), before.nan_to_num(7.0)), name
        else:  # other machine code, which may contract other sums, and long ways magnify that
            short = parts.num_evals <= 10
            near = torch.isclose(field.double(), before.double(), rtol=2e-2, atol=2e-2, equal_nan=True)
            assert near[short].float().mean() >= 0.95, name


@cases(fp32=dict(dtype=FP32), bf16=dict(dtype=BF16), fp16=dict(dtype=FP16))
def solve_listed_in_any_order(dtype):
    tile = harness.tile_of("evaluate", dtype)
    problem = problem_of(
        lead=(2,), n=2 * tile.rows, m=tile.keys + 8, dim=16, beta=1.5, anchor=0.2, dtype=dtype, exact=True
    )
    whole = solve(problem, problem.query)
    order = torch.randperm(2 * tile.rows).to(harness.DEVICE)
    moved = problem._replace(query=problem.query[:, order])
    moved.query[:, 5] = torch.nan  # one leaves at once
    others = (order != order[5]).nonzero()[:, 0]
    for name, field, before in zip(whole._fields, solve(moved, moved.query), whole, strict=True):
        assert torch.equal(field[:, others], before[:, order][:, others]), name


@triton.jit
def decide_kernel(sums, truths, told, steps, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    accepted, tries, by_r, by_df = decide(
        tl.load(sums + at),
        tl.load(sums + SIZE + at),
        tl.load(sums + 2 * SIZE + at),
        tl.load(sums + 3 * SIZE + at),
        tl.load(sums + 4 * SIZE + at),
        tl.load(sums + 5 * SIZE + at),
        tl.load(sums + 6 * SIZE + at),
        tl.load(sums + 7 * SIZE + at),
        tl.load(sums + 8 * SIZE + at),
        tl.load(sums + 9 * SIZE + at),
        tl.load(sums + 10 * SIZE + at),
        tl.load(truths + at) != 0,
        tl.load(truths + SIZE + at) != 0,
        tl.load(truths + 2 * SIZE + at) != 0,
        EPS,
        SMALLEST_NORMAL,
        LEAST,
    )
    tl.store(told + at, accepted.to(tl.int8))
    tl.store(told + SIZE + at, tries.to(tl.int8))
    tl.store(steps + at, by_r)
    tl.store(steps + SIZE + at, by_df)


def sums_of_vectors(size, dim=3):
    """What `decide` is given, of random vectors of every length."""
    length = 10 ** (6 * torch.rand(size, 1) - 4)
    z, dz, r, dr = (torch.randn(size, dim) * length * 10 ** (2 * torch.rand(size, 1) - 2) for _ in range(4))
    df = dz + dr
    dot = [
        (one * other).sum(-1)
        for one, other in ((r, r), (r - dr / 2, dz), (dr, r), (dr, dr), (r, df), (df, df), (dz, dr))
    ]
    square, trapezoid, *others = dot
    energy = z.square().sum(-1)
    before = energy + torch.randn(size) * trapezoid
    return torch.stack([square, square.sqrt(), energy, trapezoid, *others, before, (r - dr).norm(dim=-1)])


def sums_of_nothing(size):
    """The same of numbers that have nothing to do with each other, among them those where numbers end."""
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e-20, 1.0, 3e38, torch.inf, -torch.inf, torch.nan])
    numbers = torch.randn(11, size) * 10 ** (80 * torch.rand(11, size) - 42)
    return numbers.where(torch.rand(11, size) < 0.6, extremes[torch.randint(len(extremes), (11, size))])


@cases(vectors=dict(of=sums_of_vectors), nothing=dict(of=sums_of_nothing))
def solve_decides_as_torch_does(of, size=4096):
    torch.manual_seed(0)
    sums, truths = of(size).to(harness.DEVICE), (torch.rand(3, size) < 0.8).to(harness.DEVICE)
    told, steps = torch.empty(2, size, dtype=torch.int8).to(sums.device), torch.empty_like(sums[:2])
    decide_kernel[(1,)](sums, truths.to(torch.int8), told, steps, size)
    numbers = EPS.value, SMALLEST_NORMAL.value, LEAST.value
    accepted, tries, *right = rule_in_torch.decide(*sums, *truths, *numbers)
    assert all(0.01 < truth.float().mean() < 0.99 for truth in (accepted, tries))
    same = (told == torch.stack([accepted, tries])).all(0)
    # A compiler may round other sums, where two numbers tie.
    assert same.all() if harness.DEVICE == "cpu" else same.float().mean() > 0.98
    near = {"rtol": 1e-6, "atol": 0.0} if harness.DEVICE == "cpu" else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(steps[:, same], torch.stack(right)[:, same], **near, equal_nan=True)


@case
def solve_with_every_kind_of_step():
    # At the edge of retrieval every kind of step occurs.
    problem = problem_of(lead=(2,), n=32, m=32, dim=16, beta=3.0, anchor=0.2, seed=2)
    stop = STOP._replace(max_steps=40)
    path = check_solved(problem, solve(problem, problem.query, stop), stop)
    assert path.accelerated > 100
    assert path.rejected > 2
    assert path.downhill > 2


@case
def solve_cuts_long_steps():
    problem = problem_of(lead=(2,), n=32, m=32, dim=16, beta=3.0, anchor=0.2, seed=2)
    stop = STOP._replace(rtol=0.0, max_steps=6)
    path = check_solved(problem, solve(problem, problem.query, stop), stop)
    assert path.cut > 0 or harness.DEVICE == "cuda"


@case
def solve_plain_steps_only():
    problem = problem_of(lead=(1,), n=16, dim=16)
    stop = STOP._replace(atol=0.05, plain_steps=100, max_steps=30)
    path = check_solved(problem, solve(problem, problem.query, stop), stop)
    assert path.accelerated == 0


@cases(
    budget=dict(rtol=0.0, max_steps=4), explicit=dict(rtol=1e-9, max_steps=0), exhausted=dict(rtol=1e-5, max_steps=6)
)
def solve_ends(rtol, max_steps):
    problem = problem_of(lead=(2,), n=20, dim=16, beta=1.5, anchor=0.1)
    stop = FusedRule(rtol, 0.0, max_steps, 2)
    solved = solve(problem, problem.query, stop)
    check_solved(problem, solved, stop)
    assert bool((solved.status == stop.exhausted).any())
    if rtol == 0:
        assert bool((solved.num_steps == max_steps).all())
        assert bool((solved.status == Status.BUDGET).all())
    assert int(solved.num_evals.max()) == max_steps + 1


@case
def solve_where_scores_move_far():
    """The last log-sum-exp is no shift for scores that have moved by hundreds: it would leave sums of 0 or infinity."""
    problem = problem_of(lead=(2,), n=20, m=33, dim=16, beta=1.0, anchor=0.5, exact=True)
    for far in (30.0, -30.0):
        # The first state is far off the keys, along what they have in common.
        moved = problem._replace(keys=problem.keys + 20.0)
        solved = solve(moved, problem.query + far)
        assert bool((solved.status == Status.CONVERGED).all())
        check_solved(moved, solved, initial=problem.query + far)


@case
def solve_without_an_anchor_reads_no_field():
    problem = problem_of(lead=(2, 2), n=20, dim=16, anchor=[0.0, 0.4])
    initial = problem.query.clone()
    problem.query[:, 0] = torch.nan
    solved = solve(problem, initial)
    assert bool((solved.status == Status.CONVERGED).all())
    check_solved(problem, solved, initial=initial)


@case
def solve_nan_query_beside_others():
    problem = problem_of(lead=(2,), n=20, dim=16)
    clean = solve(problem, problem.query)
    problem.query[1, 7, 3] = torch.nan
    solved = solve(problem, problem.query)
    others = torch.ones_like(solved.status, dtype=torch.bool)
    others[1, 7] = False
    for field, before in zip(solved, clean, strict=True):
        assert torch.equal(field[others], before[others])
    assert solved.status[1, 7] == Status.NONFINITE
    assert bool(solved.state[1, 7].isnan().all())
    assert solved.num_evals[1, 7] == 1


@case
def solve_diverges_where_numbers_end():
    # At 0 all scores are 0; at the mean of the keys, the second point, they overflow.
    problem = problem_of(lead=(1,), n=8, m=12, dim=16, anchor=0.0)
    problem = problem._replace(keys=problem.keys * 2e16 + 1e18, beta=problem.beta * 1e4)
    initial = torch.zeros_like(problem.query)
    solved = solve(problem, initial)
    assert bool((solved.status == Status.DIVERGED).all())
    assert torch.equal(solved.state, initial)
    assert bool((solved.num_steps == 0).all())
    assert bool((solved.num_evals == 2).all())
    assert bool(solved.residual.isfinite().all())


@case
def solve_float16_keys_and_large_states():
    problem = problem_of(lead=(2,), n=20, dim=16, dtype=FP16)
    problem = problem._replace(query=problem.query.float() * 1e6, beta=problem.beta * 1e-6)
    solved = solve(problem, problem.query)
    assert bool((solved.status == Status.CONVERGED).all())
    mean, _ = Dense.of(problem).attend(solved.state.double())
    assert error(solved.mean, mean) < 1e-3


@cases(fp16=dict(dtype=FP16), bf16=dict(dtype=BF16))
def solve_logsumexp_of_rounded_states(dtype):
    # The energy test needs more digits than scores of rounded states have.
    problem = problem_of(lead=(1,), n=20, dim=32, dtype=dtype, beta=2.0)
    problem = problem._replace(query=problem.query.float() + 0.1 * torch.rand_like(problem.query.float()))
    solved = solve(problem, problem.query, STOP._replace(max_steps=0))
    dense = Dense.of(problem)
    exact = dense.attend(solved.state.double())[1]
    rough = dense.attend_in(dtype)(solved.state)[1]
    assert error(solved.logsumexp, exact) < 0.2 * error(rough, exact)


@case
def solve_bias_as_low_as_it_gets():
    problem = problem_of(lead=(1,), n=20, dim=16)
    mask = torch.zeros(1, problem.query.shape[-2], problem.keys.shape[-2]).to(harness.DEVICE)
    mask[:, 3] = torch.finfo(FP32).min
    solved, plain = (solve(each, problem.query) for each in (problem.paired(mask), problem))
    assert bool((solved.status == Status.CONVERGED).all())
    # What all keys have in common changes no weight.
    assert error(solved.mean[:, 3], plain.mean[:, 3]) < 1e-3


@case
def solve_strides():
    torch.manual_seed(0)
    n, m = large(20), large(33)
    field = torch.randn(2, n, 2, 16).transpose(1, 2).to(harness.DEVICE)
    keys = torch.randn(2, 16, 2, m).to(harness.DEVICE).permute(0, 2, 3, 1)
    numbers = torch.full((2, 2), 0.2).to(harness.DEVICE)
    problem = Attention(field, keys, numbers, numbers[:1, :1])
    mask = torch.rand(2, 2, m, n).mT.to(harness.DEVICE) < 0.7
    initial = torch.randn(1, 1, 1, 16).to(harness.DEVICE).expand(2, 2, n, 16)
    for tried in (problem, problem.paired(mask)):
        check_solved(tried, solve(tried, initial), initial=initial)


@cases(columns=dict(strides=(1, 2**30 + 16)), rows=dict(strides=(2**26 + 2**22, 1)))
def solve_keys_far_apart(strides):
    # In 32 bits the offset of the last number would be 2^32 less: still in this memory, so that nothing crashes.
    problem = problem_of(lead=(), n=9, m=32, dim=3, dtype=FP16, exact=True)
    last = sum((size - 1) * step for size, step in zip(problem.keys.shape, strides, strict=True))
    memory = torch.empty(2**31 + last + 1, dtype=FP16, device=harness.DEVICE)
    keys = memory.as_strided(problem.keys.shape, strides, 2**31)
    keys.copy_(problem.keys)
    assert 2**31 < last < 2**32
    check_solved(problem, solve(problem._replace(keys=keys), problem.query))


@case
def solve_signs_kept_aside():
    problem = problem_of(lead=(2,), dim=16)
    initial = torch.randn_like(problem.query)
    tried = problem._replace(**{name: sign_aside(getattr(problem, name)) for name in ("query", "keys", "beta")})
    check_solved(tried, solve(tried, sign_aside(initial)), initial=initial)


@case
def solve_nothing():
    problem = problem_of(lead=(2,), n=0, dim=16)
    assert solve(problem, problem.query).state.shape == (2, 0, 16)
    problem = problem_of(lead=(0,), n=3, dim=16)
    assert solve(problem, problem.query).status.shape == (0, problem.query.shape[-2])
    problem = problem_of(lead=(2,), n=3, m=0, dim=16)
    solved = solve(problem, problem.query)
    assert error(solved.state, problem.query / 2) < 1e-3
    assert bool((solved.mean == 0).all())


# Masks whose pairs stand in tiles of every kind: which tiles are visited, and what is read of them.


@cases(**{name: dict(name=name) for name in TILED_MASKS}, causal=dict(name="documents", first=20))
def solve_tiles(name, **options):
    problem = tiled_problem(name, **options)
    check_solved(problem, solve(problem, problem.query))


@cases(keys=dict(name="keys"), bias=dict(name="bias_of_documents"))
def solve_reads_no_tile_that_is_masked(name):
    problem = tiled_problem(name)
    problem.pairs[..., : large(35)] = -torch.inf if problem.pairs.is_floating_point() else False
    clean = solve(problem, problem.query)
    problem.keys[..., :32, :] = torch.nan
    for field, before in zip(solve(problem, problem.query), clean, strict=True):
        assert torch.equal(field, before)


@cases(fp16=dict(dtype=FP16), bf16=dict(dtype=BF16))
def solve_half_precision_is_true(dtype):
    """CONVERGED, residual and tolerance hold in float64, at the default and at the finest tolerance that is taken."""
    for anchor, beta, rtol in itertools.product((0.0, 0.2), (0.3, 16.0), (None, 1e-5)):
        query, keys = 0.3 * torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
        query, keys = query[:16].to(harness.DEVICE), keys.to(harness.DEVICE)
        found = hopfield_solve(query, keys, beta=beta, anchor=anchor, rtol=rtol, impl="triton")
        z = found.state.double()
        mapped = anchor * query.double() + (1 - anchor) * (beta * z @ keys.double().mT).softmax(-1) @ keys.double()
        residual, size = (mapped - z).norm(dim=-1), mapped.norm(dim=-1)
        assert bool((found.status == Status.CONVERGED).all())
        assert bool(((residual - found.residual).abs() <= FLOOR * size).all())
        torch.testing.assert_close(found.tolerance.double(), 1e-8 + (rtol or 1e-3) * size, rtol=1e-5, atol=0)
    with pytest.raises(UnsupportedImplementation, match=r"residuals are known to 2e-06 .*; use rtol >= 1e-05, got"):
        hopfield_solve(query, keys, beta=1.0, rtol=9.9e-6, impl="triton")
    assert bool(
        (hopfield_solve(query, keys, beta=1.0, rtol=0.0, atol=0.0, impl="triton").status == Status.BUDGET).all()
    )


@case
def solve_auto_leaves_fine_tolerances_in_half_precision_to_others():
    query, keys = (t.to(harness.DEVICE, BF16) for t in torch.randn(2, 40, 16))
    devices, _solve.TRITON_DEVICES = _solve.TRITON_DEVICES, ("cpu", "cuda")
    try:
        fine = hopfield_solve(query, keys, beta=0.3, rtol=1e-6)
        coarse = hopfield_solve(query, keys, beta=0.3, impl="triton")
        assert torch.equal(hopfield_solve(query, keys, beta=0.3).state, coarse.state)
    finally:
        _solve.TRITON_DEVICES = devices
    assert bool((fine.status == Status.CONVERGED).all())
    assert bool((fine.tolerance < 0.01 * coarse.tolerance).all())


# The step of users' maps: evaluations, statuses and states are those of the solvers' loop by torch.


DOUBLE = torch.float64


def drawn(*shape, dtype=DOUBLE, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(harness.DEVICE, dtype)


def by_kernel(f, start, solver, **options):
    with mock.patch.object(_solve, "TRITON_DEVICES", (torch.device(harness.DEVICE).type,)), torch.no_grad():
        found = ia.solve(f, start, solver=solver, on_failure="ignore", **options)
    assert found.route.step == "triton"
    return found


def agree(f, start, solver, rtol=1e-11, atol=1e-12):
    found = by_kernel(f, start, solver)
    with torch.no_grad():
        expected = ia.solve(f, start, solver=solver, on_failure="ignore", impl="reference")
    for name in ("status", "num_steps", "num_evals"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    for name in ("value", "residual", "tolerance"):
        assert_close(getattr(found, name), getattr(expected, name), rtol=rtol, atol=atol, equal_nan=True)
    return found


def contraction(lead, n, dtype=DOUBLE, size=0.6):
    """A map of rows, each of which leaves when it has finished."""
    weight, x = size / n**0.5 * drawn(n, n, dtype=dtype, seed=1), drawn(*lead, n, dtype=dtype)
    return FixedPointMap(lambda z, x: torch.tanh(z @ weight + x), PerSample(x), event_ndim=1), x


@cases(
    picard={"solver": Picard(), "lead": (), "n": 33},
    picard_in_parts={"solver": Picard(rtol=1e-9), "lead": (2, 3), "n": 1030},
    picard_fails={"solver": Picard(max_steps=3), "lead": (7,), "n": 5},
    anderson={"solver": Anderson(rtol=1e-8), "lead": (3,), "n": 33},
    anderson_in_parts={"solver": Anderson(rtol=1e-8), "lead": (2,), "n": 1500},
    history_1={"solver": Anderson(history=1), "lead": (2, 5), "n": 33},
    history_2={"solver": Anderson(history=2, rtol=1e-6), "lead": (12,), "n": 12},
    history_8={"solver": Anderson(history=8, plain_steps=1, rtol=1e-6), "lead": (7,), "n": 33},
    budget={"solver": Anderson(rtol=0, atol=0, max_steps=7), "lead": (3,), "n": 33},
    no_step={"solver": Anderson(max_steps=0), "lead": (3,), "n": 33},
)
def step_is_that_of_the_loop(solver, lead, n):
    f, x = contraction(lead, n)
    agree(f, torch.zeros_like(x), solver)


@cases(picard={"solver": Picard()}, anderson={"solver": Anderson(history=2)})
def step_in_single_precision(solver):
    f, x = contraction((6,), 1030, FP32)
    found = agree(f, torch.zeros_like(x), solver, rtol=1e-3, atol=1e-5)
    assert bool(found.converged.all())


@cases(picard={"solver": Picard()}, anderson={"solver": Anderson(rtol=1e-6)}, history_1={"solver": Anderson(history=1)})
def step_measures_states_of_any_size(solver):
    # Their squares are no float32: they overflow, or lose their digits.
    sizes = torch.tensor([1e-30, 1e-22, 1e20, 1e30, 0.0], dtype=FP32)[:, None]
    shift = (sizes * torch.linspace(1, 2, 20)).to(harness.DEVICE)
    f = FixedPointMap(lambda z, x: z / 2 + x, PerSample(shift), event_ndim=1)
    found = agree(f, torch.zeros_like(shift), type(solver)(**{**vars(solver), "atol": 0.0}), rtol=1e-3, atol=0)
    assert_close(found.value, 2 * shift, rtol=1e-3, atol=0)


@cases(picard={"solver": Picard(max_steps=30)}, anderson={"solver": Anderson(history=2, max_steps=30)})
def step_ends_rows_that_fail_alone(solver):
    rows = [[0.1, 0.2], [torch.nan, 0.1], [3.0, 0.1], [torch.inf, 0.0], [0.24, 0.1]]
    x = torch.tensor(rows, dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: z * z + x, PerSample(x), event_ndim=1)
    found = by_kernel(f, torch.zeros_like(x), solver)
    with torch.no_grad():
        expected = ia.solve(f, torch.zeros_like(x), solver=solver, on_failure="ignore", impl="reference")
    assert found.status.tolist() == expected.status.tolist()
    assert (found.status == Status.NONFINITE).tolist() == [False, True, False, True, False]
    assert_close(found.value[[0, 4]], expected.value[[0, 4]], rtol=1e-11, atol=1e-12)
    assert found.value[[1, 3]].isnan().all()


@cases(picard={"solver": Picard(rtol=1e-8)}, anderson={"solver": Anderson(history=2, rtol=1e-8)})
def step_gives_a_row_the_bits_of_any_neighbours(solver):
    x = drawn(7, 33)
    others = torch.cat([x[:4], 20 * x[4:6], x[6:] * torch.nan])

    def solved(own):
        f = FixedPointMap(lambda z, x: (z.roll(1, -1) / 2 + x).clamp(-2, 2), PerSample(own), event_ndim=1)
        return by_kernel(f, torch.zeros_like(own), solver)

    one, two = solved(x), solved(others)
    for name in ("value", "status", "num_evals"):
        assert torch.equal(getattr(one, name)[:4], getattr(two, name)[:4]), name
    assert not torch.equal(one.num_evals, two.num_evals)


@case
def step_keeps_the_best_state_of_steps_that_grow():
    x = torch.tensor([[0.0, 1.0], [0.5, -1.0], [2.0, 0.3]], dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: 1.2 * z.flip(-1) + x, PerSample(x), event_ndim=1)
    for solver in (Picard(max_steps=6), Anderson(max_steps=6, plain_steps=7)):
        assert bool((agree(f, x.clone(), solver).num_steps < 6).all())


@cases(history_1={"history": 1}, history_2={"history": 2})
def step_rejects_a_residual_that_grows(history):
    x = torch.linspace(-2, 2, 14, dtype=DOUBLE, device=harness.DEVICE).reshape(7, 2)
    f = FixedPointMap(lambda z, x: x * torch.exp(-z.flip(-1)), PerSample(x), event_ndim=1)
    found = agree(f, torch.full_like(x, 0.1), Anderson(history=history, max_steps=14), rtol=1e-6, atol=1e-6)
    assert len(set(found.status.tolist())) > 1


@case
def step_shows_others_no_nan_of_a_row_that_has_ended():
    x = drawn(5, 3)
    x[1, 0] = torch.nan
    f = FixedPointMap(lambda z, x: x + 0.3 * z.mean(0), x, event_ndim=1)
    found = agree(f, torch.zeros_like(x), Picard(rtol=1e-9))
    assert found.converged.tolist() == [True, False, True, True, True]


@case
def step_takes_changes_that_depend_on_each_other():
    # Two numbers, of which three changes cannot be independent, and a rotation that plain steps do not solve.
    x = drawn(6, 2)
    turned = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE, device=harness.DEVICE)
    f = FixedPointMap(lambda z, x: z @ turned + x, PerSample(x), event_ndim=1)
    found = agree(f, torch.zeros_like(x), Anderson(history=5, rtol=1e-8), rtol=1e-6, atol=1e-6)
    assert bool(found.converged.all())
    assert_close(found.value @ (torch.eye(2, dtype=DOUBLE, device=harness.DEVICE) - turned), x, rtol=1e-6, atol=1e-6)


@case
def step_reads_states_and_images_of_any_strides():
    x = drawn(5, 4, 3)
    f = FixedPointMap(lambda z, x: (z.cos() / 2 + x).transpose(1, 2).contiguous().transpose(1, 2), x, event_ndim=2)
    agree(f, torch.zeros_like(x.transpose(1, 2).contiguous()).transpose(1, 2), Anderson(history=2))


@case
def step_reads_numbers_whose_sign_torch_keeps_aside():
    x = drawn(2, 4)
    f = FixedPointMap(lambda z, x: torch._neg_view(-(x + torch.tanh(z) / 2)), PerSample(x), event_ndim=1)
    agree(f, torch._neg_view(x), Picard(rtol=1e-9))
    agree(f, torch._neg_view(x), Picard(max_steps=0))
    agree(f, x.new_ones(1, 1).expand(2, 4), Anderson(history=1, rtol=1e-9))


@case
def step_of_a_block_has_its_gradient():
    block = torch.nn.Linear(8, 8, dtype=DOUBLE, device=harness.DEVICE)
    torch.nn.init.orthogonal_(block.weight, 0.5)
    layer, x = Equilibrium(Mixed(block), solver=Anderson(rtol=1e-10)), drawn(3, 4, 8)
    gradients = []
    for devices in ((torch.device(harness.DEVICE).type,), ()):
        with mock.patch.object(_solve, "TRITON_DEVICES", devices):
            layer(x).square().sum().backward()
        gradients.append(block.weight.grad)
        block.weight.grad = None
    assert_close(*gradients, rtol=1e-8, atol=1e-10)


class Mixed(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, z, x):
        return torch.tanh(self.linear(z)) + x


class Launched(TorchDispatchMode):
    """The names of the operations that write numbers."""

    WRITING_NONE = ("empty", "view", "expand", "select", "slice", "transpose", "alias", "detach", "reshape")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function).removeprefix("aten.")
        if not any(word in name for word in self.WRITING_NONE):
            self.names.append(name)
        return function(*arguments, **(options or {}))


@cases(picard={"method": Picard}, anderson={"method": functools.partial(Anderson, history=2)})
def step_is_all_between_two_evaluations(method):
    x, right = drawn(6, 9), TritonStep.__call__
    f = FixedPointMap(lambda z, x: z / 2 + x, PerSample(x), event_ndim=1)

    def unseen(self, *given):
        with _disable_current_modes():
            return right(self, *given)

    found = []
    with mock.patch.object(_solve, "unobserved", return_value=True), mock.patch.object(TritonStep, "__call__", unseen):
        for steps in (4, 24):
            with Launched() as launched:
                by_kernel(f, torch.zeros_like(x), method(rtol=0, atol=0, max_steps=steps, check_every=100))
            found.append(collections.Counter(launched.names))
    more = found[1] - found[0]
    # Of each of 20 evaluations the map's own.
    assert more == {"div.Tensor": 20, "add.Tensor": 20}, more


@case
def step_that_is_wrong_is_not_used():
    (f, x), right = contraction((3,), 9), TritonStep.__call__

    def wrong(self, z, mapped, number):
        to = right(self, z, mapped, number)
        self.memory.best_residual.mul_(0.5)
        return to

    with mock.patch.object(TritonStep, "__call__", wrong), mock.patch.dict(trust._found, clear=True):
        with mock.patch.object(_solve, "TRITON_DEVICES", (torch.device(harness.DEVICE).type,)):
            found = ia.solve(f, torch.zeros_like(x), solver=Picard())
        (refused,) = (known for use, known in trust._found.items() if "step" in use.kernel)
        assert refused.verdict == "refused"
        assert "residual is off by" in refused.reason
    assert found.route.step == "torch"
    assert bool(found.converged.all())


# GMRES for the gradients of users' maps: answers, statuses and steps are those of `GMRES` by torch.


def matrices(lead, n, kind="random", dtype=DOUBLE):
    """Matrices (*lead, n, n)."""
    random, eye = drawn(*lead, n, n, seed=3) / n**0.5, torch.eye(n, dtype=DOUBLE, device=harness.DEVICE)
    made = {
        "random": eye + 0.6 * random,
        "nearly_one": eye + 1e-3 * random,
        "ill": (eye + 0.3 * random) * torch.logspace(-4, 0, n, dtype=DOUBLE, device=harness.DEVICE),
        "skew": 0.1 * eye + random - random.mT,
    }
    return made[kind].to(dtype)


def applied(matrix):
    """The product with a matrix of every row, whose bits depend on that row alone."""
    return lambda v: (matrix * v.unsqueeze(-2)).sum(-1)


def solved_alike(matvec, b, close=(1e-9, 1e-11), **options):
    """The answer by kernels, which is that by torch."""
    found, expected = (method(**options).solve(matvec, b) for method in (gmres.TritonGMRES, GMRES))
    for name in ("status", "num_steps"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist(), name
    for name in ("value", "tolerance"):
        assert_close(getattr(found, name), getattr(expected, name), rtol=close[0], atol=close[1], equal_nan=True)
    return found


@cases(
    one={"lead": (), "n": 33},
    batch={"lead": (2, 2), "n": 12},
    one_number={"lead": (3,), "n": 1},
    in_parts={"lead": (2,), "n": 1030, "rtol": 1e-6},
    in_three_parts={"lead": (1,), "n": 2100, "rtol": 1e-6},
    second_passes={"lead": (4,), "n": 40, "kind": "nearly_one", "rtol": 1e-12},
    second_passes_in_parts={"lead": (2,), "n": 1100, "kind": "nearly_one", "rtol": 1e-12},
    ill_conditioned={"lead": (2,), "n": 20, "kind": "ill", "rtol": 1e-8, "close": (1e-3, 1e-3)},
    many_steps={"lead": (1,), "n": 50, "kind": "skew", "restart": 60, "rtol": 1e-8},
    restarts={"lead": (2,), "n": 33, "restart": 5, "rtol": 1e-7},
    one_step={"lead": (2,), "n": 33, "restart": 1, "rtol": 1e-2},
    few_steps={"lead": (4,), "n": 33, "max_steps": 4},
    looks_rarely={"lead": (2,), "n": 12, "check_every": 7},
)
def gmres_is_that_of_torch(lead, n, kind="random", rtol=1e-9, **options):
    found = solved_alike(applied(matrices(lead, n, kind)), drawn(*lead, n, seed=4), rtol=rtol, **options)
    assert bool(found.converged.all()) == ("max_steps" not in options)


@cases(
    one={"n": 33},
    parts={"n": 1030},
    second_passes={"n": 33, "kind": "nearly_one"},
    restarts={"n": 33, "restart": 6},
)
def gmres_in_single_precision(n, kind="random", **options):
    b = drawn(2, n, dtype=FP32, seed=4)
    found = solved_alike(applied(matrices((2,), n, kind, FP32)), b, close=(1e-4, 1e-4), rtol=1e-5, **options)
    assert bool(found.converged.all())


@cases(one={"n": 33}, parts={"n": 1030})
def gmres_estimates_are_those_of_torch(n):
    """Every step: the residual, the verdict, the steps and the correction."""
    matrix, b = matrices((4,), n), drawn(4, n, seed=4)
    matrix[1] = 0.0
    live = torch.tensor([True, True, True, False], device=harness.DEVICE)
    taken = torch.tensor([0, 0, 6, 0], device=harness.DEVICE)
    for steps in (1, 2, 5, 10):
        given = applied(matrix), b, live, 1e-3 * b.norm(dim=-1), taken, steps
        methods = (method(restart=steps, check_every=4) for method in (gmres.TritonGMRES, GMRES))
        (one, *ours), (two, *theirs) = (method._sweep(*given) for method in methods)
        assert_close(one.residual_norm, two.residual_norm, rtol=1e-10, atol=1e-12)
        assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-12)
        assert one.verdict.tolist() == two.verdict.tolist()
        assert ours[1].tolist() == theirs[1].tolist()
        assert bool((ours[0][3] == 0).all())


@cases(one={"n": 33}, parts={"n": 1030}, single={"n": 33, "dtype": FP32}, single_in_parts={"n": 1030, "dtype": FP32})
def gmres_keeps_a_basis_that_needs_second_passes_orthonormal(n, dtype=DOUBLE):
    unit, basis = torch.finfo(dtype).eps, []
    b, factors = drawn(2, n, dtype=dtype, seed=4), 256 * unit * drawn(2, n, dtype=dtype, seed=3).tanh()

    def product(v):
        basis.append(v.clone())
        return v - factors * v.flip(-1)

    # No residual is below an aim of -1.
    none = torch.zeros_like(b[:, 0])
    gmres.TritonGMRES(check_every=4)._sweep(product, b, none == 0, none - 1, none.long(), 12)
    vectors = torch.stack(basis, 1).double()
    eye = torch.eye(12, dtype=DOUBLE, device=harness.DEVICE).expand(2, -1, -1)
    assert_close(vectors @ vectors.mT, eye, rtol=0, atol=64 * unit)


@case
def gmres_shows_a_product_zeros_for_rows_at_rest():
    matrix, b, seen = matrices((3,), 12), drawn(3, 12, seed=4), []
    matrix[0], matrix[1] = 2 * torch.eye(12), 0.0

    def product(v):
        seen.append((v != 0).any(-1).tolist())
        return applied(matrix)(v)

    none = torch.zeros_like(b[:, 0])
    with Poison():
        gmres.TritonGMRES(check_every=4)._sweep(product, b, none == 0, none + 1e-9, none.long(), 5)
    assert seen == [[True] * 3, *[[False, False, True]] * 4]


@cases(one={"n": 33}, parts={"n": 1030})
def gmres_ends_every_row_for_its_own_reason(n):
    matrix, b = matrices((7,), n), drawn(7, n, seed=4)
    matrix[0] = torch.eye(n)  # a space of one vector
    matrix[1] = 0.0
    matrix[2] = torch.diag(torch.arange(n) % 2 + 1.0)  # a space of two
    matrix[3, 1] = matrix[3, 0]  # singular, of a right-hand side that has no answer
    b[4] = 0.0
    b[5, 0] = torch.nan
    matrix[6, 0, 0] = torch.nan
    found = solved_alike(applied(matrix), b, max_steps=24, restart=8, rtol=1e-5, close=(1e-2, 1e-2))
    ends = [Status.CONVERGED, Status.STALLED, Status.CONVERGED, Status.CONVERGED, Status.NONFINITE, Status.NONFINITE]
    assert found.status[[0, 1, 2, 4, 5, 6]].tolist() == ends
    assert int(found.status[3]) > Status.UNSTABLE
    assert found.num_steps[[0, 2, 4]].tolist() == [1, 2, 0]
    assert bool((found.value[4] == 0).all())
    assert bool(found.value[5:].isnan().all())
    assert bool(found.value[:5].isfinite().all())


@cases(one={"n": 33}, parts={"n": 1030})
def gmres_gives_a_row_the_bits_of_any_neighbours(n):
    kinds = [matrices((2,), n, kind) for kind in ("random", "nearly_one")]
    b = drawn(4, n, seed=4)
    method = gmres.TritonGMRES(rtol=1e-5, restart=8)
    first = method.solve(applied(torch.cat(kinds)), b)
    # Others need more steps, or meet a NaN.
    others = torch.cat([kinds[0][:1], 0.4 * matrices((1,), n), kinds[1][:1], kinds[1][1:] * torch.nan])
    second = method.solve(applied(others), b)
    for name in ("value", "residual", "status", "num_steps"):
        assert torch.equal(getattr(first, name)[[0, 2]], getattr(second, name)[[0, 2]]), name
    alone = method.solve(applied(kinds[1][:1]), b[2:3])
    assert torch.equal(alone.value[0], first.value[2])
    assert int(first.num_steps[0]) > 2 * int(first.num_steps[2])


@case
def gmres_calls_a_pivot_small_beside_the_largest_product():
    least = 5e3 * torch.finfo(DOUBLE).eps
    matrix = torch.tensor([[0.0, least], [1e3, 0.0]], dtype=DOUBLE, device=harness.DEVICE)
    found = solved_alike(applied(matrix), torch.eye(2, dtype=DOUBLE, device=harness.DEVICE)[0])
    assert int(found.status) == Status.STALLED


@case
def gmres_gives_up_products_whose_length_overflows():
    matrix = 1e20 * torch.tensor([[2.0, 1.0], [-1.0, 3.0]], device=harness.DEVICE)
    found = solved_alike(applied(matrix), torch.ones(1, 2, device=harness.DEVICE), rtol=1e-5)
    assert int(found.status) == Status.STALLED


@cases(small={"size": 1e-25}, large={"size": 1e25})
def gmres_solves_right_hand_sides_of_any_size(size):
    b = (size * drawn(3, 20, seed=4)).to(FP32)
    found = solved_alike(applied(matrices((3,), 20, dtype=FP32)), b, close=(1e-4, 1e-4 * size), rtol=1e-5)
    assert bool(found.converged.all())


@case
def gmres_reads_products_of_any_strides():
    matrix, b = matrices((2,), 12), drawn(2, 12, seed=4)
    product, turned = applied(matrix), drawn(12, 2, seed=4).T
    for matvec in (lambda v: torch._neg_view(-product(v)), lambda v: product(v).T.contiguous().T):
        solved_alike(matvec, b, rtol=1e-9)
    solved_alike(product, turned, rtol=1e-9)
    solved_alike(lambda v: v, b)
    assert b.new_zeros(0, 4).shape == gmres.TritonGMRES().solve(lambda v: v, b.new_zeros(0, 4)).value.shape


SWEEP = ("_project_kernel", "_rotate_kernel", "_correct_kernel")


class Unseen:
    """A kernel whose launches no mode sees, but are named."""

    def __init__(self, name, names):
        self.right, self.name, self.names = getattr(gmres, name), name, names

    def __getitem__(self, grid):
        def launch(*given, **options):
            self.names.append(self.name)
            with _disable_current_modes():
                return self.right[grid](*given, **options)

        return launch


@contextlib.contextmanager
def launches():
    """The kernels of sweeps that are launched."""
    names = []
    with mock.patch.multiple(gmres, **{name: Unseen(name, names) for name in SWEEP}):
        yield names


@contextlib.contextmanager
def with_kernels(used=True):
    """The kernels of sweeps that are launched where the device of the cases is a card, or is none."""
    devices = (torch.device(harness.DEVICE).type,) if used else ()
    with mock.patch.object(_solve, "TRITON_DEVICES", devices), launches() as names:
        yield names


@cases(picard={"method": Picard}, anderson={"method": Anderson})
def gmres_of_a_block_has_its_gradient(method):
    block = torch.nn.Linear(8, 8, dtype=DOUBLE, device=harness.DEVICE)
    torch.nn.init.orthogonal_(block.weight, 0.7)
    layer, x = Equilibrium(Mixed(block), solver=method(rtol=1e-9)), drawn(2, 2, 8).requires_grad_()
    gradients, steps = [], []
    for used in (True, False):
        with with_kernels(used) as names:
            layer(x).square().sum().backward()
        adjoint = layer.last_solve.adjoint
        assert adjoint.status.tolist() == [Status.CONVERGED] * 2
        gradients.append((block.weight.grad, x.grad))
        steps.append(adjoint.num_steps.tolist())
        block.weight.grad = x.grad = None
        assert (names.count("_rotate_kernel") >= max(steps[0]) > 3) if used else not names
    assert_close(*gradients, rtol=1e-7, atol=1e-9)
    assert steps[0] == steps[1]


@case
def gmres_of_second_derivatives():
    x, weight, answers = drawn(2, 6), 0.2 * drawn(6, 6, seed=1), []

    def value(x):
        f = FixedPointMap(lambda z, x: torch.tanh(z @ weight + x), PerSample(x), event_ndim=1)
        return ia.solve(f, torch.zeros_like(x), solver=Anderson(rtol=1e-11)).value.square().sum()

    for used in (True, False):
        with with_kernels(used) as names:
            given = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(value(given), given, create_graph=True)
            first = len(names)
            (bend,) = torch.autograd.grad(slope.square().sum(), given)
            turned = torch.func.vmap(torch.func.grad(lambda row: value(row[None])))(x)
        assert (len(names) > first > 0) == used
        answers.append((slope.detach(), bend, turned))
    assert_close(*answers, rtol=1e-8, atol=1e-10)
    assert_close(answers[0][0], answers[0][2], rtol=1e-8, atol=1e-10)


@cases(one={"n": 9}, parts={"n": 1030})
def gmres_is_all_between_two_products(n):
    factors, b = 0.5 * drawn(3, n, seed=3).tanh(), drawn(3, n, seed=4)
    found = []
    for steps in (2, 6):
        method = gmres.TritonGMRES(rtol=0, atol=0, max_steps=steps, check_every=100)
        with launches() as names, Launched() as launched:
            method.solve(lambda v: v - factors * v.flip(-1), b)
        assert collections.Counter(names) == dict(zip(SWEEP, (2 * steps, steps, 1), strict=True))
        found.append(collections.Counter(launched.names))
    # Of each of four products the operations of its own.
    assert found[1] - found[0] == {"flip.default": 4, "mul.Tensor": 4, "sub.Tensor": 4}


@case
def gmres_that_is_wrong_is_not_used():
    x, right = drawn(3, 8), gmres.TritonGMRES._sweep

    def wrong(self, *given):
        state, correction, num_steps = right(self, *given)
        return state, 1.01 * correction, num_steps

    with mock.patch.object(gmres.TritonGMRES, "_sweep", wrong), mock.patch.dict(trust._found, clear=True):
        with with_kernels():
            method = _solve.Route(Picard(), "auto", False, DOUBLE).linear_solver(GMRES(), x)
        assert not method.trusts(x, 30)
        (refused,) = (known for use, known in trust._found.items() if "GMRES" in use.kernel)
        assert refused.verdict == "refused"
        assert "correction is off by" in refused.reason


@case
def gmres_that_kernels_do_not_take():
    x = drawn(3, 40)
    with with_kernels():
        way = _solve.Route(Picard(), "auto", False, DOUBLE)
        method = way.linear_solver(GMRES(rtol=1e-3), x)
        assert method.rtol == 1e-3
        assert method.trusts(x, 30)
        assert not method.trusts(x, 300)
        # The matrices of many short rows would take more memory than the vectors.
        assert not method.trusts(x.new_empty(1).expand(2**16, 4), 30)
        assert type(way.linear_solver(MINRES(), x)) is MINRES
        with Launched():
            assert type(way.linear_solver(GMRES(), x)) is GMRES

"""Cases for the adjoint solve, against dense matrices and autograd."""

import torch
import triton_harness as harness
from half_emulation import Half
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
from triton_oracle import EPS, Dense, adjoint
from triton_solve_cases import STOP, check_solved, solve

from implicit_attention import Status, _solve
from implicit_attention.kernels import AdjointAnswer
from implicit_attention.kernels.problem import AdjointRule, Attention


def at_solution(problem, steps=60):
    """A state near the solution with its exact mean and log-sum-exp, rounded to float32."""
    dense = Dense.of(problem)
    z = problem.query.double()
    for _ in range(steps):
        z = dense.mapped(dense.attend(z)[0])
    z = z.float()
    mean, logsumexp = dense.attend(z.double())
    return dense, z, mean.float(), logsumexp.float()


def hessian_in(dtype, dense, z, v):
    """The product as plain torch computes it: operands of `dtype`, sums in float32."""
    attend = dense.attend_in(dtype)
    mean, logsumexp = attend(z)
    keys = dense.keys.float()
    p = (dense.beta.float() * (z.to(dtype).float() @ keys.mT) + dense.bias.float() - logsumexp[..., None]).exp()
    t = v.to(dtype).float() @ keys.mT
    covered = (p * t).to(dtype).float() @ keys - mean * (mean * v).sum(-1, keepdim=True)
    return v - ((1 - dense.anchor) * dense.beta).float() * covered


def solve_adjoint(problem, state, cotangent, mean, logsumexp, stop, **options):
    from implicit_attention.kernels.triton.adjoint import solve_adjoint as kernel

    with Poison():
        answer = kernel(problem, state, cotangent, mean, logsumexp, stop, **options)
    assert bool((answer.status != MAGIC).all())
    assert bool((answer.num_steps != MAGIC).all())
    return answer


def rtol_of(dtype):
    return 1e-5 if dtype == FP32 else 3e-3


def check_adjoint(problem, factor=1.0):
    dtype = problem.keys.dtype
    dense, z, mean, logsumexp = at_solution(problem)
    cotangent = (torch.randn(z.shape) * factor).to(harness.DEVICE)
    answer = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(rtol_of(dtype), 60))
    assert not bool(answer.negative_curvature.any())
    assert bool((answer.status == Status.CONVERGED).all()), answer.status.unique()
    exact, gradients = adjoint(dense, problem, z.double(), cotangent.double())
    hessian = dense.hessian(z.double())
    # An error of the product by `noise` leaves that in the residual.
    there, value = (z, mean, logsumexp), (exact / factor).float()
    if dtype == FP32:
        rough = hessian_in(dtype, dense, z, value)
    else:
        half = Half(dense, dtype)
        rough = half.product(*there, value, torch.zeros_like(logsumexp, dtype=torch.bool))
    rough = rough.double() - cotangent.double() / factor
    noise = factor * rough.norm(dim=-1) / cotangent.double().norm(dim=-1)
    allowed = (rtol_of(dtype) + 2 * noise) * cotangent.double().norm(dim=-1)
    residual = (cotangent.double() - (hessian @ answer.value.double()[..., None])[..., 0]).norm(dim=-1)
    worst = (residual / allowed).max().item()
    assert worst <= 2, f"A u is wrong by {worst:.1f} times what is allowed"
    assert bool((answer.tolerance / cotangent.double().norm(dim=-1) / rtol_of(dtype) - 1).abs().max() < 1e-5)
    by_keys, by_beta = gradients(answer.value.double())
    # Where all keys are one, rounding leaves something of their covariance.
    one = bool((problem.keys == problem.keys[..., :1, :]).all())
    left = 1e-5 + (EPS * problem.keys.shape[-1] ** 1.5 if one else 0.0)
    # In half precision the emulation carries the same u, and measures it.
    plain = answer if dtype == FP32 else half.answer(*there, cotangent, answer.value)
    if dtype != FP32:
        check_error("residual", *(t / factor for t in (answer.residual, plain.residual, residual)), terms=1.0)
    for what, right in (("by_keys", by_keys), ("by_beta", by_beta)):
        value, near = getattr(answer, what), getattr(plain, what).sum_to_size(right.shape)
        wrong, size = error(value, right) / factor, right.square().mean().sqrt().item() / factor
        allowed = 2e-6 * size + left + (0.0 if dtype == FP32 else 1.5 * error(near, right) / factor)
        assert wrong <= allowed, f"{what} of size {size:.1e} is wrong by {wrong:.1e}, {allowed:.1e} is allowed"
    return answer


@cases(**SHAPES)
def adjoint_shape(**shape):
    check_adjoint(shape_problem(**shape))


@cases(**{name: dict(name=name) for name in MASKS})
def adjoint_mask(name):
    check_adjoint(masked_problem(name))


@case
def adjoint_keys_of_every_other_axis():
    options = dict(
        lead=(2, 3, 2, 2), keys_lead=(2, 1, 2, 1), n=5, m=7, dim=16, beta=[[[0.3], [0.4]]], anchor=[0.5, 0.6]
    )
    problem = problem_of(**options)
    problem = problem.paired((torch.rand(3, 1, 2, *problem.query.shape[-2:-1], 1) < 2).to(harness.DEVICE))
    check_solved(problem, solve(problem, problem.query))
    check_adjoint(problem)


@case
def adjoint_scores_in_parts():
    """The tiles of earlier cards, whose scores are products of some dimensions at once."""
    from implicit_attention.kernels.triton import layout

    if harness.DEVICE == "cuda":
        return
    tables = {kernel: dict(table) for kernel, table in layout.TILES.items()}
    # In half precision queries are rounded where the gradient of keys reads them.
    of_parts = [kernel for kernel in tables if not kernel[1] or kernel[0] == "keys"]
    try:
        for kernel in of_parts:
            layout.TILES[kernel] = {size: tile._replace(part=16) for size, tile in tables[kernel].items()}
        for options in ({"dim": 40}, {"dim": 64, "first": 3}, {"dim": 64, "dtype": FP16}):
            problem = problem_of(lead=(2,), **options)
            check_solved(problem, solve(problem, problem.query))
            check_adjoint(problem)
    finally:
        layout.TILES.update(tables)


@case
def adjoint_signs_kept_aside():
    problem = problem_of(lead=(2,), dim=16)
    _, z, mean, logsumexp = at_solution(problem)
    cotangent, stop = torch.randn(z.shape).to(harness.DEVICE), AdjointRule(1e-5, 60)
    plain = solve_adjoint(problem, z, cotangent, mean, logsumexp, stop)
    aside = problem._replace(keys=sign_aside(problem.keys), anchor=sign_aside(problem.anchor))
    found = solve_adjoint(aside, *(sign_aside(t) for t in (z, cotangent, mean, logsumexp)), stop)
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


@cases(
    fp16_large=dict(dtype=FP16, factor=1e7),
    fp16_small=dict(dtype=FP16, factor=1e-12),
    bf16_small=dict(dtype=BF16, factor=1e-12),
    fp32_tiny=dict(dtype=FP32, factor=1e-30),
    fp32_huge=dict(dtype=FP32, factor=1e30),
)
def adjoint_scale(dtype, factor):
    check_adjoint(problem_of(lead=(2, 2), keys_lead=(1, 2), n=20, m=33, dim=16, dtype=dtype), factor)


@case
def adjoint_ends():
    problem = problem_of(lead=(2,), n=20, m=33, dim=16)
    dense, z, mean, logsumexp = at_solution(problem)
    cotangent = torch.randn(z.shape).to(harness.DEVICE)
    cotangent[0, 3] = 0.0
    clean = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    assert clean.num_steps[0, 3] == 0
    assert clean.status[0, 3] == Status.CONVERGED
    assert bool((clean.value[0, 3] == 0).all())
    cotangent[1, 4, 2] = torch.nan
    broken = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    others = torch.ones_like(clean.status, dtype=torch.bool)
    others[1, 4] = False
    for field, before in zip(broken[:-1], clean[:-1], strict=True):
        assert torch.equal(field[others], before[others])
    assert broken.status[1, 4] == Status.NONFINITE
    assert bool(broken.value[1, 4].isnan().all())
    assert torch.equal(broken.by_keys[0], clean.by_keys[0])
    there = z.clone(), mean.clone(), logsumexp.clone()
    for measured in there:
        measured[1, 4] = torch.nan
    # What has no cotangent carries nothing, whatever else it holds.
    cotangent[1, 4] = 0.0
    unread = solve_adjoint(problem, there[0], cotangent, *there[1:], AdjointRule(1e-5, 60))
    without = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    assert unread.status[1, 4] == Status.CONVERGED
    for field, before in zip(unread, without, strict=True):
        assert torch.equal(field, before)
    cotangent[1, 4] = torch.inf
    assert solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60)).status[1, 4] == Status.NONFINITE
    cotangent[1, 4] = 0.0
    short = solve_adjoint(problem, z, cotangent.nan_to_num(), mean, logsumexp, AdjointRule(1e-5, 2))
    assert int(short.num_steps.max()) == 2
    assert bool((short.status == Status.MAX_STEPS).any())
    exact = cotangent.nan_to_num().double() - (dense.hessian(z.double()) @ short.value.double()[..., None])[..., 0]
    assert error(short.residual, exact.norm(dim=-1)) < 1e-5


@case
def adjoint_negative_curvature():
    # Half-way between the only two keys, beta |k - k'|^2/4 > 1: a saddle.
    torch.manual_seed(0)
    n, dim = large(20), 16
    keys = torch.randn(1, 2, dim)
    field = torch.randn(1, n, dim)
    problem = Attention(field, keys, 0.5, 0.0)
    problem = problem._replace(query=field.to(harness.DEVICE), keys=keys.to(harness.DEVICE))
    z = keys.mean(-2, keepdim=True).expand(1, n, dim).clone()
    z[:, ::2] = keys[:, :1]
    dense, z = Dense.of(problem), z.to(harness.DEVICE)
    mean, logsumexp = (t.float() for t in dense.attend(z.double()))
    cotangent = torch.randn(z.shape).to(harness.DEVICE)
    answer = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    saddle = torch.linalg.eigvalsh(dense.hessian(z.double()))[..., 0] < 0
    assert torch.equal(answer.negative_curvature, saddle)
    assert bool(saddle[:, 1::2].all())
    assert not bool(saddle[:, ::2].any())
    assert bool((answer.value[saddle] == 0).all())
    assert bool((answer.by_beta[saddle] == 0).all())
    assert bool((answer.status[saddle] == Status.STALLED).all())
    assert error(answer.residual[saddle], cotangent.norm(dim=-1)[saddle]) < 1e-5
    exact, gradients = adjoint(dense, problem, z.double(), cotangent.double())
    kept = exact.masked_fill(saddle[..., None], 0.0)
    assert error(answer.value, kept) < 1e-5
    assert error(answer.by_keys, gradients(kept)[0]) < 1e-5
    # The operation has another method answer them, and says what they are.
    operation = torch.ops.implicit_attention.hopfield_adjoint
    numbers = (torch.full((1, 1, 1), number, device=harness.DEVICE) for number in problem[2:4])
    given = (*problem[:2], *numbers, None, None, z, cotangent, 1e-5, 60, "triton", "ignore")
    whole = AdjointAnswer._make(operation(*given))
    assert bool((whole.status[saddle] == Status.UNSTABLE).all())
    assert bool((whole.status[~saddle] == Status.CONVERGED).all())
    assert error(whole.value, exact) < 1e-4
    assert error(whole.by_keys, gradients(exact)[0]) < 1e-4
    # Where the host cannot look they are NaN, and so is what they are a part of.
    blind = _solve.unanswered(answer, saddle)
    assert torch.equal(blind.value.isnan().all(-1), saddle)
    assert torch.equal(blind.by_beta.isnan(), saddle)
    assert bool(blind.by_keys.isnan().all())


@case
def adjoint_of_every_scale_is_the_same():
    problem = problem_of(lead=(2,), n=20, m=33, dim=16)
    _, z, mean, logsumexp = at_solution(problem)
    cotangent = torch.randn(z.shape).to(harness.DEVICE)
    there = mean, logsumexp, AdjointRule(1e-5, 60)
    whole = solve_adjoint(problem, z, cotangent, *there)
    for exponent in (115, 70, -70, -85):
        scaled = solve_adjoint(problem, z, cotangent * 2.0**exponent, *there)
        assert torch.equal(scaled.status, whole.status)
        assert torch.equal(scaled.num_steps, whole.num_steps)
        for name in ("value", "residual", "tolerance", "by_beta", "by_keys"):
            assert torch.equal(getattr(scaled, name), getattr(whole, name) * 2.0**exponent), (name, exponent)
    tiny = solve_adjoint(problem, z, cotangent * 2.0**-140, *there)
    assert bool((tiny.status == Status.CONVERGED).all())
    # Relative to the digits that such a number has.
    assert error(tiny.value.double() * 2.0**140, whole.value) < 2.0**-7


@case
def adjoint_large_bias_of_all_keys():
    """Rows of a tile that do not exist add nothing, whatever the bias of keys."""
    problem = problem_of(lead=(2,), n=5, m=34, dim=16, exact=True)
    dense, z, mean, logsumexp = at_solution(problem)
    pairs = torch.full((1, 1, 34), 200.0, device=harness.DEVICE)
    answer = solve_adjoint(problem.paired(pairs), z, z, mean, logsumexp + 200.0, AdjointRule(1e-5, 60))
    by_keys, _ = adjoint(dense, problem, z.double(), z.double())[1](answer.value.double())
    assert error(answer.by_keys, by_keys) <= 1e-3 * by_keys.square().mean().sqrt().item()


@case
def adjoint_tiny_beside_none():
    """A query without a cotangent does not set the units in which its neighbours' tiny ones are multiplied."""
    problem = problem_of(lead=(2,), n=20, dim=16, dtype=FP16)
    dense, z, mean, logsumexp = at_solution(problem)
    cotangent = 1e-28 * z
    cotangent[:, ::2] = 0
    answer = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(rtol_of(FP16), 60))
    by_keys, _ = adjoint(dense, problem, z.double(), cotangent.double())[1](answer.value.double())
    assert error(answer.by_keys * 1e28, by_keys * 1e28) <= 0.02 * (by_keys * 1e28).square().mean().sqrt().item()


@case
def adjoint_nothing():
    problem = problem_of(lead=(2,), n=0, m=5, dim=16)
    z = torch.zeros(2, 0, 16, device=harness.DEVICE)
    answer = solve_adjoint(problem, z, z, z, z[..., 0], AdjointRule(1e-5, 9))
    assert bool((answer.by_keys == 0).all())
    assert answer.by_keys.shape == problem.keys.shape
    problem = problem_of(lead=(2,), n=3, m=0, dim=16)
    z = torch.randn(2, problem.query.shape[-2], 16).to(harness.DEVICE)
    answer = solve_adjoint(problem, z, z, torch.zeros_like(z), torch.zeros_like(z[..., 0]), AdjointRule(1e-5, 9))
    assert error(answer.value, z) < 1e-6
    assert answer.by_keys.shape == problem.keys.shape


# Masks whose pairs stand in tiles of every kind.


@cases(**{name: dict(name=name) for name in TILED_MASKS}, causal=dict(name="documents", first=20))
def adjoint_tiles(name, **options):
    check_adjoint(tiled_problem(name, **options))


@case
def adjoint_reads_no_tile_that_is_masked():
    problem = tiled_problem("documents")
    problem.pairs[..., : large(35)] = False
    _, z, mean, logsumexp = at_solution(problem)
    cotangent = torch.randn(z.shape).to(harness.DEVICE)
    clean = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    problem.keys[..., :32, :] = torch.nan
    found = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    for field, before in zip(found, clean, strict=True):
        assert torch.equal(field, before)
    assert bool((found.by_keys[..., :32, :] == 0).all())


def blocks(*lead, n=20, m=40):
    """Masks with tiles of 16 x 16 of every kind, other ones for every entry."""
    kinds = torch.randint(0, 3, (*lead, -(-n // 16), -(-m // 16)))
    kinds = kinds.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., :n, :m]
    return (kinds == 2) | ((kinds == 1) & (torch.rand(*lead, n, m) < 0.5))


MASK_LAYOUTS = {
    "samples": dict(mask=lambda: blocks(2, 1)),
    "heads": dict(mask=lambda: blocks(1, 3)),
    "transposed": dict(mask=lambda: blocks(3, 2).transpose(0, 1)),
    "expanded": dict(mask=lambda: blocks(1, 3).expand(2, 3, 20, 40), keys_lead=(2, 1)),
    "three_axes": dict(mask=lambda: blocks(2, 2, 2).permute(2, 0, 1, 3, 4), lead=(2, 2, 2), keys_lead=(2, 1, 2)),
    "keys_of_samples": dict(mask=lambda: blocks(2, 1, n=1)),
    "keys_of_heads_causal": dict(mask=lambda: blocks(1, 3, n=1), keys_lead=(2, 1), first=5),
    "rows_alike": dict(mask=lambda: blocks(2, 3, n=1).expand(2, 3, 20, 40)),
    "columns_alike": dict(mask=lambda: blocks(2, 3)[..., :1].expand(2, 3, 20, 40), first=3),
    "bias_causal": dict(mask=lambda: torch.zeros(2, 1, 20, 40).masked_fill(~blocks(2, 1), -torch.inf), first=7),
}


@cases(**{name: dict(name=name) for name in MASK_LAYOUTS})
def solve_mask_laid_out(name):
    from implicit_attention.kernels.triton import layout

    options = {"lead": (2, 3), **MASK_LAYOUTS[name]}
    mask = options.pop("mask")
    # At twice the inverse temperature queries of three keys end on saddles.
    problem = problem_of(**options | {"n": 20, "m": 40, "dim": 16, "beta": 0.3})
    tables = {kernel: dict(table) for kernel, table in layout.TILES.items()}
    if harness.DEVICE == "cuda":
        return
    layout.TILES.update({kernel: {max(table): layout.Tiles(16, 16, 1, 1)} for kernel, table in tables.items()})
    try:
        problem = problem.paired(mask())
        stop = STOP._replace(max_steps=6)
        check_solved(problem, solve(problem, problem.query, stop), stop)
        check_adjoint(problem)
    finally:
        layout.TILES.update(tables)

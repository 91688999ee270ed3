"""Cases for half precision: what the kernels say is true in float64, and they are what the emulation is."""

import math
import random

import torch
from half_emulation import ADJOINT_RTOL, FLOOR, SETTINGS, Accuracy, Half, noise
from triton_adjoint_cases import AdjointRule, solve_adjoint
from triton_harness import BF16, FP16, case, cases, error, guarded, problem_of, wide_tiles
from triton_oracle import Dense
from triton_oracle import adjoint as exact_adjoint
from triton_solve_cases import STOP, check_solved, solve

from implicit_attention import Status
from implicit_attention.kernels import Attention

#: Problems that are drawn at once, how often, and how many of these draws every suite makes.
SETS, DRAWS, FIRST = 8, 125, 8
LEADS = ((8,), (8,)), ((2, 4), (2, 1)), ((4, 2), (1, 2)), ((2, 2, 2), (2, 2, 2)), ((2, 2, 2), (2, 1, 1))


def drawn(dtype, seed):
    """Eight problems of one shape, each with its scale, temperature and anchor, and a rule."""
    chance, numbers = random.Random(seed), torch.Generator().manual_seed(seed)

    def sizes(least, most):
        return round(math.exp(chance.uniform(math.log(least), math.log(most))))

    def normal(*shape):
        return torch.randn(shape, generator=numbers)

    def uniform(shape, low, high):
        return low + (high - low) * torch.rand(shape, generator=numbers)

    lead, keys_lead = chance.choice(LEADS)
    n, m, dim = sizes(1, 40), sizes(1, 300), chance.choice((sizes(1, 64), sizes(1, 64), sizes(1, 64), 64, 128, 256))
    kind = chance.choice(("Gaussian", "clustered", "shifted", "outlier", "sparse"))
    keys, query = normal(*keys_lead, m, dim), normal(*lead, n, dim)
    if kind == "clustered":
        keys = 0.3 * keys + normal(*keys_lead, 5, dim)[..., torch.arange(m) % 5, :]
    elif kind == "shifted":
        keys = keys + 4
    elif kind == "outlier":
        keys[..., m // 2, :] *= 20
    elif kind == "sparse":
        keys = keys * (torch.rand(keys.shape, generator=numbers) < 0.2)
    if chance.random() < 0.5:
        # Queries beside keys.
        query = 0.3 * query + keys.expand(*lead, m, dim)[..., torch.arange(n) % m, :]
    # float16 has few digits below 2^-14, and no numbers beyond 2^16.
    low, high = (-20, 12 if kind != "outlier" else 8) if dtype == FP16 else (-60, 60)
    scale = 2 ** uniform((*keys_lead, 1, 1), low, high).round()
    beta = torch.exp(uniform((*lead, 1, 1), math.log(0.3), math.log(12.0))) / dim**0.5 / scale.square()
    anchor = uniform(lead, 0.0, 0.9) * (torch.rand(lead, generator=numbers) < 0.7)
    if kind == "shifted":
        beta = beta / 4
    query, keys = scale * query, (scale * keys).to(dtype)
    if chance.random() < 0.7:
        query = query.to(dtype)
    if broken := chance.random() < 0.1:
        query[(0,) * len(lead)][0] = torch.nan
    first = chance.choice((None, None, None, 0, m // 2))
    problem = Attention.of(guarded(query), guarded(keys), beta[..., 0, 0], anchor, None, first)
    masked, rows = chance.choice(("", "", "", "mask", "bias")), chance.choice((1, n))
    if masked:
        pairs = torch.rand((*(1,) * (len(lead) - 1), lead[-1], rows, m), generator=numbers) < 0.7
        if masked == "bias":
            pairs = normal(*pairs.shape).masked_fill(~pairs, -torch.inf)
        problem = problem.paired(pairs)
    rtol, atol = chance.choice((1e-2, 1e-3, 1e-4, 1e-5)), chance.choice((0.0, 0.0, 0.0, 1e-4)) * float(scale.min())
    return problem, STOP._replace(rtol=rtol, atol=atol, max_steps=40), broken


def excess(problem, solved, stop):
    """By how many tolerances the true residuals are too large, (*batch, N), with what float32 cannot tell allowed."""
    dense, z = Dense.of(problem), solved.state.double().nan_to_num()
    f = dense.mapped(dense.attend(z)[0])
    true, length = (f - z).norm(dim=-1), f.norm(dim=-1)
    return (true - noise(dense, z)) / (stop.atol + stop.rtol * length).clamp(min=1e-300)


def tried(dtype, seeds, told=print):
    """Solve what is drawn; how many problems there are, how many have a solution, and in how many one is none."""
    problems = some = wrong = 0
    for seed in seeds:
        problem, stop, broken = drawn(dtype, seed)
        solved = solve(problem, problem.query.float(), stop)
        born = torch.zeros_like(solved.status, dtype=torch.bool)
        born.view(-1)[0] = broken
        assert torch.equal(solved.state.isnan().any(-1), born), seed
        assert torch.equal(solved.status == Status.NONFINITE, born), seed
        over = excess(problem, solved, stop)
        converged = (solved.status == Status.CONVERGED).flatten(0, -2)
        false = converged & (over.flatten(0, -2) > 1)
        problems, some, wrong = problems + SETS, some + int(converged.any(-1).sum()), wrong + int(false.any(-1).sum())
        if false.any():
            told(seed, stop, tuple(problem.keys.shape), float(over.flatten(0, -2)[false].max()))
    return problems, some, wrong


@cases(
    **{
        f"{name}_{part}": dict(dtype=dtype, seeds=seeds)
        for name, dtype in (("fp16", FP16), ("bf16", BF16))
        for part, seeds in (("first", range(FIRST)), ("rest", range(FIRST, DRAWS)))
    }
)
def half_random(dtype, seeds):
    """CONVERGED is said of no state whose true residual is above its tolerance; NaN is where it was."""
    found = []
    problems, some, wrong = tried(dtype, seeds, lambda *words: found.append(words))
    assert some > 0.7 * problems, f"solved {some} of {problems}"
    assert not wrong, f"{wrong} of {problems}: {found}"


EMULATED = {
    "several_tiles": dict(lead=(2,), n=40, m=90),
    "grouped_causal": dict(lead=(2, 2), keys_lead=(2, 1), n=20, m=70, dim=5, first=30),
    "wide": dict(lead=(1,), n=40, m=70, dim=128, beta=1.5),
    "masked": dict(lead=(2,), n=30, m=50, dim=16, mask=True),
}


@cases(
    **{
        f"{short}_{name}": dict(dtype=dtype, **options)
        for short, dtype in (("fp16", FP16), ("bf16", BF16))
        for name, options in EMULATED.items()
    }
)
def half_is_emulated(dtype, mask=False, **options):
    """One coarse evaluation, budgets whose last evaluation is fine, and solves to fine tolerances."""
    problem = problem_of(dtype=dtype, exact=True, **options)
    if mask:
        problem = problem.paired(torch.rand(1, *problem.query.shape[-2:-1], problem.keys.shape[-2]) < 0.6)
    dense = Dense.of(problem)
    budget = STOP._replace(rtol=0.0, max_steps=1)
    moved, near = solve(problem, problem.query, budget).state, Half(dense, dtype).solve(problem.query, budget).state
    exact = dense.mapped(dense.attend(problem.query.double())[0])
    ours, theirs = error(moved, exact), error(near, exact)
    assert 0.5 * theirs < ours < 1.5 * theirs, (ours, theirs)
    for rtol, steps in ((0.0, 1), (0.0, 4), (1e-3, 30), (1e-4, 30), (1e-5, 30)):
        stop = STOP._replace(rtol=rtol, max_steps=steps)
        check_solved(problem, solve(problem, problem.query, stop), stop)


@cases(
    **{
        f"{short}_{name}": dict(dtype=dtype, count=count, rows=rows)
        for short, dtype in (("fp16", FP16), ("bf16", BF16))
        for name, count, rows in (("of_few", 2**9, 12), ("of_many", 2**16, 3))
    }
)
def half_accuracy(dtype, count, rows):
    """What is promised of the emulation holds of the kernels."""
    for setting in SETTINGS:
        if (setting.dtype, setting.count) != (dtype, count) or (rows == 3 and setting.anchor == 0):
            continue
        problem = setting._replace(rows=rows).problem()
        with wide_tiles():
            solved = solve(problem, problem.query, STOP._replace(max_steps=100))
            assert bool((solved.status == Status.CONVERGED).all())

            def adjoint_of(cotangent, there=(solved.mean, solved.logsumexp), problem=problem, state=solved.state):
                return solve_adjoint(problem, state, cotangent, *there, AdjointRule(ADJOINT_RTOL, 60))

            broken = Accuracy.of(problem, solved, adjoint_of).broken
        assert not broken, (str(setting), broken)


@cases(fp16=dict(dtype=FP16), bf16=dict(dtype=BF16))
def half_starts_at_the_solution(dtype):
    """A coarse evaluation within the tolerance does not say CONVERGED: a fine one follows."""
    problem = problem_of(lead=(2,), n=20, dim=16, dtype=dtype, beta=1.0)
    there = solve(problem, problem.query, STOP._replace(rtol=1e-5, max_steps=60)).state
    found, dense = solve(problem, there, STOP._replace(rtol=1e-3)), Dense.of(problem)
    z = found.state.double()
    f = dense.mapped(dense.attend(z)[0])
    assert bool((found.status == Status.CONVERGED).all())
    assert bool((found.num_evals == 2).all())
    assert bool(((found.residual - (f - z).norm(dim=-1)).abs() <= FLOOR * f.norm(dim=-1) + noise(dense, z)).all())


@cases(
    mask_of_keys=dict(mask=lambda n, m: torch.arange(m)[None] < 20),
    mask_of_pairs=dict(mask=lambda n, m: (torch.arange(m) < 20) & (torch.arange(n)[:, None] != 3)),
    causal=dict(first=0),
)
def half_garbage_behind_a_mask(mask=None, **options):
    """Keys in bfloat16 that no query attends to, however large, change no bit of an answer."""
    answers = []
    for large in (1.0, 1e30):
        problem = problem_of(lead=(2, 2), keys_lead=(1, 2), n=20, m=30, dim=8, dtype=BF16, exact=True, **options)
        problem.keys[..., 20:, :] = large
        if mask is not None:
            problem = problem.paired(mask(20, 30)[None].to(problem.keys.device))
        answers.append(solve(problem, problem.query, STOP))
    for one, other in zip(*answers, strict=True):
        assert torch.equal(one, other)


@case
def half_keys_of_many_sizes():
    """A key in bfloat16 that is smaller than others by more than float16 holds is 0 among them."""
    problem, found = problem_of(lead=(2,), n=20, m=30, dim=8, dtype=BF16, exact=True), []
    for small in (0.0, 1e-10):
        problem.keys[0, 3] = small
        found.append(solve(problem, problem.query, STOP))
    assert bool((found[0].status == Status.CONVERGED).all())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@cases(fp16=dict(dtype=FP16), bf16=dict(dtype=BF16))
def half_gradient_of_keys_at_large_scores(dtype):
    """Two keys that share the weight of queries at scores of about a thousand, where coarse scores are off by .1."""
    problem = problem_of(lead=(1,), n=16, m=2, dim=8, dtype=dtype, beta=0.85, anchor=0.9, exact=True)
    apart = (problem.keys[:, :1] - problem.keys[:, 1:]).float()
    query = 1000 * problem.query.float()
    query = query - (query * apart).sum(-1, keepdim=True) / apart.square().sum() * apart
    problem = problem._replace(query=query)
    solved, dense = solve(problem, query, STOP._replace(rtol=1e-5, max_steps=60)), Dense.of(problem)
    z = solved.state.double()
    p, _ = dense.probabilities(z)
    assert bool((p > 0.1).all())
    assert float((dense.beta * (z @ dense.keys.mT)).abs().max()) > 500
    cotangent = torch.randn_like(query)
    found = solve_adjoint(
        problem, solved.state, cotangent, solved.mean, solved.logsumexp, AdjointRule(ADJOINT_RTOL, 60)
    )
    value, gradients = exact_adjoint(dense, problem, z, cotangent.double())
    assert bool((found.status == Status.CONVERGED).all())
    by_keys = gradients(value)[0]
    assert float((found.by_keys - by_keys).norm() / by_keys.norm()) < 5e-3

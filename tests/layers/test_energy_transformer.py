"""EnergyTransformer: the numbers of its issue, a reference by loops, both modes, and that it is a good torch module."""

import copy
import pickle
import warnings
from math import cos, sin

import layouts
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from implicit_attention import (
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    EnergyTransformer,
    OneStep,
    Picard,
    Status,
    Unrolled,
    UnsupportedImplementation,
)
from implicit_attention.layers import EnergyLayerNorm
from implicit_attention.potentials import LogSumExp, Polynomial
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

MODES = ("published", "equilibrium")
B, N, DIM, HEADS, HEAD_DIM, MEMORIES = 2, 4, 6, 2, 3, 7
TIGHT = Picard(rtol=1e-13, atol=1e-13, max_steps=3000)


def layer(
    mode="published", *, scale=0.4, seed=0, dtype=torch.float64, sizes=(DIM, HEADS, HEAD_DIM, MEMORIES), **options
):
    """With weights at which attention and memory both matter."""
    if mode == "equilibrium":
        options.setdefault("solver", TIGHT)
    made = EnergyTransformer(*sizes, mode=mode, dtype=dtype, **options)
    with torch.no_grad():
        for i, weight in enumerate((made.w_query, made.w_key, made.memories)):
            weight.copy_(scale * random(*weight.shape, seed=10 * seed + i))
        made.norm.delta.copy_(0.3 * random(sizes[0], seed=10 * seed + 3))
        made.norm.set_gamma(1.2)
    return made


def tokens(*batch, count=N, dim=DIM, seed=5, dtype=torch.float64):
    return random(*(batch or (B,)), count, dim, seed=seed, dtype=dtype)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The numbers of the issue.

X = torch.tensor([[sin(1 + 4 * n + i) for i in range(4)] for n in range(3)], dtype=torch.float64)
READ = torch.tensor([[cos(1 + 4 * n + i) for i in range(4)] for n in range(3)], dtype=torch.float64)
W_QUERY, W_KEY = (
    torch.tensor(
        [[[f(a + b * h + c * y + i) / 2 for i in range(4)] for y in range(2)] for h in range(2)], dtype=torch.float64
    )
    for f, a, b, c in ((cos, 1, 7, 3), (sin, 2, 5, 2))
)
XI = torch.tensor([[cos(3 + 2 * m + 5 * i) / 2 for i in range(4)] for m in range(5)], dtype=torch.float64)
ATTENTION, MEMORY = {False: -16.084745348194, True: -5.343008174763}, -6.237524245484


def of_the_issue(**options):
    if options.get("mode", "equilibrium") == "equilibrium":
        options.setdefault("solver", TIGHT)
    beta = torch.tensor([0.7, 1.1], dtype=torch.float64)
    made = EnergyTransformer(4, 2, 2, 5, beta=beta, dtype=torch.float64, **options)
    with torch.no_grad():
        made.norm.delta.copy_(torch.arange(4, dtype=torch.float64) / 10)
        for weight, numbers in ((made.w_query, W_QUERY), (made.w_key, W_KEY), (made.memories, XI)):
            weight.copy_(numbers)
    made.norm.set_gamma(1.3)
    return made


def test_the_layer_norm_of_the_issue():
    norm = of_the_issue().norm
    assert float(norm.gamma.detach()) == pytest.approx(1.3, abs=1e-15)
    expected = torch.tensor([2.096292169630, -0.220812915254, -1.273495247554, -0.001984006821], dtype=torch.float64)
    close(norm(X)[2], expected)
    assert float(norm.lagrangian().value(X).detach().sum()) == pytest.approx(10.044345335988, abs=1e-11)


@pytest.mark.parametrize(
    ("exclude_self", "step_size", "energies"),
    [
        (False, 0.1, {0: -22.322269593677, 1: -22.864408669061, 2: -23.193304843125, 12: -24.135020151085}),
        (True, 0.1, {0: -11.580532420247, 1: -11.815816369835, 2: -11.968781437212, 12: -12.821166262218}),
        (False, 0.5, {0: -22.322269593677, 1: -23.509249112478, 2: -23.855684788246, 12: -24.460143756890}),
        (True, 0.5, {0: -11.580532420247, 1: -12.161054464563, 2: -12.410745263217, 12: -14.072014715513}),
    ],
)
def test_published_energies_of_the_issue(exclude_self, step_size, energies):
    made = of_the_issue(mode="published", exclude_self=exclude_self, step_size=step_size)
    _, found = made(X, return_energies=True)
    assert found.shape == (13,)
    assert energies[0] == pytest.approx(ATTENTION[exclude_self] + MEMORY, abs=2e-12)
    for step, energy in energies.items():
        assert float(found[step]) == pytest.approx(energy, abs=1e-9)


@pytest.mark.parametrize(
    ("exclude_self", "token", "energy", "loss", "gradient"),
    [
        (False, [3.464161295029, 1.689443478083, -2.021146385217, -3.748743834513], -33.876001545039, -1.082106971735,
         [0.125225054967, -0.131003617096, -0.110448574241, 0.116227136370]),
        (True, [-2.854332020790, 0.764981109976, 3.690220016027, 2.240236021116], -31.260440285697, 0.074674606557,
         [0.014514188714, -0.032740546905, 0.017681639483, 0.000544718708]),
    ],
)  # fmt: skip
def test_the_equilibrium_of_the_issue(exclude_self, token, energy, loss, gradient):
    made, b = of_the_issue(exclude_self=exclude_self), X.clone().requires_grad_()
    x, energies, solution = made(b, return_energies=True, return_solution=True)
    close(x[0], torch.tensor(token, dtype=torch.float64), 1e-9)
    assert float(energies[-1]) == pytest.approx(energy, abs=1e-9)
    assert float(solution.energy) == pytest.approx(energy, abs=1e-9)
    read = (READ * made.norm(x)).sum()
    assert float(read.detach()) == pytest.approx(loss, abs=1e-9)
    read.backward()
    close(b.grad[0], torch.tensor(gradient, dtype=torch.float64), 1e-9)
    close(b.grad.mean(-1), torch.zeros(3, dtype=torch.float64), 1e-11)


def test_other_energies_of_the_issue():
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool()
    padding = torch.tensor([True, True, False])
    for options, call, energy in (
        ({"memory": "softmax", "memory_beta": 0.9}, {}, ATTENTION[False] - 7.105528543152),
        ({}, {"mask": path}, 8.299383251163 + MEMORY),
        ({}, {"key_mask": padding}, -14.224269940289),
    ):
        made = of_the_issue(mode="published", **options)
        _, energies = made(X, return_energies=True, **call)
        assert float(energies[0]) == pytest.approx(energy, abs=1e-9)
        close(energies[0], -made.potential(**call).value(made.norm(X)).detach(), 1e-12)


# A reference by loops.


def reference_energy(made, g, mask, memory="rectified"):
    """E(g) of one sample, token by token and head by head; `mask` lists who attends to whom."""
    beta = made.beta()
    total = g.new_zeros(())
    for h in range(made.heads):
        b = beta[h] if isinstance(beta, torch.Tensor) else beta
        for c in range(len(g)):
            scores = [b * (made.w_query[h] @ g[c]) @ (made.w_key[h] @ g[k]) for k in range(len(g)) if mask[c][k]]
            if scores:
                total = total - torch.stack(scores).exp().sum().log() / b
    for c in range(len(g)):
        scores = made.memories @ g[c]
        if memory == "rectified":
            total = total - made.memory_beta * scores.relu().square().sum() / 2
        else:
            total = total - (made.memory_beta * scores).exp().sum().log() / made.memory_beta
    return total


def reference_norm(made, x):
    centred = x - x.mean(-1, keepdim=True)
    root = (centred.square().mean(-1, keepdim=True) + made.norm.eps).sqrt()
    return torch.nn.functional.softplus(made.norm.raw_gamma) * centred / root + made.norm.delta


def reference(made, b, mask, memory="rectified", steps=150):
    """One sample, with a graph through every step."""
    x, courses = b, []
    for _ in range(made.steps if made.mode == "published" else steps):
        g = reference_norm(made, x)
        energy = reference_energy(made, g, mask, memory)
        courses.append(energy.detach())
        pull = -torch.autograd.grad(energy, g, create_graph=True)[0]
        x = x + made.step_size * pull if made.mode == "published" else b + pull
    courses.append(reference_energy(made, reference_norm(made, x), mask, memory).detach())
    return x, torch.stack(courses)


CASES = {
    "plain": ({}, None),
    "no self": ({"exclude_self": True}, lambda c, k: c != k),
    "softmax memory": ({"memory": "softmax", "memory_beta": 1.5}, None),
    "learned beta": ({"beta": "learned"}, None),
    "per head": ({"beta": torch.tensor([0.3, 1.4]), "memory_beta": 0.7}, None),
    "mask": ({}, lambda c, k: (3 * c + k) % 3 != 1 and c != 2),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_gradients_and_energies_are_those_of_loops(mode, case):
    options, allowed = CASES[case]
    # Weak weights, at which 60 plain steps of the reference settle.
    made = layer(mode, scale=0.25, steps=4, sizes=(4, 2, 3, 5), **options)
    if case == "learned beta":
        nn.init.normal_(made.beta.log_scale)
    x = tokens(count=3, dim=4).requires_grad_()
    pairs = [[allowed is None or bool(allowed(c, k)) for k in range(3)] for c in range(3)]
    found, energies = made(x, torch.tensor(pairs) if case == "mask" else None, return_energies=True)
    memory = options.get("memory", "rectified")
    expected, courses = zip(*(reference(made, b, pairs, memory, steps=60) for b in x), strict=True)
    close(found, torch.stack(expected), 1e-9)
    if mode == "published":
        close(energies, torch.stack(courses, 1))
    read = random(*found.shape, seed=8)
    wanted = [x, *made.parameters()]
    ours = torch.autograd.grad((read * found).sum(), wanted)
    theirs = torch.autograd.grad((read * torch.stack(expected)).sum(), wanted)
    for got, sought in zip(ours, theirs, strict=True):
        close(got, sought, 1e-8)
        assert float(sought.abs().max()) > 1e-4


def functional(made):
    names = [name for name, _ in made.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(made, dict(zip(names, parameters, strict=True)), (x,))

    return call, [p.detach().clone().requires_grad_() for p in made.parameters()]


@pytest.mark.parametrize("options", [{"mode": "published", "steps": 2}, {"mode": "equilibrium", "beta": "learned"},
                                     {"mode": "published", "steps": 2, "checkpoint": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradients_are_the_derivatives_of_first_and_second_order(options, check):
    made = layer(**options, sizes=(3, 2, 2, 3), step_size=0.3)
    call, parameters = functional(made)
    x = tokens(1, count=2, dim=3).requires_grad_()
    assert check(call, (x, *parameters), eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=True)


# Layouts, dtypes, batches.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", layouts.MATRICES)
def test_the_layout_of_tokens_and_masks_changes_nothing(mode, layout):
    import random as shuffled

    made = layer(mode, scale=0.2, on_failure="ignore")
    numbers = torch.Generator().manual_seed(3)

    def make(shape):
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    make.scale, make.dtype = 1.0, torch.float64
    x = layouts.MATRICES[layout](make, (B, N, DIM), shuffled.Random(0))
    mask = layouts.MATRICES[layout](make, (B, N, N), shuffled.Random(0)) > -0.5
    key_mask = torch.tensor([[True] * N, [True, False] * (N // 2)])
    # All entries alike are a token without a direction, from which a short step is a long turn, so that E may rise.
    expected = made(x.clone(memory_format=torch.contiguous_format), mask.clone(), key_mask=key_mask)
    assert not bool(made.last_solve.failed.any())
    close(made(x, mask, key_mask=key_mask), expected, 1e-11)
    close(made(x, mask.mT.contiguous().mT, key_mask=key_mask.mT.contiguous().mT), expected, 1e-11)


@pytest.mark.by_name(slow=r"\[equilibrium")
@pytest.mark.parametrize("mode", MODES)
def test_samples_do_not_see_each_other_and_batches_have_any_shape(mode):
    made, x = layer(mode, scale=0.25), tokens(2, 3)
    mask = random(2, 3, N, N, seed=9) > -0.5
    found, energies = made(x, mask, return_energies=True)
    assert found.shape == x.shape
    assert energies.shape[1:] == (2, 3)
    for i in range(2):
        for j in range(3):
            alone, course = made(x[i, j], mask[i, j], return_energies=True)
            close(found[i, j], alone, 1e-11)
            close(energies[len(course) - 1, i, j], course[-1], 1e-11)
    empty, courses = made(x[:0], return_energies=True)
    assert empty.shape == (0, 3, N, DIM)
    assert courses.shape[1:] == (0, 3)
    assert made(x[..., :1, :]).shape == (2, 3, 1, DIM)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_solved_in_single(mode, dtype):
    solver = {} if mode == "published" else {"solver": Picard(rtol=1e-5)}
    exact = layer(mode, scale=0.2, dtype=torch.float32, beta="learned", **solver)
    made, x = copy.deepcopy(exact).to(dtype), tokens(dtype=dtype)
    x.requires_grad_()
    found, energies, solution = made(x, return_energies=True, return_solution=True)
    assert (found.dtype, energies.dtype, solution.value.dtype) == (dtype, torch.float32, torch.float32)
    found.float().square().sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad.dtype == dtype and bool(p.grad.isfinite().all()) for p in made.parameters())
    rounded = copy.deepcopy(made).float()
    close(solution.value, rounded(x.detach().float()), 1e-3 if mode == "equilibrium" else 1e-5)
    assert made.norm(x).dtype == dtype


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_states_and_energies_in_single_precision(mode, dtype):
    solver = {} if mode == "published" else {"solver": Picard(rtol=1e-5)}
    made, x = layer(mode, scale=0.2, dtype=torch.float32, **solver), tokens(dtype=torch.float32)
    expected, energies = made(x, return_energies=True)
    with torch.autocast("cpu", dtype):
        found, course = made(x, return_energies=True)
        assert torch.equal(found, expected)
        assert torch.equal(course, energies)
        low, course = made(x.to(dtype), return_energies=True)
        assert (low.dtype, course.dtype) == (dtype, torch.float32)
        assert made.norm(x.to(dtype)).dtype == dtype
        found.sum().backward()
    close(low.float(), expected, 0.05)


# Masks, missing tokens, bad data.


@pytest.mark.by_name(slow=r"\[equilibrium")
@pytest.mark.parametrize("memory", ["rectified", "softmax"])
@pytest.mark.parametrize("mode", MODES)
def test_a_missing_token_is_as_if_it_was_left_out(mode, memory):
    made, x = layer(mode, scale=0.25, memory=memory), tokens(count=5)
    exist = torch.tensor([[True, True, False, True, False], [True] * 5])
    mask = random(5, 5, seed=4) > -1.0
    x[0, 2] = torch.nan
    x.requires_grad_()
    found, energies, solution = made(x, mask, key_mask=exist, return_energies=True, return_solution=True)
    kept = exist[0].nonzero().squeeze(-1)
    alone, course = made(x[0, kept], mask[kept][:, kept], return_energies=True)
    close(found[0, kept], alone)
    steps = len(course) - 1
    close(energies[steps, 0], course[-1])
    whole, course = made(x[1], mask, return_energies=True)
    close(found[1], whole)
    close(energies[len(course) - 1, 1], course[-1])
    assert torch.equal(found[0, 4], x[0, 4])
    assert bool(found[0, 2].isnan().all())
    assert not bool(solution.failed.any())
    read = random(*found.shape, seed=2)
    wanted = [x, *made.parameters()]
    ours = torch.autograd.grad((read * found)[exist].sum(), wanted)
    theirs = torch.autograd.grad((read[0, kept] * alone).sum() + (read[1] * whole).sum(), wanted)
    for got, sought in zip(ours, theirs, strict=True):
        assert bool(got.isfinite().all())
        close(got, sought, 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_who_attends_to_none_has_the_memory_alone(mode):
    made, x = layer(mode, scale=0.25), tokens()
    nobody = torch.zeros(N, N, dtype=torch.bool)
    without = layer(mode, scale=0.25)
    nn.init.zeros_(without.w_query)
    nn.init.zeros_(without.w_key)
    close(made(x, nobody), without(x))
    single = layer(mode, scale=0.25, exclude_self=True)
    close(single(x[:, :1]), without(x[:, :1]))
    assert not torch.equal(made(x), without(x))


@pytest.mark.parametrize(("mode", "checkpointed"), [("published", False), ("published", True), ("equilibrium", False)])
def test_a_nan_token_spoils_its_sample_alone(mode, checkpointed):
    made, x = layer(mode, scale=0.25, checkpoint=checkpointed), tokens(3)
    expected = made(x)
    spoiled = x.clone()
    spoiled[1, 2, 0] = torch.nan
    spoiled.requires_grad_()
    with pytest.warns(ConvergenceWarning, match="failed for 1 of 3 problems, first at 1"):
        found, energies = made(spoiled, return_energies=True)
    assert made.last_solve.status[1] == Status.NONFINITE
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    found[[0, 2]].square().sum().backward()
    made_of_two = copy.deepcopy(made)
    made_of_two.zero_grad()
    made_of_two(x[[0, 2]]).square().sum().backward()
    for ours, theirs in zip(made.parameters(), made_of_two.parameters(), strict=True):
        close(ours.grad, theirs.grad, 1e-10)
    with pytest.warns(ConvergenceWarning):
        _, energies = made_of_two(spoiled[1:2], return_energies=True)
    assert mode == "equilibrium" or energies.shape == (13, 1)


# Energies, and the warning where they rise.


@pytest.mark.parametrize("mode", MODES)
def test_energies_are_those_of_the_states(mode):
    made, x = layer(mode, scale=0.25, steps=5), tokens()
    found, energies, solution = made(x, return_energies=True, return_solution=True)
    assert not energies.requires_grad
    assert energies.shape == ((6 if mode == "published" else int(solution.num_evals.max())), B)
    if mode == "published":
        close(energies[5], -made.potential().value(made.norm(found)).detach(), 1e-12)
        assert solution.status.tolist() == [Status.BUDGET] * B
    else:
        norm, g = made.norm.lagrangian(), made.norm(found)
        conjugate = ((g * found).sum(-1) - norm.value(found)).sum(-1)
        total = conjugate - (x * g).sum((-1, -2)) - made.potential().value(g)
        close(energies[-1], total.detach(), 1e-11)
        close(found, x + made.potential().mean(g), 1e-11)
        assert bool(solution.converged.all())


def repelling(**options):
    """Tokens that avoid each other: Phi is concave where they attend, and long steps overshoot."""
    made = layer(scale=0.8, steps=6, **options)
    with torch.no_grad():
        made.w_key.copy_(-made.w_query)
        made.memories.mul_(0.1)
        made.norm.delta.zero_()
    return made


def test_an_energy_that_rises_is_told_with_the_step_and_the_remedy():
    made, x = repelling(step_size=1.0), tokens(seed=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, energies = made(x, return_energies=True)
    (warning,) = caught
    assert issubclass(warning.category, ConvergenceWarning)
    assert warning.filename == __file__
    rises = energies.diff(dim=0)
    step = int(rises[:, 1].argmax())
    assert float(rises[:, 0].max()) < 0 < 1 < float(rises[step, 1])
    by, start = float(rises[step, 1]), float(energies[step, 1])
    told = (
        f"rises in 1 of 2 problems, most at step {step + 1} of problem 1, by {by:.3g} from {start:.6g}: steps of 1 are"
    )
    assert told in str(warning.message)
    assert "too long there; use a smaller step_size" in str(warning.message)
    with pytest.raises(ConvergenceError, match="the energy rises in"):
        made(x, on_failure="raise")
    # A copy has told nothing yet.
    with pytest.warns(ConvergenceWarning, match=r"1 of 1 problems, most at step \d, by"):
        copy.deepcopy(made)(x[1])
    with pytest.warns(ConvergenceWarning, match=r"of problem \(1, 0\), by"):
        copy.deepcopy(made)(x[:, None])
    made(x, on_failure="ignore")
    # Where the host cannot look, nothing is said.
    torch.vmap(made)(x)
    # What a backward pass computes again was told of before.
    for reentrant in (True, False):
        new = copy.deepcopy(made)
        with pytest.warns(ConvergenceWarning) as told_of:
            checkpoint(new, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        assert len(told_of) == 1


def test_an_energy_that_falls_to_rounding_is_no_rise():
    repelling(step_size=0.1)(tokens(seed=6), on_failure="raise")
    layer(step_size=0.5, steps=60)(tokens(), on_failure="raise")
    layer(step_size=1e-9, dtype=torch.float32)(tokens(dtype=torch.float32), on_failure="raise")


# Activation checkpointing.


def saved_bytes(made, x):
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = made(x)
    return sum(sizes.values()), found


def test_checkpointing_gives_the_same_gradients_and_saves_less():
    plain = layer(sizes=(8, 2, 4, 40), steps=12, scale=0.2)
    spare = layer(sizes=(8, 2, 4, 40), steps=12, scale=0.2, checkpoint=True)
    x = tokens(2, count=30, dim=8)
    gradients, sizes = [], []
    for made in (plain, spare):
        given = x.clone().requires_grad_()
        size, found = saved_bytes(made, given)
        found.square().sum().backward()
        gradients.append([given.grad, *(p.grad for p in made.parameters())])
        sizes.append(size)
    assert torch.equal(plain(x), spare(x))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    assert sizes[1] < 0.2 * sizes[0]
    assert torch.equal(torch.func.grad(lambda x: spare(x).square().sum())(x), gradients[0][0])


# Options.

SIZES = {"dim": DIM, "heads": HEADS, "head_dim": HEAD_DIM, "memories": MEMORIES}
CHANGES = {
    "heads": 1, "head_dim": 5, "memories": 9, "mode": "equilibrium", "memory": LogSumExp, "beta": "learned",
    "memory_beta": 2.0, "exclude_self": True, "causal": True, "steps": 3, "step_size": 0.05, "dtype": torch.float32,
    "max_steps": 2,
}  # fmt: skip


def seeded(**options):
    """By the option alone, as its own initialisation has it, but with weights that matter."""
    torch.manual_seed(0)
    made = EnergyTransformer(**{**SIZES, "mode": "published", "dtype": torch.float64, **options})
    with torch.no_grad():
        for parameter in (made.w_query, made.w_key, made.memories):
            parameter.mul_(5.0)
        if not isinstance(options.get("beta"), float | None):
            made.beta.set(0.9)
    return made


@pytest.mark.parametrize("option", CHANGES)
def test_every_option_changes_the_output(option):
    x = tokens()
    plain = seeded()(x)
    changed = seeded(**{option: CHANGES[option]})
    found = changed(x.to(changed.w_query.dtype))
    assert found.shape == plain.shape
    assert not torch.equal(found.double(), plain)


def test_options_that_show_elsewhere():
    x = tokens().requires_grad_()
    plain = torch.autograd.grad(layer("equilibrium")(x).square().sum(), x)[0]
    one_step = layer("equilibrium", adjoint=OneStep())
    assert not torch.equal(torch.autograd.grad(one_step(x).square().sum(), x)[0], plain)
    for mode in MODES:
        with pytest.raises(UnsupportedImplementation):
            layer(mode, impl="triton")(x)
        reference = layer(mode, impl="reference")
        close(reference(x), layer(mode)(x), 1e-11)
    loose = layer("equilibrium", solver=Picard(rtol=1e-1))
    assert not torch.equal(loose(x), layer("equilibrium")(x))
    with pytest.raises(ConvergenceError):
        layer("equilibrium", max_steps=1, on_failure="raise")(x)
    with pytest.warns(ConvergenceWarning):
        layer("equilibrium", max_steps=1)(x)
    assert next(EnergyTransformer(4, 1, 2, 3, device="meta").parameters()).device.type == "meta"
    layer("published", adjoint=Unrolled())(x)
    # The names stand for the classes; a factory may hold options.
    assert "memory=LogSumExp" in repr(layer(memory=LogSumExp))
    for name, kind in (("rectified", Polynomial), ("softmax", LogSumExp)):
        assert torch.equal(layer(memory=name)(x), layer(memory=kind)(x))
    cubic = layer(memory=lambda keys, beta, **masks: Polynomial(keys, beta, degree=3, **masks))
    assert not torch.equal(cubic(x), layer()(x))
    assert bool(torch.isfinite(cubic(x, key_mask=torch.arange(N) < 3)).all())


def test_a_call_overrides_the_layer_for_itself_alone():
    x = tokens()
    made = layer(steps=4)
    assert torch.equal(made(x, max_steps=2), layer(steps=2)(x))
    assert torch.equal(made(x, max_steps=0), x)
    assert torch.equal(made(x), layer(steps=4)(x))
    made = layer("equilibrium", scale=0.25)
    plain = made(x)
    assert not torch.equal(made(x, solver=Picard(rtol=1e-2)), plain)
    assert torch.equal(made(x, max_steps=0), x)
    assert made.last_solve.status.tolist() == [Status.EXPLICIT] * B
    assert torch.equal(made(x), plain)


def test_beta_is_a_number_a_buffer_or_learned():
    fixed = EnergyTransformer(DIM, 2, 4, 3)
    assert fixed.beta() == 0.5
    assert "beta.value" not in fixed.state_dict()
    given = EnergyTransformer(DIM, 2, 4, 3, beta=torch.tensor([0.2, 0.3], dtype=torch.float64), dtype=torch.bfloat16)
    assert given.state_dict()["beta.value"].dtype == torch.bfloat16
    assert given.beta().dtype == torch.float32
    assert not any("beta" in name for name, _ in given.named_parameters())
    learned = EnergyTransformer(DIM, 2, 4, 3, beta="learned")
    close(learned.beta().detach(), torch.full((2,), 0.5))
    assert "beta.log_scale" in dict(learned.named_parameters())


def test_weights_start_as_published():
    torch.manual_seed(0)
    made = EnergyTransformer(64, 4, 16, 128)
    for weight, std in ((made.w_query, 0.002), (made.w_key, 0.002), (made.memories, 0.02)):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
        assert abs(float(weight.detach().mean())) < 0.1 * std
    assert float(made.norm.gamma.detach()) == pytest.approx(1.0, abs=1e-7)
    assert not bool(made.norm.delta.detach().any())
    # The default solver settles there.
    made(torch.randn(2, 10, 64), on_failure="raise")
    assert made.options.effective_solver == Anderson()


# The layer norm.


def test_the_energy_layer_norm_is_torchs_with_one_gain():
    ours, x = EnergyLayerNorm(DIM, eps=1e-3, dtype=torch.float64), tokens(2, 3)
    theirs = nn.LayerNorm(DIM, eps=1e-3, dtype=torch.float64)
    with torch.no_grad():
        ours.set_gamma(1.7)
        ours.delta.copy_(random(DIM, seed=1))
        theirs.weight.fill_(1.7)
        theirs.bias.copy_(ours.delta)
    close(ours(x), theirs(x), 1e-13)
    close(ours(x.mT.contiguous().mT), theirs(x), 1e-13)
    given = x.clone().requires_grad_()
    gradient = torch.autograd.grad(ours.lagrangian().value(given).sum(), given)[0]
    close(gradient, ours(x).detach(), 1e-13)
    bare = EnergyLayerNorm(DIM, bias=False)
    assert list(bare.state_dict()) == ["raw_gamma"]
    close(bare(x.float()), torch.nn.functional.layer_norm(x.float(), (DIM,)), 1e-5)
    assert "6, bias=False, eps=1e-05" in repr(bare)
    torch.compile(ours, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize("gamma", [1e-8, 0.3, 1.0, 19.0, 21.0, 1e4])
def test_gamma_is_set_exactly(gamma):
    norm = EnergyLayerNorm(DIM, dtype=torch.float64)
    norm.set_gamma(gamma)
    assert float(norm.gamma.detach()) == pytest.approx(gamma, rel=1e-9)
    assert gamma > 1e-3 or float(norm.gamma.detach()) > 0


# A good torch module.


def test_state_dict_copies_and_pickles_compute_the_same():
    for mode in MODES:
        made, x = layer(mode, scale=0.25, beta="learned"), tokens()
        made(x.requires_grad_()).sum().backward()
        if mode == "equilibrium":
            assert bool((made.last_solve.adjoint.status == Status.CONVERGED).all())
        names = {"norm.raw_gamma", "norm.delta", "w_query", "w_key", "memories", "beta.log_scale"}
        assert set(made.state_dict()) == names
        other = layer(mode, seed=1, scale=0.25, beta="learned")
        other.load_state_dict(made.state_dict())
        for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), other):
            assert twin.last_solve is None
            assert torch.equal(twin(x), made(x))
            assert all(a is not b for a, b in zip(twin.parameters(), made.parameters(), strict=True))


@pytest.mark.parametrize("mode", MODES)
# The compiler asks every tensor that crosses a graph break for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_compiled_layer_gives_the_same(mode):
    torch._dynamo.reset()
    made, x = layer(mode, scale=0.25), tokens().requires_grad_()
    expected = torch.autograd.grad(made(x).square().sum(), x)[0]
    model = torch.compile(nn.Sequential(nn.Identity(), made), backend="eager")
    assert torch.equal(torch.autograd.grad(model(x).square().sum(), x)[0], expected)
    assert made.last_solve is not None


@pytest.mark.by_name(slow=r"\[equilibrium")
@pytest.mark.parametrize("mode", MODES)
def test_torch_func_sees_through_it(mode):
    made, x = layer(mode, scale=0.25), tokens(3)
    plain = made(x)
    call, parameters = functional(made)
    close(torch.vmap(made)(x), plain, 1e-10)
    close(torch.vmap(lambda x: call(x, *parameters))(x), plain, 1e-10)
    given = x.clone().requires_grad_()
    expected = torch.autograd.grad(made(given).square().sum(), (given, made.w_key))
    found = torch.func.grad(lambda x, w: torch.func.functional_call(made, {"w_key": w}, (x,)).square().sum(), (0, 1))
    for ours, theirs in zip(found(x, made.w_key.detach()), expected, strict=True):
        close(ours, theirs, 1e-8)
    alone = torch.func.grad(lambda w, x: torch.func.functional_call(made, {"w_key": w}, (x,)).square().sum())
    close(torch.vmap(alone, (None, 0))(made.w_key.detach(), x).sum(0), expected[1], 1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_are_answered_with_shapes(mode):
    made = EnergyTransformer(DIM, HEADS, HEAD_DIM, MEMORIES, mode=mode, device="meta", dtype=torch.bfloat16)
    x = torch.empty(B, N, DIM, device="meta", dtype=torch.bfloat16)
    found = made(x, key_mask=torch.ones(N, dtype=torch.bool, device="meta"))
    assert (found.shape, found.dtype, found.device.type) == (x.shape, x.dtype, "meta")
    with pytest.raises(ValueError, match="`x` must hold numbers"):
        made(x, return_energies=True)


@pytest.mark.slow
def test_programs_have_the_published_steps_and_no_solve():
    made, x = layer("published"), tokens()
    program = torch.export.export(made, (x,)).module()
    close(program(2 * x), made(2 * x), 1e-12)
    with pytest.raises(UnsupportedImplementation, match="use a fixed budget"):
        torch.export.export(layer("equilibrium"), (x,))
    with pytest.raises(UnsupportedImplementation, match="must be False in an exported program"):
        torch.export.export(made, (x,), {"return_energies": True})


# Bad input.

"""Queries of which some entries are known: what a memory recalls, its evidence, its gradients and its limits."""

import pytest
import torch
from sklearn.datasets import load_digits

from implicit_attention import Anderson, MemoryLookup, Status
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

M, D, T = 9, 6, 4
TIGHT = Anderson(rtol=1e-11, atol=1e-13)
KNOWN = random(2, 3, D, seed=8) > 0


def digits(count):
    images = torch.as_tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count]]


def recalled(found, patterns):
    """Share of the queries whose relative error is below one per cent."""
    return float(((found - patterns).norm(dim=-1) < 1e-2 * patterns.norm(dim=-1)).float().mean())


def filled_memory(**options):
    memory = MemoryLookup(D, dtype=torch.float64, **{"solver": TIGHT, "beta": 0.7, **options})
    memory.store(random(M, D), random(M, T, seed=1))
    return memory


def stepped(memory, queries, known, similarity, steps=600):
    """Plain steps from the known entries and zeros; beta .7 is so low that there is one equilibrium only."""
    keys, z = memory.patterns, queries.where(known, 0.0)
    for _ in range(steps):
        scores = -torch.cdist(z, keys).square() / 2 if similarity == "distance" else z @ keys.mT
        z = queries.where(known, (0.7 * scores).softmax(-1) @ keys)
    return z


@pytest.mark.by_name(slow=r"\[\S+-1797")
@pytest.mark.parametrize("count", [200, 1797])
@pytest.mark.parametrize("hole", [torch.nan, torch.inf, 0.0, 1e30])
def test_half_images_are_all_recalled(count, hole):
    patterns, known = digits(count), torch.arange(64) < 32
    memory = MemoryLookup(64, on_failure="raise")
    memory.store(patterns)
    half = patterns.where(known, hole)
    found, solution = memory.retrieve(half, known=known, return_solution=True)
    assert recalled(found, patterns) == 1.0
    assert torch.equal(found[:, :32], patterns[:, :32])
    assert bool((solution.status == Status.CONVERGED).all())
    assert recalled(memory.retrieve(half, known=known, clamp=False), patterns) > 0.998
    assert recalled(memory.retrieve(patterns.where(known, 0.0)), patterns) < 0.9


@pytest.mark.parametrize("similarity", ["distance", "dot"])
def test_clamped_equilibria_are_where_plain_steps_end(similarity):
    memory, queries = filled_memory(similarity=similarity, anchor=0.4), random(2, 3, D, seed=2)
    expected = stepped(memory, queries, KNOWN, similarity)
    found, solution = memory.retrieve(queries, known=KNOWN, return_solution=True)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(found[KNOWN], queries[KNOWN])
    assert solution.converged.shape == (2, 3)
    assert torch.equal(memory.last_solve.residual, solution.residual)
    # The energy is that of the memory without an anchor.
    free = filled_memory(similarity=similarity)
    torch.testing.assert_close(solution.energy, free.energy(expected), rtol=1e-9, atol=1e-10)
    scores = (
        -torch.cdist(expected, memory.patterns).square() / 2
        if similarity == "distance"
        else expected @ memory.patterns.mT
    )
    read = (0.7 * scores).softmax(-1) @ memory.targets
    torch.testing.assert_close(memory(queries, known=KNOWN), read, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("anchor", [0.0, 0.4])
def test_without_a_clamp_the_filled_query_is_asked(anchor):
    memory, queries = filled_memory(anchor=anchor), random(2, 3, D, seed=2)
    distances = (KNOWN * (queries[..., None, :] - memory.patterns).movedim(-2, 0)).square().sum(-1).movedim(0, -1)
    filled = queries.where(KNOWN, (-0.35 * distances).softmax(-1) @ memory.patterns)
    for ask in (memory.retrieve, memory):
        torch.testing.assert_close(ask(queries, known=KNOWN, clamp=False), ask(filled), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("clamp", [True, False])
def test_all_or_nothing_known(clamp):
    memory, queries = filled_memory(anchor=0.3), random(2, 3, D, seed=2)
    everything = memory.retrieve(queries, known=torch.ones(D, dtype=torch.bool), clamp=clamp)
    assert torch.equal(everything, queries if clamp else memory.retrieve(queries))
    nothing, none = queries.fill_(torch.nan), torch.zeros(D, dtype=torch.bool)
    found = memory.retrieve(nothing, known=none, clamp=clamp)
    centre = memory.patterns.mean(0).expand(2, 3, D)
    alone = filled_memory(anchor=0.0 if clamp else 0.3).retrieve(centre)
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(D,), (1, D), (3, D), (3, 1), (2, 1, D), (2, 3, 1), (1,), ()])
def test_masks_broadcast(shape):
    memory, queries = filled_memory(), random(2, 3, D, seed=2)
    known = random(*shape, seed=3) > 0
    found = memory.retrieve(queries, known=known)
    torch.testing.assert_close(found, memory.retrieve(queries, known=known.expand(2, 3, D).clone()))


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_any_layout_gives_the_same(layout):
    memory, queries, known = filled_memory(), random(2, 3, D, seed=2), KNOWN
    if layout == "transposed":
        given, mask = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (queries, known))
    elif layout == "strided":
        given, mask = (torch.stack([t, ~t if t.dtype == torch.bool else -t], -1)[..., 0] for t in (queries, known))
    else:
        queries, known = queries[:1].expand(2, 3, D), known[:, :1].expand(2, 3, D)
        given, mask, queries, known = queries, known, queries.clone(), known.clone()
    torch.testing.assert_close(memory.retrieve(given, known=mask), memory.retrieve(queries, known=known))


def test_a_query_that_is_not_finite_where_it_is_known_says_so_and_reaches_no_other():
    memory, queries = filled_memory(on_failure="ignore"), random(2, 3, D, seed=2)
    spoilt, mask = queries.clone(), KNOWN.clone()
    spoilt[0, 1, 2], mask[0, 1, 2] = torch.nan, True
    found, solution = memory.retrieve(spoilt, known=mask, return_solution=True)
    expected = torch.zeros(2, 3, dtype=torch.bool)
    expected[0, 1] = True
    assert torch.equal(solution.status == Status.NONFINITE, expected)
    good = memory.retrieve(queries, known=KNOWN)
    torch.testing.assert_close(found[~expected], good[~expected], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"anchor": 0.3}, {"similarity": "dot"}, {"max_steps": 0, "anchor": 0.3}])
@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("lookup", [True, False])
def test_gradients_are_the_derivatives(options, clamp, lookup):
    options = {"solver": TIGHT, **options}
    memory = MemoryLookup(D, size=5, target_dim=2, learned=True, dtype=torch.float64, **options)
    parameters = dict(memory.named_parameters())
    known = KNOWN[0]

    class Asked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = memory

        def forward(self, queries):
            queries = queries.where(known, torch.nan)
            return (memory if lookup else memory.retrieve)(queries, known=known, clamp=clamp)

    asked = Asked()

    def output(queries, *new):
        return torch.func.functional_call(
            asked, {f"memory.{n}": t for n, t in zip(parameters, new, strict=True)}, queries
        )

    arguments = [random(3, D).requires_grad_(), *(p.detach().requires_grad_() for p in parameters.values())]
    assert torch.autograd.gradcheck(output, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, arguments, fast_mode=True)
    (gradient,) = torch.autograd.grad(output(*arguments).square().sum(), arguments[0])
    assert gradient[~known].abs().max() == 0
    assert gradient[known].abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_dtypes(dtype):
    memory, queries = filled_memory(solver=Anderson(), beta="auto"), random(2, 3, D, seed=2)
    memory.to(dtype)
    found = memory.retrieve(queries.to(dtype), known=KNOWN)
    assert found.dtype == dtype
    assert torch.equal(found[KNOWN], queries.to(dtype)[KNOWN])
    torch.testing.assert_close(found.double(), memory.double().retrieve(queries, known=KNOWN), rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_transforms_and_compilers_take_known_entries():
    memory, queries = filled_memory(), random(2, 3, D, seed=2)
    expected = memory.retrieve(queries, known=KNOWN)
    mapped = torch.vmap(lambda q, k: memory.retrieve(q, known=k))(queries, KNOWN)
    torch.testing.assert_close(mapped, expected, rtol=1e-9, atol=1e-10)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k: memory.retrieve(q, known=k), backend="eager")
    torch.testing.assert_close(compiled(queries, KNOWN), expected, rtol=1e-9, atol=1e-10)

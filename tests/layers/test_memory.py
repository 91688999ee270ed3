"""Memories recall out of the box; pooling does not see padding or order."""

import copy
import pickle

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from implicit_attention import Anderson, AttentionPooling, ConvergenceError, MemoryLookup, Picard, Status
from implicit_attention.testing.numerics import equilibrium_reference, random

M, D, T = 9, 6, 4
TIGHT = Anderson(rtol=1e-11, atol=1e-13)


def digits(count, seed=0):
    images = torch.as_tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]]


def recalled(found, patterns):
    """Share of the queries whose relative error is below one per cent."""
    return float(((found - patterns).norm(dim=-1) < 1e-2 * patterns.norm(dim=-1)).float().mean())


def filled(**options):
    memory = MemoryLookup(D, dtype=torch.float64, **options)
    memory.store(random(M, D), random(M, T, seed=1))
    return memory


def test_retrieval_works_out_of_the_box():
    patterns = digits(200)
    memory = MemoryLookup(64)
    memory.store(patterns)
    assert recalled(memory.retrieve(patterns), patterns) > 0.97
    noisy = patterns + 0.5 * random(200, 64, dtype=torch.float32)
    assert recalled(memory.retrieve(noisy), patterns) > 0.95
    half = patterns.clone()
    half[:, 32:] = 0
    assert recalled(memory.retrieve(half), patterns) > 0.7
    assert recalled(memory.retrieve(half), patterns) > recalled(memory.retrieve(half, max_steps=0), patterns) + 0.05


def test_the_default_similarity_does_not_favour_large_norms():
    patterns = digits(200) * torch.linspace(0.5, 2.0, 200)[:, None]
    rates = []
    for similarity in ("distance", "dot"):
        memory = MemoryLookup(64, similarity=similarity)
        memory.store(patterns)
        rates.append(recalled(memory.retrieve(patterns), patterns))
    assert rates[0] > 0.95 > rates[1] + 0.3


def test_energies_tell_what_is_stored():
    patterns = digits(100)
    memory = MemoryLookup(64)
    memory.store(patterns)
    known, unknown = memory.energy(patterns), memory.energy(random(100, 64, dtype=torch.float32))
    assert known.shape == (100,)
    assert float(known.max()) < float(unknown.min())
    noisy = patterns + 0.3 * random(100, 64, dtype=torch.float32)
    assert bool((memory.energy(memory.retrieve(noisy)) < memory.energy(noisy)).all())


@pytest.mark.parametrize("similarity", ["distance", "dot"])
@pytest.mark.parametrize("anchor", [0.0, 0.4])
def test_answers_are_those_of_a_reference_solve(similarity, anchor):
    memory, queries = filled(similarity=similarity, anchor=anchor, beta=0.7, solver=TIGHT), random(2, 3, D, seed=2)
    bias = -0.35 * memory.patterns.square().sum(-1) if similarity == "distance" else None
    given = {"beta": 0.7, "anchor": anchor, "mask": bias}
    state = equilibrium_reference(queries, memory.patterns, **given)
    torch.testing.assert_close(memory.retrieve(queries), state, rtol=1e-8, atol=1e-9)
    read = equilibrium_reference(queries, memory.patterns, memory.targets, **given)
    torch.testing.assert_close(memory(queries), read, rtol=1e-8, atol=1e-9)
    energy = queries.square().sum(-1) / 2 - anchor * queries.square().sum(-1)
    scores = 0.7 * queries @ memory.patterns.mT + (0 if bias is None else bias)
    torch.testing.assert_close(memory.energy(queries), energy - (1 - anchor) * scores.logsumexp(-1) / 0.7)


def test_distance_weights_are_those_of_a_mixture_of_gaussians():
    memory, queries = filled(beta=1.3), random(3, D, seed=2)
    weights = (-1.3 / 2 * torch.cdist(queries, memory.patterns).square()).softmax(-1)
    torch.testing.assert_close(memory(queries, max_steps=0), weights @ memory.targets)


def test_storing_adds_and_clearing_forgets():
    memory = MemoryLookup(D)
    memory.store(torch.randn(3, D))
    beta = memory.found_beta.clone()
    memory.store(torch.randn(4, D) / 3)
    assert memory.patterns.shape == (7, D)
    assert not torch.equal(memory.found_beta, beta)
    assert torch.equal(memory(memory.patterns), memory(memory.patterns))
    memory.clear()
    assert len(memory.patterns) == 0


@pytest.mark.parametrize("similarity", ["distance", "dot"])
def test_the_temperature_comes_from_the_nearest_rivals(similarity):
    # More of them than are compared at once.
    patterns = random(600, D)
    memory = MemoryLookup(D, similarity=similarity, dtype=torch.float64)
    memory.store(patterns)
    scores = patterns @ patterns.mT if similarity == "dot" else -torch.cdist(patterns, patterns).square() / 2
    gaps = scores.diagonal() - scores.masked_fill(torch.eye(600).bool(), -torch.inf).amax(-1)
    close = gaps[gaps > 0].sort().values
    expected = torch.log(torch.tensor(60000.0)).double() / close[int(0.1 * (len(close) - 1))]
    torch.testing.assert_close(memory.found_beta, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("similarity", ["distance", "dot"])
def test_what_was_stored_twice_is_recalled_as_if_it_was_stored_once(similarity):
    patterns = digits(200)
    once, twice = (MemoryLookup(64, similarity=similarity) for _ in range(2))
    once.store(patterns)
    twice.store(patterns)
    # A second copy may differ by rounding.
    for copies in (patterns, patterns.flip(0), patterns * (1 + 1e-6)):
        twice.store(copies)
        rates = [recalled(memory.retrieve(patterns), patterns) for memory in (once, twice)]
        assert abs(rates[0] - rates[1]) < 0.02
        torch.testing.assert_close(twice.found_beta, once.found_beta, rtol=0.2, atol=0)
    assert rates[1] > (0.97 if similarity == "distance" else 0.5)
    exact = MemoryLookup(64, similarity=similarity)
    exact.store(torch.cat([patterns, patterns.flip(0)]))
    torch.testing.assert_close(exact.found_beta, once.found_beta, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_temperature_is_found_far_from_the_origin(scale):
    patterns = scale * (digits(100).double() + 100)
    memory = MemoryLookup(64)
    memory.store(patterns.float())
    centred = MemoryLookup(64)
    centred.store(scale * digits(100))
    torch.testing.assert_close(memory.found_beta, centred.found_beta, rtol=1e-3, atol=0)


def test_scores_that_tie_up_to_rounding_are_no_gaps():
    # Every second pattern has a rival that is equal to it where it is not zero: no temperature makes it an attractor.
    parts = 0.1 * (random(40, 64, dtype=torch.float32) + 2)
    parts[:, 32:] = 0
    wholes = parts.clone()
    wholes[:, 32:] = 1
    memory = MemoryLookup(64, similarity="dot")
    memory.store(torch.stack([parts, wholes], dim=1).flatten(0, 1))
    assert 0.1 < float(memory.found_beta) < 1e4


def test_one_pattern_and_equal_patterns():
    pattern = torch.randn(1, D)
    for patterns in (pattern, pattern.expand(3, D), pattern * torch.tensor([[1.0], [1 + 1e-6]])):
        memory = MemoryLookup(D)
        memory.store(patterns)
        assert float(memory.found_beta) == 1.0
        torch.testing.assert_close(memory.retrieve(torch.randn(2, D)), pattern.expand(2, D), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"anchor": 0.3}, {"similarity": "dot", "beta": 0.7}])
def test_gradients_are_the_derivatives(options):
    memory = MemoryLookup(D, size=5, target_dim=2, learned=True, solver=TIGHT, dtype=torch.float64, **options)
    parameters = dict(memory.named_parameters())

    def output(queries, *new):
        return torch.func.functional_call(memory, dict(zip(parameters, new, strict=True)), queries)

    arguments = [random(3, D).requires_grad_(), *(p.detach().requires_grad_() for p in parameters.values())]
    assert torch.autograd.gradcheck(output, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, arguments, fast_mode=True)


def test_every_option_changes_the_answer():
    queries = random(3, D, seed=2)
    plain = filled()(queries)
    for options in ({"similarity": "dot"}, {"beta": 5.0}, {"anchor": 0.5}, {"beta": "learned"}, {"anchor": "learned"},
                    {"max_steps": 0}, {"solver": Picard(rtol=1e-1)}):  # fmt: skip
        assert not torch.equal(filled(**options)(queries), plain), options
    with pytest.raises(ConvergenceError):
        filled(max_steps=1, beta=1.0, on_failure="raise")(queries)
    for overrides in ({"max_steps": 0}, {"solver": Picard(rtol=1e-1)}):
        assert not torch.equal(filled().retrieve(queries, **overrides), filled().retrieve(queries))


def test_state_dicts_copies_and_pickles_hold_what_was_stored():
    memory, queries = filled(), random(3, D, seed=2)
    answer = memory(queries)
    other = MemoryLookup(D, dtype=torch.float64)
    other.load_state_dict(memory.state_dict())
    for twin in (other, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(twin(queries), answer)
        assert twin.last_solve is not None
    nested = nn.ModuleList([MemoryLookup(D, dtype=torch.float64)])
    nested.load_state_dict(nn.ModuleList([memory]).state_dict())
    assert torch.equal(nested[0](queries), answer)
    assert "stored=9" in repr(memory)


def test_evidence_comes_along():
    memory, queries = filled(), random(3, D, seed=2)
    state, solution = memory.retrieve(queries, return_solution=True)
    assert torch.equal(state, solution.value)
    assert bool(solution.converged.all())
    assert torch.equal(memory.last_solve.residual, solution.residual)
    memory.retrieve(queries, max_steps=0)
    assert bool((memory.last_solve.status == Status.EXPLICIT).all())


def pixels():
    return torch.randint(0, 256, (100, 784), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("max_steps", [None, 0])
@pytest.mark.parametrize("similarity", ["distance", "dot"])
@pytest.mark.parametrize("first", [True, False])
def test_large_patterns_are_recalled_in_half_precision(similarity, max_steps, first):
    patterns, labels = pixels(), torch.eye(100)
    memory = MemoryLookup(784, similarity=similarity, max_steps=max_steps)
    memory = memory.half() if first else memory
    memory.store(patterns, labels)
    single = MemoryLookup(784, similarity=similarity, max_steps=max_steps)
    single.store(patterns, labels)
    memory = memory.half()
    found = memory.retrieve(patterns.half())
    assert found.dtype == torch.float16
    expected = recalled(single.retrieve(patterns), patterns)
    assert expected > 0.9
    assert recalled(found.float(), patterns) == pytest.approx(expected, abs=0.02)
    looked_up = memory(patterns.half()).float()
    assert torch.equal(looked_up.argmax(-1), single(patterns).argmax(-1))
    torch.testing.assert_close(looked_up, single(patterns), rtol=0, atol=2e-2)


def test_a_temperature_outlives_half_precision():
    memory = MemoryLookup(784, dtype=torch.float16)
    memory.store(pixels())
    beta = memory.found_beta.clone()
    assert beta.dtype == torch.float32
    assert float(beta.half()) != float(beta)
    other = MemoryLookup(784, dtype=torch.bfloat16)
    other.load_state_dict(memory.state_dict())
    twins = (other, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), memory.bfloat16(), memory.half(),
             memory.to("cpu"), memory.float(), memory.to(dtype=torch.bfloat16))  # fmt: skip
    for twin in twins:
        assert torch.equal(twin.found_beta, beta)
    assert memory.double().found_beta.dtype == torch.float64
    assert memory.half().found_beta.dtype == torch.float64
    assert nn.Sequential(memory).to("meta", torch.float16)[0].found_beta.is_meta


@pytest.mark.parametrize("learned", [True, False])
def test_energies_have_the_precision_of_solves(learned):
    options = {"size": 100, "learned": True} if learned else {}
    memory = MemoryLookup(64, **options)
    memory.store(digits(100))
    queries = digits(30, seed=1)
    expected = memory.energy(queries)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(memory.energy(queries), expected)
        assert torch.equal(memory.energy(queries.bfloat16()), expected)
    # The bits of bfloat16 hold these digits without rounding.
    assert torch.equal(memory.bfloat16().energy(queries.bfloat16()), expected)


def test_what_was_stored_in_inference_mode_can_be_learned_from():
    patterns, queries = random(M, D), random(3, D, seed=2).requires_grad_()
    memory, source = filled(anchor="learned"), filled(anchor="learned")
    learned = MemoryLookup(D, size=M, learned=True, dtype=torch.float64)
    with torch.inference_mode():
        made_inside = MemoryLookup(D, beta=1.0, anchor=0.5, dtype=torch.float64)
        for stored in (memory, made_inside):
            stored.clear()
            stored.store(patterns + 0, patterns * 2)
        loaded = MemoryLookup(D, beta=1.0, anchor=0.5, dtype=torch.float64)
        loaded.load_state_dict(made_inside.state_dict())
        learned.store(patterns + 0)
    for asked in (memory, made_inside, loaded, learned, source):
        (gradient,) = torch.autograd.grad(asked(queries).square().sum(), queries)
        assert bool(gradient.isfinite().all())
    assert not memory.patterns.is_inference()


def test_storing_copies():
    patterns, targets = random(M, D).requires_grad_(), random(M, T)
    memory = MemoryLookup(D, dtype=torch.float64)
    memory.store(patterns, targets)
    expected = targets.clone()
    targets.zero_()
    assert torch.equal(memory.targets, expected)
    assert not memory.patterns.requires_grad


def test_learned_memories_can_be_set():
    patterns, targets = random(M, D), random(M, 2)
    memory = MemoryLookup(D, size=M, learned=True, anchor=0.0, beta=20.0, dtype=torch.float64)
    memory.store(patterns)
    assert torch.equal(memory.patterns, patterns)
    assert torch.equal(memory.targets, patterns)
    torch.testing.assert_close(memory(patterns), patterns, rtol=1e-2, atol=1e-2)
    other = MemoryLookup(D, size=M, target_dim=2, learned=True, dtype=torch.float64)
    before = other.patterns.detach().clone()
    with pytest.raises(ValueError, match=r"`targets` must be given: they have width 2.*without target_dim"):
        other.store(patterns)
    with pytest.raises(ValueError, match=r"`targets` must have the width 2 of those held.*target_dim=3"):
        other.store(patterns, random(M, 3))
    assert torch.equal(other.patterns, before)
    other.store(patterns, targets)
    assert torch.equal(other.targets, targets)


def test_clearing_frees_what_was_held():
    memory = filled()
    memory.clear()
    assert memory.patterns.shape == (0, D)
    assert memory.patterns.untyped_storage().nbytes() == 0
    assert memory.targets is None
    assert float(memory.found_beta) == 1.0
    memory.store(random(3, D), random(3, 2))
    assert memory(random(2, D)).shape == (2, 2)


def test_states_of_another_width_are_refused_and_change_nothing():
    memory, other = filled(), MemoryLookup(D + 1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"size mismatch for patterns: .*\[9, 6\].*\[0, 7\]"):
        other.load_state_dict(memory.state_dict())
    assert other.patterns.shape == (0, D + 1)
    smaller = MemoryLookup(D, dtype=torch.float64)
    smaller.store(random(2, D))
    smaller.load_state_dict(memory.state_dict())
    assert torch.equal(smaller.targets, memory.targets)


# Pooling.


def pooling(dim=8, heads=2, **options):
    torch.manual_seed(0)
    return AttentionPooling(dim, heads, dtype=torch.float64, **options)


def test_pooling_sees_neither_padding_nor_order():
    pool, bag = pooling(queries=3, solver=TIGHT), random(2, 7, 8)
    exists = torch.arange(7) < torch.tensor([[4], [7]])
    pooled = pool(bag, key_mask=exists)
    assert pooled.shape == (2, 3, 8)
    assert pool.last_solve.status.shape == (2, 2, 3)
    spoiled = bag.clone()
    spoiled[0, 4:] = 100.0
    assert torch.equal(pool(spoiled, key_mask=exists), pooled)
    torch.testing.assert_close(pooled[0], pool(bag[:1, :4])[0], rtol=1e-9, atol=1e-10)
    order = torch.tensor([3, 1, 0, 2, 4, 5, 6])
    torch.testing.assert_close(pool(bag[:, order], key_mask=exists[:, order]), pooled, rtol=1e-9, atol=1e-10)


def test_pooling_trains_its_queries():
    pool = pooling()
    pool(random(2, 7, 8)).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 1e-9 for p in pool.parameters())
    assert not torch.equal(pool(random(2, 7, 8), max_steps=0), pool(random(2, 7, 8)))
    assert pooling(queries=2)(random(2, 7, 8)).shape == (2, 2, 8)
    assert pooling(heads=1, bare=True)(random(2, 7, 8)).shape == (2, 1, 8)

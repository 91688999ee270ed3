"""How often failures are told, by which layer, and what is no failure: gradients from above that are not finite."""

import copy
import itertools
import math
import pickle
import random as python_random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from implicit_attention import (
    ConvergenceError,
    ConvergenceWarning,
    FailurePolicy,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    Picard,
    SolveOptions,
    equilibrium_attention,
    solve,
)
from implicit_attention.layers import EnergyTransformer, SpinTransformerBlock
from implicit_attention.linear import CG
from implicit_attention.testing.numerics import random

X = random(2, 5, 8, dtype=torch.float32)
#: Nothing gets far in one step, forward or backward.
NEVER = {"solver": Picard(max_steps=1, rtol=1e-6), "adjoint": Implicit(CG(max_steps=1, rtol=1e-6))}


@pytest.fixture(autouse=True)
def same_parameters():
    torch.manual_seed(0)


def told(run):
    """The lines that `run` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)]


def step(layer, x=X, **call):
    layer(x.clone().requires_grad_(), **call).square().sum().backward()


class Contraction(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) / 2 + x)


# How often.


def test_a_layer_tells_of_its_first_failing_step_and_of_powers_of_ten():
    layer, lines = ImplicitAttention(8, 2, **NEVER), []
    for index in range(1, 121):
        lines += [(index, line) for line in told(lambda: step(layer))]
    forward = [(i, line) for i, line in lines if line.startswith("Picard failed for 20 of 20 problems")]
    backward = [(i, line) for i, line in lines if line.startswith("the adjoint solve by CG")]
    assert len(lines) == len(forward) + len(backward)
    for found, side in ((forward, ""), (backward, " backward")):
        assert [i for i, _ in found] == [1, 10, 100]
        for index, line in found:
            counted = f"(failing{side} call {index} of this layer; the next one to be told of is number {10 * index})"
            assert line.endswith(counted)


@pytest.mark.parametrize("seed", range(3))
def test_with_two_kinds_there_are_few_lines_and_each_kind_is_told(seed):
    """A kind that comes between skips the next power of ten."""
    draw, policy, found = python_random.Random(seed), FailurePolicy(tolerate=0.0, window=1, over="warn"), []
    map_, start = FixedPointMap(lambda z: z / 2, event_ndim=1), int(10 ** draw.uniform(0, 2))
    for index in range(1, 201):
        kind = draw.randrange(1 + (index >= start))
        initial = torch.tensor([[1.0], [math.nan]])[kind]
        lines = told(lambda z=initial: solve(map_, z, solver=NEVER["solver"], on_failure=policy))
        found += [(index, kind, int(line.split()[-1][:-1])) for line in lines]
    assert len(found) <= 5
    assert {kind for _, kind, _ in found} == {0, 1}
    # What a line says of the next one holds, unless a new kind comes before.
    for (_, _, following), (index, kind, _) in itertools.pairwise(found):
        assert index == following or kind not in [k for i, k, _ in found if i < index]


def test_each_kind_is_told_once_and_each_layer_by_itself():
    first, second = (ImplicitAttention(8, 2, solver=Picard(max_steps=1, rtol=1e-6)) for _ in range(2))
    with torch.no_grad():
        assert len(told(lambda: first(X))) == 1
        assert told(lambda: first(X)) == []
        assert len(told(lambda: first(X.masked_fill(torch.arange(5)[:, None] == 2, math.nan)))) == 1
        assert told(lambda: first(X.masked_fill(torch.arange(5)[:, None] == 2, math.nan))) == []
        assert len(told(lambda: second(X))) == 1


def test_a_policy_tells_as_often_and_functions_that_share_one_as_often_as_a_layer():
    policy = FailurePolicy(tolerate=0.0, window=1, over="warn")
    layer = ImplicitAttention(8, 2, on_failure=policy, **NEVER)
    assert [len(told(lambda: step(layer))) for _ in range(11)] == [2, *[0] * 8, 2, 0]
    map_ = FixedPointMap(lambda z: z / 2, event_ndim=1)
    for run in (
        lambda policy: equilibrium_attention(X, X, X, on_failure=policy, solver=NEVER["solver"]),
        lambda policy: solve(map_, X, on_failure=policy, solver=NEVER["solver"]),
    ):
        policy = FailurePolicy(tolerate=0.1, window=2, over="warn")
        lines = [told(lambda run=run, policy=policy: run(policy)) for _ in range(11)]
        assert [len(each) for each in lines] == [1, *[0] * 8, 1, 0]
        assert lines[0][0].endswith("(failing call 1 of this policy; the next one to be told of is number 10)")
        assert len(told(lambda run=run: run(FailurePolicy(tolerate=0.1, window=2, over="warn")))) == 1
    # Nobody counts the calls of a function with a word.
    assert [len(told(lambda: equilibrium_attention(X, X, X, solver=NEVER["solver"]))) for _ in range(3)] == [1, 1, 1]


def test_a_policy_says_what_a_word_says():
    def lines(on_failure):
        return told(lambda: step(ImplicitAttention(8, 2, on_failure=on_failure, **NEVER)))

    def made(on_failure):
        torch.manual_seed(0)
        return lines(on_failure)

    assert made("warn") == made(FailurePolicy(tolerate=0.0, window=1, over="warn"))
    assert "the implicit gradient there is that of no solution" in made("warn")[0]
    # Of those that are left out no gradient is wrong.
    assert "no solution" not in made(FailurePolicy(tolerate=0.0, window=1, over="warn", backward="zero"))[0]


def test_a_warning_of_a_window_says_how_many_failed():
    layer = ImplicitAttention(8, 2, on_failure=FailurePolicy(tolerate=0.25, window=2, over="warn"))
    with torch.no_grad():
        layer(X)
        (line,) = told(lambda: layer(X, **{"solver": NEVER["solver"]}))
    assert ". 20 problems failed in a window of 2 calls, more than tolerate=0.25 of 40 (failing call 1 of" in line


# Copies.


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["copy", "pickle"])
@pytest.mark.parametrize("on_failure", ["warn", FailurePolicy(tolerate=0.75, window=2, over="warn")], ids=str)
def test_copies_of_layers_have_told_and_counted_nothing(copied, on_failure):
    layer = ImplicitAttention(8, 2, on_failure=on_failure, **NEVER)
    names, lines = list(layer.state_dict()), [1, 0, 0] if on_failure == "warn" else [0, 1, 0]
    assert [len(told(lambda: layer(X))) for _ in range(3)] == lines
    other = copied(layer)
    assert other.options == layer.options
    assert list(other.state_dict()) == names
    assert repr(other) == repr(layer)
    assert [len(told(lambda: other(X))) for _ in range(3)] == lines
    assert told(lambda: layer(X)) == []
    # A window of its own: one call that fails wholly, and one that does not, are half of both.
    with torch.no_grad():
        fresh = copied(layer)
        assert told(lambda: fresh(X, max_steps=1000)) == []
        assert len(told(lambda: fresh(X))) == (on_failure == "warn")


def test_options_hand_a_policy_on():
    policy = FailurePolicy(tolerate=0.1)
    options = SolveOptions(on_failure=policy)
    assert options.override(max_steps=3).on_failure is policy
    assert options.override(on_failure="warn").on_failure == "warn"
    assert options.override(on_failure=None).on_failure is policy
    assert hash(options) == hash(SolveOptions(on_failure=FailurePolicy(tolerate=0.1)))
    assert options != SolveOptions(on_failure=FailurePolicy(tolerate=0.2))


def test_words_and_policies_of_calls_are_not_mixed_up():
    """What is remembered of options must not answer for others."""
    solver = NEVER["solver"]
    loud = [{"on_failure": "raise"}, {"on_failure": FailurePolicy(window=1)}]
    quiet = [{"on_failure": "ignore"}, {"on_failure": FailurePolicy(tolerate=1.0)}]
    layer = ImplicitAttention(8, 2, solver=solver, on_failure="ignore")
    for run in (lambda **o: equilibrium_attention(X, X, X, solver=solver, **o), lambda **o: layer(X, **o)):
        for options in (*loud, *quiet, *loud, *quiet):
            if options in loud:
                with pytest.raises(ConvergenceError):
                    run(**options)
            else:
                assert told(lambda run=run, options=options: run(**options)) == []
        assert len(told(lambda run=run: run(on_failure="warn"))) == 1


# What checkpointing computes again.


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_tells_and_counts_once(reentrant):
    """20 of 20 fail in each call; were they counted again, the second call would be the third."""
    layer = ImplicitAttention(8, 2, solver=NEVER["solver"], on_failure=FailurePolicy(tolerate=0.75, window=4))

    def run(**options):
        x = X.clone().requires_grad_()
        checkpoint(lambda x: layer(x, **options), x, use_reentrant=reentrant).sum().backward()

    for _ in range(3):
        run()
    with pytest.raises(ConvergenceError, match="80 problems failed in a window of 4 calls"):
        run()
    warns = ImplicitAttention(8, 2, solver=NEVER["solver"])

    def step():
        x = X.clone().requires_grad_()
        checkpoint(warns, x, use_reentrant=reentrant).sum().backward()

    lines = [told(step) for _ in range(3)]
    assert [sum(line.startswith("Picard failed") for line in each) for each in lines] == [1, 0, 0]


# What a layer finds by itself.


def rising(on_failure):
    """Tokens that avoid each other, of which the second sample overshoots."""
    layer = EnergyTransformer(6, 2, 3, 4, mode="published", steps=6, step_size=1.0, on_failure=on_failure).double()
    with torch.no_grad():
        layer.w_query.copy_(0.8 * random(*layer.w_query.shape))
        layer.w_key.copy_(-layer.w_query)
        layer.memories.copy_(0.08 * random(*layer.memories.shape, seed=2))
        layer.norm.delta.zero_()
        layer.norm.set_gamma(1.0)
    return layer, torch.stack([torch.zeros(2, 6).double(), random(2, 6, seed=5)]), "the energy rises in 1 of 2 problems"


def outside(on_failure):
    """A token of three that no field gives."""
    torch.manual_seed(0)
    layer = SpinTransformerBlock(8, 1, input="magnetization", on_failure=on_failure).double()
    x = 0.1 * random(1, 2, 8)
    x[0, 1] = 4.0
    return layer, x, "no finite field gives 1 of 2 tokens"


@pytest.mark.parametrize("make", [rising, outside])
def test_what_a_layer_finds_is_tolerated_as_failures_are(make):
    half = FailurePolicy(tolerate=0.5, window=3)
    layer, x, words = make(half)
    for _ in range(4):
        assert told(lambda: layer(x)) == []
    layer, x, words = make(FailurePolicy(tolerate=0.4, window=2))
    layer(x)
    with pytest.raises(ConvergenceError, match=f"{words}.* 2 problems failed in a window of 2 calls, more than"):
        layer(x)
    layer, x, words = make(FailurePolicy(tolerate=0.4, window=2, over="warn"))
    lines = [told(lambda: layer(x)) for _ in range(3)]
    assert [len(each) for each in lines] == [0, 1, 0]
    assert lines[1][0].startswith(words)
    assert "2 problems failed in a window of 2 calls, more than tolerate=0.4 of 4" in lines[1][0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [rising, outside])
def test_checkpointing_finds_it_once(make, reentrant):
    layer, x, _ = make(FailurePolicy(tolerate=0.4, window=3, over="warn"))
    x.requires_grad_()

    def step():
        checkpoint(layer, x, use_reentrant=reentrant).nan_to_num().sum().backward()

    # 1, 2 and 3 of 6: counted twice, the second call would be too many.
    assert [len(told(step)) for _ in range(3)] == [0, 0, 1]

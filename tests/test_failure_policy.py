"""What a run does about problems without an answer: arguments, and the window of calls."""

import copy
import dataclasses
import pickle
import random as python_random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from implicit_attention import (
    AnchoredEnergy,
    AttentionPooling,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    EquilibriumTransformer,
    FailurePolicy,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    Picard,
    SolveOptions,
    equilibrium_attention,
    solve,
    training,
)
from implicit_attention.layers import EnergyTransformer, MeanFieldAttention, SpinAttention, SpinTransformerBlock
from implicit_attention.linear import Neumann
from implicit_attention.spins import MeanField, SpinSystem, magnetization
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

ONCE = Picard(max_steps=1, rtol=1e-6)


@pytest.fixture(autouse=True)
def same_parameters():
    torch.manual_seed(0)


def call(failed, of, policy, backward=0):
    """Solve `of` problems of which the first `failed` fail, and `backward` of the backward solves."""
    initial = (torch.arange(of) < failed).double()[:, None]
    shift = torch.zeros(of, 1, dtype=torch.float64, requires_grad=True)
    problem = FixedPointMap(lambda z, shift: z / 2 + shift, shift, event_ndim=1)
    adjoint = Implicit(Neumann(max_steps=1, rtol=1e-6))
    solution = solve(problem, initial, solver=ONCE, adjoint=adjoint, on_failure=policy)
    solution.value.backward((torch.arange(of) < backward).double()[:, None])


def told(run):
    """The lines that `run` warns of, and whether it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except ConvergenceError as error:
            return [str(error)], True
    return [str(w.message) for w in caught if issubclass(w.category, ConvergenceWarning)], False


def raises(*arguments, **options):
    return told(lambda: call(*arguments, **options))[1]


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) / 2 + x)


# Arguments.


def test_a_policy_is_its_five_arguments():
    policy = FailurePolicy(forward="explicit", backward="zero", tolerate=0.1, window=7, over="warn")
    given = {"forward": "explicit", "backward": "zero", "tolerate": 0.1, "window": 7, "over": "warn"}
    assert dataclasses.asdict(policy) == given
    assert dataclasses.asdict(SolveOptions(on_failure=policy))["on_failure"] == given
    assert FailurePolicy(**given) == policy
    assert eval(repr(policy)) == policy
    assert policy != FailurePolicy(**{**given, "window": 8})


def test_only_names_are_taken():
    with pytest.raises(TypeError, match="positional"):
        FailurePolicy("best")


def test_numbers_of_numpy_are_taken_and_bounds_belong_to_the_range():
    policy = FailurePolicy(tolerate=np.float32(0.5), window=np.int64(4))
    assert policy == FailurePolicy(tolerate=0.5, window=4)
    assert (type(policy.tolerate), type(policy.window)) == (float, int)
    assert [FailurePolicy(tolerate=t).tolerate for t in (0, 1, 0.0, 1.0)] == [0, 1, 0, 1]
    assert training.FailurePolicy is FailurePolicy


X, KEYS = random(2, 3, 4, dtype=torch.float32), random(5, 4, seed=1, dtype=torch.float32)
#: Everything that takes `on_failure`.
TAKES = {
    "options": lambda given: SolveOptions(on_failure=given),
    "override": lambda given: SolveOptions().override(on_failure=given),
    "solve": lambda given: solve(AnchoredEnergy(LogSumExp(KEYS, 1.0), X), X, on_failure=given),
    "attention": lambda given: equilibrium_attention(X, KEYS, KEYS, on_failure=given),
    "layer": lambda given: ImplicitAttention(4, 2, on_failure=given),
    "call": lambda given: ImplicitAttention(4, 2)(X, on_failure=given),
    "memory": lambda given: MemoryLookup(4, on_failure=given),
    "pooling": lambda given: AttentionPooling(4, 2, on_failure=given),
    "block": lambda given: Equilibrium(Half(), on_failure=given),
    "transformer": lambda given: EquilibriumTransformer(4, 2, on_failure=given),
    "energy transformer": lambda given: EnergyTransformer(4, 2, 4, 6, on_failure=given),
    "spin layer": lambda given: SpinAttention(4, 2, on_failure=given),
    "mean-field layer": lambda given: MeanFieldAttention(4, 2, on_failure=given),
    "spins": lambda given: magnetization(
        SpinSystem(torch.zeros(3, 3), torch.zeros(3, 1)), MeanField(), on_failure=given
    ),
}


@pytest.mark.parametrize("name", TAKES)
def test_every_door_refuses_what_is_neither_word_nor_policy(name):
    with pytest.raises(TypeError, match=r"`on_failure` must be an instance, got the class FailurePolicy; pass Failure"):
        TAKES[name](FailurePolicy)
    remedy = "" if name == "spins" else "; or pass a FailurePolicy"
    for given in ("shout", ["warn"], {"over": "warn"}, torch.ones(2)):
        with pytest.raises(ValueError, match=rf"`on_failure` must be one of 'raise', 'warn', 'ignore', got .*{remedy}"):
            TAKES[name](given)


def test_questions_to_methods_take_words_alone():
    with pytest.raises(
        ValueError, match=r"must be 'raise', 'warn' or 'ignore' here, got FailurePolicy\(.*; a policy is"
    ):
        TAKES["spins"](FailurePolicy())


EXPLICIT = FailurePolicy(forward="explicit")
#: What has no explicit step.
UNKNOWN = {
    "solve": TAKES["solve"],
    "block": lambda given: Equilibrium(Half(), on_failure=given)(X),
    "steps of a block": lambda given: Equilibrium(Half(), steps=2, on_failure=given).eval()(X),
    "call of a block": lambda given: Equilibrium(Half())(X, on_failure=given),
    "transformer": lambda given: EquilibriumTransformer(4, 2, on_failure=given)(X),
    "energy transformer": lambda given: EnergyTransformer(4, 2, 4, 6, on_failure=given)(X),
    "spin layer": lambda given: SpinAttention(4, 2, on_failure=given)(X),
    "spin block": lambda given: SpinTransformerBlock(4, 2, on_failure=given)(X),
    "mean-field layer": lambda given: MeanFieldAttention(4, 2, on_failure=given)(X),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_explicit_attention_is_refused_where_it_is_not_known(name):
    with pytest.raises(
        ValueError, match=r"`on_failure` must have forward='best' .*only attention has an explicit step, got Fail"
    ):
        UNKNOWN[name](EXPLICIT)


# The window.


def exceeded(calls, tolerate, window):
    """Whether more failed in the last calls than is tolerated, written out."""
    last = calls[-window:]
    problems = sum(n for _, n in last)
    missing = max(window - len(calls), 0)
    return sum(f for f, _ in last) > tolerate * (problems + missing * problems / len(last))


@pytest.mark.parametrize("tolerate", [0.0, 0.125, 0.25, 1.0])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_a_window_is_the_sum_over_its_last_calls(tolerate, window):
    policy, draw, calls, found = FailurePolicy(tolerate=tolerate, window=window), python_random.Random(1), [], []
    for _ in range(40):
        of = draw.choice([0, 1, 2, 8])
        calls.append((min(draw.choice([0, 0, 0, 1, 2]), of), of))
        found.append(raises(*calls[-1], policy))
    expected = [exceeded(calls[: i + 1], tolerate, window) for i in range(len(calls))]
    assert found == expected
    assert any(found) == (tolerate < 1 and (window < 100 or tolerate == 0))
    assert tolerate == 0 or not all(found)


def test_calls_to_come_are_taken_as_those_before():
    """4 of 8 in the first call of 10 are 4 of 80; the other 4 would be one too many."""
    policy = FailurePolicy(tolerate=0.05, window=10)
    assert [raises(4, 8, policy), raises(0, 8, policy), raises(1, 8, policy)] == [False, False, True]


def test_forward_and_backward_are_counted_apart():
    policy = FailurePolicy(tolerate=0.25, window=2)
    assert not raises(3, 8, policy, backward=3)
    lines, raised = told(lambda: call(2, 8, policy, backward=0))
    assert raised
    assert "5 problems failed in a window of 2 calls, more than tolerate=0.25 of 16" in lines[0]
    policy = FailurePolicy(tolerate=0.25, window=2)
    assert not raises(3, 8, policy, backward=3)
    lines, raised = told(lambda: call(0, 8, policy, backward=2))
    assert raised
    assert lines[0].startswith("the adjoint solve by Neumann, whose gradient is therefore wrong, failed for 2 of 8")


def test_an_error_says_how_many_failed_where_and_what_to_do():
    policy = FailurePolicy(tolerate=0.25, window=3)
    assert not raises(2, 4, policy)
    lines, _ = told(lambda: call(2, 4, policy))
    assert lines[0].startswith("Picard failed for 2 of 4 problems, first at 0, 1: residual ")
    assert " 4 problems failed in a window of 3 calls, more than tolerate=0.25 of 12." in lines[0]
    assert lines[0].endswith("Pass on_failure='warn' or 'ignore' to receive the solution all the same.")
    assert "in the last call, more" in told(lambda: call(1, 2, FailurePolicy(window=1)))[0][0]


def test_it_goes_on_until_the_window_has_passed():
    policy = FailurePolicy(tolerate=0.1, window=3)
    assert [raises(f, 2, policy) for f in (1, 0, 0, 0)] == [True, True, True, False]


@pytest.mark.parametrize(("over", "lines"), [("raise", 1), ("warn", 1), ("ignore", 0)])
def test_what_is_done_where_more_fail(over, lines):
    policy = FailurePolicy(tolerate=0.25, window=1, over=over)
    found, raised = told(lambda: call(2, 4, policy))
    assert (len(found), raised) == (lines, over == "raise")
    assert told(lambda: call(1, 4, policy)) == ([], False)


def test_equal_policies_and_copies_count_apart():
    first = FailurePolicy(tolerate=0.25, window=2)
    assert not raises(2, 4, first)
    others = [
        FailurePolicy(tolerate=0.25, window=2),
        dataclasses.replace(first),
        copy.copy(first),
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
    ]
    for other in others:
        assert other == first
        assert hash(other) == hash(first)
        assert not raises(1, 4, other)
    assert raises(1, 4, first)
    assert not raises(1, 4, dataclasses.replace(first, window=1))


def test_calls_without_a_failure_are_counted_however_they_are_solved():
    """Two calls of which one fails are half; two that fail in a row are more."""
    for dtype, options in ((torch.float32, {}), (torch.float64, {}), (torch.float32, {"impl": "reference"})):
        policy = FailurePolicy(tolerate=0.75, window=2)
        layer = ImplicitAttention(4, 2, on_failure=policy, dtype=dtype)
        x = random(2, 3, 4, dtype=dtype)
        calls = (ONCE, None, ONCE, None)
        with torch.no_grad():
            for solver in calls:
                layer(x, solver=solver, **options)
            layer(x, solver=ONCE, **options)
            with pytest.raises(ConvergenceError, match="24 problems failed in a window of 2 calls"):
                layer(x, solver=ONCE, **options)


def test_calls_of_functions_count_together_and_those_of_layers_by_layer():
    policy = FailurePolicy(tolerate=0.25, window=2)
    query = torch.tensor([[0.5, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    layers = [MemoryLookup(2, beta=3.0, anchor=0.5, similarity="dot", solver=ONCE, on_failure=policy) for _ in range(2)]
    for layer in layers:
        layer.store(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        layer.retrieve(query)
        assert layer.last_solve.failed.sum() == 1
        layer.retrieve(query)
    options = {"solver": ONCE, "on_failure": policy, "scale": 3.0}
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    both = torch.cat([query[:1], query[:1], query[1:3]])
    assert not raises(2, 4, policy)
    with pytest.raises(ConvergenceError, match="3 problems failed in a window of 2 calls"):
        equilibrium_attention(query, keys, keys, **options)
    # The layers have seen nothing of that.
    layers[0].retrieve(query)
    with pytest.raises(ConvergenceError, match="3 problems failed in a window of 2 calls"):
        layers[0].retrieve(both)
    layers[1].retrieve(query)

"""SolveOptions: one object, one way to override it, and no typo that is swallowed."""

import pytest
import torch

from implicit_attention import (
    Anderson,
    AttentionPooling,
    EnergyTransformer,
    ImplicitAttention,
    MemoryLookup,
    Picard,
    SolveOptions,
    equilibrium_attention,
)

X = torch.zeros(1, 2, 4)


def memory(**options):
    made = MemoryLookup(4, beta=1.0, **options)
    made.store(torch.eye(4))
    return made


TAKE_OPTIONS = {
    "SolveOptions.override": lambda **o: SolveOptions().override(**o),
    "equilibrium_attention": lambda **o: equilibrium_attention(X, X, X, **o),
    "ImplicitAttention": lambda **o: ImplicitAttention(4, 1, **o),
    "ImplicitAttention, call": lambda **o: ImplicitAttention(4, 1)(X, **o),
    "AttentionPooling": lambda **o: AttentionPooling(4, 1, **o),
    "AttentionPooling, call": lambda **o: AttentionPooling(4, 1)(X, **o),
    "EnergyTransformer": lambda **o: EnergyTransformer(4, 1, 2, 3, **o),
    "EnergyTransformer, call": lambda **o: EnergyTransformer(4, 1, 2, 3)(X, **o),
    "MemoryLookup": memory,
    "MemoryLookup, call": lambda **o: memory()(X, **o),
    "MemoryLookup.retrieve": lambda **o: memory().retrieve(X, **o),
}


@pytest.mark.parametrize("take", TAKE_OPTIONS.values(), ids=TAKE_OPTIONS)
def test_typos_are_named_beside_what_there_is(take):
    with pytest.raises(TypeError, match=r"'sovler'.* solver, adjoint, impl, max_steps, on_failure"):
        take(sovler=Picard())
    with pytest.raises(TypeError, match="`solver` must be None or a Solver, got 'picard'"):
        take(solver="picard")
    take(solver=Picard(), adjoint=None, impl="auto", max_steps=50, on_failure="raise")


def test_what_is_left_out_or_none_stays():
    options = SolveOptions(solver=Picard(), max_steps=7, impl="reference", on_failure="ignore")
    assert options.override() is options
    assert options.override(solver=None, adjoint=None, impl=None, max_steps=None, on_failure=None) is options
    changed = options.override(max_steps=0)
    assert changed.explicit
    assert (changed.solver, changed.impl, changed.on_failure) == (Picard(), "reference", "ignore")


def test_a_solver_brings_its_own_budget():
    options = SolveOptions(max_steps=0)
    assert options.effective_solver == Anderson(max_steps=0)
    assert options.override(solver=Picard(max_steps=9)).effective_solver == Picard(max_steps=9)
    assert options.override(solver=Picard(), max_steps=3).effective_solver == Picard(max_steps=3)


def test_a_call_overrides_the_layer_for_itself_alone():
    layer = ImplicitAttention(4, 1, max_steps=50)
    layer(X, max_steps=0)
    assert layer.options == SolveOptions(max_steps=50)

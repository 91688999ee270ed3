"""SolveOptions: one object, one way to override it, and no typo that is swallowed; fields that declare their checks."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from implicit_attention import (
    Anderson,
    AttentionPooling,
    Broyden,
    EnergyTransformer,
    Implicit,
    ImplicitAttention,
    MemoryLookup,
    Phantom,
    Picard,
    Reversible,
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


@dataclasses.dataclass(frozen=True)
class Renamed(Anderson):
    history: int = 2
    own: float = 0.5


@dataclasses.dataclass(frozen=True)
class Both(Picard, Broyden):
    pass


def test_fields_of_subclasses_keep_their_checks():
    assert Renamed() == Renamed(2, own=0.5) == pickle.loads(pickle.dumps(Renamed()))
    with pytest.raises(ValueError, match="`history` must be >= 1, got 0"):
        Renamed(history=0)
    with pytest.raises(ValueError, match="`max_steps` must be >= 0, got -1"):
        dataclasses.replace(Renamed(), max_steps=-1)
    with pytest.raises(ValueError, match=r"`damping` must be in \[0, 1\], got 2"):
        Both(damping=2)
    with pytest.raises(TypeError, match="`history` must be an integer, got None"):
        Both(history=None)
    assert Anderson(history=None).history is None


def test_numbers_of_other_libraries_become_pythons():
    solver = Renamed(np.int64(3), own=np.float32(0.25), rtol=np.float64(1e-3))
    assert [type(number) for number in (solver.history, solver.own, solver.rtol)] == [int, float, float]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("made", "name", "wrong"),
    [(Picard(), "damping", 1), (Anderson(), "history", 0), (Reversible(), "damping", -0.1), (Phantom(), "steps", 0)],
)
def test_options_are_checked_in_compiled_functions(made, name, wrong, dynamic):
    def scaled(x, number):
        return x * getattr(dataclasses.replace(made, **{name: number}), name)

    # All cases share the code of one function, of which the compiler keeps few versions.
    torch._dynamo.reset()
    compiled, given = torch.compile(scaled, backend="eager", fullgraph=True, dynamic=dynamic), getattr(made, name) or 1
    assert compiled(X, 0.5 if name == "damping" else given).shape == X.shape
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        torch.compile(scaled, backend="eager", dynamic=dynamic)(X, wrong)


def test_what_users_say_of_fields_is_theirs():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Told(Picard):
        own: float = dataclasses.field(default=0.5, metadata={"check": "positive"})

    assert (Told().own, type(Told(rtol=np.float32(0.25)).rtol)) == (0.5, float)


def test_an_adjoint_with_a_fallback_is_made_in_compiled_functions():
    torch._dynamo.reset()
    made = torch.compile(lambda x: x * Implicit(fallback=Phantom(3)).fallback.steps, backend="eager", fullgraph=True)
    assert torch.equal(made(X), 3 * X)

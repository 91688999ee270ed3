"""A class in the place of an instance: every door says what to pass."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Equilibrium,
    EquilibriumTransformer,
    FixedPointMap,
    Implicit,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    OneStep,
    Phantom,
    Picard,
    Unrolled,
    equilibrium_attention,
    solve,
)
from implicit_attention.energies import LegendreEnergy
from implicit_attention.layers import KeyValueCache, MeanFieldAttention, Rotary, SpinAttention, tie
from implicit_attention.linear import CG
from implicit_attention.potentials import (
    BernoulliUnits,
    EluFeatures,
    GaussianMixture,
    HiddenUnits,
    KernelPotential,
    LayerNormPotential,
    TokenMemory,
    jensen_bound,
    units_potential,
)
from implicit_attention.spins import (
    AdaTAP,
    AmosResponse,
    KineticPlefka,
    MeanField,
    SignUnits,
    SpinSystem,
    decompose,
    drive,
    free_energy,
    heat_bath,
    magnetization,
    stability,
    stationary_state,
    thermodynamics,
)

X = torch.zeros(2, 3, 4)
COUPLINGS, FIELD = torch.tensor([[0.0, 0.5], [0.5, 0.0]]), torch.tensor([[0.3], [0.0]])
SYSTEM = SpinSystem(COUPLINGS, FIELD)
MAP = FixedPointMap(torch.cos, event_ndim=1)

DOORS = {
    "solver of solve": (lambda: solve(MAP, X, solver=Picard), "Picard()"),
    "adjoint of solve": (lambda: solve(MAP, X, adjoint=Implicit), "Implicit()"),
    "problem of solve": (lambda: solve(FixedPointMap, X), "FixedPointMap(...)"),
    "solver of attention": (lambda: equilibrium_attention(X, X, X, solver=Anderson), "Anderson()"),
    "adjoint of attention": (lambda: equilibrium_attention(X, X, X, adjoint=OneStep), "OneStep()"),
    "solver of a layer": (lambda: ImplicitAttention(4, 2, solver=Anderson), "Anderson()"),
    "solver of a call": (lambda: ImplicitAttention(4, 2)(X, solver=Anderson), "Anderson()"),
    "rotary of attention": (lambda: ImplicitAttention(4, 2, rotary=Rotary), "Rotary()"),
    "rotary of a transformer": (lambda: EquilibriumTransformer(4, 2, rotary=Rotary), "Rotary()"),
    "attention of a transformer": (
        lambda: EquilibriumTransformer(4, 2, attention=ImplicitAttention),
        "ImplicitAttention(...)",
    ),
    "rotary of spins": (lambda: SpinAttention(4, 2, rotary=Rotary), "Rotary()"),
    "solver of a memory": (lambda: MemoryLookup(4, size=3, learned=True, solver=Anderson), "Anderson()"),
    "linear solver": (lambda: Implicit(CG), "CG()"),
    "fallback": (lambda: Implicit(fallback=Phantom), "Phantom()"),
    "block": (lambda: Equilibrium(torch.nn.Linear), "Linear(...)"),
    "solver of a block": (lambda: Equilibrium(torch.nn.Bilinear(4, 4, 4), solver=Picard), "Picard()"),
    "adjoint of a call of a block": (
        lambda: Equilibrium(torch.nn.Bilinear(4, 4, 4))(X, adjoint=Unrolled),
        "Unrolled()",
    ),
    "tied model": (lambda: tie(torch.nn.Linear), "Linear(...)"),
    "thermodynamics": (lambda: thermodynamics(SYSTEM, MeanField), "MeanField()"),
    "system": (lambda: thermodynamics(SpinSystem, MeanField()), "SpinSystem(...)"),
    "system that is sampled": (
        lambda: heat_bath(SpinSystem, chains=2, burn_in=1, sweeps=1, generator=torch.Generator()),
        "SpinSystem(...)",
    ),
    "magnetization": (lambda: magnetization(SYSTEM, MeanField), "MeanField()"),
    "free energy": (lambda: free_energy(SYSTEM, AdaTAP), "AdaTAP()"),
    "stability": (lambda: stability(SYSTEM, MeanField), "MeanField()"),
    "stationary state": (lambda: stationary_state(SYSTEM, KineticPlefka), "KineticPlefka()"),
    "decomposition": (lambda: decompose(SYSTEM, MeanField), "MeanField()"),
    "driven spins": (lambda: drive(KineticPlefka, COUPLINGS, FIELD.expand(3, 2, 1)), "KineticPlefka()"),
    "response": (lambda: MeanField(response=AmosResponse), "AmosResponse()"),
    "prior": (lambda: AdaTAP(prior=SignUnits), "SignUnits()"),
    "solver of a method": (lambda: MeanField(solver=Anderson), "Anderson()"),
    "adjoint of a method": (lambda: MeanField(adjoint=Implicit), "Implicit()"),
    "method of a layer": (lambda: SpinAttention(4, 2, method=MeanField), "MeanField()"),
    "solver of mean-field attention": (lambda: MeanFieldAttention(4, 2, solver=Anderson), "Anderson()"),
    "units": (lambda: units_potential(SignUnits), "SignUnits()"),
    "hidden units": (lambda: HiddenUnits(torch.ones(3, 4), BernoulliUnits), "BernoulliUnits(...)"),
    "potential": (lambda: AnchoredEnergy(LogSumExp, X), "LogSumExp(...)"),
    "potential of tokens": (lambda: TokenMemory(LogSumExp), "LogSumExp(...)"),
    "lagrangian": (
        lambda: LegendreEnergy(LayerNormPotential, TokenMemory(LogSumExp(X, 1.0)), X),
        "LayerNormPotential()",
    ),
    "mixture": (lambda: jensen_bound(GaussianMixture, X), "GaussianMixture(...)"),
    "features": (lambda: KernelPotential(X, 1.0, features=EluFeatures), "EluFeatures()"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_class_in_the_place_of_an_instance_is_told_what_to_pass(door):
    call, instance = DOORS[door]
    with pytest.raises(TypeError) as caught:
        call()
    name = instance.partition("(")[0]
    assert str(caught.value).endswith(f"got the class {name}; pass an instance: {instance}")


def test_a_class_of_another_kind_and_other_objects_keep_their_remedy():
    with pytest.raises(TypeError, match=r"got the class Linear; for example Anderson\(\)"):
        ImplicitAttention(4, 2, solver=torch.nn.Linear)
    with pytest.raises(TypeError, match=r"`cache` .* got the class KeyValueCache; from layer.new_cache\(\)"):
        ImplicitAttention(4, 2)(X, cache=KeyValueCache)
    with pytest.raises(TypeError, match="got 'anderson'; pass Anderson"):
        solve(MAP, X, solver="anderson")
    with pytest.raises(TypeError, match="got Tensor; for example Rotary"):
        ImplicitAttention(4, 2, rotary=X)

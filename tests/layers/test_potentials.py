"""Every potential over keys is a choice for the layer: it trains without a warning, or is refused with a remedy."""

import functools
import inspect

import pytest
import torch

from implicit_attention import ConvergenceWarning, ImplicitAttention, Status, potentials
from implicit_attention.potentials import (
    BernoulliUnits,
    ConstantUnits,
    DiscreteUnits,
    DistanceLogSumExp,
    EluFeatures,
    Entmax,
    Exponential,
    ExponentialUnits,
    GaussianUnits,
    KernelPotential,
    LaplaceUnits,
    LogSumExp,
    NormalisedScores,
    PoissonUnits,
    Polynomial,
    PositiveFeatures,
    ReluFeatures,
    SignUnits,
    SoftcapLogSumExp,
    Softmax1,
    SphereUnits,
    SquaredScores,
    units_potential,
)

P = functools.partial
STATE = {"readout": "state"}
#: Pulls so strong that with the anchor of .5 one of the tokens here would be near a fold, which is warned of.
NEAR = {**STATE, "anchor": 0.9}
#: Small scores, so that what grows like |z|^2 is bounded below.
SMALL = {**STATE, "beta": 0.01}

#: name -> (what makes the potential, options of the layer). The first word is the public name.
ADMISSIBLE = {
    "LogSumExp": (LogSumExp, {}),
    "Softmax1": (Softmax1, {}),
    "DistanceLogSumExp": (DistanceLogSumExp, {}),
    "Entmax": (Entmax, {}),
    "Entmax sparsemax": (P(Entmax, alpha=2.0), {}),
    "SoftcapLogSumExp": (P(SoftcapLogSumExp, cap=2.0), {}),
    "SquaredScores": (SquaredScores, SMALL),
    "SquaredScores near the field": (SquaredScores, {**STATE, "beta": 0.1, "anchor": 0.95}),
    "Polynomial": (Polynomial, SMALL),
    "Polynomial near the field": (Polynomial, {**STATE, "beta": 0.1, "anchor": 0.95}),
    "NormalisedScores": (NormalisedScores, NEAR),
    "KernelPotential PositiveFeatures": (P(KernelPotential, features=PositiveFeatures(16, 32)), {}),
    "KernelPotential EluFeatures": (P(KernelPotential, features=EluFeatures()), {}),
    "KernelPotential ReluFeatures": (P(KernelPotential, features=ReluFeatures()), {}),
    "units_potential BernoulliUnits": (units_potential(BernoulliUnits(0.3)), STATE),
    "units_potential ConstantUnits": (units_potential(ConstantUnits(0.5)), STATE),
    "units_potential DiscreteUnits": (units_potential(DiscreteUnits((-1, 0, 1))), NEAR),
    "units_potential SignUnits": (units_potential(SignUnits()), STATE),
    "units_potential SphereUnits": (units_potential(SphereUnits(3)), STATE),
    "units_potential GaussianUnits": (units_potential(GaussianUnits(0.1, 0.5)), SMALL),
    # Their domain is bounded: at small scores it is not left.
    "units_potential ExponentialUnits": (units_potential(ExponentialUnits(9.0)), SMALL),
    "units_potential LaplaceUnits": (units_potential(LaplaceUnits(0.1)), SMALL),
}
INADMISSIBLE = {
    "SquaredScores": (SquaredScores, "raise the anchor above"),
    "Polynomial": (Polynomial, "raise the anchor above"),
    "Polynomial cubes": (P(Polynomial, degree=3), "no anchor below 1 helps"),
    "Exponential": (Exponential, "no anchor below 1 helps"),
    "units_potential GaussianUnits": (units_potential(GaussianUnits(0.0, 2.0)), "raise the anchor above"),
    "units_potential PoissonUnits": (units_potential(PoissonUnits(1.0)), "no anchor below 1 helps"),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tokens():
    return torch.randn(2, 6, 64)


@pytest.mark.parametrize(("make", "options"), ADMISSIBLE.values(), ids=ADMISSIBLE)
def test_the_admissible_train_a_step_without_a_warning(make, options, recwarn):
    layer, x = ImplicitAttention(64, 4, potential=make, **options), tokens()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = (layer(x) - x).square().mean()
        assert layer.last_solve.converged.all()
        optimizer.zero_grad()
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert not recwarn.list


@pytest.mark.parametrize(("make", "remedy"), INADMISSIBLE.values(), ids=INADMISSIBLE)
def test_the_inadmissible_are_refused_with_their_remedy(make, remedy):
    options = {"potential": make, "readout": "state", "beta": 4.0}
    with pytest.raises(ValueError, match=rf"`potential` must leave .* a lower bound.*{remedy}"):
        ImplicitAttention(64, 4, **options)(tokens())
    # Nothing falls where nothing is solved.
    ImplicitAttention(64, 4, **options)(tokens(), max_steps=0)
    layer = ImplicitAttention(64, 4, unbounded="warn", **options)
    with pytest.warns(ConvergenceWarning, match=remedy):
        layer(tokens(), on_failure="ignore")
    assert Status.MAX_STEPS not in layer.last_solve.status
    with pytest.raises(ValueError, match="`unbounded` must be one of 'raise', 'warn', 'ignore'"):
        ImplicitAttention(64, 4, unbounded="never", **options)


def over_keys(made):
    """Whether `made` makes a potential of (keys, beta), or is given a law and returns what does."""
    if not callable(made) or getattr(made, "__module__", "").endswith("scored_keys"):
        return False
    try:
        signature = inspect.signature(made)
    except ValueError:
        return False
    return list(signature.parameters)[:2] == ["keys", "beta"] or "_Factory" in str(signature.return_annotation)


def test_no_potential_over_keys_is_left_out():
    listed = {name.split()[0] for name in (*ADMISSIBLE, *INADMISSIBLE)}
    public = {name for name in potentials.__all__ if over_keys(getattr(potentials, name))}
    assert public == listed


def test_no_law_and_no_features_are_left_out():
    named = {word for name in (*ADMISSIBLE, *INADMISSIBLE) for word in name.split()[1:]}
    laws = {
        name
        for name in potentials.__all__
        if isinstance(law := getattr(potentials, name), type) and issubclass(law, potentials.Units)
    }
    assert laws - {"Units"} <= named
    assert {name for name in potentials.__all__ if name.endswith("Features")} <= named | {"Features"}

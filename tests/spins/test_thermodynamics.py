"""Thermodynamics: derivatives of one log-partition function, consistent with each other and differentiable again."""

import dataclasses
import re
import warnings

import pytest
import torch

from implicit_attention import ConvergenceError, ConvergenceWarning, Implicit, Status
from implicit_attention.linear import GMRES
from implicit_attention.potentials import AmosResponse, GaussianUnits
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Approximation,
    Bethe,
    Enumeration,
    LogPartition,
    MeanField,
    SaddlePoint,
    SpinSystem,
    TransferMatrix,
    free_energy,
    magnetization,
    thermodynamics,
)
from implicit_attention.testing.numerics import random

B, N, D = 2, 4, 3
GAUSSIAN = AdaTAP(prior=GaussianUnits())
BETA = torch.tensor([0.6, 1.3], dtype=torch.float64)
SCALARS = ("free_energy", "log_partition", "internal_energy", "entropy", "heat_capacity")
OUTPUTS = (*SCALARS, "magnetization", "correlations", "susceptibility", "product")


def symmetric(*shape, seed=0, scale=0.3):
    couplings = scale * random(*shape, seed=seed)
    return (couplings + couplings.mT) / 2


def system(field=None, couplings=None, beta=BETA, **options):
    field = random(B, N, 1, seed=1) if field is None else field
    couplings = symmetric(B, N, N) if couplings is None else couplings
    return SpinSystem(couplings, field, beta, **options)


def read(found, name):
    """An output by name; of the susceptibility also one product."""
    if name == "susceptibility":
        return found.susceptibility()
    if name == "product":
        return found.susceptibility_product(random(*found.magnetization.shape, seed=7))
    return getattr(found, name)


def close(value, truth, tolerance=1e-12):
    torch.testing.assert_close(value, truth, rtol=tolerance, atol=tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Approximation):
    """Enumeration that says of sample 1 that it has not converged."""

    def log_partition(self, system):
        value, evidence = Enumeration().log_partition(system)
        status = torch.zeros_like(evidence.status)
        status[1] = Status.MAX_STEPS
        return LogPartition(value, evidence.amended(status=status, residual=evidence.residual + 0.5))


# Sum rules.


@pytest.mark.parametrize("block", [False, True])
def test_vectors_with_a_gaussian_prior(block):
    """All in closed form: log Z = b h.m/2 - log det A/2, m = b A^{-1} h, chi = b A^{-1}, A = 1 - b J."""
    field = random(B, N, D, seed=1)
    blocks = 0.1 * random(N, N, D, D)
    blocks = (blocks + blocks.transpose(0, 1).mT) / 2
    numbers = symmetric(B, N, N)
    eye = torch.eye(D).double()
    couplings = blocks.expand(B, N, N, D, D) if block else numbers[..., None, None] * eye
    matrix = couplings.transpose(-3, -2).reshape(B, N * D, N * D)
    inverse = torch.linalg.inv(torch.eye(N * D).double() - BETA[:, None, None] * matrix)
    mean = BETA[:, None, None] * inverse @ field.reshape(B, N * D, 1)
    second = (inverse + mean @ mean.mT).reshape(B, N, D, N, D)
    found = thermodynamics(system(field, blocks if block else numbers), GAUSSIAN)
    work = BETA * (field * mean.reshape(B, N, D)).sum((-2, -1)) / 2
    close(found.log_partition, work + torch.logdet(inverse) / 2)
    close(found.magnetization, mean.reshape(B, N, D))
    chi = (BETA[:, None, None] * inverse).reshape(B, N, D, N, D)
    close(found.susceptibility(), chi)
    v = random(B, N, D, seed=5)
    close(found.susceptibility_product(v), torch.einsum("ziajb,zjb->zia", chi, v))
    pairs = second.transpose(-3, -2)
    close(found.correlations, pairs if block else torch.einsum("zijaa->zij", pairs))
    close(
        magnetization(system(field, blocks if block else numbers), AdaTAP(prior=GaussianUnits())), found.magnetization
    )


# Derivatives of every output.


def test_shared_couplings_collect_the_gradients_of_all_samples():
    shared = symmetric(N, N).requires_grad_()
    own = shared.detach().expand(B, N, N).clone().requires_grad_()
    for couplings in (shared, own):
        found = thermodynamics(system(couplings=couplings), Enumeration())
        (found.heat_capacity.sum() + found.magnetization.square().sum()).backward()
    close(shared.grad, own.grad.sum(0))


def test_one_beta_for_all_collects_the_gradients_of_all_samples():
    one = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    each = torch.full((B,), 0.8, dtype=torch.float64, requires_grad=True)
    for beta in (one, each):
        thermodynamics(system(beta=beta), Enumeration()).entropy.sum().backward()
    close(one.grad, each.grad.sum())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_can_be_transformed(name):
    """torch.func.grad, vmap and jvp of a function that contains `thermodynamics`."""
    couplings = symmetric(N, N)
    batch = random(3, N, 1, seed=4)

    def function(field):
        return read(thermodynamics(SpinSystem(couplings, field, 0.9), Enumeration()), name).square().sum()

    field = batch[0].clone().requires_grad_()
    (truth,) = torch.autograd.grad(function(field), field)
    close(torch.func.grad(function)(batch[0]), truth)
    close(torch.vmap(function)(batch), torch.stack([function(h) for h in batch]))
    close(torch.vmap(torch.func.grad(function))(batch)[0], truth)
    tangent = random(N, 1, seed=6)
    close(torch.func.jvp(function, (batch[0],), (tangent,))[1], (truth * tangent).sum())


# Samples.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_answered_in_single(dtype):
    field, couplings = random(B, N, 1, seed=1).to(dtype), symmetric(B, N, N).to(dtype)
    found = thermodynamics(SpinSystem(couplings, field, BETA.to(dtype)), Enumeration())
    exact = thermodynamics(SpinSystem(couplings.double(), field.double(), BETA.to(dtype).double()), Enumeration())
    for name in OUTPUTS[:-1]:
        assert read(found, name).dtype == torch.float32
        close(read(found, name).double(), read(exact, name), 1e-5)
    for short in (free_energy, magnetization):
        assert short(SpinSystem(couplings, field, 0.5), Enumeration()).dtype == torch.float32


@pytest.mark.parametrize("spoiled", ["field", "couplings", "beta"])
@pytest.mark.parametrize(
    "method",
    [Enumeration(), MeanField(), SaddlePoint(), Bethe(), TAP(response=AmosResponse()), AdaTAP(), TransferMatrix()],
    ids=repr,
)
def test_a_lost_sample_spoils_no_gradient_of_what_it_shares_with_others(spoiled, method):
    chain = torch.diag(0.3 * random(N - 1), 1)
    couplings = chain + chain.mT if isinstance(method, TransferMatrix) else symmetric(N, N)
    shared = {"field": random(N, 1, seed=1), "couplings": couplings, "beta": torch.tensor(0.6).double()}
    leaves = [shared[name].requires_grad_() for name in shared if name != spoiled]
    given = {name: value.expand(B, *value.shape) for name, value in shared.items()}
    bad = given[spoiled].detach().clone()
    bad[1] = torch.nan
    given[spoiled] = bad

    def gradients(rows):
        found = thermodynamics(SpinSystem(**{k: v[rows] for k, v in given.items()}), method, on_failure="ignore")
        total = sum(read(found, name)[0].square().sum() for name in OUTPUTS if name != "product")
        return found, torch.autograd.grad(total, leaves)

    both, together = gradients(slice(None))
    alone = gradients(slice(1))[1]
    for name in OUTPUTS:
        assert read(both, name)[1].isnan().all(), name
        assert read(both, name)[0].isfinite().all(), name
    assert both.report.status[1] == Status.NONFINITE
    close(torch.cat([g.flatten() for g in together]), torch.cat([g.flatten() for g in alone]), 1e-9)


def test_unknown_couplings_that_all_share_lose_only_the_samples_where_both_sites_exist():
    couplings = symmetric(N, N)
    couplings[0, 1] = couplings[1, 0] = torch.nan
    mask = torch.tensor([[True, False, True, True], [True, True, True, True]])
    found = thermodynamics(system(couplings=couplings, mask=mask), Enumeration(), on_failure="ignore")
    known = thermodynamics(system(couplings=couplings.nan_to_num(), mask=mask), Enumeration())
    assert found.report.failed.tolist() == [False, True]
    for name in OUTPUTS:
        close(read(found, name)[0], read(known, name)[0], 0.0)


def test_where_a_method_finds_no_answer_every_output_is_nan():
    couplings = symmetric(B, N, N)
    couplings[1] *= 40  # of Gaussian spins, which then have no largest weight
    given = couplings.requires_grad_()
    method = GAUSSIAN
    found = thermodynamics(system(random(B, N, D, seed=1), given, 0.5), method, on_failure="ignore")
    for name in OUTPUTS:
        assert read(found, name)[1].isnan().all(), name
        assert read(found, name)[0].isfinite().all(), name
    sum(read(found, name)[0].sum() for name in OUTPUTS if name != "product").backward()
    assert given.grad[0].isfinite().all()


def test_a_gradient_that_was_not_found_is_told_as_asked():
    hasty = MeanField(adjoint=Implicit(GMRES(rtol=1e-12, max_steps=1)))
    text = "adjoint solve by GMRES, whose gradient is therefore wrong, failed for 2 of 2 problems"
    for function in (thermodynamics, lambda *a, **o: thermodynamics(*a, **o).susceptibility()):
        with pytest.raises(ConvergenceError, match=text):
            function(system(), hasty)
    with pytest.warns(ConvergenceWarning, match=text):
        found = thermodynamics(system(), hasty, on_failure="warn")
    assert found.report.adjoint.failed.all()
    assert not found.report.failed.any()
    assert thermodynamics(system(), hasty, on_failure="ignore").report.adjoint.failed.all()
    found = thermodynamics(system(), MeanField())
    found.susceptibility()
    # Of the many solves behind a matrix the worst counts.
    assert found.report.adjoint.failed.tolist() == [False] * B


# Failures and arguments.


def test_a_failed_sample_is_reported_as_asked():
    text = "Failing failed for 1 of 2 problems, first at 1: residual 5.0e-01"
    for function in (thermodynamics, free_energy, magnetization):
        with pytest.raises(ConvergenceError, match=re.escape(text)):
            function(system(), Failing())
        with pytest.warns(ConvergenceWarning, match=re.escape(text)):
            function(system(), Failing(), on_failure="warn")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(system(), Failing(), on_failure="ignore")
    found = thermodynamics(system(), Failing(), on_failure="ignore")
    assert found.report.failed.tolist() == [False, True]
    assert "1 CONVERGED, 1 MAX_STEPS" in repr(found)


def test_the_summary_names_what_matters():
    text = repr(thermodynamics(system(), Enumeration()))
    assert re.match(r"Thermodynamics\(mean over 2 samples: F -?[\d.]+, U -?[\d.]+, S -?[\d.]+, C [\d.]+; SolveR", text)

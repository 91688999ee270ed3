"""Near a fold no float32 gradient has a small residual: the best one there is counts as solved, a bad one does not."""

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    ConvergenceError,
    FixedPointMap,
    Implicit,
    LogSumExp,
    Status,
    solve,
)
from implicit_attention.linear import CG, GMRES
from implicit_attention.testing.numerics import random, relative_error


def fold(condition, dtype):
    """z = J z + b with a symmetric J, whose I - J has one small eigenvalue, as near a fold."""
    basis = torch.linalg.qr(random(24, 24))[0]
    eigenvalues = torch.ones(24, dtype=torch.float64)
    eigenvalues[:3] = torch.tensor([1 / condition, 0.1, 0.5])
    jacobian = torch.eye(24, dtype=torch.float64) - basis @ torch.diag(eigenvalues) @ basis.mT
    shift = (basis @ eigenvalues.diag() @ basis.mT @ random(24, seed=1)).to(dtype)
    problem = FixedPointMap(
        lambda z, b: z @ jacobian.to(dtype) + b,
        shift.expand(8, 24).clone().requires_grad_(),
        event_ndim=1,
        symmetric=True,
    )
    return problem, random(24, seed=1).to(dtype).expand(8, 24).clone()


def gradient(condition, dtype, method):
    problem, start = fold(condition, dtype)
    solution = solve(problem, start, solver=Anderson(rtol=1e-5), adjoint=Implicit(method))
    (solution.value * random(8, 24, seed=2).to(dtype)).sum().backward()
    return problem.inputs[0].grad, solution.adjoint


# The estimate takes the map for one that bends, and this one is linear.
@pytest.mark.filterwarnings("ignore:the gradients of 8 of 8 problems may be off:implicit_attention.ConvergenceWarning")
@pytest.mark.parametrize("method", [None, CG(rtol=1e-5), GMRES(rtol=1e-5)])
def test_what_rounding_leaves_is_no_failure(method):
    condition = 3e4
    single, report = gradient(condition, torch.float32, method)
    double, _ = gradient(condition, torch.float64, None)
    assert bool((report.status == Status.CONVERGED).all())
    assert relative_error(single.double(), double) < 10 * condition * torch.finfo(torch.float32).eps
    # It is for this that they are counted: some miss what was asked for.
    asked = 1e-5 * random(8, 24, seed=2).norm(dim=-1)
    assert bool((report.residual > asked).any())
    assert bool((report.residual <= report.tolerance).all())


def near_folds(count, dtype, curvature=2.6e-3):
    """Attention whose keys are far from the origin, with the state and the anchor at which a fold is near."""
    keys, z = 3 * (random(count, 128, 24) + random(count, 1, 24, seed=1)), random(count, 1, 24, seed=2) / 3
    beta = 24**-0.5
    p = (beta * z @ keys.mT).softmax(-1)
    mean = p @ keys
    covariance = (keys * p.mT).mT @ keys - mean.mT @ mean
    anchor = 1 - (1 - curvature) / (beta * torch.linalg.eigvalsh(covariance)[:, -1])
    field = mean + (z - mean) / anchor[:, None, None]
    keys, field, z, anchor = (t.to(dtype) for t in (keys, field, z, anchor))
    field.requires_grad_()
    return AnchoredEnergy(LogSumExp(keys, beta), field, anchor), z


def test_what_rounding_leaves_of_attention_near_a_fold_is_no_failure():
    count, found = 200, []
    for dtype in (torch.float32, torch.float64):
        energy, z = near_folds(count, dtype)
        solution = solve(energy, z, on_failure="ignore")
        (solution.value * random(count, 1, 24, seed=3).to(dtype)).sum().backward()
        found.append((energy.field.grad, solution))
    (single, solution), (double, _) = found
    assert bool((solution.adjoint.status <= Status.UNSTABLE).all())
    errors = (single.double() - double).norm(dim=-1) / double.norm(dim=-1)
    assert errors.max() < 1e-3
    # It is for this that they are counted.
    answers = single.norm(dim=-1) / energy.anchor.float()[:, None]
    left = solution.adjoint.residual / answers
    assert left.max() > 4 * torch.finfo(torch.float32).eps


def test_a_solve_that_ends_early_is_still_a_failure():
    with pytest.raises(ConvergenceError, match="whose gradient is therefore wrong"):
        gradient(3e4, torch.float32, CG(rtol=1e-5, max_steps=3))
    with pytest.raises(ConvergenceError, match="whose gradient is therefore wrong"):
        gradient(3e4, torch.float64, CG(rtol=1e-10, max_steps=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_a_singular_system_is_still_a_failure(dtype, seed):
    """GMRES drives its answer to 1/eps there, where rounding it would excuse everything."""
    basis = torch.linalg.qr(random(5, 5, seed=seed))[0]
    jacobian = (torch.eye(5, dtype=torch.float64) - basis @ torch.arange(5.0).double().diag() / 4 @ basis.mT).to(dtype)
    shift = torch.zeros(64, 5, dtype=dtype, requires_grad=True)
    problem = FixedPointMap(lambda z, b: z @ jacobian + b, shift, event_ndim=1)
    solution = solve(problem, torch.zeros(64, 5, dtype=dtype), adjoint=Implicit(GMRES(rtol=1e-5)), on_failure="ignore")
    (solution.value * random(64, 5, seed=seed + 9).to(dtype)).sum().backward()
    assert bool(solution.adjoint.failed.all())


def test_reports_say_it_in_one_line():
    _, report = gradient(10.0, torch.float64, None)
    accuracy = f"residual {report.residual.max():.1e}, tolerance {report.tolerance[report.residual.argmax()]:.1e}"
    assert repr(report).startswith(f"AdjointReport(8 CONVERGED; {accuracy}; evaluations")
    assert not bool(report.failed.any())
    problem, start = fold(10.0, torch.float64)
    fresh = solve(problem, start).adjoint
    assert repr(fresh) == "AdjointReport(no backward pass yet)"
    assert fresh.failed is None

"""Self-attention with moving keys: the energy, its factor 2 and its bounds; repeated attention and why it has none."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from implicit_attention import (
    Anderson,
    ConvergenceError,
    GradientDescent,
    NewtonKrylov,
    Picard,
    Status,
    Unrolled,
    solve,
)
from implicit_attention.diagnostics import diagnose, spectral_radius
from implicit_attention.energies import RepeatedSelfAttention, SelfAttentionEnergy
from implicit_attention.testing.energy import EnergyContract
from implicit_attention.testing.numerics import (
    check_derivatives,
    dense_gradients,
    dense_jacobian,
    random,
    relative_error,
)

pytestmark = pytest.mark.cases(4)

TIGHT = Anderson(rtol=0.0, atol=1e-13, max_steps=500)
KEYS = ("problem", "solver", "sharpness", "anchor")
MEASURE = Path(__file__).resolve().parents[2] / "docs" / "self_attention" / "measure.py"
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()


def some_mask():
    """Pairs left out at random, one row of the second sample altogether."""
    mask = random(2, 3, 3, seed=9) > -0.5
    mask[1, 2] = False
    return mask


def tensors():
    """Field, beta, anchor and bias, shaped to break wrong axes."""
    return (
        random(2, 3, 5, seed=3).requires_grad_(),
        torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True),
        torch.tensor([0.7, 0.8], dtype=torch.float64, requires_grad=True),
        random(2, 3, 3, seed=4).requires_grad_(),
    )


class TestWeightOne(EnergyContract):
    def make(self):
        return SelfAttentionEnergy(random(2, 3, 5, seed=3), 0.6, 0.7)


class TestWeightHalfWithoutAnchor(EnergyContract):
    def make(self):
        return SelfAttentionEnergy(random(2, 3, 5, seed=3), 0.6, weight=0.3)


class TestTensors(EnergyContract):
    def make(self):
        field, beta, anchor, bias = (t.detach() for t in tensors())
        return SelfAttentionEnergy(field, beta, anchor, weight=0.8, mask=some_mask(), bias=bias)


class TestBroadcast(EnergyContract):
    shape = (2, 4, 3, 5)

    def make(self):
        beta, anchor = random(4, seed=5).exp() / 3, torch.tensor(0.75, dtype=torch.float64)
        return SelfAttentionEnergy(random(2, 4, 3, 5), beta, anchor, mask=CAUSAL, bias=random(2, 1, 1, 3))


class TestBiasMasks(EnergyContract):
    def make(self):
        bias = random(2, 3, 3, seed=4).masked_fill(~some_mask(), -torch.inf)
        return SelfAttentionEnergy(random(2, 3, 5, seed=3), 0.6, 0.7, bias=bias)


# The energy, and the factor 2.


def test_energy_and_gradient_are_those_of_the_definition():
    field, x, bias = random(2, 3, 5, seed=3), random(2, 3, 5), random(3, 3, seed=4)
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    energy = SelfAttentionEnergy(field, 0.6, 0.2, weight=0.7, mask=mask, bias=bias)
    for sample in range(2):
        phi, attended = 0.0, torch.zeros(3, 5, dtype=torch.float64)
        for i in range(2):
            terms = {j: math.exp(0.6 * float(x[sample, i] @ x[sample, j]) + float(bias[i, j])) for j in range(i + 1)}
            phi += math.log(sum(terms.values())) / 0.6
            for j, term in terms.items():
                p = term / sum(terms.values())
                attended[i] += p * x[sample, j]
                attended[j] += p * x[sample, i]
        expected = x[sample].square().sum() / 2 - 0.2 * (field[sample] * x[sample]).sum() - 0.8 * 0.7 * phi
        torch.testing.assert_close(energy.energy(x)[sample], expected)
        gradient = x[sample] - 0.2 * field[sample] - 0.8 * 0.7 * attended
        torch.testing.assert_close(energy.gradient(x)[sample], gradient)


def test_bare_gradient_is_x_minus_both_sides():
    x = random(2, 3, 5)
    energy = SelfAttentionEnergy(x, 0.6)
    p = (0.6 * x @ x.mT).softmax(-1)
    torch.testing.assert_close(energy.probabilities(x), p)
    torch.testing.assert_close(energy.gradient(x), x - p @ x - p.mT @ x)


def test_consensus_is_doubled_at_weight_one_and_fixed_at_weight_half():
    consensus = random(2, 1, 5).expand(2, 3, 5)
    torch.testing.assert_close(SelfAttentionEnergy(consensus, 0.6).fixed_point_map(consensus), 2 * consensus)
    half = SelfAttentionEnergy(consensus, 0.6, weight=0.5)
    torch.testing.assert_close(half.fixed_point_map(consensus), consensus)
    torch.testing.assert_close(half.energy(consensus), torch.full((2,), -3 * math.log(3) / 1.2).double())


def star(count):
    """The state in which all look at the first token, with the largest sum_i max_j <x_i, x_j> for its norm, 1."""
    other = math.sqrt(1 / (2 * (count + math.sqrt(count))))
    x = torch.full((count, 1), other, dtype=torch.float64)
    x[0] = math.sqrt(1 - (count - 1) * other**2)
    return x


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_the_energy_is_bounded_below_up_to_a_coupling_of_one_over_one_plus_root_n(count):
    """So not at weight 1/2 without anchor, however few the tokens (two or more)."""
    x, limit = star(count), 1 / (1 + math.sqrt(count))
    for coupling, sign in ((0.99 * limit, 1), (1.01 * limit, -1)):
        energy = SelfAttentionEnergy(x, 1.0, weight=coupling)
        far = torch.stack([energy.energy(scale * x) for scale in (1e3, 1e4, 1e5)])
        assert (sign * far.diff() > 0).all()
        assert sign * far[-1] > 0
    assert count == 1 or limit < 0.5


def test_plain_steps_may_climb_and_short_ones_descend():
    """Two opposite tokens that see only each other have the largest curvature there is, 1 + c sqrt(N + 2)."""
    v = random(1, 5)
    x = torch.cat([v, -v])
    energy = SelfAttentionEnergy(x, 0.6, weight=0.6, mask=~torch.eye(2, dtype=torch.bool))
    assert not energy.plain_steps_descend
    torch.testing.assert_close(energy.hessian_product(x, x), 2.2 * x)
    assert energy.energy(energy.fixed_point_map(x)) > energy.energy(x)
    for size, sign in ((0.99 * 2 / 2.2, -1), (1.01 * 2 / 2.2, 1)):
        assert sign * (energy.energy(x - size * energy.gradient(x)) - energy.energy(x)) > 0


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_minimum_no_solver_claims_an_answer(weight, dtype):
    tokens = random(2, 16, 16, dtype=dtype)
    energy = SelfAttentionEnergy(tokens, 2 / 4, weight=weight)
    for solver in (Picard(max_steps=1000), Anderson(max_steps=1000), NewtonKrylov()):
        solution = solve(energy, tokens, solver=solver, on_failure="ignore")
        assert solution.failed.all(), (solver, solution)
        assert solution.value.isfinite().all()
        assert isinstance(solver, NewtonKrylov) or solution.status.eq(Status.DIVERGED).all()


def test_where_the_minimum_is_certain_every_solver_finds_one():
    tokens = random(2, 16, 16)
    energy = SelfAttentionEnergy(tokens, 2 / 4, 0.81)
    for solver in (Picard(rtol=1e-8), Anderson(rtol=1e-8), NewtonKrylov(rtol=1e-8), GradientDescent(0.5, rtol=1e-8)):
        solution = solve(energy, tokens, solver=solver)
        found = diagnose(energy, solution)
        assert (found.smallest_curvature > 0).all()


def test_a_causal_mask_leaks_through_the_keys_of_the_energy_only():
    x = random(2, 3, 5)
    changed = x.clone()
    changed[:, -1] += 1
    energy, repeated = (kind(x, 0.6, mask=CAUSAL) for kind in (SelfAttentionEnergy, RepeatedSelfAttention))
    assert (energy.gradient(changed) - energy.gradient(x))[:, :-1].abs().max() > 0.1
    mapped = [repeated.fixed_point_map(z)[:, :-1] for z in (x, changed)]
    assert torch.equal(*mapped)
    field = x.clone().requires_grad_()
    problem = RepeatedSelfAttention(field, 0.6, 0.4, mask=CAUSAL)
    (gradient,) = torch.autograd.grad(solve(problem, x, solver=TIGHT).value[:, :-1].sum(), field)
    assert gradient[:, -1].abs().max() < 1e-12
    assert gradient[:, 0].abs().max() > 0.1


# Repeated attention.


def repeated_cases():
    field, beta, anchor, bias = (t.detach() for t in tensors())
    mask = some_mask()
    return [
        RepeatedSelfAttention(field, 0.6, 0.3),
        RepeatedSelfAttention(field, 0.6),
        RepeatedSelfAttention(field, beta, anchor, mask=mask, bias=bias),
        RepeatedSelfAttention(field, beta[1], 0.3, mask=CAUSAL, bias=bias[0, :1]),
    ]


def test_repeated_attention_is_the_gradient_of_no_function():
    x = random(2, 3, 5)
    problem = RepeatedSelfAttention(x, 0.6)
    jacobian = dense_jacobian(problem, x)
    asymmetry = torch.linalg.matrix_norm(jacobian - jacobian.mT) / torch.linalg.matrix_norm(jacobian + jacobian.mT)
    assert (asymmetry > 0.1).all()
    assert not problem.symmetric
    assert not problem.has_energy
    with pytest.raises(ValueError, match="`problem` must have an energy for GradientDescent"):
        solve(problem, x, solver=GradientDescent())


@pytest.mark.parametrize("problem", repeated_cases())
def test_a_step_is_one_of_the_energy_at_the_frozen_context(problem):
    x = random(2, 3, 5)
    frozen, mapped = problem.frozen_energy(x), problem.fixed_point_map(x)
    torch.testing.assert_close(frozen.gradient(x), x - mapped)
    assert (frozen.energy(mapped) <= frozen.energy(x) - (mapped - x).square().sum(-1) / 2 + 1e-12).all()


def test_plain_steps_are_softmax_attention_repeated():
    x = random(2, 3, 5)
    solution = solve(RepeatedSelfAttention(x, 0.6), x, solver=Picard(max_steps=4, rtol=0, atol=0))
    for _ in range(4):
        x = scaled_dot_product_attention(x, x, x, scale=0.6)
    torch.testing.assert_close(solution.value, x)


def test_unanchored_consensus_is_a_continuum_without_implicit_gradient():
    x = random(2, 3, 5)
    beta = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    problem = RepeatedSelfAttention(x, beta)
    consensus = random(2, 1, 5, seed=7).expand(2, 3, 5)
    torch.testing.assert_close(problem.fixed_point_map(consensus), consensus)
    torch.testing.assert_close(spectral_radius(problem, consensus), torch.ones(2).double())
    end = solve(problem, x, solver=Picard(rtol=0, atol=1e-13))
    torch.testing.assert_close(end.value, end.value.mean(-2, keepdim=True).expand_as(x))
    with pytest.raises(ConvergenceError, match="adjoint"):
        end.value.sum().backward()
    steps = Picard(max_steps=60, rtol=0, atol=0)

    def repeated(beta):
        return solve(RepeatedSelfAttention(x, beta), x, solver=steps, adjoint=Unrolled()).value

    assert torch.autograd.gradcheck(repeated, (beta,), fast_mode=True)


def test_with_distances_for_scores_repeated_attention_descends_on_a_kernel_density():
    """Blurring mean shift: x_i - (P X)_i = (grad F)_i/Z_i with F = -1/(2 beta) sum_ij K_ij, Z_i = sum_j K_ij."""
    x, beta = random(4, 3).requires_grad_(), 0.6
    kernel = (-beta * torch.cdist(x, x).square() / 2).exp()
    (gradient,) = torch.autograd.grad(-kernel.sum() / (2 * beta), x)
    problem = RepeatedSelfAttention(x.detach(), beta, bias=-beta * x.detach().square().sum(-1) / 2)
    residual = x.detach() - problem.fixed_point_map(x.detach())
    torch.testing.assert_close(residual, gradient / kernel.detach().sum(-1, keepdim=True))


# Both problems.

BOTH = pytest.mark.parametrize("kind", [SelfAttentionEnergy, RepeatedSelfAttention])


@BOTH
def test_implicit_gradients_match_a_dense_solve(kind):
    field, beta, anchor, bias = tensors()
    problem = kind(field, beta, anchor, bias=bias, mask=some_mask())
    cotangent, inputs = random(2, 3, 5, seed=8), [t for t in problem.tensors() if t.requires_grad]
    value = solve(problem, field.detach(), solver=TIGHT).value
    dense = [g for g in dense_gradients(problem, value.detach(), cotangent) if g is not None]
    for gradient, expected in zip(torch.autograd.grad(value, inputs, cotangent), dense, strict=True):
        assert relative_error(gradient, expected) < 1e-9


@BOTH
def test_gradcheck_to_second_order(kind):
    def value(field, beta, anchor, bias):
        problem = kind(field, beta, anchor, bias=bias, mask=some_mask())
        return solve(problem, random(2, 3, 5, seed=3), solver=TIGHT).value

    check_derivatives(value, tensors(), fast_mode=True)


@BOTH
def test_tokens_may_be_permuted(kind):
    x, field, order = random(2, 3, 5), random(2, 3, 5, seed=3), [2, 0, 1]
    mapped = kind(field, 0.6, 0.3).fixed_point_map(x)
    torch.testing.assert_close(kind(field[:, order], 0.6, 0.3).fixed_point_map(x[:, order]), mapped[:, order])


@BOTH
def test_a_token_that_attends_to_none_is_only_anchored(kind):
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1], mask[:, 1] = False, False
    field = random(2, 3, 5).requires_grad_()
    value = solve(kind(field, 0.4, 0.7, mask=mask), field.detach(), solver=TIGHT).value
    torch.testing.assert_close(value[:, 1], 0.7 * field[:, 1])
    (gradient,) = torch.autograd.grad(value.sum(), field)
    torch.testing.assert_close(gradient[:, 1], torch.full((2, 5), 0.7).double())
    kept = solve(kind(field[:, ::2].detach(), 0.4, 0.7), field[:, ::2].detach(), solver=TIGHT).value
    torch.testing.assert_close(value[:, ::2].detach(), kept)


@BOTH
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_nan_does_not_reach_what_the_samples_share(kind, create_graph):
    """Not even on the way back, where 0 * NaN is NaN."""
    field, beta, anchor, bias = (t.detach() for t in tensors())
    shared = [t[0].requires_grad_() for t in (beta, anchor, bias)]

    def second_sample(x0):
        problem = kind(x0, shared[0], shared[1], bias=shared[2])
        solution = solve(problem, field, solver=TIGHT, on_failure="ignore")
        loss = solution.value[1].square().sum()
        return solution.status.tolist(), (loss, *torch.autograd.grad(loss, shared, create_graph=create_graph))

    status, bad = second_sample(field.index_fill(0, torch.tensor([0]), torch.nan))
    assert status == [Status.NONFINITE, Status.CONVERGED]
    torch.testing.assert_close(bad, second_sample(field)[1])


@BOTH
def test_without_an_anchor_the_field_is_not_read(kind):
    x = random(2, 3, 5)
    problem, other = kind(torch.full_like(x, torch.nan), 0.3), kind(x, 0.3)
    assert torch.equal(problem.fixed_point_map(x), other.fixed_point_map(x))
    if problem.has_energy:
        assert torch.equal(problem.energy(x), other.energy(x))


@BOTH
def test_a_subclass_that_reads_more_has_the_gradient_of_all(kind):
    class Shifted(kind):
        def __init__(self, field, shift):
            super().__init__(field, 0.6, 0.7)
            self.shift = shift

        def fixed_point_map(self, z):
            return super().fixed_point_map(z) + self.shift.sin()

        def energy(self, z):
            return super().energy(z) - (self.shift.sin() * z).sum((-1, -2))

    problem, cotangent = Shifted(random(2, 3, 5, seed=3), random(5).requires_grad_()), random(2, 3, 5, seed=2)
    value = solve(problem, problem.field, solver=TIGHT).value
    expected = dict(zip(("field", "shift"), dense_gradients(problem, value.detach(), cotangent), strict=True))
    assert relative_error(torch.autograd.grad(value, problem.shift, cotangent)[0], expected["shift"]) < 1e-9


# The documentation.


def test_the_tables_of_the_docs_are_those_of_the_committed_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["measure.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(MEASURE), run_name="__main__")
    assert end.value.code == 0


def test_the_committed_run_can_be_repeated():
    script = runpy.run_path(str(MEASURE))
    run = json.loads((MEASURE.parent / "collapse.json").read_text())
    for problem, solver in script["SOLVED"]:
        again = script["equilibrium"](problem, solver, 0.25, 0.9, script["tokens"]())
        (committed,) = (row for row in run["equilibria"] if all(row[k] == again[k] for k in KEYS))
        assert again.pop("status") == committed.pop("status")
        assert again == pytest.approx(committed, abs=1e-3)

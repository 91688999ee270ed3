"""What both problems of self-attention promise: gradients, samples on their own, masks, precision, arguments."""

import pytest
import torch

from implicit_attention import Anderson, Implicit, Picard, Status, Unrolled, solve
from implicit_attention.energies import RepeatedSelfAttention, SelfAttentionEnergy
from implicit_attention.problem import pullback
from implicit_attention.testing.numerics import dense_gradients, random, relative_error

pytestmark = pytest.mark.cases(4)

BOTH = pytest.mark.parametrize("kind", [SelfAttentionEnergy, RepeatedSelfAttention])
TIGHT = Anderson(rtol=0.0, atol=1e-13, max_steps=500)


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


@BOTH
def test_implicit_gradients_match_a_dense_solve_and_unrolled_steps(kind):
    field, beta, anchor, bias = tensors()
    problem = kind(field, beta, anchor, bias=bias, mask=some_mask())
    cotangent = random(2, 3, 5, seed=8)
    inputs = [t for t in problem.tensors() if t.requires_grad]
    value = solve(problem, field.detach(), solver=TIGHT).value
    gradients = torch.autograd.grad(value, inputs, cotangent)
    dense = [g for g in dense_gradients(problem, value.detach(), cotangent) if g is not None]
    many = Picard(max_steps=300, rtol=0, atol=0)
    unrolled = solve(problem, field.detach(), solver=many, adjoint=Unrolled()).value
    for gradient, expected, also in zip(
        gradients, dense, torch.autograd.grad(unrolled, inputs, cotangent), strict=True
    ):
        assert relative_error(gradient, expected) < 1e-9
        assert relative_error(also, expected) < 1e-9


@BOTH
def test_gradcheck_to_second_order(kind):
    def value(*inputs):
        field, beta, anchor, bias = inputs
        problem = kind(field, beta, anchor, bias=bias, mask=some_mask())
        return solve(problem, random(2, 3, 5, seed=3), solver=TIGHT, adjoint=Implicit()).value

    assert torch.autograd.gradcheck(value, tensors(), fast_mode=True)
    assert torch.autograd.gradgradcheck(value, tensors(), fast_mode=True)


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
@pytest.mark.parametrize("poisoned", ["field", "beta", "anchor", "bias"])
def test_a_nan_stays_in_its_sample(kind, poisoned):
    clean = dict(zip(("field", "beta", "anchor", "bias"), (t.detach() for t in tensors()), strict=True))
    bad = clean | {poisoned: clean[poisoned].index_fill(0, torch.tensor([0]), torch.nan)}

    def solved(values, create_graph):
        shared = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
        field = values["field"].clone().requires_grad_()
        problem = kind(field, values["beta"], values["anchor"], bias=values["bias"] + shared)
        return second_sample(problem, clean["field"], (shared, field), create_graph)

    for create_graph in (False, True):
        unharmed(solved(bad, create_graph), solved(clean, create_graph))


@BOTH
def test_a_nan_does_not_reach_what_the_samples_share(kind):
    """Not even on the way back, where 0 * NaN is NaN."""
    field, beta, anchor, bias = (t.detach() for t in tensors())
    shared = [t[0].requires_grad_() for t in (beta, anchor, bias)]

    def solved(x0, create_graph):
        problem = kind(x0, shared[0], shared[1], bias=shared[2])
        return second_sample(problem, field, shared, create_graph)

    for create_graph in (False, True):
        bad = solved(field.index_fill(0, torch.tensor([0]), torch.nan), create_graph)
        unharmed(bad, solved(field, create_graph))


def second_sample(problem, initial, inputs, create_graph):
    """The solution, and the gradients of a loss of the second sample alone."""
    solution = solve(problem, initial, solver=TIGHT, on_failure="ignore")
    return solution, torch.autograd.grad(solution.value[1].square().sum(), inputs, create_graph=create_graph)


def unharmed(bad, clean):
    assert bad[0].status.tolist() == [Status.NONFINITE, Status.CONVERGED]
    torch.testing.assert_close(bad[0].value[1], clean[0].value[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(bad[1], clean[1])


@BOTH
def test_without_an_anchor_the_field_is_not_read(kind):
    x = random(2, 3, 5)
    problem, other = kind(torch.full_like(x, torch.nan), 0.3), kind(x, 0.3)
    assert torch.equal(problem.fixed_point_map(x), other.fixed_point_map(x))
    if problem.has_energy:
        assert torch.equal(problem.energy(x), other.energy(x))


@BOTH
def test_half_precision_is_solved_in_float32(kind):
    inputs = [t.detach().bfloat16().requires_grad_() for t in tensors()]
    field, beta, anchor, bias = inputs
    solution = solve(kind(field, beta, anchor, bias=bias), field.detach(), solver=Picard(rtol=1e-5))
    assert solution.value.dtype == torch.float32
    exact = kind(*(t.detach().double() for t in inputs[:3]), bias=bias.detach().double())
    truth = solve(exact, field.detach().double(), solver=TIGHT).value
    assert relative_error(solution.value, truth) < 1e-4
    gradients = torch.autograd.grad(solution.value.sum(), inputs)
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in gradients)


@BOTH
def test_empty_batches_and_no_tokens_return_empty(kind):
    for shape in ((0, 3, 5), (2, 0, 5)):
        field = torch.zeros(shape)
        assert solve(kind(field, 0.6, 0.5), field).value.shape == shape


@BOTH
def test_a_subclass_that_reads_more_is_differentiated_by_autograd(kind):
    class Shifted(kind):
        def __init__(self, field, shift):
            super().__init__(field, 0.6, 0.7)
            self.shift = shift

        def fixed_point_map(self, z):
            return super().fixed_point_map(z) + self.shift.sin()

    problem = Shifted(random(2, 3, 5, seed=3), random(5))
    x, u = random(2, 3, 5), random(2, 3, 5, seed=2)
    for fast, slow in zip(problem.linearize(x).vjp_tensors(u), pullback(problem, x, u), strict=True):
        torch.testing.assert_close(fast, slow)


@BOTH
def test_a_subclass_that_hides_a_tensor_is_refused(kind):
    hidden = random(5).requires_grad_()

    class Shifted(kind):
        def fixed_point_map(self, z):
            return super().fixed_point_map(z) + hidden

    with pytest.raises(ValueError, match="requires grad but is not declared"):
        solve(Shifted(random(2, 3, 5), 0.6, 0.7), random(2, 3, 5))


@BOTH
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"field": torch.zeros(5)}, ValueError, "`field` must have at least 2 axes"),
        ({"field": torch.zeros(3, 5, dtype=torch.int32)}, TypeError, "`field` must have a floating-point dtype"),
        ({"beta": 0.0}, ValueError, "`beta` must be > 0, got 0.0"),
        ({"beta": torch.zeros(2)}, ValueError, "`beta` must be > 0 everywhere, got 0.0; parametrise it"),
        ({"beta": torch.ones(3)}, ValueError, "`beta` must broadcast to the leading axes of `field`"),
        ({"beta": torch.ones(2).double()}, ValueError, "`beta` must have the dtype of `field`"),
        ({"beta": None}, TypeError, "`beta` must be a number"),
        ({"anchor": 1.1}, ValueError, r"`anchor` must be in \[0, 1\], got 1.1"),
        ({"anchor": torch.tensor(-0.5)}, ValueError, r"`anchor` must be in \[0, 1\] everywhere, got -0.5"),
        ({"anchor": torch.ones(3)}, ValueError, "`anchor` must broadcast to the leading axes of `field`"),
        ({"mask": torch.ones(3, 3)}, TypeError, "`mask` must be a boolean tensor"),
        ({"mask": torch.ones(4, 3, dtype=torch.bool)}, ValueError, r"`mask` must broadcast to \(\*batch, N, N\)"),
        ({"bias": torch.ones(2, 4, 3)}, ValueError, r"`bias` must broadcast to \(\*batch, N, N\) = \(2, 3, 3\)"),
        ({"bias": torch.ones(3, 3).double()}, ValueError, "`bias` must have the dtype of `field`"),
    ],
)
def test_bad_arguments_are_named(kind, change, error, words):
    arguments = {"field": torch.zeros(2, 3, 5), "beta": 1.0, "anchor": 0.5}
    with pytest.raises(error, match=words):
        kind(**(arguments | change))


def test_bad_weights_and_states_are_named():
    field = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"`weight` must be > 0, got 0\.0"):
        SelfAttentionEnergy(field, 1.0, weight=0.0)
    with pytest.raises(ValueError, match=r"`initial` must have the field's shape \(2, 3, 5\), got \(2, 4, 5\)"):
        solve(RepeatedSelfAttention(field, 1.0), torch.zeros(2, 4, 5))

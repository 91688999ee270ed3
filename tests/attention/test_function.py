"""equilibrium_attention: explicit attention at no steps, a reference solve at the equilibrium."""

import math

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    Implicit,
    NewtonKrylov,
    Phantom,
    Picard,
    Status,
    Unrolled,
    UnsupportedImplementation,
    equilibrium_attention,
)
from implicit_attention.testing.numerics import equilibrium_reference, random
from implicit_attention.testing.potential import Allocations

B, H, N, M, D, E = 2, 4, 3, 7, 8, 5
TIGHT = Anderson(rtol=1e-12, atol=1e-13)


def inputs(*, keys=M, kv_heads=H, dtype=torch.float64, seed=0):
    shapes = ((B, H, N, D), (B, kv_heads, keys, D), (B, kv_heads, keys, E))
    return tuple(random(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes))


def masks(rows=N, keys=M):
    """Kinds of masks by name; none of them leaves a row empty unless it says so."""
    arbitrary = random(B, H, rows, keys, seed=9) > -0.5
    arbitrary[..., 0] = True
    empty = arbitrary.clone()
    empty[0, 1, 2] = False
    empty[1, :, 0] = False
    padding = torch.arange(keys) < torch.tensor([keys - 2, keys])[:, None, None, None]
    additive = random(rows, keys, seed=8)
    return {
        "none": None,
        "padding": padding,
        "arbitrary": arbitrary,
        "rows empty": empty,
        "one for all": arbitrary[0, 0],
        "additive": additive,
        "additive, per head": random(H, rows, keys, seed=7),
        "additive with -inf": additive.masked_fill(~arbitrary[0, 0], -math.inf),
        "additive, rows empty": random(B, 1, rows, keys, seed=6).masked_fill(~empty[:, :1], -math.inf),
    }


@pytest.mark.parametrize("keys", [M, 80])
@pytest.mark.parametrize("anchor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", masks())
def test_no_steps_are_scaled_dot_product_attention(kind, anchor, keys):
    query, key, value = inputs(keys=keys, dtype=torch.float32)
    mask = masks(keys=keys)[kind]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    output, solution = equilibrium_attention(query, key, value, mask, anchor=anchor, max_steps=0, return_solution=True)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert bool((solution.status == Status.EXPLICIT).all())


@pytest.mark.parametrize("keys", [M, 80])
def test_no_steps_have_the_gradients_of_scaled_dot_product_attention(keys):
    given = [t.requires_grad_() for t in inputs(keys=keys)]
    mask = random(N, keys, seed=5).requires_grad_()
    cotangent = random(B, H, N, E, seed=4)
    pairs = []
    for attention in (F.scaled_dot_product_attention, equilibrium_attention):
        options = {"max_steps": 0} if attention is equilibrium_attention else {}
        pairs.append(torch.autograd.grad(attention(*given, mask, **options), [*given, mask], cotangent))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("keys", [M, 80])
@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("anchor", [0.3, 0.7])
def test_equilibrium_is_that_of_a_reference_solve(kind, anchor, keys):
    query, key, value = inputs(keys=keys)
    mask = masks(keys=keys)[kind]
    expected = equilibrium_reference(query, key, value, mask, beta=D**-0.5, anchor=anchor)
    output = equilibrium_attention(query, key, value, mask, anchor=anchor, solver=TIGHT)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    assert float((output - equilibrium_attention(query, key, value, mask, max_steps=0)).abs().max()) > 1e-3


@pytest.mark.parametrize("keys", [3, 7, 80])
def test_causal_is_aligned_top_left(keys):
    query, key, value = inputs(keys=keys)
    lower = torch.ones(N, keys, dtype=torch.bool).tril()
    for options in ({"max_steps": 0}, {"solver": TIGHT}):
        by_flag = equilibrium_attention(query, key, value, is_causal=True, **options)
        torch.testing.assert_close(by_flag, equilibrium_attention(query, key, value, lower, **options))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    actual = equilibrium_attention(query, key, value, is_causal=True, max_steps=0)
    torch.testing.assert_close(actual, expected)
    expected = equilibrium_reference(query, key, value, lower, beta=D**-0.5, anchor=0.5)
    torch.testing.assert_close(by_flag, expected, rtol=1e-9, atol=1e-9)


def test_causal_and_padding_are_both_obeyed():
    query, key, value = inputs()
    padding = masks()["padding"]
    both = padding & torch.ones(N, M, dtype=torch.bool).tril()
    for mask in (padding, torch.zeros(padding.shape).double().masked_fill(~padding, -math.inf)):
        output = equilibrium_attention(query, key, value, mask, is_causal=True)
        torch.testing.assert_close(output, equilibrium_attention(query, key, value, both), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keys", [M, 80])
@pytest.mark.parametrize("kind", ["none", "padding", "arbitrary", "rows empty", "one for all", "additive, per head"])
def test_grouped_queries_equal_repeated_keys(kind, keys):
    query, key, value = inputs(keys=keys, kv_heads=2)
    mask = masks(keys=keys)[kind]
    scale, anchor = torch.tensor([0.2, 0.3, 0.4, 0.5]).double(), torch.tensor([0.2, 0.4, 0.6, 0.8]).double()
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    options = {"scale": scale, "anchor": anchor, "solver": TIGHT, "return_solution": True}
    output, solution = equilibrium_attention(query, key, value, mask, enable_gqa=True, **options)
    expected, plain = equilibrium_attention(query, *repeated, mask, **options)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(solution.energy, plain.energy, rtol=1e-10, atol=1e-10)
    assert solution.status.shape == plain.status.shape == (B, H, N)
    explicit = equilibrium_attention(query, key, value, mask, enable_gqa=True, max_steps=0)
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    torch.testing.assert_close(explicit, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("keys", [M, 80])
@pytest.mark.parametrize("adjoint", [Implicit(), Unrolled()])
def test_fully_masked_rows_give_zeros_and_finite_gradients(keys, adjoint):
    given = [t.requires_grad_() for t in inputs(keys=keys)]
    for kind in ("rows empty", "additive, rows empty"):
        mask = masks(keys=keys)[kind]
        for options in ({"max_steps": 0}, {"adjoint": adjoint}):
            output = equilibrium_attention(*given, mask, **options)
            assert bool((output[1, 0, 0] == 0).all())
            for gradient in torch.autograd.grad(output.square().sum(), given):
                assert bool(gradient.isfinite().all())


@pytest.mark.slow
def test_gradients_of_every_order():
    given = [t.requires_grad_() for t in inputs()]
    query, key, value = (t[:1, :2] for t in given)
    mask = random(N, M, seed=5).requires_grad_()
    scale = torch.tensor([0.3, 0.5]).double().requires_grad_()
    anchor = torch.tensor([0.4, 0.7]).double().requires_grad_()

    def attention(query, key, value, mask, scale, anchor):
        return equilibrium_attention(query, key, value, mask, scale=scale, anchor=anchor, solver=TIGHT)

    arguments = [t.detach().requires_grad_() for t in (query, key, value, mask, scale, anchor)]
    assert torch.autograd.gradcheck(attention, arguments)
    assert torch.autograd.gradgradcheck(attention, arguments)


def test_second_order_through_the_fused_kernel():
    arguments = [t[:1, :1].requires_grad_() for t in inputs(keys=70)]
    for options in ({"max_steps": 0}, {"solver": TIGHT}):
        assert torch.autograd.gradgradcheck(lambda *t: equilibrium_attention(*t, **options), arguments, fast_mode=True)  # noqa: B023


@pytest.mark.parametrize("keys", [M, 80])
def test_a_nan_stays_where_it_was_born(keys):
    query, key, value = inputs(keys=keys)
    mask = torch.ones(N, keys, dtype=torch.bool)
    mask[1:, 2] = False
    clean = equilibrium_attention(query, key, value, mask)
    for what in (1, 2):
        given = [query.clone(), key.clone(), value.clone()]
        given[what][0, 0, 2] = math.nan
        given[0].requires_grad_()
        output = equilibrium_attention(*given, mask, on_failure="ignore")
        assert bool(output[0, 0, 0].isnan().any())
        output[0, 0, 0] = clean[0, 0, 0]
        assert torch.equal(output.detach(), clean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [M, 80])
@pytest.mark.parametrize("kind", ["none", "rows empty", "additive"])
def test_half_precision_is_the_truth_rounded_once(dtype, keys, kind):
    narrow = [t.to(dtype) for t in inputs(keys=keys)]
    mask = masks(keys=keys)[kind]
    narrow.append(mask if mask is None or mask.dtype == torch.bool else mask.to(dtype))
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in narrow]
    for scale in (None, torch.full((H,), 0.3)):
        options = {"solver": Anderson(rtol=1e-6), "return_solution": True}
        output, solution = equilibrium_attention(*narrow, scale=scale, **options)
        scale = None if scale is None else scale.double()
        truth = equilibrium_attention(*wide, scale=scale, **options)[0]
        assert output.dtype == dtype
        assert solution.value.dtype == torch.float32
        rounding = torch.finfo(dtype).eps / 2 * truth.abs()
        assert bool(((output.double() - truth).abs() <= rounding + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keys", [M, 80])
def test_no_steps_in_half_precision_err_no_more_than_explicit_attention(dtype, keys):
    narrow = [t.to(dtype) for t in inputs(keys=keys)]
    truth = F.scaled_dot_product_attention(*(t.double() for t in narrow))
    budget = 2 * float((F.scaled_dot_product_attention(*narrow).double() - truth).abs().max())
    output = equilibrium_attention(*narrow, max_steps=0)
    assert output.dtype == dtype
    assert float((output.double() - truth).abs().max()) <= budget
    if keys >= 64:
        query, key, _ = narrow
        fused = equilibrium_attention(query, key, key, max_steps=0)
        assert torch.equal(fused, F.scaled_dot_product_attention(query, key, key))


def test_empty_batches_and_no_queries():
    query, key, value = inputs()
    assert equilibrium_attention(query[:0], key[:0], value[:0]).shape == (0, H, N, E)
    assert equilibrium_attention(query[:, :, :0], key, value).shape == (B, H, 0, E)


def test_leading_axes_broadcast():
    query, key, value = inputs()
    output = equilibrium_attention(query, key[0, 0], value[0, 0])
    expected = equilibrium_attention(query, key[0, 0].expand(B, H, M, D), value[0, 0].expand(B, H, M, E))
    torch.testing.assert_close(output, expected)
    assert equilibrium_attention(query[0, 0], key, value).shape == (B, H, N, E)
    assert equilibrium_attention(query[0, 0], key[0, 0], value[0, 0]).shape == (N, E)


# Every option changes something.


def test_dropout_drops_weights_of_the_read_out_only():
    torch.manual_seed(0)
    query, key, value = inputs(keys=80)
    dropped, solution = equilibrium_attention(query, key, value, dropout_p=0.5, return_solution=True)
    kept, plain = equilibrium_attention(query, key, value, return_solution=True)
    assert not torch.allclose(dropped, kept)
    assert torch.equal(solution.value, plain.value)
    mean = torch.stack([equilibrium_attention(query, key, value, dropout_p=0.5) for _ in range(300)]).mean(0)
    assert float((mean - kept).abs().max()) < 0.15
    assert bool((equilibrium_attention(query, key, value, dropout_p=1.0) == 0).all())


def test_scale_and_anchor_change_the_answer():
    given = inputs()
    plain = equilibrium_attention(*given)
    assert not torch.allclose(equilibrium_attention(*given, scale=2.0), plain)
    assert not torch.allclose(equilibrium_attention(*given, anchor=0.9), plain)
    heads = torch.tensor([0.1, 0.5, 1.0, 2.0]).double()
    per_head = equilibrium_attention(*given, scale=heads, solver=TIGHT)
    alone = [
        equilibrium_attention(*(t[:, h] for t in given), scale=float(s), solver=TIGHT) for h, s in enumerate(heads)
    ]
    torch.testing.assert_close(per_head, torch.stack(alone, dim=1), rtol=1e-9, atol=1e-9)
    assert torch.equal(equilibrium_attention(*given, scale=D**-0.5), plain)


@pytest.mark.parametrize("solver", [Picard(), Anderson(), Broyden(), NewtonKrylov()])
def test_every_solver_finds_it(solver):
    query, key, value = inputs()
    output, solution = equilibrium_attention(query, key, value, solver=solver, return_solution=True)
    expected = equilibrium_reference(query, key, value, beta=D**-0.5, anchor=0.5)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
    other = equilibrium_attention(query, key, value, solver=TIGHT, return_solution=True)[1]
    assert bool((solution.residual.amax() > other.residual.amax()).all())


def test_budgets_and_failures():
    given = inputs()
    with pytest.warns(ConvergenceWarning, match="failed for"):
        equilibrium_attention(*given, max_steps=1)
    with pytest.raises(ConvergenceError):
        equilibrium_attention(*given, max_steps=1, on_failure="raise")
    few = equilibrium_attention(*given, max_steps=1, on_failure="ignore")
    assert not torch.equal(few, equilibrium_attention(*given))
    budget = Picard(rtol=0, atol=0, max_steps=3)
    output, solution = equilibrium_attention(*given, solver=budget, adjoint=Unrolled(), return_solution=True)
    assert bool((solution.status == Status.BUDGET).all())
    assert not torch.equal(output, few)


def test_a_fixed_budget_is_unrolled_unless_it_is_told_otherwise():
    query, key, value = (t.requires_grad_() for t in inputs())
    budget = Picard(rtol=0, atol=0, max_steps=3)
    by_default, unrolled, phantom = (
        torch.autograd.grad(
            equilibrium_attention(query, key, value, solver=budget, adjoint=adjoint).square().sum(), (query, key, value)
        )
        for adjoint in (None, Unrolled(), Phantom(steps=1))
    )
    for ours, theirs, other in zip(by_default[:2], unrolled[:2], phantom[:2], strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.allclose(ours, other)


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}], ids=str)
def test_reference_implementation_uses_no_fused_kernel(options):
    given = inputs(keys=80, dtype=torch.float32)
    fused = equilibrium_attention(*given)
    for impl in ("auto", "reference"):
        torch.manual_seed(0)
        with Allocations() as seen:
            output = equilibrium_attention(*given, impl=impl, **options)
        assert any("scaled_dot_product" in operator for operator in seen.operators) == (impl == "auto")
        assert torch.allclose(output, fused, rtol=1e-4, atol=1e-5) == (not options)


def test_what_the_kernels_cannot_do_is_refused():
    given, bias = inputs(keys=80), random(N, 80).requires_grad_()
    with pytest.raises(UnsupportedImplementation, match="with an additive mask that requires grad"):
        equilibrium_attention(*given, bias, impl="native")
    with pytest.raises(UnsupportedImplementation, match=r"inside torch\.func"):
        torch.func.grad(lambda q: equilibrium_attention(q, *given[1:], impl="native").sum())(given[0])


def test_a_wide_mask_is_not_rounded_by_narrow_queries():
    narrow = [t.bfloat16() for t in inputs()]
    bias = 30 * random(N, M, dtype=torch.float32)
    truth = F.scaled_dot_product_attention(*(t.double() for t in narrow), bias.double())
    output = equilibrium_attention(*narrow, bias, max_steps=0)
    assert output.dtype == torch.bfloat16
    assert float((output.double() - truth).abs().max()) < 2e-2


def test_numbers_per_head_may_be_wider_than_the_queries():
    given = inputs(dtype=torch.float32)
    heads = torch.tensor([0.1, 0.5, 0.7, 0.9], dtype=torch.float64)
    expected = equilibrium_attention(*given, scale=heads.float(), anchor=heads.float())
    assert torch.equal(equilibrium_attention(*given, scale=heads, anchor=heads), expected)


@pytest.mark.parametrize("max_steps", [0, None])
@pytest.mark.parametrize(("first", "rows"), [(0, 9), (0, 5), (3, 5), (4, 1), (8, 1), (3, 9), (20, 2)])
def test_a_part_of_a_causal_sequence_says_where_it_begins(first, rows, max_steps):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for n in (rows, 9, 9))
    mask = torch.arange(9) <= torch.arange(first, first + rows)[:, None]
    found = equilibrium_attention(query, key, value, is_causal=True, query_offset=first, max_steps=max_steps)
    expected = equilibrium_attention(query, key, value, attn_mask=mask, max_steps=max_steps)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_a_causal_sequence_trains_in_half_precision_without_steps():
    gradients = []
    for is_causal in (True, False):
        given = [random(2, n, 4, seed=i).bfloat16().requires_grad_() for i, n in enumerate((9, 80, 80))]
        mask = None if is_causal else torch.arange(80) <= torch.arange(50, 59)[:, None]
        offset = {"is_causal": True, "query_offset": 50} if is_causal else {}
        output = equilibrium_attention(*given, mask, max_steps=0, **offset)
        output.square().sum().backward()
        gradients.append([output.detach(), *(t.grad for t in given)])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_graph_of_open_sizes_takes_masks(kind):
    torch._dynamo.reset()
    query, key, value = (random(2, 4, n, 8, seed=i) for i, n in enumerate((6, 5, 5)))
    mask = random(6, 5, seed=3) if kind == "additive" else random(6, 5, seed=3) > -0.5
    compiled = torch.compile(equilibrium_attention, fullgraph=True, dynamic=True, backend="eager")
    expected = equilibrium_attention(query, key, value, mask)
    torch.testing.assert_close(compiled(query, key, value, mask), expected, rtol=1e-10, atol=1e-10)

"""LogSumExp.readout: softmax attention in values of its own, fused where it may be, with derivatives of every order."""

import pytest
import torch
import torch.nn.functional as F

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    Broyden,
    GradientDescent,
    LogSumExp,
    NewtonKrylov,
    Picard,
    solve,
)
from implicit_attention.testing.numerics import check_close, random
from implicit_attention.testing.potential import Allocations

FEW, MANY = 7, 70  # without and with the fused kernels
COUNTS = pytest.mark.parametrize("count", [FEW, MANY])
FUSED = "scaled_dot_product"


def masked(form, count, dtype=torch.float64):
    """Options of LogSumExp for states (2, 3, 4, 5), and the same as torch's attention takes them."""
    pairs = random(2, 1, 4, count, seed=2) > 0
    pairs[0, 0, 1] = False
    padding = random(2, 1, 1, count, seed=3) > 0
    bias = random(2, 3, 4, count, seed=4, dtype=dtype)
    lowest = torch.zeros(2, 1, 4, count, dtype=dtype).masked_fill(~pairs, torch.finfo(dtype).min)
    infinite = torch.zeros(2, 1, 4, count, dtype=dtype).masked_fill(~pairs, -torch.inf)
    causal = torch.ones(4, count, dtype=torch.bool).tril()
    options = {
        "none": ({}, None),
        "mask": ({"mask": pairs}, pairs),
        "padding": ({"mask": padding}, padding),
        "causal": ({"mask": causal}, causal),
        "bias": ({"bias": bias}, bias),
        "bias of keys": ({"bias": bias[0, 0, 0]}, bias[0, 0, :1]),
        "mask and bias": ({"mask": padding, "bias": bias}, bias.where(padding, -torch.inf)),
        "-inf": ({"bias": infinite}, infinite),
        "lowest": ({"bias": lowest}, lowest),
    }
    return options if form is None else options[form]


FORMS = pytest.mark.parametrize("form", list(masked(None, FEW)))


@FORMS
@COUNTS
@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_it_is_scaled_dot_product_attention_with_its_gradients(form, count, size, dtype, tolerance):
    options, attn_mask = masked(form, count, dtype)
    shapes = (2, 3, 4, 5), (2, 3, count, 5), (2, 3, count, size)
    z, keys, values = (random(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate(shapes))
    out = LogSumExp(keys, 0.7, **options).readout(z, values)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # Torch's gradient of a row without keys may be NaN: there it gets one, and no cotangent.
        attn_mask = attn_mask | ~attn_mask.any(-1, keepdim=True)
    expected = F.scaled_dot_product_attention(z, keys, values, attn_mask=attn_mask, scale=0.7)
    empty = torch.zeros(2, 3, 4, 1, dtype=torch.bool)
    empty[0, :, 1] = form in ("mask", "-inf")
    expected = expected.masked_fill(empty, 0.0)
    assert out.shape == (2, 3, 4, size)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    cotangent = random(*out.shape, seed=7, dtype=dtype)
    if form == "lowest":
        cotangent[0, :, 1] = 0  # torch's gradient of such a row is wrong; see the test of it below
    by_torch = torch.autograd.grad(expected, (z, keys, values), cotangent)
    for differentiable in (True, False):
        got = torch.autograd.grad(out, (z, keys, values), cotangent, create_graph=differentiable)
        for a, b in zip(got, by_torch, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_without_a_mask_the_bits_are_those_of_torch(dtype):
    z, keys, values = (random(2, 3, n, 16, seed=n, dtype=dtype) for n in (4, MANY, MANY))
    expected = F.scaled_dot_product_attention(z, keys, values, scale=0.25)
    assert torch.equal(LogSumExp(keys, 0.25).readout(z, values), expected)
    assert torch.equal(LogSumExp(keys, 0.25).readout(z.requires_grad_(), values), expected)


@pytest.mark.by_name(slow=r"\[64-bias")
@pytest.mark.parametrize("form", ["none", "mask", "bias", "lowest"])
@pytest.mark.parametrize("count", [4, 64])
def test_first_and_second_derivatives(form, count):
    z, keys, values = random(2, 2, 2), random(2, count, 2, seed=1), random(2, count, 1, seed=2)
    beta = torch.tensor([0.5, 1.3], dtype=torch.float64)
    mask, bias = None, None
    if form == "mask":
        mask = random(2, 2, count, seed=3) > 0
        mask[0, 1] = False
    if form == "lowest":
        bias = torch.zeros(2, count, dtype=torch.float64)
        bias[0] = torch.finfo(torch.float64).min
    tracked = [t.requires_grad_() for t in (z, keys, values, beta)]
    tracked += [random(2, count, seed=4).requires_grad_()] if form == "bias" else []

    def readout(z, keys, values, beta, given=None):
        return LogSumExp(keys, beta, mask=mask, bias=bias if given is None else given).readout(z, values)

    with Allocations() as seen:
        readout(*tracked)
    assert any(FUSED in name for name in seen.operators) == (count == 64 and form != "bias")
    assert torch.autograd.gradcheck(readout, tracked)
    assert torch.autograd.gradgradcheck(readout, tracked)


@pytest.mark.parametrize("form", ["none", "padding", "mask"])
@pytest.mark.parametrize("size", [3, 16])
def test_the_weights_are_never_stored(form, size):
    """N = M = 128: neither the answer nor its gradients hold N x M numbers, nor a mask more than it has."""
    z, keys, values = (random(2, 3, 128, d, seed=i).requires_grad_() for i, d in enumerate((5, 5, size)))
    mask = {"padding": random(2, 1, 1, 128) > 0, "mask": random(2, 1, 128, 128) > 0}.get(form)
    with Allocations() as seen:
        out = LogSumExp(keys, 0.7, mask=mask).readout(z, values)
        torch.autograd.grad(out, (z, keys, values), torch.ones_like(out))
    assert seen.largest <= (2 * 128 * 128 if form == "mask" else 2 * 3 * 128 * 16)


@COUNTS
@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_a_masked_key_holds_reaches_only_those_who_attend_to_it(count, where, bad):
    mask = torch.ones(2, 3, count, dtype=torch.bool)
    mask[:, :2, 5] = False
    mask[1, 2, 5] = False
    z, keys, values = (random(2, n, 5, seed=i) for i, n in enumerate((3, count, count)))
    clean = LogSumExp(keys, 0.7, mask=mask).readout(z, values)
    dirty = {"keys": keys.clone(), "values": values.clone()}
    dirty[where][:, 5, 1] = bad
    z, keys, values = (t.requires_grad_() for t in (z, dirty["keys"], dirty["values"]))
    out = LogSumExp(keys, 0.7, mask=mask).readout(z, values)
    assert out[0, 2].isnan().all()
    kept = torch.ones(2, 3, dtype=torch.bool)
    kept[0, 2] = False
    torch.testing.assert_close(out[kept], clean[kept], rtol=1e-12, atol=1e-13)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out[kept].square().sum(), (z, keys, values)))


@FORMS
@COUNTS
@pytest.mark.parametrize(
    ("by_keys", "by_values"), [((), ()), ((3,), ()), ((), (2, 3)), ((2, 1), (3,)), ((3,), (2, 1)), ((1, 3), (1, 1))]
)
def test_leading_axes_broadcast(form, count, by_keys, by_values):
    options, _ = masked(form, count)
    z, keys, values = random(2, 3, 4, 5), random(*by_keys, count, 5, seed=1), random(*by_values, count, 6, seed=2)
    tracked = [t.requires_grad_() for t in (z, keys, values)]
    out = LogSumExp(keys, 0.7, **options).readout(z, values)
    whole = LogSumExp(keys.expand(2, 3, -1, -1), 0.7, **options).readout(z, values.expand(2, 3, -1, -1))
    check_close(out, whole, 1e-12)
    cotangent = random(2, 3, 4, 6, seed=3)
    for a, b in zip(*(torch.autograd.grad(o, tracked, cotangent) for o in (out, whole)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@COUNTS
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_nothing_to_read_out(count, dropout_p):
    keys, values = random(2, count, 5), random(2, count, 4, seed=1)
    assert LogSumExp(keys, 0.7).readout(random(2, 0, 5), values, dropout_p=dropout_p).shape == (2, 0, 4)
    shared = LogSumExp(keys[0], 0.7)
    assert shared.readout(random(0, 3, 5), values[0], dropout_p=dropout_p).shape == (0, 3, 4)


def lowest_bias(count, dtype):
    """As Hugging Face masks: a query from all keys, one from some and one from none."""
    bias = torch.zeros(3, count, dtype=dtype)
    bias[0] = bias[1, 3:] = torch.finfo(dtype).min
    return bias


@COUNTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_of_lowest_biases_attends_to_all_keys_alike(count, dtype):
    keys, z, v = (random(2, n, 5, seed=n, dtype=dtype) for n in (count, 3, 3))
    potential, tracked = LogSumExp(keys, 2.0, bias=lowest_bias(count, dtype)), z.clone().requires_grad_()
    torch.testing.assert_close(potential.probabilities(z)[:, 0], torch.full((2, count), 1 / count, dtype=dtype))
    for result in (potential.mean(z), potential.mean(tracked), potential.evaluate(z)[1], potential.readout(z, keys)):
        torch.testing.assert_close(result[:, 0], keys.mean(1))
        torch.testing.assert_close(result, potential.mean(z))
    linear = potential.linearize(z)
    torch.testing.assert_close(linear.product(v), potential.covariance_product(z, v))
    # The kernels' own gradient of such a row is `count` times too large.
    values = random(2, count, 5, seed=9, dtype=dtype).requires_grad_()
    by_z, by_values = torch.autograd.grad(potential.readout(tracked, values)[:, 0].sum(), (tracked, values))
    assert by_z.eq(0).all()
    torch.testing.assert_close(by_values, torch.full_like(values, 1 / count))
    (by_keys,) = torch.autograd.grad(LogSumExp(keys.requires_grad_(), 2.0, bias=potential.bias).mean(tracked), keys, v)
    torch.testing.assert_close(linear.vjp_tensors(v)[0], by_keys)


@COUNTS
@pytest.mark.parametrize("solver", [Anderson(), Picard(), Broyden(), NewtonKrylov(), GradientDescent()], ids=str)
@pytest.mark.parametrize("beta", [0.125, 1.0])
def test_rows_of_lowest_biases_are_solved(count, solver, beta):
    keys, x = random(2, count, 5, dtype=torch.float32), random(2, 3, 5, seed=1, dtype=torch.float32)
    potential = LogSumExp(keys, beta, bias=lowest_bias(count, torch.float32))
    solution = solve(AnchoredEnergy(potential, x, 0.5), x, solver=solver, on_failure="ignore")
    assert solution.converged[:, 0].all()
    check_close(solution.value[:, 0], (x[:, 0] + keys.mean(1)) / 2, 1e-4)


@COUNTS
def test_a_query_that_attends_to_nothing_has_zero_gradients(count):
    mask = torch.ones(3, count, dtype=torch.bool)
    mask[1] = False
    bias = random(3, count, seed=4)
    for options in ({"mask": mask}, {"bias": bias.where(mask, -torch.inf)}, {"mask": mask, "bias": bias}):
        leaves = z, keys, values = [random(2, n, 5, seed=n).requires_grad_() for n in (3, count, count)]
        out = LogSumExp(keys, 0.7, **options).readout(z, values)
        assert out[:, 1].eq(0).all()
        assert all(g.eq(0).all() for g in torch.autograd.grad(out[:, 1].sum(), leaves, retain_graph=True))
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        assert all(g.isfinite().all() for g in (*first, *second))


@COUNTS
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_function_transforms(count):
    z, keys, values = random(4, 3, 5), random(count, 5, seed=1), random(count, 2, seed=2)
    readout = LogSumExp(keys, 0.7).readout
    check_close(torch.vmap(readout, (0, None))(z, values), readout(z, values), 1e-12)
    by_rows = torch.func.jacrev(readout)(z[0], values)
    check_close(torch.func.jacfwd(readout)(z[0], values), by_rows, 1e-12)
    z.requires_grad_()
    out, cotangents = readout(z, values), random(6, 4, 3, 2, seed=4)
    by_one = torch.stack([torch.autograd.grad(out, z, c, retain_graph=True)[0] for c in cotangents])
    check_close(torch.vmap(lambda c: torch.autograd.grad(out, z, c)[0])(cotangents), by_one, 1e-12)
    dense = torch.autograd.functional.jacobian(lambda z: readout(z, values), z[0].detach(), vectorize=True)
    check_close(dense, by_rows, 1e-12)


@COUNTS
def test_dropout_is_that_of_torch(count):
    z, keys, values = (random(2, 3, n, 5, seed=n, dtype=torch.float32) for n in (4, count, count))
    mask = (torch.arange(4) != 1)[:, None].expand(4, count)
    torch.manual_seed(0)
    out = LogSumExp(keys, 0.7, mask=mask).readout(z.requires_grad_(), values, dropout_p=0.4)
    assert out[:, :, 1].eq(0).all()
    (gradient,) = torch.autograd.grad(out.sum(), z)
    assert gradient.isfinite().all()
    assert gradient[:, :, 0].ne(0).any()
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(z, keys, values, scale=0.7, dropout_p=0.4)
    torch.testing.assert_close(out[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]])


@COUNTS
def test_autocast_changes_no_bit(count):
    z, keys, values = (random(2, n, 5, seed=n, dtype=torch.float32) for n in (3, count, count))
    potential, z = LogSumExp(keys, 0.7), z.requires_grad_()
    expected = potential.readout(z, values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = potential.readout(z, values)
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(o.square().sum(), z)[0] for o in (out, expected)))

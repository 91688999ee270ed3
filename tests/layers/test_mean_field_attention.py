"""Mean-field attention: known numbers, each mixing against its iteration, bounds of slopes, masks."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn

from implicit_attention import Anderson, Implicit, Picard, Status
from implicit_attention.layers import MeanFieldAttention
from implicit_attention.linear import Neumann
from implicit_attention.potentials import AmosResponse
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    GaussianUnits,
    MeanField,
    SaddlePoint,
    SpinSystem,
    magnetization,
)
from implicit_attention.testing.numerics import random

pytestmark = pytest.mark.cases(3)

FIELD = torch.tensor([[0.4, -0.2], [0.1, 0.5], [-0.3, 0.3]], dtype=torch.float64)
COUPLINGS = torch.tensor([[0, 0.2, -0.1], [0.2, 0, 0.3], [-0.1, 0.3, 0]], dtype=torch.float64)
TRUTH = [0.450688073394, -0.125, 0.095183486239, 0.625, -0.316513761468, 0.5]
EXACT = Anderson(rtol=1e-12, atol=1e-13)
MIXINGS = ("softmax", "free", "blocks", "mixer")
CORRECTIONS = (None, "exact", "learned")
KINDS = [pair for pair in itertools.product(MIXINGS, CORRECTIONS) if pair != ("mixer", "exact")]


def made(mixing, correction=None, *, dim=6, heads=2, sites=4, scale=1.0, **options):
    """A layer in float64 whose weights are random, the correction's too, and `scale` times as large as at the start."""
    torch.manual_seed(0)
    own = {} if mixing == "softmax" else {"sites": sites}
    layer = MeanFieldAttention(
        dim, heads, **{"mixing": mixing, "correction": correction, "solver": EXACT, **own, **options}
    )
    layer.double()
    with torch.no_grad():
        if correction == "learned":
            layer.correction.second.copy_(0.02 * torch.randn_like(layer.correction.second))
            layer.correction.bias.copy_(torch.randn_like(layer.correction.bias))
        for module in (layer.mixing, layer.correction):
            for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                parameter.mul_(scale)
    return layer


def free(couplings, dim, **options):
    """The layer over raw inputs with these couplings."""
    options = {"solver": EXACT, "mixing": "free", "sites": couplings.shape[-1], "bare": True, **options}
    layer = MeanFieldAttention(dim, 1, **options).double()
    with torch.no_grad():
        layer.mixing.weight.copy_(couplings)
    return layer


# Known numbers.


def test_free_couplings_without_correction_are_a_linear_solve():
    found = free(COUPLINGS, 2)(FIELD)
    assert found.flatten().tolist() == pytest.approx(TRUTH, abs=1e-8)
    torch.testing.assert_close(found, torch.linalg.solve(torch.eye(3).double() - COUPLINGS, FIELD), rtol=0, atol=1e-10)
    gaussian = magnetization(SpinSystem(COUPLINGS, FIELD), AdaTAP(prior=GaussianUnits()))
    torch.testing.assert_close(found, gaussian, rtol=0, atol=1e-10)
    # Couplings that are not symmetric, and scaled ones.
    layer = free(3 * random(5, 5), 3)
    x, couplings = random(2, 5, 3), layer.couplings(random(5, 3))[0]
    torch.testing.assert_close(layer(x), torch.linalg.solve(torch.eye(5).double() - couplings, x), rtol=0, atol=1e-9)
    assert torch.linalg.matrix_norm(couplings, 2).item() == pytest.approx(0.9, rel=0.05)


def test_blocks_without_correction_are_a_linear_solve():
    # design: J_12, J_13, J_23 of a Gaussian prior, and its answer.
    j12, j13, j23 = [[0.2, 0.1], [-0.1, 0.3]], [[-0.15, 0.05], [0.0, 0.1]], [[0.1, -0.2], [0.25, 0.05]]
    blocks = torch.zeros(3, 3, 2, 2, dtype=torch.float64)
    for (i, j), value in {(0, 1): j12, (0, 2): j13, (1, 2): j23}.items():
        blocks[i, j] = torch.tensor(value, dtype=torch.float64)
        blocks[j, i] = blocks[i, j].T
    layer = MeanFieldAttention(2, 1, mixing="blocks", sites=3, bare=True, solver=EXACT).double()
    with torch.no_grad():
        layer.mixing.weight[0] = blocks
    x = torch.tensor([[0.5, -0.2], [0.1, 0.3], [-0.4, 0.6]], dtype=torch.float64)
    known = [0.634691734, -0.0628131178, 0.0659671982, 0.2706807163, -0.4209368612, 0.6257938711]
    assert layer(x).flatten().tolist() == pytest.approx(known, abs=1e-8)
    torch.testing.assert_close(layer.couplings(x)[0], blocks)


def test_the_exact_correction_gives_spherical_spins_to_third_order_and_tap_for_many_dimensions():
    shape, field = random(6, 6), 0.7 * random(6, 64)
    shape = (shape + shape.T) / 2
    shape.fill_diagonal_(0)
    sizes, off, naive = (0.16, 0.08, 0.04, 0.02), [], []
    for size in sizes:
        couplings = size * shape
        z = free(couplings, 64, correction="exact", contraction=0.99)(field)
        truth = magnetization(SpinSystem(couplings, field), SaddlePoint())
        off.append((z - truth).norm().item())
        naive.append((magnetization(SpinSystem(couplings, field), MeanField()) - truth).norm().item())
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(off)]
    assert slopes[-1] == pytest.approx(3, abs=0.15)
    assert off[0] < 0.1 * naive[0]
    # TAP is the same to second order, at every number of dimensions; what differs falls as 1/D.
    gaps = []
    for dim in (16, 64, 256):
        field = 0.7 * torch.eye(6, dim).double() * math.sqrt(dim)
        tap = magnetization(SpinSystem(0.1 * shape, field), TAP(response=AmosResponse()))
        z = free(0.1 * shape, dim, correction="exact", contraction=0.99)(field)
        gaps.append(((z - tap).norm() / tap.norm()).item())
    assert [a / b for a, b in itertools.pairwise(gaps)] == pytest.approx([4, 4], rel=0.15)


# Each mixing is its iteration.


def gelu_net(net, v):
    scale = (net.limit / (1.13 * _norm(net.first) * _norm(net.second))).clamp(max=1)
    hidden = v @ net.first + net.bias
    return 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2))) @ (scale[:, None, None] * net.second)


def _norm(matrix):
    # The bound that the layer uses, which is up to 3 % above the norm.
    return torch.linalg.matrix_norm(torch.linalg.matrix_power(matrix @ matrix.mT, 32)) ** (1 / 64)


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_the_answer_is_that_of_the_iteration_written_out(mixing, correction, scale):
    layer, x = made(mixing, correction, scale=scale), random(3, 4, 6)
    h = (x @ layer.in_proj.weight.T).unflatten(-1, (2, 3)).transpose(-3, -2)
    limit = 0.45 if correction == "learned" else 0.9
    others = ~torch.eye(4, dtype=torch.bool)
    symmetric = correction == "exact"
    if mixing == "softmax":
        scores = (h @ layer.mixing.q_weight) @ (h @ layer.mixing.k_weight).mT / math.sqrt(3)
        j = torch.where(others, scores, -math.inf).softmax(-1)
        j = (j + j.mT) / 2 if symmetric else limit * j
    elif mixing != "mixer":
        j = layer.mixing.weight * (others if mixing == "free" else others[..., None, None])
        j = (j + (j.mT if mixing == "free" else j.transpose(-4, -3).mT)) / 2 if symmetric else j
    if mixing in ("free", "blocks") or (mixing == "softmax" and symmetric):
        matrix = j.transpose(-3, -2).reshape(2, 12, 12) if mixing == "blocks" else j
        norm = matrix.abs().sum(-1).amax(-1) if mixing == "softmax" else _norm(matrix)
        square = j.square().sum((-2, -1)) / 3 if mixing == "blocks" else j.square()
        t = limit / norm
        if symmetric:
            k = square.sum(-1).amax(-1)
            t = ((norm**2 + 12 * k * limit).sqrt() - norm) / (6 * k)
        t = t.clamp(max=1)
        j = j * t.reshape(*t.shape, *(1,) * (j.ndim - t.ndim))
    z = h
    for _ in range(2000):
        if mixing == "mixer":
            mixed = gelu_net(layer.mixing, z.mT).mT
        elif mixing == "blocks":
            mixed = torch.einsum("hijab,zhjb->zhia", j, z)
        else:
            mixed = j @ z
        if correction == "learned":
            new = h + mixed - gelu_net(layer.correction, z)
        elif correction == "exact":
            # Solved for z_i by its length, with K = J^2.
            k = j.square().sum((-2, -1)) / 3 if mixing == "blocks" else j.square()
            f = h + mixed - z * (k @ (1 - z.square().sum(-1, keepdim=True) / 3))
            new = 2 * f / (1 + (1 + 4 * f.square().sum(-1, keepdim=True) / 3).sqrt())
        else:
            new = h + mixed
        change, z = (new - z).abs().max().item(), new
        if change < 1e-14:
            break
    output, state = layer(x, return_state=True)
    torch.testing.assert_close(state, z, rtol=0, atol=1e-10)
    torch.testing.assert_close(output, z.transpose(-3, -2).flatten(-2) @ layer.out_proj.weight.T, rtol=0, atol=1e-10)
    assert layer.last_solve.status.tolist() == [Status.CONVERGED] * 3
    if correction == "exact":
        # The equation in the form of the class: z = J z - f(z) + x.
        rho = z.square().sum(-1, keepdim=True) / 3
        f = z * (rho / (1 - rho) + k @ (1 - rho))
        torch.testing.assert_close(h + mixed - f, z, rtol=0, atol=1e-9)
        assert rho.max().item() < 1


# The bound.


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_no_pair_of_states_comes_apart_by_more_than_the_bound(mixing, correction, scale):
    layer = made(mixing, correction, scale=scale, dim=10, heads=2, sites=5, steps=1, solver=None)
    bound = layer.contraction_bound()
    assert bool((bound <= 0.9 * (1 + 1e-9)).all())
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    size = torch.logspace(-2, 1.5, 1000).double()[:, None, None, None]
    x, mask = draw(1000, 5, 10) * size.flip(0)[..., 0], draw(5, 5) > -0.5
    mask = None if mixing == "mixer" else mask | mask.T
    for pairs in (None, mask):

        def step(z, pairs=pairs):
            return layer(x, initial=z, mask=pairs, return_state=True)[1]

        a = draw(1000, 2, 5, 5) * size
        near, far = a + 1e-4 * draw(1000, 2, 5, 5), draw(1000, 2, 5, 5) * size
        for b in (near, far):
            before, after = a - b, step(a) - step(b)
            if mixing == "softmax":
                before, after = (v.norm(dim=-1).amax(-1) for v in (before, after))
            else:
                before, after = (v.flatten(-2).norm(dim=-1) for v in (before, after))
            cap = bound if pairs is None else torch.full_like(bound, 0.9)
            assert bool((after <= cap * before * (1 + 1e-9)).all())


def test_the_bound_is_not_far_from_the_slope():
    # Of linear maps the slope is the norm of J, which is had up to n^(1/128).
    for mixing in ("free", "blocks"):
        layer = made(mixing, scale=0.5)
        couplings = layer.couplings(random(4, 6))
        matrix = couplings.transpose(-3, -2).reshape(2, 12, 12) if mixing == "blocks" else couplings
        torch.testing.assert_close(layer.contraction_bound(), torch.linalg.matrix_norm(matrix, 2), rtol=0.03, atol=0)
    # Symmetric softmax couplings add up to at most 0.9 in a row; others to just that.
    x = random(7, 4, 6)
    torch.testing.assert_close(made("softmax").couplings(x).sum(-1), torch.full((7, 2, 4), 0.9, dtype=torch.float64))
    rows = made("softmax", symmetric=True).couplings(x)
    assert torch.equal(rows, rows.mT)
    assert bool((rows.sum(-1) <= 0.9 + 1e-12).all())


def test_a_function_of_ones_own_is_watched_once():
    class Doubled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale))

        def forward(self, z):
            return self.scale * z.roll(1, -2)

    x = torch.randn(2, 4, 6)
    layer = MeanFieldAttention(6, 2, mixing=Doubled(0.95))
    with pytest.warns(UserWarning, match=r"spectral radius of about 0.95 at its solution, above contraction=0.9"):
        layer(x)
    assert layer.contraction_bound().tolist() == [math.inf] * 2
    assert "Lipschitz constant unknown, for the given mixing" in repr(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        within = MeanFieldAttention(6, 2, mixing=Doubled(0.3), correction=lambda z: z.tanh() / 4)
        within(x).sum().backward()
    assert within.mixing.scale.grad is not None
    # z_i = s z_{i-1} + x_i on a ring.
    z, state = layer.in_proj(x), layer(x, return_state=True)[1]
    ring = torch.eye(4) - 0.95 * torch.eye(4).roll(1, 0)
    expected = torch.linalg.solve(ring, z).unflatten(-1, (2, 3)).transpose(1, 2)
    torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-3)
    with pytest.warns(UserWarning, match="above contraction"):
        MeanFieldAttention(6, 2, correction=lambda z: 0.95 * z)(x)


def test_undeclared_weights_of_a_function_are_found():
    weight = torch.tensor(0.3, requires_grad=True)
    with pytest.raises(ValueError, match="requires grad but is not declared"):
        MeanFieldAttention(6, 2, mixing=lambda z: weight * z)(torch.randn(2, 4, 6))


# Derivatives.


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_layers_are_differentiated_exactly(mixing, correction, scale):
    layer = made(mixing, correction, scale=scale, dim=4, sites=3)
    x = random(2, 3, 4).requires_grad_()
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def value(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(value, (x, *parameters), fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(value, (x, *parameters), fast_mode=True, atol=1e-5)
    value(x, *parameters).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for p in parameters)


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_gradients_are_finite_where_all_is_zero(mixing, correction):
    layer = MeanFieldAttention(4, 2, mixing=mixing, correction=correction, sites=None if mixing == "softmax" else 1)
    with torch.no_grad():
        for parameter in layer.mixing.parameters():
            parameter.zero_()
    x = torch.zeros(2, 1, 4, requires_grad=True)
    layer(x).sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (x, *layer.parameters()))


# Masks.


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_what_stands_at_padded_sites_changes_no_bit(mixing, correction):
    layer = made(mixing, correction, sites=5, dim=4).float()
    layer.options = layer.options.override(solver=Anderson(rtol=1e-5))
    x, key_mask = torch.randn(3, 5, 4), torch.arange(5) < torch.tensor([3, 5, 2])[:, None]
    found = layer(x, key_mask=key_mask)
    assert bool((found[~key_mask] == 0).all())
    other = torch.where(key_mask[..., None], x, math.nan).requires_grad_()
    again = layer(other, key_mask=key_mask)
    assert torch.equal(again, found)
    again.square().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (other, *layer.parameters()))
    assert bool((other.grad[~key_mask] == 0).all() and (other.grad[key_mask] != 0).any())


@pytest.mark.parametrize(("mixing", "correction"), [pair for pair in KINDS if pair[0] != "mixer"], ids=str)
def test_missing_tokens_are_as_if_they_were_not_there(mixing, correction):
    layer = made(mixing, correction, sites=5, dim=4)
    x = random(2, 5, 4)
    found = layer(x, key_mask=torch.arange(5) < 3)[:, :3]
    if mixing == "softmax":
        truth = layer(x[:, :3])
    else:
        smaller = made(mixing, correction, sites=3, dim=4)
        named = dict(layer.named_parameters())
        named["mixing.weight"] = named["mixing.weight"][:, :3, :3]
        smaller.load_state_dict(named)
        truth = smaller(x[:, :3])
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mixing", ["softmax", "free", "blocks"])
@pytest.mark.parametrize("correction", [None, "exact", "learned"])
def test_masked_pairs_are_not_coupled(mixing, correction):
    layer, x = made(mixing, correction), random(3, 4, 6)
    mask = torch.ones(3, 4, 4, dtype=torch.bool)
    # Tokens 0 and 1 see each other alone, in sample 1.
    mask[1, :2, 2:] = mask[1, 2:, :2] = False
    truth, found = layer(x), layer(x, mask=mask)
    couplings = layer.couplings(x, mask=mask)
    assert couplings[1, :, :2, 2:].abs().max() == 0 < couplings[0, :, :2, 2:].abs().max()
    torch.testing.assert_close(found[[0, 2]], truth[[0, 2]], rtol=0, atol=1e-10)
    changed = x.clone()
    changed[1, 2:] = 3.0
    torch.testing.assert_close(layer(changed, mask=mask)[1, :2], found[1, :2], rtol=0, atol=1e-9)
    assert not torch.allclose(found[1], truth[1], atol=1e-3)
    torch.testing.assert_close(layer(x[1], mask=mask[1]), found[1], rtol=0, atol=1e-9)


# Options.

OPTIONS = {
    "head_dim": 8,
    "mixing": lambda z: z.roll(1, -2) / 2,
    "correction": "exact",
    "contraction": 0.5,
    "symmetric": True,
    "causal": True,
    "steps": 1,
    "solver": Picard(rtol=0.3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_output(name):
    x = torch.randn(2, 5, 8)

    def output(**options):
        torch.manual_seed(0)
        return MeanFieldAttention(8, 2, **options)(x)

    assert not torch.allclose(output(**{name: OPTIONS[name]}), output(), atol=1e-5)


def test_the_other_options_do_what_they_say():
    layer = MeanFieldAttention(8, 2, adjoint=Implicit(Neumann()))
    layer(torch.randn(2, 5, 8)).sum().backward()
    assert bool((layer.last_solve.adjoint.status == Status.CONVERGED).all())
    assert layer.last_solve.status.shape == (2,)
    assert MeanFieldAttention(8, 2, dtype=torch.float64).in_proj.weight.dtype == torch.float64
    assert MeanFieldAttention(8, 2, mixing="mixer", sites=3, expansion=2).mixing.first.shape == (2, 3, 6)
    assert MeanFieldAttention(8, 2, correction="learned", expansion=3).correction.first.shape == (2, 4, 12)
    assert "Lipschitz constant <= 0.9 in max_i |z_i|" in repr(MeanFieldAttention(8, 2))
    assert "Lipschitz constant <= 0.5 in |z|" in repr(MeanFieldAttention(8, 2, mixing="free", sites=3, contraction=0.5))
    layer = MeanFieldAttention(8, 2, correction="exact")
    assert layer.symmetric
    assert "correction='exact'" in repr(layer)
    with pytest.warns(UserWarning, match="failed for"):
        MeanFieldAttention(8, 2, solver=Picard(rtol=1e-9, max_steps=1))(torch.randn(1, 4, 8))
    # A correction that is zero changes nothing, but for its half of the slope.
    x = torch.randn(2, 5, 8)
    learned = MeanFieldAttention(8, 2, correction="learned", contraction=0.8)
    plain = MeanFieldAttention(8, 2, contraction=0.4)
    plain.load_state_dict({k: v for k, v in learned.state_dict().items() if "correction" not in k})
    torch.testing.assert_close(learned(x), plain(x))


def test_a_state_starts_the_next_call():
    layer, x = MeanFieldAttention(16, 4), torch.randn(2, 5, 16)
    first, state = layer(x, return_state=True)
    spent = layer.last_solve.num_evals
    assert state.shape == (2, 4, 5, 4)
    assert not state.requires_grad
    again = layer(x, initial=state)
    assert bool((layer.last_solve.num_evals <= 2).all() and (spent > 2).all())
    torch.testing.assert_close(again, first, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_layout_of_inputs_does_not_matter(mixing, correction):
    layer, x = made(mixing, correction), random(3, 4, 6)
    truth = layer(x)
    for same in (
        x.mT.contiguous().mT,
        x.repeat_interleave(2, -1)[..., ::2],
        x.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        torch.testing.assert_close(layer(same), truth, rtol=0, atol=1e-11)
    torch.testing.assert_close(layer(x[0].expand(3, 4, 6))[2], truth[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(layer(x.reshape(3, 1, 4, 6))[:, 0], truth, rtol=0, atol=1e-11)
    torch.testing.assert_close(layer(x[1]), truth[1], rtol=0, atol=1e-11)
    assert layer(x[:0]).shape == (0, 4, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_half_precision_autocast_and_compile(mixing, correction):
    layer, x = made(mixing, correction, solver=None).float(), torch.randn(2, 4, 6)
    truth = layer(x)
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), truth, rtol=0, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), truth, rtol=0, atol=0.1)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_layers_can_be_transformed(mixing, correction):
    layer, x = made(mixing, correction), random(3, 4, 6)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x), rtol=0, atol=1e-9)
    pulled = torch.func.vjp(layer, x)[1](torch.ones_like(x))[0]
    torch.testing.assert_close(pulled, torch.func.grad(lambda x: layer(x).sum())(x), rtol=0, atol=1e-12)
    pushed = torch.func.jvp(layer, (x,), (x,))[1].sum()
    torch.testing.assert_close(pushed, (pulled * x).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_a_card_has_the_answer_of_the_host(mixing, correction):
    layer, x = made(mixing, correction, solver=None).float(), torch.randn(3, 4, 6)
    truth = layer(x)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), truth, rtol=0, atol=1e-3)


# Bad input.


@pytest.mark.parametrize(("mixing", "correction"), KINDS, ids=str)
def test_a_sample_that_is_not_finite_changes_no_other(mixing, correction):
    layer, x = made(mixing, correction, on_failure="ignore"), random(3, 4, 6)
    truth = layer(x)
    x[1, 2, 0] = math.nan
    found = layer(x)
    assert layer.last_solve.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert torch.equal(found[[0, 2]], truth[[0, 2]])
    assert bool(found[1].isnan().any())


def test_wrong_options_are_refused():
    for mixing in ("free", "mixer"):
        with pytest.raises(ValueError, match="`sites` must be >= 1, got 0"):
            MeanFieldAttention(8, 2, mixing=mixing, sites=0)

"""Spin layers: the numbers of the free energies behind them, masks, heads, padding, causality, and every option."""

import itertools
import math

import pytest
import torch

from implicit_attention import Anderson, Implicit, Picard, Status
from implicit_attention.layers import Rotary, SpinAttention
from implicit_attention.layers.couplings import FreeCouplings, SoftmaxCouplings, SymmetricCouplings
from implicit_attention.layers.spin import alignment
from implicit_attention.linear import Neumann
from implicit_attention.potentials import AmosResponse
from implicit_attention.spins import (
    TAP,
    AdaTAP,
    Bonds,
    GaussianClosure,
    GaussianUnits,
    KineticPlefka,
    MeanField,
    SaddlePoint,
    SpinSystem,
    free_energy,
    magnetization,
)
from implicit_attention.testing.numerics import random

FIELD = torch.tensor([[0.4, -0.2], [0.1, 0.5], [-0.3, 0.3]], dtype=torch.float64)
W_Q = torch.tensor([[0.7, -0.2], [0.1, 0.5]], dtype=torch.float64)
W_K = torch.tensor([[0.4, 0.3], [-0.6, 0.2]], dtype=torch.float64)
#: method -> F, explicit m, total -dF/dh.
TRUTH = {
    MeanField(): (
        -0.344522879861,
        [0.3701509848, 0.3121876643, 0.1961781359, 0.6596024671, -0.0159189607, 0.5718404322],
        [0.3685659616, 0.3091491541, 0.1908069476, 0.6594371727, -0.0276084282, 0.5737975266],
    ),
    SaddlePoint(): (
        -0.869591433310,
        [0.2471477630, 0.0922118206, 0.1061382645, 0.3952977165, -0.0738000495, 0.3163831170],
        [0.2465292038, 0.0909132516, 0.1040787036, 0.3951680235, -0.0790747343, 0.3174021125],
    ),
    AdaTAP(): (
        -0.873595364482,
        [0.2528199288, 0.1043003184, 0.1115437628, 0.4154358620, -0.0720306890, 0.3322167488],
        [0.2521555749, 0.1029368859, 0.1093215854, 0.4153146438, -0.0774982066, 0.3332404068],
    ),
}


def bare(dim=2, *, scale=1.3, **options):
    """The layer over raw inputs with the weights of the ground truth."""
    layer = SpinAttention(dim, 1, bare=True, **{"beta": 0.8, **options}).double()
    if isinstance(layer.couplings, SoftmaxCouplings) and dim == 2:
        layer.couplings.scale = scale
        with torch.no_grad():
            layer.couplings.q_weight.copy_(W_Q)
            layer.couplings.k_weight.copy_(W_K)
    return layer


def flat(values):
    return pytest.approx(values, abs=1e-8)


# Known numbers.


@pytest.mark.parametrize("method", TRUTH, ids=lambda method: type(method).__name__)
def test_the_layer_has_the_numbers_of_its_method(method):
    free, explicit, total = TRUTH[method]
    layer = bare(method=method)
    couplings = layer.couplings(FIELD[None], ~torch.eye(3, dtype=torch.bool))[0]
    assert couplings[[0, 0, 1], [1, 2, 2]].tolist() == flat([0.512411862794, 0.485517140970, 0.502070996237])
    assert free_energy(SpinSystem(couplings, FIELD, 0.8), method).item() == flat(free)
    assert layer(FIELD).flatten().tolist() == flat(explicit)
    assert bare(method=method, derivative="total")(FIELD).flatten().tolist() == flat(total)


def test_causal_couplings_have_the_numbers_of_the_dynamics():
    known = {
        KineticPlefka(): [0.7323033961, -0.3661516980, 0.5240806832, 0.3399336396, 0.1153024136, 0.3244214471],
        GaussianClosure(): [0.545672112, -0.272836056, 0.3696177374, 0.3469669664, -0.0022221875, 0.3192227784],
    }
    for method, values in known.items():
        layer = bare(method=method, causal=True)
        couplings = layer.couplings(FIELD[None], torch.ones(3, 3, dtype=torch.bool).tril())[0]
        rows = [1, 0, 0, 0.517315572732, 0.482684427268, 0, 0.306582707822, 0.352657582548, 0.340759709630]
        assert couplings.flatten().tolist() == flat(rows)
        assert layer(FIELD).flatten().tolist() == flat(values)


def test_gaussian_spins_answer_linearly():
    j = torch.tensor([[0, 0.2, -0.1], [0.2, 0, 0.3], [-0.1, 0.3, 0]], dtype=torch.float64)
    layer = bare(couplings=lambda h: j, method=AdaTAP(prior=GaussianUnits()), beta=1.0)
    expected = [0.450688073394, -0.125, 0.095183486239, 0.625, -0.316513761468, 0.5]
    assert layer(FIELD).flatten().tolist() == flat(expected)


# The layer is the function.

METHODS = [
    MeanField(),
    MeanField(response=AmosResponse()),
    TAP(),
    AdaTAP(),
    SaddlePoint(),
    SaddlePoint(one_loop=True),
    SaddlePoint(shared=True),
    KineticPlefka(),
    KineticPlefka(order=2),
    GaussianClosure(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_layer_is_the_magnetization_of_its_system(method):
    layer = SpinAttention(6, 2, couplings="symmetric", method=method, field_norm=None).double()
    x = random(4, 5, 6)
    key_mask = torch.arange(5) < torch.tensor([5, 3, 4, 1])[:, None]
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[0, 1] = mask[1, 0] = False
    field = layer.in_proj(x).unflatten(-1, (2, 3)).transpose(-3, -2)
    others = mask & ~torch.eye(5, dtype=torch.bool) & (key_mask[:, None, :, None] & key_mask[:, None, None, :])
    # Symmetric normalisation, written out.
    scores = torch.where(others, layer.couplings.scale * (q := field @ layer.couplings.weight) @ q.mT, -math.inf)
    weights = scores.exp()
    z = weights.sum(-1).clamp(min=1e-30)
    couplings = weights / (z[..., None] * z[..., None, :]).sqrt()
    system = SpinSystem(couplings, field, 0.5, mask=key_mask[:, None])
    truth = magnetization(system, method).transpose(-3, -2).flatten(-2)
    out, state, answer = layer(x, mask=mask, key_mask=key_mask, return_state=True, return_answer=True)
    torch.testing.assert_close(out, layer.out_proj(truth), rtol=0, atol=1e-8)
    assert bool(answer.report.converged.all())
    assert torch.equal(state, answer.magnetization)
    assert bool((out[~key_mask] == 0).all())
    assert layer.last_solve.status.shape == (4, 2)


@pytest.mark.parametrize("couplings", ["softmax", "symmetric"])
@pytest.mark.parametrize("derivative", ["explicit", "total"])
def test_the_order_of_tokens_does_not_matter_and_rotated_fields_are_rotated(couplings, derivative):
    layer = bare(3, couplings=couplings, derivative=derivative, method=MeanField())
    if couplings == "softmax":
        layer.couplings.scale = 0.5
    x, order = random(2, 6, 3), torch.randperm(6)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-9)
    turn = torch.linalg.qr(random(3, 3))[0]
    straight = layer(x) @ turn
    with torch.no_grad():
        for weight in (w for name, w in layer.couplings.named_parameters()):
            # Queries and keys of the turned field are those of the field.
            weight.copy_(turn.T @ weight)
    torch.testing.assert_close(layer(x @ turn), straight, rtol=0, atol=1e-9)


# Derivatives.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"couplings": "symmetric"},
        {"couplings": "free", "sites": 3},
        {"causal": True},
        {"method": GaussianClosure()},
        {"method": AdaTAP()},
        {"method": SaddlePoint()},
        {"derivative": "total", "method": MeanField()},
        {"derivative": "total", "method": SaddlePoint()},
        {"steps": 3},
        {"rotary": Rotary()},
    ],
    ids=str,
)
def test_layers_are_differentiated_exactly(options):
    exact = (
        {"solver": Anderson(rtol=1e-12, atol=1e-12)} if options.get("method") is None and "steps" not in options else {}
    )
    layer = SpinAttention(4, 2, **exact, **options).double()
    x = random(2, 3, 4).requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def value(x, *given):
        named = dict(zip([name for name, _ in layer.named_parameters()], given, strict=True))
        return torch.func.functional_call(layer, named, (x,))

    assert torch.autograd.gradcheck(value, (x, *parameters), fast_mode=True, atol=1e-6)
    assert torch.autograd.gradgradcheck(value, (x, *parameters), fast_mode=True, atol=1e-5)
    value(x, *parameters).square().sum().backward()
    assert all(bool((p.grad != 0).any()) for p in parameters)


def test_the_total_answer_is_minus_the_slope_of_the_free_energy():
    layer = bare(derivative="total", method=MeanField())
    x = random(3, 2).requires_grad_()
    pairs = ~torch.eye(3, dtype=torch.bool)
    free = free_energy(SpinSystem(lambda h: layer.couplings(h[None], pairs)[0], x, 0.8), MeanField())
    torch.testing.assert_close(layer(x), -torch.autograd.grad(free, x)[0], rtol=0, atol=1e-8)
    assert (layer(x) - bare(method=MeanField())(x)).abs().max().item() > 1e-3


# Padding and causality.


@pytest.mark.parametrize(
    ("couplings", "method"),
    [
        *itertools.product(("softmax", "symmetric", "free"), (None, GaussianClosure())),
        ("softmax", SaddlePoint()),
        ("symmetric", SaddlePoint()),
    ],
    ids=str,
)
def test_what_stands_at_padded_sites_changes_no_bit(couplings, method):
    options = {"sites": 5} if couplings == "free" else {}
    layer = SpinAttention(4, 2, couplings=couplings, method=method, **options)
    x, key_mask = torch.randn(3, 5, 4), torch.arange(5) < 3
    truth = layer(x, key_mask=key_mask)
    for value in (1e4, math.nan):
        other = torch.where(key_mask[:, None], x, value).requires_grad_()
        found = layer(other, key_mask=key_mask)
        assert torch.equal(found, truth)
        grads = torch.autograd.grad(found.square().sum(), [other, *layer.parameters()])
        assert bool((grads[0][:, 3:] == 0).all() and (grads[0][:, :3] != 0).any())
        assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize(
    "make", [lambda: SoftmaxCouplings(1, 4, mean_of_orders=True), lambda: SymmetricCouplings(1, 4)]
)
def test_symmetric_couplings_hold_pairs_of_both_orders_only(make):
    pairs = torch.ones(5, 5, dtype=torch.bool).tril()
    pairs[0, 1] = True
    found = make()(torch.randn(2, 1, 5, 4), pairs)
    assert torch.equal(found, found.mT)
    assert bool(((found != 0) == (pairs & pairs.mT)).all())
    with pytest.raises(ValueError, match="`causal` must be False for couplings that are symmetric"):
        SpinAttention(4, 1, couplings=make(), causal=True)


@pytest.mark.parametrize("method", [None, KineticPlefka(order=2), GaussianClosure()], ids=repr)
def test_added_padding_changes_live_tokens_by_rounding_only(method):
    layer = SpinAttention(4, 2, method=method).double()
    x = random(2, 4, 4)
    longer = torch.cat([x, random(2, 3, 4)], -2)
    key_mask = torch.arange(7) < 4
    torch.testing.assert_close(layer(longer, key_mask=key_mask)[:, :4], layer(x), rtol=0, atol=1e-9)


def test_a_fixed_horizon_is_so_many_steps():
    layer = bare(steps=3, method=MeanField())
    couplings = layer.couplings(FIELD[None], ~torch.eye(3, dtype=torch.bool))[0]
    law = MeanField().response
    m = law.magnetization(FIELD, 0.8, math.sqrt(2))
    for _ in range(3):
        m = law.magnetization(FIELD + couplings @ m, 0.8, math.sqrt(2))
    torch.testing.assert_close(layer(FIELD), m, rtol=0, atol=1e-12)
    assert layer.last_solve.status.tolist() == [Status.BUDGET]


# Options.

OPTIONS = {
    "head_dim": 8,
    "couplings": "symmetric",
    "method": SaddlePoint(),
    "derivative": "total",
    "beta": 2.0,
    "field_norm": None,
    "causal": True,
    "rotary": Rotary(),
    "steps": 1,
    "solver": Picard(rtol=0.3),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_output(name):
    x = torch.randn(2, 5, 8)

    def output(**options):
        torch.manual_seed(0)
        return SpinAttention(8, 2, **options)(x)

    assert not torch.allclose(output(**{name: OPTIONS[name]}), output(), atol=1e-5)


def test_the_other_options_do_what_they_say():
    layer = SpinAttention(8, 2, adjoint=Implicit(Neumann()))
    layer(torch.randn(2, 5, 8)).sum().backward()
    assert layer.method.adjoint == Implicit(Neumann())
    assert bool((layer.last_solve.adjoint.status == Status.CONVERGED).all())
    assert SpinAttention(8, 2, dtype=torch.float64).in_proj.weight.dtype == torch.float64
    assert isinstance(SpinAttention(8, 2, couplings="free", sites=4).couplings, FreeCouplings)
    assert isinstance(SpinAttention(8, 2, couplings="free", sites=4).method, KineticPlefka)
    assert isinstance(SpinAttention(8, 2).method, MeanField)
    assert "(A + A^T)/2" in repr(SpinAttention(8, 2))
    assert "(A + A^T)/2" not in repr(SpinAttention(8, 2, causal=True))
    with pytest.warns(UserWarning, match="failed for"):
        SpinAttention(8, 2, solver=Picard(rtol=1e-9, max_steps=1))(torch.randn(1, 4, 8))
    # One dimension has no Amos response.
    SpinAttention(2, 2)(torch.randn(1, 4, 2))


def test_one_spin_is_no_longer_than_its_radius():
    for options in ({}, {"causal": True}, {"method": GaussianClosure()}, {"couplings": "symmetric"}):
        layer = SpinAttention(8, 2, beta=20.0, on_failure="ignore", **options)
        _, state = layer(5 * torch.randn(4, 6, 8), return_state=True)
        assert float(state.norm(dim=-1).max()) <= 2 * (1 + 1e-6)


def test_a_state_starts_the_next_call():
    layer, x = SpinAttention(16, 4), torch.randn(2, 5, 16)
    first, state = layer(x, return_state=True)
    spent = layer.last_solve.num_evals
    again = layer(x, initial=state)
    # One evaluation by damped steps, and one by the solver.
    assert bool((layer.last_solve.num_evals <= 2).all() and (spent > 2).all())
    torch.testing.assert_close(again, first, rtol=0, atol=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_half_precision_autocast_and_compile():
    layer, x = SpinAttention(8, 2), torch.randn(2, 5, 8)
    truth = layer(x)
    half = SpinAttention(8, 2).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x).float(), truth, rtol=0, atol=0.05)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"method": SaddlePoint()}], ids=str)
def test_layers_can_be_transformed(options):
    layer, x = SpinAttention(8, 2, **options).double(), random(3, 5, 8)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x), rtol=0, atol=1e-4)
    pulled = torch.func.vjp(layer, x)[1](torch.ones_like(x))[0]
    torch.testing.assert_close(pulled, torch.func.grad(lambda x: layer(x).sum())(x), rtol=0, atol=1e-12)
    pushed = torch.func.jvp(layer, (x,), (x,))[1].sum()
    torch.testing.assert_close(pushed, (pulled * x).sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"derivative": "total"}], ids=str)
def test_a_card_has_the_answer_of_the_host(options):
    layer, x = SpinAttention(8, 2, **options), torch.randn(3, 5, 8)
    truth = layer(x)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), truth, rtol=0, atol=1e-3)


def test_tokens_align_under_weak_fields():
    assert float(alignment(torch.ones(4, 2))) == pytest.approx(1)
    assert alignment(torch.eye(3).repeat(2, 1, 1), torch.tensor([True, True, False])).tolist() == [0.0, 0.0]
    torch.manual_seed(0)
    x = torch.randn(8, 32, 16)
    weak = alignment(SpinAttention(16, 1, bare=True, beta=2.0, on_failure="ignore")(0.05 * x)).mean()
    strong = alignment(SpinAttention(16, 1, bare=True, beta=2.0)(x)).mean()
    assert float(weak.detach()) > 0.9 > 0.5 > float(strong.detach())


# Bad input.


def test_a_sample_that_is_not_finite_changes_no_other():
    layer = bare(couplings=lambda h: (h @ h.mT) / 10, method=MeanField(), on_failure="ignore")
    x = random(3, 4, 2)
    truth = layer(x)
    x[1, 2, 0] = math.nan
    found = layer(x)
    assert layer.last_solve.status.flatten().tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert bool(found[1].isnan().all())
    torch.testing.assert_close(found[[0, 2]], truth[[0, 2]], rtol=0, atol=1e-12)

    def broken(h):
        made = h @ h.mT / 10
        return torch.where(torch.arange(3)[:, None, None, None] == 1, torch.nan, made)

    layer = bare(couplings=broken, method=MeanField(), on_failure="ignore")
    layer(random(3, 4, 2))
    assert layer.last_solve.status.flatten().tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


def test_wrong_calls_are_refused():
    layer = SpinAttention(8, 2, couplings=lambda h: torch.randn(4, 4), method=AdaTAP())
    with pytest.raises(ValueError, match=r"`couplings` must be symmetric .* for AdaTAP"):
        layer(torch.randn(2, 4, 8))
    # Masks of one direction are for the dynamics.
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    assert SpinAttention(8, 2, method=KineticPlefka())(torch.randn(2, 4, 8), mask=lower).shape == (2, 4, 8)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [6, 150])
def test_softmax_couplings_are_the_same_where_the_host_cannot_look(symmetric, size):
    """With a site that reads nobody, and without: every pair by its own formula, also where tiles are summed."""
    made = SoftmaxCouplings(2, 3, mean_of_orders=symmetric).double()
    field, everyone = random(4, 2, size, 3), ~torch.eye(size, dtype=torch.bool)
    lonely = everyone & (torch.arange(size) != 2)[:, None] & (torch.arange(size) != 2)

    def formula(field, pairs):
        scores = 3**-0.5 * (field @ made.q_weight) @ (field @ made.k_weight).mT
        weights = torch.where(pairs, scores.exp(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        return (weights + weights.mT) / 2 if symmetric else weights

    def differentiated(couplings, pairs):
        def loss(field):
            return (random(size, size, seed=5) * couplings(field, pairs).square()).sum()

        return *torch.func.jvp(loss, (field,), (field,)), *torch.func.jvp(torch.func.grad(loss), (field,), (field,))

    for pairs in (everyone, lonely):
        expected = formula(field, pairs)
        for found in (
            made(field, pairs),
            torch.vmap(made, in_dims=(0, None))(field, pairs),
            torch.vmap(made)(field, pairs.expand(4, 1, size, size)),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(differentiated(made, pairs), differentiated(formula, pairs))


def test_couplings_may_be_bonds_of_the_field():
    """A chain of tokens, whose neighbours are coupled by their overlap."""
    pairs, x = torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.randn(2, 4, 8)

    def chain(h):
        return Bonds(pairs, (h[..., 1:, :] * h[..., :-1, :]).sum(-1) / 20, 4)

    for method in (MeanField(), AdaTAP(), None):
        torch.manual_seed(0)
        layer = SpinAttention(8, 2, couplings=chain, method=method)
        torch.manual_seed(0)
        dense = SpinAttention(8, 2, couplings=lambda h: chain(h).dense(), method=method)
        torch.testing.assert_close(layer(x), dense(x))

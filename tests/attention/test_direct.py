"""Native answers of attention and of solves have every bit of the general path, and derivatives of every order."""

import random as python_random

import pytest
import torch
from direct_ways import B, D, H, M, N, agree, evidence, gradients, leaf, native, same, tensors, ways
from layouts import MATRICES
from torch.utils.checkpoint import checkpoint

import implicit_attention as ia
from implicit_attention.failure_policy import FailureSite
from implicit_attention.testing.numerics import random

# The same bits.

SHAPES = {
    "few keys": {},
    "many keys": {"m": 80},
    "one query": {"n": 1, "m": 130},
    "more tiles than one": {"n": 70, "m": 140, "lead": (1, 2), "shared": (1, 2)},
    "values of another width": {"e": 5},
    "no multiple of the lanes": {"d": 7, "e": 7},
    "one entry": {"d": 1, "e": 1},
    "no batch": {"lead": (), "shared": ()},
    "one axis": {"lead": (3,), "shared": (3,)},
    "three axes": {"lead": (2, 1, 3), "shared": (2, 1, 3)},
    "keys shared by the batch": {"shared": (1, H)},
    "keys shared by all": {"shared": ()},
    "one key": {"m": 1},
}
OPTIONS = {
    "as they are": {},
    "explicit": {"max_steps": 0},
    "plain steps": {"solver": ia.Picard(rtol=1e-3)},
    "exact gradients named": {"adjoint": ia.Implicit(), "max_steps": 50},
    "failures ignored": {"on_failure": "ignore", "solver": ia.Anderson(rtol=1e-6)},
}


@native
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grad", [True, False], ids=["with a graph", "without"])
def test_function(shape, options, grad):
    leaves = tensors(**SHAPES[shape])

    def run():
        with torch.set_grad_enabled(grad):
            output = ia.equilibrium_attention(*leaves, anchor=0.4, **OPTIONS[options])
        return output, gradients(output, leaves) if grad else None

    agree(run)


@native
@pytest.mark.parametrize("layout", MATRICES)
@pytest.mark.parametrize("explicit", [True, False])
def test_every_layout(layout, explicit):
    rng = python_random.Random(3)

    def make(shape):
        return 0.6 * random(*shape, seed=rng.randrange(1000), dtype=torch.float32)

    make.scale, make.dtype = 0.6, torch.float32
    draws = [MATRICES[layout](make, shape, rng) for shape in ((B, H, N, D), (B, H, M, D), (B, H, M, D))]
    query, key, value = (t.requires_grad_() for t in draws)
    cotangent = MATRICES[layout](make, (B, H, N, D), rng).detach()

    def run():
        output = ia.equilibrium_attention(query, key, value, max_steps=0 if explicit else None)
        return output, torch.autograd.grad(output, (query, key, value), cotangent)

    # A copy of such a query has other bits than the query itself: the general path knows which it reads.
    agree(run, takes=not (explicit and layout == "at an offset"))


@native
@pytest.mark.parametrize("anchor", [0.0, 0.5, 1.0, "per head", "per entry"])
@pytest.mark.parametrize("scale", [None, 0.3, 2, "per head", "per entry"])
def test_numbers_and_tensors_of_them(anchor, scale):
    named = {"per head": random(H, seed=8, dtype=torch.float32), "per entry": random(B, H, seed=9, dtype=torch.float32)}
    made = {name: leaf(t.sigmoid()) for name, t in named.items()}
    others = {name: leaf(t.sigmoid()) for name, t in named.items()}
    anchor, scale = made.get(anchor, anchor), others.get(scale, scale)
    leaves = tensors() + [t for t in (anchor, scale) if isinstance(t, torch.Tensor)]

    def run():
        output = ia.equilibrium_attention(*leaves[:3], anchor=anchor, scale=scale)
        return output, gradients(output, leaves)

    agree(run)


def pairs():
    boolean = random(N, M, seed=7) > -0.3
    empty = boolean.clone()
    empty[2] = False
    added = random(H, N, M, seed=6, dtype=torch.float32)
    return {
        "boolean": boolean,
        "of keys": boolean[:1],
        "of samples": random(B, 1, N, M, seed=5) > -0.3,
        "a query without keys": empty,
        "added": added,
        "added, of keys": added[:, :1],
        "added, with -inf": added.masked_fill(~boolean, -torch.inf),
        "added, a query without keys": added.masked_fill(~empty, -torch.inf),
    }


@native
@pytest.mark.parametrize("kind", pairs())
@pytest.mark.parametrize("count", [M, 80])
def test_masks(kind, count):
    mask = pairs()[kind]
    mask = torch.cat([mask] * 12, -1)[..., :count] if count > M else mask
    leaves = tensors(m=count)

    def run():
        output = ia.equilibrium_attention(*leaves, attn_mask=mask)
        return output, gradients(output, leaves)

    agree(run)


@native
def test_causal_and_grouped_heads():
    causal = {"is_causal": True}
    for options in (
        causal,
        {**causal, "query_offset": 2},
        {**causal, "query_offset": 2, "max_steps": 0},
        {"enable_gqa": True},
        {"enable_gqa": True, "max_steps": 0},
        {"enable_gqa": True, **causal},
    ):
        lead, shared = ((B, 4), (B, 2)) if "enable_gqa" in options else ((B, H), (B, H))
        leaves = tensors(lead=lead, shared=shared)

        def run(leaves=leaves, options=options):
            output = ia.equilibrium_attention(*leaves, **options)
            return output, gradients(output, leaves)

        agree(run)


@native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(dtype):
    leaves = tensors(dtype=dtype)

    def run():
        output = ia.equilibrium_attention(*leaves)
        assert output.dtype == dtype
        return output, gradients(output, leaves)

    agree(run)


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"solver": ia.Anderson(max_steps=2, rtol=1e-6)}])
@pytest.mark.parametrize("made", [{}, {"kv_heads": 1}, {"causal": True}, {"readout": "state"}, {"qk_norm": "rms"}])
def test_layer(made, options):
    torch.manual_seed(0)
    layer = ia.ImplicitAttention(8, 2, **made)
    x = random(B, N, 8, seed=1, dtype=torch.float32)
    takes = not (options.get("max_steps") == 0 and "readout" in made)

    def run():
        # As of a new layer, which has told nothing yet.
        layer._remembered, layer._site = None, FailureSite()
        output = layer(x, **options)
        before = evidence(layer.last_solve)
        found = gradients(output, list(layer.parameters()))
        return output, before, evidence(layer.last_solve), found

    agree(run, takes=takes)


@native
def test_solve_with_a_mask_and_its_whole_report():
    query, key, _ = tensors(m=70)
    anchor, beta = (leaf(random(H, seed=s, dtype=torch.float32).sigmoid()) for s in (3, 4))
    mask = random(N, 70, seed=2) > 0

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor)
        solution = ia.solve(energy, random(*query.shape, seed=11, dtype=torch.float32))
        found = gradients(solution.value, [query, key, beta, anchor])
        return solution.value, solution.energy, repr(solution), evidence(solution), found

    value, _, text, *_ = agree(run)[0]
    assert "30 CONVERGED" in text
    residual = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor).fixed_point_map(value) - value
    assert float((residual.norm(dim=-1) / value.norm(dim=-1)).max().detach()) < 2e-4


# Derivatives.


@native
def test_derivatives_of_both_orders():
    anchor, scale = (leaf(random(2, seed=s, dtype=torch.float64).sigmoid()) for s in (3, 4))
    leaves = [*tensors(n=3, m=4, d=3, e=2, lead=(1, 2), shared=(1, 2), dtype=torch.float64), anchor, scale]
    solver = ia.Anderson(rtol=1e-12, atol=1e-13)

    def call(query, key, value, anchor, scale):
        return ia.equilibrium_attention(
            query, key, value, anchor=anchor, scale=scale, solver=solver, impl="native", on_failure="raise"
        )

    with ways() as taken:
        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)
    assert taken


@native
def test_a_graph_of_the_gradient_is_that_of_the_general_path():
    leaves = tensors(m=70)

    def run():
        output = ia.equilibrium_attention(*leaves)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves)
        again = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
        return first, second, again, torch.autograd.grad(output.sum(), leaves)

    agree(run)


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, options):
    leaves = tensors()

    def run(wrapped=True):
        def call(*leaves):
            return ia.equilibrium_attention(*leaves, **options)

        output = checkpoint(call, *leaves, use_reentrant=reentrant) if wrapped else call(*leaves)
        for t in leaves:
            t.grad = None
        output.square().sum().backward()
        return [t.grad for t in leaves]

    assert same(agree(run)[0], run(wrapped=False))


@native
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
def test_what_is_saved_has_no_axis_of_queries_and_keys(options):
    n, m = 96, 112
    leaves = tensors(n=n, m=m)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), ways() as taken:
        output = ia.equilibrium_attention(*leaves, **options)
    assert taken
    assert max(sizes) == B * H * m * D
    # The read-out keeps three tensors, the solve state, mean, query and keys.
    assert len(sizes) == (3 if options else 7)
    gradients(output, leaves)


@pytest.mark.parametrize("count", [M, 80])
def test_an_output_may_be_written_to_before_the_backward_pass(count):
    leaves = tensors(m=count)
    expected = gradients(2 * ia.equilibrium_attention(*leaves), leaves)
    output = ia.equilibrium_attention(*leaves)
    output *= 2
    assert same(gradients(output, leaves), expected)


@native
def test_a_failed_query_changes_no_gradient_of_others():
    query, key, value = (t.detach() for t in tensors())
    expected_leaves = [leaf(t) for t in (query, key, value)]
    cotangent = random(B, H, N, D, seed=5, dtype=torch.float32)
    cotangent[0, 1, 2] = 0
    anchor = leaf(torch.full((H,), 0.4))

    def call(*leaves):
        output = ia.equilibrium_attention(*leaves, anchor=anchor, on_failure="ignore")
        return torch.autograd.grad(output, [*leaves, anchor], cotangent)

    expected = call(*expected_leaves)
    query[0, 1, 2] = torch.nan
    leaves = [leaf(t) for t in (query, key, value)]
    found = agree(lambda: call(*leaves))[0]
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)


@native
@pytest.mark.parametrize("mask", [None, torch.ones(3, 2, dtype=torch.bool)], ids=["bare", "mask"])
def test_a_saddle_among_others_is_told_and_differentiated_alike(mask, monkeypatch):
    # Both keys are as near: the state in the middle is stationary, and E curves down there.
    key = leaf(torch.stack([torch.ones(D), -torch.ones(D)])[None, None])
    query = leaf(torch.stack([torch.zeros(D), torch.linspace(0.5, 1.5, D), torch.zeros(D)])[None, None])
    beta, anchor = leaf(torch.tensor(1.0)), leaf(torch.tensor([0.5]))

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, beta, mask=mask), query, anchor)
        solution = ia.solve(energy, query, on_failure="warn")
        return evidence(solution), gradients(solution.value, [query, key, beta, anchor]), evidence(solution)

    _, _, after = agree(run)[0]
    assert after["adjoint"]["negative_curvature"].tolist() == [[[True, False, True]]]
    unstable, converged = int(ia.Status.UNSTABLE), int(ia.Status.CONVERGED)
    assert after["adjoint"]["status"].tolist() == [[[unstable, converged, unstable]]]
    # The other queries are not solved a second time.
    monkeypatch.setattr("implicit_attention.adjoints.native._by_implicit", None)
    run()


@native
def test_a_masked_key_of_nan_reaches_only_the_queries_that_attend_to_it():
    query, key, value = (t.detach() for t in tensors())
    key[0, 0, 2] = torch.nan
    mask = torch.ones(N, M, dtype=torch.bool)
    mask[1:, 2] = False

    def run():
        energy = ia.AnchoredEnergy(ia.LogSumExp(key, 0.4, mask=mask), query, 0.5)
        state = ia.solve(energy, query, on_failure="ignore").value
        return state, ia.equilibrium_attention(query, key, value, attn_mask=mask, on_failure="ignore")

    state, output = agree(run, takes=False)[0]
    for found in (state, output):
        assert found[0, 0, 0].isnan().all()
        assert found.isnan().sum() == D


@native
def test_what_changes_torch_between_the_passes_gives_the_general_gradient():
    leaves = tensors()

    def run():
        output = ia.equilibrium_attention(*leaves)
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(output, leaves)

    agree(run)


@native
def test_inference_mode():
    with torch.inference_mode():
        made = [t.detach().clone() for t in tensors()]
        agree(lambda: ia.equilibrium_attention(*made))
        agree(lambda: ia.equilibrium_attention(*made, max_steps=0))


@native
def test_parameters_are_plain():
    made = [torch.nn.Parameter(t.detach()) for t in tensors()]
    agree(lambda: gradients(ia.equilibrium_attention(*made), made))

"""ImplicitAttention: what it computes, that every option matters, and that it is a good torch module."""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from implicit_attention import (
    Anderson,
    AttentionPooling,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    ImplicitAttention,
    OneStep,
    Picard,
    Rotary,
    SquaredScores,
    Status,
    UnsupportedImplementation,
)
from implicit_attention.testing.numerics import equilibrium_reference, random

B, N, M, DIM, HEADS = 2, 5, 7, 16, 4
TIGHT = Anderson(rtol=1e-11, atol=1e-13)


def layer(dim=DIM, heads=HEADS, *, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    made = ImplicitAttention(dim, heads, dtype=dtype, **options)
    # Anchors and temperatures that differ between heads tell wrong axes.
    for scalar in (made.anchor, made.beta):
        if isinstance(scalar, nn.Module):
            for parameter in scalar.parameters():
                nn.init.normal_(parameter)
    return made


def tokens(rows=N, dim=DIM, seed=0, dtype=torch.float64):
    return random(B, rows, dim, seed=seed, dtype=dtype)


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def reference(made, x, context, mask=None, *, explicit=False):
    """The layer's output by a plain solve with every product written out."""
    query = split(made.q_proj(x), made.heads)
    repeats = made.heads // made.kv_heads
    key, value = (
        split(projection(context), made.kv_heads).repeat_interleave(repeats, dim=1)
        for projection in (made.k_proj, made.v_proj)
    )
    if explicit:
        query = query * made.beta()[:, None, None]
        output = F.scaled_dot_product_attention(query, key, value, mask, scale=1.0)
    else:
        output = equilibrium_reference(query, key, value, mask, beta=made.beta(), anchor=made.anchor())
    return made.out_proj(output.transpose(1, 2).flatten(2))


def arbitrary_mask(*shape):
    mask = random(*shape, seed=9) > -0.3
    mask[..., 0] = True
    return mask


CASES = {
    "self": ({}, {}, lambda: None),
    "cross": ({"context_dim": 6}, {"context": tokens(M, 6, seed=1)}, lambda: None),
    "grouped": ({"kv_heads": 2}, {}, lambda: None),
    "causal": ({"causal": True}, {}, lambda: torch.ones(N, N).bool().tril()),
    "padding": ({}, {"key_mask": torch.arange(N) < torch.tensor([[3], [5]])},
                lambda: (torch.arange(N) < torch.tensor([3, 5])[:, None])[:, None, None]),
    "arbitrary": ({}, {"mask": arbitrary_mask(B, HEADS, N, N)}, lambda: arbitrary_mask(B, HEADS, N, N)),
    "per sample": ({}, {"mask": arbitrary_mask(B, N, N)}, lambda: arbitrary_mask(B, N, N)[:, None]),
    "additive": ({}, {"mask": random(N, N, seed=3)}, lambda: random(N, N, seed=3)),
    "causal and padding, grouped": (
        {"causal": True, "kv_heads": 1}, {"key_mask": torch.arange(N) >= torch.tensor([[2], [0]])},
        lambda: (torch.arange(N) >= torch.tensor([2, 0])[:, None])[:, None, None] & torch.ones(N, N).bool().tril()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_a_reference_solve(case):
    options, call, mask = CASES[case]
    made, x = layer(solver=TIGHT, **options), tokens()
    context = call.get("context", x)
    output = made(x, **call)
    torch.testing.assert_close(output, reference(made, x, context, mask()), rtol=1e-9, atol=1e-10)
    assert output.shape == (B, N, DIM)
    explicit = made(x, max_steps=0, **call)
    torch.testing.assert_close(explicit, reference(made, x, context, mask(), explicit=True), rtol=1e-9, atol=1e-10)
    assert float((explicit - output).detach().abs().max()) > 1e-3


def test_no_steps_are_torchs_multi_head_attention():
    made = layer(anchor=0.3, beta=(DIM // HEADS) ** -0.5, max_steps=0)
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([made.q_proj.weight, made.k_proj.weight, made.v_proj.weight]))
        theirs.out_proj.weight.copy_(made.out_proj.weight)
    x = tokens()
    torch.testing.assert_close(made(x), theirs(x, x, x, need_weights=False)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "causal": True}, {"readout": "state"},
                                     {"qk_norm": "rms", "projection_bias": True}])  # fmt: skip
def test_gradients_reach_every_parameter_in_training_and_evaluation(options):
    made, x = layer(**options), tokens().requires_grad_()
    gradients = []
    for mode in (True, False):
        made.train(mode).zero_grad()
        made(x).square().sum().backward()
        for name, parameter in made.named_parameters():
            assert parameter.grad is not None, name
            # A shift that all keys share changes no weight, so that of k_proj only moves the mean.
            assert float(parameter.grad.abs().min() if parameter.ndim == 1 and "bias" not in name else
                         parameter.grad.abs().max()) > 1e-9, name  # fmt: skip
        gradients.append([p.grad.clone() for p in made.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert bool((made.last_solve.adjoint.status == Status.CONVERGED).all())


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "causal": True}, {"readout": "state", "rotary": Rotary()}])
def test_gradients_are_the_derivatives(options):
    made, x = layer(dim=8, heads=2 if "kv_heads" not in options else 4, solver=TIGHT, **options), tokens(3, 8)
    parameters = dict(made.named_parameters())

    def output(x, *new):
        return torch.func.functional_call(made, dict(zip(parameters, new, strict=True)), x)

    arguments = [x.requires_grad_(), *(p.detach().clone().requires_grad_() for p in parameters.values())]
    assert torch.autograd.gradcheck(output, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(output, arguments, fast_mode=True)


def test_fully_masked_rows_are_zeros_before_the_projection():
    made, x = layer(), tokens().requires_grad_()
    key_mask = torch.tensor([[False] * N, [True] * N])
    output = made(x, key_mask=key_mask)
    assert bool((output[0] == 0).all())
    output.square().sum().backward()
    assert bool(x.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in made.parameters())


def test_the_state_satisfies_its_equation():
    made, x = layer(readout="state", solver=TIGHT), tokens()
    output, solution = made(x, return_solution=True)
    z, q, k = solution.value, split(made.q_proj(x), HEADS), split(made.k_proj(x), HEADS)
    anchor, beta = (t()[:, None, None] for t in (made.anchor, made.beta))
    torch.testing.assert_close(z, anchor * q + (1 - anchor) * (beta * z @ k.mT).softmax(-1) @ k, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(output, made.out_proj(z.transpose(1, 2).flatten(2)))
    one_step = anchor * q + (1 - anchor) * (beta * q @ k.mT).softmax(-1) @ k
    expected = made.out_proj(one_step.transpose(1, 2).flatten(2))
    torch.testing.assert_close(made(x, max_steps=0), expected, rtol=1e-9, atol=1e-10)


def test_bare_is_the_energy_itself():
    x, context = tokens(), tokens(M, seed=1)
    options = {"bare": True, "anchor": 0.4, "beta": 0.5, "solver": TIGHT}
    assert not list(ImplicitAttention(DIM, 1, **options).parameters())
    state = equilibrium_reference(x, context, beta=0.5, anchor=0.4)
    torch.testing.assert_close(ImplicitAttention(DIM, 1, readout="state", **options)(x, context), state)
    read = equilibrium_reference(x, context, context, beta=0.5, anchor=0.4)
    torch.testing.assert_close(ImplicitAttention(DIM, 1, **options)(x, context), read)


def test_rotary_depends_on_distances_only():
    for readout in ("values", "state"):
        made, x = layer(rotary=Rotary(), readout=readout, solver=TIGHT), tokens()
        output = made(x)
        torch.testing.assert_close(made(x, positions=torch.arange(N) + 100), output, rtol=1e-8, atol=1e-9)
        assert not torch.allclose(made(x, positions=torch.arange(N) * 2), output, atol=1e-4)
        per_sample = torch.stack([torch.arange(N), torch.arange(N) * 2])
        both = made(x, positions=per_sample)
        torch.testing.assert_close(both[0], output[0])
        torch.testing.assert_close(both[1], made(x, positions=torch.arange(N) * 2)[1])


def test_rotary_turns_by_the_angles_of_the_paper():
    x = random(1, 1, 2, 4)
    turned = Rotary(base=100.0)(x, torch.tensor([0, 3]))
    torch.testing.assert_close(turned[..., 0, :], x[..., 0, :])
    a, b, c, d = x[0, 0, 1].tolist()
    first, second = 3.0, 3.0 * 100.0**-0.5
    expected = [a * math.cos(first) - c * math.sin(first), b * math.cos(second) - d * math.sin(second),
                c * math.cos(first) + a * math.sin(first), d * math.cos(second) + b * math.sin(second)]  # fmt: skip
    torch.testing.assert_close(turned[0, 0, 1], torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(Rotary(100.0)(turned, torch.tensor([0, 3]), inverse=True), x)


# Every option changes behaviour. A new one has to be added here.

CHANGES = {
    "dim": None, "heads": None, "device": None,
    "head_dim": 6, "kv_heads": 2, "context_dim": None, "potential": None, "anchor": 0.9, "beta": 2.0,
    "readout": "state", "causal": True, "dropout": 0.5, "qk_norm": "rms", "rotary": Rotary(),
    "projection_bias": True, "bare": None, "solver": Broyden(rtol=1e-2), "adjoint": None, "impl": None,
    "max_steps": 0, "on_failure": None, "unbounded": None, "dtype": torch.float32,
}  # fmt: skip


def test_every_option_is_listed():
    named = set(inspect.signature(ImplicitAttention).parameters) - {"options"}
    assert named | {"solver", "adjoint", "impl", "max_steps", "on_failure"} == set(CHANGES)


@pytest.mark.parametrize("option", [name for name, value in CHANGES.items() if value is not None])
def test_every_option_changes_the_output(option):
    x = tokens()
    plain = layer(**{})(x)
    changed = layer(**{option: CHANGES[option]})
    output = changed(x.to(changed.q_proj.weight.dtype))
    assert output.shape == plain.shape
    assert not torch.equal(output.double(), plain)


def test_options_that_show_elsewhere():
    x = tokens().requires_grad_()
    plain = torch.autograd.grad(layer()(x).square().sum(), x)[0]
    assert not torch.equal(torch.autograd.grad(layer(adjoint=OneStep())(x).square().sum(), x)[0], plain)
    with pytest.raises(UnsupportedImplementation):
        layer(impl="triton")(x)
    with pytest.raises(ConvergenceError):
        layer(on_failure="raise", max_steps=1)(x)
    with pytest.warns(ConvergenceWarning):
        layer(max_steps=1)(x)
    assert next(layer(device="meta").parameters()).device.type == "meta"

    quadratic = layer(potential=SquaredScores, readout="state", beta=0.01)
    assert not torch.equal(quadratic(x), layer(readout="state", beta=0.01)(x))
    falling = {"potential": SquaredScores, "readout": "state", "beta": 99.0, "on_failure": "ignore"}
    with pytest.raises(ValueError, match="a lower bound"):
        layer(**falling)(x)
    layer(unbounded="ignore", **falling)(x)
    for norm in ("rms", "layer"):
        assert not torch.equal(layer(qk_norm=norm)(x), layer()(x))
    assert not torch.equal(layer(qk_norm="rms")(x), layer(qk_norm="layer")(x))


def test_every_override_of_a_call_counts():
    made, x = layer(), tokens().requires_grad_()
    plain, gradient = made(x), None
    assert not torch.equal(made(x, solver=Picard(rtol=1e-1)), plain)
    assert not torch.equal(made(x, max_steps=0), plain)
    assert not torch.equal(made(x, causal=True), plain)
    assert not torch.equal(made(x, values=2 * x), plain)
    gradient = torch.autograd.grad(plain.square().sum(), x)[0]
    assert not torch.equal(torch.autograd.grad(made(x, adjoint=OneStep()).square().sum(), x)[0], gradient)
    with pytest.raises(UnsupportedImplementation):
        made(x, impl="triton")
    with pytest.raises(ConvergenceError):
        made(x, max_steps=1, on_failure="raise")
    assert torch.equal(made(x), plain)
    # A solver for one call comes with its own budget.
    explicit = layer(max_steps=0)
    torch.testing.assert_close(explicit(x, solver=TIGHT), plain, rtol=1e-3, atol=1e-3)


def test_anchor_and_beta_stay_in_range():
    made, x = layer(), tokens()
    for extreme in (-1e3, 1e3):
        nn.init.constant_(made.anchor.logit, extreme)
        nn.init.constant_(made.beta.log_scale, extreme)
        assert bool(((made.anchor() > 0) & (made.anchor() < 1)).all())
        assert bool(((made.beta() > 0) & made.beta().isfinite()).all())
        assert bool(made(x, on_failure="ignore").isfinite().all())
    made.anchor.set(0.25)
    made.beta.set(3.0)
    torch.testing.assert_close(made.anchor(), torch.full((HEADS,), 0.25).double())
    torch.testing.assert_close(made.beta(), torch.full((HEADS,), 3.0).double())
    for exact in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"to be learned, got {exact}; pass anchor={exact:g}"):
            made.anchor.set(exact)
        assert layer(anchor=exact)(x).shape == x.shape


# SolveReport.


def test_the_evidence_of_the_last_call_stays():
    made, x = layer(), tokens().requires_grad_()
    assert made.last_solve is None
    output, solution = made(x, return_solution=True)
    evidence = made.last_solve
    assert torch.equal(evidence.status, solution.status)
    assert evidence.num_evals.shape == (B, HEADS, N)
    assert not any(getattr(evidence, n).requires_grad for n in ("status", "residual", "tolerance", "num_evals"))
    assert evidence.adjoint.status is None
    output.sum().backward()
    assert bool((evidence.adjoint.status == Status.CONVERGED).all())
    made(x, max_steps=0)
    assert bool((made.last_solve.status == Status.EXPLICIT).all())
    assert "last_solve" not in made.state_dict()
    grouped = layer(kv_heads=2)
    grouped(x)
    assert grouped.last_solve.num_evals.shape == (B, HEADS, N)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_trajectory_leads_from_the_query_to_the_equilibrium(kv_heads):
    made, x = layer(kv_heads=kv_heads), tokens()
    output, solution = made(x, return_trajectory=True)
    states = solution.trace.value
    assert states.shape[1:] == (B, HEADS, N, DIM // HEADS)
    torch.testing.assert_close(states[0], split(made.q_proj(x), HEADS))
    assert torch.equal(states[-1], solution.value)
    torch.testing.assert_close(output, made(x), rtol=1e-10, atol=1e-10)
    # Falls up to rounding, once it is there.
    assert float(solution.trace.energy.diff(dim=0).max()) < 1e-12
    _, explicit = made(x, return_trajectory=True, max_steps=0)
    assert explicit.trace.value.shape[0] == 1


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_weights_are_those_that_values_are_read_with(kv_heads):
    made, x = layer(kv_heads=kv_heads), tokens()
    for options in ({}, {"max_steps": 0}):
        output, weights = made(x, mask=arbitrary_mask(N, N), return_weights=True, **options)
        assert weights.shape == (B, HEADS, N, N)
        assert bool((weights[..., ~arbitrary_mask(N, N)] == 0).all())
        values = split(made.v_proj(x), kv_heads).repeat_interleave(HEADS // kv_heads, dim=1)
        torch.testing.assert_close(made.out_proj((weights @ values).transpose(1, 2).flatten(2)), output)
    output, solution, weights = made(x, return_solution=True, return_weights=True)
    assert weights.shape[:-1] == solution.status.shape
    with pytest.raises(UnsupportedImplementation, match="SquaredScores has no attention weights"):
        layer(potential=SquaredScores, readout="state", beta=0.01)(x, return_weights=True)


# A good torch module.


def test_state_dict_has_the_names_that_one_expects():
    names = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "anchor.logit", "beta.log_scale"}
    made, x = layer(), tokens()
    assert set(made.state_dict()) == names
    stream = io.BytesIO()
    torch.save(made.state_dict(), stream)
    stream.seek(0)
    other = layer(seed=1)
    assert not torch.equal(other(x), made(x))
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(x), made(x))
    assert set(layer(anchor=0.5, beta=1.0, readout="state").state_dict()) == names - {
        "anchor.logit", "beta.log_scale", "v_proj.weight"}  # fmt: skip


def test_a_pickle_of_an_option_that_is_gone_is_refused():
    made = layer()
    made.values_inside = False
    assert pickle.loads(pickle.dumps(made))(tokens()).shape == tokens().shape
    made.values_inside = True
    with pytest.raises(ValueError, match="`values_inside` must be False in a layer that was pickled"):
        pickle.loads(pickle.dumps(made))


def test_copies_and_pickles_compute_the_same():
    made, x = layer(causal=True, kv_heads=2, solver=Anderson(rtol=1e-6), rotary=Rotary()), tokens()
    made(x.requires_grad_()).sum().backward()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert twin.last_solve is None
        assert twin.options == made.options
        assert torch.equal(twin(x), made(x))
        assert all(a is not b for a, b in zip(twin.parameters(), made.parameters(), strict=True))


def test_repr_says_what_it_is():
    text = repr(layer(kv_heads=2, anchor=0.25, causal=True, max_steps=7, solver=Picard(), dropout=0.1))
    parts = ("16, heads=4", "kv_heads=2", "Fixed(0.25)", "causal", "max_steps=7", "solver=Picard(", "dropout=0.1")
    for part in parts:
        assert part in text
    assert "potential=SquaredScores" in repr(layer(potential=SquaredScores, readout="state"))


def test_works_in_sequential_and_moves_with_its_model():
    model = nn.Sequential(nn.Linear(3, DIM), layer(dtype=torch.float32), nn.LayerNorm(DIM), nn.Linear(DIM, 2))
    assert model(torch.randn(B, N, 3)).shape == (B, N, 2)
    assert model.double()(torch.randn(B, N, 3).double()).dtype == torch.float64
    assert model.bfloat16()(torch.randn(B, N, 3).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    made, x = layer(), tokens().requires_grad_()
    wanted = [x, *made.parameters()]
    made(x).square().sum().backward()
    plain = [t.grad.clone() for t in wanted]
    for t in wanted:
        t.grad = None
    checkpoint(made, x, use_reentrant=reentrant).square().sum().backward()
    for ours, theirs in zip(wanted, plain, strict=True):
        assert torch.equal(ours.grad, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [N, 70])
def test_autocast_keeps_the_state_in_single_precision(dtype, rows):
    made, x = layer(dtype=torch.float32, anchor=0.5), tokens(rows, dtype=torch.float32)
    expected = made(x)
    with torch.autocast("cpu", dtype):
        output, solution = made(x, return_solution=True)
        assert output.dtype == dtype
        assert solution.value.dtype == solution.residual.dtype == torch.float32
        assert bool(solution.converged.all())
        output.float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == torch.float32 for p in made.parameters())
    assert float((output.float() - expected).detach().abs().max()) < 0.03 * float(expected.detach().abs().max())


@pytest.mark.parametrize("rows", [N, 70])
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"solver": Picard()}], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiles_without_a_graph_break(rows, options):
    torch._dynamo.reset()
    made, x = layer(causal=True), tokens(rows).requires_grad_()
    compiled = torch.compile(made, backend="eager", fullgraph=True)
    found = []
    for forward in (made, compiled):
        made.zero_grad()
        output = forward(x, **options)
        output.square().sum().backward()
        found.append((output.detach(), [p.grad.clone() for p in made.parameters()], made.last_solve))
    (expected, gradients, evidence), (output, others, told) = found
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(others, gradients, rtol=1e-12, atol=1e-12)
    assert torch.equal(told.status, evidence.status)
    assert torch.equal(told.num_evals, evidence.num_evals)
    assert torch.equal(told.residual.isnan(), evidence.residual.isnan())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
# The compiler asks every tensor that crosses a graph break for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_is_no_operation_breaks_the_graph_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    made, x = layer(causal=True, solver=Broyden()), tokens().requires_grad_()
    compiled = torch.compile(made, backend="eager")
    assert torch.equal(compiled(x), made(x))
    # One place, told once for each function that leads there.
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) <= 4


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_compiled_layer_tells_its_failures_when_it_is_asked():
    torch._dynamo.reset()
    made, x = layer(max_steps=2), tokens()
    torch.compile(made, backend="eager", fullgraph=True)(x)
    with pytest.warns(ConvergenceWarning, match="the compiled solve failed for"):
        assert bool(made.last_solve.failed.any())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torch_func_sees_through_it():
    made, x = layer(solver=TIGHT), tokens()
    parameters = {n: p.detach() for n, p in made.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(made, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(parameters, x)
    loss_of = made(x).square().sum()
    for ours, theirs in zip(gradients.values(), torch.autograd.grad(loss_of, made.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    for ours, total in zip(per_sample.values(), gradients.values(), strict=True):
        torch.testing.assert_close(ours.sum(0), total, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("rows", [N, 80])
@pytest.mark.parametrize("options", [{}, {"max_steps": 0}, {"readout": "state"}])
def test_a_nan_token_that_the_loss_leaves_out_reaches_no_gradient_of_others(rows, options):
    made, x = layer(on_failure="ignore", **options), tokens(rows)
    context = tokens(rows, seed=1)
    clean = [t.clone().requires_grad_() for t in (x, context)]
    spoiled = [t.clone() for t in (x, context)]
    spoiled[0][0, 1] = math.nan
    spoiled = [t.requires_grad_() for t in spoiled]
    kept = torch.ones(B, rows, dtype=torch.bool)
    kept[0, 1] = False
    results = [torch.autograd.grad(made(*given)[kept].square().sum(), given) for given in (clean, spoiled)]
    for ours, theirs in zip(*results, strict=True):
        keep = kept if ours is results[0][0] else torch.ones_like(kept)
        torch.testing.assert_close(ours[keep], theirs[keep], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
def test_autocast_meets_inputs_of_two_precisions(options):
    lower = nn.Linear(DIM, DIM)
    bare = ImplicitAttention(DIM, 1, bare=True, **options)
    pool = AttentionPooling(DIM, 1, bare=True, **options)
    x = tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert bare(lower(x), x).dtype == torch.bfloat16
        assert pool(lower(x)).shape == (B, 1, DIM)
        normed = layer(dtype=torch.float32, qk_norm="layer", **options)
        assert normed(x).dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"max_steps": 0}])
def test_nothing_to_attend_to_gives_zeros(options):
    made, x = layer(**options), tokens().requires_grad_()
    output, weights = made(x, x[:, :0], return_weights=True)
    assert bool((output == 0).all())
    assert weights.shape == (B, HEADS, N, 0)
    output.sum().backward()
    assert made(x[:, :0]).shape == (B, 0, DIM)


def test_batch_entries_do_not_see_each_other():
    made, x = layer(), tokens()
    output = made(x)
    spoiled = x.clone()
    spoiled[0, 1] = math.nan
    with pytest.warns(ConvergenceWarning, match="failed for 20 of 40 problems"):
        assert torch.equal(made(spoiled)[1], output[1])


# Wrong arguments.


def test_an_explicit_step_measures_the_residual_of_its_own_anchor():
    made, x = layer(anchor=0.3), tokens()
    with torch.no_grad():
        output, solution = made(x, max_steps=0, return_solution=True)
        assert torch.equal(output, made(x, max_steps=0))
    _, recorded = made(x, max_steps=0, return_solution=True)
    assert torch.equal(solution.residual, recorded.residual)
    assert bool((solution.residual > 0).all())

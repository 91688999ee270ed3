"""The causal Energy Transformer: its map against loops, its Jacobian against autograd, and what no token may read."""

import math

import pytest
import torch

from implicit_attention import Implicit, Status, Unrolled, solve
from implicit_attention.energies import CausalDynamics, CausalTokens
from implicit_attention.potentials import LayerNormPotential, LogSumExp, Polynomial, TokenAttention
from implicit_attention.solvers import Anderson, Broyden, Picard
from implicit_attention.testing.numerics import random

EXACT = Picard(rtol=1e-13, atol=1e-13, max_steps=2000)


def truth_tensor(formula, *shape):
    grid = [formula(*index) for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist()]
    return torch.tensor(grid, dtype=torch.float64).reshape(shape)


def truth():
    """Tokens and potentials of the ground truth."""
    x = truth_tensor(lambda n, i: math.sin(1 + 4 * n + i), 3, 4)
    w_query = truth_tensor(lambda h, y, i: math.cos(1 + 7 * h + 3 * y + i) / 2, 2, 2, 4)
    w_key = truth_tensor(lambda h, y, i: math.sin(2 + 5 * h + 2 * y + i) / 2, 2, 2, 4)
    xi = truth_tensor(lambda m, i: math.cos(3 + 2 * m + 5 * i) / 2, 5, 4)
    norm = LayerNormPotential(1.3, torch.arange(4, dtype=torch.float64) / 10, 1e-5)
    attention = TokenAttention(w_query, w_key, torch.tensor([0.7, 1.1], dtype=torch.float64))
    return norm, attention, Polynomial(xi, 1.0), x


def weights(scale=0.25, dtype=torch.float64, dim=5, head_dim=3):
    """w_query, w_key, beta, xi, gamma and delta of D 5, H 2, Y 3, M 4."""
    w_query, w_key = (scale * random(2, head_dim, dim, seed=s) for s in (1, 2))
    beta, gamma = torch.tensor([0.6, 0.9]), torch.tensor(0.8)
    found = w_query, w_key, beta, scale * random(4, dim, seed=3), gamma, 0.1 * random(dim, seed=4)
    return tuple(t.to(dtype) for t in found)


def made(tensors, field, keys=None, **options):
    w_query, w_key, beta, xi, gamma, delta = tensors
    attention = TokenAttention(w_query, w_key, beta, **options)
    return CausalTokens(LayerNormPotential(gamma, delta), attention, Polynomial(xi, 1.0), field, keys=keys)


def pull_by_loops(tensors, x, keys=None, mask=None, exclude_self=False):
    """The pull of one sample, token by token and key by key."""
    w_query, w_key, beta, xi, gamma, delta = tensors
    g = torch.stack([gamma * torch.nn.functional.layer_norm(t, t.shape, eps=1e-5) + delta for t in x])
    earlier = 0 if keys is None else keys.shape[-2]
    rows = []
    for c in range(len(g)):
        row = sum(xi[m] * torch.relu(xi[m] @ g[c]) for m in range(len(xi)))
        for h in range(len(beta)):
            own = [w_key[h] @ g[b] for b in range(c if exclude_self else c + 1)]
            given = [keys[h, m] for m in range(earlier)] if earlier else []
            read = [k for j, k in enumerate(given + own) if mask is None or bool(mask[c, j])]
            if read:
                scores = torch.stack([beta[h] * (w_query[h] @ g[c]) @ k for k in read])
                row = row + (scores.softmax(0) @ torch.stack(read)) @ w_query[h]
        rows.append(row)
    return torch.stack(rows)


def test_ground_truth():
    norm, attention, memory, x = truth()
    problem = CausalTokens(norm, attention, memory, x)
    solution = solve(problem, x, solver=EXACT)
    expected = torch.tensor([1.7705759616, -1.0653887279, -2.9877300330, -1.9280988644], dtype=torch.float64)
    torch.testing.assert_close(solution.value[2], expected, rtol=0, atol=1e-10)
    # By plain steps of loops, which know nothing of the class.
    tensors = (
        attention.w_query,
        attention.w_key,
        attention.beta,
        memory.keys,
        torch.tensor(1.3, dtype=x.dtype),
        norm.delta,
    )
    z = x
    for _ in range(200):
        z = x + pull_by_loops(tensors, z)
    torch.testing.assert_close(solution.value, z, rtol=0, atol=1e-11)


@pytest.mark.parametrize("earlier", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_map_by_loops(exclude_self, masked, earlier):
    tensors, x, b = weights(), random(2, 3, 6, 5, seed=5), random(2, 3, 6, 5, seed=6)
    keys = random(2, 3, 2, earlier, 3, seed=7)
    mask = random(2, 3, 6, earlier + 6, seed=8) > 0.3 if masked else None
    problem = made(tensors, b, keys, mask=mask, exclude_self=exclude_self)
    found = problem.fixed_point_map(x)
    for i in range(2):
        for j in range(3):
            expected = pull_by_loops(tensors, x[i, j], keys[i, j], mask[i, j] if masked else None, exclude_self)
            torch.testing.assert_close(found[i, j], b[i, j] + expected, rtol=0, atol=1e-13)
    if earlier == 0:
        # No keys are none given.
        assert torch.equal(found, made(tensors, b, None, mask=mask, exclude_self=exclude_self).fixed_point_map(x))


@pytest.mark.parametrize("shape", [(9,), (6, 9), (1, 9), (6, 1), (2, 1, 9), (1, 6, 9), ()])
def test_masks_of_all_shapes(shape):
    tensors, x, keys = weights(), random(2, 6, 5, seed=5), random(2, 2, 3, 3, seed=7)
    mask = random(*shape, seed=8) > 0
    whole = mask.broadcast_to(2, 6, 9)
    found = made(tensors, x, keys, mask=mask).fixed_point_map(x)
    for i in range(2):
        torch.testing.assert_close(found[i], x[i] + pull_by_loops(tensors, x[i], keys[i], whole[i]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", [6, 600], ids=["one tile", "tiles"])
@pytest.mark.parametrize("options", [{}, {"exclude_self": True}, {"mask": True}], ids=["plain", "others", "mask"])
def test_linearize_by_autograd(options, count):
    x, b, u, v = (random(2, count, 5, seed=seed) for seed in (5, 6, 9, 10))
    if "mask" in options:
        options = {"mask": random(2, count, count + 3, seed=8) > 0}
    problem = made(weights(), b, random(2, 2, 3, 3, seed=7), **options)
    found = problem.linearize(x)
    _, by_jvp = torch.func.jvp(problem.fixed_point_map, (x,), (v,))
    torch.testing.assert_close(found.jvp(v), by_jvp, rtol=0, atol=1e-12)
    held = [t.detach().requires_grad_(t.is_floating_point()) for t in problem.tensors()]
    z = x.clone().requires_grad_()
    floating = [t for t in held if t.requires_grad]
    by_state, *by_tensors = torch.autograd.grad(problem.replace(*held).fixed_point_map(z), [z, *floating], u)
    torch.testing.assert_close(found.vjp(u), by_state, rtol=0, atol=1e-12)
    closed = found.vjp_tensors(u)
    assert len(closed) == len(held)
    assert [t is None for t in closed] == [not t.requires_grad for t in held]
    for mine, theirs in zip([t for t in closed if t is not None], by_tensors, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_linearize_without_memory_and_keys():
    w_query, w_key, *_ = weights()
    x, u = random(6, 5, seed=5), random(6, 5, seed=9)
    problem = CausalTokens(LayerNormPotential(), TokenAttention(w_query, w_key, 0.7), None, x)
    pull = torch.func.vjp(lambda z, *t: problem.replace(*t).fixed_point_map(z), x, *problem.tensors())[1]
    found = problem.linearize(x)
    torch.testing.assert_close((found.vjp(u), *found.vjp_tensors(u)), pull(u), rtol=0, atol=1e-12)


def test_subclasses_keep_no_closed_form():
    class Doubled(TokenAttention):
        def query_pull(self, z, keys=None):
            return 2 * super().query_pull(z, keys)

    w_query, w_key, *_ = weights()
    x, v = random(6, 5, seed=5), random(6, 5, seed=9)
    problem = CausalTokens(LayerNormPotential(), Doubled(w_query, w_key, 0.7), None, x)
    _, by_jvp = torch.func.jvp(problem.fixed_point_map, (x,), (v,))
    torch.testing.assert_close(problem.linearize(x).jvp(v), by_jvp, rtol=0, atol=1e-12)


def test_no_tensor_of_all_pairs_above_512_tokens():
    w_query, w_key = ((0.3 * random(2, 2, 3, seed=s)).requires_grad_() for s in (1, 2))
    attention, x = TokenAttention(w_query, w_key, 0.7), random(600, 3, seed=5)
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        pull = attention.query_pull(x)
    # All pairs of one head are 2.9 MB.
    assert sum(kept.values()) < 3e5
    # The same rows as those of half the tokens, which are one tile.
    torch.testing.assert_close(pull[:300], attention.query_pull(x[:300]), rtol=0, atol=1e-12)
    pull.square().sum().backward()
    assert w_query.grad.isfinite().all()
    assert w_key.grad.abs().sum() > 0


@pytest.mark.slow
def test_gradients_through_the_solve():
    tensors, b = weights(dim=3, head_dim=2), random(2, 2, 3, seed=5)
    keys = 0.5 * random(2, 2, 1, 2, seed=7)

    def solved(b, keys, *tensors):
        problem = made(tensors, b, keys, mask=torch.ones(2, 3, dtype=torch.bool))
        return solve(problem, b.detach(), solver=EXACT).value

    inputs = tuple(t.clone().requires_grad_() for t in (b, keys, *tensors))
    assert torch.autograd.gradcheck(solved, inputs, atol=1e-7)
    assert torch.autograd.gradgradcheck(solved, inputs, atol=1e-6, fast_mode=True)


def test_gradient_is_that_of_many_steps():
    tensors, b = weights(), random(2, 4, 5, seed=5)
    inputs = [t.clone().requires_grad_() for t in (b, *tensors)]
    problem, w = made(inputs[1:], inputs[0]), random(2, 4, 5, seed=11)
    steps = Picard(max_steps=200, rtol=0, atol=0)
    found, expected = (
        torch.autograd.grad((solve(problem, b, solver=s, adjoint=a).value * w).sum(), inputs)
        for s, a in ((EXACT, Implicit()), (steps, Unrolled()))
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_padding_is_as_if_the_tokens_were_not_there():
    tensors, b = weights(), random(2, 6, 5, seed=5)
    exist = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    problem = made(tensors, b.masked_fill(~exist[..., None], 0.0), mask=exist[:, None, :] & exist[:, :, None])
    found = solve(problem, problem.field, solver=EXACT).value
    for sample, count in ((0, 6), (1, 4)):
        alone = made(tensors, b[sample, :count])
        expected = solve(alone, alone.field, solver=EXACT).value
        torch.testing.assert_close(found[sample, :count], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["field", "keys"])
def test_what_is_not_finite_stays_in_its_sample(where, bad):
    tensors = tuple(t.requires_grad_() for t in weights())
    b, keys = random(3, 4, 5, seed=5), 0.5 * random(3, 2, 2, 3, seed=7)
    good = solve(made(tensors, b, keys), b)
    others = torch.tensor([0, 2])
    loss = good.value[others].square().sum()
    by_good = torch.autograd.grad(loss, tensors)
    spoiled = {"field": b.clone(), "keys": keys.clone()}
    spoiled[where][1, 1] = bad
    found = solve(made(tensors, spoiled["field"], spoiled["keys"]), b, on_failure="ignore")
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert torch.equal(found.value[others], good.value[others])
    before = 1 if where == "field" else 0
    assert torch.equal(found.value[1, :before], good.value[1, :before])
    assert bool(found.value[1, before].isnan().all())
    by_found = torch.autograd.grad(found.value[others].square().sum(), tensors)
    torch.testing.assert_close(by_found, by_good, rtol=0, atol=1e-8)


def spectral(problem, z):
    """Jacobian (n, n) of the map of one sample."""
    size = z.numel()
    return torch.func.jacrev(problem.fixed_point_map)(z).reshape(size, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [Anderson(), Anderson(rtol=1e-2), Picard(damping=0.2)], ids=repr)
@pytest.mark.parametrize("masked", [False, True])
def test_changing_the_last_token_changes_no_earlier_bit(masked, solver, dtype):
    b, keys = random(3, 7, 5, seed=5).to(dtype), 0.3 * random(3, 2, 2, 3, seed=7).to(dtype)
    # Two documents, and pairs of later tokens, which no token reads.
    mask = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3)) > 0 if masked else None
    mask = None if mask is None else torch.cat([torch.ones(7, 2) > 0, mask], 1)
    changed = b.clone()
    changed[:, -1] = 100 * b[:, 0]
    one, two = (solve(made(weights(dtype=dtype), t, keys, mask=mask), t, solver=solver) for t in (b, changed))
    assert bool(one.converged.all())
    assert one.status.shape == (3,)
    assert torch.equal(one.value[:, :-1], two.value[:, :-1])
    assert not torch.equal(one.value[:, -1], two.value[:, -1])


# The published steps.


def dynamics(tensors, **options):
    w_query, w_key, beta, xi, gamma, delta = tensors
    attention = TokenAttention(w_query, w_key, beta, **options)
    return CausalDynamics(LayerNormPotential(gamma, delta), attention, Polynomial(xi, 1.0))


@pytest.mark.parametrize("size", [0.1, 0.5, 1.0])
def test_published_steps_by_loops(size):
    tensors, x = weights(), random(6, 5, seed=5)
    steps = Picard(damping=1 - size, max_steps=5, rtol=0, atol=0)
    found = solve(dynamics(tensors), x, solver=steps, adjoint=Unrolled())
    assert int(found.status) == Status.BUDGET
    assert found.energy is None
    z = x
    for _ in range(5):
        z = z + size * pull_by_loops(tensors, z)
    torch.testing.assert_close(found.value, z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [7, 40, 600])
def test_published_steps_never_read_a_later_token(count, dtype):
    tensors = weights(dtype=dtype)
    x = random(2, count, 5, seed=5).to(dtype)
    steps = Picard(damping=0.9, max_steps=12, rtol=0, atol=0)
    changed = x.clone()
    changed[:, -1] = 100 * random(2, 5, seed=12).to(dtype)
    one, two = (solve(dynamics(tensors), t, solver=steps, adjoint=Unrolled()).value for t in (x, changed))
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


# What is refused.


def test_solvers_that_stop_no_token_on_its_own():
    norm, attention, memory, x = truth()
    with pytest.raises(ValueError, match="`solver` must stop every token of a causal layer on its own, got Broyden"):
        solve(CausalTokens(norm, attention, memory, x), x, solver=Broyden())


def test_it_has_no_energy():
    norm, attention, memory, x = truth()
    problem = CausalTokens(norm, attention, memory, x)
    assert not problem.has_energy
    assert not problem.symmetric
    assert solve(problem, x).energy is None
    # For a reason: its Jacobian is not symmetric in the metric of the layer norm.
    metric = torch.func.jacrev(norm.mean)(x).reshape(12, 12)
    asymmetric = metric @ spectral(problem, x)
    assert (asymmetric - asymmetric.mT).abs().max() > 0.1


def test_other_memories():
    tensors, x = weights(), random(2, 4, 5, seed=5)
    memory = LogSumExp(tensors[3], 0.9)
    problem = CausalTokens(LayerNormPotential(), TokenAttention(*tensors[:3]), memory, x)
    g = problem.activation(x)
    attended = CausalTokens(LayerNormPotential(), TokenAttention(*tensors[:3]), None, x).fixed_point_map(x)
    by_hand = (0.9 * g @ tensors[3].mT).softmax(-1) @ tensors[3]
    torch.testing.assert_close(problem.fixed_point_map(x), attended + by_hand, rtol=0, atol=1e-13)

"""The doors over fixed keys, each asked with tensors in random layouts and compared with `layout_reference`."""

import torch
from layout_reference import (
    added,
    attention_map,
    column,
    copied,
    fixed_point,
    implicit_gradients,
    weights,
)

import implicit_attention as ia
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.potentials import SignUnits

# Of the largest number of an answer, by the precision that it comes in.
CLOSE = {torch.float64: 1e-7, torch.float32: 5e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
HALF = (torch.float16, torch.bfloat16)

#: Whether the products of the door that is being asked are lowered to half precision by autocast.
LOWERED = False
DOORS = {}


def door(function):
    DOORS[function.__name__] = function
    return function


def same(name, got, want, dtype=None):
    """`got`, of the precision `dtype` if that is not its own, is `want` up to rounding."""
    got = copied(got)
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert bool(torch.isfinite(got).all()), f"{name}: not finite"
    worst = float((got - want).abs().amax()) if got.numel() else 0.0
    # A gradient by one of these is a sum over all that they act on, which may cancel.
    floor = 1.0 if name in ("beta", "anchor", "scale") else 0.1
    allowed = (0.2 if LOWERED else CLOSE[dtype]) * max(float(want.abs().amax()) if want.numel() else 0.0, floor)
    assert worst <= allowed, f"{name}: off by {worst:.3g}, allowed {allowed:.3g}"


def all_same(names, got, want, dtype):
    for name, left, right in zip(names, got, want, strict=True):
        same(name, left, right, dtype)


def leaf(tensor):
    return tensor.detach().requires_grad_()


def gradients(draw, out, leaves):
    """A random cotangent in a random layout, and what it pulls back to."""
    cotangent = draw.tensor(*out.shape, dtype=out.dtype)
    return copied(cotangent), torch.autograd.grad(out, leaves, cotangent)


def converged(solution, z, step):
    """All problems are solved, and what is claimed of them holds at their very states."""
    status, claimed, tolerance = (copied(t) for t in (solution.status, solution.residual, solution.tolerance))
    assert bool((status == int(ia.Status.CONVERGED)).all()), f"statuses {status.unique().tolist()}"
    if LOWERED:
        return
    z64 = copied(z)
    axes = tuple(range(status.ndim, z.ndim))
    true = (step(z64) - z64).square().sum(axes).sqrt()
    rounding = 64 * torch.finfo(z.dtype).eps * (1 + z64.abs().amax())
    assert bool((true <= tolerance + rounding).all()), f"residual {float(true.max()):.3g} beyond its tolerance"
    assert bool(((true - claimed).abs() <= 1e-2 * true + rounding).all()), "another residual than claimed"


def sizes(draw):
    """(lead, N, M, D): every other one such that rows are aligned and there are enough keys for fused kernels."""
    rng = draw.rng
    lead = rng.choice(((), (), (1,), (1,), (2,), (1, 1), (2, 1), (2, 2)))
    if rng.random() < 0.6:
        return lead, rng.choice((8, 16)), rng.choice((64, 72)), rng.choice((4, 8))
    return lead, rng.choice((1, 3, 13)), rng.choice((1, 6, 65)), rng.choice((1, 2, 3, 5))


def fewer(draw, lead):
    """Leading axes that broadcast to `lead`."""
    return draw.rng.choice((lead, lead, (1,) * len(lead), ()))


def constants(draw, lead, keys, *, number=False):
    """(beta, anchor), each a number or a tensor, such that the map is a contraction."""
    rng = draw.rng
    low = rng.uniform(0.3, 0.7)
    anchor = low if number or rng.random() < 0.5 else draw.uniform(*fewer(draw, lead), low=low, high=0.8)
    high = rng.uniform(0.5, 0.9) / (1 - low) / max(float(copied(keys).square().sum(-1).amax()), 0.1)
    beta = high if number or rng.random() < 0.5 else draw.uniform(*fewer(draw, lead), low=high / 2, high=high)
    return beta, anchor


def pairs_of(draw, lead, n, m):
    """A mask, a bias, or neither, in some shape that broadcasts to (*lead, N, M)."""
    rng = draw.rng
    kind = rng.choice(("none", "none", "mask", "bias", "bias of -inf"))
    shape = rng.choice(((m,), (n, m), (1, m), (*lead, n, m), (*lead, 1, m)))
    if kind == "none":
        return None
    if kind == "mask":
        return draw.flags(*shape)
    bias = draw.tensor(*shape)
    return bias if kind == "bias" else bias.clamp(-1, 3).sub(1).where(draw.flags(*shape), -torch.inf)


def split(pairs):
    """As keyword arguments of a potential."""
    return {} if pairs is None else {"mask" if pairs.dtype == torch.bool else "bias": pairs}


def tensors(**named):
    """Those that are tensors."""
    return {name: leaf(value) for name, value in named.items() if isinstance(value, torch.Tensor)}


def solver(draw):
    rtol = RTOL[draw.dtype]
    made = (
        lambda: ia.Anderson(rtol=rtol, atol=1e-12),
        lambda: ia.Anderson(rtol=rtol, atol=1e-12),
        lambda: ia.Anderson(history=5, rtol=rtol, atol=1e-12),
        lambda: ia.Picard(rtol=rtol, atol=1e-12, max_steps=2000),
        lambda: ia.Broyden(rtol=rtol, atol=1e-12, max_steps=500),
        lambda: ia.NewtonKrylov(rtol=rtol, atol=1e-12),
    )
    return draw.rng.choice(made)()


# Operations and energies over keys.


@door
def operation_solve(draw):
    lead, n, m, d = sizes(draw)
    keys = draw.tensor(*fewer(draw, lead), m, d)
    beta, anchor = constants(draw, lead, keys)
    pairs = pairs_of(draw, lead, n, m)
    leaves = tensors(query=draw.tensor(*lead, n, d), keys=keys, beta=beta, anchor=anchor)
    given = {"beta": beta, "anchor": anchor, **leaves}
    causal = draw.rng.random() < 0.2
    initial = draw.tensor(*lead, n, d)
    found = hopfield_solve(**given, mask=pairs, is_causal=causal, initial=initial, rtol=RTOL[draw.dtype], atol=1e-12)
    bias = added(copied(pairs))
    if causal:
        above = torch.ones(n, m, dtype=torch.bool).triu(1)
        bias = torch.zeros(n, m, dtype=torch.float64).masked_fill(above, -torch.inf) + (0 if bias is None else bias)
    held = {name: copied(value) for name, value in given.items()}

    def step(z, *changed):
        now = {**held, **dict(zip(leaves, changed, strict=False))}
        return attention_map(z, now["query"], now["keys"], now["beta"], now["anchor"], bias)

    z = fixed_point(step, copied(initial))
    same("state", found.state, z, found.state.dtype)
    converged(found, found.state, step)
    same("mean", found.mean, weights(z, held["keys"], held["beta"], bias) @ held["keys"], found.state.dtype)
    cotangent, got = gradients(draw, found.state, list(leaves.values()))
    want = implicit_gradients(step, z, [held[name] for name in leaves], cotangent)[1]
    all_same(leaves, got, want, draw.dtype)


@door
def operations_at_a_state(draw):
    lead, n, m, d = sizes(draw)
    query, state = draw.tensor(*lead, n, d), draw.tensor(*lead, n, d)
    vector = draw.tensor(*lead, n, d)
    keys = draw.tensor(*fewer(draw, lead), m, d)
    beta, anchor = constants(draw, lead, keys)
    pairs = pairs_of(draw, lead, n, m)
    options = {"beta": beta, "anchor": anchor, "mask": pairs}
    z, v, bias = copied(state), copied(vector), added(copied(pairs))
    held = [copied(t) for t in (query, keys, torch.as_tensor(beta), anchor)]

    def step(z, query, keys, beta):
        return attention_map(z, query, keys, beta, held[3], bias)

    wide = torch.float32 if draw.dtype in HALF else draw.dtype
    u, by = implicit_gradients(step, z, held[:3], v)
    found = hopfield_adjoint(query, keys, state, vector, **options)
    same("u", found.value, u, wide)
    same("by_keys", found.by_keys.reshape(keys.shape), by[1], wide)
    by_beta = found.by_beta.double().sum()
    same("beta", by_beta, by[2].sum(), wide)


class Wells(ia.Potential):
    """Sum_j log cosh(<w_j, z>), of which the value alone is given."""

    convex = True

    def __init__(self, keys):
        self.keys = keys

    def value(self, z):
        t = z @ self.keys.mT
        return (t.abs() + torch.log1p(torch.exp(-2 * t.abs()))).sum(-1)


def _softcap_mean(z, keys, beta, pairs):
    squashed = (column(beta) * z @ keys.mT / 3.0).tanh()
    scores = 3.0 * squashed if pairs is None else 3.0 * squashed + pairs
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (p * (1 - squashed.square())) @ keys


def _softmax1_mean(z, keys, beta, pairs):
    scores = column(beta) * z @ keys.mT
    scores = torch.nn.functional.pad(scores if pairs is None else scores + pairs, (0, 1))
    return scores.softmax(-1)[..., :-1] @ keys


def _distance_mean(z, keys, beta, pairs):
    squares = -column(beta) / 2 * keys.square().sum(-1)[..., None, :]
    return weights(z, keys, beta, squares if pairs is None else squares + pairs) @ keys


#: Potentials with a temperature and a mask.
MASKED = ("log-sum-exp", "softcap", "softmax1", "distance", "sum")

#: name -> potential of (keys, beta, pairs), and its mean at z.
POTENTIALS = {
    "log-sum-exp": (
        lambda keys, beta, pairs: ia.LogSumExp(keys, beta, **split(pairs)),
        lambda z, keys, beta, pairs: weights(z, keys, beta, pairs) @ keys,
    ),
    "softcap": (
        lambda keys, beta, pairs: ia.potentials.SoftcapLogSumExp(keys, beta, 3.0, **split(pairs)),
        _softcap_mean,
    ),
    "softmax1": (lambda keys, beta, pairs: ia.potentials.Softmax1(keys, beta, **split(pairs)), _softmax1_mean),
    "distance": (
        lambda keys, beta, pairs: ia.potentials.DistanceLogSumExp(keys, beta, **split(pairs)),
        _distance_mean,
    ),
    "sum": (
        lambda keys, beta, pairs: (
            0.5 * ia.LogSumExp(keys, beta, **split(pairs))
            + ia.potentials.Softmax1(keys, beta, **split(pairs)).of(0.5 * torch.eye(keys.shape[-1], dtype=keys.dtype))
        ),
        lambda z, keys, beta, pairs: (
            0.5 * weights(z, keys, beta, pairs) @ keys + 0.5 * _softmax1_mean(0.5 * z, keys, beta, pairs)
        ),
    ),
    "quadratic": (
        lambda keys, beta, pairs: ia.SquaredScores(keys, beta),
        lambda z, keys, beta, pairs: column(beta) * (z @ keys.mT) @ keys,
    ),
    "hidden units": (
        lambda keys, beta, pairs: ia.potentials.HiddenUnits(keys.mT, SignUnits()),
        lambda z, keys, beta, pairs: (z @ keys.mT).tanh() @ keys,
    ),
    "one's own": (lambda keys, beta, pairs: Wells(keys), lambda z, keys, beta, pairs: (z @ keys.mT).tanh() @ keys),
    "mixture": (
        lambda keys, beta, pairs: ia.potentials.GaussianMixture(
            keys, 0.125 * torch.eye(keys.shape[-1], dtype=keys.dtype), torch.zeros(keys.shape[-2], dtype=keys.dtype)
        ),
        lambda z, keys, beta, pairs: weights(z, keys, 1.0) @ keys + 0.125 * z,
    ),
}


@door
def solve_over_keys(draw):
    _solve(draw, "log-sum-exp")


@door
def solve_with_another_potential(draw):
    _solve(draw, draw.rng.choice(list(POTENTIALS)[1:]))


def _solve(draw, name):
    lead, n, m, d = sizes(draw)
    # Of those without a temperature the keys themselves are small.
    scale = 0.3 / (m * d) ** 0.5 if name in ("quadratic", "hidden units", "one's own") else 0.5
    keys = draw.tensor(*fewer(draw, lead), m, d, scale=scale)
    beta, anchor = constants(draw, lead, keys)
    if name == "quadratic":
        beta = 1.0
    if isinstance(beta, torch.Tensor):
        beta = draw.uniform(*keys.shape[:-2], low=float(beta.min()) / 2, high=float(beta.min()))
    pairs = pairs_of(draw, lead, n, m) if name in MASKED else None
    learned = pairs is not None and pairs.is_floating_point() and bool(torch.isfinite(pairs).all())
    leaves = tensors(field=draw.tensor(*lead, n, d), keys=keys, anchor=anchor)
    leaves |= tensors(beta=beta) if name in MASKED else {}
    leaves |= tensors(pairs=pairs) if learned and draw.rng.random() < 0.5 else {}
    given = {"beta": beta, "anchor": anchor, "pairs": pairs, **leaves}
    make, mean = POTENTIALS[name]
    energy = ia.AnchoredEnergy(make(given["keys"], given["beta"], given["pairs"]), given["field"], given["anchor"])
    initial = draw.tensor(*lead, n, d)
    solution = ia.solve(energy, initial, solver=solver(draw))
    held = {name: copied(value) for name, value in given.items()}

    def step(z, *changed):
        now = {**held, **dict(zip(leaves, changed, strict=False))}
        attended = mean(z, now["keys"], now["beta"], added(now["pairs"]))
        return column(now["anchor"]) * now["field"] + (1 - column(now["anchor"])) * attended

    z = fixed_point(step, copied(initial))
    same("state", solution.value, z, solution.value.dtype)
    converged(solution, solution.value, step)
    cotangent, got = gradients(draw, solution.value, list(leaves.values()))
    want = implicit_gradients(step, z, [held[name] for name in leaves], cotangent)[1]
    all_same(leaves, got, want, draw.dtype)


@door
def solve_a_map_per_sample(draw):
    """A map of one's own, of which finished problems leave the work."""
    event_ndim, lead = draw.rng.choice((1, 2)), draw.rng.choice(((6,), (40,), (2, 9)))
    n, d = draw.rng.choice((1, 3, 8)), draw.rng.choice((1, 4, 5))
    lead = lead if event_ndim == 2 else (*lead, n)
    own = (n, d) if event_ndim == 2 else (d,)
    weight = draw.tensor(d, d, scale=0.5 / d)
    # As hard as each other they would leave at once.
    high = 0.9 / max(1.0, float(torch.linalg.matrix_norm(copied(weight), 2)))
    slope = draw.uniform(*lead, *(1,) * event_ndim, low=high / 9, high=high).to(draw.dtype)
    leaves = tensors(x=draw.tensor(*lead, *own), slope=slope, weight=weight)

    def step(z, x, slope, weight):
        return torch.tanh(slope * (z @ weight) + x)

    x, slope, weight = leaves.values()
    inputs = (ia.PerSample(x), ia.PerSample(slope), draw.rng.choice((ia.Shared(weight), weight)))
    initial = draw.tensor(*lead, *own)
    solution = ia.solve(ia.FixedPointMap(step, *inputs, event_ndim=event_ndim), initial, solver=solver(draw))
    held = [copied(t) for t in leaves.values()]
    z = fixed_point(lambda z: step(z, *held), copied(initial))
    same("state", solution.value, z, solution.value.dtype)
    converged(solution, solution.value, lambda z: step(z, *held))
    cotangent, got = gradients(draw, solution.value, list(leaves.values()))
    want = implicit_gradients(step, z, held, cotangent, event_ndim)[1]
    all_same(leaves, got, want, draw.dtype)


@door
def read_outs(draw):
    """What a potential over keys says at a state."""
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    lead, n, m, d = sizes(draw)
    keys, width = draw.tensor(*fewer(draw, lead), m, d), draw.rng.choice((1, 5, 8))
    beta = draw.rng.uniform(0.2, 2.0) / d**0.5
    pairs = pairs_of(draw, lead, n, m)
    z, keys, values = (leaf(t) for t in (draw.tensor(*lead, n, d), keys, draw.tensor(*fewer(draw, lead), m, width)))
    potential = ia.LogSumExp(keys, beta, **split(pairs))
    z64, k64, v64 = (copied(t).requires_grad_() for t in (z, keys, values))
    bias = added(copied(pairs))
    p = weights(z64, k64, beta, bias)
    same("probabilities", potential.probabilities(z), copied(p), draw.dtype)
    for name, got, want, count in (
        ("mean", potential.mean(z), p @ k64, 2),
        ("evaluated mean", potential.evaluate(z)[1], p @ k64, 2),
        ("read-out", potential.readout(z, values), p @ v64, 3),
    ):
        same(name, got, copied(want), draw.dtype)
        cotangent, found = gradients(draw, got, [z, keys, values][:count])
        expected = torch.autograd.grad(want, [z64, k64, v64][:count], cotangent, retain_graph=True)
        all_same([f"{name} by {of}" for of in ("z", "keys", "values")[:count]], found, expected, draw.dtype)
    with torch.no_grad():
        same("evaluated without graph", potential.evaluate(z.detach())[1], copied(p @ k64), draw.dtype)
        v = draw.tensor(*lead, n, d)
        scores = p * (copied(v) @ k64.mT)
        want = beta * (scores @ k64 - (p @ k64) * scores.sum(-1, keepdim=True))
        same("covariance product", potential.covariance_product(z, v), copied(want), draw.dtype)
        covariance = potential.linearize(z.detach())
        same("linearized", covariance.product(v), copied(want), draw.dtype)
    by_keys = torch.autograd.grad(p @ k64, k64, copied(v))[0]
    same("pulled back", covariance.vjp_tensors(v)[0], by_keys, draw.dtype)

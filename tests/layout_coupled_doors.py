"""The doors whose rows are coupled: tokens that attend to each other, maps of one's own, spins."""

import itertools

import layout_doors
import torch
from layout_doors import (
    HALF,
    RTOL,
    all_same,
    constants,
    converged,
    door,
    fewer,
    gradients,
    leaf,
    pairs_of,
    same,
    sizes,
    solver,
    split,
    tensors,
)
from layout_reference import added, copied, fixed_point, implicit_gradients, through, weights

import implicit_attention as ia


@door
def self_attention(draw):
    lead = draw.rng.choice(((), (1,), (2,)))
    n, d = draw.rng.choice((3, 8)), draw.rng.choice((2, 8))
    field = draw.tensor(*lead, n, d)
    beta, _ = constants(draw, lead, field)
    anchor = draw.rng.uniform(0.7, 0.9)
    pairs = pairs_of(draw, lead, n, n)
    leaves = tensors(field=field, beta=beta)
    given = {"field": field, "beta": beta, **leaves}
    once = draw.rng.random() < 0.5
    if once:
        problem = ia.SelfAttentionEnergy(**given, anchor=anchor, weight=0.5, **split(pairs))
    else:
        problem = ia.RepeatedSelfAttention(**given, anchor=anchor, **split(pairs))
    initial = draw.tensor(*lead, n, d)
    solution = ia.solve(problem, initial, solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12))
    held = {name: copied(value) for name, value in given.items()}
    bias = added(copied(pairs))

    def step(z, *changed):
        now = {**held, **dict(zip(leaves, changed, strict=False))}
        p = weights(z, z, now["beta"], bias)
        attended = (p @ z + p.mT @ z) / 2 if once else p @ z
        return anchor * now["field"] + (1 - anchor) * attended

    z = fixed_point(step, copied(initial))
    same("state", solution.value, z, solution.value.dtype)
    converged(solution, solution.value, step)
    cotangent, got = gradients(draw, solution.value, list(leaves.values()))
    want = implicit_gradients(step, z, [held[name] for name in leaves], cotangent, event_ndim=2)[1]
    all_same(leaves, got, want, draw.dtype)


@door
def map_of_ones_own(draw):
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    lead, n, _, d = sizes(draw)
    matrix, shift = (
        leaf(draw.tensor(*fewer(draw, lead), d, d, scale=0.3 / d)),
        leaf(draw.tensor(*fewer(draw, lead), n, d)),
    )

    def function(z, matrix, shift):
        return (z @ matrix + shift).tanh()

    problem = ia.FixedPointMap(function, matrix, shift, event_ndim=draw.rng.choice((1, 2)))
    initial = leaf(draw.tensor(*lead, n, d))
    chosen, unrolled = solver(draw), draw.rng.random() < 0.3
    options = {"solver": chosen}
    if unrolled:
        # Derivatives take steps of their own to converge, however near the start is.
        options = {"solver": ia.Picard(rtol=0, atol=0, max_steps=150), "adjoint": ia.Unrolled()}
    solution = ia.solve(problem, initial, **options)
    held = [copied(matrix), copied(shift)]
    z = fixed_point(lambda z: function(z, *held), copied(initial))
    same("state", solution.value, z, draw.dtype)
    if not unrolled:
        converged(solution, solution.value, lambda z: function(z, *held))
    cotangent, got = gradients(draw, solution.value, [matrix, shift])
    all_same(("matrix", "shift"), got, implicit_gradients(function, z, held, cotangent)[1], draw.dtype)


# Blocks.


class Streams(torch.nn.Module):
    """A step of a state (z, y) of tokens and of a whole sample, or of tokens alone."""

    def __init__(self, draw, d, dtype):
        super().__init__()
        self.mix, self.pool = (
            torch.nn.Parameter(draw.tensor(d, d, scale=0.3 / d).to(dtype).detach()) for _ in range(2)
        )

    def forward(self, state, x, scale):
        z, y = state if isinstance(state, tuple) else (state, state.mean(-2))
        new = (z @ self.mix + y[..., None, :] @ self.pool + scale * x).tanh()
        return (new, (y @ self.pool + new.mean(-2)).tanh() / 2) if isinstance(state, tuple) else new


@door
def block(draw):
    """`Equilibrium`, its start given or not, per sample and shared arguments, solved or by steps."""
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    lead, n, _, d = sizes(draw)
    streams, steps = draw.rng.random() < 0.5, draw.rng.choice((None, None, 150))
    # A sample without an axis that numbers samples says so.
    event = {} if lead else {"event_ndim": 2}
    # A block in half precision settles no further.
    chosen = ia.Anderson(rtol=5e-3) if layout_doors.LOWERED else solver(draw)
    layer = ia.Equilibrium(Streams(draw, d, draw.dtype), solver=chosen, **event)
    x, scale = leaf(draw.tensor(*lead, n, d)), leaf(draw.tensor(*draw.rng.choice(((), (*lead, 1, 1)))))
    start = (draw.tensor(*lead, n, d), draw.tensor(*lead, d)) if streams else draw.tensor(*lead, n, d)
    found, solution = layer(x, scale, start=start, steps=steps, on_failure="raise", return_solution=True)
    module, held = layer.block, [copied(t) for t in (x, scale, layer.block.mix, layer.block.pool)]

    def function(flat, x, scale, mix, pool):
        z = flat[..., : n * d].unflatten(-1, (n, d))
        y = flat[..., n * d :] if streams else z.mean(-2)
        new = (z @ mix + y[..., None, :] @ pool + scale * x).tanh()
        parts = [new.flatten(-2), (y @ pool + new.mean(-2)).tanh() / 2]
        return torch.cat(parts, -1) if streams else parts[0]

    first = torch.cat([copied(start[0]).flatten(-2), copied(start[1])], -1) if streams else copied(start).flatten(-2)
    z = fixed_point(lambda z: function(z, *held), first)
    flat = torch.cat([found[0].flatten(-2), found[1]], -1) if streams else found.flatten(-2)
    same("state", flat, z, draw.dtype)
    if steps is None:
        converged(solution, flat, lambda z: function(z, *held))
    cotangent, got = gradients(draw, flat, [x, scale, module.mix, module.pool])
    want = implicit_gradients(function, z, held, cotangent)[1]
    all_same(("x", "scale", "mix", "pool"), got, want, draw.dtype)


@door
def transformer(draw):
    """`EquilibriumTransformer` with masks, against itself with plain ones in double precision."""
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    lead, n, d = draw.rng.choice(((), (1,), (2,))), draw.rng.choice((3, 8)), draw.rng.choice((2, 8))
    torch.manual_seed(draw.rng.randrange(100))
    model = ia.EquilibriumTransformer(d, 2, causal=draw.rng.random() < 0.3).to(draw.dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    model.train(draw.rng.random() < 0.5)
    pairs = None if model.causal else pairs_of(draw, (*lead, 2) if lead else (), n, n)
    key_mask = draw.flags(*lead, n) if draw.rng.random() < 0.5 else None
    x = leaf(draw.tensor(*lead, n, d))
    found = model(x, pairs, key_mask, steps=20)
    wide = ia.EquilibriumTransformer(d, 2, causal=model.causal).double()
    wide.load_state_dict(model.state_dict())
    plain = [None if t is None else (t.clone() if t.dtype == torch.bool else copied(t)) for t in (pairs, key_mask)]
    z = copied(x).requires_grad_()
    want = wide(z, *plain, steps=20)
    same("tokens", found, copied(want), draw.dtype)
    cotangent, got = gradients(draw, found, [x])
    all_same(("x",), got, torch.autograd.grad(want, z, cotangent), draw.dtype)


# Spins.


def _spins(draw, *, symmetric=True):
    """(couplings, field, beta), weakly coupled."""
    draw.dtype = torch.float64
    lead, n, d = draw.rng.choice(((), (1,), (3,))), draw.rng.choice((1, 2, 4)), draw.rng.choice((1, 3))
    shape, scale = (*fewer(draw, lead), n, n), 0.1 / n
    couplings = draw.symmetric(*shape, scale=scale) if symmetric else draw.tensor(*shape, scale=scale)
    return leaf(couplings), leaf(draw.tensor(*lead, n, d)), draw.rng.uniform(0.3, 1.0)


def _response(f, beta):
    """R A(beta R |f|) f/|f| with R = sqrt(D): exact for one and three dimensions."""
    if f.shape[-1] == 1:
        return (beta * f).tanh()
    size = f.square().sum(-1, keepdim=True).sqrt()
    kappa = beta * 3**0.5 * size
    return 3**0.5 * (1 / kappa.tanh() - 1 / kappa) * f / size


def _magnetized(draw, method, couplings, field, beta, step):
    """The magnetization by the method is the fixed point of the step, and so are its gradients."""
    m = ia.spins.magnetization(ia.spins.SpinSystem(couplings, field, beta), method)
    held = [copied(couplings), copied(field)]
    z = fixed_point(lambda z: step(z, *held), torch.zeros_like(held[1]))
    same("magnetization", m, z, draw.dtype)
    cotangent, got = gradients(draw, m, [couplings, field])
    # Symmetric couplings are one number for both orders of a pair.
    by_couplings, by_field = implicit_gradients(step, z, held, cotangent, event_ndim=2)[1]
    same("field", got[1], by_field, draw.dtype)
    same("couplings", got[0] + got[0].mT, by_couplings + by_couplings.mT, draw.dtype)


@door
def spins_in_mean_field(draw):
    couplings, field, beta = _spins(draw)
    _magnetized(draw, ia.spins.MeanField(), couplings, field, beta, lambda m, j, h: _response(h + j @ m, beta))


@door
def spins_in_time(draw):
    couplings, field, beta = _spins(draw, symmetric=False)
    method = ia.spins.KineticPlefka(order=1)
    _magnetized(draw, method, couplings, field, beta, lambda m, j, h: _response(h + j @ m, beta))


@door
def spins_at_the_saddle_point(draw):
    couplings, field, beta = _spins(draw)
    d = field.shape[-1]
    m = ia.spins.magnetization(ia.spins.SpinSystem(couplings, field, beta), ia.spins.SaddlePoint())
    held = [copied(couplings), copied(field)]

    def answer(multipliers, j, h):
        matrix = torch.diag_embed(multipliers) - beta * (j + j.mT) / 2
        return torch.linalg.solve(matrix, beta * h), matrix

    def step(multipliers, j, h):
        # <|s_i|^2>/D falls as lambda_i rises; at weak couplings like 1/lambda_i.
        m, matrix = answer(multipliers, j, h)
        squares = torch.diagonal(torch.linalg.inv(matrix), dim1=-2, dim2=-1) + m.square().sum(-1) / d
        return multipliers * squares.sqrt()

    start = torch.ones_like(held[1][..., 0])
    found = fixed_point(lambda z: step(z, *held), start)

    def read(multipliers, j, h):
        return answer(multipliers, j, h)[0]

    same("magnetization", m, read(found, *held), draw.dtype)
    cotangent, got = gradients(draw, m, [couplings, field])
    by_couplings, by_field = through(step, read, found, held, cotangent)
    same("field", got[1], by_field, draw.dtype)
    same("couplings", got[0] + got[0].mT, by_couplings + by_couplings.mT, draw.dtype)


@door
def spins_counted(draw):
    couplings, field, beta = _spins(draw)
    field = leaf(field.detach()[..., :1])
    found = ia.spins.thermodynamics(ia.spins.SpinSystem(couplings, field, beta), ia.spins.Enumeration())
    j, h = copied(couplings).requires_grad_(), copied(field).requires_grad_()
    n = h.shape[-2]
    states = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)
    energy = -((states @ j) * states).sum(-1) / 2 - (h.mT @ states.mT).squeeze(-2)
    log_z = torch.logsumexp(-beta * energy, -1) - n * torch.tensor(2.0).double().log()
    probabilities = (-beta * energy).softmax(-1)
    m = (probabilities @ states)[..., None]
    same("free energy", found.free_energy, copied(-log_z / beta), draw.dtype)
    same("internal energy", found.internal_energy, copied((probabilities * energy).sum(-1)), draw.dtype)
    same("magnetization", found.magnetization, copied(m), draw.dtype)
    cotangent, got = gradients(draw, found.magnetization, [couplings, field])
    by_couplings, by_field = torch.autograd.grad(m, [j, h], cotangent)
    same("field", got[1], by_field, draw.dtype)
    same("couplings", got[0] + got[0].mT, by_couplings + by_couplings.mT, draw.dtype)


@door
def spin_layer(draw):
    """`SpinAttention` over raw inputs, with masks, against the fixed point of m = response(h + J(h) m), written out."""
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    lead, n, d = draw.rng.choice(((), (1,), (3,))), draw.rng.choice((2, 5)), draw.rng.choice((2, 4))
    kind = draw.rng.choice(("softmax", "symmetric", "low_rank", "causal"))
    torch.manual_seed(draw.rng.randrange(100))
    layer = ia.layers.SpinAttention(
        d,
        1,
        bare=True,
        beta=0.5,
        couplings="softmax" if kind == "causal" else kind,
        causal=kind == "causal",
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        on_failure="raise",
    ).to(draw.dtype)
    x, key_mask = leaf(draw.tensor(*lead, n, d)), draw.flags(*lead, n) if draw.rng.random() < 0.5 else None
    if kind == "causal" and draw.rng.random() < 0.5:
        # Two tokens, and then the others.
        cache = layer.new_cache()
        parts = [
            layer(x[..., a:b, :], key_mask=key_mask if key_mask is None else key_mask[..., :b], cache=cache)
            for a, b in ((0, 2), (2, n))
            if b > a
        ]
        found, converged = torch.cat(parts, dim=-2), layer.last_solve.converged
    else:
        found, answer = layer(x, key_mask=key_mask, return_answer=True)
        converged = answer.report.converged
    # One map for both, or one for each.
    q, k = [copied(w)[0] for w in layer.couplings.parameters()] * (2 if kind in ("symmetric", "low_rank") else 1)
    live = torch.ones(*lead, n, dtype=torch.bool) if key_mask is None else key_mask.clone()
    pairs = live[..., :, None] & live[..., None, :]
    pairs = pairs.tril() if kind == "causal" else pairs & ~torch.eye(n, dtype=torch.bool)

    def step(m, h):
        scores = (h @ q) @ (h @ k).mT
        weights = torch.where(pairs, (d**-0.5 * scores).exp(), 0.0)
        total = weights.sum(-1)
        total = torch.where(total > 0, total, 1.0)
        if kind == "symmetric":
            weights = weights / (total[..., :, None] * total[..., None, :]).sqrt()
        elif kind == "low_rank":
            # |q^T q| is |q q^T|.
            size = (
                torch.where(live[..., :, None] & live[..., None, :], scores, 0.0).square().sum((-2, -1), keepdim=True)
            )
            weights = torch.where(pairs, scores, 0.0) / torch.where(size > 0, size, 1.0).sqrt()
        else:
            weights = weights / total[..., None]
            weights = weights if kind == "causal" else (weights + weights.mT) / 2
        f = torch.where(live[..., None], h + weights @ m, 0.0)
        kappa = 0.25 * d * f.square().sum(-1, keepdim=True)
        return 0.5 * d * f / ((d - 1) / 2 + (((d + 1) / 2) ** 2 + kappa).sqrt())

    held = copied(x)
    z = fixed_point(lambda m: step(m, held), torch.zeros_like(held))
    same("magnetization", found, z, draw.dtype)
    assert bool(converged.all())
    cotangent, got = gradients(draw, found, [x])
    all_same(("x",), got, implicit_gradients(step, z, [held], cotangent, event_ndim=2)[1], draw.dtype)

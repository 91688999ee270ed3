"""The doors of layers over keys: grouped heads, rotary positions, caches, pooling, half-known memories, biases, NaN."""

import torch
from layout_attention_doors import _by_heads, _tokens
from layout_doors import RTOL, _solve, all_same, constants, converged, door, fewer, gradients, leaf, same, sizes
from layout_reference import added, attention_map, copied, fixed_point, through, weights

import implicit_attention as ia


def _turned(x, positions, base=10000.0):
    """Pairs (d, d + D/2) as complex numbers, turned by position * base^(-2d/D)."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None] * base ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = angle if positions.ndim == 1 else angle.unsqueeze(-3)
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def _causal(n, m):
    return added(torch.ones(n, m, dtype=torch.bool).tril(m - n))


@door
def squared_scores(draw):
    _solve(draw, "quadratic")


@door
def capped_scores(draw):
    _solve(draw, "softcap")


@door
def grouped_heads(draw):
    """One call of a layer with fewer heads of keys, rotary positions, a causal rule or a mask of keys."""
    _layer(draw, cached=False)


@door
def cached_tokens(draw):
    """The same tokens in chunks through a cache, with the graph of all chunks."""
    _layer(draw, cached=True)


def _layer(draw, *, cached):
    rng = draw.rng
    lead, n, m = _tokens(draw)
    lead = lead or ((2,) if cached else ())
    shared, groups, width = rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice((4, 8))
    heads, itself = shared * groups, cached or rng.random() < 0.5
    dim, m = heads * width, n if itself else m
    causal, turning = cached or (itself and rng.random() < 0.5), rng.random() < 0.7
    x, context = leaf(draw.tensor(*lead, n, dim)), leaf(draw.tensor(*lead, m, dim))
    beta, anchor = 0.3 / max(float(copied(x if itself else context).square().sum(-1).amax()), 0.1), 0.5
    rotary = ia.Rotary(rng.choice((100.0, 10000.0))) if turning else None
    made = ia.ImplicitAttention(
        dim,
        heads,
        kv_heads=shared,
        anchor=anchor,
        beta=beta,
        rotary=rotary,
        causal=causal,
        projection_bias=rng.random() < 0.3,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        on_failure="raise",
        dtype=draw.dtype,
    )
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    outputs = (dim, shared * width, shared * width, dim)
    for name, rows in zip(names, outputs, strict=True):
        getattr(made, name).weight = torch.nn.Parameter(draw.tensor(rows, dim, scale=dim**-0.5))
    offsets = [0.0 if getattr(made, name).bias is None else copied(getattr(made, name).bias) for name in names]
    key_mask = draw.flags(*lead, m) if rng.random() < 0.4 else None
    first = 0 if cached or not turning else rng.choice((0, 7))
    places = torch.arange(n) + first
    if cached:
        cache, ends = made.new_cache(), sorted({n, *(rng.randrange(1, n + 1) for _ in range(3))})
        parts = [
            made(x[..., a:b, :], key_mask=None if key_mask is None else key_mask[..., a:b], cache=cache)
            for a, b in zip([0, *ends], ends, strict=False)
        ]
        output = torch.cat(parts, dim=-2)
    else:
        given = {"positions": places} if turning and first else {}
        given |= {} if itself else {"context": context}
        output, solution = made(x, key_mask=key_mask, return_solution=True, **given)
    bias = _causal(n, m) if causal else torch.zeros(n, m, dtype=torch.float64)
    bias = bias if key_mask is None else bias + added(copied(key_mask))[..., None, None, :]
    # A context has positions of its own, from 0 on.
    turns = (places, places if itself else torch.arange(m))

    def projected(x, index, matrix, count):
        out = _by_heads(x, matrix, count)
        return (
            out + offsets[index].unflatten(-1, (count, 1, width)) if isinstance(offsets[index], torch.Tensor) else out
        )

    def query(x, matrices):
        out = projected(x, 0, matrices[0], heads)
        return _turned(out, turns[0], rotary.base) if turning else out

    def keys(context, matrices):
        out = projected(context, 1, matrices[1], shared)
        out = _turned(out, turns[1], rotary.base) if turning else out
        return out.repeat_interleave(groups, dim=-3)

    def step(z, x, context, *matrices):
        return attention_map(z, query(x, matrices), keys(context, matrices), beta, anchor, bias)

    def read(z, x, context, *matrices):
        values = projected(context, 2, matrices[2], shared).repeat_interleave(groups, dim=-3)
        out = weights(z, keys(context, matrices), beta, bias) @ values
        return out.transpose(-3, -2).flatten(-2) @ matrices[3].mT + offsets[3]

    matrices = [copied(getattr(made, name).weight) for name in names]
    own = [copied(x), copied(x if itself else context)]
    held = [*own, *matrices]
    z = fixed_point(lambda z: step(z, *held), query(held[0], matrices))
    if not cached:
        same("state", solution.value, z, draw.dtype)
        converged(solution, solution.value, lambda z: step(z, *held))
    same("output", output, read(z, *held), draw.dtype)
    leaves = [x, *(() if itself else (context,)), *(getattr(made, name).weight for name in names)]
    cotangent, got = gradients(draw, output, leaves)
    want = through(step, read, z, held, cotangent)
    want = [want[0] + want[1], *want[2:]] if itself else want
    all_same(("x", *(() if itself else ("context",)), *names), got, want, draw.dtype)


@door
def pooling_by_heads(draw):
    """Learned queries over bags of which not all instances exist."""
    lead, _, m = _tokens(draw)
    heads, count, dim = draw.rng.choice((1, 2, 4)), draw.rng.choice((1, 3, 8)), 8
    x = leaf(draw.tensor(*lead, m, dim))
    beta = 0.3 / max(float(copied(x).square().sum(-1).amax()), 0.1)
    made = ia.AttentionPooling(
        dim,
        heads,
        queries=count,
        anchor=0.5,
        beta=beta,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        on_failure="raise",
        dtype=draw.dtype,
    )
    made.queries = torch.nn.Parameter(draw.tensor(count, dim))
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    for name in names:
        getattr(made.attention, name).weight = torch.nn.Parameter(draw.tensor(dim, dim, scale=dim**-0.5))
    key_mask = draw.flags(*lead, m) if draw.rng.random() < 0.6 else None
    output = made(x, key_mask=key_mask)
    bias = None if key_mask is None else added(copied(key_mask))[..., None, None, :]

    def step(z, x, queries, *matrices):
        return attention_map(
            z, _by_heads(queries, matrices[0], heads), _by_heads(x, matrices[1], heads), beta, 0.5, bias
        )

    def read(z, x, queries, *matrices):
        p = weights(z, _by_heads(x, matrices[1], heads), beta, bias)
        return (p @ _by_heads(x, matrices[2], heads)).transpose(-3, -2).flatten(-2) @ matrices[3].mT

    leaves = [x, made.queries, *(getattr(made.attention, name).weight for name in names)]
    held = [copied(t) for t in leaves]
    start = _by_heads(held[1], held[2], heads)
    z = fixed_point(lambda z: step(z, *held), start.expand(*lead, *start.shape))
    same("output", output, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, output, leaves)
    all_same(("x", "queries", *names), got, through(step, read, z, held, cotangent), draw.dtype)


@door
def memory_of_half_known(draw):
    """Queries whose unknown entries settle while the known ones stay, and what they look up."""
    lead, n, m, d = sizes(draw)
    if draw.dtype not in (torch.float32, torch.float64):
        draw.dtype = torch.float32
    patterns, targets = draw.tensor(m, d), draw.tensor(m, 3)
    beta = constants(draw, (), patterns, number=True)[0]
    made = ia.MemoryLookup(
        d, beta=beta, solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12), on_failure="raise", dtype=draw.dtype
    )
    made.store(patterns, targets)
    queries, known = leaf(draw.tensor(*lead, n, d)), draw.flags(*draw.rng.choice(((d,), (n, d), (*lead, n, d))))
    looked_up = made(queries, known=known)
    state = made.retrieve(queries, known=known)
    keys, entries = copied(patterns), copied(known).expand(*lead, n, d)
    squares = -beta / 2 * keys.square().sum(-1)

    def step(z, queries):
        mean = weights(torch.where(entries, queries, z), keys, beta, squares) @ keys
        return torch.where(entries, queries, mean)

    def read(z, queries):
        return weights(torch.where(entries, queries, z), keys, beta, squares) @ copied(targets)

    held = [copied(queries)]
    near = (keys - held[0][..., None, :]).square().mul(entries[..., None, :]).sum(-1)
    start = torch.where(entries, held[0], (-beta / 2 * near).softmax(-1) @ keys)
    z = fixed_point(lambda z: step(z, *held), start)
    same("state", state, z, draw.dtype)
    same("looked up", looked_up, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, looked_up, [queries])
    all_same(("queries",), got, through(step, read, z, held, cotangent), draw.dtype)


@door
def gradient_of_a_bias(draw):
    """A learned bias in every shape that broadcasts, under a causal rule too, to the state and to the read-out."""
    rng = draw.rng
    lead, n, m, d = sizes(draw)
    causal = rng.random() < 0.3
    shared = fewer(draw, lead)
    query, key, value = (leaf(draw.tensor(*s)) for s in ((*lead, n, d), (*shared, m, d), (*shared, m, 3)))
    scale, anchor = constants(draw, (), key, number=True)
    shapes = ((m,), (1, m), (n, m), (n, 1), (*lead, n, m), (*lead, 1, m), (*(1,) * len(lead), n, m))
    shape = rng.choice(((m,), (1, m), (*lead, 1, m)) if causal else shapes)
    bias = leaf(draw.tensor(*shape))
    rtol = RTOL[draw.dtype]
    output, solution = ia.equilibrium_attention(
        query,
        key,
        value,
        bias,
        is_causal=causal,
        scale=scale,
        anchor=anchor,
        solver=ia.Anderson(rtol=rtol, atol=1e-12),
        return_solution=True,
        on_failure="raise",
    )
    rule = added(torch.ones(n, m, dtype=torch.bool).tril()) if causal else torch.zeros(n, m, dtype=torch.float64)

    def step(z, query, key, value, bias):
        return attention_map(z, query, key, scale, anchor, rule + bias)

    def read(z, query, key, value, bias):
        return weights(z, key, scale, rule + bias) @ value

    leaves = [query, key, value, bias]
    held = [copied(t) for t in leaves]
    z = fixed_point(lambda z: step(z, *held), held[0])
    same("state", solution.value, z, solution.value.dtype)
    converged(solution, solution.value, lambda z: step(z, *held))
    same("output", output, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, output, leaves)
    all_same(("query", "key", "value", "bias"), got, through(step, read, z, held, cotangent), draw.dtype)


@door
def numbers_that_are_not(draw):
    """NaN or infinity in a query, key or value: queries that do not read it keep their bits, the others say so."""
    rng = draw.rng
    lead, n, m, d = sizes(draw)
    lead = lead or (2,)
    query, key, value = draw.tensor(*lead, n, d), draw.tensor(*lead, m, d), draw.tensor(*lead, m, 3)
    mask = draw.flags(*lead, n, m)
    scale, anchor = constants(draw, (), key, number=True)

    def asked(query, key, value):
        leaves = [leaf(t) for t in (query, key, value)]
        output, solution = ia.equilibrium_attention(
            *leaves, mask, scale=scale, anchor=anchor, return_solution=True, on_failure="ignore"
        )
        return leaves, output, solution

    _, clean, before = asked(query, key, value)
    where = rng.choice(("query", "key", "value"))
    spoiled = {"query": query, "key": key, "value": value}
    tensor = spoiled[where] = spoiled[where].contiguous().clone()
    sample, row = tuple(rng.randrange(size) for size in lead), rng.randrange(tensor.shape[-2])
    tensor[(*sample, row, rng.randrange(tensor.shape[-1]))] = rng.choice((torch.nan, torch.inf, -torch.inf))
    leaves, output, solution = asked(**spoiled)
    reads = torch.zeros(*lead, n, dtype=torch.bool)
    reads[sample] = torch.arange(n) == row if where == "query" else mask[sample][:, row]
    states = reads if where != "value" else torch.zeros_like(reads)
    assert torch.equal(output[~reads], clean[~reads]), f"{where}: another query's output changed"
    assert torch.equal(solution.value[~states], before.value[~states]), f"{where}: another state changed"
    assert torch.equal(solution.status[~states], before.status[~states]), f"{where}: another status changed"
    told = solution.status == int(ia.Status.NONFINITE)
    attends = mask.any(-1) if where == "query" else torch.ones_like(reads)
    assert bool(told[states & attends].all()), f"{where}: {solution.status[states & attends].unique().tolist()} is told"
    # What those that do not read it say is learned without it.
    found = torch.autograd.grad(output[~reads].sum(), leaves)
    for name, gradient in zip(("query", "key", "value"), found, strict=True):
        assert bool(torch.isfinite(gradient).all()), f"{where}: the gradient of {name} is not finite"

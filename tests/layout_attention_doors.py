"""The doors of attention: the function, the layers, the memory, the module that stands for torch's."""

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
)
from layout_reference import added, attention_map, copied, fixed_point, through, weights

import implicit_attention as ia
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention


@door
def attention(draw):
    lead, n, m, d = sizes(draw)
    groups = draw.rng.choice((0, 0, 1, 2))
    heads, shared = (lead, fewer(draw, lead)) if not groups else ((2, 2 * groups), (2, 2))
    width = draw.rng.choice((d, d, 3))
    query, key, value = (leaf(draw.tensor(*size)) for size in ((*heads, n, d), (*shared, m, d), (*shared, m, width)))
    scale, anchor = constants(draw, (), key, number=True)
    pairs = pairs_of(draw, heads, n, m)
    explicit = draw.rng.random() < 0.25
    options = {"solver": ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12), "max_steps": 0 if explicit else None}
    output, solution = ia.equilibrium_attention(
        query,
        key,
        value,
        pairs,
        scale=scale,
        anchor=anchor,
        enable_gqa=groups > 0,
        return_solution=True,
        on_failure="raise",
        **options,
    )
    bias = added(copied(pairs))

    def repeated(t):
        return t.repeat_interleave(groups, dim=-3) if groups else t

    def step(z, query, key, value):
        if explicit:
            return query
        return attention_map(z, query, repeated(key), scale, anchor, bias)

    def read(z, query, key, value):
        return weights(z, repeated(key), scale, bias) @ repeated(value)

    held = [copied(t) for t in (query, key, value)]
    z = fixed_point(lambda z: step(z, *held), held[0])
    if not explicit:
        same("state", solution.value, z, solution.value.dtype)
        converged(solution, solution.value, lambda z: step(z, *held))
    same("output", output, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, output, [query, key, value])
    if explicit:
        held = [t.requires_grad_() for t in held]
        want = torch.autograd.grad(read(held[0], *held), held, cotangent)
    else:
        want = through(step, read, z, held, cotangent)
    all_same(("query", "key", "value"), got, want, draw.dtype)


def _tokens(draw):
    lead, n, m, _ = sizes(draw)
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    return lead, n, m


def _by_heads(x, matrix, heads):
    return (x @ matrix.mT).unflatten(-1, (heads, -1)).transpose(-3, -2)


@door
def layer(draw):
    lead, n, m = _tokens(draw)
    heads, bare = draw.rng.choice((1, 2)), draw.rng.random() < 0.3
    heads = 1 if bare else heads
    dim = 8 * heads
    x, context = leaf(draw.tensor(*lead, n, dim)), leaf(draw.tensor(*lead, m, dim))
    beta, anchor = draw.rng.uniform(0.2, 0.9) / float(copied(context).square().sum(-1).amax()), 0.5
    made = ia.ImplicitAttention(
        dim,
        heads,
        anchor=anchor,
        beta=beta,
        bare=bare,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        dtype=draw.dtype,
    )
    names = () if bare else ("q_proj", "k_proj", "v_proj", "out_proj")
    for name in names:
        getattr(made, name).weight = torch.nn.Parameter(draw.tensor(dim, dim, scale=dim**-0.5))
    key_mask = draw.flags(*lead, m) if draw.rng.random() < 0.4 else None
    mask = draw.flags(n, m) if draw.rng.random() < 0.4 else None
    output, solution, probabilities = made(
        x, context, mask=mask, key_mask=key_mask, on_failure="raise", return_solution=True, return_weights=True
    )
    bias = torch.zeros(n, m, dtype=torch.float64) if mask is None else added(copied(mask))
    bias = bias if key_mask is None else bias + added(copied(key_mask))[..., None, None, :]
    eye = torch.eye(dim, dtype=torch.float64)
    matrices = [eye] * 4 if bare else [copied(getattr(made, name).weight) for name in names]

    def step(z, x, context, *matrices):
        query, keys = _by_heads(x, matrices[0], heads), _by_heads(context, matrices[1], heads)
        return attention_map(z, query, keys, beta, anchor, bias)

    def weigh(z, context, *matrices):
        return weights(z, _by_heads(context, matrices[1], heads), beta, bias)

    def read(z, x, context, *matrices):
        values = _by_heads(context, matrices[2], heads)
        return (weigh(z, context, *matrices) @ values).transpose(-3, -2).flatten(-2) @ matrices[3].mT

    held = [copied(x), copied(context), *matrices]
    z = fixed_point(lambda z: step(z, *held), _by_heads(held[0], matrices[0], heads))
    same("state", solution.value, z, draw.dtype)
    converged(solution, solution.value, lambda z: step(z, *held))
    same("weights", probabilities, weigh(z, *held[1:]), draw.dtype)
    same("output", output, read(z, *held), draw.dtype)
    leaves = [x, context, *(getattr(made, name).weight for name in names)]
    cotangent, got = gradients(draw, output, leaves)
    want = through(step, read, z, held, cotangent)[: len(leaves)]
    all_same(("x", "context", *names), got, want, draw.dtype)


@door
def pooling(draw):
    lead, _, m = _tokens(draw)
    dim = 8
    x = leaf(draw.tensor(*lead, m, dim))
    made = ia.AttentionPooling(
        dim,
        1,
        queries=8,
        bare=True,
        anchor=0.5,
        beta=0.02,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        dtype=draw.dtype,
    )
    made.queries = torch.nn.Parameter(draw.tensor(8, dim))
    output = made(x, on_failure="raise")

    def step(z, queries, x):
        return attention_map(z, queries, x, 0.02, 0.5)

    def read(z, queries, x):
        return weights(z, x, 0.02) @ x

    held = [copied(made.queries), copied(x)]
    z = fixed_point(lambda z: step(z, *held), held[0].expand(*lead, 8, dim))
    same("output", output, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, output, [made.queries, x])
    all_same(("queries", "x"), got, through(step, read, z, held, cotangent), draw.dtype)


@door
def memory(draw):
    lead, n, m, d = sizes(draw)
    learned, similarity = draw.rng.random() < 0.5, draw.rng.choice(("distance", "dot"))
    patterns, targets = draw.tensor(m, d), draw.tensor(m, 3)
    beta, anchor = constants(draw, (), patterns, number=True)
    made = ia.MemoryLookup(
        d,
        size=m if learned else None,
        target_dim=3 if learned else None,
        learned=learned,
        similarity=similarity,
        beta=beta,
        anchor=anchor,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        on_failure="raise",
        dtype=draw.dtype,
    )
    made.store(patterns, targets)
    queries = leaf(draw.tensor(*lead, n, d))
    state, solution = made.retrieve(queries, return_solution=True)
    looked_up = made(queries)

    def bias(keys):
        return None if similarity == "dot" else -beta / 2 * keys.square().sum(-1)

    def step(z, queries, keys, targets):
        return attention_map(z, queries, keys, beta, anchor, bias(keys))

    def read(z, queries, keys, targets):
        return weights(z, keys, beta, bias(keys)) @ targets

    held = [copied(t) for t in (queries, patterns, targets)]
    z = fixed_point(lambda z: step(z, *held), held[0])
    same("state", state, z, draw.dtype)
    converged(solution, solution.value, lambda z: step(z, *held))
    same("looked up", looked_up, read(z, *held), draw.dtype)
    energy = held[0].square().sum(-1) / 2 - anchor * held[0].square().sum(-1)
    scores = beta * held[0] @ held[1].mT
    scores = scores if similarity == "dot" else scores + bias(held[1])
    energy = energy - (1 - anchor) / beta * scores.logsumexp(-1)
    same("energy", made.energy(queries), energy, draw.dtype)
    leaves = [queries, *((made.patterns, made.targets) if learned else ())]
    cotangent, got = gradients(draw, looked_up, leaves)
    want = through(step, read, z, held, cotangent)[: len(leaves)]
    all_same(("queries", "patterns", "targets")[: len(leaves)], got, want, draw.dtype)


@door
def multihead(draw):
    lead, n, m = _tokens(draw)
    lead, heads, dim = lead[:1], 2, 16
    first = draw.rng.random() < 0.5
    shapes = [(*lead, size, dim) if first or not lead else (size, *lead, dim) for size in (n, m, m)]
    query, key, value = (leaf(draw.tensor(*shape)) for shape in shapes)
    made = ImplicitMultiheadAttention(
        dim,
        heads,
        batch_first=first,
        bias=False,
        anchor=0.5,
        beta=0.02,
        solver=ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12),
        on_failure="raise",
        dtype=draw.dtype,
    )
    made.in_proj_weight = torch.nn.Parameter(draw.tensor(3 * dim, dim, scale=dim**-0.5))
    hidden = ~draw.flags(n, m) if draw.rng.random() < 0.4 else None
    output, probabilities = made(query, key, value, attn_mask=hidden, average_attn_weights=False)
    bias = None if hidden is None else added(~copied(hidden))

    def ordered(t):
        return t if first or not lead else t.transpose(0, 1)

    def step(z, query, key, value, matrices, last):
        q, k, _ = matrices.chunk(3)
        return attention_map(z, _by_heads(ordered(query), q, heads), _by_heads(ordered(key), k, heads), 0.02, 0.5, bias)

    def weigh(z, key, matrices):
        return weights(z, _by_heads(ordered(key), matrices.chunk(3)[1], heads), 0.02, bias)

    def read(z, query, key, value, matrices, last):
        values = _by_heads(ordered(value), matrices.chunk(3)[2], heads)
        return ordered((weigh(z, key, matrices) @ values).transpose(-3, -2).flatten(-2) @ last.mT)

    leaves = [query, key, value, made.in_proj_weight, made.out_proj.weight]
    held = [copied(t) for t in leaves]
    z = fixed_point(lambda z: step(z, *held), _by_heads(ordered(held[0]), held[3].chunk(3)[0], heads))
    same("output", output, read(z, *held), draw.dtype)
    same("weights", probabilities, weigh(z, held[1], held[3]), draw.dtype)
    cotangent, got = gradients(draw, output, leaves)
    all_same(("query", "key", "value", "in", "out"), got, through(step, read, z, held, cotangent), draw.dtype)


def saddle_of(draw, lead, of_keys, of_values, entry):
    """A call whose every other query rests at the saddle between two keys that point opposite ways.

    lead, of_keys, of_values: leading axes of queries, keys and values. entry: "attention" or "solve".
    """
    anchor, scale, n, d = 0.1, 4.0, 4, 3
    one = draw.uniform(*of_keys, 1, d, low=0.9, high=1.2).contiguous()
    keys = leaf(torch.cat([one, -one], -2))
    values = leaf(draw.tensor(*of_values, 2, d))
    query = draw.tensor(*lead, n, d).clone()
    query[..., ::2, :] = 0
    query = leaf(query)
    solver = ia.Anderson(rtol=RTOL[draw.dtype], atol=1e-12)
    if entry == "attention":
        found = ia.equilibrium_attention(
            query, keys, values, scale=scale, anchor=anchor, solver=solver, on_failure="ignore"
        )
        leaves = [query, keys, values]
    else:
        energy = ia.AnchoredEnergy(ia.LogSumExp(keys, scale), query, anchor)
        found = ia.solve(energy, query.detach(), solver=solver, on_failure="ignore").value
        leaves = [query, keys]

    def step(z, query, keys, *values):
        return attention_map(z, query, keys, scale, anchor)

    def read(z, query, keys, *values):
        return weights(z, keys, scale) @ values[0] if values else z * 1

    held = [copied(t) for t in leaves]
    z = fixed_point(lambda z: step(z, *held), held[0])
    assert not bool(z[..., ::2, :].any())
    same("output", found, read(z, *held), draw.dtype)
    cotangent, got = gradients(draw, found, leaves)
    all_same(("query", "keys", "values")[: len(leaves)], got, through(step, read, z, held, cotangent), draw.dtype)


@door
def saddle(draw):
    lead = sizes(draw)[0]
    if draw.dtype in HALF:
        draw.dtype = torch.float32
    saddle_of(draw, lead, fewer(draw, lead), fewer(draw, lead), draw.rng.choice(("attention", "solve")))

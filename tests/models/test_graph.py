"""Node classifiers: edges are those of the adjacency, and nothing depends on the order or the padding of nodes."""

import pytest
import torch
from torch.nn import functional as F

from implicit_attention import Picard
from implicit_attention.models import NodeClassifier, laplacian_positions

MODES = ["equilibrium", "published"]


def model(mode="published", *, positions=0, dtype=torch.float64, scale=0.5, seed=0, **block):
    torch.manual_seed(seed)
    if mode == "equilibrium":
        block.setdefault("solver", Picard(rtol=1e-11, atol=1e-11, max_steps=4000))
    made = NodeClassifier(3, 4, 5, 2, 3, 7, mode=mode, positions=positions, dtype=dtype, **block)
    with torch.no_grad():
        for parameter in (made.block.w_query, made.block.w_key, made.block.memories):
            parameter.normal_(std=scale)
    return made.eval()


def graph(*batch, count=6, seed=1, share=0.5, directed=False):
    generator = torch.Generator().manual_seed(seed)
    edges = torch.rand(*batch, count, count, generator=generator) < share
    edges = edges if directed else edges.triu(1) | edges.triu(1).mT
    return torch.randn(*batch, count, 3, dtype=torch.float64, generator=generator), edges


def by_loops(made, features, edges, steps=12, step_size=0.1):
    """The published dynamics of one graph, node by node and edge by edge."""
    w_query, w_key, xi = made.block.w_query, made.block.w_key, made.block.memories
    x = features @ made.encoder.weight.T + made.encoder.bias
    count = len(x)
    for _ in range(steps):
        g = F.layer_norm(x, x.shape[-1:])
        pull = [(g[c] @ xi.T).relu() @ xi for c in range(count)]
        for wq, wk in zip(w_query, w_key, strict=True):
            q, k = g @ wq.T, g @ wk.T
            for c in range(count):
                neighbours = [b for b in range(count) if edges[c, b]]
                if not neighbours:
                    continue
                p = torch.stack([(q[c] @ k[b]) / 3**0.5 for b in neighbours]).softmax(0)
                for weight, b in zip(p, neighbours, strict=True):
                    pull[c] = pull[c] + weight * k[b] @ wq
                    pull[b] = pull[b] + weight * q[c] @ wk
        x = x + step_size * torch.stack(pull)
    return F.layer_norm(x, x.shape[-1:]) @ made.head.weight.T + made.head.bias


@pytest.mark.parametrize("directed", [False, True])
def test_nodes_read_their_neighbours(directed):
    made = model()
    features, edges = graph(2, directed=directed)
    out = made(features, edges)
    for sample in range(2):
        expected = by_loops(made, features[sample], edges[sample])
        torch.testing.assert_close(out[sample], expected, rtol=1e-10, atol=1e-10)


def test_a_score_of_exactly_zero_is_an_edge():
    """Queries are 0, and with them all scores: the energy is that of the mean over neighbours, not of no edges."""
    made = model(steps=1)
    features, edges = graph()
    edges[0] = edges[:, 0] = False
    with torch.no_grad():
        made.block.w_query.zero_()
    out = made(features, edges)
    torch.testing.assert_close(out, by_loops(made, features, edges, steps=1), rtol=1e-10, atol=1e-10)
    energy = made.block.potential(edges).value(made.block.norm(made.encoder(features)))
    memory = made.block.potential(torch.zeros_like(edges)).value(made.block.norm(made.encoder(features)))
    degrees = edges.sum(-1).double()
    counted = 2 * 3**0.5 * degrees[degrees > 0].log().sum()
    torch.testing.assert_close(energy - memory, counted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["float", "integer", "negative", "tiny", "float32", "half", "numpy"])
def test_every_adjacency_with_the_same_edges_gives_the_same_bits(kind):
    made = model(positions=2)
    features, edges = graph(2)
    expected = made(features, edges)
    weights = {
        "float": torch.rand(edges.shape, dtype=torch.float64) + 0.5,
        "integer": torch.randint(1, 9, edges.shape),
        "negative": -torch.rand(edges.shape, dtype=torch.float64) - 0.5,
        "tiny": torch.full(edges.shape, 5e-324, dtype=torch.float64),
        "float32": torch.ones(edges.shape),
        "half": torch.ones(edges.shape, dtype=torch.float16),
        "numpy": torch.from_numpy(torch.ones(edges.shape).numpy()),
    }[kind]
    assert torch.equal(made(features, weights * edges), expected)
    sparse = (edges[0] * 1.0).to_sparse().to_dense()
    assert torch.equal(made(features[0], sparse), made(features[0], edges[0]))


LAYOUTS = {
    "transposed": lambda e: e.mT.clone().mT,
    "every other": lambda e: e.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda e: e[:1].expand(e.shape),
    "one for all": lambda e: e[0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_adjacency_features_and_masks(layout):
    made = model(positions=2)
    features, edges = graph(2)
    exists = torch.tensor([[True] * 5 + [False], [True] * 6])
    given = layout(edges)
    dense = given.expand(2, 6, 6).clone()
    expected = made(features, dense, exists)
    torch.testing.assert_close(made(features, given, exists), expected, rtol=1e-10, atol=1e-10)
    strided = features.mT.clone().mT
    torch.testing.assert_close(made(strided, given, exists.T.clone().T), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("positions", [0, 2])
def test_permuted_nodes_have_permuted_logits(mode, positions):
    made = model(mode, positions=positions)
    features, edges = graph(2, count=7, share=0.5, seed=18)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))
    out = made(features, edges)
    permuted = made(features[:, order], edges[:, order][:, :, order])
    torch.testing.assert_close(permuted, out[:, order], rtol=1e-7, atol=1e-7)
    assert not torch.allclose(out[:, order], out)


@pytest.mark.parametrize("mode", MODES)
def test_an_isolated_node_keeps_the_pull_of_the_memory(mode):
    """It is as a graph of one node, whatever the others are, and its memory moves it."""
    made = model(mode)
    features, edges = graph(2)
    edges[:, 2] = edges[:, :, 2] = False
    out = made(features, edges)
    alone = made(features[:, 2:3], torch.zeros(1, 1))
    torch.testing.assert_close(out[:, 2:3], alone, rtol=1e-9, atol=1e-9)
    still = made.head(made.block.norm(made.encoder(features)))
    assert (out[:, 2] - still[:, 2]).abs().max() > 1e-2
    changed = features.clone()
    changed[:, [0, 1, 3, 4, 5]] += 1
    torch.testing.assert_close(made(changed, edges)[:, 2], out[:, 2], rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        made.block.memories.zero_()
    torch.testing.assert_close(made(features, edges & False), still, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("positions", [0, 2, 4])
def test_padding_is_leaving_out(mode, positions):
    made = model(mode, positions=positions)
    # Graphs without symmetries: their eigenvalues are simple, and no sum of cubes is 0.
    features, edges = graph(2, count=7, share=0.5, seed=18)
    expected = made(features, edges)
    padded = F.pad(features, (0, 0, 0, 2), value=float("nan"))
    joined = torch.ones(2, 9, 9, dtype=torch.bool)  # what stands at missing nodes is not read
    joined[:, :7, :7] = edges
    exists = torch.arange(9) < 7
    # A node that is missing may stand anywhere.
    order = torch.tensor([7, 0, 1, 8, 2, 3, 6, 5, 4])
    for chosen in (torch.arange(9), order):
        out = made(padded[:, chosen], joined[:, chosen][:, :, chosen], exists[chosen])
        kept = chosen[exists[chosen]]
        torch.testing.assert_close(out[:, exists[chosen]], expected[:, kept], rtol=1e-7, atol=1e-7)
        assert not out[:, ~exists[chosen]].any()
    # Graphs of two sizes in one batch.
    both = torch.stack([exists, torch.ones(9, dtype=torch.bool)])
    filled = padded.nan_to_num(0.3)
    joined[1] = graph(count=9, seed=3)[1]
    out = made(filled, joined, both)
    torch.testing.assert_close(out[0, :7], expected[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(out[1], made(filled[1], joined[1]), rtol=1e-7, atol=1e-7)


def test_gradients_of_padded_graphs_are_finite_and_reach_every_parameter():
    for mode in MODES:
        made = model(mode, positions=2, beta="learned")
        features, edges = graph(2)
        features[:, 5] = torch.nan
        features.requires_grad_()
        exists = torch.arange(6) < 5
        made(features, edges, exists).square().sum().backward()
        assert not features.grad[:, 5].any()
        assert bool(features.grad.isfinite().all())
        for name, parameter in made.named_parameters():
            assert bool(parameter.grad.isfinite().all()), name
            assert float(parameter.grad.abs().max()) > 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_differences(mode):
    made = model(mode, steps=3, positions=1)
    features, edges = graph(count=3, share=0.9)
    positions = laplacian_positions(edges, 1)

    def out(features, positions):
        return made(features, edges, positions=positions)

    inputs = (features.requires_grad_(), positions.requires_grad_())
    assert torch.autograd.gradcheck(out, inputs, atol=1e-6)
    if mode == "published":  # of an equilibrium the block's own tests do it, at length
        assert torch.autograd.gradgradcheck(lambda f: out(f, positions).sum(0), (inputs[0],), atol=1e-5)


def test_laplacian_positions_are_eigenvectors():
    _, edges = graph(2, count=6, share=0.6)
    k = 3
    positions = laplacian_positions(edges, k)
    for sample in range(2):
        adjacency = edges[sample].double()
        root = adjacency.sum(-1).rsqrt().diag()
        laplacian = torch.eye(6) - root @ adjacency @ root
        values = torch.linalg.eigvalsh(laplacian)[1 : k + 1]
        v = positions[sample]
        torch.testing.assert_close(laplacian @ v, v * values)
        torch.testing.assert_close(v.T @ v, torch.eye(k, dtype=torch.float64))
        assert (v.pow(3).sum(0) > 0).all()
    # An edge from a node to itself changes nothing.
    edges[:, 0, 0] = True
    assert torch.equal(laplacian_positions(edges, k), positions)


def test_laplacian_positions_of_a_ring_are_waves():
    """By a formula: eigenvalues 1 - cos(2 pi j/N), each but the first and last twice, spanned by sine and cosine."""
    count = 8
    ring = torch.eye(count).roll(1, 0)
    positions = laplacian_positions(ring, 2)  # directed: joined in either direction
    angle = 2 * torch.pi * torch.arange(count, dtype=torch.float64) / count
    waves = torch.stack([angle.cos(), angle.sin()], -1) / 2
    torch.testing.assert_close(positions @ positions.T, waves @ waves.T)


def test_laplacian_positions_that_are_not_there_are_zero():
    edge = torch.tensor([[0, 1], [1, 0]])
    assert laplacian_positions(edge, 4).shape == (2, 4)
    assert not laplacian_positions(edge, 4)[:, 1:].any()
    torch.testing.assert_close(laplacian_positions(edge, 1).abs(), torch.full((2, 1), 0.5**0.5, dtype=torch.float64))
    assert laplacian_positions(edge, 0).shape == (2, 0)
    loops = torch.ones(2, 2)
    assert torch.equal(laplacian_positions(loops, 1), laplacian_positions(edge, 1))
    none = laplacian_positions(torch.ones(3, 3), 2, torch.zeros(3, dtype=torch.bool))
    assert not none.any()


def test_signs_are_drawn_in_training_alone():
    made = model(positions=2)
    features, edges = graph(40)
    out = made(features, edges)
    assert torch.equal(made(features, edges), out)
    signs = laplacian_positions(edges, 2)
    assert torch.equal(made(features, edges, positions=signs), out)
    four = torch.stack(
        [made(features, edges, positions=signs * torch.tensor([a, b])) for a in (1, -1) for b in (1, -1)]
    )
    made.train()
    torch.manual_seed(0)
    drawn = made(features, edges)
    torch.manual_seed(0)
    assert torch.equal(made(features, edges), drawn)
    # Every sample has one of the four choices of signs, and all four occur.
    found = (four - drawn).abs().amax((-2, -1)) < 1e-9
    assert (found.sum(0) == 1).all()
    assert (found.sum(1) > 2).all()

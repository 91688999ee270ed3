"""The attention of the Energy Transformer: all tokens of a sample as queries and keys, with weights."""

import energy_transformer_truth as truth
import pytest
import torch
from layouts import MATRICES, Layouts

from implicit_attention import Status, solve
from implicit_attention.energies import LegendreEnergy
from implicit_attention.potentials import LayerNormPotential, TokenAttention, token_attention
from implicit_attention.testing.numerics import random
from implicit_attention.testing.potential import Allocations, PotentialContract

F64 = torch.float64
G = truth.norm().mean(truth.TOKENS)


class Contract(PotentialContract):
    """States of two samples of three tokens; two heads of width 4."""

    selects = False

    def weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple((0.5 * random(2, 4, 5, seed=s)).to(dtype) for s in (6, 7))

    def make(self, dtype: torch.dtype) -> TokenAttention:
        return TokenAttention(*self.weights(dtype), 0.7)

    # A sample is one problem: nothing is taken apart by rows.
    test_select_takes_rows = None


class TestNumber(Contract):
    pass


class TestPerHead(Contract):
    def make(self, dtype: torch.dtype) -> TokenAttention:
        return TokenAttention(*self.weights(dtype), torch.tensor([0.5, 1.2], dtype=dtype), exclude_self=True)


class TestMasked(Contract):
    """One token of the second sample attends to none."""

    def make(self, dtype: torch.dtype) -> TokenAttention:
        mask = torch.tensor([[[1, 0, 1], [1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 0], [1, 0, 1]]], dtype=torch.bool)
        return TokenAttention(*self.weights(dtype), torch.tensor(0.8, dtype=dtype), mask=mask)


class TestTiled(TestMasked):
    """Tiles of one query row, as of more tokens than are held at once."""

    @pytest.fixture(autouse=True)
    def _tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(token_attention, "DENSE_TOKENS", 1)


def looped(
    attention: TokenAttention, z: torch.Tensor, beta: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Phi of one sample, pair by pair."""
    total = z.new_zeros(())
    for wq, wk, b in zip(attention.w_query, attention.w_key, beta, strict=True):
        for c in range(len(z)):
            terms = [
                b * ((wk @ z[i]) @ (wq @ z[c]))
                for i in range(len(z))
                if not (attention.exclude_self and i == c) and (mask is None or bool(mask[c, i]))
            ]
            if terms:
                total = total + torch.stack(terms).logsumexp(0) / b
    return total


CASES = [(mask, exclude, beta) for mask in ("none", "pairs", "samples") for exclude in (False, True) for beta in (0, 1)]


def case(mask: str, exclude: bool, beta: int) -> tuple[TokenAttention, torch.Tensor, torch.Tensor | None]:
    given = {"none": None, "pairs": random(6, 6, seed=1) > 0, "samples": random(2, 6, 6, seed=2) > 0}[mask]
    if given is not None:
        given[..., 2, :] = False
    betas = torch.tensor([0.6, 1.4], dtype=F64)
    attention = TokenAttention(
        0.6 * random(2, 3, 5, seed=6),
        0.6 * random(2, 3, 5, seed=7),
        betas if beta else 0.9,
        mask=given,
        exclude_self=exclude,
    )
    return attention, betas if beta else torch.full((2,), 0.9, dtype=F64), given


@pytest.mark.parametrize("tile", [512, 2], ids=["dense", "tiled"])
@pytest.mark.parametrize(("mask", "exclude", "beta"), CASES)
def test_value_and_derivatives_are_those_of_a_loop(
    mask: str, exclude: bool, beta: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_attention, "DENSE_TOKENS", tile)
    attention, betas, given = case(mask, exclude, beta)
    z, v = random(2, 6, 5, seed=3).requires_grad_(), random(2, 6, 5, seed=4)
    per_sample = [None, None] if given is None else list(given.expand(2, 6, 6))
    expected = torch.stack([looped(attention, x, betas, m) for x, m in zip(z, per_sample, strict=True)])
    (gradient,) = torch.autograd.grad(expected.sum(), z, create_graph=True)
    (product,) = torch.autograd.grad((gradient * v).sum(), z)
    close = {"rtol": 1e-11, "atol": 1e-11}
    x = z.detach()
    torch.testing.assert_close(attention.value(x), expected.detach(), **close)
    torch.testing.assert_close(attention.mean(x), gradient.detach(), **close)
    for found, truth_of in zip(attention.evaluate(x), (expected, gradient), strict=True):
        torch.testing.assert_close(found, truth_of.detach(), **close)
    torch.testing.assert_close(attention.covariance_product(x, v), product, **close)
    linear = attention.linearize(x)
    for _ in range(2):
        torch.testing.assert_close(linear.product(v), product, **close)
    # Recorded, to the second order.
    mean = attention.mean(z)
    (again,) = torch.autograd.grad(mean, z, v, create_graph=True)
    torch.testing.assert_close(again, product, **close)
    (third,) = torch.autograd.grad((again * v).sum(), z)
    (slow,) = torch.autograd.grad((attention.covariance_product(z, v) * v).sum(), z)
    torch.testing.assert_close(third, slow, **close)
    if given is not None:
        assert torch.equal(attention.probabilities(x)[..., 2, :], torch.zeros(2, 2, 6, dtype=F64))


@pytest.mark.parametrize(
    ("exclude", "energy", "gradient", "product"),
    [
        (
            False,
            -16.084745348194,
            [-2.614210814517, -1.293619124461, 1.611951229669, 2.906493896127],
            [0.370364743646, 0.212716420095, -0.305426973936, -0.593972549847],
        ),
        (
            True,
            -5.343008174763,
            [-1.976403267136, -1.315578765418, 0.950413992998, 2.213593348303],
            [0.357999029715, 0.261000492361, -0.240885268842, -0.572512557939],
        ),
    ],
    ids=["self attended", "exclude_self"],
)
def test_numbers_of_the_ground_truth(exclude: bool, energy: float, gradient: list[float], product: list[float]) -> None:
    """Of the attention alone, and gradient and curvature with the memory."""
    from implicit_attention.potentials import Polynomial, TokenMemory

    attention = truth.attention(exclude_self=exclude)
    assert abs(float(-attention.value(G)) - energy) < 1e-9
    phi = attention + TokenMemory(Polynomial(truth.MEMORIES, 1.0))
    close = {"rtol": 0.0, "atol": 1e-9}
    torch.testing.assert_close(-phi.mean(G)[0], torch.tensor(gradient, dtype=F64), **close)
    torch.testing.assert_close(-phi.covariance_product(G, truth.V)[1], torch.tensor(product, dtype=F64), **close)


def test_path_graph_of_the_ground_truth() -> None:
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    attention = truth.attention(mask=path)
    assert abs(float(-attention.value(G)) - 8.299383251163) < 1e-9
    expected = torch.tensor([1.2135123715, -0.3531692983, -1.5951487439, -1.3705557908], dtype=F64)
    torch.testing.assert_close(-attention.mean(G)[0], expected, rtol=0.0, atol=1e-9)


def test_a_single_token_without_itself_has_no_pull() -> None:
    attention, z = truth.attention(exclude_self=True), random(2, 1, 4, seed=1)
    assert torch.equal(attention.value(z), torch.zeros(2, dtype=F64))
    assert torch.equal(attention.mean(z), torch.zeros(2, 1, 4, dtype=F64))
    assert torch.equal(attention.covariance_product(z, z), torch.zeros(2, 1, 4, dtype=F64))


def test_a_masked_token_is_as_if_left_out() -> None:
    attention, z = truth.attention(), random(2, 5, 4, seed=1)
    exists = torch.tensor([True, True, False, True, True])
    masked = truth.attention(mask=exists[:, None] & exists)
    kept = z[:, exists]
    torch.testing.assert_close(masked.value(z), attention.value(kept), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(masked.mean(z)[:, exists], attention.mean(kept), rtol=1e-12, atol=1e-12)
    assert torch.equal(masked.mean(z)[:, 2], torch.zeros(2, 4, dtype=F64))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (3, 2, 4, 5)])
def test_batches_of_every_shape(shape: tuple[int, ...]) -> None:
    attention, _, _ = case("none", False, 1)
    z, v = random(*shape, seed=1), random(*shape, seed=2)
    assert attention.value(z).shape == shape[:-2]
    for found in (attention.mean(z), attention.covariance_product(z, v), attention.linearize(z).product(v)):
        assert found.shape == shape
    if len(shape) == 4:
        flat = attention.mean(z.flatten(0, 1)).reshape(shape)
        torch.testing.assert_close(attention.mean(z), flat, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MATRICES)
def test_layouts_of_tokens_and_weights(kind: str) -> None:
    draw = Layouts(0)
    laid = [MATRICES[kind](draw.normal, shape, draw.rng) for shape in ((2, 6, 5), (2, 3, 5), (2, 3, 5))]
    plain = [t.clone(memory_format=torch.contiguous_format) for t in laid]
    v = random(2, 6, 5, seed=4)
    found, expected = (TokenAttention(wq, wk, 0.8) for _, wq, wk in (laid, plain))
    for name in ("value", "mean"):
        torch.testing.assert_close(getattr(found, name)(laid[0]), getattr(expected, name)(plain[0]))
    torch.testing.assert_close(found.covariance_product(laid[0], v), expected.covariance_product(plain[0], v))
    for a, b in zip(found.linearize(laid[0]).vjp_tensors(v), expected.linearize(plain[0]).vjp_tensors(v), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", ["value", "mean", "evaluate", "covariance", "linearize"])
def test_of_many_tokens_no_tensor_of_all_pairs_is_made(method: str) -> None:
    """600 tokens: all pairs of two heads are 720,000 numbers."""
    attention = TokenAttention(random(2, 3, 5, seed=6), random(2, 3, 5, seed=7), 0.2)
    z, v = random(1, 600, 5, seed=1), random(1, 600, 5, seed=2)
    with Allocations() as counted:
        if method == "covariance":
            attention.covariance_product(z, v)
        elif method == "linearize":
            linear = attention.linearize(z)
            linear.product(v)
            linear.vjp_tensors(v)
        else:
            getattr(attention, method)(z)
    assert counted.largest < 2 * 600 * 600
    assert counted.largest > 600 * 5


def test_of_many_tokens_no_weights_are_kept_for_a_backward_pass() -> None:
    attention = TokenAttention(random(2, 3, 5, seed=6), random(2, 3, 5, seed=7), 0.2)
    z = random(1, 600, 5, seed=1).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        mean = attention.mean(z)
    assert max(saved) < 2 * 600 * 600
    v = random(1, 600, 5, seed=2)
    (found,) = torch.autograd.grad(mean, z, v)
    torch.testing.assert_close(found, attention.covariance_product(z.detach(), v), rtol=1e-10, atol=1e-10)


def test_scores_of_any_size() -> None:
    """Log sum exp by the largest weight of a row, where all others vanish."""
    attention = TokenAttention(30 * random(2, 3, 5, seed=6), 30 * random(2, 3, 5, seed=7), 1.0)
    z = random(1, 6, 5, seed=1)
    recorded = attention.value(z.requires_grad_()).detach()
    torch.testing.assert_close(attention.value(z.detach()), recorded, rtol=1e-13, atol=1e-9)


def test_a_nan_stays_in_its_sample() -> None:
    attention = truth.attention()
    field = 3 * random(3, 5, 4, seed=1)
    clean = solve(LegendreEnergy(LayerNormPotential(), attention, field), field)
    field[1, 2, 0] = torch.nan
    solution = solve(LegendreEnergy(LayerNormPotential(), attention, field), field, on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert torch.equal(solution.value[[0, 2]], clean.value[[0, 2]])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"w_query": torch.ones(3, 4)}, ValueError, "`w_query` must have three axes"),
        ({"w_key": torch.ones(2, 2, 5)}, ValueError, "`w_key` must have the shape"),
        ({"w_key": torch.ones(2, 2, 4, dtype=F64)}, (TypeError, ValueError), "dtype"),
        ({"beta": 0.0}, ValueError, "`beta` must be > 0, got 0"),
        ({"beta": torch.tensor([1.0, -1.0])}, ValueError, "`beta` must be > 0"),
        ({"beta": torch.ones(3)}, ValueError, "`beta` must broadcast to the heads"),
        ({"mask": torch.ones(3, 3)}, TypeError, "`mask` must be a boolean tensor"),
        ({"exclude_self": 1}, TypeError, "`exclude_self` must be True or False"),
    ],
)
def test_bad_weights_are_refused(given: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"w_query": torch.ones(2, 2, 4), "w_key": torch.ones(2, 2, 4), "beta": 1.0} | given
    with pytest.raises(error, match=message):
        TokenAttention(**arguments)


@pytest.mark.parametrize(
    ("z", "message"),
    [(torch.ones(1, 3, 5), "width 4"), (torch.ones(1, 3, 4, dtype=F64), "dtype"), (torch.ones(4), "at least 2")],
)
def test_bad_states_are_refused(z: torch.Tensor, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        TokenAttention(torch.ones(2, 2, 4), torch.ones(2, 2, 4), 1.0).check_state("field", z)

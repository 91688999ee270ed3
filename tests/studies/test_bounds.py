"""What is proved of log-sum-exp (Ramsauer et al. 2020), near the thresholds where it begins to hold."""

import math

import pytest
import torch

from implicit_attention import LogSumExp
from implicit_attention.potentials import Entmax
from implicit_attention.studies.bounds import (
    at_ratio,
    capacity,
    contraction_bound,
    longest,
    pattern_bound,
    random_patterns,
    ratio_row,
    separation_threshold,
    separations,
    step_bound,
)

BOUNDS = ("fixed_point", "step", "contraction", "pattern")


def test_separations_and_bounds_are_their_formulas():
    keys = torch.tensor([[2.0, 0.0], [1.0, 1.0], [-1.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(separations(keys), torch.tensor([2.0, 0.0, 8.0], dtype=torch.float64))
    length, beta, gap, distance = (torch.tensor(x, dtype=torch.float64) for x in (10**0.5, 0.7, 8.0, 0.1))
    torch.testing.assert_close(longest(keys), length)
    threshold = 2 / (0.7 * 3) + math.log(2 * 2 * 3 * 0.7 * 10) / 0.7
    assert separation_threshold(beta, 3, length).item() == pytest.approx(threshold)
    step = 2 * 2 * 10**0.5 * math.exp(-0.7 * (8 - 2 * 10**0.5 * 0.1))
    assert step_bound(beta, 3, length, gap, distance).item() == pytest.approx(step)
    contraction = 2 * 0.7 * 3 * 10 * 2 * math.exp(-0.7 * (8 - 2 * 10**0.5 * 0.1))
    assert contraction_bound(beta, 3, length, gap, distance).item() == pytest.approx(contraction)
    own = 2 * math.e * 2 * 10**0.5 * math.exp(-0.7 * 8)
    assert pattern_bound(beta, 3, length, gap).item() == pytest.approx(own)
    assert pattern_bound(beta, 3, length, torch.zeros_like(gap)).isinf()


def test_betas_are_found_at_which_the_separation_is_so_many_thresholds():
    keys = random_patterns(20, 6, 8, length=2.0, spread=0.7, seed=0)
    for ratio in (0.5, 1.0, 1.5):
        beta = at_ratio(keys, ratio)
        held = separations(keys) / separation_threshold(beta, 6, longest(keys)[:, None])
        assert beta.isfinite().double().mean() > 0.9
        torch.testing.assert_close(
            held[beta.isfinite()], torch.full_like(held[beta.isfinite()], ratio), rtol=1e-5, atol=0
        )


@pytest.mark.slow
def test_from_the_threshold_on_nothing_proved_is_violated():
    rows = [ratio_row(ratio, sets=10, seed=0) for ratio in (1.0, 1.1, 1.5, 2.0)]
    assert sum(row["patterns"] for row in rows) > 1000
    for row in rows:
        assert all(row[name]["violations"] == 0 for name in BOUNDS), row
    # The bound on fixed points is near: below the threshold it fails for most patterns, so that this is no empty test.
    assert rows[0]["fixed_point"]["worst"] > 0.3
    below = ratio_row(0.5, sets=10, seed=0)
    assert below["fixed_point"]["violations"] > 0.5 * below["patterns"]


@pytest.mark.parametrize(
    ("beta", "factor", "dim", "failure", "c"), [(1, 3, 20, 0.001, 3.1546), (1, 1, 75, 0.001, 1.3719)]
)
def test_the_capacity_of_theorem_3_has_its_printed_constants(beta, factor, dim, failure, c):
    promised, found = capacity(beta, factor, dim, failure)
    assert found == pytest.approx(c, abs=5e-5)
    assert promised == pytest.approx(failure**0.5 * found ** ((dim - 1) / 4))


def test_where_theorem_3_does_not_hold_nothing_is_promised():
    assert capacity(1.0, 0.8, 20, 0.001)[0] is None


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_sparse_attention_returns_separated_patterns_exactly(alpha):
    """Separation >= m/beta + 2 M eps with m = 1/(alpha - 1), query within eps: one step is the pattern, error 0."""
    keys = random_patterns(40, 6, 8, length=2.0, spread=1.0, seed=1)
    generator, margin = torch.Generator().manual_seed(2), 1 / (alpha - 1)
    noise = torch.randn(keys.shape, generator=generator, dtype=keys.dtype)
    gap = separations(keys)
    exact = []
    for share in (1.0, 0.5):
        # All of the separation, or twice as much as there is, is asked for by beta and eps together.
        eps = 0.25 * gap / (2 * 2.0)
        beta = margin / (0.75 * gap) * share
        query = keys + 0.999 * eps[..., None] * noise / noise.norm(dim=-1, keepdim=True)
        phi = Entmax(keys[:, None].expand(-1, 6, -1, -1), 1.001 * beta, alpha=alpha)
        found = phi.mean(query[:, :, None])[:, :, 0]
        kept = gap > 0
        exact.append((found == keys).all(-1)[kept].double().mean().item())
    assert exact[0] == 1
    assert exact[1] < 0.9


def test_the_potential_of_the_bounds_is_the_librarys():
    keys = random_patterns(1, 5, 4, length=1.0, spread=1.0, seed=0)[0]
    z = keys[:1]
    torch.testing.assert_close(LogSumExp(keys, 2.0).mean(z), (2 * z @ keys.mT).softmax(-1) @ keys)

"""`compare --suite distribution`: moments of tokens beside the theorem's numbers, and what trained matrices are."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from implicit_attention.cli import compare_distribution, main
from implicit_attention.studies import token_moments, trained_layer
from implicit_attention.studies.token_moments import ATTENTION, RENORMALISED, RESIDUAL


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


LAW = token_moments.laws(0)[0]


def after(law, way, steps=1):
    mean, variances = token_moments.start(law)
    for _ in range(steps):
        mean, variances = token_moments.closed_form(law, mean, variances, way)
    return mean, token_moments.spread(law, variances), variances


def test_the_closed_form_has_the_numbers_of_the_theorem():
    torch.testing.assert_close(LAW.mean, double(0.804597701149, -1.551724137931), rtol=0, atol=1e-9)
    mean, covariance, variances = after(LAW, RESIDUAL)
    torch.testing.assert_close(mean, double(1.804597701149, -3.551724137931), rtol=0, atol=1e-9)
    expected = double([4.119540229885, -0.044827586207], [-0.044827586207, 4.179310344828])
    torch.testing.assert_close(covariance, expected, rtol=0, atol=1e-9)
    gain = token_moments.entropy(variances) - token_moments.entropy(token_moments.start(LAW)[1])
    assert gain.item() == pytest.approx(1.353254507042, abs=1e-10)
    torch.testing.assert_close(after(LAW, RENORMALISED)[1], LAW.covariance)


@pytest.mark.parametrize("way", [ATTENTION, RESIDUAL])
@pytest.mark.parametrize("law", token_moments.laws(0), ids=["theorem", "narrow"])
def test_the_closed_form_is_attention_over_a_gaussian(law, way):
    """Attention over keys Sigma eta' at a token eta, by its own integral: the mean of a tilted Gaussian."""
    mean, covariance = law.mean, law.covariance
    eta = double(*torch.linspace(-0.5, 0.7, len(mean)).tolist())
    keys_mean, keys_covariance = law.sigma @ mean, law.sigma @ covariance @ law.sigma
    moved = keys_mean + keys_covariance @ eta
    matrix = keys_covariance + (0.0 if way == ATTENTION else 1.0) * torch.eye(len(mean), dtype=torch.float64)
    found_mean, found_covariance, _ = after(law, way)
    torch.testing.assert_close(found_mean, keys_mean + matrix @ mean)
    torch.testing.assert_close(found_covariance, matrix @ covariance @ matrix.mT)
    # The tilted mean by samples: weights exp(<eta, x>) of keys x.
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(400_000, len(mean), generator=generator, dtype=torch.float64)
    keys = keys_mean + noise @ torch.linalg.cholesky(keys_covariance).mT
    torch.testing.assert_close((keys @ eta).softmax(0) @ keys, moved, rtol=0.05, atol=0.02)


def test_a_step_is_softmax_attention_of_all_tokens():
    x = token_moments.sample(LAW, seeds=1, count=7, seed=0)[0]
    keys = x @ LAW.sigma
    attended = (x @ keys.mT).softmax(-1) @ keys
    torch.testing.assert_close(token_moments.step(LAW, x, ATTENTION), attended)
    torch.testing.assert_close(token_moments.step(LAW, x, RESIDUAL), x + attended)
    mean, covariance, _ = token_moments.moments(token_moments.step(LAW, x, RENORMALISED))
    torch.testing.assert_close(mean, LAW.mean)
    torch.testing.assert_close(covariance, LAW.covariance)


def test_entropy_is_that_of_a_gaussian():
    eigenvalues = double(0.5, 2.0, 3.0)
    gaussian = torch.distributions.MultivariateNormal(torch.zeros(3).double(), torch.diag(eigenvalues))
    torch.testing.assert_close(token_moments.entropy(eigenvalues), gaussian.entropy())
    assert token_moments.entropy(double(1.0, 0.0)).item() == -math.inf


def test_nearness_is_one_at_the_inverse_covariance_and_small_at_random():
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(16, 40, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.mT / 40
    inverse = torch.linalg.inv(covariance)
    found = trained_layer.measure(torch.stack([3 * inverse, 0.1 * inverse]), covariance)
    assert found["alignment"] == pytest.approx(1)
    assert found["whitened_alignment"] == pytest.approx(1)
    assert found["distance"] < 1e-6
    turned = trained_layer.rotated(torch.stack([inverse] * 8), generator)
    torch.testing.assert_close(torch.linalg.svdvals(turned), torch.linalg.svdvals(inverse).expand(8, -1))
    assert abs(trained_layer.measure(turned, covariance)["alignment"]) < 0.5


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    out = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_moments, "COUNTS", (50, 200))
        patch.setattr(compare_distribution, "sizes", lambda settings: {"seeds": 3, "trainings": 2, "updates": 60})
        arguments = ["compare", "--suite", "distribution", "--quick", "--out", str(out)]
        result = CliRunner().invoke(main.app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result, out, json.loads((out / "distribution.json").read_text())


@pytest.mark.slow
def test_the_suite_writes_numbers_and_a_picture(suite):
    result, out, content = suite
    assert (out / "distribution.png").stat().st_size > 20_000
    assert len(content["rows"]) == 2 * 3 * 2 * (token_moments.STEPS + 1)
    assert {row["matrix"] for row in content["layers"]} == set(trained_layer.COMPARED)
    assert len(content["layers"]) == 2 * len(trained_layer.COMPARED)
    assert all(row["accuracy"] > 0.2 for row in content["layers"])
    assert "infinite 1.353" in " ".join(result.output.split())


def test_attention_collapses_residuals_expand_and_renormalised_tokens_stay(suite):
    def entropies(way):
        rows = [row for row in suite[2]["rows"] if row["way"] == way and row["tokens"] == 200]
        return [[row["entropy"] for row in rows if row["law"] == law] for law in dict.fromkeys(r["law"] for r in rows)]

    for falling, rising, steady in zip(*map(entropies, (ATTENTION, RESIDUAL, RENORMALISED)), strict=True):
        assert falling == sorted(falling, reverse=True)
        assert rising == sorted(rising)
        assert steady[1:] == pytest.approx([steady[1]] * 3, abs=1e-6)


def test_potentials_are_no_choice_of_this_suite(tmp_path):
    arguments = ["compare", "--suite", "distribution", "--potential", "entmax", "--out", str(tmp_path)]
    result = CliRunner().invoke(main.app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert "--potential" in result.output

"""Rules that end tokens of a causal layer before they settle."""

import pytest
import torch
from torch import nn

import implicit_attention as ia
from implicit_attention import EquilibriumTransformer, Picard, Rotary
from implicit_attention.layers import Equilibrium, Exit, ExitReport


def made(**options):
    torch.manual_seed(0)
    options = {"solver": Picard(rtol=1e-8, max_steps=300), "rotary": Rotary(), **options}
    model = EquilibriumTransformer(8, 2, causal=True, **options).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(0.7 if "norm" in name else 1.2)
    return model


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def names(report):
    return {report.rules[code] for code in report.rule.unique().tolist()}


@torch.no_grad()
def test_a_number_of_evaluations_is_a_loop_of_as_many_steps():
    model, x = made(), tokens(2, 7, 8)
    for count in (1, 3, 6):
        torch.testing.assert_close(model(x, exit=Exit(evaluations=count)), model(x, steps=count))
        assert model.last_solve.status.unique().tolist() == [int(ia.Status.BUDGET)]
    model(x, exit=Exit(evaluations=4))
    report = model.last_solve
    assert isinstance(report, ExitReport)
    assert names(report) == {"evaluations"}
    assert bool(report.residual.isnan().all())
    assert bool((report.num_evals == 4).all())
    assert "14 by evaluations" in repr(report)


@torch.no_grad()
def test_a_tolerance_ends_each_token_by_its_own_step():
    model, x = made(), tokens(2, 7, 8)
    model(x, exit=0.05)
    report, z = model.last_solve, torch.zeros_like(x)
    # Without exits before them the tokens' steps are those of the loop.
    first = torch.full((2, 7), 999)
    for count in range(1, 40):
        new = model.block(z, x, None)
        small = (new - z).norm(dim=-1) <= 0.05 * new.norm(dim=-1)
        first = torch.where(small & (first == 999), count, first)
        z = new
    assert torch.equal(report.num_evals[:, 0].long(), first[:, 0])
    assert names(report) == {"tolerance"}
    assert len(report.num_evals.unique()) > 1
    assert bool((report.step <= 0.05).all())


@torch.no_grad()
@pytest.mark.parametrize("mean", [1.0, 1.5, 2.0, 2.5, 4.0, 9.0])
@pytest.mark.parametrize("count", [9, 40])
def test_a_mean_budget_is_spent_where_steps_are_largest(mean, count):
    model, x = made(), tokens(3, count, 8)
    z = model(x, exit=Exit(mean=mean))
    report = model.last_solve
    spent = float(report.num_evals.double().mean())
    assert spent <= mean
    assert spent > mean - 0.3
    assert z.isfinite().all()
    assert names(report) == {"mean"}
    assert mean in (1, 2) or len(report.num_evals.unique()) > 1


@torch.no_grad()
def test_tokens_that_do_not_exist_have_no_part_in_a_mean_budget():
    model, x, exists = made(), tokens(2, 9, 8), torch.ones(2, 9, dtype=torch.bool)
    exists[0, :7] = False
    model(x, key_mask=exists, exit=Exit(mean=4.0))
    spent = model.last_solve.num_evals
    assert spent[~exists].tolist() == [1] * 7
    assert 3.6 < float(spent[exists].double().mean()) <= 4


@torch.no_grad()
def test_a_read_out_ends_where_the_prediction_stands_still():
    model, x, head = made(), tokens(2, 7, 8), nn.Linear(8, 5).double()
    z = model(x, exit=Exit(readout=head, nats=1e-3))
    report = model.last_solve
    assert names(report) == {"readout"}
    # The state before the last step is not kept: a step further changes the prediction less still.
    old, new = (head(t).log_softmax(-1) for t in (z, model(x, steps=200)))
    assert float((new.exp() * (new - old)).sum(-1).max()) < 0.02
    few = report.num_evals.double().mean()
    model(x, exit=Exit(readout=head, nats=1e-6))
    assert model.last_solve.num_evals.double().mean() > few


@torch.no_grad()
def test_the_first_rule_that_holds_ends_a_token():
    model, x = made(), tokens(2, 7, 8)
    model(x, exit=Exit(rtol=0.05, evaluations=3))
    report = model.last_solve
    assert names(report) <= {"tolerance", "evaluations"}
    assert int(report.num_evals.max()) == 3
    model(x, exit=Exit(evaluations=1000))
    assert names(model.last_solve) == {""}
    assert bool(model.last_solve.converged.all())


class Slow(nn.Module):
    """Tokens by themselves, with a rate of convergence that the input says."""

    def forward(self, z, x, past=None):
        return x[..., :1].sigmoid() * z + 1.0


def test_tokens_behind_one_that_a_rule_ended_settle_beside_that_past_alone():
    layer = Equilibrium(Slow(), causal=True, solver=Picard(rtol=1e-6, max_steps=100), on_failure="raise")
    x = torch.zeros(1, 5, 1)
    x[0, 2] = 5.0
    layer(x, exit=Exit(evaluations=25))
    report = layer.last_solve
    assert [report.rules[code] for code in report.rule[0].tolist()] == ["", "", "evaluations", "past", "past"]
    assert report.statuses == [["CONVERGED"] * 2 + ["BUDGET"] * 3]
    assert report.residual[0].isnan().tolist() == [False, False, True, False, False]


@torch.no_grad()
def test_exits_with_chunks_caches_and_absent_tokens():
    model, x = made(), tokens(2, 8, 8)
    exists = torch.ones(2, 8, dtype=torch.bool)
    exists[0, :3] = False
    model(x, key_mask=exists, exit=0.05, chunk=3)
    assert model.last_solve.rule.shape == (2, 8)
    cache = model.new_cache()
    found = torch.cat([model(x[:, i : i + 1], cache=cache, exit=Exit(rtol=1e-7)) for i in range(8)], 1)
    torch.testing.assert_close(found, model(x), rtol=0, atol=1e-5)
    assert cache.length == 8


def test_exits_have_no_gradient():
    with pytest.raises(RuntimeError, match="nor have those of a call with `exit`"):
        made()(tokens(2, 3, 8), exit=0.1).sum().backward()

"""`watch` over two processes: counts are summed, maxima are of the worst, and other layers are refused by all."""

import math

import pytest
import torch
from processes import error_of, together
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from implicit_attention import ImplicitAttention, Picard
from implicit_attention.training import watch

DIM, HEADS, STEPS = 8, 2, 3


def model_of(count=2):
    torch.manual_seed(0)
    options = {"solver": Picard(rtol=1e-5, max_steps=6), "on_failure": "ignore"}
    return nn.Sequential(*(ImplicitAttention(DIM, HEADS, anchor=0.5, **options) for _ in range(count)))


def tokens(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return 3.0 * (rank + 1) * torch.randn(2 + rank, 4 + step, DIM, generator=generator)


def plain(observed):
    """All numbers of an observation."""
    rows = observed.rows()
    return [
        {name: value for name, value in row.items() if not (isinstance(value, float) and value != value)}
        for row in rows
    ]


def gathered(model):
    """Lists of what the layers' reports say: (status, evaluations, residual, tolerance) forward and backward."""
    found = []
    for layer in model:
        report = layer.last_solve
        ends = (report, "num_evals"), (report.adjoint, "num_steps")
        for told, evaluations in ends:
            fields = (told.status, getattr(told, evaluations), told.residual, told.tolerance)
            found.append([field.flatten().tolist() for field in fields])
    return found


def train(rank, spread):
    model = model_of()
    call = DistributedDataParallel(model) if spread else model
    seen = watch(call, group=distributed.group.WORLD)
    alone, found, looks = [], [], []
    for look in range(2):
        for step in range(STEPS + rank if not spread else STEPS):
            call(tokens(rank, step)).square().sum().backward()
            alone.append(gathered(model))
        observed = seen.take(look)
        looks.append(plain(observed))
        found.append(alone)
        alone = []
    return found, looks, repr(observed)


def summed(calls, layer, side):
    """Of lists of calls of all processes: calls, problems, mean, p99, most, failed, worst."""
    mine = [call[2 * layer + side] for call in calls]
    status, evaluations, residual, tolerance = ([n for call in mine for n in call[i]] for i in range(4))
    ordered = sorted(evaluations)
    worst = max(r / t for r, t in zip(residual, tolerance, strict=True))
    p99 = ordered[-(-99 * len(ordered) // 100) - 1]
    failed = sum(code > 3 for code in status)
    return len(mine), len(status), sum(evaluations) / len(status), p99, ordered[-1], failed, worst


NAMES = ("calls", "problems", "mean", "p99", "most", "failed", "worst")


def check(results):
    for look in range(2):
        calls = [call for found, _, _ in results for call in found[look]]
        for _, looks, _ in results:
            assert [row["layer"].removeprefix("module.") for row in looks[look]] == ["0", "1", "all"]
            for layer in range(2):
                row = looks[look][layer]
                for side, way in enumerate(("forward", "backward")):
                    expected = summed(calls, layer, side)
                    for name, value in zip(NAMES, expected, strict=True):
                        assert math.isclose(row[f"{way}_{name}"], value, rel_tol=1e-6), (look, layer, way, name)
        total = results[0][1][look][-1]
        assert total["forward_failed"] == sum(row["forward_failed"] for row in results[0][1][look][:-1]) > 0
    # All processes are told the same.
    assert results[0][1] == results[1][1]
    assert results[0][2] == results[1][2]


def not_a_number(rank, first):
    """The worst that each process is told of, where a query of one of them is no number."""
    layer = model_of(1)[0]
    with watch(layer, group=distributed.group.WORLD) as seen:
        given = tokens(rank, 0)
        given[0, 0] = math.nan if rank == first else 0.0
        layer(given)
        return seen.take().total.forward.worst


def nothing(rank):
    model = model_of()
    seen = watch(model, group=distributed.group.WORLD)
    if rank == 1:
        # One process alone, and one layer of it alone.
        model[1](tokens(rank, 0))
    return plain(seen.take()), plain(seen.take())


def others(rank):
    model = model_of(2 + rank)
    seen = watch(model, group=distributed.group.WORLD)
    model(tokens(0, 0))
    found = [error_of(seen.take), error_of(seen.take)]
    # The group goes on.
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    return [*found, float(ones)]


def part(rank):
    model = model_of()
    pair = distributed.new_group([1])
    seen = watch(model, group=pair if rank else None)
    model(tokens(rank, 0))
    return seen.take().total.forward.calls


def spread(rank):
    """One layer in one process; its heads over both; and its parameters over both, each with the same tokens."""
    given, found = tokens(0, 0), []
    for kind in ("whole", "heads", "parameters"):
        torch.manual_seed(0)
        layer = ImplicitAttention(DIM, 2 * HEADS)
        with torch.no_grad():
            layer.anchor.logit.copy_(torch.linspace(-1, 2, 2 * HEADS))
        if kind == "heads":
            parallelize_module(layer, init_device_mesh("cpu", (2,)), layer.parallel_plan())
        elif kind == "parameters":
            fully_shard(layer)
        with watch(layer, group=None if kind == "whole" else distributed.group.WORLD) as seen:
            layer(given).square().sum().backward()
            found.append(plain(seen.take())[-1])
    return found


def all_of_it(rank):
    numbers = [not_a_number(rank, first) for first in (0, 1)]
    return train(rank, False), train(rank, True), numbers, nothing(rank), others(rank), part(rank), spread(rank)


@pytest.fixture(scope="module")
def results():
    # By what was done, then by process.
    return list(zip(*together(all_of_it, 2), strict=True))


@pytest.mark.slow
def test_counts_are_summed_and_maxima_are_those_of_the_worst_process(results):
    check(results[0])


def test_so_they_are_of_data_parallel_training(results):
    check(results[1])


def test_a_residual_that_is_no_number_is_infinite_for_all_whoever_has_it(results):
    for found in results[2]:
        assert found == [math.inf] * 2


def test_a_layer_that_solves_in_one_process_is_in_the_list_of_all(results):
    first, second = results[3]
    assert first == second
    assert [row["layer"] for row in first[0]] == ["1", "all"]
    assert first[0][0]["forward_problems"] == 3 * HEADS * 4
    assert [row["forward_calls"] for row in first[1]] == [0, 0]


def test_other_layers_in_another_process_raise_in_all(results):
    for first, second, ones in results[4]:
        assert first == second
        assert first.startswith("ValueError: `group` must watch the layers of process 0, ['0', '1']")
        assert "others in process 1: ['0', '1', '2']" in first
        assert ones == 2


def test_heads_and_parameters_over_processes(results):
    for whole, heads, parameters in results[6]:
        for way in ("forward", "backward"):
            assert whole[f"{way}_problems"] == 2 * HEADS * 2 * 4
            assert heads[f"{way}_problems"] == whole[f"{way}_problems"]
            assert parameters[f"{way}_problems"] == 2 * whole[f"{way}_problems"]
            for each in (heads, parameters):
                assert each[f"{way}_calls"] == 2
                for name in ("mean", "most", "p99"):
                    assert each[f"{way}_{name}"] == whole[f"{way}_{name}"], (way, name)
                # Sums in another order leave other residuals.
                assert math.isclose(each[f"{way}_worst"], whole[f"{way}_worst"], rel_tol=0.1), way
    # Each process tells of the anchors that it has: of half the heads.
    whole, mine, theirs = results[6][0][0], *(found[1] for found in results[6])
    assert math.isclose((mine["anchor"] + theirs["anchor"]) / 2, whole["anchor"], rel_tol=1e-6)
    assert mine["anchor"] < whole["anchor"] < theirs["anchor"]


def test_without_a_group_or_in_one_of_its_own_a_process_looks_at_itself(results):
    assert results[5] == (2, 2)

"""The cost model of sharded keys: formulas, and a simulation that is them where all processes are equally fast."""

import dataclasses
import itertools
import math
import statistics

import numpy as np
import pytest

from benchmarks import scale_model as model
from benchmarks.scale_model import ASSUMED, Cluster, Work

WORK = Work(queries=7, keys=1000, dim=5, extra=2, collectives=2)
CLUSTER = Cluster("some", flops=1e9, memory=1e10, latency=2e-5, bandwidth=1e8, fixed=3e-6)
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 1000)
both = pytest.mark.parametrize("algorithm", model.EXCHANGES)


# ------------------------------------------------------------------ formulas


def test_a_thousand_machines_hold_a_billion_keys():
    work = Work(queries=64, keys=10**9, dim=64, extra=6)
    assert work.key_bytes / 1000 == 256e6
    assert work.flops / 1000 == pytest.approx(16.4e9, rel=2e-3)
    assert work.message_bytes == 64 * 70 * 4
    assert Work(64, 10**9, 64).message_bytes == pytest.approx(16.9e3, rel=2e-3)


def test_four_fifths_are_local_work_from_t_f_over_n_d_keys_a_process_on():
    work, cluster = Work(64, 10**6, 64), Cluster("c", 1e11, math.inf, 1e-4, math.inf)
    seconds = model.all_reduce_seconds("ring", work.message_bytes, 8, cluster)
    keys = 8 * seconds * cluster.flops / (work.queries * work.dim)
    found = model.predicted(dataclasses.replace(work, keys=int(keys)), cluster, 8, "ring")
    assert found.local / found.total == pytest.approx(0.8, rel=1e-3)


def test_local_work_is_shared_but_for_what_is_fixed():
    one, many = (model.local_seconds(WORK, CLUSTER, count) for count in (1, 10))
    assert one == pytest.approx(3e-6 + 4 * 7 * 1000 * 5 / 1e9 + 4 * 1000 * 5 / 1e10)
    assert many - 3e-6 == pytest.approx((one - 3e-6) / 10)


@pytest.mark.parametrize("count", COUNTS)
def test_messages_without_content_cost_the_latency_of_the_steps(count):
    endless = dataclasses.replace(CLUSTER, bandwidth=math.inf)
    ring, doubling = (model.all_reduce_seconds(a, 1e6, count, endless) / CLUSTER.latency for a in ("ring", "doubling"))
    assert ring == pytest.approx(2 * (count - 1))
    power = count & (count - 1) == 0
    assert doubling == pytest.approx(count.bit_length() - 1 + (0 if power else 2))


@pytest.mark.parametrize("count", [2, 4, 8, 1024])
def test_long_messages_cost_their_bytes(count):
    at_once = dataclasses.replace(CLUSTER, latency=0.0)
    size = 1e6
    assert model.all_reduce_seconds("ring", size, count, at_once) == pytest.approx(2 * size / 1e8 * (count - 1) / count)
    assert model.all_reduce_seconds("doubling", size, count, at_once) == pytest.approx(math.log2(count) * size / 1e8)


@both
def test_one_process_sends_nothing(algorithm):
    assert model.predicted(WORK, CLUSTER, 1, algorithm).collective == 0
    assert model.simulated(WORK, CLUSTER, 1, algorithm).collective == pytest.approx(0, abs=1e-15)


# ------------------------------------------------------------------ simulation


@both
@pytest.mark.parametrize("count", COUNTS)
def test_equally_fast_processes_are_as_fast_as_the_formulas_say(count, algorithm):
    expected = model.predicted(WORK, CLUSTER, count, algorithm)
    assert model.simulated(WORK, CLUSTER, count, algorithm, evaluations=3) == pytest.approx(expected, abs=1e-12)


def heard(clocks, messages, algorithm):
    """When each process has the sum, by messages one after the other, each with the time when it can be read."""
    count, clocks = len(clocks), list(clocks)
    if algorithm == "ring":
        for _ in range(2 * (count - 1)):
            took = messages(count)
            arrives = {(rank + 1) % count: clocks[rank] + took[rank] for rank in range(count)}
            clocks = [max(clocks[rank] + took[rank], arrives[rank]) for rank in range(count)]
        return clocks
    core = 2 ** (count.bit_length() - 1)
    took = messages(count - core)
    for rank in range(core, count):
        clocks[rank - core] = max(clocks[rank - core], clocks[rank] + took[rank - core])
    for bit in range(core.bit_length() - 1):
        took = messages(core)
        arrives = {rank ^ (1 << bit): clocks[rank] + took[rank] for rank in range(core)}
        clocks[:core] = [max(clocks[rank] + took[rank], arrives[rank]) for rank in range(core)]
    took = messages(count - core)
    for rank in range(core, count):
        clocks[rank] = clocks[rank - core] + took[rank - core]
    return clocks


@both
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 11])
def test_clocks_are_those_of_single_messages(count, algorithm):
    clocks = np.random.default_rng(count).uniform(0, 3, count)
    random = [np.random.default_rng(7) for _ in range(2)]
    found = model.EXCHANGES[algorithm](clocks, lambda size: random[0].uniform(0.1, 1.0, size))
    expected = heard(clocks, lambda size: random[1].uniform(0.1, 1.0, size), algorithm)
    assert found.tolist() == pytest.approx(expected)


@both
@pytest.mark.parametrize("count", [2, 3, 6, 8, 13])
def test_nobody_has_the_sum_before_the_last_has_begun(count, algorithm):
    for late in range(count):
        clocks = np.zeros(count)
        clocks[late] = 100.0
        found = model.EXCHANGES[algorithm](clocks, lambda size: np.full(size, 1e-3))
        assert (found[np.arange(count) != late] > 100).all()


@both
def test_wider_networks_are_faster(algorithm):
    seconds = [
        model.simulated(WORK, dataclasses.replace(CLUSTER, bandwidth=rate, spread=0.1), 24, algorithm).collective
        for rate in (1e5, 1e6, 1e7, 1e9, math.inf)
    ]
    assert all(slow > fast for slow, fast in itertools.pairwise(seconds))


@both
def test_latency_spread_and_jitter_cost_time(algorithm):
    for field, values in (("latency", (0.0, 1e-6, 1e-4)), ("spread", (0.0, 0.05, 0.5)), ("jitter", (0.0, 0.2, 0.8))):
        seconds = [
            model.simulated(WORK, dataclasses.replace(CLUSTER, **{field: value}), 64, algorithm).total
            for value in values
        ]
        assert seconds == sorted(set(seconds)), field


def test_without_a_network_the_slowest_of_all_is_waited_for():
    silent = Cluster("silent", 1e9, 1e10, 0.0, math.inf, spread=0.05)
    found = [model.simulated(WORK, silent, 1000, "doubling", evaluations=1, seed=seed) for seed in range(40)]
    local = model.local_seconds(WORK, silent, 1000)
    waits = statistics.mean(seconds.collective for seconds in found) / local
    # Blom (1958): the largest of n normal numbers is near the quantile (n - .375) / (n + .25).
    sigma = math.sqrt(math.log1p(0.05**2))
    largest = math.exp(sigma * statistics.NormalDist().inv_cdf((1000 - 0.375) / 1000.25) - sigma**2 / 2)
    assert waits == pytest.approx(largest - 1, rel=0.05)
    assert statistics.mean(seconds.local for seconds in found) == pytest.approx(local, rel=0.01)


def test_a_seed_is_one_simulation():
    first, again, other = (model.simulated(WORK, ASSUMED[0], 8, "ring", seed=seed) for seed in (1, 1, 2))
    assert first == again != other


# ------------------------------------------------------------------ fit


def test_a_fit_finds_the_cluster_that_was_measured():
    works = [Work(64, 200_000, 64), Work(64, 20_000, 64), Work(1, 200_000, 64)]
    true = Cluster("true", 6e10, 1.3e10, 5e-5, 2e9, 4e-4)
    alone = [(work, model.local_seconds(work, true, 1)) for work in works]
    rings = [
        (size, count, model.all_reduce_seconds("ring", size, count, true)) for size in (1e3, 1e7) for count in (2, 4)
    ]
    found = model.fitted(alone, rings, "true")
    assert dataclasses.astuple(found)[1:] == pytest.approx(dataclasses.astuple(true)[1:])


def test_noise_makes_no_parameter_negative():
    alone = [(Work(64, 200_000, 64), 0.05), (Work(64, 20_000, 64), 0.003), (Work(1, 200_000, 64), 0.004)]
    found = model.fitted(alone, [(280.0, 2, 1.5e-3), (280_000.0, 2, 1.3e-3)], "noisy")
    assert all(value > 0 for value in (found.flops, found.memory, found.latency, found.bandwidth))
    assert found.fixed >= 0
    assert found.latency == pytest.approx(7e-4, rel=0.1)


def test_what_is_drawn_has_the_mean_one_and_its_deviation():
    drawn = model._around_one(np.random.default_rng(0), 0.5, 400_000)
    assert (drawn.mean(), drawn.std()) == pytest.approx((1, 0.5), rel=0.01)

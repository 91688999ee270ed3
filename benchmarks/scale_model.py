"""The costs of an evaluation over sharded keys: formulas, and a simulation of processes that wait for each other.

Nothing here was measured. A `Cluster` holds numbers of a machine and its network, which are assumed (`ASSUMED`) or were
fitted to a measured run (`fitted`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Algorithm = Literal["ring", "doubling"]
#: Bytes of a number in float32.
NUMBER = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """N queries over M keys of dimension D, which all processes hold together.

    extra: numbers that a query sends beside its D of the mean; collectives: all-reduces of an evaluation.
    """

    queries: int
    keys: int
    dim: int
    extra: int = 2
    collectives: int = 1

    @property
    def flops(self) -> float:
        """Return the operations of one evaluation in all processes: scores and their mean take 2 N M D each."""
        return 4.0 * self.queries * self.keys * self.dim

    @property
    def key_bytes(self) -> float:
        return float(NUMBER * self.keys * self.dim)

    @property
    def message_bytes(self) -> float:
        """Return the bytes of one all-reduce."""
        return float(NUMBER * self.queries * (self.dim + self.extra))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process, and the network between two of them.

    flops: a second, of one process; memory: bytes a second at which it reads keys; fixed: seconds of an evaluation that
    no size changes; latency: seconds of an empty message; bandwidth: bytes a second between two processes; spread,
    jitter: standard deviation of the time for the same local work, and of latency, over their means.
    """

    name: str
    flops: float
    memory: float
    latency: float
    bandwidth: float
    fixed: float = 0.0
    spread: float = 0.0
    jitter: float = 0.0


#: Assumed, not measured: what such machines sustain, in round numbers.
ASSUMED = (
    Cluster("servers with 32 cores, Ethernet 10 Gbit/s", 1e12, 1e11, 3e-5, 1.25e9, 1e-3, 0.05, 0.5),
    Cluster("GPUs, InfiniBand 200 Gbit/s", 2e13, 2e12, 5e-6, 2.5e10, 2e-4, 0.05, 0.2),
)


def local_seconds(work: Work, cluster: Cluster, processes: int) -> float:
    """Return the time of one evaluation over the keys of one process, which are read once."""
    return cluster.fixed + (work.flops / cluster.flops + work.key_bytes / cluster.memory) / processes


def steps(algorithm: Algorithm, processes: int) -> int:
    """Messages that one process sends in turn in an all-reduce.

    ring: P - 1 to reduce and P - 1 to gather (Patarasuk and Yuan, 2009), which is what gloo does. doubling: log2 P
    exchanges of everything (Thakur, Rabenseifner and Gropp, 2005), and two more where P is no power of two; two
    processes do that.
    """
    if algorithm == "ring":
        return 2 * (processes - 1)
    whole = int(math.log2(processes))
    return whole + (0 if 2**whole == processes else 2)


def content_seconds(algorithm: Algorithm, size: float, processes: int, cluster: Cluster) -> float:
    """Return the time for the bytes of one message in an all-reduce of `size` bytes: in a ring a P-th part."""
    return size / (processes if algorithm == "ring" else 1) / cluster.bandwidth


def all_reduce_seconds(algorithm: Algorithm, size: float, processes: int, cluster: Cluster) -> float:
    """One all-reduce of `size` bytes that all processes begin together, by a network without jitter."""
    return steps(algorithm, processes) * (cluster.latency + content_seconds(algorithm, size, processes, cluster))


class Seconds(NamedTuple):
    """The times of one evaluation: the local work of a process in the mean, and the rest, partly waiting."""

    local: float
    collective: float

    @property
    def total(self) -> float:
        return self.local + self.collective


def predicted(work: Work, cluster: Cluster, processes: int, algorithm: Algorithm) -> Seconds:
    """By the formulas, where all processes are equally fast."""
    one = all_reduce_seconds(algorithm, work.message_bytes, processes, cluster)
    return Seconds(local_seconds(work, cluster, processes), work.collectives * one)


def simulated(
    work: Work, cluster: Cluster, processes: int, algorithm: Algorithm, *, evaluations: int = 4, seed: int = 0
) -> Seconds:
    """By the clocks of all processes: each takes its own time for its keys, and no message is read before it is sent.

    Local work and latencies are drawn, lognormal around their means. Without `spread` and `jitter` this is `predicted`.
    """
    random = np.random.default_rng(seed)
    mean = local_seconds(work, cluster, processes)
    content = content_seconds(algorithm, work.message_bytes, processes, cluster)

    def messages(count: int) -> Clocks:
        return cluster.latency * _around_one(random, cluster.jitter, count) + content

    clocks, local = np.zeros(processes), 0.0
    for _ in range(evaluations):
        spent = mean * _around_one(random, cluster.spread, processes)
        local += float(spent.mean()) / evaluations
        clocks = clocks + spent
        for _ in range(work.collectives):
            clocks = EXCHANGES[algorithm](clocks, messages)
    return Seconds(local, float(clocks.max()) / evaluations - local)


Clocks = npt.NDArray[np.float64]
#: Seconds of one message from each of so many processes.
Messages = Callable[[int], Clocks]


def _around_one(random: np.random.Generator, deviation: float, count: int) -> Clocks:
    """Lognormal numbers with mean 1."""
    if deviation == 0:
        return np.ones(count)
    sigma = math.sqrt(math.log1p(deviation**2))
    return np.exp(sigma * random.standard_normal(count) - sigma**2 / 2)


def _ring(clocks: Clocks, messages: Messages) -> Clocks:
    """Every process sends to the next one, and goes on when it has sent and has heard from the one before."""
    for _ in range(steps("ring", len(clocks))):
        sent = clocks + messages(len(clocks))
        clocks = np.maximum(sent, np.roll(sent, 1))
    return clocks


def _doubling(clocks: Clocks, messages: Messages) -> Clocks:
    """Pairs at distance 1, 2, 4, ... exchange; those beyond a power of two give theirs away first, and hear last."""
    count = 2 ** int(math.log2(len(clocks)))
    core, rest = clocks[:count].copy(), clocks[count:]
    core[: len(rest)] = np.maximum(core[: len(rest)], rest + messages(len(rest)))
    distance = 1
    while distance < count:
        sent = core + messages(count)
        core = np.maximum(sent, sent[np.arange(count) ^ distance])
        distance *= 2
    return np.concatenate([core, core[: len(rest)] + messages(len(rest))])


EXCHANGES: dict[Algorithm, Callable[[Clocks, Messages], Clocks]] = {"ring": _ring, "doubling": _doubling}


def fitted(
    evaluations: Iterable[tuple[Work, float]], all_reduces: Iterable[tuple[float, int, float]], name: str
) -> Cluster:
    """The cluster that measured times are nearest to, in relative least squares.

    Args:
        evaluations: seconds of evaluations in one process. What is fixed, computed and read is told apart if both
            the numbers of queries and those of keys differ.
        all_reduces: (bytes, processes, seconds) of all-reduces by rings, of at least two sizes.
        name: what to call it.
    """
    by_flop, by_key_byte, fixed = _nearest([(work.flops, work.key_bytes, 1.0, s) for work, s in evaluations])
    ring = [(steps("ring", count), size, count, s) for size, count, s in all_reduces]
    latency, by_byte = _nearest([(count_of, count_of * size / count, s) for count_of, size, count, s in ring])
    return Cluster(name, _rate(by_flop), _rate(by_key_byte), latency, _rate(by_byte), fixed)


def _nearest(points: Iterable[tuple[float, ...]]) -> list[float]:
    """Coefficients >= 0 whose sums over all but the last column are nearest to the last one, by relative errors."""
    from scipy.optimize import nnls

    *columns, seconds = np.array(list(points), dtype=float).T
    found, _ = nnls(np.stack([column / seconds for column in columns], axis=1), np.ones_like(seconds))
    return [float(value) for value in found]


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds else math.inf

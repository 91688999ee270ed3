"""Processes that differ where they must not: all of them raise, soon, and say what which of them had."""

import datetime
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import error_of, spawn, together
from torch import distributed

from implicit_attention import AnchoredEnergy, FailurePolicy, LogSumExp, solve
from implicit_attention.adjoints import Implicit, Phantom, Unrolled
from implicit_attention.distributed import ShardedLogSumExp
from implicit_attention.linear import CG
from implicit_attention.solvers import Anderson, Picard

KEYS, QUERIES, DIM = 9, 4, 5
#: All of a group raise within so many seconds.
SOON = 10.0


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def potential(rank, beta=0.5, dim=DIM, dtype=torch.float64, **given):
    return ShardedLogSumExp(random(KEYS, dim, seed=rank).to(dtype), beta, group=None, **given)


def found(rank, *, query=None, initial=None, anchor=0.5, phi=None, **options):
    query = random(QUERIES, DIM, seed=7) if query is None else query
    energy = AnchoredEnergy(potential(rank) if phi is None else phi, query, anchor)
    return solve(energy, query if initial is None else initial, **options)


def moved(odd):
    """Queries, one number of which is larger by 1e-3 in the odd process."""
    query = random(QUERIES, DIM, seed=7)
    query[1, 2] += 1e-3 * odd
    return query


def by_a_bit(odd):
    query = random(QUERIES, DIM, seed=7)
    query[3, 4] = torch.nextafter(query[3, 4], query[3, 4] + odd)
    return query


def large(rank, odd, place=(0, 0), lies=lambda query: query):
    """A solve of so many numbers that they are compared in parts; one of them is another in the odd process."""
    query = torch.arange(1500 * 1000).reshape(1500, 1000).remainder(7).double()
    query[place] += odd
    phi = potential(rank, dim=1000)
    return found(rank, query=lies(query), phi=phi, solver=Picard(max_steps=1), on_failure="ignore")


def drifting(rank, odd):
    """A map that is not the same in all processes, so that only states inside the solve tell."""
    phi, query = potential(rank), random(QUERIES, DIM, seed=7)

    class Drifting(AnchoredEnergy):
        energy = AnchoredEnergy.energy

        def fixed_point_map(self, z):
            return super().fixed_point_map(z) + 1e-3 * odd

    return solve(Drifting(phi, query, 0.5), query, solver=Picard())


def backward(rank, odd, weight):
    query = random(QUERIES, DIM, seed=7).requires_grad_()
    (weight * found(rank, query=query, initial=query.detach()).value).sum().backward()


def forgotten(rank, odd):
    query = random(QUERIES, DIM, seed=7).requires_grad_()
    value = found(rank, query=query, initial=query.detach()).value
    if odd:
        return found(rank)
    return value.sum().backward()


def with_gradient(rank, odd):
    return found(rank, query=random(QUERIES, DIM, seed=7).requires_grad_(not odd))


#: At the ends of both parts of many numbers.
PLACES = ((0, 0), (749, 999), (750, 0), (1499, 999))
#: What the odd process (1 there, 0 in the others) does otherwise, and the argument that the error names.
VIOLATIONS = {
    "query": (lambda r, odd: found(r, query=moved(odd)), "field"),
    "last bit of the query": (lambda r, odd: found(r, query=by_a_bit(odd)), "field"),
    **{f"number {place} of many": (partial(large, place=place), "field") for place in PLACES},
    "initial state": (lambda r, odd: found(r, initial=moved(odd)), "initial"),
    "number of queries": (lambda r, odd: found(r, query=random(QUERIES + odd, DIM, seed=7)), "field"),
    "axes of the query": (lambda r, odd: found(r, query=random(*(1,) * odd, QUERIES, DIM, seed=7)), "field"),
    "dimension of the query": (lambda r, odd: found(r, query=random(QUERIES, DIM + odd, seed=7)), "field"),
    "shape of the start": (lambda r, odd: found(r, initial=random(QUERIES + odd, DIM, seed=7)), "initial"),
    "no tensor": (lambda r, odd: found(r, query="query" if odd else None), "field"),
    "dtype of the query": (
        lambda r, odd: found(r, query=random(QUERIES, DIM, seed=7).to((torch.float64, torch.float32)[odd])),
        "field",
    ),
    "dtype of the keys": (lambda r, odd: potential(r, dtype=(torch.float64, torch.float32)[odd]), "keys"),
    "dimension of the keys": (lambda r, odd: potential(r, dim=DIM + odd), "keys"),
    "beta": (lambda r, odd: potential(r, beta=0.5 + 1e-3 * odd), "beta"),
    "beta that is no number": (lambda r, odd: potential(r, beta=(0.5, -1.0)[odd]), "arguments"),
    "mask that does not fit": (lambda r, odd: potential(r, mask=torch.ones(KEYS + odd) > 0), "arguments"),
    "anchor": (lambda r, odd: found(r, anchor=0.5 + 1e-3 * odd), "anchor"),
    "tolerance": (lambda r, odd: found(r, solver=Anderson(rtol=(1e-4, 1e-9)[odd])), "solver"),
    "budget": (lambda r, odd: found(r, solver=Anderson(max_steps=(200, 1)[odd]), on_failure="ignore"), "solver"),
    "method": (lambda r, odd: found(r, solver=(Anderson(), Picard())[odd]), "solver"),
    "adjoint": (lambda r, odd: found(r, adjoint=(None, Phantom())[odd]), "adjoint"),
    "linear solver": (lambda r, odd: found(r, adjoint=Implicit(CG(rtol=(1e-8, 1e-9)[odd]))), "adjoint"),
    "trace": (lambda r, odd: found(r, trace=bool(odd)), "trace"),
    "what is done about failures": (
        lambda r, odd: found(r, solver=Anderson(max_steps=1), on_failure=("ignore", "raise")[odd]),
        "on_failure",
    ),
    "a policy": (
        lambda r, odd: found(r, on_failure=(FailurePolicy(tolerate=0.1), FailurePolicy(tolerate=0.2))[odd]),
        "on_failure",
    ),
    "gradient": (with_gradient, "requires_grad of any tensor"),
    "map": (drifting, "state"),
    "rows of one evaluation": (lambda r, odd: potential(r).mean(random(QUERIES + odd, DIM, seed=7)), "z"),
    "numbers of one evaluation": (lambda r, odd: potential(r).mean(moved(odd)), "state"),
    "operation": (
        lambda r, odd: potential(r).readout(moved(0), random(KEYS, 3, seed=r)) if odd else potential(r).mean(moved(0)),
        "operation",
    ),
    "width of the values": (lambda r, odd: potential(r).readout(moved(0), random(KEYS, 3 + odd, seed=r)), "operation"),
    "loss": (lambda r, odd: backward(r, odd, 1.0 + 1e-3 * odd), "state"),
    "backward pass of some": (forgotten, ("operation", "arguments")),
}
REFUSED = {
    "second order": "first order",
    "second order of a read-out": "first order",
    "unrolled": "Unrolled",
    "vmap": "torch.func",
    "forward mode": "forward mode",
    "torch.func.grad": "torch.func",
    "dropout": "dropout_p",
    "weights": "probabilities",
}


def refused(rank, case):
    phi, z = potential(rank), random(QUERIES, DIM, seed=7)
    if case == "second order":
        query = z.clone().requires_grad_()
        value = found(rank, query=query, initial=z).value
        torch.autograd.grad(value.sum(), query, create_graph=True)
    elif case == "second order of a read-out":
        query = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(phi.readout(query, phi.keys).square().sum(), query, create_graph=True)
        gradient.sum().backward()
    elif case == "unrolled":
        found(rank, query=z.clone().requires_grad_(), initial=z, adjoint=Unrolled())
    elif case == "vmap":
        torch.vmap(phi.mean)(z.expand(3, -1, -1))
    elif case == "forward mode":
        torch.func.jvp(phi.mean, (z,), (z,))
    elif case == "torch.func.grad":
        torch.func.grad(lambda z: phi.value(z).sum())(z)
    elif case == "dropout":
        phi.readout(z, phi.keys, dropout_p=0.5)
    else:
        phi.probabilities(z.requires_grad_()).sum().backward()


def disagree(rank):
    """(error, seconds) of each violation, and whether the group solves as before after all of them."""
    last = distributed.get_world_size() - 1
    told = {}
    for case, (call, _) in VIOLATIONS.items():
        start = time.monotonic()
        error = error_of(partial(call, rank, int(rank == last)))
        told[case] = error, time.monotonic() - start
    for case in REFUSED:
        told[case] = error_of(partial(refused, rank, case)), 0.0
    # The same numbers may lie otherwise.
    large(rank, 0, lies=(lambda query: query.mT.contiguous().mT) if rank == last else torch.clone)
    unrolled = found(rank, adjoint=Unrolled(), solver=Picard(max_steps=3, rtol=0, atol=0)).value
    return told, found(rank).value, unrolled


@pytest.fixture(scope="module", params=(2, 3))
def told(request):
    return together(disagree, request.param)


@pytest.mark.by_name(slow=r"\[3")
def test_every_violation_is_told_by_all(told):
    wrong = []
    for case, (_, arguments) in VIOLATIONS.items():
        names = (arguments,) if isinstance(arguments, str) else arguments
        for rank, (answers, *_) in enumerate(told):
            error, seconds = answers[case]
            fits = error.startswith("LockStepError") and any(f"`{name}` must be the same" in error for name in names)
            fits = fits and f"rank {len(told) - 1}: " in error and "broadcast" in error and seconds < SOON
            wrong += [] if fits else [(case, rank, error, seconds)]
    assert not wrong


def test_what_has_no_derivative_is_refused(told):
    wrong = [
        (case, answers[case][0])
        for case, said in REFUSED.items()
        for answers, *_ in told
        if not (answers[case][0].startswith("UnsupportedImplementation") and said in answers[case][0])
    ]
    assert not wrong


def test_the_group_goes_on_after_errors(told):
    keys = torch.cat([random(KEYS, DIM, seed=rank) for rank in range(len(told))])
    query = random(QUERIES, DIM, seed=7)
    energy = AnchoredEnergy(LogSumExp(keys, 0.5), query, 0.5)
    truth = solve(energy, query).value
    steps = solve(energy, query, solver=Picard(max_steps=3, rtol=0, atol=0), adjoint=Unrolled()).value
    for _, value, unrolled in told:
        torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(unrolled, steps, rtol=1e-12, atol=1e-12)


def one_is_killed(rank, folder):
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=20)
    )
    phi, query = potential(rank), random(QUERIES, DIM, seed=7)

    def ends(step, residual, active):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    energy = AnchoredEnergy(phi, query, 0.1)
    error = error_of(lambda: solve(energy, query, solver=Picard(rtol=1e-12), callback=ends))
    Path(folder, f"{rank}.txt").write_text(error)
    # Left as it is: what is destroyed would wait for the process that has ended.
    os._exit(0)


def test_a_killed_process_ends_the_others_with_a_sentence():
    with tempfile.TemporaryDirectory() as folder:
        context = spawn(one_is_killed, (folder,), 3, join=False)
        start = time.monotonic()
        for process in context.processes:
            process.join(60)
        assert time.monotonic() - start < 45
        assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL, 0]
        for rank in (0, 2):
            error = Path(folder, f"{rank}.txt").read_text()
            assert error.startswith(f"LockStepError: process {rank} of 3 lost the others"), error
            assert "start all of them anew" in error

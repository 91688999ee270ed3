"""Spins on graphs: `python -m benchmarks.spin_graphs SETTING` measures one setting in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicit_attention import Picard
from implicit_attention.spins import TAP, Bethe, Bonds, MeanField, SpinSystem, magnetization

from .measure import apart
from .memory import begin, peak
from .spin_problems import OnGraph, graph_system
from .spin_scaling import statuses
from .targets import Row

BETHE, BATCH, PGMAX = "Bethe()", "batch", "pgmax"
#: Steps of pgmax in one call, so that the call itself costs little.
STEPS = 60
METHODS = {"MeanField()": MeanField(), "TAP()": TAP()}


def settings(*, quick: bool) -> tuple[OnGraph, ...]:
    if quick:
        return OnGraph(BETHE, 100, "regular"), OnGraph("MeanField()", 100), OnGraph(BATCH, 60, "regular", batch=3)
    lattices = (OnGraph(BETHE, 45**2), OnGraph(BETHE, 100**2), OnGraph(BETHE, 316**2), OnGraph(BETHE, 1000**2))
    loose = (OnGraph(BETHE, 1000**2, rtol=1e-6), OnGraph(BETHE, 1000**2, rtol=1e-6, dtype="float32"))
    random = (OnGraph(BETHE, 10**5, "regular", beta=0.5), OnGraph(BETHE, 10**5, "regular", beta=1.0))
    large = tuple(OnGraph(method, 1000**2, beta=0.2) for method in METHODS)
    peer = (OnGraph(PGMAX, 316**2, rtol=1e-6, dtype="float32"),) if importlib.util.find_spec("pgmax") else ()
    return (*lattices, *loose, *random, *large, OnGraph(BATCH, 200, "regular", beta=0.5, batch=64), *peer)


def measured(setting: OnGraph, *, repeats: int, max_seconds: float) -> dict[str, Any]:
    """The row of one setting; large ones in a process of their own, whose resident set is theirs."""
    if setting.sites < 10**4:
        return found(setting, repeats=repeats, max_seconds=max_seconds)
    options = {"repeats": repeats, "max_seconds": max_seconds}
    return apart("benchmarks.spin_graphs", json.dumps(dataclasses.asdict(setting)), json.dumps(options))


def found(setting: OnGraph, *, repeats: int, max_seconds: float) -> dict[str, Any]:
    """Evidence, seconds and ratios of one setting."""
    system = graph_system(setting)
    make = {BATCH: _of_batch, BETHE: _of_bethe, PGMAX: _of_pgmax}.get(setting.method, _of_products)
    found = make(setting, system, lambda call: _seconds(call, repeats, max_seconds))
    return {**dataclasses.asdict(setting), **found}


def _of_bethe(setting: OnGraph, system: SpinSystem, clock: Callable[[Callable[[], Any]], dict[str, Any]]) -> Row:
    """Magnetizations by Newton's steps and by plain ones, a sweep, a gradient, and the memory of the first."""
    method, plain = Bethe(rtol=setting.rtol), Bethe(solver=Picard(rtol=setting.rtol, atol=1e-14, max_steps=2000))
    before = begin("cpu")
    m, answer = magnetization(system, method, return_answer=True, on_failure="ignore")
    bytes_needed = peak("cpu") - before
    problem, state = method.problem(system), answer.state
    field, values = (t.clone().requires_grad_() for t in (system.field, system.couplings))
    assert system.graph is not None

    def training() -> None:
        solved = magnetization(system.at(field, values, system.beta), method, on_failure="ignore")
        torch.autograd.grad((solved * m).sum(), (field, values))

    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: magnetization(system, method, on_failure="ignore"),
        "plain": lambda: magnetization(system, plain, on_failure="ignore"),
        "training": training,
        "sweep": lambda: problem.fixed_point_map(state),
        "numpy sweep": _numpy_sweep(problem, state),
    }
    seconds = {name: clock(call) for name, call in calls.items()}
    median = {name: timing["median"] for name, timing in seconds.items()}
    report, swept = answer.report, magnetization(system, plain, return_answer=True, on_failure="ignore")[1].report
    apart_by = float((torch.as_tensor(calls["numpy sweep"]()) - problem.fixed_point_map(state)).abs().max())
    evidence: dict[str, Any] = {
        "residual": float(report.residual.max()),
        "status": statuses(report.status),
        "evaluations": int(report.num_evals.max()),
        "plain evaluations": int(swept.num_evals.max()),
        "plain status": statuses(swept.status),
        "peak_bytes": bytes_needed,
        "sweeps apart by": apart_by,
    }
    settled = set(evidence["plain status"]) == {"CONVERGED"}
    ratios = {
        "seconds": median["forward"],
        "plain seconds": median["plain"] if settled else None,
        "sweep / numpy": median["sweep"] / median["numpy sweep"] if apart_by < 1e-4 else None,
        "gradient / forward": median["training"] / median["forward"] - 1,
        "GB": bytes_needed / 1e9,
    }
    failed = any(name != "CONVERGED" for name in evidence["status"])
    return {"evidence": evidence, "seconds": seconds, "ratios": dict.fromkeys(ratios) if failed else ratios}


def _numpy_sweep(problem: Any, state: Tensor) -> Callable[[], Any]:
    """One step of messages in NumPy, of what does not change as much prepared as there is."""
    ends, u = problem.graph.ends.numpy(), state.numpy()
    field, strength = problem.field.numpy(), np.tanh(problem.bonds.numpy())

    def sweep() -> Any:
        into = u[::-1]
        total = field + np.bincount(ends.ravel(), weights=into.ravel(), minlength=len(field)).astype(field.dtype)
        return np.arctanh(strength * np.tanh(total[ends] - into))

    return sweep


def _of_products(setting: OnGraph, system: SpinSystem, clock: Callable[[Callable[[], Any]], dict[str, Any]]) -> Row:
    """A forward over as many products of torch's sparse matrices as its evaluations make."""
    method = METHODS[setting.method]
    answer = magnetization(system, method, return_answer=True, on_failure="ignore")[1]
    count, graph = int(answer.report.num_evals.max()), system.graph
    assert graph is not None
    (i, j), values, sites = graph.ends, system.couplings, system.num_sites
    places = torch.stack([torch.cat([i, j]), torch.cat([j, i])])
    one = torch.sparse_coo_tensor(places, values.repeat(2), (sites, sites)).coalesce().to_sparse_csr()
    # Second order has a product with the squares, too.
    matrices = [one] if setting.method == "MeanField()" else [one, one]
    vector = system.field[:, 0]

    def products() -> None:
        for _ in range(count):
            for matrix in matrices:
                matrix @ vector

    calls = {"forward": lambda: magnetization(system, method, on_failure="ignore"), "products": products}
    seconds = {name: clock(call) for name, call in calls.items()}
    status = statuses(answer.report.status)
    ratio = seconds["forward"]["median"] / seconds["products"]["median"]
    return {
        "evidence": {"evaluations": count, "status": status, "residual": float(answer.report.residual.max())},
        "seconds": seconds,
        "ratios": {"forward / products": ratio if set(status) == {"CONVERGED"} else None},
    }


def _of_batch(setting: OnGraph, system: SpinSystem, clock: Callable[[Callable[[], Any]], dict[str, Any]]) -> Row:
    """Graphs of one batch over the same one after the other."""
    graph = system.graph
    assert graph is not None
    parts = [
        SpinSystem(Bonds(ends.mT, values, setting.sites), field, setting.beta)
        for ends, values, field in zip(graph.ends, system.couplings, system.field, strict=True)
    ]
    method = Bethe(rtol=setting.rtol)
    calls = {
        "batch": lambda: magnetization(system, method, on_failure="ignore"),
        "one by one": lambda: torch.stack([magnetization(part, method, on_failure="ignore") for part in parts]),
    }
    difference = float((calls["batch"]() - calls["one by one"]()).abs().max())
    seconds = {name: clock(call) for name, call in calls.items()}
    ratio = seconds["batch"]["median"] / seconds["one by one"]["median"]
    right = difference < 1e3 * setting.rtol
    return {
        "evidence": {"apart by": difference},
        "seconds": seconds,
        "ratios": {"batch / one by one": ratio if right else None},
    }


def _of_pgmax(setting: OnGraph, system: SpinSystem, clock: Callable[[Callable[[], Any]], dict[str, Any]]) -> Row:
    """A step of messages over pgmax's, of many that it makes in one call."""
    from pgmax import fgraph, fgroup, infer, vgroup

    graph, spin = system.graph, np.array([1.0, -1.0])
    assert graph is not None
    variables = vgroup.NDVarArray(num_states=2, shape=(setting.sites,))
    factors = fgraph.FactorGraph(variable_groups=variables)
    strength = setting.beta * system.couplings.numpy()[:, None, None] * np.outer(spin, spin)
    pairs = [[variables[i], variables[j]] for i, j in graph.ends.mT.tolist()]
    factors.add_factors(fgroup.PairwiseFactorGroup(variables_for_factors=pairs, log_potential_matrix=strength))
    inferer = infer.build_inferer(factors.bp_state, backend="bp")
    begun = inferer.init(evidence_updates={variables: setting.beta * system.field.numpy() * spin})

    def steps() -> Any:
        found = inferer.run(begun, num_iters=STEPS, damping=0.0, temperature=1.0)
        found.ftov_msgs.block_until_ready()
        return found

    m, answer = magnetization(system, Bethe(rtol=setting.rtol), return_answer=True, on_failure="ignore")
    problem, state = Bethe().problem(system), answer.state
    calls = {"sweep": lambda: problem.fixed_point_map(state), "pgmax": steps}
    seconds = {name: clock(call) for name, call in calls.items()}
    up, down = np.moveaxis(np.asarray(infer.get_marginals(inferer.get_beliefs(steps()))[variables]), -1, 0)
    difference = float(np.abs(up - down - m.numpy()[:, 0]).max())
    ratio = STEPS * seconds["sweep"]["median"] / seconds["pgmax"]["median"]
    return {
        "evidence": {"apart by": difference, "residual": float(answer.report.residual.max())},
        "seconds": seconds,
        "ratios": {"sweep / pgmax": ratio if difference < 1e-4 else None},
    }


def _seconds(call: Callable[[], Any], repeats: int, max_seconds: float) -> dict[str, Any]:
    """Of several calls, two at least, after a first that warms up."""
    turns: list[float] = []
    while len(turns) < 3 or (len(turns) <= repeats and sum(turns) < max_seconds):
        start = time.perf_counter()
        call()
        turns.append(time.perf_counter() - start)
    turns = turns[1:]
    return {"median": statistics.median(turns), "low": min(turns), "high": max(turns), "turns": len(turns)}


if __name__ == "__main__":
    print(json.dumps(found(OnGraph(**json.loads(sys.argv[1])), **json.loads(sys.argv[2]))))

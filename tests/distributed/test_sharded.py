"""Keys that are spread over processes: the answers of one process that holds them all, on every process."""

from functools import partial

import pytest
import torch
from processes import together
from torch import distributed

from implicit_attention import AnchoredEnergy, LogSumExp, MemoryLookup, equilibrium_attention, solve
from implicit_attention.adjoints import Implicit, OneStep, Phantom
from implicit_attention.distributed import ShardedLogSumExp
from implicit_attention.linear import CG
from implicit_attention.solvers import Anderson, NewtonKrylov, Picard

KEYS = 12
#: How many keys each process holds, by the number of processes.
SPLITS = {
    2: {"even": (6, 6), "uneven": (11, 1), "empty": (12, 0)},
    3: {"even": (4, 4, 4), "uneven": (7, 2, 3), "empty": (0, 5, 7)},
    4: {"even": (3, 3, 3, 3), "uneven": (1, 6, 2, 3), "empty": (0, 12, 0, 0)},
}
#: The axis of what belongs to the local keys, in gradients and outputs.
AXES = {"keys": -2, "values": -2, "bias": -1, "weights": -1}
TIGHT = {torch.float64: Anderson(rtol=1e-10), torch.float32: Anderson(rtol=1e-5)}


def random(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def gradients(loss, **leaves):
    loss.backward()
    return {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def weighted(out):
    return (out * torch.arange(1.0, out.numel() + 1).to(out).view(out.shape).sin()).sum()


def solved(make, part, dtype, *, masked=False, adjoint=None, solver=None, layout=lambda t: t):
    """States and gradients of all that an energy reads, with heads, a temperature per head, mask and bias."""
    keys = leaf(part(random(2, 3, KEYS, 5, seed=1, dtype=dtype), -2))
    query, beta = leaf(random(2, 3, 4, 5, seed=2, dtype=dtype)), leaf(torch.tensor([0.3, 0.5, 0.7], dtype=dtype))
    anchor, pairs, leaves = torch.tensor([0.4, 0.5, 0.6], dtype=dtype), {}, {}
    # Where the map contracts well, one process knows its float32 gradients to 1e-5 itself.
    anchor = leaf(anchor if dtype == torch.float64 else anchor + 0.3)
    if masked:
        mask = random(3, 4, KEYS, seed=3) > 0
        mask[:, 1] = False  # attends to nothing
        leaves = {"bias": leaf(part(random(2, 1, 1, KEYS, seed=4, dtype=dtype), -1))}
        pairs = {"mask": part(mask, -1)} | leaves
    energy = AnchoredEnergy(make(layout(keys), beta, **pairs), layout(query), anchor)
    if dtype == torch.float32:
        # By default the gradient itself is known to 1e-5.
        adjoint = Implicit(CG(rtol=1e-6))
    found = solve(energy, layout(query).detach(), solver=solver or TIGHT[dtype], adjoint=adjoint, on_failure="raise")
    leaves |= {"keys": keys, "query": query, "beta": beta, "anchor": anchor}
    result = {"state": found.value.detach(), "evaluations": found.num_evals, "status": found.status}
    return result | gradients(weighted(found.value), **leaves)


def transposed(t):
    return t.mT.contiguous().mT


def strided(t):
    return torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(-2)[..., ::2]


def expanded(make, part, dtype):
    """One memory for all samples and heads, and the same query in each sample."""
    keys, query = leaf(part(random(KEYS, 5, seed=1), -2)), leaf(random(1, 1, 4, 5, seed=2))
    out = make(keys.expand(2, 1, -1, -1), 0.5).mean(query.expand(2, 3, -1, -1))
    return {"mean": out.detach()} | gradients(weighted(out), keys=keys, query=query)


def three_numbers(make, part, dtype):
    """Value, mean, products and what is read out beside them, with first derivatives of each."""
    keys, values = leaf(part(random(KEYS, 5, seed=1), -2)), leaf(part(random(2, KEYS, 3, seed=6), -2))
    z, beta, bias = (
        leaf(random(2, 4, 5, seed=2)),
        leaf(torch.tensor(0.8).double()),
        leaf(part(random(4, KEYS, seed=4), -1)),
    )
    phi = make(keys, beta, bias=bias)
    value, mean = phi.evaluate(z)
    out, logsumexp = phi.readout_with_logsumexp(z, values)
    with torch.no_grad():
        more = {"value again": phi.value(z), "mean again": phi.mean(z), "weights": phi.probabilities(z)}
        more["product"] = phi.covariance_product(z, random(2, 4, 5, seed=7))
        more["readout"] = phi.readout(z, values)
    loss = weighted(value) + weighted(mean) + weighted(out) + weighted(logsumexp)
    numbers = {"value": value, "mean": mean, "out": out, "logsumexp": logsumexp}
    numbers = {name: t.detach() for name, t in numbers.items()}
    return numbers | more | gradients(loss, keys=keys, values=values, z=z, beta=beta, bias=bias)


def attention(make, part, dtype, max_steps=None):
    """Grouped heads that read values which lie beside the keys."""
    query, scale = leaf(random(2, 4, 3, 5, seed=2, dtype=dtype)), leaf(torch.tensor([0.2, 0.3, 0.4, 0.5], dtype=dtype))
    keys, values = (leaf(part(random(2, 2, KEYS, d, seed=d, dtype=dtype), -2)) for d in (5, 3))
    out, found = equilibrium_attention(
        query, keys, values, scale=scale, enable_gqa=True, potential=make, solver=TIGHT[dtype], max_steps=max_steps,
        return_solution=True, on_failure="raise",
    )  # fmt: skip
    leaves = {"query": query, "scale": scale, "keys": keys, "values": values}
    return {"out": out.detach(), "evaluations": found.num_evals} | gradients(weighted(out), **leaves)


def composed(make, part, dtype):
    """A weighted sum of two sets of keys, one of them read by a linear map."""
    first, second, query, matrix = (leaf(random(n, d, seed=n)) for n, d in ((KEYS, 5), (KEYS + 1, 3), (4, 5), (3, 5)))
    first, second = leaf(part(first, -2)), leaf(part(second[1:], -2))
    phi = 0.6 * make(first, 0.5) + make(second, 0.3).of(0.3 * matrix)
    found = solve(AnchoredEnergy(phi, query, 0.5), query.detach(), solver=TIGHT[dtype], on_failure="raise")
    result = {"state": found.value.detach(), "evaluations": found.num_evals}
    grads = gradients(weighted(found.value), keys=first, values=second, query=query, matrix=matrix)
    return result | grads


def memory(make, part, dtype):
    """Patterns with targets, of which each process stores its own."""
    patterns, targets = 2 * random(KEYS, 6, seed=1), random(KEYS, 2, seed=2)
    held = MemoryLookup(6, beta=1.0, potential=make, similarity="dot", solver=TIGHT[dtype], on_failure="raise").double()
    if len(part(patterns, 0)):
        held.store(part(patterns, 0), part(targets, 0))
    else:
        held.targets = targets[:0]
    query = patterns[:4] + random(4, 6, seed=3)
    return {"recalled": held.retrieve(query), "looked up": held(query), "energy": held.energy(query)[:2]}


def far_off(make, part, dtype):
    """Scores whose log-sum-exp moves by thousands within one step, beside queries where it is of size one."""
    keys, query = part(100 * random(KEYS, 5, seed=1, dtype=dtype), -2), 30 * random(6, 5, seed=2, dtype=dtype)
    query[0] = 0.0
    found = solve(
        AnchoredEnergy(make(keys, 2.0), query, 0.3), query, solver=Picard(rtol=1e-12 if dtype.itemsize > 4 else 1e-5)
    )
    return {"state": found.value, "evaluations": found.num_evals}


def many_rows(make, part, dtype):
    """So many queries that those which are done leave the solve, and that gradients are taken in tiles."""
    keys, query = leaf(part(random(KEYS, 5, seed=1), -2)), random(2500, 5, seed=2)
    query[:2000] = query[:1]
    query = leaf(query)
    found = solve(AnchoredEnergy(make(keys, 2.0), query, 0.1), query.detach(), solver=Picard(rtol=1e-12))
    result = {"state": found.value.detach(), "evaluations": found.num_evals}
    return result | gradients(found.value.square().sum(), keys=keys, query=query)


def spoiled(make, part, dtype):
    """A NaN in one key: the queries that attend to it have no answer, in all processes; the others do."""
    keys, mask = random(KEYS, 5, seed=1), torch.ones(4, KEYS, dtype=torch.bool)
    keys[-1, 0] = torch.nan
    mask[2:, -1] = False
    query = random(4, 5, seed=2)
    result = {}
    for name, given in (("all", {}), ("some", {"mask": part(mask, -1)})):
        energy = AnchoredEnergy(make(part(keys, -2), 0.5, **given), query, 0.5)
        found = solve(energy, query, solver=TIGHT[dtype], on_failure="ignore")
        result |= {f"{name} status": found.status, f"{name} state": found.value}
    return result


def many_weights(make, part, dtype):
    """So many weights that they are computed again for every product, in tiles."""
    keys, bias = leaf(part(random(6200, KEYS, 2, seed=1), -2)), leaf(part(random(6200, KEYS, seed=4), -1))
    z = leaf(random(256, 2, seed=2))
    phi = make(keys.flatten(0, 1), 0.5, bias=bias.flatten())
    with torch.no_grad():
        product = phi.covariance_product(z, random(256, 2, seed=7))
    mean = phi.mean(z)
    return {"product": product, "mean": mean.detach()} | gradients(weighted(mean), keys=keys, bias=bias, z=z)


CASES = {
    "solved": solved,
    "masked": partial(solved, masked=True),
    "transposed": partial(solved, layout=transposed),
    "strided": partial(solved, layout=strided),
    "many weights": many_weights,
    "one step": partial(solved, adjoint=OneStep()),
    "phantom": partial(solved, adjoint=Phantom(3)),
    "fallback": partial(solved, adjoint=Implicit(fallback=Phantom(2))),
    "newton": partial(solved, solver=NewtonKrylov(rtol=1e-10)),
    "expanded": expanded,
    "three numbers": three_numbers,
    "attention": attention,
    "explicit": partial(attention, max_steps=0),
    "composed": composed,
    "memory": memory,
    "far off": far_off,
    "many rows": many_rows,
    "spoiled": spoiled,
}
#: Those that run on every split and in float32, too.
EVERYWHERE = ("solved", "masked", "three numbers", "attention", "memory", "spoiled")
SINGLE = ("solved", "masked", "attention", "far off")


def asked(count):
    """(case, split, dtype) for so many processes."""
    cases = EVERYWHERE if count < 4 else ("masked", "attention")
    rows = [(case, split, torch.float64) for split in SPLITS[count] for case in cases]
    if count == 2:
        rows += [(case, "uneven", torch.float64) for case in CASES if case not in EVERYWHERE]
    return rows + [(case, "uneven", torch.float32) for case in SINGLE if count < 4 or case == "masked"]


def ask(rank, count):
    """The answers of one process."""
    sizes = SPLITS[count]
    answers = {}
    for case, split, dtype in asked(count):
        start = sum(sizes[split][:rank])
        part = lambda t, axis, start=start, size=sizes[split][rank]: t.narrow(axis, start, size)  # noqa: E731
        answers[case, split, dtype] = CASES[case](partial(ShardedLogSumExp, group=None), part, dtype)
    start, size = rank * 60 // count, (rank + 1) * 60 // count - rank * 60 // count
    answers["counted"] = counted(lambda t, axis: t.narrow(axis, start, size))
    return answers


def counted(part):
    """Of solves with N queries: N, the bytes of each sum before and in evaluations, and in the products behind them."""
    found = {}
    for case, count, scale, beta in (("plain", 64, 1.0, 0.3), ("far off", 16, 10.0, 1.0), ("single", 1, 1.0, 0.3)):
        calls, evaluations = [], []

        def counting(collective, at, calls=calls):
            def call(*tensors, **options):
                calls.append(tensors[at].nbytes)
                return collective(*tensors, **options)

            return call

        def told(step, residual, active, calls=calls, evaluations=evaluations):
            evaluations.append([*calls])
            calls.clear()

        reduce, gather = distributed.all_reduce, distributed.all_gather
        distributed.all_reduce, distributed.all_gather = counting(reduce, 0), counting(gather, 1)
        try:
            keys, query = (scale * random(n, 32, seed=i, dtype=torch.float32) for i, n in enumerate((60, count)))
            query = query.requires_grad_(case == "plain")
            energy = AnchoredEnergy(ShardedLogSumExp(part(keys, -2), beta, group=None), query, 0.5)
            value = solve(energy, query.detach(), on_failure="ignore", callback=told).value
            found[case] = count, evaluations[0][:2], [evaluations[0][2:], *evaluations[1:]]
            if case == "plain":
                calls.clear()
                value.sum().backward()
                found["backward"] = count, calls, None
        finally:
            distributed.all_reduce, distributed.all_gather = reduce, gather
    return found


@pytest.fixture(scope="module", params=(2, 3, 4))
def answers(request):
    return together(ask, request.param, request.param)


@pytest.mark.by_name(slow=r"\[(3|4)")
def test_they_are_those_of_one_process(answers):
    count, wrong = len(answers), []
    for row in asked(count):
        case, split, dtype = row
        expected = CASES[case](LogSumExp, lambda t, _: t, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        for name, truth in expected.items():
            axis = AXES.get(name.removeprefix("gradient of "))
            held = [answer[row][name] for answer in answers]
            whole = held[0]
            if axis is not None:
                sizes = SPLITS[count][split]
                # No keys have no gradient.
                parts = [t.narrow(axis, 0, size) for t, size in zip(held, sizes, strict=True) if size]
                whole = torch.cat(parts, axis)
            else:
                for other in held[1:]:
                    assert torch.equal(other.nan_to_num(7.0), whole.nan_to_num(7.0)), (row, name)
            scale = truth.double().nan_to_num().abs().max().clamp(min=1.0) if truth.numel() else 1.0
            assert whole.shape == truth.shape, (row, name)
            off = float(((whole - truth).double() / scale).nan_to_num(0.0).abs().max())
            if not off <= tolerance or not torch.equal(whole.isnan(), truth.isnan()):
                wrong.append((row, name, off))
    assert not wrong


@pytest.mark.slow
def test_an_evaluation_is_one_sum_of_few_numbers(answers):
    """D = 32 numbers of 4 bytes a query; what is compared at the start is 4 numbers of 8 bytes, whatever there is."""
    for answer in answers:
        counts = answer["counted"]
        for case in ("plain", "single", "far off"):
            count, start, evaluations = counts[case]
            rows = 8 * -(-count // 8)  # what the loop pads to
            assert start == [32, 32], case
            assert len(evaluations) >= 2, case
            assert all(1 <= len(calls) <= 2 for calls in evaluations), (case, evaluations)
            assert all(max(calls) <= rows * (32 + 6) * 4 for calls in evaluations), (case, evaluations)
            assert all(sum(calls) <= rows * (32 + 6) * 4 for calls in evaluations) or case == "far off"
            if case != "far off":
                assert [len(calls) for calls in evaluations] == [2] + [1] * (len(evaluations) - 1), case
        assert any(len(calls) == 2 for calls in counts["far off"][2][1:]), "nothing was far off"
        count, calls, _ = counts["backward"]
        products = [size for size in calls if size == count * 32 * 4 + 16]
        assert len(products) >= 2
        assert sorted(set(calls) - set(products))[0] == 32
        assert len(calls) == len(products) + 3, calls  # a comparison, and one evaluation without a known shift

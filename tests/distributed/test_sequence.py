"""Attention over tokens that are spread over processes: the answer of one process, and its gradients."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from processes import error_of, together
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from implicit_attention import Anderson, equilibrium_attention
from implicit_attention.distributed import sequence_parallel

BATCH, HEADS, DIM = 2, 4, 8
TIGHT = {"solver": Anderson(rtol=1e-12, atol=1e-14)}
ANCHORS = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
#: case -> (dtype, heads of keys, options)
CASES = {
    "plain": (torch.float64, HEADS, TIGHT),
    "causal": (torch.float64, HEADS, {**TIGHT, "is_causal": True}),
    "explicit": (torch.float64, HEADS, {"max_steps": 0, "is_causal": True}),
    "single": (torch.float32, HEADS, {"is_causal": True}),
    "of each head": (torch.float64, HEADS, {**TIGHT, "anchor": ANCHORS, "scale": ANCHORS + 0.3}),
    "grouped": (torch.float64, 2, {**TIGHT, "enable_gqa": True, "is_causal": True}),
}
#: case -> tokens of two processes, and of four
PARTS = {"even": {2: [8, 8], 4: [4, 4, 4, 4]}, "uneven": {2: [5, 11], 4: [1, 7, 3, 5]}}
TOKENS = 16


def tensors(dtype, kv_heads):
    generator = torch.Generator().manual_seed(0)

    def drawn(heads, dim):
        # Not as it lies in memory: tokens before heads.
        return torch.randn(BATCH, TOKENS, heads, dim, dtype=dtype, generator=generator).transpose(1, 2)

    return [drawn(HEADS, DIM), drawn(kv_heads, DIM), drawn(kv_heads, 5)]


def answer(attention, whole, part, options):
    """Output and gradients of one process for its tokens, of a loss that weighs all of them differently."""
    leaves = [t[..., part, :].detach().requires_grad_() for t in whole]
    numbers = [o.clone().requires_grad_() for o in options.values() if isinstance(o, torch.Tensor)]
    given = dict(zip([n for n, o in options.items() if isinstance(o, torch.Tensor)], numbers, strict=True))
    output = attention(*leaves, **{**options, **given})
    weights = torch.arange(1.0, 1 + BATCH * HEADS * TOKENS * 5, dtype=output.dtype).view(BATCH, HEADS, TOKENS, 5)
    found = torch.autograd.grad((output * weights[..., part, :]).sum(), [*leaves, *numbers])
    return [output.detach(), *found]


class Counted:
    """How many collectives are called."""

    NAMES = ("all_reduce", "all_gather", "all_to_all_single", "all_gather_object")

    def __enter__(self):
        self.count, self.saved = 0, {name: getattr(distributed, name) for name in self.NAMES}
        for name, collective in self.saved.items():
            setattr(distributed, name, self.counting(collective))
        return self

    def counting(self, collective):
        def call(*arguments, **options):
            self.count += 1
            return collective(*arguments, **options)

        return call

    def __exit__(self, *error):
        for name, collective in self.saved.items():
            setattr(distributed, name, collective)


def part_of(lengths, rank):
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def work(rank):
    size, found = distributed.get_world_size(), {}
    for exchange in ("heads", "keys"):
        for case, (dtype, kv_heads, options) in CASES.items():
            if exchange == "heads" and kv_heads % size:
                continue
            for parts, lengths in PARTS.items():
                attention = sequence_parallel(equilibrium_attention, exchange=exchange)
                part = part_of(lengths[size], rank)
                with Counted() as counted:
                    found[exchange, case, parts] = answer(attention, tensors(dtype, kv_heads), part, options)
                found["collectives", exchange, case, parts] = counted.count
        part, whole = part_of(PARTS["uneven"][size], rank), tensors(torch.float64, HEADS)
        tight = partial(equilibrium_attention, **TIGHT)
        # Per head in a partial, a mask over all tokens, and a solution beside the answer.
        fixed = sequence_parallel(partial(tight, anchor=ANCHORS, return_solution=True), exchange=exchange)
        mask = masks()
        mask = mask if exchange == "heads" else mask[..., part, :]
        output, solution = fixed(*(t[..., part, :] for t in whole), attn_mask=mask)
        found["partial", exchange] = output, bool(solution.converged.all())
        plain = sequence_parallel(F.scaled_dot_product_attention, exchange=exchange)
        found["torch's", exchange] = plain(*(t[..., part, :] for t in whole))
    found |= refused(rank, size)
    return found


def refused(rank, size):
    q, k, v = (t[..., :4, :] for t in tensors(torch.float64, HEADS))
    one = sequence_parallel(equilibrium_attention)
    by_keys = sequence_parallel(equilibrium_attention, exchange="keys")
    calls = {
        "dtypes": lambda: one(*(t.to([torch.float32, torch.float64][rank % 2]) for t in (q, k, v))),
        "shapes": lambda: one(q[..., : 4 + rank % 2], k[..., : 4 + rank % 2], v),
        "options": lambda: one(q, k, v, is_causal=rank == 0),
        "solvers": lambda: one(q, k, v, solver=Anderson(rtol=1e-4 if rank else 1e-5)),
        "exchanges": lambda: sequence_parallel(equilibrium_attention, exchange=["heads", "keys"][rank % 2])(q, k, v),
        "heads": lambda: one(q[:, :3], k[:, :3], v[:, :3]),
        "raised in one": lambda: one(q, k, v, on_failure="raise", solver=Anderson(max_steps=1)),
        "offsets": lambda: by_keys(q[..., :2, :], k, v, is_causal=True),
        "DTensor": lambda: one(*(distribute_tensor(q, init_device_mesh("cpu", (size,)), [Shard(2)]) for _ in range(3))),
    }

    def fails(query, key, value):
        if rank == 1:
            raise ArithmeticError("out of luck")
        return query

    calls["no tensor in one"] = lambda: one(q, k, "value" if rank else v)
    odd = int(rank == 1)
    whole = torch.ones(TOKENS, 4 * size, dtype=torch.bool)
    whole[0, 0] = not odd
    numbers = torch.arange(4) + odd
    for exchange in ("heads", "keys"):
        attention = sequence_parallel(equilibrium_attention, exchange=exchange)
        given = {
            "anchor": {"anchor": ANCHORS - 1e-9 * odd},
            "scale": {"scale": (ANCHORS + 0.3)[None].expand(BATCH + odd, HEADS)},
            "names": {"scale": 0.3} if odd else {},
        }
        calls |= {(exchange, name): partial(attention, q, k, v, **options) for name, options in given.items()}
        calls[exchange, "fn fails"] = partial(sequence_parallel(fails, exchange=exchange), q, k, v)
        taken = sequence_parallel(lambda query, key, value, numbers: query, exchange=exchange)
        calls[exchange, "integers"] = partial(taken, q, k, v, numbers=numbers)
    calls["heads", "mask"] = lambda: one(q, k, v, attn_mask=whole[: 4 * size])
    calls["keys", "axes of the mask"] = lambda: by_keys(q, k, v, attn_mask=whole[:4, : 4 * size - odd])
    return {("refused", name): error_of(call) for name, call in calls.items()}


def masks():
    return torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(7)) > 0.3


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    return together(work, request.param)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_the_answer_and_gradients_of_one_process(exchange, case, parts, found):
    dtype, kv_heads, options = CASES[case]
    if (exchange, case, parts) not in found[0]:
        pytest.skip("two heads of keys are not shared by four processes")
    expected = answer(equilibrium_attention, tensors(dtype, kv_heads), slice(None), options)
    by_rank = [of_rank[exchange, case, parts] for of_rank in found]
    for i, name in enumerate(("output", "query", "key", "value")):
        put_together = torch.cat([each[i] for each in by_rank], -2)
        if exchange == "heads":
            assert torch.equal(put_together, expected[i]), name
        else:
            close = 1e-11 if dtype == torch.float64 else 1e-4
            torch.testing.assert_close(put_together, expected[i], rtol=close, atol=close)
    for i in range(4, len(expected)):
        summed = sum(each[i] for each in by_rank)
        torch.testing.assert_close(summed, expected[i], rtol=1e-10, atol=1e-10)


@pytest.mark.by_name(slow=r"\[4")
def test_collectives_do_not_depend_on_evaluations(found):
    for of_rank in found:
        counts = {exchange: set() for exchange in ("heads", "keys")}
        for key, count in of_rank.items():
            if key[0] == "collectives":
                counts[key[1]].add(count)
        assert counts == {"heads": {7}, "keys": {5}}


def test_partials_masks_solutions_and_other_attention(found):
    whole = tensors(torch.float64, HEADS)
    expected = equilibrium_attention(*whole, attn_mask=masks(), anchor=ANCHORS, **TIGHT)
    by_torch = F.scaled_dot_product_attention(*whole)
    for exchange in ("heads", "keys"):
        outputs, converged = zip(*(of_rank["partial", exchange] for of_rank in found), strict=True)
        torch.testing.assert_close(torch.cat(outputs, -2), expected, rtol=1e-11, atol=1e-12)
        assert all(converged)
        put_together = torch.cat([of_rank["torch's", exchange] for of_rank in found], -2)
        torch.testing.assert_close(put_together, by_torch, rtol=1e-12, atol=1e-13)


REFUSED = {
    "dtypes": "LockStepError: `query`.*float32.*float64",
    "shapes": "LockStepError: `query`.*rank 0",
    "options": "LockStepError: `is_causal`.*rank 0: True.*rank 1( and 2 more)?: False",
    "solvers": "LockStepError: `solver`",
    "exchanges": "LockStepError: `exchange`",
    "heads": "ValueError: `query`.*processes can share, got 3; use exchange='keys'",
    "raised in one": "ConvergenceError",
    "offsets": "ValueError: `query`.*is_causal=True",
    "DTensor": "TypeError: `query`.*a tensor of this process",
    "no tensor in one": "LockStepError: `arguments`.*rank 0: fit.*rank 1.*: TypeError: `value` must be a torch.Tensor",
    ("heads", "mask"): "LockStepError: `attn_mask`.*rank 1: ",
    ("keys", "axes of the mask"): "LockStepError: `attn_mask`.*rank 1: ",
}
for _exchange in ("heads", "keys"):
    REFUSED[_exchange, "anchor"] = "LockStepError: `anchor`.*rank 1: .*broadcast"
    REFUSED[_exchange, "scale"] = "LockStepError: `scale`.*rank 1: "
    REFUSED[_exchange, "names"] = "LockStepError: `options`.*rank 1: scale"
    REFUSED[_exchange, "integers"] = "LockStepError: `numbers`.*rank 1: "


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_every_process(case, found):
    for of_rank in found:
        assert re.search(REFUSED[case], of_rank["refused", case]), of_rank["refused", case]


@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_an_error_in_one_process_ends_the_call_in_all(exchange, found):
    told = [of_rank["refused", (exchange, "fn fails")] for of_rank in found]
    assert told[1] == "ArithmeticError: out of luck"
    assert all(each.startswith("LockStepError: `fn` raised in another") for i, each in enumerate(told) if i != 1)


def test_without_processes_it_is_said_how_to_begin():
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"group.*init_process_group"):
        sequence_parallel(equilibrium_attention)(query, query, query)

"""A check of a Triton kernel is for the machine code of the problems that trust it: nothing else selects the code."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.compiled_kernels import Card  # noqa: E402
from implicit_attention.kernels.problem import (  # noqa: E402
    THERE,
    AdjointRule,
    Attention,
    FusedRule,
)
from implicit_attention.kernels.triton import layout, support  # noqa: E402

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
BF16 = torch.bfloat16
RULE = FusedRule(1e-3, 0.0, 12, 2)
N, M, D = 70, 304, 64


@pytest.fixture
def codes(monkeypatch):
    """What Triton chooses machine code by in the launches of a function, none of which is made."""
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(Card(90).get_current_target())

    def found_in(function):
        found = set()

        def tell(kernel, *arguments, grid, warmup, **options):
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            _, specialization, chosen = bind(*arguments, **options)
            given = dict(zip(kernel.arg_names, arguments, strict=False))
            small = {
                name: number for name, number in given.items() if kernel.fn.__annotations__.get(name) == "tl.int32"
            }
            assert all(-(2**31) <= number < 2**31 for number in small.values()), small
            if "left" in given:  # one product follows the first step of an adjoint solve
                given["left"].next_counts.fill_(kernel.__name__ == "_conjugate_kernel" and given["step"] == 0)
            found.add((kernel.__name__, str(specialization), str(chosen)))

        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", tell)
            function()
        return frozenset(found)

    return found_in


def problem(lead=(2, 3), keys=None, n=N, beta=None, anchor=None, mask=None, first=None, dtype=BF16):
    keys = torch.zeros(*lead, M, D, dtype=dtype) if keys is None else keys
    one = torch.ones((1,) * len(lead))
    field = torch.zeros(*lead, n, keys.shape[-1], dtype=keys.dtype)
    return Attention.of(field, keys, one if beta is None else beta, one / 2 if anchor is None else anchor, mask, first)


def numbers(*shape):
    return torch.zeros(shape, dtype=BF16)


def allowed(*shape):
    return torch.ones(shape, dtype=torch.bool)


def late(tensor):
    """The same tensor, which begins one number behind a multiple of 16 bytes."""
    memory = tensor.new_zeros(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


PROBLEMS = {
    "plain": lambda: problem(),
    "one set": lambda: problem((1, 1)),
    "no batch": lambda: problem(()),
    "sixteen heads": lambda: problem((1, 16)),
    "shared keys": lambda: problem(keys=numbers(1, 1, M, D)),
    "grouped keys": lambda: problem((2, 16, 2), keys=numbers(2, 16, 1, M, D)),
    "packed keys": lambda: problem(keys=numbers(2, M, 3, 3, D)[:, :, 1].transpose(1, 2)),
    "more keys": lambda: problem(keys=numbers(2, 3, M + 7, D)),
    "columns": lambda: problem(keys=numbers(2, 3, D, M).mT),
    "columns of a table": lambda: problem((), keys=numbers(D, M).mT),
    "columns, ragged": lambda: problem(keys=numbers(2, 3, D, M + 1).mT),
    "far columns": lambda: problem((), keys=torch.empty(2**30, dtype=BF16).as_strided((M, D), (1, layout.FAR))),
    "every second": lambda: problem(keys=numbers(2, 3, M, 2 * D)[..., ::2]),
    "late": lambda: problem(keys=late(numbers(2, 3, M, D))),
    "late in their rows": lambda: problem(keys=numbers(2, 3, M, D + 8)[..., 1 : D + 1]),
    "ragged rows": lambda: problem(keys=numbers(2, 3, M, D + 1)[..., :D]),
    "odd dimension": lambda: problem(keys=numbers(2, 3, M, 5)),
    "odd dimension, one set": lambda: problem((1,), keys=numbers(1, M, 5)),
    "one number": lambda: problem(keys=numbers(2, 3, M, 1)),
    "float32": lambda: problem(dtype=torch.float32),
    "float32, late": lambda: problem(keys=late(torch.zeros(2, 3, M, D))),
    "one query": lambda: problem(n=1),
    "sixteen queries": lambda: problem(n=16),
    "few keys": lambda: problem(keys=numbers(2, 3, 5, D)),
    "one key": lambda: problem(keys=numbers(2, 3, 1, D)),
    "betas": lambda: problem(beta=late(torch.ones(2, 3)), anchor=torch.ones(2, 3, 2)[:, :, 1] / 2),
    "betas, rounded": lambda: problem(beta=numbers(2, 1) + 1, anchor=numbers(1, 3)),
    "causal": lambda: problem(first=0),
    "causal from 16": lambda: problem((1, 16), first=16),
    "padding": lambda: problem(mask=allowed(2, 1, 1, M)),
    "padding, one set": lambda: problem((1, 1), mask=allowed(1, 1, 1, M)),
    "padding, late": lambda: problem(mask=late(allowed(2, 1, 1, M))),
    "padding, ragged": lambda: problem(mask=allowed(2, 1, 1, M + 5)[..., :M]),
    "pairs": lambda: problem(mask=allowed(2, 3, N, M)),
    "pairs, shared": lambda: problem(mask=allowed(1, 1, N, M).expand(2, 3, N, M)),
    "pairs, transposed": lambda: problem(mask=allowed(2, 3, M, 80)[..., :N].mT),
    "pairs, late": lambda: problem(mask=late(allowed(2, 1, N, M)), first=0),
    "pairs, rows alike": lambda: problem(mask=allowed(2, 3, 1, M).expand(2, 3, N, M)),
    "pairs, columns alike": lambda: problem(mask=allowed(2, 3, N, 1).expand(2, 3, N, M)),
    "bias": lambda: problem(mask=torch.zeros(2, 3, N, M)),
    "bias, rounded": lambda: problem(mask=numbers(1, 3, N, M)),
    "bias, late": lambda: problem(mask=late(torch.zeros(1, 3, N, M))),
}


LAUNCHED = {"hopfield_solve": {"_attend_kernel", "_step_kernel"}}
LAUNCHED["hopfield_adjoint"] = {"_attend_kernel", "_conjugate_kernel", "_end_kernel", "_keys_kernel"}


def used(operation, given, rule, aside):
    """The call of an operation."""
    from implicit_attention.kernels.triton.adjoint import solve_adjoint
    from implicit_attention.kernels.triton.solve import solve

    state = (late if aside else torch.clone)(given.query.float())
    if operation == "hopfield_solve":
        solve(given._replace(query=late(given.query) if aside else given.query), state, rule)
    else:
        solve(given, state, THERE)
        solve_adjoint(given, state, state, state, state[..., 0], AdjointRule(1e-2, rule.max_steps))


@pytest.mark.parametrize("operation", support.KERNELS)
def test_all_problems_of_a_variant_run_the_code_that_its_check_runs(operation, codes):
    ran = {}
    for name, make in PROBLEMS.items():
        given = make()
        # Counts and tolerances are numbers, too, and states may begin anywhere.
        rules = (RULE, FusedRule(1, 0, 2**40, 2**40))
        for aside, rule in enumerate(rules):
            variant = support.variant(given, operation)
            found = codes(lambda given=given, rule=rule, aside=aside: used(operation, given, rule, aside))
            assert {name for name, *_ in found} >= LAUNCHED[operation]
            first, before = ran.setdefault(variant, (name, found))
            assert found == before, f"{name} and {first} are one variant of two codes"
            if first == name and not aside:
                checked = codes(lambda given=given: support.errors(given, operation))
                assert found <= checked, f"the check of {name} runs other code"
    assert {whether for variant in ran for whether in variant.listed} == {True, False}


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "far" not in name])
def test_numbers_are_read_in_rows_that_begin_at_multiples_of_16_bytes(name):
    given = PROBLEMS[name]()
    for tensor in (given.keys, *(() if given.pairs is None else (given.pairs,))):
        tensor.copy_(torch.randn(tensor.shape)) if 0 not in tensor.stride() else None
        found = layout.in_rows(tensor)
        assert torch.equal(found, tensor)
        assert found.data_ptr() % layout.ALIGNMENT == 0
        steps = [step for size, step in zip(found.shape, found.stride(), strict=True) if size > 1]
        assert found.shape[-1] == 1 or steps.pop() == 1
        assert not any(step * found.itemsize % layout.ALIGNMENT for step in steps)
        # What stands in rows is not copied, and what is expanded is not written out.
        assert found.untyped_storage().nbytes() <= max(tensor.untyped_storage().nbytes(), 16 * tensor.numel())


def test_the_host_never_waits_to_know_whether_queries_are_left(monkeypatch):
    class Counts:
        """On a device: nothing but a copy, which is made later, tells what they hold."""

        device, shape, dtype = torch.device("cuda"), (2,), torch.int32

    class Pinned:
        """On the host: what has arrived."""

        def copy_(self, counts, *, non_blocking):
            assert isinstance(counts, Counts)
            assert non_blocking
            copies.append(self)
            return self

        def any(self):
            assert self.arrived, "read before it is there"
            return self.arrived > 0

        arrived = 0

    class Event:
        """One that can be asked, and not be waited for."""

        def record(self, stream):
            assert stream == "of the device"
            self.of = copies[-1]

        def query(self):
            return self.of.arrived != 0

    def pinned(*shape, dtype, pin_memory):
        assert pin_memory
        return Pinned()

    copies = []
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "of the device")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    left = object.__new__(layout.Left)
    left.notes, left.host, left.copied = [(None, Counts()), (None, Counts())], None, None
    assert all(left.next() for _ in range(3))
    assert len(copies) == 1, "another copy while one is under way"
    copies[0].arrived = 5
    assert all(left.next() for _ in range(3))
    assert len(copies) == 2
    copies[1].arrived = -1
    assert not left.next()


def test_no_tile_gives_a_warp_fewer_rows_than_the_tensor_cores_take():
    for (kernel, _), table in (*layout.TILES.items(), *layout.EARLIER.items()):
        for tile in table.values():
            # The kernel for the keys has these as the rows of its sums.
            assert (tile.keys if kernel == "keys" else tile.rows) >= 16 * tile.warps

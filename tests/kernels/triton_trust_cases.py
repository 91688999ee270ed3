"""Cases for trust in the Triton kernels: one that is broken by hand is found at its first use and not used."""

import contextlib
import functools
import importlib
import warnings
from typing import NamedTuple

import pytest
import torch
import triton_harness as harness
from triton.runtime.errors import OutOfResources
from triton_harness import BF16, FP16, FP32, case, cases

from implicit_attention import Anderson, UnsupportedImplementation, _solve, equilibrium_attention
from implicit_attention.failure import KernelWarning
from implicit_attention.kernels import Attention, hopfield_adjoint, hopfield_solve, kernel_checks, trust

SOLVE, ADJOINT = "hopfield_solve (triton)", "hopfield_adjoint (triton)"


class Kernel(NamedTuple):
    """Where a kernel is looked up, an argument in which it writes numbers, and which of its two codes is meant."""

    file: str
    name: str
    output: str
    centred: bool | None = None
    refused: tuple[str, ...] = (ADJOINT,)
    unwritten: str = "is NaN"

    @property
    def module(self):
        return importlib.import_module(f"implicit_attention.kernels.triton.{self.file}")


# The adjoint solve is checked at the answer of a solve.
BOTH = SOLVE, ADJOINT
BROKEN = {
    "evaluate": Kernel("attend", "_attend_kernel", "queries.mean", centred=False, refused=BOTH),
    "step": Kernel("solve", "_step_kernel", "answer.logsumexp", refused=BOTH),
    "product": Kernel("attend", "_attend_kernel", "queries.spread", centred=True),
    "conjugate": Kernel("adjoint", "_conjugate_kernel", "answer.value"),
    "end": Kernel("adjoint", "_end_kernel", "answer.value"),
    "keys": Kernel("attend", "_keys_kernel", "out"),
}


def written(arguments, path):
    """The tensor of an argument, or of a field of one."""
    name, _, field = path.partition(".")
    found = getattr(arguments[name], field) if field else arguments[name]
    # Truth values as numbers.
    return found.view(torch.uint8) if found.dtype == torch.bool else found


class Broken:
    """A kernel that is launched, and more or less than that: it counts launches.

    fault: the name of one, or a function of the arguments by name, which is called behind each launch.
    """

    def __init__(self, name, fault):
        self.of, self.fault, self.launches = BROKEN[name], fault, 0
        self.kernel = getattr(self.of.module, self.of.name)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            if self.of.centred not in (None, arguments[-1].centred):
                self.kernel[grid](*arguments, **options)
                return
            self.launches += 1
            if self.fault == "fails to compile" or (self.fault == "fails later" and not trust._checking.active):
                raise OutOfResources(1, 0, "shared memory")
            if self.fault != "writes nothing":
                self.kernel[grid](*arguments, **options)
            given = dict(zip(self.kernel.arg_names, arguments, strict=True))
            if self.fault == "one number is wrong":
                written(given, self.of.output).view(-1)[-1] += 0.05
            elif callable(self.fault):
                self.fault(given)

        return launch


@contextlib.contextmanager
def untried(*broken):
    """No kernel has been tried, "auto" tries them on this device, and (kernel, fault) are broken."""
    with contextlib.ExitStack() as stack:

        def replaced(owner, name, value):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        replaced(trust, "_found", {})
        replaced(trust, "_told", set())
        replaced(_solve, "TRITON_DEVICES", ("cpu", "cuda"))
        # Attention over plain tensors on a CPU asks the native operations first.
        replaced(_solve, "fits_kernels", lambda *arguments: False)
        kernels = []
        for name, fault in broken:
            kernels.append(Broken(name, fault))
            replaced(BROKEN[name].module, BROKEN[name].name, kernels[-1])
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", KernelWarning)
        yield kernels, told


def by_torch(run, **options):
    """The answer of `run(impl)` without Triton."""
    devices, _solve.TRITON_DEVICES = _solve.TRITON_DEVICES, ()
    try:
        return run("auto", **options)
    finally:
        _solve.TRITON_DEVICES = devices


def given(dtype=FP32, rows=9, count=20, **options):
    torch.manual_seed(0)
    query, keys = (torch.randn(2, size, 8).to(harness.DEVICE, dtype) for size in (rows, count))
    return (query, keys), {"beta": 0.2, "anchor": 0.6, **options}


def solution(impl, **options):
    tensors, options = given(**options)
    rtol = 1e-6 if tensors[0].dtype == FP32 else 1e-3
    return hopfield_solve(*tensors, **options, rtol=rtol, impl=impl)


def states(impl, **options):
    return (solution(impl, **options).state,)


def solved(impl, **options):
    """The state and its gradients."""
    tensors, options = given(**options)
    query, keys = (t.requires_grad_() for t in tensors)
    rtol = 1e-6 if keys.dtype == FP32 else 1e-3
    found = hopfield_solve(query, keys, **options, rtol=rtol, impl=impl)
    gradients = torch.autograd.grad(found.state.square().sum(), (query, keys))
    return (found.state.detach(), found.residual, *gradients)


def adjoint(impl):
    (query, keys), options = given()
    z = by_torch(lambda which: hopfield_solve(query, keys, **options, impl=which).state)
    found = hopfield_adjoint(query, keys, z, query, **options, impl=impl)
    return found.value, found.by_keys, found.by_beta


def equal(found, expected, dtype=FP32):
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == FP32 else {"rtol": 5e-3, "atol": 5e-3}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def raises(words, function, *arguments):
    with pytest.raises(UnsupportedImplementation) as caught:
        function(*arguments)
    assert str(caught.value).startswith("`impl='triton'`: ")
    assert words in str(caught.value)


FAULTS = {
    "wrong": ("one number is wrong", " is off by "),
    "unwritten": ("writes nothing", None),
    "uncompiled": ("fails to compile", "it failed with OutOfResources: out of resource: shared memory"),
    "unlaunched": ("fails later", "it failed with OutOfResources: out of resource: shared memory"),
}


def check_refused(kernel, refused, fault, words, run):
    """`run(impl)` with a broken kernel, on which the operations `refused` depend."""
    expected = by_torch(run)
    with untried((kernel, fault)) as ((broken,), told):
        equal(run("auto"), expected)
        messages = [str(warning.message) for warning in told]
        assert [name for message in messages for name in refused if f"the kernel {name}" in message] == refused, (
            messages
        )
        assert len(messages) == len(refused)
        assert all(words in message and f"torch {torch.__version__}" in message for message in messages), messages
        launches = broken.launches
        assert launches
        equal(run("auto"), expected)
        assert (len(told), broken.launches) == (len(refused), launches), "tried or told again"
        checks = [check for check in kernel_checks() if check.verdict == "refused"]
        assert [check.use.partition(" on ")[0] for check in checks] == refused
        assert all(words in str(check) for check in checks)
        raises(checks[0].reason, run, "triton")
        assert broken.launches == launches


@cases(
    **{
        f"{name}_{short}": dict(name=name, fault=fault, words=words)
        for name in BROKEN
        for short, (fault, words) in FAULTS.items()
    }
)
def trust_broken(name, fault, words):
    words = words or BROKEN[name].unwritten
    if fault != "fails later":
        check_refused(name, [*BROKEN[name].refused], fault, words, solved)
    elif SOLVE in BROKEN[name].refused:
        check_refused(name, [SOLVE], fault, words, states)
    else:
        check_refused(name, [ADJOINT], fault, words, solved)


# All that kernels write, but for what only another path to the same answer would show: where the next evaluation is,
# energies, which steps were accelerated, the first direction, and how many steps there were.
OPERANDS = "operands.state", "operands.shift", "operands.value", "operands.centre"
EVIDENCE = "answer.residual", "answer.tolerance", "left.status"
OUTPUTS = {
    "evaluate": ("queries.mean", "queries.logsumexp"),
    "step": ("answer.state", "answer.mean", "answer.logsumexp", *EVIDENCE),
    "product": ("queries.spread",),
    "conjugate": ("course.remainder", "answer.value", "answer.negative_curvature", "answer.tolerance"),
    "end": ("answer.value", "answer.by_beta", *EVIDENCE, *OPERANDS),
    "keys": ("out",),
}


@cases(**{name: dict(name=name) for name in OUTPUTS})
def trust_that_every_output_is_compared(name):
    from implicit_attention.kernels.triton import support

    (query, keys), options = given()
    numbers = (torch.full((2,), options[each], device=harness.DEVICE) for each in ("beta", "anchor"))
    record = Attention(query, keys, *numbers)
    operation = "hopfield_solve" if SOLVE in BROKEN[name].refused else "hopfield_adjoint"
    unseen = []
    for output in OUTPUTS[name]:

        def more(arguments, output=output):
            written(arguments, output).view(-1)[-1] += 1

        with untried((name, more)):
            found = support.errors(record, operation)
        if all(error <= allowed for error, allowed in found.values()):
            unseen.append(output)
    assert not unseen


class BrokenKinds:
    """The kernel that tells what the tiles under a mask are, which calls all of them the same."""

    def __init__(self, kernel, kind):
        self.kernel, self.kind = kernel, kind

    def __getitem__(self, grid):
        def launch(kinds, *arguments, **options):
            self.kernel[grid](kinds, *arguments, **options)
            kinds.fill_(self.kind)

        return launch


@cases(all_masked=dict(kind=0), none_masked=dict(kind=2), with_more=dict(kind=2, count=70))
def trust_broken_tiles_of_masks(kind, count=32):
    from implicit_attention.kernels.triton import attend

    # Whole tiles: what lies behind the last key gives nothing away.
    options = {"mask": (torch.arange(count) < 7).to(harness.DEVICE), "count": count}
    expected = by_torch(solved, **options)
    kernel = attend._kinds_kernel
    attend._kinds_kernel = BrokenKinds(kernel, kind)
    try:
        with untried() as (_, told):
            equal(solved("auto", **options), expected)
            assert len(told) == 2, [str(warning.message) for warning in told]
            verdicts = {check.use.partition(" on ")[0]: check.verdict for check in kernel_checks()}
            assert verdicts[SOLVE] == verdicts[ADJOINT] == "refused"
    finally:
        attend._kinds_kernel = kernel


@cases(
    **{
        f"{name}_{count}{'_causal' if causal else ''}": dict(name=name, count=count, is_causal=causal)
        for name in ("evaluate", "product", "keys")
        for count, causal in ((20, False), (70, True))
    }
)
def trust_that_a_mask_is_read(name, count, is_causal):
    """A kernel that sees a mask which allows everything is found."""
    options = {"mask": (torch.arange(count) % 3 > 0).to(harness.DEVICE), "count": count, "is_causal": is_causal}
    file, kernel, _, centred, refused, _ = BROKEN[name]
    module = importlib.import_module(f"implicit_attention.kernels.triton.{file}")
    sound = getattr(module, kernel)

    class Blind:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                if centred in (None, arguments[-1].centred):
                    at = sound.arg_names.index("mask")
                    blank = arguments[at]._replace(memory=torch.ones_like(arguments[at].memory))
                    arguments = *arguments[:at], blank, *arguments[at + 1 :]
                sound[grid](*arguments, **options)

            return launch

    setattr(module, kernel, Blind())
    try:
        with untried():
            solved("auto", **options)
            found = {check.use.partition(" on ")[0] for check in kernel_checks() if check.verdict == "refused"}
            assert found == {*refused}
    finally:
        setattr(module, kernel, sound)


def one_less(arguments):
    arguments["left"].next_counts.sub_(1).clamp_(min=0)


def another(arguments):
    arguments["left"].next_order.zero_()


@cases(
    sound=dict(name="step", fault=None),
    **{
        f"{name}_{fault.__name__}": dict(name=name, fault=fault)
        for name in ("step", "conjugate")
        for fault in (one_less, another)
    },
)
def trust_listed_queries(name, fault):
    run = states if SOLVE in BROKEN[name].refused else solved
    expected = by_torch(run, rows=100)
    with untried((name, fault)) as (_, told):
        equal(run("auto", rows=100), expected)
        assert len(told) == (fault is not None)
        check = kernel_checks()[-1]
        assert "listed (True" in check.use
        assert check.verdict == ("verified" if fault is None else "refused"), check


@cases(
    fp32=dict(dtype=FP32),
    bf16=dict(dtype=harness.BF16),
    causal=dict(is_causal=True),
    few=dict(few=True),
    masked=dict(few=70),
    both=dict(few=70, is_causal=True),
)
def trust_sound(dtype=FP32, few=False, **options):
    if few:
        count = 20 if few is True else few
        options = {"mask": (torch.arange(count) < 7).to(harness.DEVICE), "count": count, **options}
    expected = by_torch(solved, dtype=dtype, **options)
    with untried(("step", None), ("end", None), ("keys", None)) as (kernels, told):
        equal(solved("auto", dtype=dtype, **options), expected, dtype)
        step, *backward = kernels
        # Once in the check, and once for the user's problem.
        assert [kernel.launches for kernel in backward] == [2, 2]
        before = step.launches
        equal(solved("triton", dtype=dtype, **options), expected, dtype)
        # Nothing is verified again.
        assert [kernel.launches for kernel in backward] == [3, 3]
        after = step.launches - before
        evaluations = int(solution("triton", dtype=dtype, **options).num_evals.max())
        # Where the host does not wait for the device it launches more. For the gradient there is none.
        assert harness.DEVICE == "cuda" or after == evaluations
        assert not told
        checks = {check.use.partition(" on ")[0]: check for check in kernel_checks()}
        assert set(checks) == {SOLVE, ADJOINT}
        for check in checks.values():
            assert check.verdict == "verified", check
            assert all(error <= allowed for error, allowed in check.errors.values())
            assert {"mean", "logsumexp", "residual"} <= set(check.errors) or {"by_keys", "residual"} <= set(
                check.errors
            )


@cases(fp16=dict(dtype=FP16), bf16=dict(dtype=BF16))
def trust_that_half_precision_is_fine(dtype):
    """Coarse products in the place of fine ones are found, of evaluations and of the last one of an adjoint solve."""
    from implicit_attention.kernels.triton import attend, support

    problem, launched = harness.problem_of(lead=(2,), n=50, m=100, dim=40, dtype=dtype), attend.OverKeys.__call__

    def coarse(kernel, left, queries, fine=False):
        flags, left.fine = left.fine, torch.zeros_like(left.fine)
        launched(kernel, left, queries)
        left.fine = flags

    for operation, wrong in (
        ("hopfield_solve", {"mean", "residual"}),
        ("hopfield_adjoint", {"residual", "by_beta"}),
    ):
        compared = functools.partial(support.errors, problem, operation)
        assert all(error <= allowed for error, allowed in compared().values())
        attend.OverKeys.__call__ = coarse
        try:
            found = compared()
        finally:
            attend.OverKeys.__call__ = launched
        assert {name for name, (error, allowed) in found.items() if error > allowed} == wrong, found


@case
def trust_of_tiles_before_they_are_timed():
    from benchmarks import card
    from implicit_attention.kernels.triton.layout import TILES, Tiles

    most = max(TILES["evaluate", True])
    used, other, worse = TILES["evaluate", True][most], Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)
    with untried(("evaluate", None)) as ((broken,), _):
        launch = broken.kernel

        class Spoilt:
            """The kernel, wrong with the last of the tiles."""

            arg_names = launch.arg_names

            def __getitem__(self, grid):
                def run(*arguments, **options):
                    launch[grid](*arguments, **options)
                    if arguments[-1].keys == worse.keys:
                        arguments[self.arg_names.index("queries")].mean.add_(0.05)

                return run

        broken.kernel = Spoilt()
        found = card.tile_rows(most, (other, worse), harness.DEVICE, length=40, sets=1)
    assert TILES["evaluate", True][most] == used
    assert {row["tiles"]: row["seconds"] is not None for row in found} == {
        ", ".join(map(str, tile)): tile is not worse for tile in (used, other, worse)
    }
    (refused,) = (row for row in found if row["refused"])
    assert " is off by " in refused["refused"]


@case
def trust_in_attention():
    (query, keys), _ = given()

    def attended(impl):
        leaf = keys[:, None].clone().requires_grad_()
        out = equilibrium_attention(query[:, None], leaf, leaf, anchor=0.6, solver=Anderson(rtol=1e-6), impl=impl)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaf)

    expected = attended("reference")
    with untried(("evaluate", "writes nothing"), ("conjugate", "fails to compile")) as (_, told):
        equal(attended("auto"), expected)
        assert len(told) == 2, [str(t.message) for t in told]
        raises("is NaN", attended, "triton")


@case
def trust_in_a_compiled_graph():
    expected = by_torch(solved)
    with untried(("end", "writes nothing")) as ((broken,), told):
        step = torch.compile(solved, backend="aot_eager")
        equal(step("auto"), expected)
        equal(step("auto"), expected)
        assert len(told) == 1, [str(t.message) for t in told]
        assert broken.launches == 1

"""Cases for trust in the Triton kernels: one that is broken by hand is found at its first use and not used."""

import contextlib
import importlib
import warnings

import pytest
import torch
import triton_harness as harness
from triton.runtime.errors import OutOfResources
from triton_harness import FP32, case, cases

from implicit_attention import Anderson, UnsupportedImplementation, _solve, equilibrium_attention
from implicit_attention.errors import KernelWarning
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve, kernel_checks, trust

SOLVE, ADJOINT = "hopfield_solve (triton)", "hopfield_adjoint (triton)"
BROKEN = {
    SOLVE: ("solve", "_solve_kernel"),
    ADJOINT: ("adjoint", "_adjoint_kernel"),
    "keys": ("keys", "_keys_kernel"),
}
# The argument in which a kernel writes a result of many numbers.
OUTPUT = {SOLVE: "mean_out", ADJOINT: "value_out", "keys": "out"}


class Broken:
    """A kernel that is launched, and more or less than that: it counts launches."""

    def __init__(self, kernel, fault, output):
        self.kernel, self.fault, self.launches = kernel, fault, 0
        self.output = kernel.arg_names.index(output)

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches += 1
            if self.fault == "fails to compile" or (self.fault == "fails later" and self.launches > 1):
                raise OutOfResources(1, 0, "shared memory")
            if self.fault != "writes nothing":
                self.kernel[grid](*arguments, **options)
            if self.fault == "one number is wrong":
                arguments[self.output].view(-1)[-1] += 0.05

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
            file, kernel = BROKEN[name]
            module = importlib.import_module(f"implicit_attention.kernels.triton.{file}")
            kernels.append(Broken(getattr(module, kernel), fault, OUTPUT[name]))
            replaced(module, kernel, kernels[-1])
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


def given(dtype=FP32, count=20, **options):
    torch.manual_seed(0)
    query, keys = (torch.randn(2, size, 8).to(harness.DEVICE, dtype) for size in (9, count))
    return (query, keys), {"beta": 0.2, "anchor": 0.6, **options}


def solved(impl, **options):
    """The state and its gradients."""
    tensors, options = given(**options)
    query, keys = (t.requires_grad_() for t in tensors)
    rtol = 1e-6 if keys.dtype == FP32 else 5e-3
    found = hopfield_solve(query, keys, **options, rtol=rtol, impl=impl)
    gradients = torch.autograd.grad(found.state.square().sum(), (query, keys))
    return (found.state.detach(), found.residual, *gradients)


def adjoint(impl):
    (query, keys), options = given()
    z = by_torch(lambda which: hopfield_solve(query, keys, **options, impl=which).state)
    found = hopfield_adjoint(query, keys, z, query, **options, impl=impl)
    return found.value, found.by_keys, found.by_beta


def equal(found, expected, dtype=FP32):
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == FP32 else {"rtol": 0.05, "atol": 0.05}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def raises(words, function, *arguments):
    with pytest.raises(UnsupportedImplementation) as caught:
        function(*arguments)
    assert str(caught.value).startswith("`impl='triton'`: ")
    assert words in str(caught.value)


FAULTS = {
    "wrong": ("one number is wrong", " is off by "),
    "unwritten": ("writes nothing", "is NaN"),
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
        equal(run("auto"), expected)
        assert (len(told), broken.launches) == (len(refused), launches), "tried or told again"
        checks = [check for check in kernel_checks() if check.verdict == "refused"]
        assert [check.use.partition(" on ")[0] for check in checks] == refused
        assert all(words in str(check) for check in checks)
        raises(checks[0].reason, run, "triton")
        assert broken.launches == launches


@cases(**{name: dict(fault=fault, words=words) for name, (fault, words) in FAULTS.items()})
def trust_broken_solve(fault, words):
    check_refused(SOLVE, [SOLVE, ADJOINT], fault, words, solved)


@cases(**{name: dict(fault=fault, words=words) for name, (fault, words) in FAULTS.items()})
def trust_broken_adjoint(fault, words):
    check_refused(ADJOINT, [ADJOINT], fault, words, solved)


class BrokenKinds(Broken):
    """The kernel that tells what the tiles under a mask are, which calls all of them the same."""

    def __init__(self, kernel, kind):
        super().__init__(kernel, None, "kinds")
        self.kind = kind

    def __getitem__(self, grid):
        def launch(kinds, *arguments, **options):
            self.kernel[grid](kinds, *arguments, **options)
            kinds.fill_(self.kind)

        return launch


@cases(all_masked=dict(kind=0), none_masked=dict(kind=2), with_more=dict(kind=2, count=70))
def trust_broken_tiles_of_masks(kind, count=32):
    from implicit_attention.kernels.triton import mask_tiles

    # Whole tiles: what lies behind the last key gives nothing away.
    options = {"mask": (torch.arange(count) < 7).to(harness.DEVICE), "count": count}
    expected = by_torch(solved, **options)
    kernel = mask_tiles._kinds_kernel
    mask_tiles._kinds_kernel = BrokenKinds(kernel, kind)
    try:
        with untried() as (_, told):
            equal(solved("auto", **options), expected)
            assert len(told) == 2, [str(warning.message) for warning in told]
            verdicts = {check.use.partition(" on ")[0]: check.verdict for check in kernel_checks()}
            assert verdicts[SOLVE] == verdicts[ADJOINT] == "refused"
    finally:
        mask_tiles._kinds_kernel = kernel


class Blind(Broken):
    """A kernel that sees a mask which allows everything."""

    def __init__(self, kernel):
        super().__init__(kernel, None, "mask")

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            before, mask, after = arguments[: self.output], arguments[self.output], arguments[self.output + 1 :]
            self.kernel[grid](*before, torch.ones_like(mask), *after, **options)

        return launch


@cases(
    **{
        f"{file}_{count}{'_causal' if causal else ''}": dict(name=name, count=count, is_causal=causal)
        for name, (file, _) in BROKEN.items()
        for count, causal in ((20, False), (70, True))
    }
)
def trust_that_a_mask_is_read(name, count, is_causal):
    options = {"mask": (torch.arange(count) % 3 > 0).to(harness.DEVICE), "count": count, "is_causal": is_causal}
    file, kernel = BROKEN[name]
    module = importlib.import_module(f"implicit_attention.kernels.triton.{file}")
    sound = getattr(module, kernel)
    setattr(module, kernel, Blind(sound))
    try:
        with untried():
            solved("auto", **options)
            refused = {check.use.partition(" on ")[0] for check in kernel_checks() if check.verdict == "refused"}
            assert refused == ({SOLVE, ADJOINT} if name == SOLVE else {ADJOINT})
    finally:
        setattr(module, kernel, sound)


@cases(sound=dict(fault=None), one_less=dict(fault="counts"), another=dict(fault="order"))
def trust_gathered_queries(fault):
    from implicit_attention.kernels.triton import layout
    from implicit_attention.kernels.triton import solve as module

    def broken(status, rows):
        order, counts = unfinished(status, rows)
        if fault == "counts":
            counts = (counts - 1).clamp(min=0)
        return layout.Picked(order * 0 if fault == "order" else order, counts)

    torch.manual_seed(0)
    query, keys = (torch.randn(2, size, 8).to(harness.DEVICE) for size in (300, 20))

    def states(impl):
        return (hopfield_solve(query, keys, beta=0.2, anchor=0.6, rtol=1e-6, impl=impl).state,)

    expected = by_torch(states)
    unfinished, module.unfinished = module.unfinished, broken
    least, layout.LEAST_WORK = layout.LEAST_WORK, 0.0
    try:
        with untried() as (_, told):
            equal(states("auto"), expected)
            (check,) = kernel_checks()
            assert "gathers True" in check.use
            assert check.verdict == ("verified" if fault is None else "refused"), check
            assert len(told) == (fault is not None)
    finally:
        layout.LEAST_WORK, module.unfinished = least, unfinished


@cases(wrong=dict(fault="one number is wrong"), unwritten=dict(fault="writes nothing"))
def trust_broken_gradient_of_keys(fault):
    check_refused("keys", [ADJOINT], fault, "by_keys is ", adjoint)


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
    with untried((SOLVE, None), (ADJOINT, None)) as ((forward, backward), told):
        equal(solved("auto", dtype=dtype, **options), expected, dtype)
        first = forward.launches, backward.launches
        # Each check launches the adjoint kernel once, and the user's problem does.
        assert first[1] == 2
        equal(solved("triton", dtype=dtype, **options), expected, dtype)
        # One solve, one adjoint: nothing is evaluated or verified again.
        assert (forward.launches - first[0], backward.launches - first[1]) == (1, 1)
        assert not told
        checks = {check.use.partition(" on ")[0]: check for check in kernel_checks()}
        assert set(checks) == {SOLVE, ADJOINT}
        for check in checks.values():
            assert check.verdict == "verified", check
            assert all(error <= allowed for error, allowed in check.errors.values())
            assert {"mean", "logsumexp", "residual"} <= set(check.errors) or {"by_keys", "residual"} <= set(
                check.errors
            )


@case
def trust_of_tiles_before_they_are_timed():
    from benchmarks import card
    from implicit_attention.kernels.triton.layout import TILES, Tiles

    most = max(TILES["solve", True])
    used, other, worse = TILES["solve", True][most], Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)
    with untried((SOLVE, None)) as ((broken,), _):
        launch = broken.kernel

        class Spoilt:
            """The kernel, wrong with the last of the tiles."""

            def __getitem__(self, grid):
                def run(*arguments, **options):
                    launch[grid](*arguments, **options)
                    if arguments[-1].keys == worse.keys:
                        arguments[broken.output].add_(0.05)

                return run

        broken.kernel = Spoilt()
        found = card.tile_rows(most, (other, worse), harness.DEVICE, length=40, sets=1)
    assert TILES["solve", True][most] == used
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
    with untried((SOLVE, "writes nothing"), (ADJOINT, "fails to compile")) as (_, told):
        equal(attended("auto"), expected)
        assert len(told) == 2, [str(t.message) for t in told]
        raises("is NaN", attended, "triton")


@case
def trust_in_a_compiled_graph():
    expected = by_torch(solved)
    with untried((ADJOINT, "writes nothing")) as ((broken,), told):
        step = torch.compile(solved, backend="aot_eager")
        equal(step("auto"), expected)
        equal(step("auto"), expected)
        assert len(told) == 1, [str(t.message) for t in told]
        assert broken.launches == 1

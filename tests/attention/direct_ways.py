"""Both ways of a call, compared bit by bit, word by word."""

import contextlib
import dataclasses
import warnings

import pytest
import torch

import implicit_attention._solve as solve_module
import implicit_attention.attention.core as core
import implicit_attention.attention.function as function_module
from implicit_attention.ops.native.library import library
from implicit_attention.testing.numerics import random

native = pytest.mark.skipif(library() is None, reason="there is no native operation here")
B, H, N, M, D = 2, 3, 5, 7, 8
DOORS = ((function_module, "_directly"), (core, "_directly"), (solve_module, "_natively"))


@contextlib.contextmanager
def ways(*, general=False):
    """Which doors answered by a native operation, in order; with `general` none may."""
    taken, before = [], [getattr(*door) for door in DOORS]

    def watched(name, function):
        def call(*args):
            if general:
                return None
            before = len(taken)
            taken.append(name)
            found = function(*args)
            if found is None:
                del taken[before:]
            return found

        return call

    for (module, name), function in zip(DOORS, before, strict=True):
        setattr(module, name, watched(f"{module.__name__.split('.')[-1]}.{name}", function))
    try:
        yield taken
    finally:
        for (module, name), function in zip(DOORS, before, strict=True):
            setattr(module, name, function)


def told(run):
    """What `run` returns, what it warns of, and what it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            found, error = run(), None
        except Exception as raised:
            found, error = None, raised
    return found, [str(w.message) for w in caught], (type(error), str(error))


def same(a, b):
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return torch.equal(a.detach().nan_to_num(7.5), b.detach().nan_to_num(7.5)) and torch.equal(a.isnan(), b.isnan())
    if isinstance(a, dict):
        # The native operation estimates errors by itself, with sums in another order.
        alike = {name: close if name == "gradient_error" else same for name in a}
        return set(a) == set(b) and all(alike[name](a[name], b[name]) for name in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def close(a, b):
    return a is b is None or torch.allclose(a, b, rtol=1e-4, atol=0.0, equal_nan=True)


def agree(run, *, takes=True):
    """`run` gives the same by both ways; the native operation answers, or not, as `takes` says."""
    with ways() as taken:
        mine = told(run)
    with ways(general=True):
        theirs = told(run)
    assert bool(taken) == takes, taken
    assert same(mine[0], theirs[0])
    assert mine[1:] == theirs[1:]
    return mine


def evidence(report):
    """All fields of a `SolveReport` and its adjoint's, but the layer they are of."""
    fields = [field.name for field in dataclasses.fields(report.adjoint) if field.name != "site"]
    return {
        "record": tuple(report.record),
        "remedies": dict(report.remedies),
        "adjoint": {name: getattr(report.adjoint, name) for name in fields},
    }


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def tensors(*, n=N, m=M, dtype=torch.float32, d=D, e=D, lead=(B, H), shared=(B, H)):
    shapes = ((*lead, n, d), (*shared, m, d), (*shared, m, e))
    return [leaf(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def gradients(output, leaves, seed=5):
    cotangent = random(*output.shape, seed=seed, dtype=output.dtype)
    return torch.autograd.grad(output, leaves, cotangent, allow_unused=True)

"""What the operations refuse at the door, and how they say it."""

import re

import pytest
import torch

from implicit_attention import (
    AnchoredEnergy,
    LogSumExp,
    Status,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.ops import hopfield_adjoint, hopfield_solve

Q, K = torch.zeros(2, 3, 4), torch.zeros(2, 5, 4)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "`query` must be a torch.Tensor, got list; convert it with torch.as_tensor", {"query": [[1.0]]}),
        (TypeError, "`query` must have a floating-point dtype, got torch.int64; convert it", {"query": Q.long()}),
        (TypeError, "`keys` must have a floating-point dtype, got torch.bool", {"keys": K.bool()}),
        (ValueError, "`query` must have at least 2 axes, got shape (4,)", {"query": Q[0, 0]}),
        (ValueError, "`keys` must have at least 2 axes, got shape (4,)", {"keys": K[0, 0]}),
        (
            ValueError,
            "`keys` must have the dtype of `query` (torch.float32), got torch.float64; convert it with .to(dtype)",
            {"keys": K.double()},
        ),
        (
            ValueError,
            "`keys` must have the device of `query` (cpu), got meta; move it with .to(device)",
            {"keys": K.to("meta")},
        ),
        (ValueError, "`keys` must hold at least one key, got shape (2, 0, 4)", {"keys": K[:, :0]}),
        (
            ValueError,
            "`keys` must have the query's dimension 4 on the last axis, got shape (2, 5, 3)",
            {"keys": K[..., :3]},
        ),
        (
            ValueError,
            "`keys` must broadcast to the leading axes of `query` = (2,), got shape (3,)",
            {"keys": torch.zeros(3, 5, 4)},
        ),
        (
            ValueError,
            "`keys` must broadcast to the leading axes of `query` = (2,), got shape (7, 2)",
            {"keys": torch.zeros(7, 2, 5, 4)},
        ),
        (TypeError, "`beta` must be a number, got 'one'", {"beta": "one"}),
        (TypeError, "`beta` must be a number, got True", {"beta": True}),
        (ValueError, "`beta` must be > 0, got 0.0", {"beta": 0.0}),
        (ValueError, "`beta` must be > 0, got nan", {"beta": float("nan")}),
        (TypeError, "`beta` must have a floating-point dtype, got torch.int64", {"beta": torch.tensor([1, 2])}),
        (
            ValueError,
            "`beta` must broadcast to the leading axes of `query` = (2,), got shape (3,)",
            {"beta": torch.ones(3)},
        ),
        (ValueError, "`beta` must be > 0 everywhere, got -1.0; parametrise it", {"beta": torch.tensor([1.0, -1.0])}),
        (ValueError, "`anchor` must be in [0, 1], got 1.5", {"anchor": 1.5}),
        (ValueError, "`anchor` must be in [0, 1], got -0.5", {"anchor": -0.5}),
        (ValueError, "`anchor` must be in [0, 1] everywhere, got 2.0; parametrise it", {"anchor": torch.tensor(2.0)}),
        (
            ValueError,
            "`anchor` must broadcast to the leading axes of `query` = (2,), got shape (2, 2)",
            {"anchor": torch.ones(2, 2)},
        ),
        (
            TypeError,
            "`mask` must be boolean (True = attend) or added to the scores, got torch.int64",
            {"mask": torch.ones(5).long()},
        ),
        (TypeError, "`mask` must be boolean (True = attend) or added to the scores, got list", {"mask": [True]}),
        (
            ValueError,
            "`mask` must broadcast to (*batch, N, M) = (2, 3, 5), got shape (3, 4)",
            {"mask": torch.ones(3, 4)},
        ),
        (
            ValueError,
            "`mask` must broadcast to (*batch, N, M) = (2, 3, 5), got shape (1, 2, 3, 5)",
            {"mask": torch.ones(1, 2, 3, 5)},
        ),
        (ValueError, "`mask` must be on cpu, got meta", {"mask": torch.ones(3, 5, device="meta")}),
        (
            ValueError,
            "`impl` must be one of 'auto', 'native', 'tiled', 'triton', got 'cuda'",
            {"impl": "cuda"},
        ),
        (UnsupportedImplementation, "`impl='tiled'`: at least 64 keys are needed", {"impl": "tiled"}),
        (UnsupportedImplementation, "got 5; use impl='auto'", {"impl": "tiled"}),
        (
            UnsupportedImplementation,
            "`impl='triton'`: Triton kernels do not run on the device 'cpu'; use a CUDA device or impl='tiled'",
            {"impl": "triton"},
        ),
        (
            UnsupportedImplementation,
            "`impl='tiled'`: torch",
            {"impl": "tiled", "query": Q.to("meta"), "keys": K.to("meta")},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("operation", [hopfield_solve, hopfield_adjoint], ids=lambda f: f.__name__)
def test_what_every_operation_refuses(operation, error, words, arguments, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton") if arguments.get("impl") == "triton" else None
    states = {
        hopfield_solve: {},
        hopfield_adjoint: {"state": Q, "cotangent": Q},
    }[operation]
    operation(Q, K, **states, beta=1.0)
    if getattr(arguments.get("query"), "is_meta", False):
        states = {name: state.to("meta") for name, state in states.items()}
    with pytest.raises(error) as caught:
        operation(**{"query": Q, "keys": K, **states, "beta": 1.0, **arguments})
    assert type(caught.value) is error
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words", "operation", "arguments"),
    [
        (TypeError, "`initial` must be a torch.Tensor, got float", hopfield_solve, {"initial": 1.0}),
        (
            ValueError,
            "`initial` must have the query's shape (2, 3, 4), got (3, 4)",
            hopfield_solve,
            {"initial": Q[0]},
        ),
        (ValueError, "`rtol` must be >= 0, got -1.0", hopfield_solve, {"rtol": -1.0}),
        (ValueError, "`rtol` must be >= 0, got inf", hopfield_solve, {"rtol": float("inf")}),
        (TypeError, "`atol` must be a number, got None", hopfield_solve, {"atol": None}),
        (ValueError, "`atol` must be >= 0, got -1e-08", hopfield_solve, {"atol": -1e-8}),
        (TypeError, "`max_steps` must be an integer, got 2.5", hopfield_solve, {"max_steps": 2.5}),
        (ValueError, "`max_steps` must be >= 0, got -1", hopfield_solve, {"max_steps": -1}),
        (TypeError, "`plain_steps` must be an integer, got None", hopfield_solve, {"plain_steps": None}),
        (ValueError, "`plain_steps` must be >= 2, got 1", hopfield_solve, {"plain_steps": 1}),
        (
            ValueError,
            "`state` must have the query's shape (2, 3, 4), got (2, 3, 5)",
            hopfield_adjoint,
            {"state": torch.zeros(2, 3, 5), "cotangent": Q},
        ),
        (
            TypeError,
            "`cotangent` must have a floating-point dtype",
            hopfield_adjoint,
            {"state": Q, "cotangent": Q.long()},
        ),
        (ValueError, "`rtol` must be >= 0, got -1.0", hopfield_adjoint, {"state": Q, "cotangent": Q, "rtol": -1.0}),
        (
            ValueError,
            "`max_steps` must be >= 0, got -1",
            hopfield_adjoint,
            {"state": Q, "cotangent": Q, "max_steps": -1},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""),
)
def test_what_one_operation_refuses(operation, error, words, arguments):
    with pytest.raises(error) as caught:
        operation(Q, K, beta=1.0, **arguments)
    assert words in str(caught.value)


def test_a_state_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"`initial` must .*device"):
        hopfield_solve(Q, K, beta=1.0, initial=Q.to("meta"))


def test_nan_in_beta_is_bad_data_and_no_bad_argument():
    found = hopfield_solve(Q + 1, K + 1, beta=torch.tensor([0.5, torch.nan]))
    assert found.status[0].eq(Status.CONVERGED).all()
    assert found.status[1].eq(Status.NONFINITE).all()


def by_operation(query, keys, offset, impl):
    impl = "auto" if impl == "reference" else impl
    return hopfield_solve(
        query, keys, beta=1.0, anchor=0.5, is_causal=True, query_offset=offset, rtol=1e-6, impl=impl
    ).state


def by_attention(query, keys, offset, impl):
    return equilibrium_attention(query, keys, keys, anchor=0.5, is_causal=True, query_offset=offset, impl=impl)


def by_potential(query, keys, offset, impl):
    energy = AnchoredEnergy(LogSumExp(keys, 1.0, query_offset=offset), query, 0.5)
    return solve(energy, query, impl=impl).value


DOORS = pytest.mark.parametrize("door", [by_operation, by_attention, by_potential])


@DOORS
@pytest.mark.parametrize("offset", [2**62 + 1, 2**63 - 1, 2**70])
def test_an_offset_from_which_64_bits_cannot_count_on_is_refused(door, offset):
    words = f"`query_offset` must be <= {2**62}, got {offset}; pass min(offset, number of keys)"
    with pytest.raises(ValueError, match=re.escape(words)):
        door(Q, K, offset, "auto")


@DOORS
@pytest.mark.parametrize("impl", ["auto", "native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_offset_hides_no_key(door, impl, dtype):
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(*t.shape, generator=generator, dtype=dtype) for t in (Q, K))
    expected = door(query, keys, K.shape[-2], impl)
    for offset in (2**31 - 1, 2**31, 2**32, 2**53, 2**62):
        assert torch.equal(door(query, keys, offset, impl), expected)

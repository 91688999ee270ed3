"""Small problems of every form that the operations take, and the map of each written out by itself."""

import collections
import contextlib

import pytest
import torch

from implicit_attention import AnchoredEnergy, Anderson, LogSumExp, Status, solve
from implicit_attention.kernels import AdjointAnswer, Solved, native_status
from implicit_attention.kernels.native import library
from implicit_attention.testing.numerics import random

NATIVE = pytest.param("native", marks=pytest.mark.skipif(native_status().isa is None, reason=str(native_status())))
#: The native operations, and the loop with every product written out.
IMPLEMENTATIONS = pytest.mark.parametrize("impl", [NATIVE, "reference"])


@contextlib.contextmanager
def without_kernels():
    """A machine without native kernels: the loop answers, over torch's attention kernels."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(library.VARIABLE, "off")
        patched.setattr(library, "found", lambda: (None, "switched off"))
        yield


@contextlib.contextmanager
def counted():
    """How often each function of the native library is called."""
    loaded, reason = library.found()
    calls = collections.Counter()

    def counting(name):
        def call(*arguments):
            calls[name] += 1
            return getattr(loaded, name)(*arguments)

        return call

    watched = library.Library(**vars(loaded) | {name: counting(name) for name in ("solve", "adjoint", "step")})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "found", lambda: (watched, reason))
        yield calls


def attended(*shape, seed=5):
    """A boolean mask in which about a third is hidden."""
    return random(*shape, seed=seed) > -0.4


def padding(batch, keys):
    """(batch, 1, 1, M): every sample has a length of its own."""
    lengths = torch.arange(keys - batch, keys) - 6
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def added(*shape):
    """Numbers added to the scores, some of them -inf."""
    return random(*shape, seed=6).masked_fill(~attended(*shape), -torch.inf)


def hidden(row, *shape):
    """A mask of pairs where one query attends to nothing."""
    mask = attended(*shape)
    mask[..., row, :] = False
    return mask


PER_HEAD = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
ANCHORS = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)

# What differs from 9 queries, of 3 heads in 2 samples, over 70 keys of 6 dimensions, beta = 0.8, anchor = 0.2.
CASES = {
    "plain": {},
    "fewer keys than the kernels take": {"m": 20},
    "one key": {"m": 1},
    "one query": {"n": 1},
    "no query": {"n": 0},
    "sizes that are no multiples": {"n": 11, "m": 67, "dim": 5},
    "sizes that are multiples": {"n": 16, "m": 64, "dim": 8},
    "no batch": {"lead": ()},
    "key padding": {"mask": padding(2, 70)},
    "mask of the keys": {"mask": attended(70)},
    "mask of pairs": {"mask": attended(9, 70)},
    "mask of pairs of each sample": {"mask": attended(2, 1, 9, 70)},
    "mask of pairs of each head": {"mask": attended(3, 9, 70)},
    "mask of everything": {"mask": attended(2, 3, 9, 70)},
    "a query that attends to nothing": {"mask": hidden(4, 9, 70)},
    "a query of one head that attends to nothing": {"m": 20, "mask": hidden(4, 3, 9, 20)},
    "added to the keys": {"mask": added(2, 1, 1, 70)},
    "added to pairs": {"mask": added(9, 70)},
    "added to everything": {"m": 20, "mask": added(2, 3, 9, 20)},
    "causal": {"n": 16, "is_causal": True},
    "causal, more queries than keys": {"n": 70, "m": 65, "is_causal": True},
    "causal, more queries than keys, one attends to nothing": {
        "n": 75,
        "m": 70,
        "mask": hidden(72, 75, 70),
        "is_causal": True,
    },
    "causal from a place on": {"n": 16, "is_causal": True, "query_offset": 7},
    "causal to the last key": {"is_causal": True, "query_offset": 61},
    "causal beyond the last key": {"is_causal": True, "query_offset": 66},
    "causal from a place on, masked": {"mask": attended(3, 9, 70), "is_causal": True, "query_offset": 30},
    "grouped and causal from a place on": {
        "lead": (2, 3, 4),
        "keys": (2, 3, 1),
        "is_causal": True,
        "query_offset": 30,
    },
    "causal and padded": {"mask": padding(2, 70), "is_causal": True},
    "causal and masked": {"mask": attended(3, 9, 70), "is_causal": True},
    "causal and added to": {"mask": added(9, 70), "is_causal": True},
    "beta of each head": {"beta": PER_HEAD},
    "beta of each sample": {"beta": torch.tensor([[0.5], [1.5]], dtype=torch.float64)},
    "beta as a tensor": {"beta": torch.tensor(0.8, dtype=torch.float64)},
    "anchor of each head": {"anchor": ANCHORS},
    "anchor and beta of everything": {"beta": random(2, 3).exp(), "anchor": random(2, 3, seed=1).sigmoid()},
    "no anchor": {"anchor": 0.0},
    "nothing but the anchor": {"anchor": 1.0},
    "grouped": {"lead": (2, 3, 4), "keys": (2, 3, 1)},
    "grouped and padded": {"lead": (2, 3, 4), "keys": (2, 3, 1), "mask": padding(2, 70)[:, None]},
    "grouped and masked": {"lead": (2, 3, 4), "keys": (2, 3, 1), "mask": attended(4, 9, 70)},
    "grouped and causal": {"lead": (2, 3, 4), "keys": (2, 3, 1), "is_causal": True},
    "grouped the other way": {"lead": (2, 3, 4), "keys": (2, 1, 4), "mask": attended(2, 1, 4, 9, 70)},
    "one memory of all samples": {"keys": (1, 3)},
    "one memory": {"keys": ()},
    "one memory and masked": {"keys": (), "mask": attended(3, 9, 70), "is_causal": True},
}


def make(name, dtype=torch.float64):
    """(query, keys, the other arguments)."""
    options = {"lead": (2, 3), "n": 9, "m": 70, "dim": 6, "beta": 0.8, "anchor": 0.2, **CASES[name]}
    lead = options.pop("lead")
    n, m, dim = (options.pop(size) for size in ("n", "m", "dim"))
    keys = random(*options.pop("keys", lead), m, dim, seed=1, dtype=dtype)
    for argument in ("beta", "anchor", "mask"):
        tensor = options.get(argument)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            options[argument] = tensor.to(dtype)
    return random(*lead, n, dim, dtype=dtype), keys, options


def pairs(query, keys, mask=None, is_causal=False, query_offset=0):
    """What is added to the scores, (*#batch, N, M)."""
    n, m = query.shape[-2], keys.shape[-2]
    bias = torch.zeros(n, m, dtype=query.dtype)
    if is_causal:
        bias = bias.masked_fill(torch.arange(m) > query_offset + torch.arange(n)[:, None], -torch.inf)
    if mask is not None:
        bias = bias + (mask if mask.is_floating_point() else torch.zeros(()).where(mask, -torch.inf).to(query.dtype))
    return bias


def written_out(z, query, keys, *, beta, anchor, mask=None, is_causal=False, query_offset=0):
    """f(z), mean and logsumexp at z; every product by itself, differentiable."""
    beta, anchor = (torch.as_tensor(t, dtype=z.dtype)[..., None, None] for t in (beta, anchor))
    bias = pairs(query, keys, mask, is_causal, query_offset)
    scores = beta * torch.einsum("...nd,...md->...nm", z, keys.expand(*z.shape[:-2], *keys.shape[-2:])) + bias
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    top = scores.detach().amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    mean = ((weights / total)[..., None] * keys[..., None, :, :]).sum(-2).masked_fill(empty, 0.0)
    logsumexp = (top + total.log()).masked_fill(empty, 0.0).squeeze(-1)
    return anchor * query + (1 - anchor) * mean, mean, logsumexp


# What the operations are compared with.


def solved_by_the_loop(
    query,
    keys,
    *,
    beta,
    anchor,
    mask=None,
    is_causal=False,
    query_offset=0,
    initial=None,
    rtol=1e-4,
    atol=1e-8,
    max_steps=200,
    plain_steps=None,
):
    """The answer of the solvers' loop with every product written out."""
    energy = AnchoredEnergy(
        LogSumExp(keys, beta, bias=pairs(query, keys, mask, is_causal, query_offset)), query, anchor
    )
    solver = Anderson(rtol=rtol, atol=atol, max_steps=max_steps, plain_steps=plain_steps)
    start = query if initial is None else initial
    found = solve(energy, start, solver=solver, impl="reference", on_failure="ignore", adjoint=None)
    z = found.value.detach()
    wide = [t.to(z.dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in (query, keys, mask)]
    numbers = {"beta": torch.as_tensor(beta, dtype=z.dtype), "anchor": torch.as_tensor(anchor, dtype=z.dtype)}
    _, mean, logsumexp = written_out(
        z, *wide[:2], **numbers, mask=wide[2], is_causal=is_causal, query_offset=query_offset
    )
    return Solved(
        found.value, mean, logsumexp, found.status, found.residual, found.tolerance, found.num_steps, found.num_evals
    )


def hessians(query, keys, state, options):
    """I - df/dz of every query, (*batch, N, D, D), one derivative at a time."""
    z = state.detach().requires_grad_()
    mapped = written_out(z, query, keys, **options)[0]
    rows = [torch.autograd.grad(mapped[..., i].sum(), z, retain_graph=True)[0] for i in range(z.shape[-1])]
    return torch.eye(z.shape[-1], dtype=z.dtype) - torch.stack(rows, -2)


def gradients(query, keys, state, u, options):
    """(df/dK)^T u, and <df/dbeta, u> per query."""
    keys = keys.detach().requires_grad_()
    # Scores are products of beta and the state: a factor of the one is a factor of the other.
    factor = torch.ones_like(state[..., :1]).requires_grad_()
    mapped = written_out(factor * state, query, keys, **options)[0]
    by_keys, by_factor = torch.autograd.grad((mapped * u).sum(), (keys, factor))
    return by_keys, by_factor.squeeze(-1) / torch.as_tensor(options["beta"], dtype=state.dtype)[..., None]


def dense_adjoint(query, keys, state, cotangent, *, dtype=torch.float64, **options):
    """The answer of a dense factorisation of every Hessian."""
    query, keys, state, cotangent = (t.to(dtype) for t in (query, keys, state, cotangent))
    options = {
        k: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for k, t in options.items()
    }
    hessian = hessians(query, keys, state, options)
    negative = torch.linalg.eigvalsh(hessian)[..., 0] <= 0
    u = torch.linalg.solve(hessian, cotangent)
    by_keys, by_beta = gradients(query, keys, state, u, options)
    status = torch.where(negative, int(Status.UNSTABLE), int(Status.CONVERGED)).to(torch.int8)
    none = torch.zeros_like(by_beta)
    return AdjointAnswer(u, status, none, none, none, negative, by_beta, by_keys)

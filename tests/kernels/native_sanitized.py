"""Native solves and gradients of many shapes, by a package whose library was compiled with sanitizers."""

import itertools

import torch

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    FixedPointMap,
    LogSumExp,
    PerSample,
    Picard,
    equilibrium_attention,
    solve,
)
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve, native_status

QUERIES = (1, 14, 33)
KEYS = (1, 17, 129)
DIMS = (1, 17, 70)


def masks(queries, keys):
    pairs = torch.rand(queries, keys, generator=torch.Generator().manual_seed(2)) > 0.3
    yield {}
    yield {"is_causal": True}
    yield {"is_causal": True, "query_offset": 6}
    yield {"mask": pairs}
    yield {"mask": pairs[:1], "is_causal": True, "query_offset": 3}
    yield {"mask": torch.where(pairs, 0.5, -torch.inf)[None, None]}


def run(dtype, queries, keys, dim, shared):
    generator = torch.Generator().manual_seed(queries + keys + dim)
    query = torch.randn(2, 3, queries, dim, generator=generator).to(dtype)
    key = torch.randn(2, 1 if shared else 3, keys, dim, generator=generator).to(dtype)
    equilibrium_attention(query, key, key, max_steps=0)
    cotangent = torch.ones_like(query)
    cotangent[0, 0, 0] = 0
    cotangent = cotangent.mT.contiguous().mT
    # Exactly its own memory: what is read beyond it is seen.
    for mask in masks(queries, keys):
        options = {"anchor": 0.4, **mask, "impl": "native"}
        found = hopfield_solve(query, key, beta=0.3, rtol=1e-4, max_steps=30, **options)
        beta = torch.full((3,), 0.3, dtype=dtype)
        hopfield_adjoint(query, key, found.state, cotangent, beta=beta, rtol=1e-4, max_steps=30, **options)
    bias = torch.zeros(2, 3, 1, keys, dtype=dtype, requires_grad=True)
    energy = AnchoredEnergy(LogSumExp(key, 0.3, bias=bias), query, 0.4)
    torch.autograd.grad(
        solve(energy, query, solver=Picard(max_steps=9), on_failure="ignore", impl="native").value, bias, cotangent
    )


def steps(dtype, count, dim):
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(count + dim)).to(dtype)
    x[0] = torch.inf
    for solver in (Picard(max_steps=20), *(Anderson(history=history, max_steps=20) for history in (1, 3, 8))):
        problem = FixedPointMap(lambda z, x: torch.sin(2 * z) + x, PerSample(x), event_ndim=1)
        solve(problem, torch.zeros_like(x), solver=solver, on_failure="ignore")


if __name__ == "__main__":
    for arguments in itertools.product((torch.float32, torch.float64), QUERIES, DIMS):
        steps(*arguments)
    sizes = itertools.product((torch.float32, torch.float64), QUERIES, KEYS, DIMS, (False, True))
    for arguments in sizes:
        run(*arguments)
    print("clean", native_status().isa)

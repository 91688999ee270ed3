"""Cases for masks whose pairs stand in tiles of every kind: which tiles are visited, and what is read of them."""

import torch
import triton_harness as harness
from triton_adjoint_cases import at_solution, check_adjoint, solve_adjoint
from triton_harness import TILED_MASKS, case, cases, large, problem_of, tiled_problem
from triton_oracle import Dense
from triton_solve_cases import STOP, check_solved, solve

from implicit_attention.ops.rule import AdjointRule


@cases(**{name: dict(name=name) for name in TILED_MASKS}, causal=dict(name="documents", first=20))
def solve_tiles(name, **options):
    problem = tiled_problem(name, **options)
    check_solved(problem, solve(problem, problem.field))


@cases(keys=dict(name="keys"), bias=dict(name="bias_of_documents"), gathered=dict(name="keys", ends=(1, 2, 4)))
def solve_reads_no_tile_that_is_masked(name, ends=()):
    problem = tiled_problem(name)
    problem.mask[..., : large(35)] = -torch.inf if problem.mask.is_floating_point() else False
    clean = solve(problem, problem.field, ends=ends)
    problem.keys[..., :32, :] = torch.nan
    for field, before in zip(solve(problem, problem.field, ends=ends), clean, strict=True):
        assert torch.equal(field, before)


def kinds_of(allowed, rows, keys):
    """For each tile of pairs 0 if none is allowed, 2 if all are, else 1; rows beyond the last have no say."""
    n, m = allowed.shape
    padded = allowed.new_ones(-(-n // rows) * rows, -(-m // keys) * keys)
    padded[:n, :m], padded[:n, m:] = allowed, False
    some = torch.zeros_like(padded)
    some[:n, :m] = allowed
    whole, some = (t.unflatten(1, (-1, keys)).unflatten(0, (-1, rows)) for t in (padded, some))
    return some.any(-1).any(1).int() * (1 + whole.all(-1).all(1).int())


@cases(plain=dict(), causal=dict(first=3), keys=dict(mask="keys"), keys_causal=dict(mask="keys", first=0))
def solve_lists_the_tiles_of_a_mask(mask="documents", first=None):
    from implicit_attention.ops.triton.layout import KernelLayout, Tiles, alike
    from implicit_attention.ops.triton.mask_tiles import MaskTiles

    problem = tiled_problem(mask)._replace(first=first)
    layout, tile = KernelLayout.of(problem), Tiles(16, 32, 4, 1)
    allowed = Dense.of(problem).bias == 0
    assert alike(problem) == (mask == "keys" and first is None)
    for by_keys in (False, True):
        found = MaskTiles.of(problem, layout, tile, by_keys=by_keys)
        # Sets that share a mask share an entry.
        assert len(found.visited) == 1
        assert found.strides == (0, 0, 0)
        kinds = kinds_of(allowed[0, :1] if alike(problem) and not by_keys else allowed[0], 16, 32)
        for number, right in enumerate((kinds.T if by_keys else kinds).tolist()):
            whole, end = found.counts[0, number].tolist()
            listed = found.visited[0, number].tolist()
            assert set(listed[:whole]) == {i for i, kind in enumerate(right) if kind == 2}
            assert set(listed[whole:end]) == {i for i, kind in enumerate(right) if kind == 1}


@cases(**{name: dict(name=name) for name in TILED_MASKS}, causal=dict(name="documents", first=20))
def adjoint_tiles(name, **options):
    check_adjoint(tiled_problem(name, **options))


@case
def adjoint_reads_no_tile_that_is_masked():
    problem = tiled_problem("documents")
    problem.mask[..., : large(35)] = False
    _, z, mean, logsumexp = at_solution(problem)
    cotangent = torch.randn(z.shape).to(harness.DEVICE)
    clean = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    problem.keys[..., :32, :] = torch.nan
    found = solve_adjoint(problem, z, cotangent, mean, logsumexp, AdjointRule(1e-5, 60))
    for field, before in zip(found, clean, strict=True):
        assert torch.equal(field, before)
    assert bool((found.by_keys[..., :32, :] == 0).all())


def blocks(*lead, n=20, m=40):
    """Masks with tiles of 16 x 16 of every kind, other ones for every entry."""
    kinds = torch.randint(0, 3, (*lead, -(-n // 16), -(-m // 16)))
    kinds = kinds.repeat_interleave(16, -2).repeat_interleave(16, -1)[..., :n, :m]
    return (kinds == 2) | ((kinds == 1) & (torch.rand(*lead, n, m) < 0.5))


MASK_LAYOUTS = {
    "samples": dict(mask=lambda: blocks(2, 1)),
    "heads": dict(mask=lambda: blocks(1, 3)),
    "transposed": dict(mask=lambda: blocks(3, 2).transpose(0, 1)),
    "expanded": dict(mask=lambda: blocks(1, 3).expand(2, 3, 20, 40), keys_lead=(2, 1)),
    "three_axes": dict(mask=lambda: blocks(2, 2, 2).permute(2, 0, 1, 3, 4), lead=(2, 2, 2), keys_lead=(2, 1, 2)),
    "keys_of_samples": dict(mask=lambda: blocks(2, 1, n=1)),
    "keys_of_heads_causal": dict(mask=lambda: blocks(1, 3, n=1), keys_lead=(2, 1), first=5),
    "rows_alike": dict(mask=lambda: blocks(2, 3, n=1).expand(2, 3, 20, 40)),
    "columns_alike": dict(mask=lambda: blocks(2, 3)[..., :1].expand(2, 3, 20, 40), first=3),
    "bias_causal": dict(mask=lambda: torch.zeros(2, 1, 20, 40).masked_fill(~blocks(2, 1), -torch.inf), first=7),
}


@cases(**{name: dict(name=name) for name in MASK_LAYOUTS})
def solve_mask_laid_out(name):
    from implicit_attention.ops.triton import layout

    options = {"lead": (2, 3), **MASK_LAYOUTS[name]}
    # At twice the inverse temperature queries of three keys end on saddles.
    problem = problem_of(**options | {"n": 20, "m": 40, "dim": 16, "beta": 0.3, "mask": None})
    tables = {kernel: dict(table) for kernel, table in layout.TILES.items()}
    if harness.DEVICE == "cuda":
        return
    layout.TILES.update({kernel: {max(table): layout.Tiles(16, 16, 1, 1)} for kernel, table in tables.items()})
    try:
        problem = problem._replace(mask=options["mask"]())
        stop = STOP._replace(max_steps=6)
        check_solved(problem, solve(problem, problem.field, stop), stop)
        check_adjoint(problem)
    finally:
        layout.TILES.update(tables)

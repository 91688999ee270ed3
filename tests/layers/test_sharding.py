"""Layers on two processes: heads that are sharded answer as on one, and what would be wrong is refused."""

import pytest
import torch
from processes import error_of, together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from implicit_attention import (
    AnchoredEnergy,
    AttentionPooling,
    EquilibriumTransformer,
    ImplicitAttention,
    LogSumExp,
    Rotary,
    equilibrium_attention,
    solve,
)
from implicit_attention.integrations.multihead import ImplicitMultiheadAttention
from implicit_attention.integrations.timm import EquilibriumAttention
from implicit_attention.layers import EnergyTransformer, MeanFieldAttention, SpinAttention
from implicit_attention.solvers import Anderson

pytestmark = pytest.mark.slow

DIM, HEADS, TOKENS = 24, 4, 10
BY_HAND = {name: ColwiseParallel for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel}
RIGHT = {
    "one step": {"max_steps": 0},
    "solved": {},
    "single": {"dtype": torch.float32},
    "by hand": {},
    "grouped": {"kv_heads": 2, "causal": True},
    "normed": {"qk_norm": "rms", "rotary": Rotary(), "projection_bias": True},
    "normed by hand": {"qk_norm": "layer"},
    "state": {"readout": "state", "beta": 0.3},
    "masked": {},
    "pooling": {"anchor": 0.8},
    "block": {"anchor": 0.8},
    "one process": {"qk_norm": "rms"},
    "FSDP too": {},
}
REFUSED = {
    "three heads": {"heads": 3},
    "one shared head": {"kv_heads": 1},
    "queries only": {},
    "output not sharded": {},
    "tokens sharded": {"causal": True},
    "DTensors out": {},
}
#: Layers whose heads are not spread, with the names of projections that somebody may shard.
OTHERS = {
    "spins": (lambda: SpinAttention(DIM, HEADS), "in_proj", "out_proj"),
    "mean field": (lambda: MeanFieldAttention(DIM, HEADS), "in_proj", "out_proj"),
    "free mean field": (lambda: MeanFieldAttention(DIM, HEADS, mixing="free", sites=TOKENS), "in_proj", "out_proj"),
    "softmax": (
        lambda: EquilibriumTransformer(DIM, HEADS),
        *(f"block.layers.0.attention.{p}_proj" for p in ("qkv", "out")),
    ),
    "timm": (lambda: EquilibriumAttention(DIM, HEADS), "qkv", "proj"),
    "multihead": (lambda: ImplicitMultiheadAttention(DIM, HEADS, batch_first=True), None, "out_proj"),
    "energy": (lambda: EnergyTransformer(DIM, HEADS, 6, 10), None, None),
}


def layer(case=None, heads=HEADS, **options):
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "solver": Anderson(rtol=1e-12, atol=1e-14)} | options
    if options["dtype"] == torch.float32:
        del options["solver"]
    if case == "pooling":
        made = AttentionPooling(DIM, heads, queries=3, **options)
    elif case == "block":
        solver = Anderson(rtol=1e-13, atol=1e-13)
        made = EquilibriumTransformer(DIM, heads, attention=ImplicitAttention(DIM, heads, **options), solver=solver)
    else:
        made = ImplicitAttention(DIM, heads, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith(("anchor", "beta", "q_norm", "k_norm")):
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64))
    return made.to(options["dtype"])


def answer(made, case):
    """Output, gradients and parameters after a step; those that are sharded put together."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(made.parameters()).dtype
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    mask = torch.randn(2, HEADS, TOKENS, TOKENS, dtype=torch.float64, generator=generator).requires_grad_()
    output = made(x, **({"mask": mask} if case == "masked" else {}))
    (output * torch.arange(DIM, dtype=torch.float64)).sum().backward()
    found = {"output": output, "x": x.grad, "mask": mask.grad} | {n: p.grad for n, p in made.named_parameters()}
    found = {name: t.detach() * 1 for name, t in found.items() if t is not None}
    if case not in ("pooling", "block"):
        # Plain tensors beside DTensors, which torch does not take together.
        if "by hand" not in case:
            found["norm"] = nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        torch.optim.AdamW(made.parameters(), lr=0.1, foreach="by hand" not in case).step()
        found |= {f"{name} after a step": p.detach() for name, p in made.named_parameters()}
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()}
    return {name: t * 1 for name, t in whole.items()}  # what is still on its way arrives


def plan(made, case):
    if "by hand" in case or (case in REFUSED and case != "three heads"):
        styles = {name: style() for name, style in BY_HAND.items()}
    else:
        layers = {name: part for name, part in made.named_modules() if isinstance(part, ImplicitAttention)}
        styles = {f"{name}.{key}".lstrip("."): s for name, p in layers.items() for key, s in p.parallel_plan().items()}
    if case == "queries only":
        styles = {"q_proj": ColwiseParallel()}
    if case == "output not sharded":
        del styles["out_proj"]
    if case == "tokens sharded":
        styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q_proj", "k_proj", "v_proj")}
    if case == "DTensors out":
        styles["q_proj"] = ColwiseParallel(use_local_output=False)
    return styles


def sharded(case, mesh, grid):
    made = layer(case, **RIGHT[case])
    if case == "one process":
        return parallelize_module(made, grid["samples"], plan(made, case))
    if case == "FSDP too":
        return fully_shard(parallelize_module(made, grid["heads"], plan(made, case)), mesh=grid["samples"])
    return parallelize_module(made, mesh, plan(made, case))


def other(case, mesh):
    make, inward, outward = OTHERS[case]
    made = make()
    if case == "energy":
        made.w_query = nn.Parameter(distribute_tensor(made.w_query.detach(), mesh, [Shard(0)]))
    styles = {inward: ColwiseParallel(), outward: RowwiseParallel()}
    made = parallelize_module(made, mesh, {name: style for name, style in styles.items() if name is not None})
    x = torch.randn(2, TOKENS, DIM)
    return made(x, x, x) if case == "multihead" else made(x)


@torch.no_grad()
def decoded(made):
    """Tokens answered one at a time, with the states and weights of the last."""
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cache, asked = made.new_cache(warm_start=True), {"return_solution": True, "return_weights": True}
    outputs, solutions, weights = zip(*(made(token, cache=cache, **asked) for token in x.split(1, dim=1)), strict=True)
    return torch.cat(outputs, dim=1), solutions[-1].value, weights[-1]


def work(rank):
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2), mesh_dim_names=("samples", "heads"))
    found = {case: answer(sharded(case, mesh, grid), case) for case in RIGHT}
    made = parallelize_module(layer(), mesh, plan(layer(), "solved"))
    found["placements"] = {name: p.placements[0] for name, p in made.named_parameters()}
    found["token by token"] = decoded(parallelize_module(layer(anchor=0.8), mesh, plan(layer(anchor=0.8), "solved")))
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    for case, options in REFUSED.items():
        made = layer(**options)
        made = parallelize_module(made, mesh, plan(made, case))
        part = x[:, : TOKENS // 2] if case == "tokens sharded" else x
        found[case] = error_of(lambda made=made, part=part: made(part))
    found |= {case: error_of(lambda case=case: other(case, mesh)) for case in OTHERS}
    for place in (Replicate(), Shard(1)):
        spread = distribute_tensor(torch.randn(2, 8, 100, 8), mesh, [place])
        found[f"equilibrium_attention {place}"] = error_of(lambda t=spread: equilibrium_attention(t, t, t))
        found[f"solve {place}"] = error_of(lambda t=spread: solve(AnchoredEnergy(LogSumExp(t, 0.3), t, 0.5), t))
        found[f"layer {place}"] = error_of(lambda t=spread: ImplicitAttention(8, 1, bare=True)(t))
    for tokens in (40, 256):
        buffer = torch.randn(2, tokens, DIM, dtype=torch.float64)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            found[f"context {tokens}"] = error_of(lambda t=buffer: layer()(t))
            heads = buffer[:, None]
            found[f"context function {tokens}"] = error_of(
                lambda t=heads: equilibrium_attention(t, t, t, is_causal=True)
            )
        found[f"after context {tokens}"] = error_of(lambda t=buffer: layer()(t))
    return found


@pytest.fixture(scope="module")
def found():
    return together(work, 2)


@pytest.mark.parametrize("case", RIGHT)
def test_sharded_heads_answer_as_one_process_does_with_every_gradient_on_every_process(case, found):
    whole = answer(layer(case, **RIGHT[case]), case)
    for of_rank in found:
        assert of_rank[case].keys() == whole.keys()
        for name, expected in whole.items():
            bound = 1e-6 if case == "single" else 1e-12
            error = (of_rank[case][name] - expected).abs().max()
            assert error <= bound * max(1, expected.abs().max()), (case, name, error)


def test_decoding_answers_the_same_with_states_and_weights_of_the_own_heads(found):
    outputs, states, weights = decoded(layer(anchor=0.8))
    halves = slice(0, HEADS // 2), slice(HEADS // 2, HEADS)
    for of_rank, own in zip(found, halves, strict=True):
        ours = of_rank["token by token"]
        for part, whole in zip(ours, (outputs, states[:, own], weights[:, own]), strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)


def test_the_plan_spreads_projections_anchor_and_temperature_by_head(found):
    columns = dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "anchor.logit", "beta.log_scale"), 0)
    for of_rank in found:
        places = of_rank["placements"]
        assert {name: place.dim for name, place in places.items()} == columns | {"out_proj.weight": 1}
    assert layer(anchor=0.5, beta=0.3, readout="state").parallel_plan().keys() == {"q_proj", "k_proj", "out_proj"}


@pytest.mark.parametrize("options", [{"heads": 1}, {"heads": 4, "kv_heads": 1}, {"heads": 1, "bare": True}])
def test_a_single_head_has_no_plan(options):
    with pytest.raises(ValueError, match=r"`(kv_)?heads` must be > 1 to be spread over processes, got 1; leave"):
        ImplicitAttention(DIM, **options).parallel_plan()


@pytest.mark.parametrize("case", OTHERS)
def test_layers_without_a_plan_refuse_projections_that_are_sharded(case, found):
    for of_rank in found:
        assert "cannot be spread over processes" in of_rank[case] or "got a DTensor" in of_rank[case], of_rank[case]


@pytest.mark.parametrize("case", REFUSED)
def test_other_ways_to_shard_are_refused_on_every_process(case, found):
    for of_rank in found:
        assert of_rank[case].startswith(("ValueError: `q_proj`", "TypeError: `")), of_rank[case]
        assert "layer.parallel_plan()" in of_rank[case]


def test_distributed_tensors_are_told_which_way_works(found):
    for of_rank in found:
        for case, told in of_rank.items():
            if case.startswith(("equilibrium_attention ", "solve ", "layer ")):
                assert told.startswith("TypeError: `"), (case, told)
                assert "must be a tensor of this process, got a DTensor" in told
                assert ".full_tensor()" in told


def test_sharded_sequences_are_refused_at_every_length_and_only_while_they_are_sharded(found):
    for of_rank in found:
        for tokens in (40, 256):
            for case in (f"context {tokens}", f"context function {tokens}"):
                assert "inside `context_parallel`" in of_rank[case], of_rank[case]
                assert "shard samples" in of_rank[case]
            assert of_rank[f"after context {tokens}"] == "no error"

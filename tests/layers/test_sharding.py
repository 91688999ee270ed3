"""Layers on two processes: heads that are sharded answer as on one, and what would be wrong is refused."""

import datetime

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from implicit_attention import AnchoredEnergy, ImplicitAttention, LogSumExp, Rotary, equilibrium_attention, solve
from implicit_attention.solvers import Anderson

DIM, HEADS, TOKENS = 24, 4, 10
PLAN = {name: ColwiseParallel for name in ("q_proj", "k_proj", "v_proj")} | {"out_proj": RowwiseParallel}
RIGHT = {
    "one step": {"max_steps": 0},
    "solved": {},
    "grouped": {"kv_heads": 2, "causal": True},
    "normed": {"qk_norm": "rms", "rotary": Rotary(), "projection_bias": True},
    "inside": {"values_inside": True, "anchor": 0.5},
    "state": {"readout": "state", "beta": 0.3},
    "masked": {},
}
REFUSED = {
    "three heads": {"heads": 3},
    "one shared head": {"kv_heads": 1},
    "queries only": {},
    "output not sharded": {},
    "tokens sharded": {"causal": True},
    "DTensors out": {},
}


def layer(heads=HEADS, **options):
    torch.manual_seed(0)
    options = {"solver": Anderson(rtol=1e-12, atol=1e-14)} | options
    made = ImplicitAttention(DIM, heads, dtype=torch.float64, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.startswith(("anchor", "beta", "q_norm", "k_norm")):
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64))
    return made


def answer(made, case):
    """Output and gradients, of the input and of every parameter; those that are sharded put together."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.randn(2, HEADS, TOKENS, TOKENS, dtype=torch.float64, generator=generator).requires_grad_()
    output = made(x, **({"mask": mask} if case == "masked" else {}))
    (output * torch.arange(DIM, dtype=torch.float64)).sum().backward()
    found = {"output": output, "x": x.grad, "mask": mask.grad} | {n: p.grad for n, p in made.named_parameters()}
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items() if t is not None}
    return {name: t.detach() * 1 for name, t in whole.items()}  # what is still on its way arrives


def tried(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def plan(case):
    styles = {name: style() for name, style in PLAN.items() if not (case == "state" and name == "v_proj")}
    if case == "queries only":
        styles = {"q_proj": ColwiseParallel()}
    if case == "output not sharded":
        del styles["out_proj"]
    if case == "tokens sharded":
        styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q_proj", "k_proj", "v_proj")}
    if case == "DTensors out":
        styles["q_proj"] = ColwiseParallel(use_local_output=False)
    return styles


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (2,))
    found = {case: answer(parallelize_module(layer(**o), mesh, plan(case)), case) for case, o in RIGHT.items()}
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    for case, options in REFUSED.items():
        made = parallelize_module(layer(**options), mesh, plan(case))
        part = x[:, : TOKENS // 2] if case == "tokens sharded" else x
        found[case] = tried(lambda made=made, part=part: made(part))
    for place in (Replicate(), Shard(1)):
        spread = distribute_tensor(torch.randn(2, 8, 100, 8), mesh, [place])
        found[f"equilibrium_attention {place}"] = tried(lambda t=spread: equilibrium_attention(t, t, t))
        found[f"solve {place}"] = tried(lambda t=spread: solve(AnchoredEnergy(LogSumExp(t, 0.3), t, 0.5), t))
        found[f"layer {place}"] = tried(lambda t=spread: ImplicitAttention(8, 1, bare=True)(t))
    for tokens in (40, 256):
        buffer = torch.randn(2, tokens, DIM, dtype=torch.float64)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            found[f"context {tokens}"] = tried(lambda t=buffer: layer()(t))
            heads = buffer[:, None]
            found[f"context function {tokens}"] = tried(lambda t=heads: equilibrium_attention(t, t, t, is_causal=True))
        found[f"after context {tokens}"] = tried(lambda t=buffer: layer()(t))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", RIGHT)
def test_sharded_heads_answer_as_one_process_does_with_every_gradient_on_every_process(case, found):
    whole = answer(layer(**RIGHT[case]), case)
    for of_rank in found:
        assert of_rank[case].keys() == whole.keys()
        for name, expected in whole.items():
            torch.testing.assert_close(of_rank[case][name], expected, rtol=1e-8, atol=1e-8, msg=f"{case} {name}")


@pytest.mark.parametrize("case", REFUSED)
def test_other_ways_to_shard_are_refused_on_every_process(case, found):
    for of_rank in found:
        assert of_rank[case].startswith(("ValueError: `q_proj`", "TypeError: `")), of_rank[case]
        assert "ColwiseParallel()" in of_rank[case]


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

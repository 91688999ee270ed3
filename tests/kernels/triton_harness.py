"""What the cases for the Triton kernels share: their registry, tensors that give misuse away, problems, errors."""

import torch

from implicit_attention.kernels.problem import Attention

CASES = {}
DEVICE = "cpu"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MARGIN = 64
MAGIC = 77


def case(function):
    CASES[function.__name__] = function
    return function


def cases(**variants):
    """One case for each named set of arguments."""

    def add(function):
        for name, arguments in variants.items():
            CASES[f"{function.__name__}_{name}"] = lambda arguments=arguments: function(**arguments)
        return function

    return add


# Tensors that give misuse away.


def large(size, factor=16):
    """A size of the compiled variant."""
    return size if DEVICE == "cpu" or size == 0 else size * factor + size % 3


def guarded(tensor):
    """The tensor as a non-contiguous part of one with NaN all around it."""
    padded = torch.full((*tensor.shape[:-2], tensor.shape[-2] + 3, tensor.shape[-1] + 8), torch.nan, dtype=tensor.dtype)
    padded[..., : tensor.shape[-2], : tensor.shape[-1]] = tensor
    return padded.to(DEVICE)[..., : tensor.shape[-2], : tensor.shape[-1]]


class Poison:
    """Stands in for `torch.empty` and `empty_like`: poisoned, with margins that nothing may write to."""

    def __init__(self):
        self.empty, self.buffers = torch.empty, []

    def __enter__(self):
        self.saved = torch.empty, torch.empty_like
        torch.empty, torch.empty_like = self.make, self.like
        return self

    def make(self, *shape, dtype=None, device=None, **options):
        if device is None or torch.device(device).type == "meta":
            return self.empty(*shape, dtype=dtype, device=device, **options)
        shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        dtype = dtype or torch.float32
        fill = torch.nan if dtype.is_floating_point else True if dtype == torch.bool else MAGIC
        whole = torch.full((shape.numel() + 2 * MARGIN,), fill, dtype=dtype, device=device)
        self.buffers.append(whole)
        return whole[MARGIN : MARGIN + shape.numel()].view(shape)

    def like(self, tensor, dtype=None, **options):
        return self.make(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)

    def __exit__(self, *error):
        torch.empty, torch.empty_like = self.saved
        for whole in self.buffers:
            margins = torch.cat([whole[:MARGIN], whole[-MARGIN:]])
            untouched = (
                margins.isnan() if whole.is_floating_point() else margins == (1 if whole.dtype == torch.bool else MAGIC)
            )
            assert bool(untouched.all()), "written out of bounds"


# Problems.


def problem_of(
    lead=(2, 2), keys_lead=None, n=37, m=50, dim=40, dtype=FP32, beta=0.6, anchor=0.5, seed=0, exact=False, **options
):
    """Gaussian queries and keys, of `exact` numbers on every device; beta in units of 1/sqrt(dim)."""
    torch.manual_seed(seed)
    n, m = (n, m) if exact else (large(n), large(m))
    keys_lead = lead if keys_lead is None else keys_lead
    ones = (1,) * len(lead)

    def number(value):
        value = torch.as_tensor(value, dtype=FP32)
        return value.reshape((*ones[value.ndim :], *value.shape)).to(DEVICE)

    return Attention.of(
        query=guarded(torch.randn(*lead, n, dim).to(dtype)),
        keys=guarded(torch.randn(*keys_lead, m, dim).to(dtype)),
        beta=number(beta) / dim**0.5,
        anchor=number(anchor),
        **options,
    )


def sign_aside(tensor):
    """The same numbers, whose memory holds the negative ones: torch applies the sign when it reads them."""
    return torch.complex(tensor, -tensor).conj().imag


def error(value, exact):
    """Root mean square over all entries."""
    return (value.double() - exact.double()).square().mean().sqrt().item()


def check_error(what, value, rough, exact, slack=0.0):
    """At most twice the error of the plain computation in the same precision."""
    ours, theirs, size = error(value, exact), error(rough, exact), exact.double().square().mean().sqrt().item()
    floor = slack * size + 2 * torch.finfo(FP32).eps * (size + 1)
    assert ours <= 2 * theirs + floor, f"{what}: error {ours:.2e}, of the plain computation {theirs:.2e}"


SHAPES = {
    "one_query": dict(lead=(1,), n=1, m=37, dim=16, exact=True),
    "one_key": dict(lead=(1,), n=5, m=1, dim=32, exact=True),
    "one_pair": dict(lead=(2,), n=1, m=1, dim=16, dtype=BF16, exact=True),
    "few": dict(lead=(2,), n=5, m=5, dim=64, exact=True),
    "bf16_few": dict(lead=(2,), n=16, m=5, dim=64, dtype=BF16, first=0, exact=True),
    "one_small_tile": dict(lead=(2,), n=16, m=16, dim=128, exact=True),
    "ragged": dict(lead=(2,), n=37, m=50, dim=40, beta=[0.6, 1.1], anchor=[0.3, 0.0]),
    "whole_tiles": dict(lead=(1,), n=32, m=64, dim=32),
    "dim_96": dict(lead=(1,), n=37, m=37, dim=96),
    "dim_128": dict(lead=(1,), n=16, m=33, dim=128),
    "dim_5": dict(lead=(1,), n=16, m=33, dim=5),
    "no_batch": dict(lead=(), n=16, m=33, dim=16),
    "grouped": dict(lead=(2, 2, 2), keys_lead=(2, 2, 1), n=5, m=33, dim=16, beta=[[0.6], [0.8]]),
    "shared_keys": dict(lead=(2, 3), keys_lead=(1, 1), n=16, m=33, dim=16, anchor=[0.4, 0.5, 0.6]),
    "per_head_keys": dict(lead=(3, 2), keys_lead=(1, 2), n=16, m=33, dim=16),
    "causal": dict(lead=(2,), n=50, m=37, dim=16, first=0),
    "causal_wide": dict(lead=(2,), n=37, m=50, dim=16, first=0),
    "causal_from": dict(lead=(2,), n=37, m=80, dim=16, first=21),
    "causal_beyond": dict(lead=(2,), n=37, m=50, dim=16, first=40),
    "causal_far_beyond": dict(lead=(2,), n=37, m=50, dim=16, first=2**31 - 1),
    "fp16": dict(lead=(2,), n=37, m=50, dim=40, dtype=FP16, beta=[0.6, 1.1], anchor=[0.3, 0.0]),
    "bf16": dict(lead=(2,), n=37, m=50, dim=40, dtype=BF16, beta=[0.6, 1.1], anchor=[0.3, 0.0]),
    "bf16_causal": dict(lead=(1, 2), keys_lead=(1, 1), n=37, m=50, dim=64, dtype=BF16, first=0),
    "bf16_dim_192": dict(lead=(1,), n=33, m=37, dim=192, dtype=BF16),
    "fp16_dim_256": dict(lead=(1,), n=16, m=40, dim=256, dtype=FP16, first=30),
    "fp16_one_query": dict(lead=(2,), n=1, m=16, dim=64, dtype=FP16, exact=True),
}
MASKS = {
    "padding": lambda n, m: (torch.arange(m) < torch.tensor([m, 0, m // 2])[:, None])[:, None, None, :],
    "per_query": lambda n, m: torch.rand(2, n, m) < torch.linspace(0, 1, n)[:, None],
    "per_sample": lambda n, m: torch.rand(3, 1, n, m) < 0.5,
    "bias": lambda n, m: torch.randn(2, n, m).masked_fill(torch.rand(2, n, m) < 0.3, -torch.inf),
    "bias_padding": lambda n, m: torch.randn(3, 1, 1, m).bfloat16(),
    "bias_per_pair": lambda n, m: torch.full((n, m), torch.finfo(FP32).min).triu(1),
}


def masked_problem(name, dtype=FP32, **options):
    problem = problem_of(lead=(3, 2), n=17, m=34, dim=16, dtype=dtype, **options)
    mask = MASKS[name](problem.query.shape[-2], problem.keys.shape[-2])
    return problem.paired(mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape).to(DEVICE))


def documents(n, m, length=40):
    """Which rows and columns belong to the same one of several documents."""
    return torch.arange(n)[:, None] // large(length) == torch.arange(m) // large(length)


# Masks of several tiles in which tiles of every kind stand beside each other.
TILED_MASKS = {
    "keys": lambda n, m: ((torch.arange(m) >= large(35)) & (torch.arange(m) < m - large(3)))[None],
    "documents": documents,
    "none_for_some": lambda n, m: documents(n, m) & (torch.arange(n)[:, None] >= large(35)),
    "bias_of_documents": lambda n, m: torch.zeros(n, m).masked_fill(~documents(n, m), -torch.inf),
    "bias_that_is_low": lambda n, m: torch.zeros(n, m).masked_fill(~documents(n, m), torch.finfo(FP32).min),
}


def tiled_problem(name, dtype=FP32, **options):
    """A problem with one of these masks."""
    problem = problem_of(lead=(2,), keys_lead=(1,), n=60, m=100, dim=16, dtype=dtype, **options)
    mask = TILED_MASKS[name](problem.query.shape[-2], problem.keys.shape[-2])
    return problem.paired(mask.expand(1, *mask.shape).to(DEVICE))


# Tiles.

SHIPPED = {}


def shrink_tiles():
    """In the interpreter: tiles so small that small problems have several."""
    from implicit_attention.kernels.triton import layout

    SHIPPED.update(layout.TILES if not SHIPPED else {})
    if DEVICE == "cpu":
        small = {kernel: {max(SHIPPED[kernel]): layout.Tiles(32, 32, 4, 1)} for kernel in SHIPPED}
        small |= {("keys", bits): {max(SHIPPED["keys", bits]): layout.Tiles(16, 32, 4, 1)} for bits in (True, False)}
        layout.TILES.update(small)


def tile_of(kernel, dtype):
    """The tiles of a kernel for a problem of a small head dimension that fills them."""
    from implicit_attention.kernels.triton import layout

    table = layout.TILES[kernel, dtype.itemsize == 2]
    return table[min(table)]

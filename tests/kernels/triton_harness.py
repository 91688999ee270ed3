"""What the cases for the Triton kernels share: their registry, tensors that give misuse away, problems, errors."""

import contextlib
import itertools
import random

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


def check_error(what, value, rough, exact, slack=0.0, terms=0.0):
    """At most twice the error of the plain computation in the same precision; terms of that size cancel."""
    ours, theirs, size = error(value, exact), error(rough, exact), exact.double().square().mean().sqrt().item()
    floor = slack * size + 2 * torch.finfo(FP32).eps * (size + 1 + terms)
    assert ours <= 2 * theirs + floor, f"{what}: error {ours:.2e}, of the plain computation {theirs:.2e}"


# Every value of every axis, and every pair of values of two axes that is possible.

AXES = {
    "dtype": {"fp32": FP32, "fp16": FP16, "bf16": BF16},
    "mask": ("all", "keys", "pairs", "bias_of_keys", "bias_of_pairs"),
    "first": {"of_all": None, "causal": 0, "later": 9, "beyond": 2**31 - 1},
    # Leading axes of queries and keys, betas, anchors.
    "heads": {
        "one": ((), (), 0.4, 0.5),
        "two": ((2,), (2,), [0.2, 0.3], [0.3, 0.0]),
        "grouped": ((2, 2, 2), (2, 2, 1), [[0.4], [0.6]], 0.5),
        "shared": ((1, 3), (1, 1), 0.4, [0.4, 0.5, 0.6]),
        "per_head": ((3, 2), (1, 2), 0.4, 0.5),
    },
    "dim": (1, 5, 16, 33, 64, 128, 192, 256),
    "n": (1, 5, 15, 16, 17, 300),
    "m": (1, 5, 15, 16, 17, 300),
    # How keys stand in memory: in rows, transposed, behind an odd address, or with a stride of 0.
    "layout": ("rows", "columns", "late", "one_key", "one_number", "one_set"),
}


def possible(dtype=None, heads=None, dim=1, n=1, m=1, layout=None, **others):
    """Whether kernels take such a problem, and the interpreter does it in seconds."""
    sets = torch.Size(AXES["heads"][heads][0]).numel() if heads else 1
    tiles = sets * -(-n // 32) * (-(-m // 32) + 3)
    return not (
        (dtype == "fp32" and dim > 128)
        or (layout == "one_set" and heads == "one")
        or tiles > 150
        or sets * n * dim * (m + dim) > 5e7
    )


def matrix(seed=0, tries=40):
    """Problems by name: at first those that have every value of every axis, then those with all other pairs."""
    chance = random.Random(seed)
    names, values = list(AXES), [list(axis) for axis in AXES.values()]

    def pairs(row):
        return set(itertools.combinations(zip(names, row, strict=True), 2))

    def drawn(**fixed):
        while True:
            row = {name: fixed.get(name, chance.choice(axis)) for name, axis in zip(names, values, strict=True)}
            if possible(**row):
                return tuple(row.values())

    # Listed queries of several tiles.
    rows = [
        ("fp32", "all", "of_all", "two", 16, 300, 300, "rows"),
        ("bf16", "all", "causal", "one", 64, 300, 300, "columns"),
    ]
    every = {(name, value) for name, axis in zip(names, values, strict=True) for value in axis}
    while left := every - {part for row in rows for part in zip(names, row, strict=True)}:
        name, value = min(left, key=str)
        rows.append(
            max(
                (drawn(**{name: value}) for _ in range(tries)),
                key=lambda row: len(left & {*zip(names, row, strict=True)}),
            )
        )
    first = len(rows)
    missing = {pair for pair in itertools.combinations(sorted(every, key=str), 2) if pair[0][0] != pair[1][0]}
    missing = {tuple(sorted(pair, key=lambda part: names.index(part[0]))) for pair in missing}
    missing = {pair for pair in missing if possible(**dict(pair))}
    missing -= {pair for row in rows for pair in pairs(row)}
    while missing:
        fixed = dict(min(missing, key=str))
        best = max((drawn(**fixed) for _ in range(tries)), key=lambda row: len(missing & pairs(row)))
        rows.append(best)
        missing -= pairs(best)
    # Of many sets and many queries only these, which are not drawn.
    rows.append(("fp32", "keys", "of_all", "grouped", 16, 300, 16, "rows"))
    rows.append(("fp16", "all", "causal", "per_head", 33, 300, 17, "late"))
    return {
        f"{'value' if at < first else 'pair'}_{at}": dict(zip(names, row, strict=True)) for at, row in enumerate(rows)
    }


SHAPES = matrix()


def shape_problem(dtype, mask, first, heads, dim, n, m, layout):
    lead, keys_lead, beta, anchor = AXES["heads"][heads]
    problem = problem_of(
        lead=lead,
        keys_lead=keys_lead,
        n=n,
        m=m,
        dim=dim,
        dtype=AXES["dtype"][dtype],
        beta=beta,
        anchor=anchor,
        first=AXES["first"][first],
        exact=True,
        seed=n + m + dim,
    )
    problem = problem._replace(keys=laid_out(problem.keys, layout))
    if mask == "all":
        return problem
    pairs = torch.rand((*(1,) * (len(lead) - 1), *lead[-1:], n if mask.endswith("pairs") else 1, m)) < 0.7
    if mask.startswith("bias"):
        pairs = torch.randn(pairs.shape).masked_fill(~pairs, -torch.inf)
    return problem.paired(pairs.to(DEVICE))


def laid_out(keys, layout):
    """Keys of the same shape in another layout, of the same numbers where it can hold them."""
    if layout == "columns":
        return guarded(keys.mT.cpu()).mT
    if layout == "late":
        return keys.new_full((keys.numel() + 1,), torch.nan)[1:].view(keys.shape).copy_(keys)
    if layout == "one_key":
        return keys[..., :1, :].expand(keys.shape)
    if layout == "one_number":
        return (keys[..., :1] * keys.shape[-1] ** -0.25).expand(keys.shape)
    if layout == "one_set":
        return keys[(0,) * (keys.ndim - 2)].expand(keys.shape)
    return keys


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


def hasten():
    """Let the interpreter prepare `triton.language` once for a function, and not at each call: half of the time."""
    from triton.runtime import interpreter

    prepared = set()

    def call(function, *given, **options):
        if function.fn not in prepared:
            prepared.add(function.fn)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*given, **options)

    interpreter.InterpretedFunction.__call__ = call


def shrink_tiles():
    """In the interpreter: tiles so small that small problems have several."""
    from implicit_attention.kernels.triton import layout

    SHIPPED.update(layout.TILES if not SHIPPED else {})
    if DEVICE == "cpu":
        small = {kernel: {max(SHIPPED[kernel]): layout.Tiles(32, 32, 4, 1)} for kernel in SHIPPED}
        small |= {("keys", bits): {max(SHIPPED["keys", bits]): layout.Tiles(16, 32, 4, 1)} for bits in (True, False)}
        layout.TILES.update(small)


@contextlib.contextmanager
def wide_tiles():
    """So few tiles that the interpreter does many keys in seconds."""
    from implicit_attention.kernels.triton import layout

    tables = {kernel: dict(table) for kernel, table in layout.TILES.items()}
    layout.TILES.update({kernel: {max(table): layout.Tiles(16, 1024, 4, 1)} for kernel, table in tables.items()})
    try:
        yield
    finally:
        layout.TILES.update(tables)


def tile_of(kernel, dtype):
    """The tiles of a kernel for a problem of a small head dimension that fills them."""
    from implicit_attention.kernels.triton import layout

    table = layout.TILES[kernel, dtype.itemsize == 2]
    return table[min(table)]

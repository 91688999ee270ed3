"""A fixed budget of steps in exported programs: plain operations with the numbers of eager calls, or a sentence."""

import functools
import io
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

from implicit_attention import (
    AnchoredEnergy,
    Anderson,
    EnergyTransformer,
    Equilibrium,
    ImplicitAttention,
    LogSumExp,
    MemoryLookup,
    Picard,
    Unrolled,
    UnsupportedImplementation,
    equilibrium_attention,
    solve,
)
from implicit_attention.integrations.multihead import replace_attention
from implicit_attention.solvers import NewtonKrylov

pytestmark = pytest.mark.cases(1)

DIM, HEADS, VOCAB = 16, 4, 50
BUDGETS = {
    "picard": {"solver": Picard(max_steps=2, rtol=0, atol=0)},
    "damped": {"solver": Picard(max_steps=3, rtol=0, atol=0, damping=0.3)},
    "anderson": {"solver": Anderson(max_steps=6, rtol=0, atol=0)},
    "nothing": {"max_steps": 0},
}
SENTENCE = r"use a fixed budget: solver=Picard\(max_steps=4, rtol=0, atol=0\), or max_steps=0"


class Function(nn.Module):
    """`equilibrium_attention` with keys and values of its own."""

    def __init__(self, **options):
        super().__init__()
        self.keys, self.values = (nn.Parameter(torch.randn(7, size)) for size in (DIM, 5))
        self.options = options

    def forward(self, x):
        return equilibrium_attention(x, self.keys, self.values, **self.options)


class Solve(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.keys, self.options = nn.Parameter(torch.randn(7, DIM)), options

    def forward(self, x):
        energy = AnchoredEnergy(LogSumExp(self.keys, beta=0.25), x, anchor=0.5)
        return solve(energy, x, **{"adjoint": Unrolled(), **self.options}).value


class Masked(nn.Module):
    """A layer that is told which tokens exist, by a mask that depends on the tokens."""

    def __init__(self, **options):
        super().__init__()
        self.layer = ImplicitAttention(DIM, HEADS, **options)

    def forward(self, x):
        return self.layer(x, key_mask=x[..., 0] > 0)


class Itself(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        replace_attention(self, anchor=0.9, **options)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Block(nn.Linear):
    def forward(self, z, x):
        return torch.tanh(super().forward(z) / 3 + x)


class Llama(nn.Module):
    def __init__(self, **options):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        from implicit_attention.integrations.transformers import attach

        sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        attach(self.model, anchor=0.9, **options)

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def memory(**options):
    made = MemoryLookup(DIM, beta=0.5, anchor=0.2, **options)
    made.store(torch.randn(9, DIM), torch.randn(9, 3))
    return made


def transformer(**options):
    return EnergyTransformer(DIM, 2, 4, 16, **options)


MODELS = {
    "function": Function,
    "layer": functools.partial(ImplicitAttention, DIM, HEADS, anchor="learned", kv_heads=2),
    "causal": functools.partial(ImplicitAttention, DIM, HEADS, causal=True),
    "masked": Masked,
    "memory": memory,
    "multihead": Itself,
    "llama": Llama,
    "solve": Solve,
    "transformer": transformer,
}
BLOCKS = {
    "steps": lambda: Equilibrium(Block(DIM, DIM), steps=2),
    "picard": lambda: Equilibrium(Block(DIM, DIM), **BUDGETS["picard"]),
    "anderson": lambda: Equilibrium(Block(DIM, DIM), **BUDGETS["anderson"]),
}
EVERY_MODEL = [*MODELS, *(f"block {name}" for name in BLOCKS)]


def made(name, budget="picard", **options):
    torch.manual_seed(0)
    kind, _, which = name.partition(" ")
    options = {**BUDGETS[budget], **options}
    if kind == "solve":
        # It has no such option: its solver has.
        options = {"solver": Anderson(max_steps=0)} if "max_steps" in options else options
    return (BLOCKS[which]() if kind == "block" else MODELS[name](**options)).eval()


def given(name, batch=3, count=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if name == "llama":
        return torch.randint(1, VOCAB, (batch, count), generator=generator)
    return torch.randn(batch, count, DIM, generator=generator)


def exported(model, x, **options):
    """The program for any batch and any length."""
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("count", min=1, max=256)}
    # The tiles of tokens that move together are counted while they are recorded.
    shapes = {} if isinstance(model, EnergyTransformer) else shapes
    return torch.export.export(model, (x,), dynamic_shapes=(shapes,), **options)


def operations(program):
    """The names of all operations in a program, in the graphs inside of it too."""
    graphs = (part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


@torch.no_grad()
def assert_same(program, model, name, atol=2e-6):
    """The numbers of the model on inputs other than those that were traced, of other sizes too."""
    shapes = ((3, 6), (3, 6)) if name == "transformer" else ((3, 6), (5, 9), (2, 70), (1, 4))
    for seed, (batch, count) in enumerate(shapes):
        x = given(name, batch, count, seed)
        torch.testing.assert_close(program(x), model(x), atol=atol, rtol=1e-5)


@pytest.mark.by_name(nightly=r"\[(llama|memory|multihead|transformer)")
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_a_budget_is_exported_as_plain_operations_of_any_size(name):
    model = made(name)
    program = exported(model, given(name))
    found = operations(program)
    assert not [operation for operation in found if "implicit_attention" in operation], found
    assert all(operation.startswith(("aten.", "<built-in function", "wrap_with")) for operation in found), found
    assert_same(program.module(), model, name)


@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[(?!layer|block picard)")
@pytest.mark.parametrize("name", [name for name in EVERY_MODEL if name != "block anderson"])
def test_the_strict_tracer_finds_the_same(name):
    model, x = made(name), given(name, seed=2)
    with warnings.catch_warnings():
        # Of what transformers keep while they are traced.
        warnings.filterwarnings("ignore", "While compiling, we found certain side effects")
        program = torch.export.export(model, (given(name),), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), atol=2e-6, rtol=1e-5)


def test_the_strict_tracer_follows_one_explicit_step():
    model, x = made("layer", "nothing").eval(), given("layer", seed=2)
    program = torch.export.export(model, (given("layer"),), strict=True)
    torch.testing.assert_close(program.module()(x), model(x), atol=2e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[(?!layer-damped|solve-anderson)")
@pytest.mark.parametrize("budget", ["damped", "anderson", "nothing"])
@pytest.mark.parametrize("name", ["function", "layer", "solve", "memory"])
def test_so_is_every_kind_of_budget(name, budget):
    model = made(name, budget)
    assert_same(exported(model, given(name)).module(), model, name, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_numbers_are_those_of_the_formula_and_steps_those_of_the_budget(steps):
    model = Function(scale=0.3, anchor=0.4, solver=Picard(max_steps=steps, rtol=0, atol=0)).double()
    x = given("function").double()
    program = exported(model, x)
    with torch.no_grad():
        z, keys = x, model.keys
        for _ in range(steps):
            z = 0.4 * x + 0.6 * (0.3 * z @ keys.T).softmax(-1) @ keys
        expected = (0.3 * z @ keys.T).softmax(-1) @ model.values
        torch.testing.assert_close(program.module()(x), expected, atol=1e-13, rtol=1e-13)
    # Of every step one softmax, and one of the read-out.
    assert sum("softmax" in operation for operation in operations(program)) == steps + 1


@pytest.mark.slow
def test_a_query_without_keys_gives_zeros_and_another_mask_other_numbers():
    model = made("masked")
    program = exported(model, given("masked")).module()
    x = given("masked", seed=4)
    x[0, :, 0] = -1.0
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x), atol=2e-6, rtol=1e-5)
        assert torch.equal(program(x)[0], model.layer.out_proj(torch.zeros(6, DIM)))


@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[(?!function)")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["function", "causal", "llama"])
def test_half_precision_is_exported(name, dtype):
    model, x = made(name).to(dtype), given(name)
    x = x if name == "llama" else x.to(dtype)
    with torch.no_grad():
        expected, found = model(x), exported(model, x).module()(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=8 * torch.finfo(dtype).eps, rtol=8 * torch.finfo(dtype).eps)


def test_a_program_is_saved_and_loaded():
    model, file = made("layer"), io.BytesIO()
    torch.export.save(exported(model, given("layer")), file)
    file.seek(0)
    assert_same(torch.export.load(file).module(), model, "layer")


@pytest.mark.slow
def test_an_export_leaves_the_layer_as_it_was():
    model = made("layer")
    model(given("layer"))
    before = model.last_solve
    exported(model, given("layer"))
    assert model.last_solve is before
    assert not [p for p in (*model.parameters(), *model.buffers()) if type(p).__name__ == "FakeTensor"]


# What cannot be exported.


def message_of(call):
    """What an export says, and what is behind it."""
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as raised:
            error = raised
            while error is not None:
                told.append(str(error))
                error = error.__cause__ or error.__context__
    return "\n".join(told)


def test_a_solve_of_plain_attention_stays_one_operation_of_the_package():
    model = ImplicitAttention(DIM, HEADS).eval()
    found = [o for o in operations(torch.export.export(model, (given("layer"),))) if "implicit_attention" in o]
    assert found == ["implicit_attention.hopfield_solve.default"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Solve(),
        lambda: Equilibrium(Block(DIM, DIM)),
        lambda: Solve(solver=NewtonKrylov(max_steps=3, rtol=0, atol=0)),
        lambda: ImplicitAttention(DIM, HEADS, impl="reference"),
        lambda: transformer(),
    ],
)
def test_a_solve_that_has_no_operation_says_what_to_do(make):
    with pytest.raises(UnsupportedImplementation, match=SENTENCE) as caught:
        torch.export.export(make().eval(), (given("solve"),))
    assert "`solver` must make a number of steps that is known beforehand" in str(caught.value)


def test_evidence_is_no_part_of_a_program():
    class Evident(nn.Module):
        def forward(self, x):
            return equilibrium_attention(x, x, x, **BUDGETS["picard"], return_solution=True)[0]

    with pytest.raises(UnsupportedImplementation, match="`return_solution` must be False in an exported program"):
        torch.export.export(Evident(), (given("function"),))


# ONNX.


def session(model, x, **options):
    """What onnxruntime answers, as a function."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        # Of the exporter's own making.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, **options)
    domains = {node.domain for node in program.model_proto.graph.node}
    assert domains <= {"", "ai.onnx", "pkg.onnxscript.torch_lib.common", "pkg.onnxscript.torch_lib"}, domains
    run = runtime.InferenceSession(program.model_proto.SerializeToString())
    (name,) = (i.name for i in run.get_inputs())
    return lambda x: torch.from_numpy(run.run(None, {name: x.numpy()})[0])


@pytest.mark.slow
@pytest.mark.by_name(nightly=r"\[(?!layer|solve|block steps)")
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_onnx_has_the_numbers_of_eager_calls(name):
    model = made(name)
    answer = session(model, given(name))
    for seed in range(2):
        x = given(name, seed=seed)
        with torch.no_grad():
            torch.testing.assert_close(answer(x), model(x), atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["layer", "llama"])
def test_onnx_takes_other_batches_and_lengths(name):
    model = made(name)
    answer = session(model, given(name), dynamic_shapes=({0: "batch", 1: "count"},))
    assert_same(answer, model, name, atol=1e-5)


@pytest.mark.slow
def test_onnx_tests_accelerated_steps():
    """A budget long enough that steps are accepted and refused by their energy."""
    model = made("function", "anderson")
    answer = session(model, given("function"))
    with torch.no_grad():
        torch.testing.assert_close(
            answer(given("function", seed=5)), model(given("function", seed=5)), atol=1e-5, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer", "memory", "llama"])
def test_a_solve_to_a_tolerance_is_refused_by_onnx(name):
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    told = message_of(lambda: torch.onnx.export(model, (given(name),), dynamo=True, verbose=False))
    assert "to be a part of ONNX" in told
    assert "use a fixed budget: solver=Picard(max_steps=4, rtol=0, atol=0), or max_steps=0" in told

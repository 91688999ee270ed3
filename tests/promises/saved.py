"""Keys of what users save: state dicts of small modules, and the files that the package writes."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import lists
import numpy
import torch
import transformers
from safetensors.torch import load_file

from implicit_attention import ImplicitAttention
from implicit_attention.distributed import StoredPatterns
from implicit_attention.integrations.transformers import attach
from implicit_attention.models import save_checkpoint
from implicit_attention.training import CSVFile, JSONLines, TensorBoard, watch

#: One of every public module, and options that bring other parameters.
MODULES = """
implicit_attention.AttentionPooling(8, 2, queries=3)
implicit_attention.EnergyTransformer(8, 2, 4, 6)
implicit_attention.EnergyTransformer(8, 2, 4, 6, beta="learned", mode="published")
implicit_attention.EnergyTransformer(8, 2, 4, 6, memory="softmax")
implicit_attention.Equilibrium(nn.Bilinear(8, 8, 8), event_ndim=1)
implicit_attention.Equilibrium(nn.Bilinear(8, 8, 8), event_ndim=1, compiled=True)
implicit_attention.EquilibriumTransformer(8, 2, depth=2)
implicit_attention.EquilibriumTransformer(8, 2, norm="pre", injection="film")
implicit_attention.EquilibriumTransformer(8, 2, attention="equilibrium")
implicit_attention.ImplicitAttention(8, 2)
implicit_attention.ImplicitAttention(8, 2, anchor=0.5, beta=1.0)
implicit_attention.ImplicitAttention(8, 1, bare=True)
implicit_attention.ImplicitAttention(8, 2, context_dim=6, projection_bias=True)
implicit_attention.ImplicitAttention(8, 2, head_dim=6, kv_heads=1)
implicit_attention.ImplicitAttention(8, 2, qk_norm="layer", readout="state")
implicit_attention.ImplicitAttention(8, 2, qk_norm="rms", rotary=implicit_attention.Rotary())
implicit_attention.MemoryLookup(8)
implicit_attention.MemoryLookup(8, size=5, learned=True)
implicit_attention.MemoryLookup(8, size=5, target_dim=3, learned=True)
implicit_attention.MemoryLookup(8, size=5, similarity="dot", beta="learned", learned=True)
implicit_attention.Rotary()
implicit_attention.integrations.multihead.ImplicitMultiheadAttention(8, 2)
implicit_attention.integrations.multihead.ImplicitMultiheadAttention(8, 2, bias=False, kdim=6, vdim=4, add_bias_kv=True)
implicit_attention.integrations.timm.EquilibriumAttention(8, 2, qkv_bias=True)
implicit_attention.integrations.timm.EquilibriumAttention(8, 2, qk_norm=True, norm_layer=nn.LayerNorm)
implicit_attention.integrations.xtransformers.EquilibriumAttend(2)
implicit_attention.layers.EnergyLayerNorm(8)
implicit_attention.layers.EnergyLayerNorm(8, bias=False)
implicit_attention.layers.MeanFieldAttention(8, 2)
implicit_attention.layers.MeanFieldAttention(8, 2, correction="learned")
implicit_attention.layers.MeanFieldAttention(8, 2, mixing="free", sites=5)
implicit_attention.layers.MeanFieldAttention(8, 2, symmetric=True)
implicit_attention.layers.MeanFieldAttention(8, 2, mixing="mixer", sites=5, expansion=16)
implicit_attention.layers.SpinAttention(8, 2)
implicit_attention.layers.SpinAttention(8, 2, couplings="free", sites=5)
implicit_attention.layers.SpinAttention(8, 2, couplings="low_rank")
implicit_attention.layers.SpinAttention(8, 2, couplings="symmetric")
implicit_attention.layers.SpinTransformer(8, 2, blocks=2)
implicit_attention.layers.SpinTransformerBlock(8, 2)
implicit_attention.layers.SpinTransformerBlock(8, 2, input="magnetization", feed_forward=16)
implicit_attention.layers.contractive(nn.Linear(8, 8), 0.9)
implicit_attention.layers.couplings.FreeCouplings(2, 5)
implicit_attention.layers.couplings.LowRankCouplings(2, 4)
implicit_attention.layers.couplings.SoftmaxCouplings(2, 4)
implicit_attention.layers.couplings.SymmetricCouplings(2, 4)
implicit_attention.models.ImageClassifier(implicit_attention.models.ImageEnergyTransformer(8, 2, 3, 8, 2, 4, 6), 4)
implicit_attention.models.ImageEnergyTransformer(8, 2, 3, 8, 2, 4, 6)
implicit_attention.models.NodeClassifier(5, 3, 8, 2, 4, 6)
implicit_attention.models.NodeClassifier(5, 3, 8, 2, 4, 6, positions=2)
implicit_attention.models.image.PatchEmbedding(8, 2, 3, 8)
implicit_attention.models.reasoners.ConvolutionalReasoner(8, 3)
implicit_attention.models.reasoners.ConvolutionalReasoner(8, 3, norm="group", axes=1, recall=False)
implicit_attention.models.reasoners.GraphReasoner(8)
implicit_attention.models.reasoners.GraphReasoner(8, 16, edge_features=2)
implicit_attention.models.reasoners.TransformerStack(8, 2, 2)
implicit_attention.models.reasoners.TwoStreamReasoner(implicit_attention.models.reasoners.TransformerStack(8, 2))
implicit_attention.tie(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 4), "layers", keep=1)
""".strip().splitlines()


def state(text: str) -> list[str]:
    """Names and shapes in the state dict of a module: a file with others does not load."""
    found = lists.evaluate(text).state_dict().items()
    return sorted(f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in found)


def states() -> dict[str, list[str]]:
    return {text: state(text) for text in MODULES if not lists.is_gone(text)}


def keys_of(value: Any, prefix: str = "") -> set[str]:
    """Paths of the keys of dicts in dicts; the items of a list are all alike."""
    if isinstance(value, dict):
        return {path for key, each in value.items() for path in {f"{prefix}{key}", *keys_of(each, f"{prefix}{key}.")}}
    if isinstance(value, list):
        return {path for each in value for path in keys_of(each, prefix)}
    return set()


def files() -> dict[str, list[str]]:
    """Keys in the files that the library writes, by what writes them."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    layer = ImplicitAttention(8, 2)
    seen = watch(layer)
    layer(torch.randn(2, 3, 8)).sum().backward()
    observed = seen.take(step=1)
    seen.close()

    class Scalars:
        def __init__(self) -> None:
            self.tags: list[str] = []

        def add_scalar(self, tag: str, *_: Any) -> None:
            self.tags.append(tag)

    board = Scalars()
    TensorBoard(board).write(observed)
    found["TensorBoard"] = board.tags
    with lists.elsewhere():
        CSVFile("seen.csv").write(observed)
        found["CSVFile"] = next(csv.reader(io.StringIO(Path("seen.csv").read_text())))
        JSONLines("seen.jsonl").write(observed)
        found["JSONLines"] = [k for line in Path("seen.jsonl").read_text().splitlines() for k in json.loads(line)]
        save_checkpoint("last.pt", model=layer, optimizer=torch.optim.SGD(layer.parameters()), step=1)
        found["save_checkpoint"] = list(torch.load("last.pt"))
        stored = StoredPatterns("patterns")
        stored.append(torch.ones(3, 4), torch.ones(3, 2))
        found["StoredPatterns index.json"] = keys_of(json.loads(Path("patterns/index.json").read_text()))
        for file in Path("patterns").glob("*.safetensors"):
            found["StoredPatterns *.safetensors"] = load_file(file)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=10, **sizes))
        attach(model, anchor=0.9, layers={0: {"anchor": 0.5}}).save_pretrained("llama")
        config = json.loads(Path("llama/config.json").read_text())
        found["attach, config.json"] = keys_of({k: v for k, v in config.items() if k.startswith("equilibrium")})
        numpy.savez("spins.npz", J=numpy.zeros((3, 3)), h=numpy.ones((3, 1)), beta=numpy.array(0.5))
        for command, made in COMMANDS.items():
            _run(command)
            found[f"implicit-attention {command}"] = keys_of(json.loads(Path(made).read_text()))
    return {writer: sorted(set(keys)) for writer, keys in found.items()}


#: Commands that are quick, with the file that each writes.
COMMANDS = {
    "magnetize spins.npz --methods enumeration,mean-field --quick --out out": "out/thermodynamics.json",
}


def _run(command: str) -> None:
    from commands import done

    done(*command.split())

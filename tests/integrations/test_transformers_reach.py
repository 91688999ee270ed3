"""Which models have attention that cannot be replaced: some named by hand, and a sweep over transformers' sources."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers as hf
from torch import nn
from transformers_models import make

from implicit_attention.integrations.transformers import attach

OWN = {
    "prophetnet": "ProphetNetNgramSelfAttention",
    "deberta-v2": "DisentangledSelfAttention",
    "funnel": "FunnelRelMultiheadAttention",
    "xlm": "MultiHeadAttention",
    "yoso": "YosoSelfAttention",
    "levit": "LevitAttention",
    "hiera": "HieraMaskUnitAttention",
    "rwkv": "RwkvSelfAttention",
    "xlnet": "XLNetRelativeAttention",
    "gptj": "GPTJAttention",
    "falcon": "FalconAttention",
    "git": "GitSelfAttention",
}
PARTLY = {
    "longt5": "LongT5LocalAttention",
    "pegasus_x": "PegasusXGlobalLocalAttention",
    "siglip_vision_model": "MultiheadAttention",
}
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
_DEPTHS += ("num_encoder_layers", "num_decoder_layers")


def unweighted(kind):
    """A model of the default sizes, without memory for its parameters."""
    config = hf.AutoConfig.for_model(kind)
    for name in _DEPTHS:
        if hasattr(config, name) and (kind, name) != ("prophetnet", "num_hidden_layers") and kind != "funnel":
            setattr(config, name, 1)
    config.architectures = []
    with torch.device("meta"):
        return hf.AutoModel.from_config(config)


@pytest.mark.parametrize(("kind", "attention"), OWN.items())
def test_a_model_that_attends_by_itself_is_refused_with_its_modules(kind, attention):
    model = unweighted(kind)
    name = next(name for name, module in model.named_modules() if type(module).__name__ == attention)
    before = model.config._attn_implementation
    for partial in ("refuse", "warn"):
        with pytest.raises(ValueError, match=rf"choose another architecture.*\b{attention} \([^)]*{re.escape(name)}"):
            attach(model, partial=partial)
    assert model.config._attn_implementation == before
    assert not hasattr(model.config, "equilibrium_anchors")


@pytest.mark.parametrize(("kind", "attention"), PARTLY.items())
def test_a_model_that_attends_by_itself_in_parts_is_refused_or_warned_of(kind, attention):
    model = unweighted(kind)
    with pytest.raises(ValueError, match=rf'stays what it is: {attention} \(.*partial="warn" accepts'):
        attach(model)
    with pytest.warns(
        UserWarning, match=rf"stays what it is: {attention} \([^)]*\)(; integrations.multihead.*)?$"
    ) as told:
        assert attach(model, partial="warn") is model
    assert told[0].filename == __file__
    assert model.config.equilibrium_anchors == {"equilibrium": 0.5}


def without_attention():
    return hf.MambaModel(hf.MambaConfig(hidden_size=8, num_hidden_layers=1, state_size=2, vocab_size=9))


def test_sparse_attention_of_informer_is_refused():
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_time_features": 1}
    config = hf.InformerConfig(prediction_length=4, context_length=8, lags_sequence=[1, 2], **sizes)
    with pytest.raises(ValueError, match=r"masks .* misread.*InformerProbSparseAttention \(encoder.layers.0"):
        attach(hf.InformerModel(config), partial="warn")


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        ("return torch.softmax(q @ k.mT, -1) @ v", "own"),
        ("return self.read(F.softmax(torch.einsum('nd,md->nm', q, k), -1), v)", "own"),
        ("return weigh(q @ k.mT).softmax(-1) @ v", "own"),
        ("return F.scaled_dot_product_attention(q, k, v)", "own"),
        (
            "return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)(self, q, k, v)",
            "asks",
        ),
        ("return eager(self, q, k, v)", "own"),
        ("return (q @ k.mT).softmax(-1)", None),
        ("return q.softmax(-1) @ k @ v", None),
        ("return (q @ k.mT) @ v", None),
    ],
)
def test_attention_is_a_softmax_between_two_products_whatever_it_is_called(forward, kind, tmp_path, monkeypatch):
    text = f"""
from torch import nn

class Base(nn.Module):
    def forward(self, q, k, v):
        return q

    def read(self, weights, v):
        return torch.matmul(weights, v)

class Mixer(Base):
    def forward(self, q, k, v):
        {forward}

def weigh(scores):
    return scores / 2

def eager(module, q, k, v):
    return torch.matmul(nn.Softmax(dim=-1)(torch.matmul(q, k.mT)), v)
"""
    (tmp_path / f"{tmp_path.name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    written, model = importlib.import_module(tmp_path.name), without_attention()
    model.add_module("base", written.Base())
    model.add_module("mixer", written.Mixer())
    if kind == "asks":
        assert attach(model) is model
        return
    told = r"Mixer \(mixer\)" if kind == "own" else "It has no module that calls itself attention"
    with pytest.raises(ValueError, match=told) as refused:
        attach(model)
    assert "base" not in str(refused.value)


# A sweep by other means: regular expressions over the text of every class.

_ROOT = Path(hf.__file__).parent / "models"
_CLASS = re.compile(r"class (\w+)(?:\(([^)]*)\))?:")
_PROJECTION = re.compile(r"self\.\w*(?:query|key|value|[qkv]_proj|to_[qkv]|q_lin|qkv|c_attn|\b[qkv])\w*\(")
_ATTENDS = re.compile(r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(")
_ASKS = re.compile(r"attention_interface\(|ALL_ATTENTION_FUNCTIONS")
# Their softmax is over gates, pixels or what a sparse attention will look at; nothing is read out by it.
_NO_ATTENTION = re.compile(r"Compressor$|Indexer$|SuperPointInterestPointDecoder")


def classes(text):
    """(name, bases, body) of the classes of a file that compute something."""
    for part in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        if (head := _CLASS.match(part)) and "def forward" in part:
            yield head[1], re.findall(r"\w+", head[2] or ""), part


def attends_by_itself(name, body):
    whole = "PreTrainedModel" in body.partition(":")[0] or _NO_ATTENTION.search(name)
    return not whole and not _ASKS.search(body) and _ATTENDS.search(body) and _PROJECTION.search(body)


def stubs(file, text):
    """The classes of a file without what they hold, by name: (stub, body)."""
    made = {}
    for name, bases, body in classes(text):
        parents = tuple(made[base][0] for base in bases if base in made)[:1] or (nn.Module,)
        made[name] = (type(name, parents, {"__module__": file}), body)
    return made


@pytest.mark.slow
def test_every_class_that_attends_by_itself_is_refused_by_the_door(monkeypatch):
    own, asks, model = set(), set(), make("bert", torch.float32)
    for number, path in enumerate(sorted(_ROOT.glob("*/modeling_*.py"))):
        # As if the file had been imported.
        file = ModuleType(f"read_{path.stem}")
        file.__file__ = str(path)
        monkeypatch.setitem(sys.modules, file.__name__, file)
        for name, (stub, body) in stubs(file.__name__, path.read_text()).items():
            asking = bool(_ASKS.search(body)) and number % 8 == 0
            if asking or attends_by_itself(name, body):
                layer = stub.__new__(stub)
                nn.Module.__init__(layer)
                (asks if asking else own).add(f"{path.stem}-{name}")
                model.add_module(f"{path.stem}-{name}", layer)
    assert len(own) > 100
    assert len(asks) > 30
    with pytest.raises(ValueError, match="stays what it is") as refused:
        attach(model)
    named = set(re.findall(r"\w+-\w+", str(refused.value)))
    assert own <= named
    assert not asks & named

"""What every host in the table owes: a line in the documents, an extra, a message, and its own answer without steps."""

import copy
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from x_transformers import Decoder, TransformerWrapper

from implicit_attention.integrations.multihead import replace_attention
from implicit_attention.integrations.timm import EquilibriumAttention
from implicit_attention.integrations.transformers import attach
from implicit_attention.integrations.xtransformers import replace_attend

ROOT = Path(__file__).resolve().parents[2]
#: By module: the call that puts equilibria into a model, and the library that is imported.
HOSTS = {
    "transformers": ("attach(model)", "transformers"),
    "multihead": ("replace_attention(model)", None),
    "xtransformers": ("replace_attend(model)", "x-transformers"),
    "timm": ("create_model(..., attn_layer=EquilibriumAttention)", None),
}
WITH_LIBRARY = [module for module, (_, library) in HOSTS.items() if library]
EXTRAS = dict(re.findall(r'^([\w-]+) = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def replaced(model, replace):
    """A function of options that gives a copy of the model with equilibria."""

    def make(**options):
        new = copy.deepcopy(model)
        replace(new, **options)
        return new

    return make


def transformers():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, **SIZES)).eval()
    return torch.randint(10, (2, 5)), lambda model, x: model(x).logits, model, replaced(model, attach)


def multihead():
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return torch.randn(2, 5, 16), lambda model, x: model(x), model, replaced(model, replace_attention)


def xtransformers():
    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    model = TransformerWrapper(num_tokens=10, max_seq_len=8, attn_layers=layers)
    return torch.randint(10, (2, 5)), lambda model, x: model(x), model, replaced(model, replace_attend)


def timm():
    """An attention layer; the library, which nothing imports, is written out."""

    def plain(x):
        q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return layer.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def make(**options):
        new = EquilibriumAttention(16, 2, **options)
        new.load_state_dict(layer.state_dict(), strict=False)
        return new

    layer = EquilibriumAttention(16, 2)
    return torch.randn(2, 5, 16), lambda model, x: model(x), plain, make


CASES = {case.__name__: case for case in (transformers, multihead, xtransformers, timm)}


def test_the_table_has_every_module():
    files = (ROOT / "implicit_attention" / "integrations").iterdir()
    assert {path.stem for path in files if path.stem[0] != "_"} == set(HOSTS) == set(CASES)


@pytest.mark.parametrize("module", HOSTS)
def test_documents_and_packaging_say_what_the_table_says(module):
    entry, library = HOSTS[module]
    page = (ROOT / "docs" / "integrations.md").read_text()
    (needs,) = re.findall(rf"^\| .* \| `{re.escape(entry)}` \| (.*) \|$", page, re.MULTILINE)
    assert f"integrations.{module} import" in page
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert f"::: implicit_attention.integrations.{module}." in reference
    if library:
        assert needs == f'`pip install -e ".[{library}]"`'
        assert EXTRAS[library] in EXTRAS["test"]
        assert re.search(rf"^{library}==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", WITH_LIBRARY)
def test_a_missing_library_gives_the_line_that_installs_it(module, monkeypatch):
    name, library = f"implicit_attention.integrations.{module}", HOSTS[module][1]
    for part in [part for part in sys.modules if part.partition(".")[0] == library.replace("-", "_")]:
        monkeypatch.setitem(sys.modules, part, None)
    monkeypatch.delitem(sys.modules, name)
    needed = f'needs {EXTRAS[library].replace(">=", " ")} or newer; in the checkout: pip install -e ".[{library}]"'
    with pytest.raises(ImportError, match=re.escape(needed)):
        importlib.import_module(name)


@torch.no_grad()
@pytest.mark.parametrize("module", HOSTS)
def test_no_steps_are_the_host_and_steps_are_not(module):
    torch.manual_seed(0)
    x, call, plain, make = CASES[module]()
    expected = call(plain, x)
    torch.testing.assert_close(call(make(max_steps=0), x), expected)
    assert float((call(make(anchor=0.2), x) - expected).abs().max()) > 1e-5


@pytest.mark.parametrize("module", HOSTS)
def test_gradients_reach_every_parameter_and_unknown_options_are_named(module):
    torch.manual_seed(0)
    x, call, _, make = CASES[module]()
    new = make(anchor=0.5)
    call(new, x).square().sum().backward()
    for name, parameter in new.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        make(steps=3)

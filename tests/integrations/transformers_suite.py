"""transformers' own common model tests on six models, with their attention and with equilibria of no step.

`python tests/integrations/transformers_suite.py [--source FOLDER] [--out FILE]`, which is no part of the suite, takes
the tests from the source package of the installed version (pip fetches it, unless FOLDER holds it unpacked), runs them
twice, and says which fail with equilibria alone. Their mixins for generation and export are not in that package. Needs
`pip install parameterized`, and minutes.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from pathlib import Path
from xml.etree import ElementTree

import torch
import transformers

BATCH, LENGTH, VOCABULARY = 3, 7, 99
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
MODELS = {
    "Llama": {**GROUPED},
    "Qwen2": {**GROUPED},
    "Gemma3Text": {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "GptOss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Bert": {**SIZES, "max_position_embeddings": 64},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
CLASSES = {
    "Llama": ("LlamaModel", "LlamaForCausalLM"),
    "Qwen2": ("Qwen2Model", "Qwen2ForCausalLM"),
    "Gemma3Text": ("Gemma3TextModel", "Gemma3ForCausalLM"),
    "GptOss": ("GptOssModel", "GptOssForCausalLM"),
    "Bert": ("BertModel", "BertForMaskedLM"),
    "GPT2": ("GPT2Model", "GPT2LMHeadModel"),
}


def fetched(folder):
    """The source package of the installed version, unpacked in `folder`."""
    package = f"transformers=={transformers.__version__}"
    options = ["-q", "--no-binary", ":all:", "--no-deps", "-d"]
    download = [sys.executable, "-m", "pip", "download", *options, folder, package]
    subprocess.run(download, check=True)
    (archive,) = Path(folder).glob("transformers-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return Path(folder) / archive.name.removesuffix(".tar.gz")


class Asked:
    """What the common tests ask of a model: a configuration and inputs."""

    is_training = True
    batch_size, seq_length, num_hidden_layers, num_attention_heads, hidden_size = BATCH, LENGTH, 2, 4, 32
    encoder_seq_length = key_length = LENGTH

    def __init__(self, parent, name):
        self.parent, self.name = parent, name

    def get_config(self):
        config = getattr(transformers, f"{self.name}Config")(
            vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **MODELS[self.name]
        )
        if os.environ["ATTENTION"] != "own":
            config._attn_implementation = os.environ["ATTENTION"]
        return config

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def suites(source):
    """A class of tests for each model, by transformers' own mixin."""
    sys.path.insert(0, str(source))
    absent = {"generation.test_utils": "GenerationTesterMixin", "exporters.test_export": "ExportTesterMixin"}
    for name, missing in absent.items():
        module = types.ModuleType(f"tests.{name}")
        setattr(module, missing, type(missing, (), {}))
        sys.modules[f"tests.{name.split('.')[0]}"] = types.ModuleType(name.split(".")[0])
        sys.modules[module.__name__] = module
    from tests.test_modeling_common import ModelTesterMixin

    from implicit_attention.integrations.transformers import register

    register("equilibrium", max_steps=0)
    made = {}
    for name, classes in CLASSES.items():

        def start(self, name=name):
            self.model_tester = Asked(self, name)
            self.config_tester = None

        members = {
            "all_model_classes": tuple(getattr(transformers, c) for c in classes),
            "all_generative_model_classes": (),
            "setUp": start,
            "test_resize_embeddings": True,
        }
        made[f"Test{name}"] = type(f"Test{name}", (ModelTesterMixin, unittest.TestCase), members)
    return made


if "ATTENTION" in os.environ:
    # Asked by pytest.
    globals().update(suites(os.environ["SOURCE"]))


def ran(source, attention, folder):
    """test -> (outcome, first line of the message)."""
    report = Path(folder) / f"{attention}.xml"
    own = {"ATTENTION": attention, "SOURCE": str(source), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    options = ["-q", "-c", os.devnull, "--rootdir", folder, "--noconftest", "-p", "no:cacheprovider", "--tb=line"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", str(Path(__file__).resolve())]
    subprocess.run(command, env={**os.environ, **own}, cwd=folder, stdout=subprocess.DEVNULL, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').split('.')[-1]}::{case.get('name')}"
        (outcome, *_) = [*(part for part in case if part.tag in ("failure", "error", "skipped")), None]
        message = "" if outcome is None else (outcome.get("message") or "").splitlines()[:1]
        found[name] = ("passed" if outcome is None else outcome.tag, "".join(message)[:200])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = (options.source or fetched(folder)).resolve()
        own, ours = (ran(source, attention, folder) for attention in ("own", "equilibrium"))
    worse = {
        name: ours[name][1]
        for name, (outcome, _) in own.items()
        if outcome == "passed" and ours[name][0] in ("failure", "error")
    }
    summary = {
        "transformers": transformers.__version__,
        "models": list(MODELS),
        "own attention": dict(collections.Counter(outcome for outcome, _ in own.values())),
        "equilibria of no step": dict(collections.Counter(outcome for outcome, _ in ours.values())),
        "fail with equilibria alone": worse,
        "fail with both": sorted(n for n, (o, _) in own.items() if o in ("failure", "error") and n not in worse),
    }
    text = json.dumps(summary, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

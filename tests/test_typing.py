"""What type checkers and editors are told of calls: a tensor comes back, unless more is asked for."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from typing_extensions import get_overloads

import implicit_attention
from implicit_attention import equilibrium_attention, layers, models

ROOT = Path(implicit_attention.__file__).parent.parent

USE = """
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from implicit_attention import Equilibrium, ImplicitAttention, MemoryLookup, Solution, equilibrium_attention
from implicit_attention.layers import EnergyTransformer, EquilibriumTransformer, MeanFieldAttention, SpinAttention
from implicit_attention.layers import SpinTransformer, SpinTransformerBlock
from implicit_attention.models import ImageClassifier, ImageEnergyTransformer, NodeClassifier


def attend(q: Tensor, more: bool) -> None:
    assert_type(equilibrium_attention(q, q, q, anchor=0.9, max_steps=3), Tensor)
    output, solution = equilibrium_attention(q, q, q, return_solution=True)
    assert_type(output, Tensor)
    assert_type(solution, Solution)
    assert_type(equilibrium_attention(q, q, q, return_solution=more), Tensor | tuple[Tensor, Solution])


def call(
    x: Tensor,
    attention: ImplicitAttention,
    block: Equilibrium,
    transformer: EquilibriumTransformer,
    memory: MemoryLookup,
    spins: SpinAttention,
    spin_block: SpinTransformerBlock,
    spin_transformer: SpinTransformer,
    mean_field: MeanFieldAttention,
    energy: EnergyTransformer,
    images: ImageEnergyTransformer,
    classifier: ImageClassifier,
    nodes: NodeClassifier,
) -> None:
    assert_type(attention(x), Tensor)
    assert_type(attention(x, x, key_mask=x, max_steps=0), Tensor)
    assert_type(attention(x, return_weights=True), Any)
    assert_type(attention(x, return_solution=True), Any)
    assert_type(attention(x, return_trajectory=True), Any)
    assert_type(block(x, x, steps=3), Tensor)
    assert_type(block((x, x)), Any)
    assert_type(block(x, return_solution=True), Any)
    assert_type(transformer(x, x, steps=3), Tensor)
    assert_type(transformer(x, x, return_solution=True), Any)
    assert_type(memory(x), Tensor)
    assert_type(memory(x, return_solution=True), Any)
    assert_type(spins(x, mask=x), Tensor)
    assert_type(spins(x, return_answer=True), Any)
    assert_type(spin_block(x), Tensor)
    assert_type(spin_block(x, return_state=True), Any)
    assert_type(spin_transformer(x), Tensor)
    assert_type(spin_transformer(x, return_state=True), Any)
    assert_type(mean_field(x), Tensor)
    assert_type(mean_field(x, return_state=True), Any)
    assert_type(energy(x, return_energies=True), Any)
    assert_type(images(x, x), Tensor)
    assert_type(images(x, x, return_energies=True), Any)
    assert_type(classifier(x), Tensor)
    assert_type(classifier(x, return_solution=True), Any)
    assert_type(nodes(x, x), Tensor)
    assert_type(nodes(x, x, return_solution=True), Any)
    block(x, no_such_option=1)  # expected error
    memory(x, no_such_option=1)  # expected error
    spins(x, initial=1)  # expected error
    spin_block(x, no_such_option=1)  # expected error
    spin_transformer(x, initial=x)  # expected error
    mean_field(x, no_such_option=1)  # expected error
    energy(x, no_such_option=1)  # expected error
    images(x)  # expected error
    classifier(x, no_such_option=1)  # expected error
    nodes(x, "x")  # expected error
    attention(x, no_such_option=1)  # expected error
    attention("x")  # expected error


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = ImplicitAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)
"""


@pytest.mark.slow
def test_a_type_checker_knows_what_calls_return(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "use.py"
    file.write_text(USE)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(file)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line for line in found.stdout.splitlines() if ": error: " in line]
    expected = [i for i, line in enumerate(USE.splitlines(), 1) if line.endswith("# expected error")]
    assert sorted({int(line.split(":")[1]) for line in told}) == expected, found.stdout + found.stderr


LAYERS = [
    getattr(module, name)
    for module in (layers, models)
    for name in module.__all__
    if isinstance(getattr(module, name), type) and issubclass(getattr(module, name), nn.Module)
]


def asked(function):
    """The parameters that ask for more than a tensor."""
    return {name for name in inspect.signature(function).parameters if name.startswith("return_")}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_several_answers_declares_its_call(layer):
    assert not asked(layer.forward) or "__call__" in inspect.getsource(layer)


def test_declarations_cost_no_wrapper():
    for layer in LAYERS:
        assert "__call__" not in vars(layer)
    declared = get_overloads(equilibrium_attention)
    names = list(inspect.signature(equilibrium_attention).parameters)
    assert [list(inspect.signature(one).parameters) for one in declared] == [names] * 3

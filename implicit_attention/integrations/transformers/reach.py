"""Which attention of a model asks transformers' attention interface, and which computes by itself, by its source."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

#: The interface, by the name under which models of transformers look it up.
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Functions that are attention by themselves.
_FUSED = frozenset(
    {"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention", "_flash_attention_forward"}
)
_SOFTMAX = frozenset({"softmax", "Softmax", "XSoftmax"})
_PRODUCTS = frozenset({"matmul", "bmm", "einsum", "baddbmm"})
_CALLED_ATTENTION = ("Attention", "Attn")
# Models that ask for some of their attention only, and add the mask themselves to the scores of the rest.
_PARTLY = frozenset({"git", "bigbird_pegasus"})


#: The functions and classes of a file by name.
Source: TypeAlias = dict[str, ast.FunctionDef | ast.ClassDef]


class Reach(NamedTuple):
    """Modules by name, with their classes: those that ask the interface, and those that attend by themselves."""

    asks: dict[str, type[nn.Module]]
    own: dict[str, type[nn.Module]]


def reach(model: nn.Module) -> Reach:
    """The attention modules of a model, recognised by the source of their classes."""
    kinds = [(name, type(module), _kind(type(module))) for name, module in model.named_modules()]  # type: ignore[arg-type]
    asks, own = ({name: cls for name, cls, kind in kinds if kind == wanted} for wanted in ("asks", "own"))
    return Reach(asks, own)


def attention_names(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Modules with "Attention" in the name of their class that hold no other such module."""
    named = {name: type(module) for name, module in model.named_modules() if "Attention" in type(module).__name__}
    return {name: kind for name, kind in named.items() if not any(other.startswith(f"{name}.") for other in named)}


def listed(modules: dict[str, type[nn.Module]], shown: int = 3) -> str:
    """Names of modules by their classes: `BertAttention (encoder.0, encoder.1, encoder.2 and 9 more)`."""
    by_class: dict[str, list[str]] = {}
    for name, kind in modules.items():
        by_class.setdefault(kind.__name__, []).append(name or "the model")
    return "; ".join(
        f"{kind} ({', '.join(names[:shown])}{f' and {len(names) - shown} more' if len(names) > shown else ''})"
        for kind, names in by_class.items()
    )


def takes_masks(config: Any) -> bool:
    """Whether the models of a configuration give the masks of a registered name only to attention that asks for it."""
    if getattr(config, "attention_type", None) == "prob" and config.model_type == "informer":
        return False
    return bool(_asks(type(config).__module__, config.model_type))


# The compiler calls this function instead of tracing it, so that a compiled model is refused as well.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asks(configuration: str, model_type: str) -> bool:
    """Whether the models that belong to a module of configurations ask the interface for all their attention."""
    modeling = configuration.replace("configuration_", "modeling_")
    return model_type not in _PARTLY and (modeling not in sys.modules or _source_asks(modeling))


@functools.cache
def _source_asks(modeling: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[modeling])
    except (OSError, TypeError):
        return True
    own = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return own is None or _INTERFACE in source


@functools.cache
def _kind(cls: type[nn.Module]) -> str | None:
    """ "asks", "own", or None for a module that does not attend."""
    if cls.__module__.partition(".")[0] == "torch":
        return "own" if issubclass(cls, nn.MultiheadAttention) else None
    lines: list[tuple[Source, ast.FunctionDef | ast.ClassDef]] = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            break
        source = _source_of(base.__module__)
        if source is None or base.__name__ not in source:
            # A class without a file that can be read is judged by its name.
            return "own" if any(word in cls.__name__ for word in _CALLED_ATTENTION) else None
        lines.append((source, source[base.__name__]))
    return kind_of(lines)


@functools.cache
def _source_of(module: str) -> Source | None:
    try:
        return parsed(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return None


def parsed(text: str) -> Source:
    """The functions and classes of a file's text."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def kind_of(lines: Sequence[tuple[Source, ast.FunctionDef | ast.ClassDef]]) -> str | None:
    """Return the kind of attention of a class, from its source and its bases', in method resolution order.

    It attends by itself if its forward, with the methods and functions of the file that it calls, takes a softmax
    between two matrix products, or any softmax where its name says attention, or calls fused attention.
    """
    methods: dict[str, tuple[Source, ast.FunctionDef]] = {}
    for source, node in lines:
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                methods.setdefault(part.name, (source, part))
    if "forward" not in methods:
        return None
    steps = "".join(_Steps(methods).of(*methods["forward"]))
    if "i" in steps:
        return "asks"
    first, last = steps.find("p"), steps.rfind("p")
    between = first >= 0 and "s" in steps[first:last]
    named = "s" in steps and any(word in lines[0][1].name for word in _CALLED_ATTENTION)
    return "own" if between or named or "f" in steps else None


class _Steps:
    """Return the steps of a function in order: i(nterface), f(used attention), s(oftmax), p(roduct)."""

    def __init__(self, methods: dict[str, tuple[Source, ast.FunctionDef]]) -> None:
        self.methods, self.seen = methods, set[ast.AST]()

    def of(self, source: Source, node: ast.AST) -> Iterator[str]:
        if node in self.seen:
            return
        if isinstance(node, ast.FunctionDef):
            self.seen.add(node)
        # The arguments of a call are computed before it.
        parts = [*node.args, *node.keywords, node.func] if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        for child in parts:
            yield from self.of(source, child)
        if isinstance(node, ast.Name) and node.id == _INTERFACE:
            yield "i"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield "p"
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self" and node.attr in self.methods:
            # A method may be handed on instead of being called.
            yield from self.of(*self.methods[node.attr])
        if isinstance(node, ast.Call):
            yield from self._call(source, node.func)

    def _call(self, source: Source, called: ast.expr) -> Iterator[str]:
        name, owner = getattr(called, "id", ""), ""
        if isinstance(called, ast.Attribute):
            name, owner = called.attr, getattr(called.value, "id", "")
        if name in _FUSED:
            yield "f"
        elif name in _SOFTMAX or owner in _SOFTMAX:
            yield "s"
        elif name in _PRODUCTS:
            yield "p"
        elif isinstance(called, ast.Name) and isinstance(function := source.get(name), ast.FunctionDef):
            yield from self.of(source, function)

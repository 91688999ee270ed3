"""The rule of accelerated steps in C++: `python tests/native_rule.py` writes `kernels/native/rule.h`.

Numbers and functions are those of `kernels/rule.py`, the codes of statuses those of `Status`. What is read here is what
`rule.py` may be written in; everything else is a SyntaxError.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import NoReturn

from implicit_attention import Status

PACKAGE = Path(__file__).parents[1] / "implicit_attention"
SOURCE, HEADER = PACKAGE / "kernels" / "rule.py", PACKAGE / "kernels" / "native" / "rule.h"
TOP = """\
// Written by `python tests/native_rule.py` from kernels/rule.py and `Status`, which are what to change.
#pragma once

#include "simd.h"

"""
NUMBER, TRUTH, SCALAR = "Vec<T>", "Mask<T>", "T"
KINDS = {"Tensor": NUMBER, "Truth": TRUTH, "float": SCALAR}
ARITHMETIC = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
LOGIC = {ast.BitAnd: "&", ast.BitOr: "|"}
COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
ELEMENTWISE = {"lang.sqrt": "root", "lang.abs": "absolute"}


def refuse(node: ast.AST) -> NoReturn:
    raise SyntaxError(f"line {node.lineno} of the rule is not of what C++ is made of: {ast.unparse(node)}")


def wrapped(opening: str, items: list[str], closing: str) -> str:
    """A list in lines of at most 120 characters."""
    line = opening + ", ".join(item.replace(" ", "\0") for item in items) + closing
    return textwrap.fill(line, 120, subsequent_indent=" " * 4, break_on_hyphens=False).replace("\0", " ")


class Function:
    """A function, the kinds of its names, and the functions before it."""

    def __init__(self, node: ast.FunctionDef, numbers: set[str], others: dict[str, Function]) -> None:
        given = node.args
        if (
            node.decorator_list
            or given.defaults
            or given.kwonlyargs
            or given.posonlyargs
            or given.vararg
            or given.kwarg
        ):
            refuse(node)
        self.node, self.others = node, others
        self.parameters = {argument.arg: self.kind(argument.annotation) for argument in given.args}
        self.kinds = dict.fromkeys(numbers, SCALAR) | self.parameters
        several = isinstance(node.returns, ast.Subscript) and ast.unparse(node.returns.value) == "tuple"
        self.returns = [self.kind(each) for each in (node.returns.slice.elts if several else [node.returns])]
        self.result = f"{node.name.capitalize()}Result<T>" if several else self.returns[0]

    def kind(self, annotation: ast.expr | None) -> str:
        if not isinstance(annotation, ast.Name) or annotation.id not in KINDS:
            refuse(self.node if annotation is None else annotation)
        return KINDS[annotation.id]

    def text(self) -> str:
        comment, *body = self.node.body
        *steps, last = body
        parameters = [f"{kind} {name}" for name, kind in self.parameters.items()]
        lines = [f"// {ast.literal_eval(comment.value).splitlines()[0]}", "template <typename T>"]
        lines.append(wrapped(f"IA_INLINE {self.result} {self.node.name}(", parameters, ") {"))
        for step in steps:
            if not isinstance(step, ast.Assign) or len(step.targets) != 1 or not isinstance(step.targets[0], ast.Name):
                refuse(step)
            name, (value, kind) = step.targets[0].id, self.expression(step.value)
            if name in self.kinds:
                refuse(step)
            self.kinds[name] = kind
            lines.append(f"  const {kind} {name} = {value};")
        if not isinstance(last, ast.Return) or last.value is None:
            refuse(last)
        if len(self.returns) == 1:
            return "\n".join([*lines, f"  return {self.of_kind(last.value, self.returns[0])};", "}"])
        if not isinstance(last.value, ast.Tuple) or len(last.value.elts) != len(self.returns):
            refuse(last)
        pairs = list(zip(self.returns, last.value.elts, strict=True))
        values = [self.of_kind(value, kind) for kind, value in pairs]
        fields = [f"  {kind} {ast.unparse(value)};" for kind, value in pairs]
        struct = ["template <typename T>", f"struct {self.result.removesuffix('<T>')} {{", *fields, "};", ""]
        return "\n".join([*struct, *lines, f"  return {{{', '.join(values)}}};", "}"])

    def expression(self, node: ast.expr) -> tuple[str, str]:
        """C++, and its kind."""
        if isinstance(node, ast.Constant) and type(node.value) is float:
            return f"T({node.value!r})", SCALAR
        if isinstance(node, ast.Name) and node.id in self.kinds:
            kind = self.kinds[node.id]
            return (f"T({node.id})" if kind == SCALAR and node.id not in self.parameters else node.id), kind
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return f"~{self.operand(node.operand, TRUTH)}", TRUTH
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC | LOGIC:
            if type(node.op) in LOGIC:
                kind, sign = TRUTH, LOGIC[type(node.op)]
            else:
                # A scalar and numbers of vectors meet as they do in torch.
                kinds = {self.expression(side)[1] for side in (node.left, node.right)}
                kind, sign = NUMBER if NUMBER in kinds else SCALAR, ARITHMETIC[type(node.op)]
            return f"{self.operand(node.left, kind)} {sign} {self.operand(node.right, kind)}", kind
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = self.operand(node.left, NUMBER), self.operand(node.comparators[0], NUMBER)
            return f"{left} {COMPARISONS[type(node.ops[0])]} {right}", TRUTH
        if isinstance(node, ast.Call) and not node.keywords:
            return self.call(node, ast.unparse(node.func))
        refuse(node)

    def operand(self, node: ast.expr, kind: str) -> str:
        """An expression of a kind, in brackets where it needs them; a scalar may stand beside vectors."""
        text, found = self.expression(node)
        if found != kind and (found, kind) != (SCALAR, NUMBER):
            refuse(node)
        chosen = isinstance(node, ast.Call) and ast.unparse(node.func) == "lang.where"
        return f"({text})" if chosen or isinstance(node, ast.BinOp | ast.Compare) else text

    def of_kind(self, node: ast.expr, kind: str) -> str:
        """An expression where C++ asks for this kind: a scalar is laid into a vector."""
        text, found = self.expression(node)
        if found == kind:
            return text
        return f"all({self.operand(node, kind)})"

    def call(self, node: ast.Call, name: str) -> tuple[str, str]:
        if name == "float" and ast.unparse(node) == "float('inf')":
            return "T(__builtin_inf())", SCALAR
        if name == "lang.where" and len(node.args) == 3:
            condition, *either = node.args
            yes, no = (
                f"({text})" if " ? " in text else text for text in (self.of_kind(each, NUMBER) for each in either)
            )
            return f"{self.operand(condition, TRUTH)} ? {yes} : {no}", NUMBER
        if name in ELEMENTWISE and len(node.args) == 1:
            return f"{ELEMENTWISE[name]}({self.of_kind(node.args[0], NUMBER)})", NUMBER
        other = self.others.get(name)
        if other is None or len(other.returns) > 1 or len(other.parameters) != len(node.args):
            refuse(node)
        values = map(self.of_kind, node.args, other.parameters.values())
        return f"{name}<T>({', '.join(values)})", other.returns[0]


def header(source: str) -> str:
    """The C++ of a rule in Python."""
    numbers: dict[str, str] = {}
    functions: dict[str, Function] = {}
    written = []
    for node in ast.parse(source).body[1:]:
        if isinstance(node, ast.FunctionDef):
            function = Function(node, set(numbers), dict(functions))
            written.append(function.text())
            functions[node.name] = function
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and type(node.value.value) is float:
            numbers[node.targets[0].id] = repr(node.value.value)
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.AnnAssign):
            refuse(node)
    codes = wrapped("constexpr int8_t ", [f"{each.name} = {each.value}" for each in Status], ";")
    listed = wrapped("constexpr double ", [f"{name} = {value}" for name, value in numbers.items()], ";")
    return TOP + "\n\n".join([codes + "\n" + listed, *written]) + "\n"


if __name__ == "__main__":
    HEADER.write_text(header(SOURCE.read_text()))

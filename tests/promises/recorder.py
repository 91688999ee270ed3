"""Plugin of pytest (`-p recorder`) that writes down every refusal of a public door which a test catches.

The door is the first public function, class or method on the way from the test to the exception; its call is written as
an expression of public constructors and tensors, in several ways, the simplest first, of which `write.py` keeps the
first that raises the same. REFUSALS names the file, one JSON object a line. With PROBE every door is also called
with wrong arguments, one at a time, when it is first called in an example of a docstring.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import json
import math
import os
import pathlib
import re
import sys
import textwrap
import types
import typing
import weakref

import lists
import numpy
import torch
from torch import Tensor, nn

PACKAGE = str(lists.SOURCE)
STYLES = ("ones", "normal", "symmetric", "literal")
PUBLIC = {id(value): path for path, value in lists.listed() if isinstance(value, type) or inspect.isfunction(value)}
VALUES = dict(lists.listed())
CODES = {inspect.unwrap(VALUES[path]).__code__: path for path in PUBLIC.values() if inspect.isfunction(VALUES[path])}
#: How the living objects were made: by style an expression and the names of the definitions that it needs.
MADE = {}
#: Definitions of tests, as text, by name.
SOURCES = {}
NEEDED = set()


class Unwritable(Exception):
    """A value without an expression."""


def public_base(kind):
    return next((base for base in kind.__mro__ if id(base) in PUBLIC), None)


# Expressions.


def number(value):
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f'float("{value}")'


def nested(items):
    return f"[{', '.join(map(nested, items))}]" if isinstance(items, list) else number(items)


def tensor(value, style):
    kind = type(value).__name__
    if kind == "FakeTensor":
        return f"fake({tuple(value.shape)}, {value.dtype})"
    if kind == "NestedTensor" or value.is_nested:
        parts = ", ".join(tensor(part, "ones") for part in value.unbind())
        return f"torch.nested.nested_tensor([{parts}], layout={value.layout})"
    if type(value) not in (Tensor, nn.Parameter) or value.device.type not in ("cpu", "meta"):
        raise Unwritable(kind)
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise Unwritable("transformed")
    shape, dtype = tuple(value.shape), str(value.dtype)
    if value.layout != torch.strided:
        to = {torch.sparse_coo: "to_sparse()", torch.sparse_csr: "to_sparse_csr()"}[value.layout]
        return f"torch.ones({shape}, dtype={dtype}).{to}"
    ones = f"torch.ones({shape}, dtype={dtype})"
    sizes = "".join(f"{n}, " for n in shape) + f"dtype={dtype}"
    square = value.ndim > 1 and shape[-1] == shape[-2]
    if value.device.type == "meta":
        return f'torch.ones({shape}, dtype={dtype}, device="meta")'
    if value.is_floating_point() and (style in ("normal", "symmetric") or (style == "literal" and value.numel() > 256)):
        text = f"symmetric({sizes})" if style == "symmetric" and square else f"normal({sizes})"
    elif style == "ones" or value.numel() > 256 or not value.numel():
        text = ones
    else:
        text = f"torch.tensor({nested(value.detach().tolist())}, dtype={dtype})"
    if value.numel() and not value.is_contiguous():
        size = 1 + sum((n - 1) * s for n, s in zip(shape, value.stride(), strict=True))
        text = f"{text}.as_strided({shape}, {value.stride()})" if size <= value.numel() else text
        if size > value.numel():
            flat = (
                f"normal({size}, dtype={dtype})" if value.is_floating_point() else f"torch.ones({size}, dtype={dtype})"
            )
            text = f"{flat}.as_strided({shape}, {value.stride()})"
    if isinstance(value, nn.Parameter):
        return f"nn.Parameter({text}, {value.requires_grad})"
    return text + ".requires_grad_()" if value.requires_grad else text


def need(name, value, module):
    """Note the definition of a global name of a test's module that an expression reads."""
    key = (name, id(value))
    if key in SOURCES:
        NEEDED.add(key)
        return
    home = getattr(value, "__module__", None) or ""
    if isinstance(value, types.ModuleType):
        text = f"import {value.__name__} as {name}"
    elif id(value) in PUBLIC and PUBLIC[id(value)].rpartition(".")[2] == name:
        text = f"from {PUBLIC[id(value)].rpartition('.')[0]} import {name}"
    elif type(value) in (int, float, str, tuple, bool, torch.dtype) or value is None:
        text = f"{name} = {written(value, 'literal')}"
    elif isinstance(value, type | types.FunctionType) and home == module:
        text = textwrap.dedent(inspect.getsource(value))
    elif home.split(".")[0] in ("torch", "typing", "collections", "functools", "dataclasses") or ".testing" in home:
        text = f"from {home} import {name}"
    else:
        raise Unwritable(f"{name} of {module}")
    SOURCES[key] = (text, value)
    NEEDED.add(key)
    try:
        reads(ast.parse(text), module)
    except Exception:
        del SOURCES[key]
        raise


def reads(tree, module, but=()):
    known = vars(sys.modules[module])
    for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(but)):
        if name in known and name not in ("torch", "nn", "Tensor"):
            need(name, known[name], module)


def function(value, style):
    name = getattr(value, "__name__", "")
    for module in (torch, torch.nn.functional, Tensor, math):
        if getattr(module, name, None) is value:
            return f"torch.Tensor.{name}" if module is Tensor else f"{module.__name__}.{name}"
    if not isinstance(value, types.FunctionType) or value.__module__.split(".")[0] in ("torch", "implicit_attention"):
        raise Unwritable(name)
    lines, _begin = inspect.getsourcelines(value)
    if name == "<lambda>":
        tree = ast.parse(pathlib.Path(value.__code__.co_filename).read_text())
        wanted = value.__code__.co_varnames[: value.__code__.co_argcount]
        found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == value.__code__.co_firstlineno]
        found = [n for n in found if tuple(a.arg for a in n.args.args) == wanted]
        spots = [p[:3:2] for p in value.__code__.co_positions() if p[2]]
        ends = [((n.body.lineno, n.body.col_offset), (n.body.end_lineno, n.body.end_col_offset), n) for n in found]
        found = [n for first, last, n in ends if all(first <= spot < last for spot in spots)]
        if not found:
            raise Unwritable("lambda")
        tree, text = found[0], f"({ast.unparse(found[0])})"
    else:
        text = textwrap.dedent("".join(lines))
        tree = ast.parse(text)
    free = inspect.getclosurevars(value).nonlocals
    reads(tree, value.__module__, free)
    if name != "<lambda>":
        made = f"def make_{name}({', '.join(free)}):\n{textwrap.indent(text, '    ')}\n    return {name}\n"
        SOURCES[f"make_{name}", id(value)] = (made, value)
        NEEDED.add((f"make_{name}", id(value)))
        return f"make_{name}({', '.join(written(each, style) for each in free.values())})"
    if free:
        text = f"(lambda {', '.join(free)}: {text})({', '.join(written(each, style) for each in free.values())})"
    return text


def network(value, style):
    """A layer of torch or a model of a host, made again from its attributes or its configuration."""
    kind = type(value)
    if kind.__module__.startswith("transformers.models"):
        settings = {k: v for k, v in value.config.to_diff_dict().items() if k not in ("transformers_version", "dtype")}
        config = f"transformers.{type(value.config).__name__}(**{written(settings, style)})"
        return f"transformers.{kind.__name__}({config})"
    if kind in (nn.Sequential, nn.ModuleList):
        return f"nn.Sequential({', '.join(written(each, style) for each in value)})"
    if not kind.__module__.startswith("torch.nn.modules"):
        raise Unwritable(kind)
    given = []
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        here = getattr(value, name, parameter.default)
        if name == "bias" and not isinstance(here, bool):
            here = here is not None
        if name not in ("self", "device", "dtype") and here is not parameter.default and here != parameter.default:
            given.append(f"{name}={written(here, style)}")
    return f"nn.{kind.__name__}({', '.join(given)})"


def as_it_is(value, text):
    """Text of a module with what has become of it since it was made."""
    if isinstance(value, nn.Module):
        first = next(value.parameters(), None)
        if first is not None and first.dtype != torch.get_default_dtype():
            text += f".to({first.dtype})"
        text += "" if value.training else ".eval()"
        if first is not None and not first.requires_grad:
            text += ".requires_grad_(False)"
    return text


def written(value, style):
    """An expression for a value."""
    kind = type(value)
    if value is None or kind in (str, bytes, slice, range):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if id(value) in PUBLIC:
        return PUBLIC[id(value)]
    if isinstance(value, enum.Enum) and id(kind) in PUBLIC:
        return f"{PUBLIC[id(kind)]}.{value.name}"
    if kind in (bool, int, float, complex):
        return number(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        if value.size > 256:
            return f"numpy.ones({value.shape}, dtype={str(value.dtype)!r})"
        return f"numpy.{'array' if value.ndim else value.dtype.type.__name__}({nested(value.tolist())}" + (
            f", dtype={str(value.dtype)!r})" if value.ndim else ")"
        )
    if isinstance(value, pathlib.Path):
        return f"pathlib.Path({re.sub(r'.*/pytest-[^/]*/pytest-[^/]*/[^/]*/?', '', str(value))!r})"
    if isinstance(value, torch.dtype | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, Tensor):
        return tensor(value, style)
    if isinstance(value, torch.Generator):
        return "torch.Generator().manual_seed(0)"
    if kind in (list, set, frozenset, torch.Size):
        items = ", ".join(written(each, style) for each in value)
        empty = {set: "set()"}.get(kind) if not value else None
        kinds = {list: "[{}]", set: "{{{}}}", frozenset: "frozenset([{}])", torch.Size: "torch.Size([{}])"}
        return empty or kinds[kind].format(items)
    if kind is tuple:
        return f"({''.join(written(each, style) + ', ' for each in value)})"
    if kind is dict:
        return f"{{{', '.join(f'{written(k, style)}: {written(v, style)}' for k, v in value.items())}}}"
    if kind is functools.partial:
        return call("functools.partial", (value.func, *value.args), value.keywords, style)
    if id(value) in MADE:
        text, needed = MADE[id(value)].get(style, (None, ()))
        if text is None:
            raise Unwritable(MADE[id(value)].get("reason", "long"))
        NEEDED.update(needed)
        return as_it_is(value, text)
    if isinstance(value, type):
        if value.__module__ == "builtins":
            return value.__name__
        if value.__module__.startswith("torch.nn.modules"):
            return f"nn.{value.__name__}"
        need(value.__name__, value, value.__module__)
        return value.__name__
    if inspect.isroutine(value):
        return function(value, style)
    if id(kind) in PUBLIC and dataclasses.is_dataclass(value):
        given = []
        for field in dataclasses.fields(value):
            here = getattr(value, field.name)
            if field.init and not same(here, field.default):
                given.append(f"{field.name}={written(here, style)}")
        return f"{PUBLIC[id(kind)]}({', '.join(given)})"
    if id(kind) in PUBLIC and hasattr(value, "_fields"):
        return f"{PUBLIC[id(kind)]}({', '.join(written(each, style) for each in value)})"
    if "test" in kind.__module__ and "implicit_attention" not in kind.__module__:
        # A class of a test, whose own `__init__`, if it has one, is watched.
        need(kind.__name__, kind, kind.__module__)
        return as_it_is(value, f"{kind.__name__}()")
    if isinstance(value, nn.Module):
        return as_it_is(value, network(value, style))
    raise Unwritable(kind)


def same(left, right):
    plain = isinstance(left, bool | int | float | str | tuple)
    return left is right or (type(left) is type(right) and plain and left == right)


def call(text, args, kwargs, style):
    given = [written(each, style) for each in args]
    given += [f"{name}={written(each, style)}" for name, each in kwargs.items() if name.isidentifier()]
    return f"{text}({', '.join(given)})"


def ways(write):
    """What `write(style)` is in each style, with the definitions that it needs; or why it is not."""
    made = {}
    for style in STYLES:
        NEEDED.clear()
        try:
            text = write(style)
        except Exception as reason:
            made["reason"] = f"{type(reason).__name__}: {reason}" if not isinstance(reason, Unwritable) else str(reason)
        else:
            if len(text) < 8000:
                made[style] = (text, tuple(sorted(NEEDED)))
    return made


# Watching.


def remember(value, write):
    made = ways(write)
    try:
        weakref.finalize(value, MADE.pop, id(value), None).atexit = False
    except TypeError:
        return
    MADE[id(value)] = made


def aside():
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def watch_class(kind, name=None):
    """Remember how objects of a class were made."""
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        if torch.compiler.is_compiling() or type(self) is not kind:
            return original(self, *args, **kwargs)
        made = ways(lambda style: call(needed_name(kind), args, kwargs, style))
        done = original(self, *args, **kwargs)
        try:
            weakref.finalize(self, MADE.pop, id(self), None).atexit = False
            MADE[id(self)] = made
        except TypeError:
            pass
        probe(PUBLIC.get(id(kind)), original, args, kwargs, kind)
        return done

    kind.__init__ = __init__


def needed_name(kind):
    if id(kind) in PUBLIC:
        return PUBLIC[id(kind)]
    need(kind.__name__, kind, kind.__module__)
    return kind.__name__


def watch_function(path, original, method=None):
    """Remember what was asked when a public function or method returns an object of the package."""

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        value = original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return value
        if type(value).__module__.startswith("implicit_attention") and not any(value is each for each in args):
            if not method:
                remember(value, lambda style: call(path, args, kwargs, style))
            elif id(value) not in MADE or not set(STYLES) & set(MADE[id(value)]):
                remember(value, lambda style: call(f"{written(args[0], style)}.{method}", args[1:], kwargs, style))
        base = public_base(type(args[0])) if method else None
        if not method or base:
            probe(f"{PUBLIC[id(base)]}.{method}" if method else path, original, args, kwargs, method)
        return value

    return wrapper


def watch():
    functions, classes = {}, set()
    for path, value in VALUES.items():
        if ".testing." in path:
            continue
        if inspect.isfunction(value):
            functions[id(value)] = watch_function(path, value)
        elif isinstance(value, type) and not issubclass(value, tuple | enum.Enum | BaseException):
            classes |= {base for base in value.__mro__ if base.__module__.startswith("implicit_attention")}
            if typing.Protocol not in value.__bases__:
                watch_class(value)
    for kind in classes:
        for name, member in list(vars(kind).items()):
            operator = re.fullmatch(r"__r?(add|sub|mul|truediv|neg|matmul)__", name)
            plain = inspect.isfunction(member) and not inspect.isgeneratorfunction(member)
            if plain and (name[0] != "_" or operator) and name not in ("forward", "extra_repr"):
                setattr(kind, name, watch_function(None, member, name))
    PUBLIC.update({id(each): PUBLIC[key] for key, each in functions.items()})
    for path, value in VALUES.items():
        module, _, name = path.rpartition(".")
        if id(value) in functions and module in sys.modules:
            setattr(sys.modules[module], name, functions[id(value)])
    WATCHED.append(functions)


WATCHED = []


# Probing.

PROBED = set()
WRONG = ("x", -1, 0, 1.5, float("nan"), None, torch.ones(2, 2, dtype=torch.int64), torch.ones(7, 3), torch.ones(()), [])


def probe(path, original, args, kwargs, method):
    """Call a door with each of its arguments wrong in turn, once."""
    if not os.environ.get("PROBE") or path in PROBED or path is None:
        return
    PROBED.add(path)
    names = [
        n
        for n, p in inspect.signature(original).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    names = names[1:] if method else names
    given = dict(zip(names, args[1:] if isinstance(method, str) else args, strict=False)) | kwargs
    target = method if isinstance(method, type) else functools.partial(original, args[0]) if method else original
    for name in names:
        for wrong in WRONG:
            changed = {**given, name: wrong}
            try:
                with torch.random.fork_rng(devices=[]):
                    target(**changed)
            except Exception as error:
                inside, last = steps(error.__traceback__)
                if last != "package":
                    continue
                start = (
                    (lambda style: f"{written(args[0], style)}.{method}")
                    if isinstance(method, str)
                    else (lambda style: path)
                )
                keep(
                    error,
                    path,
                    lambda style, changed=changed, start=start: call(start(style), (), changed, style),
                    last,
                    inside,
                )


# Recording.


def steps(traceback):
    """The frames of the package on the way to an exception, and where it was raised."""
    inside, last = [], None
    while traceback:
        frame = traceback.tb_frame
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        ours = file.startswith(PACKAGE) and not file.startswith(PACKAGE + "/testing")
        ours |= file.startswith("<") and module.startswith("implicit_attention")
        if ours:
            inside.append(frame)
        last = "package" if ours else file
        traceback = traceback.tb_next
    return inside, last


def given_to(frame):
    """The arguments of a frame, without those that have their default."""
    code, values = frame.f_code, frame.f_locals
    owner = values.get("self")
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[:count]
    target = VALUES[CODES[code]] if code in CODES else getattr(type(owner), code.co_name, None)
    try:
        defaults = {name: each.default for name, each in inspect.signature(target).parameters.items()}
    except (TypeError, ValueError):
        defaults = {}
    star = code.co_varnames[count] if code.co_flags & inspect.CO_VARARGS else None
    rest = values.get(code.co_varnames[count + bool(star)]) if code.co_flags & inspect.CO_VARKEYWORDS else None
    args, kwargs = [], {}
    for index, name in enumerate(names):
        if (index == 0 and name in ("self", "cls")) or name not in values:
            continue
        if index < code.co_argcount and ((star and values.get(star)) or index < code.co_posonlyargcount):
            args.append(values[name])
        elif name not in defaults or not same(values[name], defaults[name]):
            kwargs[name] = values[name]
    return [*args, *(values.get(star, ()) if star else ())], {**kwargs, **(rest or {})}


def door_of(frame):
    """The public name of a frame's function, and how its call is written in a style; None if it is not public."""
    code, values = frame.f_code, frame.f_locals
    name, owner = code.co_name, values.get("self", values.get("cls"))

    def written_call(start):
        args, kwargs = given_to(frame)
        return lambda style: call(start(style), args, kwargs, style)

    if code in CODES:
        return CODES[code], written_call(lambda style: CODES[code])
    if name == "__get__" and "instance" in values:
        base = public_base(type(values["instance"]))
        return f"{PUBLIC[id(base)]}.{owner.name}", lambda style: f"{written(values['instance'], style)}.{owner.name}"
    if name == "__getattr__" and owner is None:
        module = frame.f_globals["__name__"]
        return module, lambda style: f"{module}.{values['name']}"
    kind = public_base(owner if isinstance(owner, type) else type(owner))
    if kind is None or (name[0] == "_" and not name.endswith("__")):
        return None
    path = PUBLIC[id(kind)]
    if name in ("__init__", "__post_init__", "__new__"):
        own = owner if isinstance(owner, type) else type(owner)
        return path, written_call(lambda style: needed_name(own))
    if isinstance(inspect.getattr_static(kind, name, None), property):
        return f"{path}.{name}", lambda style: f"{written(owner, style)}.{name}"
    if name == "forward":
        return f"{path}.forward", written_call(lambda style: written(owner, style))
    return f"{path}.{name}", written_call(lambda style: f"{written(owner, style)}.{name}")


def record(error):
    inside, last = steps(error.__traceback__)
    for frame in inside:
        found = door_of(frame)
        if found is not None:
            return keep(error, *found, last, inside)
    return keep(error, None, None, last, inside)


def keep(error, door, write, last, inside):
    made = ways(write) if door else {}
    calls = []
    for style in STYLES:
        if style in made and made[style] not in calls:
            calls.append(made[style])
    row = {
        "door": door,
        "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0],
        "kind": type(error).__name__,
        "message": str(error),
        "raised": last,
        "calls": [[text, [SOURCES[name][0] for name in needed]] for text, needed in calls],
        "reason": made.get("reason"),
        "frames": [f"{f.f_code.co_filename.removeprefix(PACKAGE)}:{f.f_code.co_qualname}" for f in inside[:4]],
    }
    with open(os.environ["REFUSALS"], "a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_configure(config):
    from _pytest import raises

    watch()
    original = raises.RaisesExc.__exit__

    def __exit__(self, kind, error, traceback):
        done = original(self, kind, error, traceback)
        if done and error is not None:
            try:
                record(error)
            except Exception as wrong:
                print("recorder:", repr(wrong), file=sys.__stderr__)
        return done

    raises.RaisesExc.__exit__ = __exit__


HELPERS = r"raises|refused|check_refused|trust_in_attention|agrees_or_raises|solved|Contract|__getattr__"


def pytest_collection_modifyitems(config, items):
    """Tests that can catch nothing need not run; classes of tests remember how their objects are made."""

    @functools.cache
    def may(function):
        return re.search(HELPERS, inspect.getsource(function)) is not None

    for module in {item.module for item in items if hasattr(item, "module")}:
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "__init__" in vars(kind):
                watch_class(kind)
    wanted = [item for item in items if not hasattr(item, "function") or may(inspect.unwrap(item.function))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
    items[:] = wanted


def probe_examples():
    """Run the examples of all docstrings with PROBE."""
    import contextlib
    import doctest
    import io
    import warnings

    watch()
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(verbose=False)
    for name in sorted({value.__module__ for value in VALUES.values() if hasattr(value, "__module__")}):
        if ".testing" in name:
            continue
        for example in finder.find(__import__("importlib").import_module(name), name):
            torch.manual_seed(0)
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                runner.run(example, out=lambda text: None)

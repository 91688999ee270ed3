"""Objects that know their own tensors, so that a solve can be differentiated with respect to each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import Self

from ._autograd import in_own_precision

_D = TypeVar("_D", bound="Declared")
_F = TypeVar("_F", bound=Callable[..., Any])
#: Changes the attributes of a copy of a module, and returns its class, if that is another.
_Own: TypeAlias = Callable[[nn.Module, dict[str, Any]], type[nn.Module] | None]


def parts_of(module: nn.Module, prefix: str = "", found: dict[nn.Module, str] | None = None) -> dict[nn.Module, str]:
    """The module and its parts, each once, with what precedes the names in them: torch's own walk is slow."""
    found = {} if found is None else found
    if module not in found:
        found[module] = prefix
        for name, part in module._modules.items():
            if part is not None:
                parts_of(part, f"{prefix}{name}.", found)
    return found


def _module_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and then the buffers with their names, each once."""
    parts, found = parts_of(module).items(), dict[int, tuple[str, Tensor]]()
    for kind in ("_parameters", "_buffers"):
        for part, prefix in parts:
            for name, tensor in getattr(part, kind).items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{prefix}{name}", tensor))
    return list(found.values())


def _tree(module: nn.Module, own: _Own, copies: dict[int, nn.Module], *, compiled: bool = True) -> nn.Module:
    """A copy of the module tree, shared parts shared, each of which `own` changes.

    compiled: whether copies of what torch.compile made are compiled, too.
    """
    if not compiled and "dynamo_ctx" in vars(module):
        module = cast(nn.Module, module._modules["_orig_mod"])
    if id(module) not in copies:
        state = dict(module.__dict__)
        state |= {kind: dict(state[kind]) for kind in ("_parameters", "_buffers", "_modules")}
        kind = own(module, state) or type(module)
        # As copy.copy, which parametrized modules refuse.
        clone = copies[id(module)] = kind.__new__(kind)
        clone.__dict__, inner = state, state["_modules"]
        inner |= {name: _tree(part, own, copies, compiled=compiled) for name, part in inner.items() if part is not None}
        if "dynamo_ctx" in state:
            # A result of torch.compile(module): the same code with other tensors is not compiled again.
            clone._initialize()  # type: ignore[operator]
        elif (call := state.get("_compiled_call_impl")) is not None:
            state["_compiled_call_impl"] = _compiled_like(call, clone._call_impl) if compiled else None
    return copies[id(module)]


def _compiled_like(compiled: Any, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """`function` compiled as `compiled` was; None, for not compiled, where torch does not show how."""
    cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=False)
    context = {name: cell.cell_contents for name, cell in cells}.get("self")
    return context(function) if callable(context) else None


def _reading(module: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The same module tree, reading the tensors `new[id(old)]`."""

    def own(module: nn.Module, state: dict[str, Any]) -> None:
        if parametrize._cache_enabled and _is_parametrized(module):
            raise ValueError(
                "parametrize.cached() must not be open where a module reads other tensors than those it keeps"
            )
        for kind in ("_parameters", "_buffers"):
            state[kind] = {n: None if t is None else new[id(t)] for n, t in state[kind].items()}

    return _tree(module, own, {})


def _is_compiled(module: nn.Module) -> bool:
    return "dynamo_ctx" in vars(module) or vars(module).get("_compiled_call_impl") is not None


def _own_buffers(module: nn.Module, state: dict[str, Any]) -> None:
    """For `_tree`: with buffers of its own where it may write to them."""
    if module.training:
        state["_buffers"] = {n: b if b is None else b.clone() for n, b in state["_buffers"].items()}


def _is_parametrized(module: nn.Module) -> bool:
    # The result of torch.compile(module) has the attributes of the module inside.
    return "parametrizations" in module._modules


def _computes(module: nn.Module) -> bool:
    """Whether the module computes a weight of its own at every call."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks) or _is_parametrized(module)


def _computed(module: nn.Module, state: dict[str, Any]) -> type[nn.Module] | None:
    """For `_tree`: the weights that the module computes are computed now, and are its parameters."""
    parameters, hooks = state["_parameters"], module._forward_pre_hooks
    state["_forward_pre_hooks"] = kept = copy.copy(hooks)
    for key, hook in hooks.items():
        if isinstance(hook, WeightNorm | SpectralNorm):
            options = (module.training,) if isinstance(hook, SpectralNorm) else ()
            parameters[hook.name] = hook.compute_weight(module, *options)
            del kept[key], state[hook.name]
    if not _is_parametrized(module):
        return None
    parameters |= {name: getattr(module, name) for name in cast(nn.ModuleDict, module.parametrizations)}
    del state["_modules"]["parametrizations"]
    return cast(type[nn.Module], parametrize.type_before_parametrizations(module))


def walk(value: Any, name: str = "", found: list[tuple[str, Any]] | None = None) -> list[tuple[str, Any]]:
    """The tensors, modules and `Declared` objects in a value, and the value if it is no container, with their names.

    Args:
        value: nested tuples, lists, dicts and `Declared` objects.
        name: what the names begin with.
        found: where they are added.
    """
    # Not a generator, which costs a frame for each level and leaf: every solve looks for tensors several times.
    found = [] if found is None else found
    parts: list[tuple[str, Any]] = []
    if isinstance(value, tuple | list):
        parts = [(f"{name}[{i}]", part) for i, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    else:
        found.append((name, value))
    if isinstance(value, Declared):
        parts += [(f"{name}.{key}" if name else key, part) for key, part in vars(value).items()]
    for inner, part in parts:
        if isinstance(part, HOLDERS):
            walk(part, inner, found)
    return found


def named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in `value` with their names, which begin with `name`."""
    for path, leaf in walk(value, name):
        if isinstance(leaf, Tensor):
            yield path, leaf
        elif isinstance(leaf, nn.Module):
            for inner, tensor in _module_tensors(leaf):
                yield f"{path}.{inner}", tensor


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules in `value` and their parts, in all places where `named` looks for tensors."""
    return (part for _, leaf in walk(value) if isinstance(leaf, nn.Module) for part in parts_of(leaf))


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with each tensor and module in it replaced by leaf(it), in the order of `named`."""
    if isinstance(value, Declared):
        return value._mapped(leaf)
    if isinstance(value, Tensor | nn.Module):
        return leaf(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    return value


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor t in it replaced by change(t)."""
    return _mapped(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


#: How many entries of a tuple, list or dict are named where an object is shown.
_SHOWN = 4


def _text(name: str, value: Any) -> str:
    """An attribute in a few words; empty for one that is None or False."""
    if isinstance(value, Tensor):
        return f"{name} {tuple(value.shape)}"
    if isinstance(value, Declared):
        return value._shown()
    if isinstance(value, tuple | list | dict):
        parts = value.values() if isinstance(value, dict) else value
        texts = [text for part in parts if (text := _text("", part).strip())]
        label = "" if any(isinstance(part, Declared) for part in parts) else f"{name} "
        more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        return label + ", ".join([*texts[:_SHOWN], *more]) if texts else ""
    if value is None or value is False:
        return ""
    if value is True:
        return name
    if isinstance(value, float):
        return f"{name} {value:.6g}"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = f"{name} {value!r}"
    # An object that prints its address, or pages of text, is shown by its class.
    return text if len(text) <= 60 and " at 0x" not in text else f"{name} {type(value).__name__}"


def abstract(method: _F) -> _F:
    """A method that a general class leaves to its subclasses."""
    method._abstract = True  # type: ignore[attr-defined]
    return method


class Declared:
    """Base of potentials, energies and maps: every tensor in an attribute is declared, in order of assignment.

    Attributes may be tensors, other `Declared` objects, modules (their parameters and buffers) and tuples, lists or
    dicts of these. Nothing needs to be registered: a subclass only assigns its attributes.

    Methods without an underscore compute in the precision of their tensors, also inside torch.autocast.

    A subclass that overrides a method inherits no closed form that was derived from the method of its base: what
    `_follows` names for it are the formulas of the `general` base again, None where that has no such method. What is
    `abstract` there the subclass has to define, or it is not made.
    """

    #: method -> the methods and claims that were derived from it, and do not hold where a subclass overrides it.
    _follows: ClassVar[dict[str, tuple[str, ...]]] = {}
    #: Whether the methods of this class hold for all of its subclasses.
    _general: ClassVar[bool] = True
    #: Whether every tensor that the class reads is certainly in an attribute, so that `solve` need not check.
    declares_all: ClassVar[bool] = False

    def __init_subclass__(cls, *, general: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._general = general
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, in_own_precision(method))
        # The class that defines each name, by its number in the order of inheritance, before any is replaced.
        names = {name for source, followers in cls._follows.items() for name in (source, *followers)}
        places = {name: [i for i, base in enumerate(cls.__mro__) if name in vars(base)] for name in names}
        for source, followers in cls._follows.items():
            for name in followers:
                if places[source] and places[source][:1] < places[name][:1]:
                    cls._take_general(name, source, cls.__mro__[places[name][0]])

    @classmethod
    def _take_general(cls, name: str, source: str, owner: type) -> None:
        """Take the general formula where `owner` derived one from a `source` that is overridden now."""
        if vars(owner).get("_general"):
            return
        formulas = [vars(base)[name] for base in cls.__mro__ if vars(base).get("_general") and name in vars(base)]
        if formulas and hasattr(formulas[0], "_abstract"):
            kind, base = owner.__name__, next(base.__name__ for base in cls.__mro__ if "_follows" in vars(base))
            raise TypeError(
                f"`{cls.__name__}` overrides `{source}`, of which the `{name}` of {kind} knows nothing; define it, "
                f"write `{name} = {kind}.{name}` in the class if that still holds, or subclass {base} in place of "
                f"{kind}"
            )
        # Of what has no formula the class has none.
        setattr(cls, name, formulas[0] if formulas else None)

    def __repr__(self) -> str:
        """One line of shapes and Python numbers: no tensor is read, so that it works inside transforms and graphs."""
        kinds = {f"{t.dtype}".removeprefix("torch.") for t in self.tensors() if t.is_floating_point()}
        places = {f"{t.device}" for t in self.tensors() if t.device.type != "cpu"}
        return self._shown(*sorted(kinds), *sorted(places))

    def _shown(self, *more: str) -> str:
        """Its class and attributes as text, and `more` of them."""
        texts = (_text(name, value) for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join([*filter(None, texts), *more])})"

    def _name(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    def _within(self) -> Iterator[Declared]:
        """The object itself, and all `Declared` objects in its attributes."""
        return (leaf for _, leaf in walk(self) if isinstance(leaf, Declared))

    @property
    def all_declared(self) -> bool:
        """Whether every tensor that is read is certainly declared, and a NaN in one reaches the problems that read it.

        True for this library's classes (`declares_all`), not for their subclasses.
        """
        return all(vars(type(part)).get("declares_all") and part.declares_all for part in self._within())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return named(self)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the object reads, in a fixed order."""
        return tuple(tensor for _, tensor in self.named_tensors())

    def replace(self, *tensors: Tensor) -> Self:
        """The same object reading other tensors, given in the order of `tensors()`."""
        new = iter(tensors)

        def replaced(leaf: Tensor | nn.Module) -> Tensor | nn.Module:
            if isinstance(leaf, Tensor):
                return next(new)
            return _reading(leaf, {id(tensor): next(new) for _, tensor in _module_tensors(leaf)})

        result = self._mapped(replaced)
        if next(new, None) is not None:
            raise ValueError(f"`tensors` must have {len(self.tensors())} entries, got {len(tensors)}")
        return result

    def apart(self) -> Self:
        """The same object for evaluations beside the solve: its modules write to no buffer, and are not compiled.

        Buffers that they update while they train, such as a running mean, are copied. (A compiler that meets torch.func
        in a module gives the module up for all later calls.)
        """
        return self._with_copies(lambda part: _is_compiled(part) or part.training, _own_buffers, compiled=False)

    def unwritten(self) -> Self:
        """The same object, whose modules write to copies of their buffers, and stay compiled where they are."""
        return self._with_copies(lambda part: part.training, _own_buffers)

    def settled(self) -> Self:
        """The same object, whose modules hold as tensors the weights that they would compute at every call.

        These weights (parametrizations) are computed once, with their graph: a whole solve reads the same weights, also
        where their computation changes buffers.
        """
        return self._with_copies(_computes, _computed)

    def _with_copies(self, changes: Callable[[nn.Module], bool], own: _Own, *, compiled: bool = True) -> Self:
        """The same object with copies of its modules as `_tree` makes them, if any part of these `changes`."""
        if not any(map(changes, modules_in(self))):
            return self
        copies: dict[int, nn.Module] = {}
        return self._mapped(lambda t: t if isinstance(t, Tensor) else _tree(t, own, copies, compiled=compiled))

    def _has_only(self, *names: str) -> bool:
        """Whether these are all attributes, in this order.

        Formulas written for a class (gradients in the order of its tensors, restriction to rows) do not hold for a
        subclass with further attributes.
        """
        return tuple(vars(self)) == names

    def _mapped(self, leaf: Callable[[Any], Any]) -> Self:
        clone = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, HOLDERS):
                object.__setattr__(clone, name, _mapped(value, leaf))
        return clone


#: What may hold tensors.
HOLDERS = (Tensor, nn.Module, tuple, list, dict, Declared)


def restricted(declared: _D, index: Tensor, **own: int) -> _D:
    """The problems `index` (*batch, K) of the last axis that numbers problems, as `select` returns them.

    Args:
        declared: an object with tensors (*#batch, #N, *own) of N problems each.
        index: which problems, for each batch entry.
        own: for each attribute that numbers problems, how many of its axes belong to one. Numbers are left alone.
    """
    clone: _D = changed(declared, lambda tensor: tensor)
    for name, count in own.items():
        tensor = getattr(clone, name)
        if isinstance(tensor, Tensor):
            setattr(clone, name, picked(tensor, index, tensor.ndim - count - 1))
    return clone


def picked(tensor: Tensor, index: Tensor, axis: int) -> Tensor:
    if axis < 0 or tensor.shape[axis] == 1:
        return tensor
    if all(stride == 0 or size == 1 for stride, size in zip(index.stride()[:-1], index.shape[:-1], strict=True)):
        # The same problems in every batch entry: the tensor stays as small as it is.
        same = index.reshape(-1, index.shape[-1])[0] if index.numel() else index.new_empty(0)
        return tensor.index_select(axis, same)
    return pick(tensor.expand(*index.shape[:-1], *tensor.shape[axis:]), index)


def pick(tensor: Tensor, index: Tensor) -> Tensor:
    """The rows `index` (*batch, K) of a tensor (*batch, N, ...)."""
    if index.ndim == 1:
        return tensor.index_select(0, index)
    return torch.take_along_dim(tensor, index.reshape(*index.shape, *(1,) * (tensor.ndim - index.ndim)), index.ndim - 1)


def first_of(chosen: Tensor) -> Tensor | None:
    """Indices (*lead[:-1], K) with all chosen problems (*lead) among them, as few as fit; None without an axis."""
    if chosen.ndim == 0:
        return None
    order = torch.argsort(chosen.logical_not().to(torch.int8), dim=-1, stable=True)
    return order[..., : int(chosen.sum(-1).max())]


def put(tensor: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """A tensor (*batch, N, ...) with `rows` (*batch, K, ...) in the places `index` (*batch, K)."""
    if index.ndim == 1:
        return tensor.index_copy(0, index, rows)
    places = index.reshape(*index.shape, *(1,) * (rows.ndim - index.ndim)).expand_as(rows)
    return tensor.scatter(index.ndim - 1, places, rows)

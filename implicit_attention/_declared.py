"""Objects that know their own tensors, so that a solve can be differentiated with respect to each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import Self

from ._autograd import in_own_precision

_D = TypeVar("_D", bound="Declared")


def _module_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and then the buffers with their names, each once, as `nn.Module` names them."""
    found, parts = [], parts_of(module)
    for kind in ("_parameters", "_buffers"):
        seen = set()
        for part, prefix in parts.items():
            for name, tensor in getattr(part, kind).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append((f"{prefix}{name}", tensor))
    return found


def parts_of(module: nn.Module) -> dict[nn.Module, str]:
    """The modules of the tree, each once, with what their names put before those of their tensors."""
    parts: dict[nn.Module, str] = {}

    def visit(part: nn.Module, prefix: str) -> None:
        if part not in parts:
            parts[part] = prefix
            for name, inner in part._modules.items():
                if inner is not None:
                    visit(inner, f"{prefix}{name}.")

    visit(module, "")
    return parts


def _tree(
    module: nn.Module, own: Callable[[nn.Module, dict[str, Any]], type[nn.Module]], copies: dict[int, nn.Module]
) -> nn.Module:
    """A copy of the module tree, shared parts shared.

    own(module, attributes) changes the attributes that the copy of each is to have, and returns its class.
    """
    if id(module) not in copies:
        state = dict(module.__dict__)
        state |= {kind: dict(state[kind]) for kind in ("_parameters", "_buffers", "_modules")}
        kind = own(module, state)
        # As copy.copy, which parametrized modules refuse.
        clone = copies[id(module)] = kind.__new__(kind)
        clone.__dict__ = state
        if state["_modules"]:
            state["_modules"] = {n: m if m is None else _tree(m, own, copies) for n, m in state["_modules"].items()}
        if "dynamo_ctx" in state:
            # A result of torch.compile(module): the same code with other tensors is not compiled again.
            clone._initialize()  # type: ignore[operator]
        elif (compiled := state.get("_compiled_call_impl")) is not None:
            state["_compiled_call_impl"] = _compiled_like(compiled, clone._call_impl)
    return copies[id(module)]


def _compiled_like(compiled: Any, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """`function` compiled as `compiled` was; None, for not compiled, where torch does not show how."""
    cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=False)
    context = {name: cell.cell_contents for name, cell in cells}.get("self")
    return context(function) if callable(context) else None


def _copied(module: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The same module tree, reading the tensors `new[id(old)]`."""

    def own(module: nn.Module, state: dict[str, Any]) -> type[nn.Module]:
        if parametrize._cache_enabled and _is_parametrized(module):
            raise ValueError(
                "parametrize.cached() must not be open where a module reads other tensors than those it keeps"
            )
        for kind in [kind for kind in ("_parameters", "_buffers") if state[kind]]:
            state[kind] = {n: None if t is None else new[id(t)] for n, t in state[kind].items()}
        return type(module)

    return _tree(module, own, {})


def _is_compiled(module: nn.Module) -> bool:
    return "dynamo_ctx" in vars(module) or vars(module).get("_compiled_call_impl") is not None


def _inside(module: nn.Module) -> nn.Module:
    """The module itself; for a result of torch.compile(module) the one inside."""
    return cast(nn.Module, module._modules["_orig_mod"]) if "dynamo_ctx" in vars(module) else module


def _kept_apart(module: nn.Module, state: dict[str, Any]) -> type[nn.Module]:
    """For `_tree`: not compiled, and with buffers of its own where it may write to them."""
    state["_compiled_call_impl"] = None
    state["_modules"] = {n: m if m is None else _inside(m) for n, m in state["_modules"].items()}
    return _own_buffers(module, state)


def _own_buffers(module: nn.Module, state: dict[str, Any]) -> type[nn.Module]:
    """For `_tree`: with buffers of its own where it may write to them."""
    if module.training:
        state["_buffers"] = {n: b if b is None else b.clone() for n, b in state["_buffers"].items()}
    return type(module)


def _is_parametrized(module: nn.Module) -> bool:
    # The result of torch.compile(module) has the attributes of the module inside.
    return "parametrizations" in module._modules


def _computes(module: nn.Module) -> bool:
    """Whether the module computes a weight of its own at every call."""
    hooks = module._forward_pre_hooks
    computing = bool(hooks) and any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks.values())
    return computing or _is_parametrized(module)


def _computed(module: nn.Module, state: dict[str, Any]) -> type[nn.Module]:
    """For `_tree`: the weights that the module computes are computed now, and are its parameters."""
    parameters, hooks = state["_parameters"], module._forward_pre_hooks
    state["_forward_pre_hooks"] = kept = copy.copy(hooks)
    for key, hook in hooks.items():
        if isinstance(hook, WeightNorm | SpectralNorm):
            options = (module.training,) if isinstance(hook, SpectralNorm) else ()
            parameters[hook.name] = hook.compute_weight(module, *options)
            del kept[key], state[hook.name]
    if not _is_parametrized(module):
        return type(module)
    parameters |= {name: getattr(module, name) for name in cast(nn.ModuleDict, module.parametrizations)}
    del state["_modules"]["parametrizations"]
    return cast(type[nn.Module], parametrize.type_before_parametrizations(module))


def named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in `value` with their names, which begin with `name`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Declared):
        for inner, tensor in value.named_tensors():
            yield f"{name}.{inner}", tensor
    elif isinstance(value, nn.Module):
        for inner, tensor in _module_tensors(value):
            yield f"{name}.{inner}", tensor
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from named(item, f"{name}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named(item, f"{name}[{key!r}]")


def _mapped(value: Any, tensor: Callable[[Tensor], Tensor], module: Callable[[nn.Module], nn.Module]) -> Any:
    """`value` with its tensors and modules replaced, in the order of `named`."""
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, Declared):
        return value._mapped(tensor, module)
    if isinstance(value, nn.Module):
        return module(value)
    if isinstance(value, tuple | list):
        items = [_mapped(item, tensor, module) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _mapped(item, tensor, module) for key, item in value.items()}
    return value


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor t in it replaced by change(t)."""
    return _mapped(value, change, lambda module: module)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if not isinstance(value, tuple | list | dict):
        yield value
        return
    for part in value.values() if isinstance(value, dict) else value:
        yield from leaves(part)


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The modules in `value`, in all places where `named` looks for tensors."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Declared | tuple | list | dict):
        parts = vars(value) if isinstance(value, Declared) else value
        for part in parts.values() if isinstance(parts, dict) else parts:
            if isinstance(part, HOLDERS):
                yield from modules_in(part)


#: How many entries of a tuple, list or dict are named where an object is shown.
_SHOWN = 4


def _text(name: str, value: Any) -> str:
    """An attribute in a few words; empty for one that is None or False."""
    if isinstance(value, Tensor):
        return f"{name} {tuple(value.shape)}"
    if isinstance(value, Declared):
        return f"{value._name()}({', '.join(value._shown())})"
    if isinstance(value, nn.Module):
        return type(value).__name__
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


class Withdrawn:
    """Replaces an inherited formula that does not hold for a class, and raises where it is read."""

    def __init__(self, name: str, cause: str, owner: str) -> None:
        self.name, self.cause, self.owner = name, cause, owner

    def __get__(self, instance: object, cls: type | None = None) -> Any:
        who = (type(instance) if cls is None else cls).__name__
        raise AttributeError(
            f"`{who}` overrides `{self.cause}`, of which the `{self.name}` of {self.owner} knows nothing; define it, "
            f"or write `{self.name} = {self.owner}.{self.name}` in the class if that still holds"
        )


class Declared:
    """Base of potentials, energies and maps: every tensor in an attribute is declared, in order of assignment.

    Attributes may be tensors, other `Declared` objects, modules (their parameters and buffers) and tuples, lists or
    dicts of these. Nothing needs to be registered: a subclass only assigns its attributes.

    Methods without an underscore compute in the precision of their tensors, also inside torch.autocast.

    A subclass that overrides a method inherits no closed form that was derived from the method of its base. The
    methods that `_follows` names for it are those of the `general` base again, or `Withdrawn` where that has none.
    """

    #: method -> the methods and claims that were derived from it, and do not hold where a subclass overrides it.
    _follows: ClassVar[dict[str, tuple[str, ...]]] = {}
    #: The methods that the general class cannot derive from others.
    _underived: ClassVar[tuple[str, ...]] = ()
    #: Whether the methods of this class hold for all of its subclasses.
    _general: ClassVar[bool] = True

    def __init_subclass__(cls, *, general: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._general = general
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, in_own_precision(method))
        names = {name for cause, followers in cls._follows.items() for name in (cause, *followers)}
        # The number in the order of inheritance of the class that defines each; -1 if none does.
        places = {name: next((i for i, base in enumerate(cls.__mro__) if name in vars(base)), -1) for name in names}
        for cause, followers in cls._follows.items():
            for name in followers:
                owner = cls.__mro__[places[name]]
                if 0 <= places[cause] < places[name] and not vars(owner).get("_general"):
                    setattr(cls, name, cls._without_closed_form(name, cause, owner.__name__))

    @classmethod
    def _without_closed_form(cls, name: str, cause: str, owner: str) -> Any:
        general = [vars(base)[name] for base in cls.__mro__ if vars(base).get("_general") and name in vars(base)]
        return general[0] if general and name not in cls._underived else Withdrawn(name, cause, owner)

    def __repr__(self) -> str:
        """One line of shapes and Python numbers: no tensor is read, so that it works inside transforms and graphs."""
        kinds = {f"{t.dtype}".removeprefix("torch.") for t in self.tensors() if t.is_floating_point()}
        places = {f"{t.device}" for t in self.tensors() if t.device.type != "cpu"}
        return f"{self._name()}({', '.join([*self._shown(), *sorted(kinds), *sorted(places)])})"

    def _name(self) -> str:
        return type(self).__name__

    def _shown(self) -> Iterator[str]:
        """Its attributes as text."""
        for name, value in vars(self).items():
            if not name.startswith("_") and (text := _text(name, value)):
                yield text

    def attributes(self) -> Iterator[str]:
        """The names of its attributes, and of the attributes of `Declared` objects in them."""
        for name, value in vars(self).items():
            yield name
            for part in leaves(value):
                if isinstance(part, Declared):
                    yield from part.attributes()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, HOLDERS):
                yield from named(value, name)

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the object reads, in a fixed order."""
        return tuple(tensor for _, tensor in self.named_tensors())

    def replace(self, *tensors: Tensor) -> Self:
        """The same object reading other tensors, given in the order of `tensors()`."""
        new = iter(tensors)

        def replaced(module: nn.Module) -> nn.Module:
            return _copied(module, {id(tensor): next(new) for _, tensor in _module_tensors(module)})

        result = self._mapped(lambda _: next(new), replaced)
        if next(new, None) is not None:
            raise ValueError(f"`tensors` must have {len(self.tensors())} entries, got {len(tensors)}")
        return result

    def apart(self) -> Self:
        """The same object for evaluations beside the solve: its modules write to no buffer, and are not compiled.

        Buffers that they update while they train, such as a running mean, are copied. (A compiler that meets torch.func
        in a module gives the module up for all later calls.)
        """
        if not any(_is_compiled(part) or part.training for module in modules_in(self) for part in parts_of(module)):
            return self
        copies: dict[int, nn.Module] = {}
        return self._mapped(lambda tensor: tensor, lambda module: _tree(_inside(module), _kept_apart, copies))

    def unwritten(self) -> Self:
        """The same object, whose modules write to copies of their buffers, and stay compiled where they are."""
        if not any(part.training for module in modules_in(self) for part in parts_of(module)):
            return self
        copies: dict[int, nn.Module] = {}
        return self._mapped(lambda tensor: tensor, lambda module: _tree(module, _own_buffers, copies))

    def settled(self) -> Self:
        """The same object, whose modules hold as tensors the weights that they would compute at every call.

        These weights (parametrizations) are computed once, with their graph: a whole solve reads the same weights, also
        where their computation changes buffers.
        """
        if not any(_computes(part) for module in modules_in(self) for part in parts_of(module)):
            return self
        copies: dict[int, nn.Module] = {}
        return self._mapped(lambda tensor: tensor, lambda module: _tree(module, _computed, copies))

    def _has_only(self, *names: str) -> bool:
        """Whether these are all attributes, in this order.

        Formulas written for a class (gradients in the order of its tensors, restriction to rows) do not hold for a
        subclass with further attributes.
        """
        return tuple(vars(self)) == names

    def _mapped(self, tensor: Callable[[Tensor], Tensor], module: Callable[[nn.Module], nn.Module]) -> Self:
        clone = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, HOLDERS):
                object.__setattr__(clone, name, _mapped(value, tensor, module))
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
    clone = declared.replace(*declared.tensors())
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
    return tensor.gather(index.ndim - 1, spread(index, tensor))


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
    return tensor.scatter(index.ndim - 1, spread(index, rows), rows)


def spread(index: Tensor, like: Tensor) -> Tensor:
    """`index` (*batch, K), the same for all entries of a row of `like` (*batch, N, ...)."""
    own = like.shape[index.ndim :]
    return index.reshape(*index.shape, *(1,) * len(own)).expand(*index.shape, *own)

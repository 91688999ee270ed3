"""Problems z = f(z), one per leading index: the tensors that they declare, the base, and maps of users."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import Self

from . import _validate
from ._torch import (
    HALF,
    LinearMap,
    along,
    at_least_single,
    check_graph,
    exact_precision,
    grad,
    has_tangent,
    host_may_look,
    in_own_precision,
    is_batched,
    is_exporting,
    jvp_by_vjp,
    norm,
    same,
    transforms_active,
    vjp,
)
from .kernels.problem import Attention
from .solution import LEVERS, Record, Status, Trace, advice

_D = TypeVar("_D", bound="Declared")
_F = TypeVar("_F", bound=Callable[..., Any])
#: Changes the attributes of a copy of a module, and returns its class, if that is another.
_Change: TypeAlias = Callable[[nn.Module, dict[str, Any]], type[nn.Module] | None]


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
    parts = parts_of(module).items()
    found: dict[int, tuple[str, Tensor]] = {}
    for kind in ("_parameters", "_buffers"):
        for part, prefix in parts:
            for name, tensor in getattr(part, kind).items():
                if tensor is not None:
                    found.setdefault(id(tensor), (f"{prefix}{name}", tensor))
    return list(found.values())


def _tree(module: nn.Module, change: _Change, copies: dict[int, nn.Module], *, compiled: bool = True) -> nn.Module:
    """A copy of the module tree, shared parts shared, each of which `change` changes.

    compiled: whether copies of what torch.compile made are compiled, too.
    """
    if not compiled and "dynamo_ctx" in vars(module):
        module = cast(nn.Module, module._modules["_orig_mod"])
    if id(module) not in copies:
        state = dict(module.__dict__)
        state |= {kind: dict(state[kind]) for kind in ("_parameters", "_buffers", "_modules")}
        kind = change(module, state) or type(module)
        # As copy.copy, which parametrized modules refuse.
        clone = copies[id(module)] = kind.__new__(kind)
        clone.__dict__, inner = state, state["_modules"]
        inner |= {n: _tree(part, change, copies, compiled=compiled) for n, part in inner.items() if part is not None}
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


def _is_compiled(module: nn.Module) -> bool:
    return "dynamo_ctx" in vars(module) or vars(module).get("_compiled_call_impl") is not None


def _own_buffers(module: nn.Module, state: dict[str, Any]) -> None:
    """For `_tree`: with buffers of its own where it may write to them; one that requires grad is a parameter, too."""
    if module.training:
        buffers = state["_buffers"].items()
        state["_buffers"] = {name: b if b is None or b.requires_grad else b.clone() for name, b in buffers}


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
        news: dict[int, Tensor] = {}

        def change(module: nn.Module, state: dict[str, Any]) -> None:
            if parametrize._cache_enabled and _is_parametrized(module):
                raise ValueError(
                    "parametrize.cached() must not be open where a module reads other tensors than those it keeps"
                )
            for kind in ("_parameters", "_buffers"):
                state[kind] = {n: None if t is None else news[id(t)] for n, t in state[kind].items()}

        def replaced(leaf: Tensor | nn.Module) -> Tensor | nn.Module:
            if isinstance(leaf, Tensor):
                return next(new)
            news.update({id(tensor): next(new) for _, tensor in _module_tensors(leaf)})
            return _tree(leaf, change, {})

        result = self._mapped(replaced)
        if next(new, None) is not None:
            _validate.refuse("tensors", f"have {len(self.tensors())} entries", len(tensors))
        return result

    def _filled(self, good: Callable[[Tensor], Tensor]) -> Self:
        """The same object with 1 in the place of all numbers of its tensors that are not `good`."""
        return self.replace(*(t.where(good(t), 1.0) if t.is_floating_point() else t for t in self.tensors()))

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

    def _with_copies(self, changes: Callable[[nn.Module], bool], change: _Change, *, compiled: bool = True) -> Self:
        """The same object with copies of its modules as `_tree` makes them, if any part of these `changes`."""
        if not any(map(changes, modules_in(self))):
            return self
        copies: dict[int, nn.Module] = {}
        return self._mapped(lambda t: t if isinstance(t, Tensor) else _tree(t, change, copies, compiled=compiled))

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
    return torch.take_along_dim(tensor, along(index, tensor), index.ndim - 1)


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
    return tensor.scatter(index.ndim - 1, along(index, rows).expand_as(rows), rows)


# The base, with the properties of f that solvers use.

_P = TypeVar("_P", bound=Declared)


class Linearization(NamedTuple):
    """The Jacobian J = df/dz of a problem at one state, as three linear maps without graph.

    jvp: v -> J v; vjp: u -> J^T u; vjp_tensors: u -> (df/dt)^T u for each t of `problem.tensors()`
    (None for tensors that are not floating-point, and maybe for those that do not require grad where others do).
    outer: of a problem with a metric, v -> H v for the symmetric H in J = H M; else None.
    guess: (rhs, rtol, transpose) -> an answer of (I - J) x = rhs, or of (I - J^T) x = rhs, to start from, and the
    products that it took of every problem; None where nothing is known.
    """

    jvp: LinearMap
    vjp: LinearMap
    vjp_tensors: Callable[[Tensor], tuple[Tensor | None, ...]]
    outer: LinearMap | None = None
    guess: Callable[[Tensor, float | Tensor, bool], tuple[Tensor, Tensor]] | None = None


class Evaluation(NamedTuple):
    """f(z) and, where asked for, E(z) per problem."""

    mapped: Tensor
    energy: Tensor | None


#: What is derived from each of energy, gradient and map.
_DERIVED = (
    *("energy", "gradient", "fixed_point_map", "hessian_product", "evaluate", "linearize", "lipschitz", "select"),
    *("row_block", "plain_steps_descend", "has_metric", "divergence", "metric_product", "metric_root_product"),
    *("outer_product", "bottomless"),
)


class TokenOrder:
    """The order of causal tokens: each reads all tokens before it, or by a mask some, directly or through others.

    Args:
        pairs: boolean, broadcasts to (*lead, N, N): True = token i reads token j <= i. None is all before it.
    """

    def __init__(self, pairs: Tensor | None = None) -> None:
        #: Whether token i reads token j, directly or through others; None where all later tokens read a token.
        self._readers: Tensor | None = None
        if pairs is None:
            return
        count = pairs.shape[-1]
        reads = (pairs | torch.eye(count, dtype=torch.bool, device=pairs.device)).float()
        for _ in range(max(count - 1, 0).bit_length()):
            before, reads = reads, ((reads @ reads) > 0).float()
            if host_may_look(reads) and torch.equal(before, reads):
                break
        # A window, unlike documents, lets every token reach all later ones.
        if not (host_may_look(reads) and torch.equal(reads, torch.ones_like(reads).tril())):
            self._readers = reads

    def behind(self, tokens: Tensor) -> Tensor:
        """The `tokens`, boolean, (*lead, N), and those that read them."""
        if self._readers is None:
            return tokens.cumsum(-1) > 0
        return (self._readers @ tokens.to(self._readers.dtype)[..., None])[..., 0] > 0

    def restricted(self, index: Tensor) -> TokenOrder:
        """The order of the tokens `index`, (K,) or (*lead, K), which follow each other as before."""
        order = TokenOrder()
        if self._readers is not None:
            # One of the two has no leading axes, or both have the same.
            lead = index.shape[:-1] or self._readers.shape[:-2]
            readers, index = self._readers.expand(*lead, -1, -1), index.expand(*lead, -1)
            order._readers = pick(pick(readers, index).mT, index).mT
        return order


class Problem(Declared, general=True):
    """A fixed-point problem z = f(z).

    The last `event_ndim` axes of a state are one problem, all leading axes number independent problems. A subclass
    defines `fixed_point_map`; everything else has a default built on it with automatic differentiation. A subclass that
    overrides the energy of a problem in closed form has these defaults too. One that overrides its map or gradient
    defines the energy, too, or raises TypeError as it is made: of a map alone make a subclass of `Problem`.

    Not for a function at hand: use `FixedPointMap`, or `EnergyFunction` for an energy.

    Examples:
        >>> import torch
        >>> from implicit_attention import solve
        >>> from implicit_attention.problem import Problem
        >>> class Cosine(Problem):
        ...     event_ndim = 0
        ...     def fixed_point_map(self, z):
        ...         return z.cos()
        >>> [round(z, 3) for z in solve(Cosine(), torch.zeros(2)).value.tolist()]
        [0.739, 0.739]
    """

    _follows: ClassVar[dict[str, tuple[str, ...]]] = {
        **dict.fromkeys(("fixed_point_map", "energy", "gradient"), _DERIVED),
        "evaluate": ("linearize",),
        "hessian_product": ("linearize", "lipschitz"),
    }

    #: Number of trailing axes that form one problem.
    event_ndim: int
    #: Whether df/dz is symmetric (f - z is a negative gradient).
    symmetric: bool = False
    #: Whether there is an energy whose negative gradient is f(z) - z.
    has_energy: bool = False
    #: Whether f(z) - z is a negative gradient in a metric: grad E(z) = M(z) (z - f(z)) with M(z) symmetric and >= 0,
    #: and df/dz = H M with a symmetric H. Such a problem defines `divergence`, the products with M, M^(1/2) and H, and
    #: `Linearization.outer`.
    has_metric: bool = False
    #: Whether f(z) - z is a negative gradient only times a number > 0 that depends on z (mean shift, steps on a
    #: sphere): E then tells whether a step descends, but not how far it should.
    steps_rescaled: bool = False
    #: Rows are padded to multiples of this, so that a row's bits do not depend on how many others there are. Torch's
    #: kernels do not promise that; attention was measured to give a row the same bits for all multiples of 32.
    row_block: int = 32
    #: Whether E(f(z)) <= E(z) - divergence(z, f(z)) is guaranteed, |f(z) - z|^2/2 without a metric (with
    #: `steps_rescaled`: times a number > 0 that depends on z), so that plain steps need no test.
    plain_steps_descend: bool = False
    #: Whether f is known to compute each problem by itself. Otherwise one evaluation of all judges the answers of a
    #: solve where problems have left the work, and adjoints keep all together.
    separates: bool = True
    #: Whether f is known to read other problems: none has finished then before all have.
    mixes: bool = False
    #: The dtypes of its tensors in a solve, where half precision is float32: "one"; "any" that f converts; or "kept".
    dtypes: str = "one"
    #: Where the axis before the last numbers tokens that read no later ones: the loop then stops each on its own.
    token_order: TokenOrder | None = None

    @abstract
    def fixed_point_map(self, z: Tensor) -> Tensor:
        """f(z), differentiable to any order."""
        raise NotImplementedError(f"{type(self).__name__} must define fixed_point_map(z)")

    @abstract
    def energy(self, z: Tensor) -> Tensor:
        """E(z) per problem."""
        raise NotImplementedError(f"{type(self).__name__} has no energy; use an energy, or a solver that needs none")

    def evaluate(self, z: Tensor, *, energy: bool) -> Evaluation:
        """f(z) and, if asked for, E(z) in one go."""
        return Evaluation(self.fixed_point_map(z), self.energy(z) if energy else None)

    def linearize(self, z: Tensor) -> Linearization:
        """The Jacobian of f at z, for many products at one state."""

        def mapped(z: Tensor) -> Tensor:
            result = self.fixed_point_map(z)
            check_graph(self._name(), result, self.fixed_point_map, z)
            return result

        _, by_state = vjp(mapped, z)

        def transposed(u: Tensor) -> Tensor:
            result: Tensor = by_state(u)[0]
            return result

        def product(v: Tensor) -> Tensor:
            return transposed(v) if self.symmetric else jvp_by_vjp(self.fixed_point_map, (z,), (v,))

        return Linearization(product, transposed, lambda u: pullback(self, z, u))

    def retract(self, z: Tensor) -> Tensor:
        """The state of this problem's domain that stands for z, such as that on a sphere: where the loop evaluates f.

        The loop returns such states only. f, E and their derivatives at z are those at the state that stands for it.
        """
        return z

    def divergence(self, z: Tensor, mapped: Tensor) -> Tensor:
        """Return the decrease of E by the plain step from z to f(z) where it descends, (*lead): |f(z) - z|^2/2."""
        event = tuple(range(-self.event_ndim, 0))
        square = (mapped - z).square()
        return (square.sum(event) if event else square) / 2

    def metric_product(self, z: Tensor, v: Tensor) -> Tensor:
        """M(z) v with the metric M of the problem, the identity for most."""
        return v

    def metric_root_product(self, z: Tensor, v: Tensor) -> Tensor:
        """M(z)^(1/2) v, with the symmetric root."""
        return v

    def outer_product(self, z: Tensor, v: Tensor) -> Tensor:
        """H v, where df/dz = H M."""
        return self.linearize(z).jvp(v)

    def check_solver(self, solver: Any) -> None:
        """Raise if the problem cannot be solved by this solver."""
        if self.token_order is not None:
            fits = getattr(solver, "by_token", False)
            required = "stop every token of a causal layer on its own"
            _validate.require(fits, "solver", required, type(solver).__name__, "use Anderson(history=1) or Picard()")

    #: The remedy that makes f contract more where no number of the problem is known to.
    to_contract: str = ""

    def advice(self, remedies: Mapping[Status, str]) -> dict[Status, str]:
        """Return the remedies for this problem's failures by status, given those of the solver."""
        names = {name for part in self._within() for name in vars(part)}
        return advice(remedies, " or ".join(LEVERS[name] for name in LEVERS if name in names) or self.to_contract)

    def outside(self, z: Tensor) -> Tensor | None:
        """Which states (*lead) f leaves where they are without solving anything; None where that cannot happen."""
        return None

    def lipschitz(self) -> Tensor | None:
        """A Lipschitz constant of f, per batch entry (*batch) of states (*batch, N, D), or None if none is known.

        Over all states, with a metric over a convex set that holds f(z) for every z.
        """
        return None

    def bottomless(self, z: Tensor | None = None) -> Tensor | None:
        """Whether the energy certainly falls without end, per batch entry (*lead[:-1]); None if none is known to.

        Given states: whether it does, and curves downwards at z, (*lead), so that z is near no minimum.
        """
        return None

    def select(self, index: Tensor) -> Self | None:
        """The problems `index` (*lead[:-1], K) of the last leading axis, or None if that cannot be had."""
        return None

    #: The remedy for a map that turns out to be random.
    if_random: str = "call model.eval(), or hold the dropout for a whole solve as `Equilibrium` does"

    def cause(self, z: Tensor) -> str:
        """Return why the problem may have failed, with the remedy, once its best states z are known; maybe empty.

        f is random if two evaluations at one state differ by more than rounding.
        """
        if self.separates or transforms_active():
            return ""
        with torch.no_grad(), exact_precision(z):
            first, second = (self.apart().fixed_point_map(z.detach()) for _ in range(2))
        size = first.where(torch.isfinite(first), 0.0).norm()
        off = float((second - first).nan_to_num(0.0, 0.0, 0.0).norm() / size)
        if not off > torch.finfo(z.dtype).eps ** (2 / 3):
            return ""
        return (
            f"`{self._name()}` is random: two evaluations at one state differ by {off:.1e} of its size, so that no "
            f"state solves it; {self.if_random}"
        )

    def as_attention(self) -> Attention | None:
        """The tensors of attention whose equilibrium solves this problem, for kernels; None if it is another one.

        A subclass may return `Attention(query, keys, beta, anchor)` where f(z) is anchor x + (1 - anchor) times the
        softmax attention of z over the keys, and each query is a problem (`event_ndim` is 1). Its parts may be computed
        from learned tensors. `solve` then reads f and E from it, by a kernel or not; impl="reference" reads f itself.
        """
        return None

    def without(self, left_out: Tensor) -> Self:
        """The same problems; those that are `left_out` (*lead) read finite numbers in place of their own tensors."""
        return self

    def check_state(self, z: Tensor) -> None:
        """Raise if `z` cannot be a state of this problem."""
        _validate.check_float_tensor("initial", z, min_ndim=self.event_ndim)

    #: What f may read without declaring it, and how to declare it, in the words of an error.
    _undeclared: str = "a tensor"
    _to_declare: str = "hold it in an attribute (a tensor, a module, or a tuple, list or dict of them)"

    def check_undeclared(self, z: Tensor) -> None:
        """Raise if f reads a tensor whose gradient would silently be zero: undeclared, or of an earlier call."""
        if self.all_declared:
            return
        apart = self.apart()
        detached = apart.replace(*(t.detach() for t in apart.tensors()))
        declared = {name for name, _ in apart.named_tensors()}
        with torch.enable_grad():
            # A copy, as a map that works in place is reported later.
            result = detached.fixed_point_map(z.detach().clone())
        required, remedy = "not be kept while the problem is evaluated", "compute it at every call, or once in __init__"
        made = "a tensor made there, through which no gradient would reach what it is made of"
        for name, _ in detached.named_tensors():
            _validate.require(name in declared, name, required, made, remedy)
        hidden = is_batched(result) and not is_batched(z, *self.tensors())
        if result.requires_grad or has_tangent(result) or hidden:
            raise ValueError(
                f"`{self._name()}` reads {self._undeclared}, which requires grad but is not declared, so its gradient "
                f"would silently be zero; {self._to_declare}"
            )


class Tokens(Problem):
    """A problem with a `token_order`, each of whose tokens is a problem that reads those before it.

    A token has converged when its own residual is small at states of those before it that no longer change.
    """

    event_ndim = 1
    separates = False
    #: Which of them other rules have ended than that of their residual.
    exits: Any = None
    token_order: TokenOrder

    def __init__(self, inner: Problem) -> None:
        self.inner, self.mixes, self.token_order = inner, inner.mixes, cast(TokenOrder, inner.token_order)

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self.inner.fixed_point_map(z)

    def check_undeclared(self, z: Tensor) -> None:
        self.inner.check_undeclared(z)

    def settled_of(
        self, active: Tensor, converged: Tensor | None, broken: Tensor, point: Any
    ) -> tuple[Tensor | None, Tensor]:
        """The tokens (*lead) that have converged, and those that are given up, by the state of all that they read.

        point: the `Iteration`, for subclasses with rules of their own.
        """
        broken = active & self.behind(broken)
        if converged is None:
            return None, broken
        # A token that was given up is not active, nor is any token that reads it.
        return converged & ~self.behind(active & ~converged), broken

    def behind(self, tokens: Tensor) -> Tensor:
        """The `tokens` (*lead), and those that read them."""
        # In a problem with more axes a token may read all parts of the tokens before it.
        parts = tuple(range(1 - self.inner.event_ndim, -1))
        return self.token_order.behind(tokens.any(parts, keepdim=True) if parts else tokens)

    def course(self, trace: Trace | None) -> Trace | None:
        """The course of the whole problems, from that of all tokens."""
        if trace is None:
            return None
        start = 1 - self.inner.event_ndim
        residual, num_evals = norm(trace.residual.flatten(start)), trace.num_evals.flatten(start).amax(-1)
        return trace._replace(residual=residual, num_evals=num_evals)


def of_problems(record: Record, axes: int) -> Record:
    """The record of whole problems from that of their tokens, on the last `axes` axes.

    Its status is the first failure of a token, its residual and tolerance the length of all.
    """
    start = record.status.ndim - axes
    if record.status.shape[start:].numel() == 0:
        return record.map(lambda field: field.new_zeros(field.shape[:start]))
    first = (record.status != Status.CONVERGED).flatten(start).to(torch.int8).argmax(-1, keepdim=True)
    return Record(
        status=record.status.flatten(start).gather(-1, first)[..., 0],
        residual=norm(record.residual.flatten(start)),
        tolerance=norm(record.tolerance.flatten(start)),
        num_steps=record.num_steps.flatten(start).amax(-1),
        num_evals=record.num_evals.flatten(start).amax(-1),
    )


def check_start(problem: Problem, given: dict[str, Any], solver: Any, adjoint: Any) -> None:
    """Raise if parts that several processes share cannot start a solve with the arguments `given`, by name."""
    own = {name: value for name, value in vars(problem).items() if isinstance(value, Tensor | float | int)}
    for part in problem._within():
        if hasattr(part, "check_start"):
            part.check_start({**own, **given}, solver, adjoint)


def widened(problem: _P, *states: Tensor) -> tuple[_P, tuple[Tensor, ...]]:
    """The problem and states in the precision of the solver's state: float32 for float16 and bfloat16.

    In half precision a state would sit up to a percent away from the solution.
    """
    tensors = problem.tensors()
    wide = tuple(map(at_least_single, tensors))
    changed = any(a is not b for a, b in zip(tensors, wide, strict=True))
    return problem.replace(*wide) if changed else problem, tuple(map(at_least_single, states))


def evaluate_pure(problem: Problem, z: Tensor, *, energy: bool, call: int) -> Evaluation:
    """`problem.evaluate(z)`, or an error if the map changes z, with which f(z) - z would be wrong.

    The first calls, 0 and 1, get copies: the state may be a tensor of the user, or a result of the map itself.
    """
    if is_exporting():
        # A graph that is recorded has no memory to look at, and its operations do not work in place.
        return problem.evaluate(z, energy=energy)
    state = counted(z, copy=call < 2)
    writes = writes_to(state)
    evaluation = problem.evaluate(state, energy=energy)
    # Torch does not count writes of others (by numpy, through `.data`).
    visible = call == 0 and z.device.type == "cpu" and not transforms_active()
    if writes_to(state) != writes or (visible and not same(state, z)):
        refuse_writes(problem)
    return evaluation


def refuse_writes(problem: Problem) -> NoReturn:
    """Raise because the map of the problem changes its state."""
    required, received = "leave its state as it is", "a map that works on it in place"
    remedy = "start from z = z.clone(), or use operations that are not in place (nn.ReLU(), not inplace=True)"
    _validate.refuse(problem._name(), required, received, remedy)


def isolated(problem: Problem, z: Tensor, left_out: Tensor) -> tuple[Problem, Tensor]:
    """Problem and state with those `left_out` (*lead) reading nothing that is not finite.

    They add 0 to a gradient, and 0 * NaN would be NaN in all tensors that they share. Where a problem does not know
    which numbers belong to which row, numbers that are not finite become 1 if f of all other rows stays the same.
    """
    batched = is_batched(left_out, z, *problem.tensors())
    if not batched and z.device.type == "cpu" and not bool(left_out.any()):
        return problem, z
    rows = along(left_out, z)
    z, apart = z.masked_fill(rows, 0.0), problem.without(left_out)
    if problem.all_declared or batched or not bool(left_out.any()):
        return apart, z

    def others(problem: Problem) -> Tensor:
        with torch.no_grad():
            return problem.fixed_point_map(z.detach()).detach().masked_fill(rows, 0.0)

    expected = others(problem)
    # Others may read what looks like a row's own, as with a table of as many rows.
    problem = apart if same(others(apart), expected) else problem
    for found in map(problem._filled, (torch.isfinite, lambda t: ~torch.isnan(t))):
        if same(others(found), expected):
            return found, z
    return problem, z


def check_kept(problem: Problem, now: Tensor, before: Tensor) -> None:
    """Raise where a later call of a map overwrote an earlier result."""
    received, remedy = "a map that writes into what it returned before", "return buffer.clone()"
    _validate.require(same(now, before), problem._name(), "return new memory at every call", received, remedy)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are views of the same memory."""
    if is_functorch_wrapped_tensor(a) or is_functorch_wrapped_tensor(b) or a.numel() == 0:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def counted(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor, or a `copy`; always one of an inference tensor, to which torch counts no writes."""
    if not torch.compiler.is_compiling() and tensor.is_inference():
        with torch.inference_mode(False):
            return tensor.clone()
    return tensor.clone() if copy else tensor


def writes_to(tensor: Tensor) -> int:
    """Return the number of torch's writes to the memory of `tensor`."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return 0 if tensor.is_inference() else tensor._version


def pullback(
    problem: Problem, z: Tensor, cotangent: Tensor, needed: Sequence[bool] | None = None
) -> tuple[Tensor | None, ...]:
    """(df/dt)^T u at fixed z for every tensor t that is `needed`; differentiable when derivatives are recorded.

    `needed` is None for those that require grad, or for all if none does. The others may hold tensors that torch cannot
    differentiate, such as the running mean of a normalisation.
    """
    tensors = problem.tensors()
    if needed is None and any(t.requires_grad for t in tensors):
        needed = [t.requires_grad for t in tensors]
    where = [i for i, t in enumerate(tensors) if t.is_floating_point() and (needed is None or needed[i])]

    def unchecked(*floating: Tensor) -> Tensor:
        # Under nested transforms torch loses an input that an operation of the map saves as it is.
        new = {i: t.view_as(t) for i, t in zip(where, floating, strict=True)}
        return problem.replace(*(new.get(i, t) for i, t in enumerate(tensors))).fixed_point_map(z.view_as(z))

    def product(*floating: Tensor) -> Tensor:
        result = unchecked(*floating)
        check_graph(problem._name(), result, unchecked, *floating)
        return (result * cotangent).sum()

    if not where:
        return (None,) * len(tensors)
    # Not a vjp, of which torch loses the level where a tensor has no part in f.
    by_tensors = grad(product, argnums=tuple(range(len(where))))(*(tensors[i] for i in where))
    gradients = dict(zip(where, by_tensors, strict=True))
    return tuple(map(gradients.get, range(len(tensors))))


# Maps of users.


@dataclasses.dataclass(frozen=True, eq=False)
class _Input:
    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class PerSample(_Input):
    """An input of a map of which every problem has its own part: its leading axes are those of the state.

    With such an input the problem can be restricted: finished problems leave the work, and a NaN in the part of one
    reaches no other.

    Args:
        value: a tensor (*lead, ...) for states (*lead, *event), or a tuple, list or dict of such tensors.

    Not for weights and other tensors that all problems read: wrap those in `Shared`, or pass them as they are.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, PerSample, solve
        >>> x, weight = torch.tensor([[0.1], [0.2], [0.3]]), torch.tensor([[0.5]], requires_grad=True)
        >>> f = lambda z, x, weight: torch.tanh(z @ weight + x)
        >>> solution = solve(FixedPointMap(f, PerSample(x), weight, event_ndim=1), torch.zeros(3, 1))
        >>> solution.converged.tolist()
        [True, True, True]
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Shared(_Input):
    """An input of a map that all problems read, whatever its shape.

    A map of which every tensor is wrapped can be restricted to some of its problems; see `PerSample`.

    Args:
        value: a tensor, or a tuple, list or dict of tensors.

    Not for tensors of which every problem has its own part: those are `PerSample`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, Shared, solve
        >>> problem = FixedPointMap(lambda z, b: z.cos() / 2 + b, Shared(torch.tensor([0.5])), event_ndim=1)
        >>> solve(problem, torch.zeros(3, 1)).converged.tolist()
        [True, True, True]
    """


class UserProblem(Problem):
    """A problem of a user's function(z, *inputs) or module; its tensors are those of `inputs` and of the module."""

    separates, dtypes = False, "any"

    def __init__(
        self, function: Callable[..., Tensor] | nn.Module, *inputs: Any, event_ndim: int | None = None
    ) -> None:
        if event_ndim is None:
            required = "say how many trailing axes of z form one problem"
            remedy = "1: every row is its own problem; 2: the rows of a sample are coupled"
            _validate.refuse("event_ndim", required, f"nothing in {type(self).__name__}(...)", remedy, TypeError)
        _validate.check_callable("function", function, "pass f(z, *tensors)")
        event_ndim = _validate.check_integer("event_ndim", event_ndim, low=0)
        for i, given in enumerate(inputs):
            if isinstance(given, _Input):
                required = f"be a tensor, or a tuple, list or dict of tensors, inside {type(given).__name__}"
                kinds, remedy = (Tensor, tuple, list, dict), "pass other objects as they are"
                _validate.check_instance(f"inputs[{i}]", given.value, kinds, required, remedy)
        self.function = function
        self.inputs = tuple(given.value if isinstance(given, _Input) else given for given in inputs)
        self.event_ndim = event_ndim
        self._own = tuple(isinstance(given, PerSample) for given in inputs)
        wrapped = [isinstance(given, _Input) for given in inputs]
        # Modules have no tensors of single problems.
        known = (w or isinstance(i, nn.Module) or not any(named(i, "")) for i, w in zip(inputs, wrapped, strict=True))
        self._restrictable = any(self._own) or (any(wrapped) and all(known))

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        """Whether a batch normalisation takes its statistics from the batch."""
        return takes_statistics(modules_in(self))

    def check_state(self, z: Tensor) -> None:
        super().check_state(z)
        lead = z.shape[: z.ndim - self.event_ndim]
        for i, (value, own) in enumerate(zip(self.inputs, self._own, strict=True)):
            for name, tensor in named(value, f"inputs[{i}]") if own else ():
                required = f"have the leading axes {tuple(lead)} of the states, as it is PerSample"
                fits, remedy = tensor.shape[: len(lead)] == lead, "expand it, or wrap what all problems read in Shared"
                _validate.require(fits, name, required, f"shape {tuple(tensor.shape)}", remedy)

    @property
    def _undeclared(self) -> str:  # type: ignore[override]
        return closed_over(self.function)

    @property
    def _to_declare(self) -> str:  # type: ignore[override]
        return f"pass it as an argument: {type(self).__name__}(f, tensor, event_ndim=...) with f(z, tensor)"

    def _restricted(self, index: Tensor) -> Self | None:
        """The problems `index`, for the `select` of subclasses, each of which says what f is."""
        return self._with_own(lambda t: counted(picked(t, index, index.ndim - 1))) if self._restrictable else None

    def without(self, left_out: Tensor) -> Self:
        def filled(tensor: Tensor) -> Tensor:
            return tensor.masked_fill(along(left_out, tensor), 1.0) if tensor.is_floating_point() else tensor

        return self._with_own(filled)

    def _with_own(self, change: Callable[[Tensor], Tensor]) -> Self:
        clone, pairs = copy.copy(self), zip(self.inputs, self._own, strict=True)
        clone.inputs = tuple(changed(value, change) if own else value for value, own in pairs)
        return clone

    def apart(self) -> Self:
        clone = copy.copy(super().apart())
        clone.function = _original(clone.function)
        return clone

    def _called(self, z: Tensor) -> Any:
        # Transforms refuse modules that write to their buffers, and spoil compiled ones.
        problem = self.apart() if transforms_active() else self
        try:
            return problem.function(z, *problem.inputs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                refuse_writes(self)
            self.refuse_dtypes(error, z)
            # Torch speaks of sizes that the caller never wrote.
            if type(error) is not RuntimeError or _validate.OF_SHAPES.search(str(error)) is None:
                raise
            required = f"have a shape that `{self._name()}` takes"
            received = f"states of shape {tuple(z.shape)}, for which it raised: {error}"
            axes = f"of which the last {self.event_ndim} axes form one problem"
            remedy = f"start from a tensor of the shape that it returns, {axes}"
            raise ValueError(_validate.message("initial", required, received, remedy)) from error

    def refuse_dtypes(self, error: Exception, z: Tensor) -> None:
        """Raise for dtypes that do not fit each other, if torch's error is about those, with their names."""
        if isinstance(error, RuntimeError) and _validate.OF_DTYPES.search(str(error)):
            _validate.check_same_kind([*self.named_tensors(), ("initial", z)])
            if z.dtype not in HALF:
                told = f"take states of {z.dtype}", f"one that raised: {error}"
                remedy = "convert what it reads with .to(z.dtype)"
                raise ValueError(_validate.message(self._name(), *told, remedy)) from error

    def _check_output(self, result: Any, z: Tensor, shape: torch.Size, meaning: str, remedy: str = "") -> Tensor:
        name = self._name()
        if not isinstance(result, Tensor):
            received, remedy = type(result).__name__, remedy or _validate.joined(result)
            _validate.refuse(name, f"return a tensor of shape {meaning}", received, remedy, TypeError)
        if result.shape != shape:
            required, received = f"return shape {meaning} = {tuple(shape)}", f"shape {tuple(result.shape)}"
            _validate.refuse(name, required, received, remedy)
        for what in ("dtype", "device"):
            got, expected = getattr(result, what), getattr(z, what)
            if got != expected:
                required, remedy = f"return the {what} of z ({expected})", f"convert its result with .to(z.{what})"
                _validate.refuse(name, required, got, remedy)
        return result

    def _name(self) -> str:
        function = getattr(self.function, "_orig_mod", self.function)
        return getattr(function, "__name__", type(function).__name__)


def takes_statistics(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these is a batch normalisation that takes its statistics from the batch."""
    norms = (part for part in modules if isinstance(part, _BatchNorm))
    return any(norm.training or norm.running_mean is None for norm in norms)


def closed_over(function: Any) -> str:
    """Names of the tensors that need grad in a function's closure, globals or bound object."""
    function, names = _original(function), []
    for part in function.modules() if isinstance(function, nn.Module) else (function,):
        for name, value in _scope(part):
            for _, leaf in walk(value):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    names.append(f"`{name}`")
                elif isinstance(leaf, nn.Module) and any(p.requires_grad for p in leaf.parameters()):
                    names.append(f"the parameters of `{name}`")
    return " and ".join(dict.fromkeys(names)) or "a tensor"


def _original(function: Any) -> Any:
    """The function inside what torch.compile made of it; any other one as it is."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _scope(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function reads by name (closure, globals, bound object), or a module by other names."""
    # Methods of potentials are wrapped by decorators.
    code_of = inspect.unwrap(type(function).forward if isinstance(function, nn.Module) else function)
    if (code := getattr(code_of, "__code__", None)) is not None:
        cells, read = zip(code.co_freevars, code_of.__closure__ or (), strict=False), code_of.__globals__
        yield from ((name, cell.cell_contents) for name, cell in cells)
        yield from ((name, read[name]) for name in code.co_names if name in read)
    bound = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    for name, value in getattr(bound, "__dict__", {}).items():
        if bound is not function or name[:1] != "_":
            yield f"self.{name}", value


class FixedPointMap(UserProblem):
    """The problem z = f(z, *tensors) for any map, gradient of an energy or not.

    Args:
        function: f(z, *tensors) -> tensor of z's shape and dtype, acting on each problem (the last `event_ndim` axes)
            separately; or an nn.Module, whose parameters are then declared. It leaves z as it is and returns new memory
            at every call: a map that works in place or reuses a buffer raises ValueError.
        *inputs: every tensor that f reads and whose gradient may be wanted; f receives `PerSample(t)` and `Shared(t)`
            as the plain tensor t, and converts what has another dtype than z (float32 for half precision).
        event_ndim: number of trailing axes of z that form one problem.
        symmetric: promise that df/dz is symmetric, so that the adjoint may use conjugate gradients.

    With an input that is `PerSample`, or with all inputs wrapped, problems leave the work as they finish: f is then
    called with fewer problems than the initial state has, and inputs that are not wrapped are shared. The last bits of
    a value may depend on how many others are left, as those of torch's kernels do; nothing else does. After some have
    left, one call on all, which `num_evals` leaves out, measures the residuals that are reported: problems above their
    tolerance go on, all together where the map mixes them (sums over graphs). None leaves a batch normalisation in
    training, or a map that raises for fewer problems. Where a map mixes problems they are one problem: make the axis
    that numbers them a part of the event.

    Gradients: with respect to every declared tensor, first and second order. A tensor that requires grad and is read
    without being declared raises ValueError in `solve`.

    Not for attention over keys, which has a closed form and fused operations: use `AnchoredEnergy`. Not for an energy
    whose gradient autograd takes: use `EnergyFunction`.

    Examples:
        >>> import torch
        >>> from implicit_attention import FixedPointMap, solve
        >>> shift = torch.tensor([0.1, 0.2], requires_grad=True)
        >>> problem = FixedPointMap(lambda z, shift: 0.5 * z.cos() + shift, shift, event_ndim=1)
        >>> solution = solve(problem, torch.zeros(3, 2))
        >>> solution.converged.all().item(), solution.value.requires_grad
        (True, True)
    """

    def __init__(
        self,
        function: Callable[..., Tensor] | nn.Module,
        *inputs: Any,
        event_ndim: int | None = None,
        symmetric: bool = False,
    ) -> None:
        super().__init__(function, *inputs, event_ndim=event_ndim)
        self.symmetric = symmetric

    # A row may be a whole sample, so that padding would be expensive.
    row_block = 1
    select = UserProblem._restricted

    def fixed_point_map(self, z: Tensor) -> Tensor:
        return self._check_output(self._called(z), z, z.shape, "of z")

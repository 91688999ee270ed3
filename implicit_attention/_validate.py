"""Checks of arguments. Every message names the argument, the requirement, the value received and the remedy."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from ._torch import host_may_look, is_fake

_Number = TypeVar("_Number", bound=float | Tensor)
#: The largest index of a query among the keys: 64 bits leave room for those after it.
LARGEST_OFFSET = 2**62
#: What torch says of tensors that do not fit each other, or are no single number.
OF_SHAPES = re.compile(
    r"sizes? of|size mismatch|tensor size|shapes? (cannot|'|\[|of)|broadcast|expected size|elements? (cannot|tensors)|"
    r"more than one value",
    re.IGNORECASE,
)
#: What torch and we say of dtypes that do not.
OF_DTYPES = re.compile(r"(same|the|expected|Found) dtype|\.dtype|dtypes match|scalar type (of|\w+ but)|Input type \(")


def require(
    condition: bool,
    argument: str,
    requirement: str,
    received: object,
    remedy: str = "",
    kind: type[Exception] = ValueError,
) -> None:
    """Refuse the argument unless the condition holds."""
    if not condition:
        refuse(argument, requirement, received, remedy, kind)


def refuse(
    argument: str, requirement: str, received: object, remedy: str = "", kind: type[Exception] = ValueError
) -> NoReturn:
    """Raise "`argument` must requirement, got received; remedy".

    For texts that take time, or fix sizes that torch.compile keeps open: `require` is given its text in any case.
    """
    raise kind(message(argument, requirement, received, remedy))


def message(argument: str, requirement: str, received: object, remedy: str = "") -> str:
    return f"`{argument}` must {requirement}, got {received}" + (f"; {remedy}" if remedy else "")


def check_instance(
    argument: str, value: object, kind: type | tuple[type, ...], requirement: str = "", remedy: str = ""
) -> None:
    """Raise TypeError unless `value` is an instance of `kind`; a class in its place is to be called."""
    if isinstance(value, kind):
        return
    kinds = kind if isinstance(kind, tuple) else (kind,)
    received = repr(value) if isinstance(value, str) else type(value).__name__
    if isinstance(value, str) and (meant := _called(value, kinds)) is not None:
        package, name = meant.__module__.rpartition(".")[0], meant.__name__
        given = f"{name}({'...' if _needs_arguments(meant) else ''})"
        remedy = f"pass {given}, after `from {package} import {name}`"
    if isinstance(value, type):
        received = f"the class {value.__name__}"
        if issubclass(value, kind):
            remedy = f"pass an instance: {value.__name__}({'...' if _needs_arguments(value) else ''})"
    refuse(argument, requirement or f"be a {kinds[0].__name__}", received, remedy, TypeError)


def _called(name: str, kinds: Iterable[type]) -> type | None:
    """The class with this name, in upper or lower case, among `kinds` and their subclasses, or None."""
    wanted = name.replace("_", "").replace("-", "").casefold()
    for kind in kinds:
        match = kind if kind.__name__.casefold() == wanted else _called(name, kind.__subclasses__())
        if match is not None:
            return match
    return None


def _needs_arguments(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a class that is not written in Python
        return True
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return any(p.default is p.empty for p in named)


def check_callable(argument: str, value: object, remedy: str) -> None:
    require(callable(value), argument, "be callable", type(value).__name__, remedy, TypeError)


def check_float_tensor(argument: str, value: Any, *, min_ndim: int = 0) -> None:
    """A dense tensor of at least 16 bits with at least `min_ndim` axes."""
    if not isinstance(value, Tensor):
        remedy = joined(value) or "convert it with torch.as_tensor"
        refuse(argument, "be a torch.Tensor", type(value).__name__, remedy, TypeError)
    check_dense(argument, value)
    if not value.is_floating_point():
        remedy = f"convert it with {argument}.float()"
        refuse(argument, "have a floating-point dtype", value.dtype, remedy, TypeError)
    if value.dtype.itemsize < 2:
        refuse(argument, "have at least 16 bits", value.dtype, f"convert it with {argument}.bfloat16()", TypeError)
    if value.ndim < min_ndim:
        refuse(argument, f"have at least {min_ndim} axes", f"shape {tuple(value.shape)}")
    check_local(argument, value)


def joined(value: Any) -> str:
    """Return the remedy for several tensors where one is required; empty for other objects."""
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, tuple | list | dict) or not any(isinstance(part, Tensor | tuple | dict) for part in parts):
        return ""
    return "join its tensors with torch.cat, or use `Equilibrium`, which takes tuples and dicts as state"


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor, by an attribute of it: the class would have to be imported."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def check_local(argument: str, value: Tensor) -> None:
    """A tensor of this process alone: a solve does not communicate."""
    if is_distributed(value):
        remedy = (
            "pass .to_local() where it is sharded over samples or heads, .full_tensor() where it is over tokens; "
            "heads of ImplicitAttention are sharded by parallelize_module(layer, mesh, layer.parallel_plan())"
        )
        received = f"a DTensor of shape {tuple(value.shape)}"
        refuse(argument, "be a tensor of this process", received, remedy, TypeError)


def check_dense(argument: str, value: Tensor) -> None:
    """One tensor whose entries all lie in memory."""
    if value.is_nested:
        remedy = "pad it with torch.nested.to_padded_tensor(tensor, 0.0), and mask what is added"
        refuse(argument, "be one dense tensor", "a nested one", remedy, TypeError)
    if value.layout != torch.strided:
        refuse(argument, "be dense", value.layout, f"convert it with {argument}.to_dense()", TypeError)


def check_boolean(argument: str, value: Any, requirement: str, remedy: str = "", *, or_float: bool = False) -> None:
    """A boolean tensor, or a floating-point one where that may be, too."""
    if not isinstance(value, Tensor) or not (value.dtype == torch.bool or (or_float and value.is_floating_point())):
        refuse(argument, requirement, getattr(value, "dtype", type(value).__name__), remedy, TypeError)


def check_tensors(named: list[tuple[str, Any]], *, min_ndim: int) -> None:
    """Dense floating-point tensors of one device and dtype."""
    for name, value in named:
        check_float_tensor(name, value, min_ndim=min_ndim)
    check_same_kind(named)


def check_same_kind(tensors: Iterable[tuple[str, Tensor]], *, dtypes: bool = True) -> None:
    """All tensors on one device; all floating-point ones of one dtype, unless they may have several `dtypes`."""
    named = list(tensors)
    floating = [(name, tensor) for name, tensor in named if dtypes and tensor.is_floating_point()]
    for what, group, verb in (("device", named, "move"), ("dtype", floating, "convert")):
        for name, tensor in group[1:]:
            first_name, first = group[0]
            if (kind := getattr(tensor, what)) != (wanted := getattr(first, what)):
                refuse(name, f"have the {what} of `{first_name}` ({wanted})", kind, f"{verb} it with .to({what})")


def check_broadcast(argument: str, shape: torch.Size | tuple[int, ...], target: tuple[int, ...], meaning: str) -> None:
    """`shape` broadcasts to `target` without enlarging it."""
    fits = len(shape) <= len(target) and all(
        s in (1, t) for s, t in zip(reversed(shape), reversed(target), strict=False)
    )
    if not fits:
        refuse(argument, f"broadcast to {meaning} = {tuple(target)}", f"shape {tuple(shape)}")


def plain(value: Any) -> Any:
    """A number of numpy or another library as a Python number, which tensors require."""
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        return value.item()
    if isinstance(value, int | float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


class Limits(TypedDict, total=False):
    """Numbers in [low, high], or in (low, high] with `open_low`; without limits all of them."""

    low: float
    high: float
    open_low: bool


def check_number(argument: str, value: Any, *, remedy: str = "", **limits: Unpack[Limits]) -> Any:
    """A finite real number within limits, returned as Python's own."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(argument, "be a number", repr(value), remedy, TypeError)
    finite = torch.compiler.is_compiling() or math.isfinite(value)
    if not (_within(value, **limits) and finite):
        refuse(argument, f"be {_bounds(**limits)}", value, remedy)
    return value


def _within(value: Any, low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> Any:
    return (value > low if open_low else value >= low) & (value <= high)


def _bounds(low: float = -math.inf, high: float = math.inf, open_low: bool = False) -> str:
    if math.isinf(high):
        return f"{'>' if open_low else '>='} {low:g}"
    return f"in {'(' if open_low else '['}{low:g}, {high:g}]"


def check_part(argument: str, value: Any, *, open_low: bool = False, remedy: str = "") -> Any:
    """A number in [0, 1), or in (0, 1), returned as Python's own."""
    value = check_number(argument, value, low=0.0, high=1.0, open_low=open_low)
    require(value < 1, argument, "be < 1", value, remedy)
    return value


def check_integer(argument: str, value: Any, *, low: int, remedy: str = "") -> Any:
    """An integer >= low, returned as Python's own."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(argument, "be an integer", repr(value), remedy, TypeError)
    if value < low:
        refuse(argument, f"be >= {low}", value, remedy)
    return value


def check_offset(argument: str, value: Any, *, causal: bool = True, remedy: str = "") -> int:
    """The index of the first query among the keys; those of all queries can be added to it without overflow."""
    if type(value) is int and value == 0:
        return 0
    offset: int = check_integer(argument, value, low=0)
    smaller = "pass min(offset, number of keys), beyond which every query attends to every key"
    require(offset <= LARGEST_OFFSET, argument, f"be <= {LARGEST_OFFSET}", offset, smaller)
    require(causal or offset == 0, argument, "come with is_causal=True", offset, remedy)
    return offset


def check_flag(argument: str, value: Any) -> None:
    require(isinstance(value, bool), argument, "be True or False", repr(value), kind=TypeError)


def check_choice(argument: str, value: Any, choices: Iterable[Any], remedy: str = "") -> None:
    listed = list(choices)
    require(value in listed, argument, f"be one of {', '.join(map(repr, listed))}", repr(value), remedy)


def check_together(argument: str, shape: torch.Size, other: torch.Size, meaning: str) -> None:
    """`shape` and `other` broadcast with each other."""
    if not all(s == t or 1 in (s, t) for s, t in zip(reversed(shape), reversed(other), strict=False)):
        refuse(argument, f"broadcast with {meaning} = {tuple(other)}", f"shape {tuple(shape)}")


def inside(value: _Number, **limits: Unpack[Limits]) -> _Number:
    """A tensor with NaN where it lies outside of limits, so that the problems that read it report it.

    For numbers that the host cannot read without waiting, and for parameters that change after they were checked. A
    Python number, which was checked before, is returned as it is.
    """
    if not isinstance(value, Tensor):
        return value
    return torch.where(_within(value, **limits), value, torch.nan)  # type: ignore[return-value]


def keeps_digits(dtype: torch.dtype, anchor: float | Tensor) -> bool:
    """Whether an anchor that is rounded to `dtype`, as the operations read it, leaves 1 - anchor four digits."""
    if isinstance(anchor, Tensor) or dtype == torch.float64 or anchor == 1:
        return True
    return 1 - anchor >= 1e4 * torch.finfo(torch.float32).eps


def check_numbers(argument: str, tensor: Tensor, remedy: str = "") -> None:
    """Raise for a tensor that has a shape but no numbers."""
    if is_fake(tensor):
        received = "a tensor on the device meta" if tensor.device.type == "meta" else "a FakeTensor"
        refuse(argument, "hold numbers", received, remedy)


def check_per_batch(
    argument: str,
    value: Any,
    *,
    remedy: str = "",
    of: tuple[str, Tensor] | None = None,
    **limits: Unpack[Limits],
) -> Any:
    """A number, or a tensor with one number per batch entry, within limits; returned, a number as Python's own.

    Tensors are looked at where the host need not wait; NaN is bad data, not a bad argument. They broadcast to the
    leading axes of the tensor `of`, (*batch, N, D), which is given with its name.
    """
    if not isinstance(value, Tensor):
        return check_number(argument, value, **limits)
    check_float_tensor(argument, value)
    if of is not None:
        check_broadcast(argument, value.shape, of[1].shape[:-2], f"the leading axes of `{of[0]}`")
    if host_may_look(value) and not bool((fits := _within(value, **limits) | value.isnan()).all()):
        worst = value.detach()[~fits].flatten()[0].item()
        refuse(argument, f"be {_bounds(**limits)} everywhere", worst, remedy)
    return value


def check_fits_batch(argument: str, value: float | Tensor, name: str, states: Tensor) -> None:
    """Numbers that passed `check_per_batch` fit the batch axes of `states` (*batch, N, D), which are called `name`."""
    if isinstance(value, Tensor):
        check_same_kind([(name, states), (argument, value)])
        check_broadcast(argument, value.shape, states.shape[:-2], f"the leading axes of `{name}`")


# Options, whose fields declare their checks.

#: The key of a check among the metadata of a field, which may hold what users put there.
_CHECK = object()


def option(check: Callable[..., Any], default: Any, *limits: Any, **named: Any) -> Any:
    """A field of `Options` with this default, and check(its name, its value, *limits, **named); None if that is it.

    Limits are integers or constants in a function, as torch.compile may keep open a float that it finds elsewhere.
    """
    optional = default is None

    def checked(name: str, value: Any) -> None:
        if value is not None or not optional:
            check(name, value, *limits, **named)

    return dataclasses.field(default=default, metadata={_CHECK: checked})


number = functools.partial(option, check_number)
integer = functools.partial(option, check_integer)
part = functools.partial(option, check_part)
choice = functools.partial(option, check_choice)
instance = functools.partial(option, check_instance)


class Options:
    """Base of frozen dataclasses whose fields declare their checks, as `rtol: float = number(1e-4, low=0)`.

    Numbers are stored as Python's own. A field whose default is None may be None. One that a subclass declares anew,
    with another default, keeps its check.
    """

    #: The check of each field that has one.
    _checks: ClassVar[dict[str, Callable[[str, Any], None]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The decorator, which comes later, leaves defaults in the place of the fields.
        fields = {name: field for name, field in vars(cls).items() if isinstance(field, dataclasses.Field)}
        declared = {name: field.metadata[_CHECK] for name, field in fields.items() if _CHECK in field.metadata}
        inherited = [vars(base).get("_checks", {}) for base in reversed(cls.__mro__[1:])]
        cls._checks = functools.reduce(operator.or_, (*inherited, declared))

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            for field in dataclasses.fields(self):  # type: ignore[arg-type]
                if (own := plain(given := getattr(self, field.name))) is not given:
                    object.__setattr__(self, field.name, own)
        for name, check in self._checks.items():
            check(name, getattr(self, name))

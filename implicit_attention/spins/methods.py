"""The table of the methods, from which the command `magnetize`, the guide, the tests and error messages take them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..potentials import AmosResponse, GaussianUnits


class Row(NamedTuple):
    """A method with its options.

    Attributes:
        place: `file:class`, the file in this folder.
        name: the command's name of it; None where the command does not have it.
        error: the error of log Z as the guide states it; None where the guide leaves the row out.
        options: arguments of the class.
        compared: whether the guide measures its distance from the truth.
        vectors: whether the command has it for D > 1 only.
        driven: whether the command also has it for fields that change.
    """

    place: str
    name: str | None
    error: str | None
    options: Mapping[str, Any] = MappingProxyType({})
    compared: bool = False
    vectors: bool = False
    driven: bool = False

    @property
    def kind(self) -> Any:
        """The class, a subclass of `Approximation`."""
        return pkgutil.resolve_name(f"{__package__}.{self.place}")

    @property
    def method(self) -> Any:
        """The method itself."""
        return self.kind(**self.options)

    @property
    def text(self) -> str:
        """The call that makes the method, such as `TAP(order=3)`."""
        return f"{self.kind.__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


#: The methods, in the order of all tables. To add one: its file in this folder, and its line here.
METHODS = (
    Row("mean_field:MeanField", "mean-field", "(beta J)^2", compared=True),
    Row("mean_field:MeanField", "mean-field-amos", None, {"response": AmosResponse()}, vectors=True),
    Row("tap:TAP", "tap-2", "(beta J)^3", compared=True),
    Row("tap:TAP", "tap-3", "(beta J)^4", {"order": 3}, compared=True),
    Row("saddle_point:SaddlePoint", "saddle-point", "1/D of log Z/D", compared=True),
    Row("saddle_point:SaddlePoint", "one-loop", "1/D^2 of log Z/D", {"one_loop": True}, compared=True),
    Row("saddle_point:SaddlePoint", "spherical", "the spherical model", {"shared": True}),
    Row("adaptive_tap:AdaTAP", "adatap", "small for many weak couplings; not on lattices", compared=True),
    Row("adaptive_tap:AdaTAP", None, "exact for Gaussian spins", {"prior": GaussianUnits()}),
    Row("bethe:Bethe", "bethe", "exact on trees", compared=True),
    Row("enumeration:Enumeration", "enumeration", "exact, N <= 20"),
    Row("transfer_matrix:TransferMatrix", "transfer-matrix", "exact on chains, collinear fields"),
    Row("kinetic_plefka:KineticPlefka", "plefka-1", "dynamics, (beta J)^2", driven=True),
    Row("kinetic_plefka:KineticPlefka", "plefka-2", "dynamics, (beta J)^3", {"order": 2}),
    Row("gaussian_closure:GaussianClosure", "gaussian-field", "dynamics", driven=True),
)


def listed(wanted: Callable[[Any], bool], suffix: str = "") -> str:
    """The names of the wanted classes as an error message lists them, such as "AdaTAP, Bethe or TAP"."""
    *others, last = sorted({f"{row.kind.__name__}{suffix}" for row in METHODS if wanted(row.kind)})
    return f"{', '.join(others)} or {last}" if others else last

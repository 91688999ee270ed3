"""What mkdocstrings shows of a field that declares its check, such as `number(1e-4, low=0.0)`: its default alone."""

from typing import Any

from griffe import Attribute, ExprCall, Extension


class Defaults(Extension):
    """Runs before griffe makes signatures of the fields of dataclasses."""

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, ExprCall) and value.canonical_path.startswith("implicit_attention._validate."):
            # `option` takes the check first.
            attr.value = value.arguments[value.canonical_path.endswith(".option")]

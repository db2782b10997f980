"""What a config file may hold, with every component that is installed here, as JSON Schema."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import attrs

from arb_ternary.config.fields import config_fields, default_of, is_required, shape_of
from arb_ternary.config.options import HELP, Rule
from arb_ternary.config.structure import GIVEN, options_class
from arb_ternary.errors import ArbError
from arb_ternary.specs import PhaseSpec, PolicySpec
from arb_ternary_train.short_forms import has_policy

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

_SCALARS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    NoneType: "null",
}
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}
_GIVEN = "in a resolved config: the options that the user wrote"


def json_schema(cls: type[Any], registry: Registry) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of files whose top level is ``cls``.

    A component whose options cannot be imported is there with its name, and with any options.
    """
    builder = _Builder(registry)
    top = builder.mapping(cls)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ARB Ternary: {cls.__name__}",
    }
    return {**head, **top, "$defs": dict(sorted(builder.definitions.items()))}


class _Builder:
    """Makes schemas of types; classes and components become definitions, so that they may refer to
    each other.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.definitions: dict[str, Any] = {}

    def mapping(self, cls: type[Any]) -> dict[str, Any]:
        fields = config_fields(cls)
        return {
            "type": "object",
            **({"description": cls.__doc__.strip().splitlines()[0]} if cls.__doc__ else {}),
            "properties": {field.alias: self.option(field) for field in fields},
            "required": [field.alias for field in fields if is_required(field)],
            "additionalProperties": False,
        }

    def option(self, field: attrs.Attribute[Any]) -> dict[str, Any]:
        rules = _rules(field.validator)
        text = field.metadata.get(HELP)
        default = default_of(field)
        return {
            **self.type(field.type),
            **({"allOf": rules} if rules else {}),
            **({"description": text} if text else {}),
            **({} if default is attrs.NOTHING else {"default": default}),
        }

    def type(self, t: Any) -> dict[str, Any]:
        arguments = get_args(t)
        match shape_of(t):
            case "literal":
                return {"enum": list(arguments)}
            case "union":
                return {"anyOf": [self.type(arm) for arm in arguments]}
            case "list" if len(arguments) > 1 and arguments[-1] is not Ellipsis:
                items = [self.type(argument) for argument in arguments]
                return {
                    "type": "array",
                    "prefixItems": items,
                    "minItems": len(items),
                    "items": False,
                }
            case "list":
                return {"type": "array", "items": self.type(arguments[0] if arguments else Any)}
            case "mapping":
                key, value = arguments or (str, Any)
                names = {"propertyNames": {"pattern": r"^-?\d+$"}} if key is int else {}
                return {"type": "object", **names, "additionalProperties": self.type(value)}
            case "choice":
                return self.refer(t.kind, lambda: self.kind(t.kind))
            case "class":
                return self.refer(f"{t.__module__}.{t.__qualname__}", lambda: self.mapping(t))
        return {"type": _SCALARS[t]} if t in _SCALARS else {}

    def kind(self, kind: str) -> dict[str, Any]:
        """A component of a kind: by its name alone where it needs no options, or as a mapping."""
        names = self.registry.names(kind)
        forms = [
            self.refer(f"{kind}.{name}", functools.partial(self.component, kind, name))
            for name in names
        ]
        bare = [
            name for name in names if self.definitions[f"{kind}.{name}"]["required"] == ["name"]
        ]
        return {"anyOf": [{"enum": bare}, *forms]}

    def component(self, kind: str, name: str) -> dict[str, Any]:
        spec = self.registry.get(kind, name).spec
        named = {"name": {"const": name}}
        try:
            cls = options_class(spec)
        except ArbError as error:
            return {
                "type": "object",
                "description": error.what,
                "properties": named,
                "required": ["name"],
            }
        options: dict[str, Any] = (
            {"properties": {}, "required": []} if cls is None else self.mapping(cls)
        )
        given = {
            "description": _GIVEN,
            "type": "array",
            "items": {"enum": list(options["properties"])},
        }
        short = self.policies() if kind == PhaseSpec.kind and has_policy(spec) else {}
        return {
            "type": "object",
            "description": spec.summary,
            "properties": {
                **named,
                **({} if cls is None else {GIVEN: given}),
                **short,
                **options["properties"],
            },
            "required": ["name", *options["required"]],
            "additionalProperties": False,
        }

    def policies(self) -> dict[str, Any]:
        """The short forms of a phase's policy; see ``arb_ternary_train.short_forms``."""
        return {
            name: {"anyOf": [{"type": "null"}, self.short(name)]}
            for name in self.registry.names(PolicySpec.kind)
        }

    def short(self, policy: str) -> dict[str, Any]:
        """The options of a policy, without its name."""
        whole = self.component(PolicySpec.kind, policy)
        properties = {
            key: value for key, value in whole["properties"].items() if key not in ("name", GIVEN)
        }
        return {
            **whole,
            "properties": properties,
            "required": [key for key in whole["required"] if key != "name"],
        }

    def refer(self, name: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.definitions:
            # Taken before it is built: a component may hold components of its own kind.
            self.definitions[name] = {"required": []}
            self.definitions[name] = build()
        return {"$ref": f"#/$defs/{name}"}


def _rules(validator: Any) -> list[dict[str, Any]]:
    """What a validator says in JSON Schema; nothing for one that only Python can express."""
    if isinstance(validator, Rule):
        return [dict(validator.schema)]
    if hasattr(validator, "_validators"):
        return [rule for part in validator._validators for rule in _rules(part)]
    if hasattr(validator, "compare_op"):
        return [{_BOUNDS[validator.compare_op]: validator.bound}]
    if type(validator).__name__ == "_OptionalValidator":
        return [{"anyOf": [{"type": "null"}, rule]} for rule in _rules(validator.validator)]
    return []

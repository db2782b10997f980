"""The JSON Schema of a config file, with every component that is installed here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

import attrs

from arb_ternary.config.fields import config_fields, default_of, is_required, shape_of
from arb_ternary.config.options import HELP, Rule
from arb_ternary.config.short_forms import has_policy
from arb_ternary.config.structure import GIVEN, options_class
from arb_ternary.errors import ArbError
from arb_ternary.specs import PhaseSpec, PolicySpec

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
    """Return the JSON Schema (draft 2020-12) of files whose top level is ``cls``.

    If the options of a component cannot be imported, the schema has its name and allows any option.
    """
    builder = _Builder(registry)
    top = builder.mapping(cls)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"ARB Ternary: {cls.__name__}",
        **top,
        "$defs": dict(sorted(builder.definitions.items())),
    }


class _Builder:
    """Builds schemas of types.

    Classes and components become definitions, so that they can refer to each other.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.definitions: dict[str, Any] = {}

    def mapping(self, cls: type[Any]) -> dict[str, Any]:
        """Return the schema of a config class."""
        fields = config_fields(cls)
        schema: dict[str, Any] = {"type": "object"}
        if cls.__doc__:
            schema["description"] = cls.__doc__.strip().splitlines()[0]
        schema["properties"] = {field.alias: self.option(field) for field in fields}
        schema["required"] = [field.alias for field in fields if is_required(field)]
        schema["additionalProperties"] = False
        return schema

    def option(self, field: attrs.Attribute[Any]) -> dict[str, Any]:
        """Return the schema of an option: its type, its rules, its help and its default."""
        schema = self.type(field.type)
        if rules := _rules(field.validator):
            schema["allOf"] = rules
        if text := field.metadata.get(HELP):
            schema["description"] = text
        default = default_of(field)
        if default is not attrs.NOTHING:
            schema["default"] = default
        return schema

    def type(self, t: Any) -> dict[str, Any]:
        """Return the schema of a type of options."""
        arguments = get_args(t)
        match shape_of(t):
            case "literal":
                return {"enum": list(arguments)}
            case "union":
                return {"anyOf": [self.type(arm) for arm in arguments]}
            case "list" if len(arguments) > 1 and arguments[-1] is not Ellipsis:
                items = [self.type(argument) for argument in arguments]
                count = len(items)
                return {"type": "array", "prefixItems": items, "minItems": count, "items": False}
            case "list":
                item = arguments[0] if arguments else Any
                return {"type": "array", "items": self.type(item)}
            case "mapping":
                key, value = arguments or (str, Any)
                schema: dict[str, Any] = {"type": "object"}
                if key is int:
                    schema["propertyNames"] = {"pattern": r"^-?\d+$"}
                schema["additionalProperties"] = self.type(value)
                return schema
            case "choice":
                return self.refer(t.kind, lambda: self.kind(t.kind))
            case "class":
                name = f"{t.__module__}.{t.__qualname__}"
                return self.refer(name, lambda: self.mapping(t))
        if t in _SCALARS:
            return {"type": _SCALARS[t]}
        return {}

    def kind(self, kind: str) -> dict[str, Any]:
        """Return the schema of any component of a kind: a mapping, or a name alone.

        A name alone is allowed if the component has no required options.
        """
        forms = []
        bare = []
        for name in self.registry.names(kind):
            definition = f"{kind}.{name}"
            build = functools.partial(self.component, kind, name)
            forms.append(self.refer(definition, build))
            if self.definitions[definition]["required"] == ["name"]:
                bare.append(name)
        return {"anyOf": [{"enum": bare}, *forms]}

    def component(self, kind: str, name: str) -> dict[str, Any]:
        """Return the schema of a component, with its name."""
        spec = self.registry.get(kind, name).spec
        properties: dict[str, Any] = {"name": {"const": name}}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": ["name"],
        }
        try:
            cls = options_class(spec)
        except ArbError as error:
            return {**schema, "description": error.what}
        if cls is not None:
            options = self.mapping(cls)
            names = {"enum": list(options["properties"])}
            properties[GIVEN] = {"description": _GIVEN, "type": "array", "items": names}
            if kind == PhaseSpec.kind and has_policy(spec):
                properties.update(self.policies())
            properties.update(options["properties"])
            schema["required"] += options["required"]
        return {**schema, "description": spec.summary, "additionalProperties": False}

    def policies(self) -> dict[str, Any]:
        """Return the schemas of policies in their short form (``config.short_forms``)."""
        schemas = {}
        for name in self.registry.names(PolicySpec.kind):
            schemas[name] = {"anyOf": [{"type": "null"}, self.short_form(name)]}
        return schemas

    def short_form(self, policy: str) -> dict[str, Any]:
        """Return the schema of the options of a policy, without its name."""
        schema = self.component(PolicySpec.kind, policy)
        properties = dict(schema["properties"])
        properties.pop("name")
        properties.pop(GIVEN, None)
        required = [key for key in schema["required"] if key != "name"]
        return {**schema, "properties": properties, "required": required}

    def refer(self, name: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a reference to a definition, which is built if it is new."""
        if name not in self.definitions:
            # Taken before it is built: a component may hold components of its own kind.
            self.definitions[name] = {"required": []}
            self.definitions[name] = build()
        return {"$ref": f"#/$defs/{name}"}


def _rules(validator: Any) -> list[dict[str, Any]]:
    """Return what a validator demands, in JSON Schema; nothing if only Python can express it."""
    if isinstance(validator, Rule):
        return [dict(validator.schema)]
    if hasattr(validator, "_validators"):
        rules = []
        for part in validator._validators:
            rules += _rules(part)
        return rules
    if hasattr(validator, "compare_op"):
        return [{_BOUNDS[validator.compare_op]: validator.bound}]
    if type(validator).__name__ == "_OptionalValidator":
        return [{"anyOf": [{"type": "null"}, rule]} for rule in _rules(validator.validator)]
    return []

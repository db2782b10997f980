"""From plain values to config classes: strict, and with every fault at once.

cattrs walks the classes and gathers what fails; the hooks here make it strict, and its notes give
each fault its path.

Types of options: ``str``, ``int``, ``float``, ``bool``, ``pathlib.Path``, ``Any``, ``Literal``,
unions of these, ``None``, ``list``, ``tuple``, ``Sequence``, ``dict`` and ``Mapping`` (with text or
whole-number keys), attrs classes, and the choices of ``config.choice``, nested to any depth.
Nothing is converted silently: text is not a number, ``true`` is not 1; only a whole number may
stand where a number is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path as FilePath
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import attrs
from cattrs import ClassValidationError, Converter, ForbiddenExtraKeysError, IterableValidationError
from cattrs.cols import list_structure_factory, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn, override

from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Fault, Faulty, Path, raise_faults
from arb_ternary.config.fields import config_fields, default_of, is_required, shape_of
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, UsageProblem, nearest
from arb_ternary.specs import Spec, load_target

if TYPE_CHECKING:
    from arb_ternary.plugins.registry import Registry

T = TypeVar("T")
_Hook = Callable[[Any, Any], Any]

#: Key beside the options of a component in a resolved config: which of them the user wrote.
GIVEN = "given"
#: Keys of a component's mapping that are not options.
_RESERVED = frozenset({"name", GIVEN})
# : What other programs call a key; where several of ours are meant, the first that is a key in that
# place.
_ALSO_CALLED = {
    "lr": "learning_rate learningrate alpha step_size eta",
    "weight_decay": "wd l2",
    "beta1": "betas momentum",
    "grad_clip": "clip max_grad_norm clip_grad_norm gradient_clip gradient_clip_val",
    "gradient_accumulation_steps": "accum accumulate grad_accum grad_accum_steps "
    "accumulation_steps",
    "batch_size": "bs batch batchsize micro_batch_size per_device_train_batch_size",
    "block_size": "seq seq_len seqlen seq_length sequence_length context context_length ctx "
    "max_length",
    "max_length": "seq seq_len seqlen seq_length sequence_length context context_length ctx "
    "block_size",
    "steps": "iters iterations max_iters max_steps num_steps train_steps",
    "width": "d_model dim hidden_size embed_dim n_embd",
}
#: What the plain values of a type are, by its shape.
_WANTED: Mapping[str, Any] = {
    "class": Mapping,
    "choice": (str, Mapping),
    "list": (list, tuple),
    "mapping": Mapping,
}


class _WholeNumberKey(int):
    """A key that may be written as text: those of an override are."""


#: Scalars in words that complete "must be ...".
_PLAIN: Mapping[Any, str] = {
    **dict.fromkeys((int, _WholeNumberKey), "a whole number"),
    bool: "true or false",
    float: "a number",
    str: "text",
    FilePath: "a path",
    NoneType: "null",
}


def structure(cls: type[T], document: Document, registry: Registry) -> T:
    """Structure a whole document into ``cls``, or raise its faults as :func:`raise_faults` does."""
    result, faults = structure_with_faults(cls, document, registry)
    if faults or result is None:
        raise_faults(faults, document.origins, document.source)
    return result


def structure_with_faults(
    cls: type[T], document: Document, registry: Registry
) -> tuple[T | None, list[Fault]]:
    """As :func:`structure`, with the faults returned; the result is None when it could not be
    made.
    """
    result, faults = _structurer(registry).attempt(document.data, cls)
    return result, [*document.faults, *faults]


def options_class(spec: Spec) -> type[Any] | None:
    """The config class of a component; None when it takes no options.

    EnvironmentProblem when it cannot be imported, ComponentError when it is no attrs class with
    options of its own.
    """
    if spec.config is None:
        return None
    what = f"{spec.kind} '{spec.name}': the config class"
    cls = load_target(what, spec.config)
    if not (isinstance(cls, type) and attrs.has(cls)):
        raise ComponentError(f"{what} {spec.config} is not an attrs class")
    for name in _RESERVED & {field.alias for field in config_fields(cls)}:
        reason = f"{what} {spec.config} has an option '{name}', which is reserved"
        raise ComponentError(reason, hint="Give the option another name.")
    return cls


@lru_cache(maxsize=1)  # cattrs compiles a function for each class that a config has met
def _structurer(registry: Registry) -> _Structurer:
    return _Structurer(registry)


class _Structurer:
    """The hooks. Each takes a plain value and a type, and returns the structured value or raises
    :class:`Faulty`.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.converter = Converter(detailed_validation=True)
        # For every type, so that cattrs' own, lenient hooks are kept out; those of scalars it looks
        # up by class first.
        self.converter.register_structure_hook_factory(lambda _: True, self.hook_for)
        for scalar in _PLAIN:
            self.converter.register_structure_hook(scalar, _scalar)

    def attempt(self, value: Any, t: Any, path: Path = ()) -> tuple[Any, list[Fault]]:
        """The structured value, or None and what is wrong, as seen from where ``value`` has the
        path ``path``.
        """
        try:
            return self.converter.structure(value, t), []
        except Exception as error:  # whatever is no fault of the config is raised again
            return None, list(_faults(error, path))

    def hook_for(self, t: Any) -> _Hook:
        match shape_of(t):
            case "class":
                hook = self.class_hook(t)
            case "choice":
                hook = self.choice
            case "list":
                hook = self.list_hook(t)
            case "mapping":
                key, value = get_args(t) or (str, Any)
                as_dict: Any = dict[_WholeNumberKey if key is int else key, value]  # type: ignore[misc]
                hook = mapping_structure_factory(as_dict, self.converter)
            case "union":
                return self.union
            case "literal":
                return _scalar
            case _ if t is Any or t is object:
                return lambda value, _: value
            case _:
                raise ComponentError(f"a config class cannot have an option of type {t}")

        def checked(value: Any, _: Any) -> Any:
            if not isinstance(value, _WANTED[shape_of(t)]):
                raise _mismatch(value, t)
            return hook(value, t)

        return checked

    def list_hook(self, t: Any) -> _Hook:
        types = get_args(t) or (Any, ...)
        make: Any = list if t is list or get_origin(t) is list else tuple
        if make is list or types[-1] is Ellipsis or get_origin(t) is not tuple:
            items = list_structure_factory(list[types[0]], self.converter)  # type: ignore[valid-type]
            return lambda value, _: make(items(value, t))

        def fixed(value: Any, _: Any) -> Any:
            if len(value) != len(types):
                raise Faulty(Fault((), f"must have {len(types)} items, not {len(value)}"))
            parts = [self.attempt(value[index], part, (index,)) for index, part in enumerate(types)]
            if faults := [fault for _, found in parts for fault in found]:
                raise Faulty(*faults)
            return tuple(result for result, _ in parts)

        return fixed

    def union(self, value: Any, t: Any) -> Any:
        compound = []
        # An arm of the value's own type first, so that 3 stays an int in `float | int`.
        for arm in sorted(get_args(t), key=lambda arm: type(value) is not arm):
            result, faults = self.attempt(value, arm)
            if not faults:
                return result
            # Faults inside a value of the arm's shape say more than "must be ...".
            if isinstance(value, _WANTED.get(shape_of(arm), ())):
                compound.append(faults)
        raise Faulty(*compound[0]) if len(compound) == 1 else _mismatch(value, t)

    def class_hook(self, cls: type[Any]) -> _Hook:
        """The hook for ``cls``: cattrs' own, with each option checked by itself so that every fault
        is reported.
        """
        fields = config_fields(cls)
        options: Any = {
            field.name: override(struct_hook=partial(self.option, cls, field)) for field in fields
        }
        generated = make_dict_structure_fn(
            cls, self.converter, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True, **options
        )
        chosen = [
            field for field in fields if shape_of(field.type) == "choice" and not is_required(field)
        ]
        defaults = {str(field.alias): default_of(field) for field in chosen}
        return lambda value, _: generated({**defaults, **value}, cls)

    def option(self, cls: type[Any], attribute: attrs.Attribute[Any], value: Any, t: Any) -> Any:
        """An option by its type, then by its validator. Both are asked even if another option is at
        fault.
        """
        result = self.converter.structure(value, t)
        if attribute.validator is not None:
            converter: Any = attribute.converter
            converted = result if converter is None else converter(result)
            # A validator that looks at other options, which are not there yet, is asked when `cls`
            # is made.
            with suppress(AttributeError):
                attribute.validator(object.__new__(cls), attribute, converted)
        return result

    def choice(self, value: Any, cls: type[Choice[Any]]) -> Choice[Any]:
        where: Path = () if isinstance(value, str) else ("name",)
        written: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
        if "name" not in written:
            names = ", ".join(self.registry.names(cls.kind)) or "none"
            raise Faulty(Fault((), f"needs the 'name' of the {cls.noun}: {names}"))
        name = written["name"]
        if not isinstance(name, str):
            raise Faulty(
                Fault(where, f"must be the name of the {cls.noun}, not {_describe_value(name)}")
            )
        try:
            spec = self.registry.get(cls.kind, name).spec
            config = options_class(spec)
        except (UsageProblem, EnvironmentProblem) as error:
            unknown = isinstance(error, UsageProblem)
            fault = Fault(
                where, error.what, error.hint, environment=not unknown, unknown_component=unknown
            )
            raise Faulty(fault) from error
        options = {key: item for key, item in written.items() if key not in _RESERVED}
        if config is None and options:
            raise Faulty(
                *(
                    Fault((key,), f"unknown key; {cls.noun} '{name}' takes no options")
                    for key in options
                )
            )
        structured = None if config is None else self.converter.structure(options, config)
        given, faults = self.attempt(written.get(GIVEN, list(options)), tuple[str, ...], (GIVEN,))
        strange = [(index, key) for index, key in enumerate(given or ()) if key not in options]
        faults += [
            Fault((GIVEN, index), f"'{key}' is not among the options here")
            for index, key in strange
        ]
        if faults:
            raise Faulty(*faults)
        return cls(name, structured, frozenset(given), spec)


def _scalar(value: Any, t: Any) -> Any:
    if type(value) is t:
        return value
    if shape_of(t) == "literal":
        for literal in get_args(t):
            if type(value) is type(literal) and value == literal:
                return literal
    elif t is FilePath and isinstance(value, str):
        return FilePath(value)
    elif t is float and type(value) is int:
        return float(value)
    elif t is _WholeNumberKey and (
        type(value) is int or (isinstance(value, str) and re.fullmatch(r"-?\d+", value))
    ):
        return int(value)
    raise _mismatch(value, t)


def _mismatch(value: Any, t: Any) -> Faulty:
    message = f"must be {describe_type(t)}, not {_describe_value(value)}"
    if isinstance(value, str):
        arms = get_args(t) if shape_of(t) == "union" else (t,)
        literals = [
            x
            for arm in arms
            if shape_of(arm) == "literal"
            for x in get_args(arm)
            if isinstance(x, str)
        ]
        if (close := nearest(value, literals)) is not None:
            message += f"; did you mean '{close}'?"
    return Faulty(Fault((), message))


def describe_type(t: Any) -> str:
    """A type in words that complete "must be ..."."""
    match shape_of(t):
        case "literal":
            return _either(
                repr(each) if isinstance(each, str) else _describe_value(each)
                for each in get_args(t)
            )
        case "union":
            return _either(map(describe_type, get_args(t)))
        case "list":
            return "a list"
        case "choice":
            article = "an" if t.noun[0] in "aeiou" else "a"
            return f"the name of {article} {t.noun}, or a mapping with its name and options"
    return _PLAIN.get(t, "a mapping")


def _describe_value(value: Any) -> str:
    """A value in words that complete "not ..."."""
    if isinstance(value, Mapping | list | tuple):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    if isinstance(value, str):
        return f"{value!r} (text)"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _either(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _faults(error: Exception, path: Path, keys: Collection[str] = ()) -> Iterator[Fault]:
    """The faults in what structuring raised at ``path``; an exception that is no fault of the
    config is raised again.

    What an instance as a whole fails for is located at the one of its ``keys`` that the message
    begins with.
    """
    if isinstance(error, ClassValidationError):
        aliases = {field.name: field.alias or "" for field in config_fields(error.cl)}
        noted, whole = error.group_exceptions()
        for inner in whole:
            yield from _faults(inner, path, aliases.values())
        for inner, note in noted:
            yield from _faults(inner, (*path, aliases[note.name]))
    elif isinstance(error, IterableValidationError):
        for inner, place in error.group_exceptions()[0]:
            yield from _faults(inner, (*path, place.index))
    elif isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields, key=str):
            meant = (
                ours
                for ours, words in _ALSO_CALLED.items()
                if ours in keys and str(key).lower() in words.split()
            )
            close = next(meant, None) or nearest(str(key), keys)
            advice = (
                f"the keys here are {', '.join(sorted(keys))}" if keys else "there are none here"
            )
            yield Fault(
                (*path, key), "unknown key; " + (f"did you mean '{close}'?" if close else advice)
            )
    elif isinstance(error, Faulty):
        yield from (attrs.evolve(fault, path=(*path, *fault.path)) for fault in error.faults)
    elif isinstance(error, KeyError) and error.args == path[-1:]:
        yield Fault(path, "is required")
    elif isinstance(error, ValueError | TypeError | ArbError) and not isinstance(
        error, ComponentError
    ):
        message = (
            error.what
            if isinstance(error, ArbError)
            else str(error.args[0] if error.args else error)
        )
        name = re.match(r"(['\"]?)(\w+)\1(:? |:)", message)
        if name is not None and name[2] in keys:
            path = (*path, name[2])
        # The path says the name already.
        yield Fault(
            path, message[name.end() :] if name is not None and path[-1:] == (name[2],) else message
        )
    else:
        raise error

"""What every suite of a registered component shares: building it as a config would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs
import pytest
import torch

from arb_ternary.config.choice import choice_of
from arb_ternary.config.options import HELP
from arb_ternary.config.structure import options_class, structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ConfigError
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import resolve


def make_choice(kind: str, name: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The component ``name`` with ``options`` as they would stand in a config file; nested
    components by name.

    Raises:
        ConfigError: an option is unknown or has a value that it may not have.
        UsageProblem, EnvironmentProblem: there is no such component.
    """
    registry = manager().registry
    registry.get(kind, name)
    try:
        return structure(
            choice_of(registry.kinds[kind]), Document({"name": name, **options}), registry
        )
    except Exception as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error


class ComponentCase:
    """Subclasses set ``component`` to the registered name and, where defaults do not do,
    ``options``.

    Attributes:
        kind: the kind of component; set by the suite.
        component: its registered name; empty where the suite's ``make_...`` method is overridden
            instead.
        options: options as in a config file.
    """

    kind: ClassVar[str] = ""
    component: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """The suites' models are tiny: threads would only wait for each other."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def build(self, *arguments: Any) -> Any:
        """A fresh component, built as a run builds it."""
        if not self.component:
            raise NotImplementedError(
                f"{type(self).__name__}: set `component`, or override the method that builds it"
            )
        return make_choice(self.kind, self.component, self.options).build(*arguments)

    def test_its_options_say_what_they_mean(self) -> None:
        if not self.component:
            pytest.skip("not a registered component")
        spec = manager().registry.get(self.kind, self.component).spec
        assert callable(resolve(spec.target)), f"{spec.target} is not a factory"
        options = options_class(spec)
        if options is None:
            return
        mute = [
            field.name
            for field in attrs.fields(options)
            if field.init and not field.metadata.get(HELP)
        ]
        assert not mute, (
            f"options without a help text (declare them with config.options.option): {mute}"
        )

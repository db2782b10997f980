"""A policy under its own name in a phase: the same config and the same error lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import arb_run_test_components as components
import pytest
from jsonschema import Draft202012Validator

from arb_ternary.config.fields import to_plain
from arb_ternary.config.schema import json_schema
from arb_ternary.config.yaml_document import dump_yaml, read_yaml
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config

HEAD = "data: shakespeare\nmodel: decoder\noptimizer: adam\nphases:\n"


@pytest.fixture
def load(in_tmp: Path, plugins: Any) -> Any:
    def run(phase: str, *overrides: str) -> Any:
        Path("demo.yaml").write_text(HEAD + phase, encoding="utf-8")
        return load_config("demo.yaml", overrides, plugins=plugins)

    return run


def test_a_policy_by_its_name_is_the_policy(load: Any) -> None:
    long = load("  - {name: watched, steps: 3, policy: {name: watch, every: 4}}\n").config
    short = load("  - {name: watched, steps: 3, watch: {every: 4}}\n")
    assert short.config == long
    policy = short.config.phases[0].options.policy
    assert (policy.name, policy.options, policy.given) == (
        "watch",
        components.Watch(every=4),
        {"every"},
    )
    # Written out, as `arb config show` does, it reads back the same.
    text = dump_yaml(to_plain(short.config))
    assert "policy" in text
    assert (
        load(text.partition("phases:\n")[2].partition("trackers:")[0]).config.phases == long.phases
    )


def test_without_options(load: Any) -> None:
    for text in ("watch: {}", "watch: ", "policy: watch"):
        phase = load(f"  - name: watched\n    steps: 3\n    {text}\n").config.phases[0]
        assert (phase.options.policy.name, phase.options.policy.options.every) == ("watch", 10)
    assert (
        load("  - {name: watched, steps: 3, sleep: null}\n").config.phases[0].options.policy.options
        is None
    )


def test_every_value_keeps_its_line(load: Any) -> None:
    loaded = load("  - name: watched\n    steps: 3\n    watch:\n      every: 4\n      names: [a]\n")
    at = ("phases", 0, "policy")
    lines = {path[3:]: str(origin) for path, origin in loaded.origins.items() if path[:3] == at}
    assert lines == {("name",): "demo.yaml:7", ("every",): "demo.yaml:8", ("names",): "demo.yaml:9"}
    overridden = load("  - {name: watched, steps: 3}\n", "phases.0.watch.every=5")
    assert overridden.config.phases[0].options.policy.options.every == 5
    assert str(overridden.origins[(*at, "every")]) == "-o phases.0.watch.every=5"


def test_faults_have_their_line(failure: Any) -> None:
    code, text = failure("  - name: watched\n    steps: 3\n    watch:\n      evry: 4\n")
    assert code == 2
    assert "demo.yaml:8: phases[0].policy.evry: unknown key; did you mean 'every'?" in text
    code, text = failure("  - name: watched\n    steps: 3\n    watch: 4\n")
    assert code == 2
    assert (
        "demo.yaml:7: phases[0].watch: must be a mapping with the options of the policy, not 4"
        in text
    )


def test_several_policies_are_a_fault(failure: Any) -> None:
    for phase in ("watch: {}, sleep: {}", "watch: {}, policy: sleep"):
        code, text = failure(f"  - {{name: watched, steps: 3, {phase}}}\n")
        assert code == 2
        assert "the phase has several policies" in text


def test_a_policy_that_is_not_installed_says_what_to_install(failure: Any) -> None:
    code, text = failure("  - {name: watched, steps: 3, absent: {}}\n")
    assert code == 3
    assert "pip install arb-ternary-absent" in text


def test_short_form_of_policy_leaves_other_phases_alone(load: Any, failure: Any) -> None:
    assert "watch: unknown key" in failure("  - {name: standard, steps: 3, watch: {}}\n")[1]
    assert "watch: unknown key" in failure("  - {name: insured, steps: 3, watch: {}}\n")[1]
    assert (
        load("  - {name: insured, steps: 3, policy: watch}\n").config.phases[0].options.policy
        == "watch"
    )
    options = load("  - {name: watched, steps: 3, hawk: 4}\n").config.phases[0].options
    assert (options.hawk, options.policy) == (4, None)


def test_the_schema_knows_the_short_form() -> None:
    schema = json_schema(RunConfig, components.FakeRegistry())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)

    def accepts(phase: str) -> bool:
        return validator.is_valid(read_yaml(f"{HEAD}  - {phase}\n", "x").data)

    assert accepts("{name: watched, steps: 3, watch: {every: 4}}")
    assert accepts("{name: watched, steps: 3, sleep: null}")
    assert accepts("{name: watched, steps: 3, policy: {name: watch, every: 4}}")
    assert not accepts("{name: watched, steps: 3, watch: {evry: 4}}")
    assert not accepts("{name: watched, steps: 3, watch: 4}")
    assert not accepts("{name: standard, steps: 3, watch: {every: 4}}")
    assert not accepts("{name: insured, steps: 3, watch: {every: 4}}")

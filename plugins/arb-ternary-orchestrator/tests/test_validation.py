"""Options of the orchestrator that ``arb config validate`` refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary.plugins.manager import reset_manager
from arb_ternary_orchestrator.built_in import STRATEGIES
from arb_ternary_train.loading import load_config

MODEL = "{name: decoder, width: 16, layers: 1, heads: 2, max_length: 64%s}"
PARTS = {
    "mixed": (MODEL % ", group_size: row, float_parts: [embedding, head, norms]", "split"),
    "pure": (MODEL % ", group_size: row", "scaled_votes"),
    "float": (
        MODEL % ", activations: float, float_parts: [embedding, head, norms, linears]",
        "adamw",
    ),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(
    options: str, parts: str = "mixed", optimizer: str | None = None, steps: int = 900
) -> None:
    model, usual = PARTS[parts]
    Path("run.yaml").write_text(
        f"data: shakespeare\nmodel: {model}\noptimizer: {optimizer or usual}\nphases:\n"
        f"  - name: standard\n    steps: {steps}\n    block_size: 16\n    orchestrator:\n"
        + "".join(f"      {line}\n" for line in options.splitlines())
    )


def refused(*arguments: Any, **options: Any) -> str:
    write(*arguments, **options)
    with pytest.raises(ConfigError) as error:
        load_config("run.yaml")
    return f"{error.value}"


def test_short_form_is_the_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("decision_interval: 300\nstrategies: [conservative_votes]")
    config = load_config("run.yaml").config
    policy = config.phases[0].options.policy
    assert (policy.name, policy.options.decision_interval) == ("orchestrator", 300)
    assert policy.options.strategies == ("conservative_votes",)
    assert main(["config", "validate", "run.yaml"]) == 0
    capsys.readouterr()
    assert main(["config", "show", "run.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "decision_interval: 300" in shown
    assert "policy" in shown
    assert main(["config", "show", "--origin", "run.yaml"]) == 0
    assert "run.yaml:9" in next(
        line for line in capsys.readouterr().out.splitlines() if "decision_interval" in line
    )
    Path("resolved.yaml").write_text(dump_yaml(to_plain(config)))
    assert load_config("resolved.yaml").config == config


def test_invalid_adagc_threshold_is_a_fault() -> None:
    told = refused("use_adagc: true\nadagc_threshold: 0.5")
    assert "run.yaml:10: phases[0].policy.adagc_threshold: must be 1 or greater, not 0.5" in told


def test_unknown_strategy_is_a_fault() -> None:
    for key in (
        "initial_strategy: agressive_votes",
        "safety_strategy: agressive_votes",
        "strategies: [agressive_votes]",
    ):
        told = refused(key)
        assert (
            f"run.yaml:9: phases[0].policy.{key.partition(':')[0]}: no strategy is called "
            f"'agressive_votes'" in told
        )
        assert "did you mean 'aggressive_votes'?" in told
        assert all(name in told for name in STRATEGIES)


def test_horizon_longer_than_the_phase() -> None:
    assert "eval_horizon: 100 steps are more than the 60 of the phase 'standard'" in refused(
        "snapshots: 2", steps=60
    )
    write("eval_horizon: 60", steps=60)
    load_config("run.yaml")


def test_horizon_longer_than_each_loop() -> None:
    head = f"data: shakespeare\nmodel: {PARTS['pure'][0]}\noptimizer: scaled_votes\nphases:\n"
    grown = (
        "  - {name: progressive, target_stacks: 2, block_size: 16, orchestrator: "
        "{eval_horizon: 50}%s}\n"
    )
    Path("run.yaml").write_text(head + grown % "")
    load_config("run.yaml")  # how many steps an epoch has shows when it runs
    Path("run.yaml").write_text(head + grown % ", steps_per_stack: 40")
    with pytest.raises(
        ConfigError, match="50 steps are more than the 40 of each loop of the phase 'progressive'"
    ):
        load_config("run.yaml")
    head = f"data: shakespeare\nmodel: {PARTS['mixed'][0]}\noptimizer: split\nphases:\n"
    block = (
        "  - {name: blockwise, block_size: 16, steps: 500, convergence_target: 0.1, "
        "convergence_max_steps: 60"
    )
    Path("run.yaml").write_text(f"{head}{block}, orchestrator: {{}}}}\n")
    with pytest.raises(
        ConfigError, match="100 steps are more than the 60 of each loop of the phase 'blockwise'"
    ):
        load_config("run.yaml")


def test_interval_below_the_horizon() -> None:
    told = refused("decision_interval: 40\neval_horizon: 50")
    assert "run.yaml:9: phases[0].policy.decision_interval: 40 is below 'eval_horizon', 50" in told
    write("decision_interval: 50\neval_horizon: 50")
    load_config("run.yaml")


def test_nowcasting_and_adagc_need_float_parameters() -> None:
    told = refused("use_nowcasting: true", "pure")
    assert "use_nowcasting: the model has no float parameters" in told
    assert "trits have none" in told
    assert "use_adagc: the model has no float parameters" in refused("use_adagc: true", "pure")
    assert "no optimizer is of float parameters alone" in refused(
        "use_nowcasting: true", optimizer="signgsd"
    )
    write("use_nowcasting: true\nuse_adagc: true\nadagc_warmup: 9")
    load_config("run.yaml")
    assert "adagc_warmup: has no effect because 'use_adagc' is false" in refused("adagc_warmup: 9")


@pytest.mark.parametrize("name", ["adagc", "nowcasting"])
def test_wrapper_that_exists_already_is_a_fault(name: str) -> None:
    wrapped = f"{{name: split, float: {{name: {name}, inner: adamw}}}}"
    assert f"use_{name}: the optimizer has '{name}' around its float parameters already" in refused(
        f"use_{name}: true", optimizer=wrapped
    )
    write(f"use_{'nowcasting' if name == 'adagc' else 'adagc'}: true", optimizer=wrapped)
    load_config("run.yaml")


@pytest.fixture
def _plugins_of_its_own() -> Iterator[None]:
    yield
    reset_manager()


@pytest.mark.usefixtures("_plugins_of_its_own")
def test_strategy_without_effect_is_a_fault() -> None:
    Path("wind.py").write_text(
        "from arb_ternary import hookimpl\n"
        "from arb_ternary_orchestrator.specs import StrategySpec\n"
        "from arb_ternary_orchestrator.strategies import Strategy\n"
        "ARB_API_VERSION = (1, 0)\n"
        "wind = Strategy(name='wind', summary='of floats alone', float_rate=2.0, grad_clip=0.5)\n"
        "@hookimpl\n"
        "def arb_register_strategies():\n"
        "    return [StrategySpec(name='wind', target='wind:wind')]\n"
    )
    for parts, fails in (("pure", True), ("mixed", False)):
        write("strategies: [wind]", parts)
        Path("run.yaml").write_text("plugins: [wind.py]\n" + Path("run.yaml").read_text())
        if fails:
            with pytest.raises(
                ConfigError,
                match=r"'wind' changes nothing of what this run trains \(ternary parts\)",
            ):
                load_config("run.yaml")
        else:
            assert load_config("run.yaml").config.phases[0].options.policy.options.strategies == (
                "wind",
            )


def test_equal_strategies_are_a_fault() -> None:
    told = refused("strategies: [conservative_adamw, conservative_votes]", "pure")
    assert (
        "'conservative_votes' does to the ternary parts of this model what 'conservative_adamw' "
        "does" in told
    )
    write("strategies: [conservative_adamw, conservative_votes]")
    load_config("run.yaml")


@pytest.mark.parametrize("parts", PARTS)
def test_defaults_fit_every_model(parts: str) -> None:
    write("snapshots: 2", parts)
    load_config("run.yaml")
    for name in STRATEGIES:
        write(f"initial_strategy: {name}", parts)
        load_config("run.yaml")


@pytest.mark.parametrize(
    ("steps", "options", "told"),
    [
        # A comparison of three loses 200 steps, of two 100: of 1,500 + 200 steps 11.8 %.
        (
            1500,
            "decision_interval: 500",
            "makes no comparison in the 1,500 steps of the loop: one of 3 strategies loses 200 "
            "steps, 11.8% of all, and 'max_overhead' is 10%; one is made with 'steps' 1,800, or "
            "'eval_horizon' 83, or 'max_overhead' 0.12",
        ),
        (1800, "decision_interval: 500", "makes 1 comparison of 3 strategies in the 1,800 steps"),
        (1500, "max_candidates: 2", "makes 1 comparison of 2 strategies in the 1,500 steps"),
        (1500, "eval_horizon: 83", "makes 1 comparison of 3 strategies in the 1,500 steps"),
        # One every 600 steps, if that is affordable: 5 lose 1,000 of 10,000.
        (9000, "snapshots: 2", "makes 5 comparisons of 3 strategies in the 9,000 steps"),
        (2400, "max_overhead: 0.5", "makes 4 comparisons of 3 strategies in the 2,400 steps"),
        (
            1500,
            "max_overhead: 0.5\ndecision_interval: 1450",
            "the first is due after 1450 and takes 100; it is made with 'steps' 1,550, or with a "
            "lower 'decision_interval'",
        ),
        (1500, "max_overhead: 0", "'max_overhead' is 0%; one is made with 'max_overhead' 0.12"),
        (
            1500,
            "strategies: []\ninitial_strategy: spike_resistant",
            "compares nothing: only spike_resistant fits the model",
        ),
    ],
)
def test_number_of_comparisons_is_said(
    steps: int, options: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(options, steps=steps)
    assert main(["config", "validate", "run.yaml"]) == 0
    _, note = capsys.readouterr().out.splitlines()
    assert note.startswith("note: phases[0]: the orchestrator ")
    assert told in note


def test_comparisons_of_loops_of_unknown_length_are_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("arb_ternary_progressive")
    Path("run.yaml").write_text(
        f"data: shakespeare\nmodel: {PARTS['pure'][0]}\noptimizer: scaled_votes\nphases:\n"
        "  - {name: progressive, target_stacks: 2, block_size: 16, orchestrator: {}}\n"
    )
    assert main(["config", "validate", "run.yaml"]) == 0
    assert "note" not in capsys.readouterr().out
    grown = Path("run.yaml").read_text().replace("{}}", "{}, steps_per_stack: 400}")
    Path("run.yaml").write_text(grown)
    assert main(["config", "validate", "run.yaml"]) == 0
    assert "makes no comparison in the 400 steps of each loop" in capsys.readouterr().out


def test_run_notes_the_number_of_comparisons_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("eval_horizon: 1\ndecision_interval: 1", steps=1)
    assert main(["train", "run.yaml"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "phases[0]: the orchestrator makes no comparison in the 1 steps of the loop" in told

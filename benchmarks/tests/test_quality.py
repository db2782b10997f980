"""quality.py: recipes become configs, tuning chooses, and finished runs stay finished."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import quality
from _quality import runs
from _quality.recipes import TRIALS, Recipe, load_recipes, merged, rate_for
from _quality.trials import SIZES, STEP_TOKENS, plan
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError, ComponentError, ConfigError, UsageProblem
from arb_ternary_testing.fakes import RUN_RECORD
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import to_line
from harness.child import Ended

TINY = SIZES["tiny"]
RECIPES = load_recipes()
FLOAT = {"float_parts": ["embedding", "head", "norms", "linears"], "activations": "float"}


def make_recipe(
    name: str = "one", rates: tuple[float, ...] = (1e-3, 2e-3, 3e-3, 4e-3), **changes: Any
) -> Recipe:
    """Make a recipe of AdamW on a float decoder, with rates as trials."""
    fields: dict[str, Any] = {
        "name": name,
        "overrides": {"model": FLOAT, "optimizer": {"name": "adamw"}},
        "trials": {"optimizer.lr": list(rates)},
        "without": ("model.group_size", "model.scale_rule"),
    }
    return Recipe(**{**fields, **changes})


# --- recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_gives_valid_configs_on_the_same_tokens(recipe: Recipe) -> None:
    for number in range(TRIALS):
        run = plan("tuning", TINY, recipe, number, number, TINY.tuning_tokens)
        assert run.config["data"]["tuning"] is True
        assert run.config["seed"] == 1000
    run = plan("final", TINY, recipe, 0, 2, TINY.tokens)
    assert run.config["data"] == {"name": "shakespeare", "tokenizer": "bytes", "tuning": False}
    assert (run.config["seed"], run.config["model"]["width"]) == (2, 64)


def test_rates_fall_with_the_cube_root_of_the_length() -> None:
    rates = {2560: 0.1, 320: 0.2, 16: 0.25, 20480: 0.05}
    for steps, rate in rates.items():
        assert rate_for(steps, 0.1, 2560) == rate
    assert rate_for(4096, 0.003, 2560) == 0.00256


@pytest.mark.parametrize(("name", "weights"), [("small", 1_105_920), ("medium", 4_096_000)])
def test_the_sizes_are_what_they_are_called_for(name: str, weights: int) -> None:
    shape = SIZES[name].shape
    # Four projections of attention, three of a gated feed-forward layer.
    assert (
        shape["layers"] * (4 * shape["width"] ** 2 + 3 * shape["width"] * shape["feed_forward"])
        == weights
    )


def test_merging_goes_key_by_key_and_keeps_its_arguments() -> None:
    base = {"a": {"b": 1, "c": [1]}, "d": 2}
    changes = {"a": {"c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert merged(base, changes) == {"a": {"b": 1, "c": [2], "e": {"f": 3}}, "d": {"g": 4}}
    assert base == {"a": {"b": 1, "c": [1]}, "d": 2}


def test_fewer_steps_apply_where_they_divide_the_run() -> None:
    (recipe,) = load_recipes(["scaled_votes_4bit"])
    for steps, batch in ((8, 32), (7, 16)):
        (phase,) = plan("tuning", TINY, recipe, 0, 0, steps * STEP_TOKENS).config["phases"]
        assert phase["batch_size"] == batch
        assert phase["batch_size"] * phase["steps"] == 16 * steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": {"optimizer.lr": [1e-3]}}, r"it has \[1\] trials, not 4"),
        ({"overrides": {"seed": 1}}, "it must not change 'seed'"),
    ],
)
def test_a_recipe_that_is_not_fair_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ComponentError, match=f"recipe 'one': {message}"):
        make_recipe(**changes).check()


def test_a_mistake_in_a_recipe_is_a_config_error_that_names_it() -> None:
    recipe = make_recipe(overrides={**make_recipe().overrides, "phase": {"min_rat": 0.1}})
    with pytest.raises(ConfigError, match=r"recipe 'one', tuning-one-0.*min_rat.*(?s:.*)min_rate"):
        plan("tuning", TINY, recipe, 0, 0, STEP_TOKENS)


def test_a_file_adds_recipes_that_are_like_others(tmp_path: Path) -> None:
    file = tmp_path / "recipes.yaml"
    file.write_text("leaky: {like: sign_votes_8, trials: {optimizer.ternary.leak: [1, 2, 3, 4]}}")
    (recipe,) = load_recipes(["leaky"], file)
    optimizer = plan("tuning", TINY, recipe, 0, 0, STEP_TOKENS).config["optimizer"]
    assert optimizer["ternary"] == {"name": "sign_votes", "accum_threshold": 8, "leak": 1}
    with pytest.raises(UsageProblem, match="no recipe is called 'leak'"):
        load_recipes(["leak"], file)


# --- runs


Loss = Callable[[Mapping[str, Any]], float]


class FakeArb:
    """Stands for ``start_arb``: a run's loss is ``loss(config)``, or an exit code it raises."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.loss: Loss = lambda config: config["optimizer"]["lr"] + config["seed"] / 100

    def __call__(self, arguments: list[str], log: Path, *, threads: int) -> FakeChild:
        _, config, _, directory, *_ = arguments
        run = RunDirectory(Path(directory))
        self.started.append(run.path.name)
        values = read_yaml(Path(config).read_text(), config).data
        try:
            write_run(run, values["phases"][0], self.loss(values))
        except SystemExit as error:
            return FakeChild(log, int(error.code or 0))
        return FakeChild(log, 0)


class FakeChild:
    def __init__(self, log: Path, code: int) -> None:
        self.log = log
        self.code = code

    def wait(self) -> Ended:
        return Ended(self.code, 2**20)

    def log_tail(self) -> str:
        return "error: it did not work"


def write_run(run: RunDirectory, phase: Mapping[str, Any], loss: float) -> None:
    if not run.exists():
        run.create("", RUN_RECORD, {})
    (run.checkpoints / "step-1").mkdir(exist_ok=True)
    tokens = phase["steps"] * phase["batch_size"] * phase["block_size"]
    events = [
        {"event": "train", "step": phase["steps"], "tokens": tokens},
        {"event": "validation", "step": phase["steps"], "loss": loss},
    ]
    run.metrics_file.write_bytes(b"".join(map(to_line, events)))
    counted = {"parameters": 10, "float_parameters": 10, "state_bytes": 120}
    report = {
        "tokens": tokens,
        "validation_loss": loss,
        "unigram_entropy": 3.0,
        "bigram_entropy": 2.0,
        "tokens_per_second": 1000.0,
        "audit": {**counted, "state_bits_per_parameter": 96.0},
    }
    run.result_file.write_text(json.dumps(report))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeArb:
    fake = FakeArb()
    monkeypatch.setattr(runs, "start_arb", fake)
    return fake


@pytest.fixture
def measure(
    fake: FakeArb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the script with recipes and changed options."""

    def run(*recipes: Recipe, **changes: Any) -> dict[str, Any]:
        monkeypatch.setattr(quality, "load_recipes", lambda *_: recipes or (make_recipe(),))
        options = {"size": "tiny", "seeds": 2, "tokens": 8 * STEP_TOKENS}
        options |= {"tuning_tokens": 4 * STEP_TOKENS, **changes}
        return quality.run(quality.QualityOptions(**options), tmp_path)

    return run


def test_a_rule_is_tuned_and_then_trained_with_every_seed(
    fake: FakeArb, measure: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    # Tuning takes 4 steps, a final run 8; rates are for 8 and fall with the cube root.
    recipe = make_recipe(rates=(4e-3, 1e-3, 2e-3, 8e-3), rates_for=8)
    result = measure(recipe)
    tuning = [f"tuning-one-{number}" for number in range(4)]
    assert fake.started == [*tuning, "final-one-0", "final-one-1"]
    (rule,) = result["rules"]
    assert rule["chosen"] == 1
    assert rule["settings"] == {"optimizer": {"lr": 1e-3}}
    assert rule["tuning"][1]["settings"] == {"optimizer": {"lr": 1.26e-3}}
    assert rule["validation_losses"] == pytest.approx([0.001, 0.011])
    assert rule["validation_loss_mean"] == pytest.approx(0.006)
    assert rule["validation_loss_stdev"] == pytest.approx(0.01 / math.sqrt(2))
    assert rule["curves"][0] == [[8 * STEP_TOKENS, 0.001]]
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
    assert quality.TABLE.rows(result) == [
        ("one", "0.0060 ± 0.0071", "", "96.00", "", "10", "1,000", "1", "optimizer.lr 0.001")
    ]
    assert "standard deviation of 2 seeds, 16,384 tokens each" in quality.TABLE.markdown(result)

    # Finished runs are not repeated, save those whose config has changed.
    fake.started.clear()
    assert measure(recipe)["rules"] == result["rules"]
    assert fake.started == []
    measure(make_recipe(rates=(4e-3, 1e-3, 2e-3, 16e-3), rates_for=8), seeds=3)
    assert fake.started == ["tuning-one-3", "final-one-2"]


def test_recipes_take_turns_and_failures_are_not_chosen(
    fake: FakeArb, measure: Callable[..., dict[str, Any]]
) -> None:
    def loss(config: Mapping[str, Any]) -> float:
        rate = float(config["optimizer"]["lr"])
        if rate == 1e-3:
            raise SystemExit(1)
        if config["seed"] == 1:
            return math.nan
        return math.inf if rate == 0.5 else rate

    fake.loss = loss
    one, two = measure(make_recipe("one"), make_recipe("two", rates=(0.5,) * 4))["rules"]
    assert fake.started[:3] == ["tuning-one-0", "tuning-two-0", "tuning-one-1"]
    assert [trial["loss"] for trial in one["tuning"]] == [None, 2e-3, 3e-3, 4e-3]
    assert one["tuning"][0]["failure"] == "error: it did not work"
    assert one["chosen"] == 1
    # A seed that failed leaves no mean.
    assert one["validation_losses"] == [2e-3, None]
    assert one["validation_loss_mean"] is None
    assert (two["chosen"], two["validation_losses"]) == (None, [])


def test_a_run_that_cannot_be_carried_out_ends_the_measurement(
    fake: FakeArb, measure: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def loss(config: Mapping[str, Any]) -> float:
        raise SystemExit(3)

    fake.loss = loss
    with pytest.raises(ArbError, match="ended with 3") as caught:
        measure()
    assert "it did not work" in caught.value.hint
    assert not list((tmp_path / "trials").glob("*"))


def test_other_tokens_are_refused_before_anything_runs(
    fake: FakeArb, measure: Callable[..., dict[str, Any]]
) -> None:
    recipe = make_recipe()
    with pytest.raises(ComponentError, match=r"is 16,384 tokens, not 8,192"):
        measure(make_recipe(overrides={**recipe.overrides, "phase": {"batch_size": 32}}))
    with pytest.raises(UsageProblem, match="tuning_tokens: an optimizer step alone takes 2048"):
        measure(tuning_tokens=STEP_TOKENS - 1)
    assert fake.started == []

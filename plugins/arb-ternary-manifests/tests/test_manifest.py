from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.discovery import discover, install_command
from arb_ternary.plugins.manager import reset_manager
from arb_ternary.plugins.record import PluginRecord
from arb_ternary_manifests.document import read_manifest
from arb_ternary_manifests.plan import PlannedRun, load_manifest, plan
from arb_ternary_train.config import RunConfig

Write = Callable[..., Path]


def planned(path: Path, *chosen: str, overrides: tuple[str, ...] = ()) -> list[PlannedRun]:
    return plan(
        read_manifest(path, overrides, chosen), Path("out"), dry=True, files=lambda name: Path(name)
    )


def config(path: Path) -> RunConfig:
    (run,) = planned(path)
    return run.config


def run_with(train: str, trainer: str = "standard") -> str:
    return f"trainer: trainer.{trainer}\nruns:\n  - id: a\n    train: {{{train}}}\n"


def fault(path: Path) -> str:
    with pytest.raises(ArbError) as error:
        planned(path)
    return error.value.what


# --- what a manifest becomes


def test_defaults_of_the_guide(written: Write) -> None:
    made = config(written("runs: [{id: a}]"))
    phase = to_plain(made.phases[0].options)
    expected = {
        "batch_size": 32,
        "block_size": 512,
        "lr": 3e-4,
        "grad_clip": 1.0,
        "min_lr": 0.0,
        "warmup_steps": 0,
        "lr_schedule": "cosine",
        "use_amp": False,
        "compile_model": False,
        "gradient_accumulation_steps": 1,
        "activation_checkpointing": False,
        "activation_checkpoint_threshold": None,
        "num_workers": 0,
        "pin_memory": False,
        "dtype": "float32",
    }
    assert {key: phase[key] for key in expected} == expected
    adamw = made.optimizer.options.float.options
    assert (adamw.weight_decay, adamw.beta1, adamw.beta2) == (0.01, 0.9, 0.95)
    assert made.optimizer.options.ternary.name == "scaled_votes"
    assert (made.device, made.seed, made.name, made.data.name) == ("cpu", 0, "one-a", "text")


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("batch_size", 7, "phases[0].batch_size"),
        ("block_size", 8, "phases[0].block_size"),
        ("lr", 0.5, "phases[0].lr"),
        ("min_lr", 0.25, "phases[0].min_lr"),
        ("grad_clip", 2.5, "phases[0].grad_clip"),
        ("warmup_steps", 9, "phases[0].warmup_steps"),
        ("lr_schedule", "linear", "phases[0].lr_schedule"),
        ("use_amp", True, "phases[0].use_amp"),
        ("dtype", "bfloat16", "phases[0].dtype"),
        ("compile_model", True, "phases[0].compile_model"),
        ("gradient_accumulation_steps", 3, "phases[0].gradient_accumulation_steps"),
        ("activation_checkpointing", True, "phases[0].activation_checkpointing"),
        ("num_workers", 2, "phases[0].num_workers"),
        ("weight_decay", 0.5, "optimizer.float.weight_decay"),
        ("beta1", 0.5, "optimizer.float.beta1"),
        ("beta2", 0.5, "optimizer.float.beta2"),
        ("device", "mps", "device"),
    ],
)
def test_each_key_of_train_decides_one_setting(
    written: Write, key: str, value: object, where: str
) -> None:
    from arb_ternary.config.errors import show_path
    from arb_ternary.config.fields import leaves

    shown = str(value).lower() if isinstance(value, bool) else value
    before = dict(leaves(to_plain(config(written("runs: [{id: a}]")), given=False)))
    after = dict(leaves(to_plain(config(written(run_with(f"{key}: {shown}"))), given=False)))
    changed = {show_path(path): after[path] for path in after if after[path] != before[path]}
    assert changed == {where: value}


def test_keys_that_need_another_key(written: Write) -> None:
    phase = config(
        written(run_with("use_amp: true, amp_dtype: bfloat16, device: mps, pin_memory: true"))
    ).phases[0]
    assert (phase.options.amp_dtype, phase.options.pin_memory) == ("bfloat16", True)
    phase = config(
        written(run_with("activation_checkpointing: true, activation_checkpoint_threshold: 5"))
    ).phases[0]
    assert phase.options.activation_checkpoint_threshold == 5
    # The guide states the number format of autocast although autocast is off.
    assert (
        config(written(run_with("use_amp: false, amp_dtype: float16"))).phases[0].options.amp_dtype
        == "bfloat16"
    )


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("pin_memory: true", "pin_memory: one/a: has no effect because batches stay on the cpu"),
        (
            "activation_checkpoint_threshold: 5",
            "has no effect because 'activation_checkpointing' is false",
        ),
        ("min_lr: 0.1, lr_schedule: constant", "has no effect because 'lr_schedule' is constant"),
        ("warmup_steps: 1, lr_schedule: none", "has no effect because 'lr_schedule' is none"),
        ("use_amp: true, amp_dtype: float16", "float16 needs loss scaling"),
        ("dtype: float16", "float16 training does not work on cpu"),
        ("device: tpu", "must be cpu, cuda, cuda:N or mps, not 'tpu'"),
        ("lr: 0", "must be greater than 0"),
        ("phase: blockwise", "must be 'standard', not 'blockwise'"),
        ("learning_rate: 1.0", "unknown key; did you mean 'lr'?"),
    ],
)
def test_key_without_effect_is_refused_with_its_line(
    written: Write, train: str, message: str
) -> None:
    found = fault(written(run_with(train)))
    assert "study.yaml:11: " in found
    assert message in found


def test_float_keys_are_refused_without_float_parts(
    written: Write,
) -> None:
    head = (
        "version: 2\ntargets:\n  - system: {ref: system.language_model, config: {width: 16, "
        "layers: 1, heads: 2, max_length: 512, group_size: 32, float_parts: []}}\n"
    )
    made = config(written("runs: [{id: a}]", head))
    assert made.optimizer.name == "scaled_votes"
    assert made.phases[0].options.lr is None
    for key in ("lr", "min_lr", "grad_clip", "weight_decay", "beta1", "beta2"):
        found = fault(written(run_with(f"{key}: 0.5"), head))
        assert f"train.{key}: has no effect because the model has no float parameters" in found
        assert "float_parts: [embedding, head, norms]" in found
        assert "'vote_rate'" in found


def test_vote_rate_is_the_rate_of_ternary_weights(written: Write) -> None:
    made = config(written(run_with("vote_rate: 0.25, lr: 0.5")))
    assert made.optimizer.options.ternary.name == "scaled_votes"
    assert made.optimizer.options.ternary.options.lr == 0.25
    assert made.phases[0].options.lr == 0.5
    system = "{ref: system.language_model, config: {width: 16, float_parts: %s}}"
    head = f"version: 2\ntargets:\n  - name: one\n    system: {system}\n"
    every = "[embedding, head, norms, linears]"
    assert config(written(run_with("vote_rate: 0.25"), head % "[]")).optimizer.options.lr == 0.25
    found = fault(written(run_with("vote_rate: 0.25"), head % every))
    assert "train.vote_rate: has no effect because the model has no ternary weights" in found
    own = "    config: {optimizer: scaled_votes}\n"
    found = fault(written(run_with("vote_rate: 0.25"), head % "[]" + own))
    assert "train.vote_rate: the target's config has an optimizer of its own" in found
    assert "must be greater than 0" in fault(written(run_with("vote_rate: 0")))


def test_config_of_the_target(written: Write) -> None:
    head = (
        "version: 2\ntargets:\n  - system: SYSTEM\n    config:\n      threads: 1\n"
        "      optimizer: {name: split, float: {name: adamw, lr: 0.125}}\n      checkpoint: "
        "{every: 7}\n"
    )
    made = config(written("runs: [{id: a}]", head))
    assert (made.threads, made.checkpoint.every, made.phases[0].options.lr) == (1, 7, None)
    assert made.optimizer.options.float.options.lr == 0.125
    assert "write it there" in fault(written(run_with("beta1: 0.5"), head))
    assert "the rate of float parameters is given twice" in fault(
        written(run_with("lr: 0.5"), head)
    )
    found = fault(written("runs: [{id: a}]", head.replace("threads", "phases")))
    assert "study.yaml:5: targets[0].config.phases: unknown key" in found
    found = fault(written("runs: [{id: a}]", head.replace("every: 7", "evry: 7")))
    assert "study.yaml:7: targets[0].config.checkpoint.evry: one" in found.replace(
        "experiment", "one"
    )


def test_verify_becomes_checks(written: Write) -> None:
    one = config(written("runs: [{id: a, verify: {type: validation_loss, max: 3}}]"))
    assert [(check.name, check.options.max) for check in one.checks] == [("validation_loss", 3.0)]
    two = config(
        written("runs: [{id: a, verify: [{type: validation_loss, max: 3}, {type: pure}]}]")
    )
    assert [check.name for check in two.checks] == ["validation_loss", "pure"]
    found = fault(
        written("runs:\n  - id: a\n    verify:\n      type: validation_loss\n      maximum: 3\n")
    )
    assert (
        "study.yaml:12: targets[0].runs[0].verify.maximum: one/a: unknown key; did you mean 'max'?"
        in found
    )
    assert "needs the 'type' of the check: " in fault(written("runs: [{id: a, verify: {max: 3}}]"))
    assert "did you mean 'type'?" in fault(written("runs: [{id: a, verify: {name: pure}}]"))


def test_runs_follow_one_another_within_a_target(written: Write) -> None:
    path = written("runs: [{id: a, steps: 3, seed: 4}, {id: b}]\n")
    text = path.read_text()
    (system,) = [line for line in text.splitlines() if "system:" in line]
    path.write_text(f"{text}  - name: two\n{system}\n    runs: [{{id: a}}]\n")
    runs = planned(path)
    assert [(run.target, run.id, str(run.directory)) for run in runs] == [
        ("one", "a", "out/one/a"),
        ("one", "b", "out/one/b"),
        ("two", "a", "out/two/a"),
    ]
    assert [run.previous for run in runs] == [None, Path("out/one/a"), None]
    assert (runs[0].config.seed, runs[0].config.phases[0].options.steps) == (4, 3)
    assert [run.target for run in planned(path, "two")] == ["two"]


def test_run_before_another_needs_a_checkpoint(written: Write) -> None:
    head = (
        "version: 2\ntargets:\n  - system: SYSTEM\n    config:\n      "
        "checkpoint:\n "
        "       every: 0\n"
    )
    assert config(written("runs: [{id: a}]", head)).checkpoint.every == 0
    found = fault(written("runs: [{id: a}, {id: b}]", head))
    assert "study.yaml:6: targets[0].config.checkpoint.every: must be at least 1" in found


def test_variants_and_targets(written: Write) -> None:
    head = (
        "version: 2\nvars: {n: 5}\nvariants: {quick: {n: 2}, paper: {n: 9}}\ntargets:\n  - "
        "system: SYSTEM\n"
    )
    path = written("runs: [{id: a, steps: '${n}'}]", head)
    steps = {
        name: planned(path, *name.split())[0].config.phases[0].options.steps
        for name in ("", "quick", "paper")
    }
    assert steps == {"": 5, "quick": 2, "paper": 9}
    assert read_manifest(path, (), ["quick", "experiment"]).variant == "quick"
    with pytest.raises(
        UsageProblem, match="no variant and no target of this name; did you mean 'quick'"
    ):
        planned(path, "quik")
    with pytest.raises(UsageProblem, match="quick and paper are both variants"):
        planned(path, "quick", "paper")
    assert planned(path, overrides=("vars.n=4",))[0].config.phases[0].options.steps == 4


# --- errors, with their lines


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("version: 3\ntargets: [{runs: [{id: a}]}]", ["study.yaml:1: version: must be 2, not 3"]),
        ("version: 2\ntargets: []", ["study.yaml:2: targets: must be a list of at least one item"]),
        (
            "version: 2\ntargets:\n  - runs: []",
            ["study.yaml:3: targets[0].runs: must be a list of at least one item"],
        ),
        (
            "version: 2\ntargets:\n  - runs:\n    - id: a\n    - id: a",
            ["in which every id is used once"],
        ),
        (
            "version: 2\ntargets:\n  - rums: [{id: a}]",
            ["study.yaml:3: targets[0].rums: unknown key; did you mean 'runs'?"],
        ),
        (
            "version: 2\ntargets:\n  - runs: [{id: ../a}]",
            ["study.yaml:3: targets[0].runs[0].id: must be letters"],
        ),
        (
            "version: 2\ntargets:\n  - runs: [{id: a, mode: infer}]",
            ["mode: must be 'train', not 'infer' (text)"],
        ),
        (
            "version: 2\ntargets:\n  - trainer: trainer.standart\n    runs: [{id: a}]",
            ["study.yaml:3: targets[0].trainer: no trainer is called 'standart'"],
        ),
        (
            "version: 2\ntargets:\n  - trainer: standard\n    runs: [{id: a}]",
            [
                "study.yaml:3: targets[0].trainer: must be the name of a trainer, "
                "trainer.NAME, not 'standard'"
            ],
        ),
        (
            "version: 2\ntargets:\n  - system:\n      ref: system.decodr\n    runs: [{id: a}]",
            ["study.yaml:4: targets[0].system.ref: no system is called 'decodr'"],
        ),
        (
            "version: 2\ntargets:\n  - system:\n      ref: system.language_model\n      config:\n"
            "        depth: 2\n    runs: [{id: a}]",
            ["study.yaml:6: targets[0].system.config.depth: unknown key"],
        ),
        (
            "version: 2\nvars: {a: 1}\ntargets:\n  - runs:\n    - id: a\n      steps: ${b}\n",
            ["study.yaml:6: targets[0].runs[0].steps: vars has no variable 'b'"],
        ),
    ],
)
def test_faults_have_their_line(text: str, messages: list[str]) -> None:
    path = Path("study.yaml")
    path.write_text(text)
    found = fault(path)
    for message in messages:
        assert message in found


def test_faults_of_several_runs_are_listed_together(written: Write) -> None:
    found = fault(
        written(
            "runs:\n  - id: a\n    train: {pin_memory: true}\n  - id: b\n    train: {dtype: "
            "float16}\n"
        )
    )
    assert "2 faults" in found
    assert "study.yaml:10: targets[0].runs[0].train.pin_memory: one/a: " in found
    assert "study.yaml:12: targets[0].runs[1].train.dtype: one/b: " in found


# --- keys of other distributions


def test_keys_of_another_trainer(written: Write) -> None:
    made = config(written(run_with("teacher_ckpt: null, convergence_max_steps: null")))
    assert [phase.name for phase in made.phases] == ["standard"]
    found = fault(written(run_with("teacher_ckpt: there")))
    assert "train.teacher_ckpt: is a key of trainer.upcycle, and this target has trainer" in found
    found = fault(written(run_with("convergence_patience: 5")))
    assert "train.convergence_patience: is a key of trainer.upcycle" in found


@pytest.fixture
def _no_upcycling_nor_orchestrator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the distributions that manifests need for some keys."""
    missing = {"arb-ternary-upcycle", "arb-ternary-orchestrator"}
    known = {
        "phase.blockwise": "arb-ternary-upcycle",
        "policy.orchestrator": "arb-ternary-orchestrator",
    }

    def others() -> tuple[list[PluginRecord], list[str]]:
        found, notes = discover()
        return [record for record in found if record.distribution not in missing], notes

    monkeypatch.setattr("arb_ternary.plugins.manager.discover", others)
    monkeypatch.setattr("arb_ternary.plugins.registry.announced", lambda: known)
    reset_manager()
    yield
    reset_manager()


@pytest.mark.usefixtures("_no_upcycling_nor_orchestrator")
def test_keys_of_missing_distributions(written: Write) -> None:
    (run,) = planned(written(run_with("orchestrator_enabled: false, orchestrator_window: 500")))
    assert run.notes == ("orchestrator_enabled is false: no key with orchestrator_ was read",)
    for keys in ("orchestrator_window: 5", "orchestrator_window: 5, orchestrator_enabled: true"):
        with pytest.raises(EnvironmentProblem) as error:
            planned(written(run_with(keys)))
        assert "study.yaml:11: targets[0].runs[0].train.orchestrator_window: " in error.value.what
        assert install_command("arb-ternary-orchestrator") in error.value.hint
    with pytest.raises(EnvironmentProblem, match=r"trainer\.upcycle cannot be used") as error:
        planned(written(run_with("", "upcycle")))
    assert install_command("arb-ternary-upcycle") in error.value.hint
    with pytest.raises(ConfigError, match="plumage: unknown key") as wrong:
        planned(written(run_with("plumage: grey")))
    assert f"trainer.upcycle ({install_command('arb-ternary-upcycle')})" in wrong.value.hint


def test_system_can_be_any_model(written: Write) -> None:
    head = (
        "version: 2\ntargets:\n  - system:\n      ref: system.decoder\n      config:\n"
        "        {width: 16, layers: 1, heads: 2, max_length: 512, group_size: 32}\n"
    )
    made = config(written("runs: [{id: a}]", head))
    assert (made.model.name, made.model.options.width) == ("decoder", 16)


# --- as a kind of config file


def test_manifest_as_a_config_file(written: Write) -> None:
    assert load_manifest(written("runs: [{id: a}]")).summary == "targets one; runs: 1"
    with pytest.raises(
        ConfigError, match=r"study.yaml:11: targets\[0\].runs\[0\].train.lr: must be greater than 0"
    ):
        load_manifest(written(run_with("lr: -1")))


def test_a_file_that_is_no_manifest_names_the_right_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "study.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: study.yaml: no such file\n"
        "  A manifest lists several runs; its keys: arb config schema --document manifest\n"
        "  For the config of one run: arb config new, then arb train\n"
    )
    Path("one.yaml").write_text("name: one\ndata: shakespeare\nphases: [standard]\n")
    assert main(["run", "one.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: one.yaml: it is the config of one run, not a manifest\n"
        "  Run it with: arb train one.yaml\n"
    )

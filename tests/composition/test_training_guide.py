"""The YAML texts of the training guide (``tests/fixtures/guide``, as they stand) are manifests, or
parts of one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import leaves, to_plain
from arb_ternary.plugins.discovery import discover, install_command
from arb_ternary.plugins.manager import reset_manager
from arb_ternary.plugins.metadata import canonical
from arb_ternary.plugins.record import PluginRecord
from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.options import HfExportConfig
from arb_ternary_manifests.document import read_manifest
from arb_ternary_manifests.plan import plan
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.config import RunConfig
from arb_ternary_train.restore import load_run

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "tests" / "fixtures" / "guide"
HUB = "hf://meta-llama/Llama-3.2-1B"
#: The first run of the guide that gives a target for its phases.
FIRST = f"      - {{id: first, train: {{phase: blockwise, teacher_ckpt: '{HUB}'}}}}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a new folder, use a hub without a model, and the metadata of this checkout."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {
        name: canonical(source)
        for name, source in project["entry-points"]["arb_ternary.known"].items()
    }
    monkeypatch.setattr("arb_ternary.plugins.registry.announced", lambda: known)


def put_into_the_hub(folder: Path, **options: Any) -> None:
    """Write a small float Llama to the path in the hub's cache that the guide names."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "feed_forward": 96,
        **options,
    }
    config = DecoderConfig(
        architecture="llama",
        max_length=2048,
        activations="float",
        float_parts=FLOAT_PARTS,
        rotary_base=5e5,
        **sizes,
    )
    cache = folder / "hub" / "models--meta-llama--Llama-3.2-1B"
    (cache / "refs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    metadata = {
        "name": "llama",
        "step": 1,
        "model": {},
        "versions": {},
        "tokenizer": {"kind": "bytes"},
    }
    HfExporter(HfExportConfig(layout="dense")).export(
        Decoder(config, 256).eval(), cache / "snapshots" / ("a" * 40), metadata
    )


def manifest(name: str) -> Path:
    """Return a text of the guide as a manifest; a part of one is completed."""
    text = (GUIDE / f"{name}.yaml").read_text(encoding="utf-8")
    trainer = (
        "trainer.upcycle"
        if re.search(r"phase: (blockwise|global)|compare", text)
        else "trainer.standard"
    )
    if text.startswith("train:"):
        first = FIRST if "phase: global" in text else ""
        text = f"    runs:\n{first}      - id: run\n" + "".join(
            f"        {line}\n" for line in text.splitlines()
        )
        text = f"trainer: {trainer}\n" + text.replace("    runs", "runs", 1)
    # The upcycling run of the guide, with what verification adds to it.
    if text.startswith("runs:"):
        upcycle = (GUIDE / "upcycle.yaml").read_text(encoding="utf-8")
        text = upcycle.replace("  - id: blockwise\n", text.removeprefix("runs:\n"))
    if text.startswith("trainer:"):
        text = "targets:\n  - name: guide\n" + "".join(
            f"    {line}\n" for line in text.splitlines()
        )
    if text.startswith("targets:"):
        text = "version: 2\n" + text
    path = Path("guide.yaml")
    path.write_text(text)
    return path


def dry_run(
    path: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, list[Any], str]:
    before = sorted(Path().rglob("*"))
    code = main(["run", str(path), "--dry-run", "--no-probe", "--json", *arguments])
    assert sorted(Path().rglob("*")) == before
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if code == 0 else [], shown.err


@pytest.mark.parametrize(
    "name", ["overview", "basic", "full_options", "from_scratch", "complete_reference"]
)
def test_standard_training_of_the_guide(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, told = dry_run(manifest(name), capsys)
    assert code == 0, told
    (run,) = shown
    steps = {"basic": 10000, "from_scratch": 5000}.get(name, 1000)
    tokens = steps * (16 * 256 if name == "from_scratch" else 32 * 512)
    assert [(phase["name"], phase["steps"], phase["tokens"]) for phase in run["phases"]] == [
        ("standard", steps, tokens)
    ]
    # The decoder's defaults are the sizes of the guide's small transformer.
    assert (run["layers"], run["ternary_weights"]) == (4, 4 * (4 + 8) * 256**2)
    assert "orchestrator_" not in told
    assert ("vars.d_model is used nowhere" in told) == (name == "from_scratch")


PREPARED = ["load_teacher", "fold_rotate", "projection"]


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("upcycle", [[*PREPARED, "blockwise"], ["global"]]),
        ("verification", [[*PREPARED, "blockwise"], ["global"]]),
        ("blockwise", [[*PREPARED, "blockwise"]]),
        ("global", [[*PREPARED, "blockwise"], ["global"]]),
    ],
)
def test_upcycling_of_the_guide(
    name: str, phases: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_the_hub(tmp_path)
    code, shown, told = dry_run(manifest(name), capsys)
    assert code == 0, told
    assert [[phase["name"] for phase in run["phases"]] for run in shown] == phases
    # Four linears of attention, two of them of half the heads, and three of the feed-forward layer.
    assert all(run["ternary_weights"] == 2 * (3 * 64 * 64 + 3 * 64 * 96) for run in shown)
    steps = {
        "upcycle": 500 * 2,
        "verification": 500 * 2,
        "blockwise": 2000 * 2,
        "global": 1000 * 2,
    }[name]
    assert shown[0]["phases"][-1]["steps"] == steps


def test_the_autopilot_of_the_guide_needs_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_the_hub(tmp_path)
    path = manifest("autopilot")
    code, _, told = dry_run(path, capsys)
    assert code == 2
    assert "guide.yaml:7: targets[0].runs[0].train: needs 'teacher_ckpt'" in told
    path.write_text(path.read_text().replace("runs:\n", f"runs:\n    {FIRST}", 1))
    (_, run) = plan(read_manifest(path), Path("out"), dry=True, files=Path)
    options = run.config.phases[0].options
    assert (options.blockwise_autotune_enabled, options.blockwise_autotune_log_every) == (True, 50)
    assert options.blockwise_autotune_lr_decay == 0.5


def test_llama_of_the_guide_becomes_decoupled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest("llama_to_dba")
    code, shown, told = dry_run(path, capsys)
    assert code == 0, told
    assert "what the system leaves open is counted as the decoder's defaults" in told
    assert [[phase["name"] for phase in run["phases"]] for run in shown] == [
        ["load_teacher", "fold_rotate", "surgery", "projection", "blockwise"],
        ["global"],
    ]
    # 8 key heads of 4 and 8 features beside values of 64; the placeholder of the feed-forward
    # layers is the default.
    queries = 2048 * 32 * 12
    keys = 2048 * 8 * 12
    values = 2048 * 8 * 64
    assert shown[0]["layers"] == 16
    assert shown[0]["ternary_weights"] == 16 * (
        queries + keys + values + 2048 * 2048 + 3 * 2048 * 5472
    )

    put_into_the_hub(tmp_path)
    code, _, told = dry_run(path, capsys)
    assert code == 2
    assert "width: 2048, the teacher's is 64" in told


@pytest.fixture
def without_the_orchestrator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate an installation without the orchestrator's distribution."""

    def others() -> tuple[list[PluginRecord], list[str]]:
        found, notes = discover()
        return [
            record for record in found if record.distribution != "arb-ternary-orchestrator"
        ], notes

    monkeypatch.setattr("arb_ternary.plugins.manager.discover", others)
    reset_manager()
    yield
    reset_manager()


@pytest.mark.usefixtures("without_the_orchestrator")
def test_what_is_orchestrated_names_the_plugin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_the_hub(tmp_path)
    for name in ("overview", "complete_reference"):  # Which say that it is not active.
        code, _, told = dry_run(manifest(name), capsys)
        assert code == 0, told
        assert "no key with orchestrator_ was read" in told
    for name in ("orchestrated", "orchestrator_options", "adagc"):
        code, _, told = dry_run(manifest(name), capsys)
        assert code == 3
        assert "train.orchestrator_" in told
        assert install_command("arb-ternary-orchestrator") in told


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (
            "orchestrated",
            {
                "decision_interval": 500,
                "eval_horizon": 100,
                "initial_strategy": "conservative_adamw",
                "safety_strategy": "spike_resistant",
                "use_adagc": True,
            },
        ),
        (
            "orchestrator_options",
            {
                "decision_interval": 500,
                "eval_horizon": 100,
                "initial_strategy": "conservative_adamw",
                "use_adagc": True,
                "use_nowcasting": False,
                "max_loss_increase": 1.5,
                "safety_strategy": "spike_resistant",
            },
        ),
        ("adagc", {"use_adagc": True, "adagc_warmup": 100, "adagc_threshold": 3.0}),
    ],
)
def test_what_is_orchestrated_takes_effect(
    name: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_the_hub(tmp_path)
    path = manifest(name)
    code, _, told = dry_run(path, capsys)
    assert code == 0, told
    runs = plan(read_manifest(path), Path("out"), dry=True, files=Path)
    policy = runs[-1].config.phases[-1].options.policy
    assert policy.name == "orchestrator"
    assert {key: getattr(policy.options, key) for key in asked} == asked
    assert all("orchestrator" not in str(to_plain(run.config)) for run in runs[:-1])


@pytest.mark.parametrize(("target", "steps", "tokens"), [("quick", 50, 512), ("paper", 500, 2048)])
def test_the_preset_has_the_guides_steps(
    target: str, steps: int, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_into_the_hub(tmp_path)
    path = ROOT / "docs" / "examples" / "llama-dba.yaml"
    code, (blockwise, finetune), told = dry_run(path, capsys, "--target", target)
    assert code == 0, told
    assert blockwise["phases"][-1]["steps"] == steps * 2
    phases = {phase["name"]: phase for phase in finetune["phases"]}
    assert list(phases) == ["global", "benchmark"]
    assert phases["global"]["tokens"] == phases["global"]["steps"] * tokens
    assert phases["global"]["steps"] == {"quick": 100, "paper": 2000}[target]


#: For each key of the guide's complete reference another value, and which settings of the run it
#: decides; a text is what the key is refused with. The phase of the second half is blockwise.
STANDARD: dict[str, tuple[str, set[str] | str]] = {
    "phase": ("phase: dreaming", "must be 'standard'"),
    "batch_size": ("batch_size: 3", {"batch_size"}),
    "block_size": ("block_size: 33", {"block_size"}),
    "lr": ("lr: 0.125", {"lr"}),
    "device": ("device: cuda", {"device"}),
    "dtype": ("dtype: bfloat16", {"dtype"}),
    "teacher_ckpt": ("teacher_ckpt: there", "is a key of trainer.upcycle"),
    "weight_decay": ("weight_decay: 0.5", {"weight_decay"}),
    "beta1": ("beta1: 0.5", {"beta1"}),
    "beta2": ("beta2: 0.5", {"beta2"}),
    "grad_clip": ("grad_clip: 3.0", {"grad_clip"}),
    "warmup_steps": ("warmup_steps: 7", {"warmup_steps"}),
    "lr_schedule": ("lr_schedule: linear", {"lr_schedule"}),
    "min_lr": ("min_lr: 0.001", {"min_lr"}),
    "use_amp": ("use_amp: true, amp_dtype: bfloat16", {"use_amp"}),
    "amp_dtype": ("use_amp: true, amp_dtype: float16", "float16 needs loss scaling"),
    "compile_model": ("compile_model: true", {"compile_model"}),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps: 2",
        {"gradient_accumulation_steps"},
    ),
    "activation_checkpointing": ("activation_checkpointing: true", {"activation_checkpointing"}),
    "activation_checkpoint_threshold": (
        "activation_checkpoint_threshold: 5",
        "has no effect because 'activation_checkpointing' is false",
    ),
    "num_workers": ("num_workers: 2", {"num_workers"}),
    "pin_memory": ("pin_memory: true, device: cuda", {"pin_memory", "device"}),
}
UPCYCLE: dict[str, tuple[str, set[str] | str]] = {
    "cache_teacher_outputs": ("cache_teacher_outputs: true", {"cache_teacher_outputs"}),
    "convergence_target": (
        "convergence_target: 0.5",
        {"convergence_target", "convergence_max_steps"},
    ),
    "convergence_patience": (
        "convergence_patience: 7",
        "has no effect because 'convergence_target' is null",
    ),
    "convergence_max_steps": (
        "convergence_max_steps: 7",
        "has no effect because 'convergence_target' is null",
    ),
}


def config_of(train: str, trainer: str) -> RunConfig:
    head = (
        f"version: 2\ntargets:\n  - trainer: trainer.{trainer}\n    runs: [{{id: a, train: "
        f"{{{train}}}}}]\n"
    )
    Path("guide.yaml").write_text(head)
    (run,) = plan(read_manifest(Path("guide.yaml")), Path("out"), dry=True, files=Path)
    return run.config


def test_every_key_of_the_guide_has_an_effect_or_is_an_error(
    tmp_path: Path,
) -> None:
    put_into_the_hub(tmp_path)
    listed = re.findall(r"^  (\w+):", (GUIDE / "complete_reference.yaml").read_text(), flags=re.M)
    assert [key for key in listed if not key.startswith("orchestrator_")] == sorted(
        [*STANDARD, *UPCYCLE], key=listed.index
    )
    for keys, trainer, base in (
        (STANDARD, "standard", "batch_size: 32"),
        (UPCYCLE, "upcycle", f"phase: blockwise, teacher_ckpt: '{HUB}'"),
    ):
        before = dict(leaves(to_plain(config_of(base, trainer), given=False)))
        for key, (train, outcome) in keys.items():
            extra = train if trainer == "standard" else f"{base}, {train}"
            if isinstance(outcome, str):
                with pytest.raises(Exception, match=re.escape(outcome)):
                    config_of(extra, trainer)
                continue
            after = dict(leaves(to_plain(config_of(extra, trainer), given=False)))
            changed = {
                show_path(path).rpartition(".")[2]
                for path in after
                if after[path] != before.get(path)
            }
            assert changed == outcome, key


SMALL = [
    "-o",
    "targets.0.config.data={name: text, path: text.txt}",
    "-o",
    "targets.0.config.checkpoint={every: 100}",
]


def test_the_guides_small_transformer_trains(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text(load_text("train")[:20_000])
    loop = (
        "{phase: standard, batch_size: 2, block_size: 16, lr: 0.001, warmup_steps: 1, "
        "lr_schedule: cosine}"
    )
    run = [
        "-o",
        "targets.0.runs.0.steps=2",
        "-o",
        f"targets.0.runs.0.train={loop}",
        "-o",
        "targets.0.system={ref: system.language_model, config: {width: 32, layers: 1, heads: 2}}",
        "-o",
        "targets.0.runs.0.train.device=cpu",
    ]
    model = "targets.0.system.config.float_parts=[embedding, head, norms]"
    assert main(["run", str(manifest("from_scratch")), *SMALL, *run, "-o", model]) == 0
    result = json.loads(Path("runs/train_from_scratch/baseline/train/result.json").read_text())
    assert result["steps"] == 2


@pytest.mark.slow
def test_the_guides_llama_of_a_small_size_is_upcycled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text(load_text("train")[:20_000])
    put_into_the_hub(tmp_path)
    path = manifest("llama_to_dba")
    sizes = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "sem_dim": 32, "geo_dim": 32}
    changes = [f"vars.{name}={value}" for name, value in sizes.items()]
    tiny = "{probe_tokens: 0}"
    changes += [
        "targets.0.system.config.model.topology.layers.0.repeat=2",
        *(
            f"targets.0.runs.{n}.{key}"
            for n in (0, 1)
            for key in ("steps=1", "train.batch_size=2", "train.block_size=16")
        ),
        "targets.0.runs.0.train.convergence_max_steps=2",
        f"targets.0.runs.0.train.load_teacher={tiny}",
        "targets.0.runs.0.train.surgery={probe_tokens: 0, calibration_tokens: 256, block_size: 32}",
        "targets.0.runs.0.train.projection={calibration_tokens: 256, held_out_tokens: 128, "
        "block_size: 32}",
        "targets.0.runs.1.train.force=true",
        "targets.0.runs.1.verify={type: fidelity, max_ppl_ratio: 100}",
    ]
    arguments = [part for change in changes for part in ("-o", change)]
    assert main(["run", str(path), *SMALL, *arguments]) == 0
    finished = load_run(Path("runs/llama_to_dba/upcycle/finetune"))
    assert isinstance(finished.model, Decoder)
    config = finished.model.config
    assert (config.attention, config.sem_dim, config.geo_dim, config.rotary_dim) == (
        "decoupled",
        8,
        8,
        16,
    )
    assert config.feed_forward == 96  # The teacher's, because the topology leaves it open.
    result = json.loads(Path("runs/llama_to_dba/upcycle/finetune/result.json").read_text())
    assert result["checks"][0]["name"] == "fidelity"
    capsys.readouterr()
    assert main(["run", str(path), *SMALL, *arguments, "--resume"]) == 0
    assert capsys.readouterr().out.count("finished already") == 2

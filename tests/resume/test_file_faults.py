"""Every file operation of a command fails, with every error of the system.

The command then ends with a line that names the file, and without a traceback. Nothing that was
complete is missing. Repeated without the fault, it ends with the bytes of a command that never
failed. An operation that a run can do without, such as the deletion of an old checkpoint, may fail
without an end.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from attrs import frozen

from arb_ternary.cli.main import main
from arb_test_support.file_faults import ERRORS, FileFaults

CONFIG = """
name: tiny
threads: 1
data: {{name: text, path: text.txt}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 16{model}}}
optimizer: {{name: {optimizer}}}
checkpoint: {{every: {every}, keep: 1}}
trackers: []
phases: [{{name: standard, steps: {steps}, batch_size: 1, block_size: 8, warmup_steps: 0,
    eval_every: 0{phase}}}]
"""
PLAIN = {
    "model": ", architecture: qwen3, group_size: row",
    "optimizer": "scaled_votes",
    "every": 1,
    "steps": 2,
    "phase": "",
}
#: Compares strategies after step 2, with snapshots that are files.
POLICY = (
    ", lr_schedule: constant, policy: {name: orchestrator, decision_interval: 2, hysteresis: 2, "
    "eval_horizon: 1, strategies: [configured, aggressive_adamw], max_overhead: 0.9, "
    "snapshot_every: 2, snapshot_memory: 1}"
)
#: A float model, which ``arb upcycle`` makes ternary.
TEACHER = {
    "model": ", architecture: llama, activations: float, float_parts: [embedding, head, norms, "
    "linears]",
    "optimizer": "adamw",
}
CONFIGS = {
    "train": PLAIN,
    "orchestrate": {**PLAIN, "every": 2, "steps": 4, "phase": POLICY},
    "export": PLAIN,
    "upcycle": {**PLAIN, **TEACHER},
}
TRAIN = ("train", "tiny.yaml", "--run-dir", "run")
UPCYCLE = (
    *("upcycle", "./run", "--out", "out", "--data", "text.txt", "--batch-size", "1"),
    *("--block-size", "8", "--blockwise-steps", "1", "--steps", "1"),
    *("-o", "threads=1", "-o", "phases.0.max_nll=100"),
    *("-o", "phases.2.calibration_tokens=16", "-o", "phases.2.held_out_tokens=16"),
    *("-o", "phases.5={name: benchmark, measure: [perplexity], batches: 1}"),
)
#: The arguments of each command, and those that repeat it after a fault.
COMMANDS = {
    "train": (TRAIN, (*TRAIN, "--resume")),
    "orchestrate": (TRAIN, (*TRAIN, "--resume")),
    "upcycle": (UPCYCLE, ("upcycle", "./run", "--out", "out", "--resume")),
    **{
        f"export-{name}": (("export", "run", "out", "--format", name),) * 2
        for name in ("safetensors", "gguf", "hf")
    },
}
#: Commands of seconds: each place fails with one error only, and in extended tests only.
LONG = ("orchestrate", "upcycle")
#: Files that depend on the time, or on attempts that have failed.
OTHERS = {".lock", "train.log", "metrics.before.jsonl"}
#: Numbers that depend on the clock.
CLOCK = rb'"(tokens_per_second|seconds)": [\d.e-]+'
#: Numbers that count optimizer and working memory if the process that wrote them has trained.
TRAINED = rb'"(optimizer_bytes|working_bytes|state_bytes|state_bits_per_\w+)": [\d.e-]+'


@frozen
class Attack:
    """A command that is to fail.

    Attributes:
        name: its key in ``COMMANDS``.
        start: the files before it begins.
        folder: where it runs.
        whole: the files after it has ended well.
        operations: kind of its file operations, and their paths relative to the folder.
    """

    name: str
    start: Path
    folder: Path
    whole: dict[str, bytes]
    operations: list[tuple[str, str]]

    def places(self) -> list[int]:
        """Return the first and the last operation of each kind on each kind of file.

        Files are of one kind whose folders differ in a number only, and whose names end alike.
        """
        found: dict[tuple[str, str, str], list[int]] = {}
        for number, (operation, path) in enumerate(self.operations):
            folder = re.sub(r"\d+", "#", os.path.dirname(path))  # noqa: PTH120
            end = Path(path.removesuffix(".writing")).suffix
            found.setdefault((operation, folder, end), []).append(number)
        return sorted({number for each in found.values() for number in (each[0], each[-1])})


@pytest.fixture(scope="module")
def attack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Attack:
    name = request.param
    start = tmp_path_factory.mktemp(name) / "start"
    start.mkdir()
    (start / "text.txt").write_text("to be or not to be that is the question " * 20)
    (start / "tiny.yaml").write_text(CONFIG.format_map(CONFIGS[name.partition("-")[0]]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(start)
        arguments = COMMANDS[name][0]
        if arguments is not TRAIN:
            assert main([*TRAIN]) == 0
        if name in ("export-safetensors", "export-gguf"):
            (start / "out").write_text("the export of yesterday")
        folder = shutil.copytree(start, start.with_name("folder")).resolve()
        patch.chdir(folder)
        with FileFaults(folder) as counted:
            assert main([*arguments]) == 0
        operations = [(kind, str(path.relative_to(folder))) for kind, path in counted.operations]
    return Attack(name, start, folder, files_in(folder), operations)


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the files below ``folder`` that do not depend on the clock, nor on a failure."""
    found = {}
    for path in sorted(folder.rglob("*")):
        # A store of a stage whose deletion failed is named in the log.
        removed = path.parent.name.endswith(".removed")
        if not path.is_file() or path.name in OTHERS or removed:
            continue
        name = str(path.relative_to(folder))
        content = path.read_bytes()
        if path.name in ("result.json", "orchestrator_decisions.jsonl"):
            content = re.sub(CLOCK, b"", content)
        if name == "out/run/result.json":
            content = re.sub(TRAINED, b"", content)
        found[name] = content
    return found


def check_fault(
    attack: Attack, number: int, error: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Have an operation of the command fail, then repeat the command."""
    folder = attack.folder
    operation, path = attack.operations[number]
    arguments, again = COMMANDS[attack.name]
    before = files_in(folder)
    capsys.readouterr()
    with FileFaults(folder, error, number) as faults:
        code = main([*arguments])
    printed = capsys.readouterr().err
    if code:
        # Whoever mends a config gets the exit code of a config. A run reads its own copy, also at
        # its end, as one of its files.
        expected = {1}
        if path.endswith(".yaml") and operation == "open":
            expected = {1, 2} if path.startswith("out/") else {2}
        assert code in expected, printed
        lines = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert lines, printed
        assert os.strerror(error) in printed
        top = path.removeprefix(".").partition("/")[0].partition(".")[0]
        assert top in lines[-1], lines[-1]

    # Nothing that was complete is missing.
    left = files_in(folder)
    assert {name: left.get(name) for name in before if name != "out"} == {
        name: content for name, content in before.items() if name != "out"
    }
    if attack.name in ("export-safetensors", "export-gguf"):
        assert left["out"] in (before["out"], attack.whole["out"])
    done = faults.operations[:number]
    if any(path.parent.name == "checkpoints" and path.name[:5] == "step-" for _, path in done):
        assert [*folder.glob("**/checkpoints/step-*/manifest.json")]

    if attack.name == "upcycle" and not (folder / "out/config.yaml").exists():
        again = arguments
    if attack.name == "export-hf" and (folder / "out").exists():
        again = ("inspect", "out")
    assert main([*again]) == 0, capsys.readouterr().err
    assert files_in(folder) == attack.whole


def attempt_all(
    attack: Attack, cases: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Call :func:`check_fault` for each operation and error, and name those that fail."""
    problems = []
    for number, error in cases:
        shutil.rmtree(attack.folder)
        shutil.copytree(attack.start, attack.folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(attack.folder)
            try:
                check_fault(attack, number, error, capsys)
            except (Exception, AssertionError) as failure:
                where = " ".join((*attack.operations[number], errno.errorcode[error]))
                problems.append(f"{number} {where}: {type(failure).__name__}: {failure}")
    assert not problems, f"{len(problems)} of {len(cases)}:\n" + "\n".join(problems)


@pytest.mark.parametrize("attack", [name for name in COMMANDS if name not in LONG], indirect=True)
def test_some_operations_fail(attack: Attack, capsys: pytest.CaptureFixture[str]) -> None:
    cases = []
    errors = sorted(ERRORS)
    for kind in ("create", "write", "fsync", "rename", "unlink", "mkdir"):
        places = [number for number in attack.places() if attack.operations[number][0] == kind]
        fitting = [error for error in errors if kind in ERRORS[error]]
        for number in places[len(places) // 4 :: max(1, len(places) // 2)]:
            cases.append((number, fitting[len(cases) % len(fitting)]))
    attempt_all(attack, cases, capsys)


@pytest.mark.extended
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
@pytest.mark.parametrize("attack", COMMANDS, indirect=True)
def test_every_operation_fails(
    attack: Attack, error: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = []
    for turn, number in enumerate(attack.places()):
        kind = attack.operations[number][0]
        fitting = [each for each in ERRORS if kind in ERRORS[each]]
        once = attack.name in LONG
        if error == fitting[turn % len(fitting)] or (error in fitting and not once):
            cases.append((number, error))
    attempt_all(attack, cases, capsys)

"""`arb train` started by torchrun, which restarts ranks, and with the variables of srun."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.environment import for_child

Compare = Callable[[Path, Path], None]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
#: A tracker, which only rank 0 has, that kills its process unless torchrun has restarted it.
KILLER = """
import os, signal
from arb_ternary import hookimpl
from arb_ternary.specs import TrackerSpec

ARB_API_VERSION = (1, 0)

class Killer:
    @hookimpl
    def arb_step_end(self, step):
        if step == 5 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)

def build(config):
    return Killer()

@hookimpl
def arb_register_trackers():
    return [TrackerSpec(name="killer", target="killer:build", summary="kills rank 0 once")]
"""


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Path:
    shape = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "max_length": 8,
        "group_size": 32,
        "float_parts": ["norms"],
    }
    phase = {
        "name": "standard",
        "steps": 8,
        "batch_size": 2,
        "block_size": 8,
        "gradient_accumulation_steps": 2,
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        dump_yaml(
            {
                "name": "run",
                "data": {"name": "text", "path": str(text), "tokenizer": "characters"},
                "model": {"name": "decoder", **shape},
                "optimizer": {
                    "name": "split",
                    "ternary": {"name": "sign_votes", "accum_threshold": 2},
                    "float": "adamw",
                },
                "threads": 1,
                "deterministic": True,
                "checkpoint": {"every": 3, "keep": 2},
                "phases": [{**phase, "eval_every": 4, "eval_batches": 3}],
            }
        )
    )
    return path


def command(config: Path, directory: Path, *more: str) -> list[str]:
    return ["-m", "arb_ternary", "train", str(config), "--run-dir", str(directory), *more]


def finish(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    # A plugin that a test writes can be imported too.
    paths = [str(Path(each).parent) for each in arguments if each.endswith(".yaml")]
    paths += [path for path in sys.path if path]
    environment = for_child(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths), **variables)
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow  # docs/test_many_machines.py starts torchrun in the normal tests
def test_torchrun_restarts_killed_ranks_with_the_same_bytes(
    config: Path, tmp_path: Path, same_files: Compare
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    with config.open("a") as file:
        file.write("plugins: [killer.py]\ntrackers: [killer]\n")
    one = tmp_path / "one"
    two = tmp_path / "two"
    alone = finish([sys.executable, *command(config, one)])
    assert alone.returncode == 0, alone.stderr
    launched = finish([*TORCHRUN, "--max-restarts", "1", *command(config, two)])
    assert launched.returncode == 0, launched.stderr
    assert "continuing from step-00000003" in launched.stderr
    # One progress display, before the kill and after it, and one report.
    assert launched.stderr.count("step 4: validation loss") == 1 + 1
    assert launched.stdout.count("tokens trained on") == 1
    same_files(one, two)


MANIFEST = """
version: 2
name: both
targets:
  - name: one
    system:
      ref: system.language_model
      config: {width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32, float_parts: [norms]}
    config:
      data: {name: text, path: TEXT, tokenizer: characters}
      threads: 1
      deterministic: true
      checkpoint: {every: 3, keep: 2}
      plugins: [killer.py]
      trackers: [killer]
    trainer: trainer.standard
    runs:
      - {id: first, mode: train, seed: 0, steps: 4, train: &train {
          batch_size: 2, block_size: 8, gradient_accumulation_steps: 2, eval_every: 4,
          eval_batches: 3}}
      - {id: second, mode: train, seed: 1, steps: 8, train: *train}
"""


def test_a_manifest_trains_on_ranks_and_is_restarted_with_the_same_bytes(
    text: Path, tmp_path: Path, same_files: Compare
) -> None:
    """The killer ends rank 0 in the second run, so that the first is finished at the restart."""
    (tmp_path / "killer.py").write_text(KILLER)
    manifest = tmp_path / "both.yaml"
    manifest.write_text(MANIFEST.replace("TEXT", str(text)))
    one = tmp_path / "one"
    runs = tmp_path / "runs"
    arguments = ["-m", "arb_ternary", "run", str(manifest), "--run-dir", str(runs)]
    alone = finish([sys.executable, *arguments])
    assert alone.returncode == 0, alone.stderr
    # The second run records the path of the first.
    runs.rename(one)
    launched = finish([*TORCHRUN, "--max-restarts", "1", *arguments])
    assert launched.returncode == 0, launched.stderr
    assert "continuing from step-00000003" in launched.stderr
    assert launched.stdout.count("finished already") == 1
    for name in ("first", "second"):
        same_files(one / "one" / name, runs / "one" / name)


@pytest.mark.slow
def test_torchrun_restarts_one_killed_process(
    config: Path, tmp_path: Path, same_files: Compare
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    with config.open("a") as file:
        file.write("plugins: [killer.py]\ntrackers: [killer]\n")
    one = tmp_path / "one"
    anew = tmp_path / "anew"
    assert finish([sys.executable, *command(config, one)]).returncode == 0
    launched = finish([*TORCHRUN[:-1], "1", "--max-restarts", "1", *command(config, anew)])
    assert launched.returncode == 0, launched.stderr
    assert "continuing from step-00000003" in launched.stderr
    same_files(one, anew)


@pytest.mark.slow
def test_a_restart_does_not_resume_a_refused_run(config: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    assert finish([sys.executable, *command(config, one)]).returncode == 0
    before = (one / "result.json").read_bytes()
    refused = finish([*TORCHRUN, "--max-restarts", "1", *command(config, one)])
    assert refused.returncode != 0
    assert "a run was started here already" in refused.stderr
    assert "continuing from" not in refused.stderr
    assert (one / "result.json").read_bytes() == before


@pytest.mark.slow
def test_stopped_torchrun_saves(config: Path, tmp_path: Path, same_files: Compare) -> None:
    long = [
        *command(config, tmp_path / "two"),
        "-o",
        "phases.0.steps=3000",
        "-o",
        "phases.0.eval_every=0",
    ]
    long += ["-o", "phases.0.eval_batches=8"]
    stopped = subprocess.Popen(
        [*TORCHRUN, *long],
        env=for_child(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not list((tmp_path / "two" / "checkpoints").glob("step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=120)
    assert "stopped by SIGTERM after step" in said
    assert stopped.returncode != 0
    assert not list((tmp_path / "two" / "checkpoints").glob(".writing-*"))


@pytest.mark.slow
def test_ranks_with_the_variables_of_srun(
    config: Path, tmp_path: Path, same_files: Compare
) -> None:
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert finish([sys.executable, *command(config, one)]).returncode == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURM_NTASKS": "2",
        "OMP_NUM_THREADS": "1",
    }
    children = [
        subprocess.Popen(
            [sys.executable, *command(config, two)], env=for_child(SLURM_PROCID=str(rank), **shared)
        )
        for rank in range(2)
    ]
    assert [child.wait(300) for child in children] == [0, 0]
    same_files(one, two)


@pytest.mark.slow
def test_ranks_with_different_configs_are_named(config: Path, tmp_path: Path) -> None:
    # Each rank reads a config of its own: the second one has another seed.
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text() + "seed: 7\n")
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\nfrom arb_ternary.cli.main import main\n"
        "sys.exit(main(['train', sys.argv[1 + int(os.environ['RANK'])], '--run-dir', "
        "sys.argv[3]]))\n"
    )
    ended = finish([*TORCHRUN, str(script), str(config), str(other), str(tmp_path / "two")])
    assert ended.returncode != 0
    assert "config: the ranks do not agree" in ended.stderr
    assert "seed: rank 0: 0" in ended.stderr
    assert "seed: rank 1: 7" in ended.stderr
    assert not (tmp_path / "two").exists()

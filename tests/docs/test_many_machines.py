"""The commands of docs/how-to/train-on-many-machines.md run, with fewer than 8 processes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "train-on-many-machines.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', PAGE, re.M | re.S))
COMMANDS = {
    name: text.strip().splitlines()
    for name, text in re.findall(
        r"<!-- run: ([\w ]+) -->\n```console\n(.*?)^```$", PAGE, re.M | re.S
    )
}


RUNNING: list[subprocess.Popen[str]] = []


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the files of the page; processes that still run in it are ended
    afterwards.
    """
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    yield tmp_path
    while RUNNING:
        with RUNNING.pop() as process:
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=60)


def started(folder: Path, line: str) -> subprocess.Popen[str]:
    """Start a command line of the page, with the programs of this environment and one thread."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ARB_", "PYTEST"))
    }
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    RUNNING.append(process)
    return process


def run(folder: Path, name: str) -> None:
    for line in COMMANDS[name]:
        done = started(folder, line)
        printed, _ = done.communicate(timeout=300)
        assert done.returncode == 0, f"{line}\n{printed}"


def same_run(one: Path, other: Path) -> bool:
    """Return whether the last checkpoints and the metrics have the same bytes."""
    files = [
        "metrics.jsonl",
        *(
            f"checkpoints/step-00000008/{file}"
            for file in ("model.safetensors", "state.safetensors")
        ),
    ]
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def workers(torchrun: subprocess.Popen[str]) -> list[int]:
    """Return the process ids that a torchrun has started."""
    return [
        int(pid)
        for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ]


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.05)


# tests/distributed compares the bytes of both in every test run.
@pytest.mark.extended
def test_two_processes_write_the_bytes_of_one(folder: Path) -> None:
    run(folder, "one machine")
    run(folder, "alone")
    run(folder, "compared")
    assert same_run(folder / "runs" / "many", folder / "runs" / "alone")


@pytest.mark.slow
def test_two_machines_meet_and_write_the_same(folder: Path) -> None:
    (line,) = COMMANDS["two machines"]
    for there, here in (
        ("--nproc_per_node 8", "--nproc_per_node 1"),
        ("first-machine", "localhost"),
        ("/shared/", ""),
    ):
        assert there in line
        line = line.replace(there, here)
    machines = [started(folder, line) for _ in range(2)]
    for machine in machines:
        printed, _ = machine.communicate(timeout=300)
        assert machine.returncode == 0, printed
    run(folder, "alone")
    assert same_run(folder / "runs" / "many", folder / "runs" / "alone")


@pytest.mark.slow
def test_killed_process_is_replaced_with_the_same_bytes(
    folder: Path,
) -> None:
    (line,) = COMMANDS["restarts"]
    running = started(folder, line)
    wait_for(folder / "runs" / "safe" / "checkpoints" / "step-00000002", running)
    os.kill(max(workers(running)), signal.SIGKILL)
    printed, _ = running.communicate(timeout=300)
    assert running.returncode == 0, printed
    run(folder, "alone")
    assert same_run(folder / "runs" / "safe", folder / "runs" / "alone")


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_four_processes_and_with_one(folder: Path) -> None:
    (line,) = COMMANDS["one machine"]
    (on_four, on_one) = COMMANDS["resume"]
    run(folder, "alone")
    for resume in (on_four, on_one):
        running = started(folder, line)
        wait_for(folder / "runs" / "many" / "checkpoints" / "step-00000002", running)
        os.kill(max(workers(running)), signal.SIGTERM)
        printed, _ = running.communicate(timeout=300)
        assert running.returncode != 0, printed
        assert "130" in printed
        assert not (folder / "runs" / "many" / "result.json").exists()
        done = started(folder, resume)
        printed, _ = done.communicate(timeout=300)
        assert done.returncode == 0, printed
        assert same_run(folder / "runs" / "many", folder / "runs" / "alone")
        (folder / "runs" / "many").rename(folder / "runs" / f"many-{resume.split()[0]}")


@pytest.mark.slow
def test_the_program_of_the_page_trains_by_two_processes(folder: Path) -> None:
    run(folder, "python")
    run(folder, "alone")
    assert same_run(folder / "runs" / "python", folder / "runs" / "alone")


def test_no_command_of_the_page_is_left_out() -> None:
    assert sorted(COMMANDS) == [
        "alone",
        "compared",
        "one machine",
        "python",
        "restarts",
        "resume",
        "two machines",
    ]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".sbatch")])
def test_slurm_scripts_train_the_config_of_the_page(name: str) -> None:
    subprocess.run(["bash", "-n", "-c", FILES[name]], check=True)
    assert " train many.yaml " in FILES[name]


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yml")])
def test_kubernetes_manifests_start_torchrun(name: str) -> None:
    *_, job = yaml.safe_load_all(FILES[name])
    spec = job["spec"]
    template = (
        spec["template"]
        if job["kind"] == "Job"
        else spec["pytorchReplicaSpecs"]["Worker"]["template"]
    )
    (container,) = template["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    assert words[0] == "torchrun"
    assert shlex.join(words).endswith("--run-dir /runs/many --resume")
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in template["spec"]["volumes"]
    }

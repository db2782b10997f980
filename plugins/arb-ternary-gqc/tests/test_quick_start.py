"""The quick start of torch-gqc and the examples of the README run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from arb_ternary_train.loading import load_config

SCRIPT = Path(__file__).with_name("quick_start.py")
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_quick_start_runs_with_one_import_changed(capsys: pytest.CaptureFixture[str]) -> None:
    ran = runpy.run_path(str(SCRIPT))
    optimizer = ran["optimizer"]
    statistics = optimizer.statistics()
    assert statistics["batches"] == 120
    assert statistics["steps"] == len(ran["step_batches"]) > 10
    # A step's micro-batches: those before it, as the statistics say, and the one that led to it.
    draws = [count + 1 for count in ran["num_batches_sampled"]]
    assert sum(draws) + statistics["num_draws"] == 120
    assert draws[0] == 1
    assert max(draws) > 1
    assert ran["loss"].item() < 1.0
    assert "norm_threshold=" in capsys.readouterr().err


def test_quick_start_differs_by_the_import_only() -> None:
    """The statements of the published text, in its order, without comments and its ellipses."""
    published = """
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
lr_scheduler = get_warmup_scheduler(optimizer, warmup_steps=500, ...)
optimizer = OptimizerWrapperGNTS(optimizer)
norm_scheduler = get_cosine_annealing_schedule(optimizer, warmup_steps=500, ...)
norm_scheduler = NormWarmupScheduler(norm_scheduler, warmup_steps= 500)
step_batches = []
num_batches_sampled = []
pbar = tqdm(train_loader, desc="Training")
for inputs, labels in pbar:
    stats = optimizer.statistics()
    logits = model(inputs)
    loss = cross_entropy(logits, labels)
    loss.backward()
    stepped = optimizer.step()
    lr_scheduler.step()
    norm_scheduler.step()
    if stepped:
        step_batches.append(stats['batches'])
        num_batches_sampled.append(stats['num_draws'])
    pbar.set_postfix(stats)
"""
    wanted = (
        published.replace("500, ...", "50")
        .replace("= 500", "=50")
        .replace("'", '"')
        .strip()
        .splitlines()
    )
    text = SCRIPT.read_text(encoding="utf-8").split("# --- the quick start")[1]
    code = [
        line for line in text.splitlines()[1:] if line.strip() and not line.strip().startswith("#")
    ]
    assert code[0] == "from arb_ternary_gqc import OptimizerWrapperGNTS, NormWarmupScheduler"
    assert code[1] == "from tqdm import tqdm"
    assert code[2:] == wanted


def test_readme_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (loop,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    exec(compile(loop, "README.md", "exec"), {})
    assert "'batches': 1000" in capsys.readouterr().out


def test_readme_config_is_valid(tmp_path: Path) -> None:
    (section,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
    path = tmp_path / "run.yaml"
    base = {
        "name": "run",
        "data": "shakespeare",
        "model": {"name": "decoder", "float_parts": ["head"]},
    }
    path.write_text(yaml.safe_dump({**base, "phases": ["standard"], **yaml.safe_load(section)}))
    assert load_config(path).config.optimizer.options.schedule.warmup_batches == 500

"""The axolotl plugin of the examples has the signatures of ``BasePlugin``, and trains in a Trainer.

axolotl itself is not installed: methods and arguments are those of
``src/axolotl/integrations/base.py`` at commit 067b021c, and the order of calls that of ``train.py``
and ``loaders/model.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import Trainer, TrainingArguments

from arb_ternary.errors import UsageProblem

FOLDER = Path(__file__).parents[4] / "docs" / "examples" / "axolotl"
SIGNATURES = {
    "get_input_args": [],
    "post_model_load": ["cfg", "model"],
    "post_trainer_create": ["cfg", "trainer"],
    "add_callbacks_post_trainer": ["cfg", "trainer"],
}


class Config(dict[str, Any]):
    """As ``DictDefault``: keys are attributes, and a key that is missing is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not FOLDER.is_dir():
        pytest.skip("the examples are not here")
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    name = "arb_ternary_axolotl"
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, found)
    spec.loader.exec_module(found)
    return found


def test_its_methods_are_those_of_base_plugin(module: ModuleType) -> None:
    methods = {
        name: list(inspect.signature(method).parameters)[1:]
        for name, method in vars(module.ArbTernaryPlugin).items()
        if inspect.isfunction(method)
    }
    assert methods == SIGNATURES
    path, _, name = module.ArbTernaryPlugin().get_input_args().rpartition(".")
    assert getattr(sys.modules[path], name) is module.ArbTernaryArgs


def config(module: ModuleType, **changes: Any) -> Config:
    """Return the example as axolotl gives it to plugins: with the defaults of their keys."""
    given = {**yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8")), **changes}
    keys = module.ArbTernaryArgs.model_validate(given).model_dump()
    return Config({**given, **keys})


def test_a_model_learns_with_the_example_config(
    llama: Any, module: ModuleType, tmp_path: Path
) -> None:
    cfg = config(module, votes_lr=0.4, learning_rate=0.02, ternary_group_size=32)
    assert cfg.plugins == ["arb_ternary_axolotl.ArbTernaryPlugin"]
    plugin = module.ArbTernaryPlugin()
    model = llama.float_model()
    plugin.post_model_load(cfg, model)
    options = {**llama.arguments(), "save_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(tmp_path, **options), train_dataset=llama.rows())
    for callback in plugin.add_callbacks_post_trainer(cfg, trainer):
        trainer.add_callback(callback)
    plugin.post_trainer_create(cfg, trainer)
    trainer.train()
    assert llama.loss(model) < llama.kit.Bigram.entropy + 0.1
    assert trainer.state.log_history[0]["flips"] > 0
    # A model that is loaded ternary stays as it is.
    before = llama.kit.integers(model)
    plugin.post_model_load(cfg, model)
    assert llama.kit.same(before, llama.kit.integers(model))


def test_an_adapter_is_refused(llama: Any, module: ModuleType) -> None:
    with pytest.raises(UsageProblem, match="adapter: lora adapts float weights"):
        module.ArbTernaryPlugin().post_model_load(config(module, adapter="lora"), llama.model())

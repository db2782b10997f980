"""Every registered optimizer on two ranks: the bytes of one process, or a refusal by name.

The list comes from the registry: an installed rule is tested without an edit here, and one that
several ranks refuse has to be named here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from arb_ternary.config.choice import OptimizerChoice
from arb_ternary.config.options import DEFAULT_CHOICE
from arb_ternary.config.structure import options_class
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.plugins.manager import manager

#: Optimizers that several ranks refuse, and the message.
REFUSED = {
    **{
        f"gqc.{name}": f"optimizer 'gqc.{name}': it defers steps"
        for name in ("gns", "gnts", "mht", "sbc")
    },
}
#: Optimizers in `make test`.
NORMAL = {"scaled_votes"}
FLOATS = ["embedding", "head", "norms", "linears"]


def registered() -> list[Any]:
    """Return the optimizers that train models of the decoder."""
    return list(manager().registry.all("optimizer"))


def section(found: Any) -> dict[str, Any]:
    """Return a config section of an optimizer whose rule flips soon; a wrapper wraps `split`."""
    cls = options_class(found.spec)
    fields: dict[str, Any] = {}
    if cls is not None:
        fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cls))}
    chosen: dict[str, Any] = {"name": found.spec.name}
    chosen.update({name: 2 for name in ("accum_threshold", "e_accum_threshold") if name in fields})
    for name, field in fields.items():
        has_default = field.default is not attrs.NOTHING or DEFAULT_CHOICE in field.metadata
        if field.type is OptimizerChoice and not has_default:
            chosen[name] = "split"
    return chosen


def config_of(found: Any, text: Path) -> dict[str, Any]:
    accepts = found.spec.accepts
    parts = ["norms", "head"]
    if accepts == {"ternary"}:
        parts = []
    elif accepts == {"float"}:
        parts = FLOATS
    shape: dict[str, Any] = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "max_length": 8,
        "float_parts": parts,
    }
    if "ternary" in accepts:
        shape["group_size"] = 32
    phase = {
        "name": "standard",
        "steps": 6,
        "batch_size": 2,
        "block_size": 8,
        "eval_every": 4,
        "eval_batches": 3,
        "gradient_accumulation_steps": 3,
    }
    return {
        "name": "same",
        "data": {"name": "text", "path": str(text), "tokenizer": "characters"},
        "model": {"name": "decoder", **shape},
        "optimizer": section(found),
        "threads": 1,
        "deterministic": True,
        "checkpoint": {"every": 3, "keep": 5},
        "phases": [phase],
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(found.spec.name, marks=() if found.spec.name in NORMAL else pytest.mark.slow)
        for found in registered()
    ],
)
def test_an_optimizer_gives_the_same_bytes_or_is_refused(
    ranks: Any, text: Path, same_files: Callable[[Path, Path], None], name: str
) -> None:
    (found,) = [each for each in registered() if each.spec.name == name]
    config = ranks.folder / "registered.yaml"
    config.write_text(dump_yaml(config_of(found, text)))
    one, two = (ranks.folder / f"{name} {size}" for size in (1, 2))
    if name in REFUSED:
        ended = ranks.run(config, two, size=2)
        assert ended.codes == [2, 2]
        assert all(REFUSED[name] in said for said in ended.said)
        assert not two.exists()
    else:
        ranks.must(config, one)
        ranks.must(config, two, size=2)
        same_files(one, two)

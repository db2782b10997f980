"""The ways of training that the training bench compares, and the config of each."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.plugins.manager import manager
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import structure_run

#: Parts of names, and what they mean.
_PURE: Final = "pure"
_INT8: Final = "int8"
_BFLOAT16: Final = "bfloat16"
_COMPILED: Final = "compiled"
#: Not by autocast: the residual stream and float parameters too.
_ALL_BFLOAT16: Final = "all-bfloat16"
#: Ways without votes.
FLOAT_WAYS: Final = (
    "qat",
    "qat/compiled",
    "qat/bfloat16",
    "qat/bfloat16/compiled",
    "float32",
    "float32/compiled",
    "bfloat16",
    "bfloat16/compiled",
)
_VOTE_ENDS: Final = ("", "/int8", "/bfloat16", "/int8/bfloat16", "/int8/all-bfloat16")
#: Parts that are float in a model without ternary weights.
_FLOAT_PARTS: Final = ["embedding", "head", "linears"]
#: Rates: that of the examples for votes, and one for AdamW at which the loss of every size falls.
_VOTE_RATE: Final = 0.1
_RATE: Final = 1e-3


@frozen
class TrainWay:
    """A way of training, by its name.

    ``cpu/pure/int8/bfloat16``: votes on the backend ``cpu``, embedding and head ternary too
    (otherwise float32, by AdamW), int8 gradients (otherwise float), activations in bfloat16 by
    autocast (otherwise float32; ``all-bfloat16``: by the option ``dtype``, the residual stream and
    float parameters too). ``float32`` and ``bfloat16``: no ternary weight, AdamW, activations in
    float32 or by autocast in bfloat16. ``qat``: float32 weights that are made ternary in every
    pass. ``.../compiled``: through ``torch.compile``.
    """

    name: str

    @property
    def _parts(self) -> list[str]:
        return self.name.split("/")

    @property
    def compiled(self) -> bool:
        """Whether it runs through ``torch.compile``."""
        return self._parts[-1] == _COMPILED

    @property
    def role(self) -> str:
        """``votes``, ``qat`` or ``float``."""
        first = self._parts[0]
        if first in ("float32", _BFLOAT16):
            return "float"
        return "qat" if first == "qat" else "votes"

    @property
    def backend(self) -> str | None:
        """The backend that casts votes, or None without votes."""
        return self._parts[0] if self.role == "votes" else None

    @property
    def autocasts(self) -> bool:
        """Whether activations are bfloat16 by autocast."""
        return _BFLOAT16 in self._parts

    def what(self) -> str:
        """Describe it in words."""
        activations = "bfloat16 by autocast" if self.autocasts else "float32"
        if _ALL_BFLOAT16 in self._parts:
            activations = "and all that is float bfloat16"
        if self.role == "votes":
            parts = "every weight" if _PURE in self._parts else "linears"
            gradients = "int8" if _INT8 in self._parts else "float"
            return f"votes for {parts}, gradients {gradients}, activations {activations}"
        kind = "BitNet b1.58 with float32" if self.role == "qat" else "float32"
        compiled = ", through torch.compile" if self.compiled else ""
        return f"{kind} weights and fused AdamW, activations {activations}{compiled}"

    def config(self, size: TrainSize, seed: int = 0) -> RunConfig:
        """Return the config of a run that trains in this way; its data are never read.

        Raises:
            ConfigError: a plugin that it needs is not installed.
        """
        plain: dict[str, Any] = {
            "name": "bench",
            "seed": seed,
            "data": {"name": "shakespeare"},
            "model": {"name": "decoder", **size.model(), **self._model(size)},
            "optimizer": self._optimizer(),
            "phases": [self._phase(size)],
            "checkpoint": {"every": 0},
        }
        if self.backend is not None:
            plain["backend"] = self.backend
        document = Document(plain, f"arb bench train, {self.name}")
        return structure_run(document, manager().registry).config

    def _model(self, size: TrainSize) -> dict[str, Any]:
        if self.role == "float":
            return {"float_parts": _FLOAT_PARTS, "activations": "float"}
        if self.role == "qat":
            return {"name": "bitnet", "float_parts": _FLOAT_PARTS}
        model: dict[str, Any] = {"group_size": size.group_size, "scale_rule": "frozen"}
        if _PURE in self._parts:
            model |= {"float_parts": [], "embedding_scale_rule": "frozen"}
        else:
            model["float_parts"] = ["embedding", "head"]
        if _INT8 in self._parts:
            model["gradients"] = "int8"
        return model

    def _optimizer(self) -> dict[str, Any]:
        floats = {"name": "adamw", "lr": _RATE}
        if self.role == "float":
            return floats
        if self.role == "qat":
            return {"name": "bitnet_adamw", "lr": _RATE}
        votes = {"name": "scaled_votes", "lr": _VOTE_RATE}
        if _PURE in self._parts:
            return votes
        return {"name": "split", "ternary": votes, "float": floats}

    def _phase(self, size: TrainSize) -> dict[str, Any]:
        phase: dict[str, Any] = {
            "name": "standard",
            "steps": 1,
            "batch_size": size.batch,
            "block_size": size.block,
            "lr_schedule": "none",
        }
        if self.autocasts:
            phase["use_amp"] = True
        if _ALL_BFLOAT16 in self._parts:
            phase["dtype"] = _BFLOAT16
        if self.compiled:
            phase["compile_model"] = True
        return phase


def train_ways(backends: Sequence[str], *, compiled: bool = True) -> tuple[TrainWay, ...]:
    """Return all ways: votes on each backend, then the ways without votes."""
    names = []
    for backend in backends:
        for kind in (backend, f"{backend}/{_PURE}"):
            names += [f"{kind}{end}" for end in _VOTE_ENDS]
    ways = map(TrainWay, (*names, *FLOAT_WAYS))
    return tuple(way for way in ways if compiled or not way.compiled)


def chosen_ways(ways: Sequence[TrainWay], patterns: Sequence[str]) -> tuple[TrainWay, ...]:
    """Return the ways whose name matches one of the patterns, in which ``*`` stands for anything.

    Raises:
        UsageProblem: a pattern matches none.
    """
    names = [way.name for way in ways]
    chosen: set[str] = set()
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            close = nearest(pattern, names)
            suggestion = f"; did you mean {close!r}?" if close else ""
            raise UsageProblem(
                f"--trainees: {pattern!r} matches no way of training{suggestion}",
                f"There are: {', '.join(names)}",
            )
        chosen.update(found)
    return tuple(way for way in ways if way.name in chosen)

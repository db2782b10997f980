"""The methods of training that are compared, and the config of each."""

from __future__ import annotations

from typing import Any, Final

from attrs import frozen

from _training.sizes import TrainSize

#: Parts that are float in a model without ternary weights.
_FLOAT_PARTS: Final = ["embedding", "head", "linears"]
#: Rates: that of the examples for votes, and one for AdamW at which the loss of every size falls.
_VOTE_RATE: Final = 0.1
_RATE: Final = 1e-3


@frozen
class Method:
    """A method of training, by its name.

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
    def role(self) -> str:
        """``votes``, ``qat`` or ``float``."""
        first = self._parts[0]
        if first in ("float32", "bfloat16"):
            return "float"
        return "qat" if first == "qat" else "votes"

    def config(self, size: TrainSize, tokens: str, steps: int, device: str) -> dict[str, Any]:
        """Return the config of a run on a file of tokens that trains in this way."""
        plain: dict[str, Any] = {
            "name": "training",
            "device": device,
            "data": {"name": "tokens", "train": tokens, "vocabulary_size": size.vocabulary},
            "model": {"name": "decoder", **size.model(), **self._model(size)},
            "optimizer": self._optimizer(),
            "phases": [self._phase(size, steps)],
            "checkpoint": {"every": 0},
        }
        if self.role == "votes":
            plain["backend"] = self._parts[0]
        return plain

    def _model(self, size: TrainSize) -> dict[str, Any]:
        if self.role == "float":
            return {"float_parts": _FLOAT_PARTS, "activations": "float"}
        if self.role == "qat":
            return {"name": "bitnet", "float_parts": _FLOAT_PARTS}
        model: dict[str, Any] = {"group_size": size.group_size, "scale_rule": "frozen"}
        if "pure" in self._parts:
            model |= {"float_parts": [], "embedding_scale_rule": "frozen"}
        else:
            model["float_parts"] = ["embedding", "head"]
        if "int8" in self._parts:
            model["gradients"] = "int8"
        return model

    def _optimizer(self) -> dict[str, Any]:
        floats = {"name": "adamw", "lr": _RATE}
        if self.role == "float":
            return floats
        if self.role == "qat":
            return {"name": "bitnet_adamw", "lr": _RATE}
        votes = {"name": "scaled_votes", "lr": _VOTE_RATE}
        if "pure" in self._parts:
            return votes
        return {"name": "split", "ternary": votes, "float": floats}

    def _phase(self, size: TrainSize, steps: int) -> dict[str, Any]:
        phase: dict[str, Any] = {
            "name": "standard",
            "steps": steps,
            "batch_size": size.batch,
            "block_size": size.block,
            "lr_schedule": "none",
            "eval_every": 0,
        }
        if "bfloat16" in self._parts:
            phase["use_amp"] = True
        if "all-bfloat16" in self._parts:
            phase["dtype"] = "bfloat16"
        if "compiled" in self._parts:
            phase["compile_model"] = True
        return phase

"""The ways of training that take part in the training bench, and the config of each."""

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

#: Ends of names, in this order, and what they mean.
_PURE = "pure"
_INT8 = "int8"
_BFLOAT16 = "bfloat16"
_COMPILED = "compiled"
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
# : Rates: those of the examples for votes, and a cautious one for AdamW, at which the loss of every
# size falls.
_LR: Final = 1e-3


@frozen
class TrainWay:
    """A way of training, by its name.

    ``cpu/pure/int8/bfloat16``: votes on the backend ``cpu``, embedding and head ternary too (else
    float32, by AdamW), int8 gradients (else float ones), activations in bfloat16 by autocast (else
    float32; ``all-bfloat16``: by the option ``dtype``, the residual stream and float parameters
    too). ``float32`` and ``bfloat16``: no ternary weight, AdamW, activations in float32 or by
    autocast in bfloat16. ``qat``: float32 weights that are made ternary in every pass.
    ``.../compiled``: through ``torch.compile``.
    """

    name: str

    @property
    def compiled(self) -> bool:
        return self.name.endswith(f"/{_COMPILED}")

    @property
    def backend(self) -> str | None:
        """Whose votes are cast; None where none are."""
        first = self._parts[0]
        return None if first in ("qat", "float32", _BFLOAT16) else first

    @property
    def role(self) -> str:
        """``votes``, ``qat`` or ``float``."""
        first = self._parts[0]
        return "votes" if self.backend else "qat" if first == "qat" else "float"

    @property
    def autocasts(self) -> bool:
        return _BFLOAT16 in self._parts

    @property
    def _parts(self) -> list[str]:
        return self.name.split("/")

    def what(self) -> str:
        """In words."""
        activations = "bfloat16 by autocast" if self.autocasts else "float32"
        if _ALL_BFLOAT16 in self._parts:
            activations = "and all that is float bfloat16"
        compiled = ", through torch.compile" if self.compiled else ""
        if self.role == "float":
            return f"float32 weights and fused AdamW, activations {activations}{compiled}"
        if self.role == "qat":
            return (
                f"BitNet b1.58 with float32 weights and fused AdamW, activations "
                f"{activations}{compiled}"
            )
        parts = "every weight" if _PURE in self._parts else "linears"
        gradients = "int8" if _INT8 in self._parts else "float"
        return f"votes for {parts}, gradients {gradients}, activations {activations}"

    def config(self, size: TrainSize, seed: int = 0) -> RunConfig:
        """The config of a run that trains in this way; its data are never read.

        Raises:
            ConfigError: a plugin that it needs is not installed.
        """
        floats = ["embedding", "head"] if _PURE not in self._parts else []
        model: dict[str, Any] = {"name": "decoder", **size.model()}
        optimizer: dict[str, Any]
        if self.role == "float":
            model |= {"float_parts": ["embedding", "head", "linears"], "activations": "float"}
            optimizer = {"name": "adamw", "lr": _LR}
        elif self.role == "qat":
            model |= {"name": "bitnet", "float_parts": ["embedding", "head", "linears"]}
            optimizer = {"name": "bitnet_adamw", "lr": _LR}
        else:
            model |= {"float_parts": floats, "group_size": size.group_size, "scale_rule": "frozen"}
            if _INT8 in self._parts:
                model["gradients"] = "int8"
            votes = {"name": "scaled_votes", "lr": 0.1}
            if floats:
                optimizer = {
                    "name": "split",
                    "ternary": votes,
                    "float": {"name": "adamw", "lr": _LR},
                }
            else:
                model["embedding_scale_rule"] = "frozen"
                optimizer = votes
        phase: dict[str, Any] = {
            "name": "standard",
            "steps": 1,
            "batch_size": size.batch,
            "block_size": size.block,
        }
        phase["lr_schedule"] = "none"
        if self.autocasts:
            phase["use_amp"] = True
        if _ALL_BFLOAT16 in self._parts:
            phase["dtype"] = _BFLOAT16
        if self.compiled:
            phase["compile_model"] = True
        plain = {
            "name": "bench",
            "seed": seed,
            "data": {"name": "shakespeare"},
            "model": model,
            "optimizer": optimizer,
            "phases": [phase],
            "checkpoint": {"every": 0},
        }
        if self.backend is not None:
            plain["backend"] = self.backend
        return structure_run(
            Document(plain, f"arb bench train, {self.name}"), manager().registry
        ).config


def train_ways(backends: Sequence[str], *, compiled: bool = True) -> tuple[TrainWay, ...]:
    """Everything that there is: votes on each backend, then the ways without."""
    votes = [
        f"{each}{pure}{end}" for each in backends for pure in ("", "/pure") for end in _VOTE_ENDS
    ]
    ways = map(TrainWay, (*votes, *FLOAT_WAYS))
    return tuple(way for way in ways if compiled or not way.compiled)


def chosen_ways(ways: Sequence[TrainWay], patterns: Sequence[str]) -> tuple[TrainWay, ...]:
    """Those of ``ways`` whose names one of ``patterns`` fits (``*`` stands for anything), in their
    order.

    Raises:
        UsageProblem: a pattern fits none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(way.name, pattern) for way in ways):
            close = nearest(pattern, [way.name for way in ways])
            raise UsageProblem(
                f"--trainees: {pattern!r} fits no way of training"
                + (f"; did you mean {close!r}?" if close else ""),
                f"There are: {', '.join(way.name for way in ways)}",
            )
    return tuple(way for way in ways if any(fnmatchcase(way.name, pattern) for pattern in patterns))

"""The ``quantization_config`` of ``from_pretrained`` and of ``config.json``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Unpack

from transformers.utils.quantization_config import QuantizationConfigMixin

from arb_ternary.errors import CheckpointError, UsageProblem, nearest
from arb_ternary.ternary.module import GroupSize, VoteOptions
from arb_ternary_trainers.replacement import Init

METHOD: Final = "arb_ternary"
BITNET: Final = "bitnet"
#: Version of the form in which ``save_pretrained`` writes ternary weights.
FORMAT_VERSION: Final = 1
#: Options that say which weights of a float checkpoint become ternary, and how.
ROUNDING: Final = ("include", "exclude", "init")
#: Options of the ternary modules, which a checkpoint has.
OF_MODULES: Final = ("group_size", "activations", "gradients", "scale_rule", "vote_bits")


class ArbTernaryConfig(QuantizationConfigMixin):
    """Load a model of transformers with ternary weights: ``from_pretrained(path,
    quantization_config=ArbTernaryConfig())``.

    The checkpoint may have float weights, which are rounded; weights that ``save_pretrained`` of
    such a model wrote, which continue with the same bits; or packed and scaled trits in the layout
    of BitNet, which are kept as they are. Float weights with ternary values are kept too.

    Options are those of :func:`arb_ternary.ternarize`, with its defaults. Of a checkpoint that has
    trits, options that are not given are its own, and others must not differ from it.

    Args:
        include: names of modules, or patterns, of a float checkpoint; None includes everything.
        exclude: what stays float, in the same way.
        init: ``absmean``, ``gptq`` or ``random``.
        group_size: columns that share an exponent.
        activations: ``int8`` or ``float``.
        calibration: for ``gptq``: a list of batches, or a list of texts, for which the tokenizer is
            loaded from where the model is.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`.

    Raises:
        UsageProblem: there is no such option.
    """

    def __init__(
        self,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        init: Init | None = None,
        *,
        group_size: GroupSize | None = None,
        activations: Literal["int8", "float"] | None = None,
        calibration: Iterable[Any] | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        known = VoteOptions.__annotations__
        for name in options:
            if name not in known:
                close = nearest(name, [*ROUNDING, *OF_MODULES, "calibration", "backend"])
                raise UsageProblem(
                    f"ArbTernaryConfig: {name!r} is not one of its options",
                    f"did you mean {close!r}?" if close else "Leave it out.",
                )
        given: dict[str, Any] = {
            "include": include,
            "exclude": exclude,
            "init": init,
            "group_size": group_size,
            "activations": activations,
            **options,
        }
        self.quant_method: Any = METHOD
        self.calibration = calibration
        #: The options that were given.
        self.given: dict[str, Any] = {}
        #: The ``quantization_config`` of a checkpoint in the layout of BitNet.
        self.bitnet: Mapping[str, Any] | None = None
        for name, value in given.items():
            if value is not None:
                self.given[name] = list(value) if name in ("include", "exclude") else value

    def __deepcopy__(self, memo: object) -> ArbTernaryConfig:
        """Copy the options; a DataLoader that calibrates need not be copied, and some cannot be."""
        copied = copy.copy(self)
        copied.given = dict(self.given)
        return copied

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the config that :meth:`to_dict` wrote.

        Raises:
            CheckpointError: a newer version wrote it.
            UsageProblem: it has an option that does not exist.
        """
        options = dict(config_dict)
        options.pop("quant_method", None)
        version = options.pop("format_version", FORMAT_VERSION)
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"config.json: the ternary weights are in version {version!r} of their format, and "
                f"this program reads version {FORMAT_VERSION}",
                "pip install --upgrade arb-ternary-trainers",
            )
        config = cls(**options)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return the options as ``config.json`` has them: without calibration and backend."""
        written = {name: value for name, value in self.given.items() if name != "backend"}
        return {"quant_method": METHOD, "format_version": FORMAT_VERSION, **written}

    def for_checkpoint(self, found: Any) -> ArbTernaryConfig:
        """Return the config with which to load a checkpoint that has a ``quantization_config``.

        Raises:
            UsageProblem: an option contradicts it, or it is that of another program.
        """
        values = dict(found) if isinstance(found, Mapping) else found.to_dict()
        method = str(values.get("quant_method"))
        if method == METHOD:
            own = self.from_dict(values)
            self._check_against(own.given)
            own.given.update(self.given)
            return own  # type: ignore[no-any-return]
        if method != BITNET:
            raise UsageProblem(
                f"quantization_config: the checkpoint is quantized by {method}, and its weights "
                f"are neither float nor ternary",
                "Give the float checkpoint that it was made from.",
            )
        self._check_against({"activations": "int8"})
        config = copy.deepcopy(self)
        config.bitnet = values
        return config

    def _check_against(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse options that a checkpoint with trits contradicts."""
        if self.calibration is not None:
            raise UsageProblem(
                "calibration: the checkpoint has ternary weights, so nothing is fitted to it",
                "Leave calibration out, or give a float checkpoint.",
            )
        for name in (*ROUNDING, *OF_MODULES):
            if name not in self.given:
                continue
            if name in checkpoint and checkpoint[name] == self.given[name]:
                continue
            if name in checkpoint or name in ROUNDING:
                raise UsageProblem(
                    f"{name}: {self.given[name]!r} was given, and the weights of the checkpoint "
                    f"have {checkpoint.get(name, 'been chosen already')!r}",
                    f"Leave {name} out, or give a float checkpoint.",
                )

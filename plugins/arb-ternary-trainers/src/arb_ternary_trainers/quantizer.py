"""Ternary weights in ``from_pretrained`` and ``save_pretrained`` of transformers.

Importing this module registers the quantization method ``arb_ternary``. transformers has no entry
points, so a program that loads a saved model without :class:`.ArbTernaryConfig` has to import it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Unpack

import torch
from attrs import evolve
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import (
    AutoHfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from arb_ternary.errors import CheckpointError, UsageProblem
from arb_ternary.ternary.module import GroupSize, TernaryModule, VoteOptions
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.scales import coarsest_grouping, split_scales
from arb_ternary_interchange.huggingface.dense_ternary import ternary_parts
from arb_ternary_interchange.huggingface.packing import unpack
from arb_ternary_trainers.layers import TernaryLayer, ternary_class, ternary_layers
from arb_ternary_trainers.quantization_config import (
    METHOD,
    OF_MODULES,
    ROUNDING,
    ArbTernaryConfig,
)
from arb_ternary_trainers.replacement import (
    Init,
    adopt,
    check_init,
    dense,
    new_module,
    set_initial,
    ternarize,
)
from arb_ternary_trainers.selection import Target
from arb_ternary_trainers.ternary_values import scaled_trits
from arb_ternary_trainers.unapplied import watch

#: The state of a ternary module, as ``save_pretrained`` writes it.
_STATE: Final = (
    "weight",
    "exponent",
    "exponent_origin",
    "votes",
    "exponent_votes",
    "control",
    "factor",
)
_SCALE: Final = "weight_scale"


class _Collect(ConversionOps):
    """Keeps the tensors of a ternary weight until the model is loaded; its parameter stays meta.

    transformers then ties parameters as usual, and layers become ternary with their ties.
    """

    def __init__(self, quantizer: ArbTernaryQuantizer) -> None:
        self.quantizer = quantizer
        #: The dtype that the weight would have as a parameter.
        self.dtype: torch.dtype | None = None

    def __deepcopy__(self, memo: object) -> _Collect:
        """Return one for another weight: transformers copies the first for each."""
        return _Collect(self.quantizer)

    def convert(  # type: ignore[override]  # transformers passes these by name
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str],
        **_: object,
    ) -> dict[str, Any]:
        """Return a float weight, or nothing after a ternary weight was kept."""
        tensors = {}
        for pattern, found in input_dict.items():
            name = pattern.rstrip("$").rpartition(".")[2]
            tensors[name] = found[0] if isinstance(found, list) else found
        weight = tensors.get("weight")
        is_float = self.quantizer.quantization_config.bitnet and tensors.keys() == {"weight"}
        if is_float and weight is not None and weight.is_floating_point():
            return {full_layer_name: weight.to(self.dtype)}

        layer_name = full_layer_name.removesuffix(".weight")
        self.quantizer.kept[layer_name] = tensors
        values = torch.empty_like(model.get_parameter(full_layer_name), dtype=self.dtype)
        parameter: Any = nn.Parameter(values)
        parameter._is_hf_initialized = True
        model.get_submodule(layer_name).weight = parameter
        missing_keys.discard(full_layer_name)
        return {}


@register_quantizer(METHOD)
class ArbTernaryQuantizer(HfQuantizer):
    """Makes weights ternary after they are loaded; the method ``arb_ternary`` of transformers.

    Attributes:
        quantization_config: the options.
        kept: the tensors of ternary weights by the names of their layers, while a model is loaded.
    """

    quantization_config: ArbTernaryConfig

    def __init__(self, quantization_config: ArbTernaryConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.kept: dict[str, dict[str, Tensor]] = {}

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Refuse several devices, and an ``init`` that cannot work, before weights are loaded."""
        if isinstance(device_map, Mapping):
            devices = {str(device) for device in device_map.values()}
            if len(devices) > 1 or devices & {"disk", "meta"}:
                raise UsageProblem(
                    f"device_map: ternary weights learn on one device, and it places the model on "
                    f"{', '.join(sorted(devices))}",
                    "Give device_map={'': 0}, or leave it out.",
                )
        if not self.pre_quantized:
            config = self.quantization_config
            check_init(config.given.get("init", "absmean"), config.calibration)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        """Load the tensors of ternary weights as they are, and note the dtype of the weight."""
        for operation in getattr(converter, "operations", ()):
            if isinstance(operation, _Collect):
                operation.dtype = dtype
                return None
        return super().get_new_dtype(converter, param, dtype)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return how the tensors of a ternary weight become one weight: they are kept for later."""
        if not self.pre_quantized:
            return []
        if self.quantization_config.bitnet:
            patterns = [rf"\.{_SCALE}$", r"\.weight$"]
        else:
            patterns = [rf"\.ternary\.{name}$" for name in _STATE]
        return [WeightConverter(patterns, ".weight", [_Collect(self)])]

    def _process_model_after_weight_loading(self, model: Any, **_: object) -> None:
        """Make the weights of a loaded model ternary."""
        # transformers refuses half(), float() and torch.compile of models that it calls quantized.
        model.is_quantized = False
        config = self.quantization_config
        options = dict(config.given)
        if self.pre_quantized:
            # The conversion back, when the model is saved, has nothing to do.
            model._weight_conversions = [
                each for each in model._weight_conversions if not _collects(each)
            ]
            rounding = [options.pop(name, None) for name in ROUNDING]
            self._adopt_kept(model, **options)
            _check_values(model)
            attach(model, *rounding)
            watch(model)
            return
        _check_values(model)
        if config.calibration is not None:
            options["calibration"] = _batches(model, config.calibration)
        ternarize(model, **options)

    def _adopt_kept(
        self,
        model: PreTrainedModel,
        group_size: GroupSize | None = None,
        activations: str = "int8",
        **options: Unpack[VoteOptions],
    ) -> None:
        """Make the layers ternary whose tensors were kept."""
        bitnet = self.quantization_config.bitnet
        if not self.kept:
            raise CheckpointError(
                f"{model.config.name_or_path}: its config.json announces ternary weights, and it "
                f"has none",
                "Remove 'quantization_config' from config.json to load it as a float model.",
            )
        if group_size is None:
            group_size = self._coarsest_group()
        for name, target in _targets(model, self.kept):
            tensors = self.kept[name]
            ternary = new_module(target, group_size, activations, options, draws=False)
            if bitnet is None:
                _load_state(name, ternary, tensors)
            else:
                trits = _bitnet_trits(name, tensors, bitnet)
                if tuple(trits.trits.shape) != target.size:
                    raise CheckpointError(
                        f"{name}: the checkpoint has {list(trits.trits.shape)} trits, and the "
                        f"model {list(target.size)}"
                    )
                initial = scaled_trits(name, trits, group_size, ternary.shape.vote_bits)
                set_initial(ternary, initial)
            ternary.to(tensors["weight"].device)
            adopt(target, ternary)
        self.kept.clear()

    def _coarsest_group(self) -> GroupSize:
        """Return the coarsest groups that hold the scales of all kept weights."""
        bitnet = self.quantization_config.bitnet
        if bitnet is None:
            raise CheckpointError("config.json: 'quantization_config' has no 'group_size'")
        found = []
        for name, tensors in self.kept.items():
            found.append(split_scales(name, _bitnet_trits(name, tensors, bitnet)).grouping)
        grouping = coarsest_grouping(found)
        return 128 if grouping == "tensor" else grouping

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Note the options of the ternary modules, which ``config.json`` then has.

        Raises:
            UsageProblem: they are not the same for all modules.
        """
        first, *others = ternary_layers(model)
        name, layer = first
        options = _options_of(layer)
        for other_name, other in others:
            for option, value in _options_of(other).items():
                if value != options[option]:
                    raise UsageProblem(
                        f"save_pretrained: {option} is {options[option]!r} for {name}, and "
                        f"{value!r} for {other_name}; config.json has one for all",
                        "Give ternarize the same options for all layers, or save "
                        "model.state_dict() with torch.save.",
                    )
        self.quantization_config.given.update(options)
        return None, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Return the model with float weights ``T * 2**E``; for ``model.dequantize()``."""
        dense(model)
        return model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def is_serializable(self) -> bool:
        """``save_pretrained`` can write the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Ternary weights learn."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Ternary weights learn without adapters."""
        return True


def attach(
    model: Any,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    init: Init | None,
) -> None:
    """Let ``save_pretrained`` of a model with ternary layers write them, and tie them no more.

    Tied ternary layers share a module. transformers would tie parameters, which they have not.
    """
    config = ArbTernaryConfig(include, exclude, init)
    model.config.quantization_config = config
    model.hf_quantizer = ArbTernaryQuantizer(config)
    for each in _parts(model):
        ties = {
            target: source
            for target, source in each.all_tied_weights_keys.items()
            if not isinstance(each.get_submodule(source.rpartition(".")[0]), TernaryLayer)
        }
        if ties != each.all_tied_weights_keys:
            each._tied_weights_keys = ties
            each.all_tied_weights_keys = dict(ties)


def detach(model: Any) -> None:
    """Undo :func:`attach`, after the layers became dense."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)
    for each in _parts(model):
        if vars(each).pop("_tied_weights_keys", None) is not None:
            each.all_tied_weights_keys = each.get_expanded_tied_weights_keys(all_submodels=True)


def _parts(model: nn.Module) -> Iterator[Any]:
    """Yield the model, and the models inside it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            yield module


def _collects(conversion: WeightTransform) -> bool:
    """Whether a conversion is that of :class:`ArbTernaryQuantizer`."""
    return any(isinstance(each, _Collect) for each in getattr(conversion, "operations", ()))


def _options_of(layer: TernaryLayer) -> dict[str, Any]:
    """Return the options of a ternary layer that ``config.json`` has."""
    ternary = layer.ternary
    options = {name: getattr(ternary, name) for name in OF_MODULES if name != "vote_bits"}
    return {**options, "vote_bits": ternary.shape.vote_bits}


def _targets(model: PreTrainedModel, names: Iterable[str]) -> Iterator[tuple[str, Target]]:
    """Yield each name with the layers that have its weight: several if it is tied.

    Raises:
        CheckpointError: one of them cannot have a ternary weight.
    """
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners.setdefault(weight, []).append((name, module))
    for name in names:
        weight = model.get_parameter(f"{name}.weight")
        tied, layers = zip(*owners[weight], strict=True)
        classes = []
        for layer_name, layer in owners[weight]:
            found = ternary_class(layer)
            if found is None:
                raise CheckpointError(
                    f"{layer_name}: the checkpoint has a ternary weight for it, and a "
                    f"{type(layer).__name__} cannot have one"
                )
            classes.append(found)
        yield name, Target(tied, layers, tuple(classes), weight)


def _load_state(name: str, ternary: TernaryModule, tensors: dict[str, Tensor]) -> None:
    """Load the state of a ternary module.

    Raises:
        CheckpointError: it is incomplete, damaged, or does not fit.
    """
    if "factor" in tensors:
        ternary.register_buffer("factor", torch.ones(()))
    try:
        ternary.load_state_dict(tensors)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"{name}: its ternary weight does not fit the model: {reason}"
        ) from error


def _bitnet_trits(
    name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> ScaledTrits:
    """Return the trits of a linear in the layout of BitNet.

    Raises:
        CheckpointError: the scale is missing, or weights are no trits.
        DataError: a packed code is no trit.
    """
    weight = tensors["weight"].cpu()
    if _SCALE not in tensors:
        raise CheckpointError(f"{name}: the checkpoint has packed trits for it, and no {_SCALE}")
    scale = tensors[_SCALE].cpu().float().reshape(1)
    # As transformers does: the class with packed weights divides by the scale.
    if config.get("linear_class", "bitlinear") == "bitlinear":
        scale = 1 / scale
    if weight.dtype == torch.uint8:
        return ScaledTrits(unpack(weight, name), scale, weight.shape[1])
    found = ternary_parts(weight)
    if found is None:
        raise CheckpointError(f"{name}: the checkpoint has a scale for it, and no ternary weight")
    return evolve(found, scale=found.scale * scale)


def _check_values(model: PreTrainedModel) -> None:
    """Refuse a model with tensors that have no values."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{empty[0]}: has no values after loading, as have {len(empty) - 1} other tensors",
            "Load the model without device_map and tp_plan, from a checkpoint that has them.",
        )


def _batches(model: PreTrainedModel, calibration: Iterable[Any]) -> Iterable[Any]:
    """Return a calibration with its texts as tokens, by the tokenizer beside the model."""
    if not isinstance(calibration, list) or not all(isinstance(each, str) for each in calibration):
        return calibration
    tokenizer = AutoTokenizer.from_pretrained(model.config.name_or_path)
    batches = []
    for text in calibration:
        tokens = tokenizer(text, return_tensors="pt", truncation=True)
        batches.append({"input_ids": tokens["input_ids"].to(model.device)})
    return batches


def _merge(found: Any, given: Any) -> Any:
    """Return the config with which to load a checkpoint that has one, where ``given`` is another.

    transformers would refuse ternary weights from a folder of BitNet, and ignore ``given`` for one
    of ours; it has no hook for this.
    """
    if isinstance(given, ArbTernaryConfig):
        return given.for_checkpoint(found)
    return _MERGE(found, given)


_MERGE: Final = AutoHfQuantizer.merge_quantization_configs
setattr(AutoHfQuantizer, "merge_quantization_configs", staticmethod(_merge))  # noqa: B010
register_quantization_config(METHOD)(ArbTernaryConfig)

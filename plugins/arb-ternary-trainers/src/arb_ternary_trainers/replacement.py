"""Make the layers of a model ternary in place, and make them dense again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, Unpack

import torch
from torch import Tensor, nn

from arb_ternary.errors import EnvironmentProblem, UsageProblem, nearest
from arb_ternary.plugins.discovery import install_command
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import DRAW_TRITS, GroupSize, TernaryModule, VoteOptions
from arb_ternary_interchange.decoder.scales import ternary_rows
from arb_ternary_trainers.layers import TernaryWeightEmbedding, ternary_layers
from arb_ternary_trainers.report import Replaced, TernarizeReport
from arb_ternary_trainers.selection import DEFAULT_EXCLUDE, Target, select
from arb_ternary_trainers.ternary_values import Initial, ternary_values
from arb_ternary_trainers.unapplied import watch

Init = Literal["absmean", "gptq", "random"]
_INITS: Final = ("absmean", "gptq", "random")


def ternarize(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    init: Init = "absmean",
    *,
    group_size: GroupSize = 128,
    activations: Literal["int8", "float"] = "int8",
    calibration: Iterable[Any] | None = None,
    **options: Unpack[VoteOptions],
) -> TernarizeReport:
    """Give the linears, embeddings and convolutions of any torch model ternary weights, in place.

    A weight becomes trits in {-1, 0, 1} and one power of two per ``group_size`` columns. Every
    layer stays the same object with its name, hooks, attributes and mode; its bias stays a float
    parameter. Tied weights stay tied: their layers share one ternary weight. A weight that does not
    require grad becomes a frozen ternary weight. Gradients and state of optimizers are not carried
    over: make the optimizer afterwards, with :func:`arb_ternary.make_optimizer`.

    A weight that is ternary already, such as those of ``dense``, is taken as it is, unless ``init``
    is ``random``. ``save_pretrained`` of a model of transformers writes what ``from_pretrained``
    reads back, see :class:`arb_ternary.ArbTernaryConfig`.

    Linears read int8 activations by default; embeddings and convolutions compute in float.

    Args:
        model: any module; the layers of torch and ``Conv1D`` of transformers are found in it.
        include: names of modules, or patterns of ``fnmatch`` (``*`` also stands for dots); a name
            stands for all modules inside it. None includes everything.
        exclude: what stays float, in the same way. A weight is left if one of the layers that share
            it is excluded.
        init: where trits come from. ``absmean``, the default, rounds each weight: ``2**E`` is the
            power of two nearest to the mean of ``|w|`` of a group, and ``T = clip(round(w / 2**E),
            -1, 1)``; what rounding leaves is kept in the accumulators, so that training goes on
            where the float weight was. ``gptq`` fits linears to the inputs that they get in
            ``calibration``. ``random`` draws new weights.
        group_size: columns that share an exponent: 32, 64, 128, 256 or "row".
        activations: ``int8``, or ``float`` for linears without rounded inputs.
        calibration: for ``gptq``: a list or DataLoader of batches, each a tensor, a tuple of
            arguments or a dict of keyword arguments of ``model``.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`. ``gradients="int8"`` with
            int8 activations makes the products of linears exact integers.

    Returns:
        What became ternary, how well it fits, and why each other matrix stayed float.

    Raises:
        UsageProblem: a name or option does not exist, nothing can be replaced, a weight is ternary
            in finer groups, or another program has quantized the model. The model is unchanged.
        EnvironmentProblem: ``gptq`` without the package ``arb-ternary-upcycle``.
    """
    check_init(init, calibration)
    pretrained = _pretrained_models(model)
    targets, left = select(model, include, exclude)
    if not targets:
        raise UsageProblem("ternarize: nothing in the model can become ternary", _reasons(left))
    for target in targets:
        if not bool(torch.isfinite(target.parameter).all()):
            raise UsageProblem(f"{target.name}: its weight has elements that are not finite")
    # An option that does not exist is an error before anything changes.
    with _drawing(False):
        TernaryLinear(1, 1, group_size=group_size, activations=activations, **options)

    vote_bits = options.get("vote_bits", 8)
    known: dict[Target, Initial] = {}
    if init != "random":
        for target in targets:
            exact = ternary_values(target.name, target.matrix(), group_size, vote_bits)
            if exact is not None:
                known[target] = exact
    if init == "gptq":
        others = [target for target in targets if target not in known]
        known.update(_fitted(model, others, calibration, group_size, activations, vote_bits))

    replaced = []
    for target in targets:
        matrix = target.matrix()
        ternary = new_module(target, group_size, activations, options, draws=init == "random")
        how: str = init
        error = None
        if init != "random":
            initial = known.get(target)
            if initial is None:
                rounded = ternary_rows(matrix, ternary.shape.group_size, vote_bits)
                initial = Initial(init, *rounded)
            how = initial.how
            set_initial(ternary, initial)
            error = _relative_error(matrix, initial.factor * ternary.dense_weight())
        replaced.append(_entry(target, ternary, how, error))
        adopt(target, ternary)
    for each in pretrained:
        from arb_ternary_trainers.quantizer import attach

        attach(each, include, exclude, init)
    watch(model)
    return TernarizeReport(tuple(replaced), tuple(left))


def dense(model: nn.Module) -> tuple[str, ...]:
    """Make the layers that :func:`ternarize` replaced ordinary layers of torch again, in place.

    The float weights have the values ``T * 2**E``, and tied weights are tied. With
    ``activations="float"`` the outputs stay the same, but for the last bit where a product and a
    bias are now added in one operation. With int8 activations the inputs of linears are no longer
    rounded, so outputs move by the error of that rounding. Accumulators are dropped.

    Returns:
        The names of the layers.

    Raises:
        UsageProblem: the model has no such layers.
    """
    layers = dict(ternary_layers(model))
    if not layers:
        raise UsageProblem(
            "dense: the model has no layers that ternarize replaced",
            "Call arb_ternary.ternarize(model) first.",
        )
    weights: dict[TernaryModule, nn.Parameter] = {}
    for layer in layers.values():
        ternary = layer.ternary
        if ternary not in weights:
            tensor = layer.dense_weight().contiguous()
            weights[ternary] = nn.Parameter(tensor, requires_grad=not ternary.frozen)
        layer.restore(weights[ternary])
    for each in _pretrained_models(model):
        from arb_ternary_trainers.quantizer import detach

        detach(each)
    return tuple(layers)


def new_module(
    target: Target,
    group_size: GroupSize,
    activations: str,
    options: VoteOptions,
    *,
    draws: bool,
) -> TernaryModule:
    """Return a ternary module for a weight; its trits are 0 unless it ``draws`` them."""
    rows, columns = target.size
    with _drawing(draws):
        if TernaryWeightEmbedding not in target.classes:
            return TernaryLinear(
                columns, rows, group_size=group_size, activations=activations, **options
            )
        table = TernaryEmbedding(rows, columns, group_size=group_size, **options)
    # Read by a linear with the same weight, and by rules of votes.
    table.activations = activations  # type: ignore[assignment]
    return table


def set_initial(ternary: TernaryModule, initial: Initial) -> None:
    """Give a ternary module its first trits, exponents, accumulators and factor."""
    ternary.set_trits(initial.trits, initial.exponent, initial.votes)
    if initial.factor != 1.0:
        ternary.register_buffer("factor", torch.tensor(initial.factor))


def adopt(target: Target, ternary: TernaryModule) -> None:
    """Give the layers of a weight their ternary classes, and one ternary module."""
    ternary.frozen = not target.parameter.requires_grad
    if not target.parameter.is_meta:
        ternary.to(target.parameter.device)
    for index, (layer, kind) in enumerate(zip(target.layers, target.classes, strict=True)):
        kind.adopt(layer, ternary, shared=index > 0)


def _pretrained_models(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers in ``model``, without importing transformers.

    Raises:
        UsageProblem: another program has quantized one of them.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    if not isinstance(model, modeling.PreTrainedModel):
        return [found for child in model.children() for found in _pretrained_models(child)]
    quantizer: Any = getattr(model, "hf_quantizer", None)
    method = None if quantizer is None else quantizer.quantization_config.quant_method
    if method not in (None, "arb_ternary"):
        raise UsageProblem(
            f"ternarize: the model is quantized by {method}",
            "Load it without quantization, or call model.dequantize() first.",
        )
    return [model]


def check_init(init: str, calibration: Iterable[Any] | None) -> None:
    """Refuse an ``init`` that does not exist, or that does not go with the calibration."""
    if init not in _INITS:
        close = nearest(init, _INITS)
        hint = f"did you mean {close!r}?\n" if close else ""
        raise UsageProblem(
            f"init: {init!r} is not a way to find trits", f"{hint}available: {', '.join(_INITS)}"
        )
    if init == "gptq" and calibration is None:
        raise UsageProblem(
            "init: gptq fits weights to the inputs of layers, and there is no calibration",
            "Give calibration=[batch, ...], or take init='absmean', which needs none.",
        )
    if init != "gptq" and calibration is not None:
        raise UsageProblem(
            f"calibration: init={init!r} does not read it", "Take init='gptq', or leave it out."
        )


def _reasons(left: Sequence[Any]) -> str:
    """Return the first reasons why matrices stayed float."""
    if not left:
        return "It has no matrix: weights of linears, embeddings and convolutions become ternary."
    return "\n".join(f"{each.name}: {each.reason}" for each in left[:5])


def _fitted(
    model: nn.Module,
    targets: Sequence[Target],
    calibration: Iterable[Any] | None,
    group_size: GroupSize,
    activations: Literal["int8", "float"],
    vote_bits: int,
) -> Mapping[Target, Initial]:
    """Return what ``gptq`` finds for each weight."""
    try:
        from arb_ternary_trainers.calibration import fit_weights
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"init: gptq needs a package that is not installed: {error.name}",
            install_command("arb-ternary-upcycle"),
        ) from error
    assert calibration is not None
    return fit_weights(model, targets, calibration, group_size, activations, vote_bits)


@contextmanager
def _drawing(draws: bool) -> Iterator[None]:
    """Draw the trits of new modules within a ``with`` block, or leave the generator of torch."""
    token = DRAW_TRITS.set(draws)
    try:
        yield
    finally:
        DRAW_TRITS.reset(token)


def _relative_error(matrix: Tensor, ternary: Tensor) -> float:
    """Return ``|W - Q| / |W|``; 0 for a weight of zeros."""
    norm = float(matrix.norm())
    return float((matrix - ternary).norm()) / norm if norm else 0.0


def _entry(target: Target, ternary: TernaryModule, how: str, error: float | None) -> Replaced:
    parameter = target.parameter
    first, *tied = target.names
    return Replaced(
        name=first,
        tied=tuple(tied),
        kind=target.classes[0].__name__.removeprefix("TernaryWeight"),
        shape=tuple(parameter.shape),
        init=how,
        error=error,
        weights=parameter.numel(),
        bytes_before=parameter.nbytes,
        bytes_after=ternary.weight.nbytes + ternary.exponent.nbytes,
        bytes_in_training=sum(buffer.nbytes for buffer in ternary.buffers()),
    )

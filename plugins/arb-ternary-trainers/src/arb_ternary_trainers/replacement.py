"""Make the layers of a model ternary in place, and make them dense again."""

from __future__ import annotations

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
from arb_ternary_trainers.layers import ternary_layers
from arb_ternary_trainers.report import Replaced, TernarizeReport
from arb_ternary_trainers.selection import DEFAULT_EXCLUDE, Target, select

Init = Literal["absmean", "gptq", "random"]
_INITS: Final = ("absmean", "gptq", "random")
#: Trits, exponents and accumulators of a weight, all int8.
Initial = tuple[Tensor, Tensor, Tensor]


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
        UsageProblem: a name or option does not exist, or nothing can be replaced. The model is
            unchanged.
        EnvironmentProblem: ``gptq`` without the package ``arb-ternary-upcycle``.
    """
    _check_init(init, calibration)
    targets, left = select(model, include, exclude)
    if not targets:
        raise UsageProblem("ternarize: nothing in the model can become ternary", _reasons(left))
    for target in targets:
        if not bool(torch.isfinite(target.parameter).all()):
            raise UsageProblem(f"{target.name}: its weight has elements that are not finite")
    # An option that does not exist is an error before anything changes.
    with _drawing(False):
        TernaryLinear(1, 1, group_size=group_size, activations=activations, **options)

    fitted: Mapping[Target, tuple[str, Initial]] = {}
    if init == "gptq":
        fitted = _fitted(model, targets, calibration, group_size, options.get("vote_bits", 8))

    replaced = []
    for target in targets:
        matrix = target.matrix()
        ternary = _new_module(target, matrix, init, group_size, activations, options)
        how: str = init
        error = None
        if init != "random":
            how, initial = fitted.get(target, (init, None))
            if initial is None:
                columns = ternary.shape.group_size
                initial = ternary_rows(matrix, columns, ternary.shape.vote_bits)
            trits, exponent, votes = initial
            ternary.set_trits(trits, exponent, votes)
            error = _relative_error(matrix, ternary.dense_weight())
        ternary.frozen = not target.parameter.requires_grad
        ternary.to(target.parameter.device)
        replaced.append(_entry(target, ternary, how, error))
        for index, (layer, kind) in enumerate(zip(target.layers, target.classes, strict=True)):
            kind.adopt(layer, ternary, shared=index > 0)
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
    return tuple(layers)


def _check_init(init: str, calibration: Iterable[Any] | None) -> None:
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
    vote_bits: int,
) -> Mapping[Target, tuple[str, Initial]]:
    """Return what ``gptq`` finds for each weight, and the name of the way it took."""
    try:
        from arb_ternary_trainers.calibration import fit_weights
    except ModuleNotFoundError as error:
        raise EnvironmentProblem(
            f"init: gptq needs a package that is not installed: {error.name}",
            install_command("arb-ternary-upcycle"),
        ) from error
    assert calibration is not None
    return fit_weights(model, targets, calibration, group_size, vote_bits)


def _new_module(
    target: Target,
    matrix: Tensor,
    init: str,
    group_size: GroupSize,
    activations: str,
    options: VoteOptions,
) -> TernaryModule:
    """Return the ternary module of a weight; its trits are drawn if ``init`` is random."""
    rows, columns = matrix.shape
    with _drawing(init == "random"):
        if "Embedding" not in target.kinds:
            return TernaryLinear(
                columns, rows, group_size=group_size, activations=activations, **options
            )
        table = TernaryEmbedding(rows, columns, group_size=group_size, **options)
    # Read by a linear with the same weight, and by rules of votes.
    table.activations = activations  # type: ignore[assignment]
    return table


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
        kind=target.kinds[0],
        shape=tuple(parameter.shape),
        init=how,
        error=error,
        weights=parameter.numel(),
        bytes_before=parameter.nbytes,
        bytes_after=ternary.weight.nbytes + ternary.exponent.nbytes,
        bytes_in_training=sum(buffer.nbytes for buffer in ternary.buffers()),
    )

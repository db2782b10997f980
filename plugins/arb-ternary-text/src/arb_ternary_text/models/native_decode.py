"""Decode tokens of a plain decoder by the backend's kernels.

``text.decode_step`` runs one token per sequence through the whole decoder without a module in
between, ``text.decode_rows`` any number of tokens, with the same results to the last bit.
Generation uses them if the backend of the model has them, and if the decoder is made of nothing but
the modules that this file names, with ternary linears of int8 activations and a residual stream of
float32 or bfloat16. Otherwise the modules run. They also run for a step with gradients, under
autocast, inside a compiler, in an exact run, and if a module has a hook.

A kernel gets a :class:`~arb_ternary_text.models.decode_plan.DecoderPlan`, which is made when a
cache meets its first token. The plan holds the tensors of the model itself, so that it follows what
they learn. Before every token :class:`_Watch` checks that they still are the tensors of the model,
and that vectors of trits and factors of rows, which the plan holds as floats, have not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq, getitem, is_
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from arb_ternary.backends.select import get_backend
from arb_ternary.ternary.embedding import TernaryEmbedding, TernaryRMSNorm
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.attention import Attention
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.block_kernels import may_round_differently
from arb_ternary_text.models.cache import KeyValueCache, Span
from arb_ternary_text.models.decode_plan import DecoderPlan, LayerPlan, NormPlan, WeightPlan
from arb_ternary_text.models.feed_forward import FeedForward
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.rotary import rotary_speeds
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_text.models.trit_vector import TritVector

#: The op that a backend may have for a step of decoding.
DECODE_STEP: Final = "text.decode_step"
#: The op that a backend may have for tokens of any sequences.
DECODE_ROWS: Final = "text.decode_rows"
#: Tokens of a prompt that are decoded in one call, which needs memory for each of them.
_CHUNK: Final = 256
#: Types of linears that a plan can describe.
_LINEARS: Final = (TernaryLinear, ScaledTernaryLinear)


def decode_tokens(model: Transformer, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor | None:
    """Return the logits ``[B, V]`` after the last of more tokens, and advance ``cache``.

    Returns None, and does nothing, if there is no kernel for this model.

    Raises:
        UsageProblem: as ``model(tokens, cache)`` does.
    """
    if not may_round_differently() or torch.is_autocast_enabled("cpu"):
        return None
    if type(tokens_BS) is not Tensor or not tokens_BS.numel():
        return None
    decoder = _DECODERS.get(cache)
    if decoder is None or decoder.model is not model or not decoder.is_valid():
        decoder = _DECODERS[cache] = _NativeDecoder(model)
    return decoder.decode(tokens_BS, cache)


class _NativeDecoder:
    """A model and the kernels that run its steps.

    Attributes:
        model: the decoder.
        step: the kernel for one token, bound to the plan of the model; None if the modules have to
            run. A cache whose model was refused once is refused for good.
        rows: the kernel for more tokens, in the same way.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.step: Callable[..., Tensor | None] | None = None
        self.rows: Callable[..., Tensor | None] | None = None
        self._watch = _Watch()
        try:
            plan, backend = plan_of(model, self._watch)
        except NotPlainError:
            return
        self._plan = plan
        kernels: Mapping[str, Any] = get_backend(backend).kernels
        if DECODE_STEP in kernels:
            self.step = kernels[DECODE_STEP](plan)
        if DECODE_ROWS in kernels:
            self.rows = kernels[DECODE_ROWS](plan)
        config = model.config
        self._scaling = config.rotary_scaling
        self._row = torch.empty(0, config.key_heads, 0, config.key_features, dtype=plan.dtype)

    def is_valid(self) -> bool:
        """Return whether the plan still describes the model."""
        return (self.step is None and self.rows is None) or self._watch.unchanged()

    def decode(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor | None:
        """Return what :func:`decode_tokens` returns."""
        single = tokens_BS.size(1) == 1
        kernel = self.step if single else self.rows
        if kernel is None or not tokens_BS.is_cpu or len(cache.layers) != len(self._plan.layers):
            return None
        tokens_BS = tokens_BS.to(torch.int64)
        out: Tensor | None
        if single:
            out = self._decode_one(kernel, tokens_BS, cache)
        else:
            out = self._decode_more(kernel, tokens_BS, cache)
        if out is None:  # the kernel cannot run this plan
            self.step = None
            self.rows = None
            return None

        cache.advance(tokens_BS.size(1))
        if self._plan.head is None:
            logits: Tensor = self.model.head(out)
            scale = self._plan.logit_scale
            out = logits if scale == 1.0 else logits * scale
        return out

    def _decode_one(
        self, step: Callable[..., Tensor | None], tokens_B1: Tensor, cache: KeyValueCache
    ) -> Tensor | None:
        span = cache.reserve(tokens_B1.size(0), 1)
        stored = self._stored(tokens_B1.size(0), cache, span)
        position = cache.length / self._scaling
        return step(tokens_B1.reshape(-1), stored, span.slot, span.past, position)

    def _decode_more(
        self, rows: Callable[..., Tensor | None], tokens_BS: Tensor, cache: KeyValueCache
    ) -> Tensor | None:
        batch, length = tokens_BS.shape
        span = cache.reserve(batch, length)
        stored = self._stored(batch, cache, span)
        # The slots of a sequence are one block.
        sequence_B1 = torch.arange(batch)[:, None]
        index_S = torch.arange(length)
        past_S = span.past + index_S
        if cache.window is not None:
            past_S = past_S.clamp(max=cache.window - 1)
        position_S = (cache.length + index_S).to(torch.float64) / self._scaling
        out: Tensor | None = None
        per_call = max(1, _CHUNK // batch)
        for first in range(0, length, per_call):
            ids_BC = tokens_BS[:, first : first + per_call]
            count = ids_BC.size(1)

            def of_rows(each_S: Tensor, first: int = first, count: int = count) -> Tensor:
                return each_S[first : first + count].repeat(batch)

            out = rows(
                ids_BC.reshape(-1),
                stored,
                sequence_B1,
                sequence_B1.expand(batch, count).reshape(-1),
                of_rows(span.slot + index_S),
                of_rows(past_S),
                of_rows(position_S),
                torch.arange(count - 1, batch * count, count),
            )
            if out is None:
                return None
        return out

    def _stored(self, batch: int, cache: KeyValueCache, span: Span) -> list[Tensor]:
        """Return the tensors of all layers, with room for new positions."""
        row = self._row.new_empty((batch, *self._row.shape[1:]))
        stored: list[Tensor] = []
        for layer in cache.layers:
            stored += layer.room_for(row, row, span)
        return stored


#: The decoder that was made when a cache met its first token.
_DECODERS: Final[WeakKeyDictionary[KeyValueCache, _NativeDecoder]] = WeakKeyDictionary()


class NotPlainError(Exception):
    """The modules of the model have to run."""


def _require(holds: bool) -> None:
    if not holds:
        raise NotPlainError


class _Watch:
    """Records what a plan was made of, and checks that it is unchanged."""

    def __init__(self) -> None:
        self._places: list[Mapping[Any, Any]] = []
        self._names: list[str] = []
        self._found: list[object] = []
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._read: list[Tensor] = []
        self._versions: list[int] = []
        self._hooks: list[Mapping[Any, Any]] = [
            hooks_of_all._global_forward_hooks,
            hooks_of_all._global_forward_pre_hooks,
        ]

    def note(self, place: Mapping[Any, Any], name: str) -> Any:
        """Return ``place[name]`` and expect it to stay that very object."""
        found = place[name]
        self._places.append(place)
        self._names.append(name)
        self._found.append(found)
        if isinstance(found, Tensor):
            self._tensors.append(found)
            self._addresses.append(found.data_ptr())
        return found

    def note_values(self, place: Mapping[Any, Any], name: str) -> Any:
        """Return the tensor ``place[name]`` and expect its values to stay, too.

        For a tensor that the plan holds in another form.
        """
        found = self.note(place, name)
        _require(not found.is_inference())  # inference tensors have no version
        self._read.append(found)
        self._versions.append(found._version)
        return found

    def is_plain(self, module: nn.Module, *kinds: type[nn.Module]) -> bool:
        """Return whether a module is of one of these types and has no ``forward`` of its own.

        From now on a forward hook of the module counts as a change.
        """
        self._hooks += (module._forward_hooks, module._forward_pre_hooks)
        return type(module) in kinds and "forward" not in module.__dict__

    def unchanged(self) -> bool:
        """Return whether everything is as it was, and there is no hook."""
        try:
            if not all(map(is_, map(getitem, self._places, self._names), self._found)):
                return False
        except KeyError:
            return False
        if any(self._hooks):
            return False
        # Moving a parameter keeps the object and gives it other memory.
        if not all(map(eq, map(Tensor.data_ptr, self._tensors), self._addresses)):
            return False
        return all(
            tensor._version == version
            for tensor, version in zip(self._read, self._versions, strict=True)
        )


def plan_of(model: Transformer, watch: _Watch | None = None) -> tuple[DecoderPlan, str]:
    """Return the plan of a plain decoder and the backend of its weights.

    Raises:
        NotPlainError: the modules have to run.
    """
    return _PlanReader(_Watch() if watch is None else watch).decoder(model)


class _PlanReader:
    """Makes a plan and notes what it is made of."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._backends: set[str] = set()

    def decoder(self, model: Transformer) -> tuple[DecoderPlan, str]:
        config = model.config
        watch = self._watch
        _require(model._checkpoint_from is None or not torch.is_grad_enabled())
        embedding = watch.note(model._modules, "embedding")
        blocks = watch.note(model._modules, "blocks")
        _require(watch.is_plain(blocks, nn.ModuleList))
        watch.note(model.__dict__, "_dtype")
        watch.note(model.__dict__, "_logit_scale")

        table, dtype = self._embedding(embedding)
        names = tuple(blocks._modules)
        layers = tuple(self._layer(watch.note(blocks._modules, name)) for name in names)
        final_norm = self._norm(model, "final_norm")
        head = self._head(model)
        speeds = rotary_speeds(
            config.rotary_features,
            config.rotary_base,
            config.rotary_factors,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        _require(len(self._backends) == 1 and watch.unchanged())
        plan = DecoderPlan(
            width=config.width,
            heads=config.heads,
            key_heads=config.key_heads,
            features=config.key_features,
            hidden=config.hidden,
            vocabulary=model.vocabulary_size,
            activation=config.feed_forward_activation,
            speeds=tuple(speeds.tolist()),
            embedding=table,
            layers=layers,
            final_norm=final_norm,
            head=head,
            logit_scale=model._logit_scale,
            dtype=dtype if model._dtype is None else model._dtype,
        )
        return plan, next(iter(self._backends))

    def _embedding(self, module: nn.Module) -> tuple[WeightPlan | Tensor, torch.dtype]:
        watch = self._watch
        _require(watch.is_plain(module, nn.Embedding, TernaryEmbedding))
        if isinstance(module, TernaryEmbedding):
            _require(module.correlation is None)
            return self._weight(module), watch.note(module.__dict__, "dtype")
        assert isinstance(module, nn.Embedding)
        _require(module.max_norm is None)
        weight = self._floats(module, "weight")
        return weight, weight.dtype

    def _head(self, model: Transformer) -> WeightPlan | None:
        """Return the head as a ternary weight; None if its own module multiplies."""
        watch = self._watch
        head = watch.note(model._modules, "head")
        if type(head) in _LINEARS and head.activations == "int8":
            return self._linear(model, "head")
        if type(head) is not TiedHead or head.activations != "int8":
            return None
        if type(head._embedding[0]) is not TernaryEmbedding:
            return None
        _require(watch.is_plain(head, TiedHead))
        watch.note(head.__dict__, "activations")
        (table,) = watch.note(head.__dict__, "_embedding")
        return self._weight(table)

    def _layer(self, block: nn.Module) -> LayerPlan:
        watch = self._watch
        _require(watch.is_plain(block, Block))
        attention = watch.note(block._modules, "attention")
        feed = watch.note(block._modules, "feed_forward")
        _require(watch.is_plain(attention, Attention) and attention.biases is None)
        _require(watch.is_plain(feed, FeedForward))
        return LayerPlan(
            attention_norm=self._norm(attention, "norm"),
            query=self._linear(attention, "query"),
            key=self._linear(attention, "key"),
            value=self._linear(attention, "value"),
            query_norm=self._norm(attention, "query_norm"),
            key_norm=self._norm(attention, "key_norm"),
            output_norm=self._norm(attention, "output_norm"),
            output=self._linear(attention, "output"),
            feed_norm=self._norm(feed, "norm"),
            gate=None if feed.gate is None else self._linear(feed, "gate"),
            up=self._linear(feed, "up"),
            hidden_norm=self._norm(feed, "hidden_norm"),
            down=self._linear(feed, "down"),
            residual_scale=watch.note(block.__dict__, "residual_scale"),
        )

    def _linear(self, parent: nn.Module, name: str) -> WeightPlan:
        watch = self._watch
        module = watch.note(parent._modules, name)
        _require(watch.is_plain(module, *_LINEARS))
        _require(watch.note(module.__dict__, "activations") == "int8" and module.bias is None)
        if not isinstance(module, ScaledTernaryLinear):
            return self._weight(module)
        if module.scale is not None:
            watch.note(module._buffers, "scale")
        elif module.row_trits is not None:
            self._trits(module, "row_trits")
        else:
            watch.note_values(module._parameters, "row_scale")
        return self._weight(module, module.factors())

    def _norm(self, parent: nn.Module, name: str) -> NormPlan | None:
        watch = self._watch
        module = watch.note(parent._modules, name)
        _require(watch.is_plain(module, nn.Identity, RMSNorm, TernaryRMSNorm))
        if isinstance(module, nn.Identity):
            return None
        eps = float(watch.note(module.__dict__, "eps"))
        if isinstance(module, TernaryRMSNorm):
            learned = watch.note(module.__dict__, "learned")
            return NormPlan(eps, row=self._weight(module) if learned else None)
        if module.gains is not None:
            return NormPlan(eps, gain=self._trits(module, "gains").values())
        return NormPlan(eps, gain=None if module.weight is None else self._floats(module, "weight"))

    def _trits(self, parent: nn.Module, name: str) -> TritVector:
        """Return a vector of trits, whose numbers the plan holds as floats."""
        vector: TritVector = self._watch.note(parent._modules, name)
        _require(self._watch.is_plain(vector, TritVector))
        _require(self._watch.note_values(vector._buffers, "weight").is_cpu)
        self._watch.note_values(vector._buffers, "exponent")
        return vector

    def _weight(self, module: TernaryModule, factor: Tensor | None = None) -> WeightPlan:
        packed = self._watch.note(module._buffers, "weight")
        exponent = self._watch.note(module._buffers, "exponent")
        _require(module.backend == module.chosen_backend)
        _require(packed.is_cpu and type(packed) is Tensor)
        self._backends.add(module.backend)
        return WeightPlan(packed, exponent, module.shape, factor)

    def _floats(self, module: nn.Module, name: str) -> Tensor:
        found: Tensor = self._watch.note(module._parameters, name)
        _require(found.is_cpu and found.is_contiguous())
        _require(found.dtype in (torch.float32, torch.bfloat16))
        return found.detach()

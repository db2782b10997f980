"""One token of a plain decoder by the backend's kernel ``text.decode_step``, without a module in
between.

Where the backend of a model has that kernel, generation takes it for decoders made of nothing but
the modules that this file names, ternary linears of int8 activations, and a stream of float32 or
bfloat16. Everything else runs its modules, as does a step with gradients, under autocast, inside a
compiler, in an exact run, or with a hook on a module.

What it saves is found when a cache meets its first token: the tensors of a model, which the kernel
then reads where they lie, so that it follows what they learn. Before every token it is made sure
that they are still the model's, and that vectors of trits and factors of rows, which it is given as
floats, are still the same numbers.
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
from arb_ternary_text.models.cache import KeyValueCache
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

_Step = Callable[..., Tensor | None]
#: What a plan has a form for.
_LINEARS: Final = (TernaryLinear, ScaledTernaryLinear)


def decode_token(model: Transformer, tokens_B1: Tensor, cache: KeyValueCache) -> Tensor | None:
    """Logits ``[B, 1, V]`` of the tokens that follow, and ``cache`` advanced; None, and nothing
    done, without a kernel.

    Raises:
        UsageProblem: as ``model(tokens, cache)`` does.
    """
    if (
        not may_round_differently()
        or torch.is_autocast_enabled("cpu")
        or type(tokens_B1) is not Tensor
    ):
        return None
    bound = _BOUND.get(cache)
    if bound is None or bound.model is not model or not bound.holds():
        bound = _BOUND[cache] = _Bound(model)
    return None if bound.step is None else bound.decode(tokens_B1, cache)


class _Bound:
    """A model and the kernel that runs its steps, or None where its modules have to."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.step: _Step | None = None
        self._watch = _Watch()
        try:
            plan, backend = plan_of(model, self._watch)
        except _NotPlainError:
            return
        self._plan = plan
        kernel = get_backend(backend).kernels.get(DECODE_STEP)
        if kernel is not None:
            self.step = kernel(plan)  # type: ignore[assignment]
        config = model.config
        self._scaling = config.rotary_scaling
        self._row = torch.empty(0, config.key_heads, 0, config.key_features, dtype=plan.dtype)

    def holds(self) -> bool:
        """Whether what was found of the model is still so; what was refused once stays refused for
        this cache.
        """
        return self.step is None or self._watch.unchanged()

    def decode(self, tokens_B1: Tensor, cache: KeyValueCache) -> Tensor | None:
        if len(cache.layers) != len(self._plan.layers) or not tokens_B1.is_cpu:
            return None
        batch = tokens_B1.size(0)
        span = cache.reserve(batch, 1)
        stored: list[Tensor] = []
        row = self._row.new_empty((batch, *self._row.shape[1:]))
        for layer in cache.layers:
            stored += layer.room_for(row, row, span)
        assert self.step is not None
        position = cache.length / self._scaling
        out = self.step(
            tokens_B1.reshape(-1).to(torch.int64), stored, span.slot, span.past, position
        )
        if out is None:
            self.step = None
            return None
        cache.advance(1)
        if self._plan.head is None:
            logits: Tensor = self.model.head(out)
            scale = self._plan.logit_scale
            out = logits if scale == 1.0 else logits * scale
        return out.unsqueeze(1)


#: What was found when a cache met its first token.
_BOUND: Final[WeakKeyDictionary[KeyValueCache, _Bound]] = WeakKeyDictionary()


class _NotPlainError(Exception):
    """A model that its modules have to run."""


class _Watch:
    """What a plan was made of, and whether it is still there."""

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
        """``place[name]``, which is expected to stay that very object."""
        found = place[name]
        self._places.append(place)
        self._names.append(name)
        self._found.append(found)
        if isinstance(found, Tensor):
            self._tensors.append(found)
            self._addresses.append(found.data_ptr())
        return found

    def note_numbers(self, place: Mapping[Any, Any], name: str) -> Any:
        """As :meth:`note`, of a tensor that a plan holds another form of: its numbers are to stay,
        too.
        """
        found = self.note(place, name)
        _demand(not found.is_inference())  # these have no version
        self._read.append(found)
        self._versions.append(found._version)
        return found

    def plain(self, module: nn.Module, *kinds: type[nn.Module]) -> bool:
        """Whether a module is of one of these types, and nobody has a hand in its call."""
        self._hooks += (module._forward_hooks, module._forward_pre_hooks)
        return type(module) in kinds and "forward" not in module.__dict__

    def unchanged(self) -> bool:
        """Whether all is as it was, and no hook has come."""
        try:
            same = all(map(is_, map(getitem, self._places, self._names), self._found))
        except KeyError:
            return False
        # Moving a parameter leaves the object in its place, and gives it other memory.
        same = (
            same
            and not any(self._hooks)
            and all(map(eq, map(Tensor.data_ptr, self._tensors), self._addresses))
        )
        return same and all(
            tensor._version == version
            for tensor, version in zip(self._read, self._versions, strict=True)
        )


def plan_of(model: Transformer, watch: _Watch | None = None) -> tuple[DecoderPlan, str]:
    """The plan of a plain decoder, and the backend of its weights.

    Raises:
        _NotPlainError: its modules have to run.
    """
    return _Reading(_Watch() if watch is None else watch).decoder(model)


class _Reading:
    """Makes a plan, and notes what it was made of."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._backends: set[str] = set()

    def decoder(self, model: Transformer) -> tuple[DecoderPlan, str]:
        config = model.config
        watch = self._watch
        _demand(model._checkpoint_from is None or not torch.is_grad_enabled())
        modules = model._modules
        embedding = watch.note(modules, "embedding")
        blocks = watch.note(modules, "blocks")
        _demand(watch.plain(blocks, nn.ModuleList))
        watch.note(model.__dict__, "_dtype")
        watch.note(model.__dict__, "_logit_scale")
        table, dtype = self._embedding(embedding)
        layers = tuple(
            self._layer(watch.note(blocks._modules, name)) for name in tuple(blocks._modules)
        )
        final_norm = self._norm(model, "final_norm")
        head = self._head(model)
        speeds = rotary_speeds(
            config.rotary_features,
            config.rotary_base,
            config.rotary_factors,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        _demand(len(self._backends) == 1 and watch.unchanged())
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
        _demand(watch.plain(module, nn.Embedding, TernaryEmbedding))
        if isinstance(module, TernaryEmbedding):
            _demand(module.correlation is None)
            return self._weight(module), watch.note(module.__dict__, "dtype")
        assert isinstance(module, nn.Embedding)
        _demand(module.max_norm is None)
        weight = self._floats(module, "weight")
        return weight, weight.dtype

    def _head(self, model: Transformer) -> WeightPlan | None:
        """The head as a ternary weight; None where its own module multiplies."""
        head = self._watch.note(model._modules, "head")
        if type(head) in _LINEARS and head.activations == "int8":
            return self._linear(model, "head")
        if (
            type(head) is TiedHead
            and head.activations == "int8"
            and type(head._embedding[0]) is TernaryEmbedding
        ):
            _demand(self._watch.plain(head, TiedHead))
            self._watch.note(head.__dict__, "activations")
            return self._weight(self._watch.note(head.__dict__, "_embedding")[0])
        return None

    def _layer(self, block: nn.Module) -> LayerPlan:
        watch = self._watch
        _demand(watch.plain(block, Block))
        attention = watch.note(block._modules, "attention")
        feed = watch.note(block._modules, "feed_forward")
        _demand(
            watch.plain(attention, Attention)
            and watch.plain(feed, FeedForward)
            and attention.biases is None
        )
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
        _demand(watch.plain(module, *_LINEARS))
        _demand(watch.note(module.__dict__, "activations") == "int8" and module.bias is None)
        factor = None
        if isinstance(module, ScaledTernaryLinear):
            if module.scale is not None:
                watch.note(module._buffers, "scale")
            elif module.row_trits is not None:
                self._trits(module, "row_trits")
            else:
                watch.note_numbers(module._parameters, "row_scale")
            factor = module.factors()
        return self._weight(module, factor)

    def _norm(self, parent: nn.Module, name: str) -> NormPlan | None:
        watch = self._watch
        module = watch.note(parent._modules, name)
        _demand(watch.plain(module, nn.Identity, RMSNorm, TernaryRMSNorm))
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
        """A vector of trits, whose numbers the plan holds as floats."""
        vector: TritVector = self._watch.note(parent._modules, name)
        _demand(self._watch.plain(vector, TritVector))
        _demand(self._watch.note_numbers(vector._buffers, "weight").is_cpu)
        self._watch.note_numbers(vector._buffers, "exponent")
        return vector

    def _weight(self, module: TernaryModule, factor: Tensor | None = None) -> WeightPlan:
        packed = self._watch.note(module._buffers, "weight")
        exponent = self._watch.note(module._buffers, "exponent")
        _demand(
            module.backend == module.chosen_backend and packed.is_cpu and type(packed) is Tensor
        )
        self._backends.add(module.backend)
        return WeightPlan(packed, exponent, module.shape, factor)

    def _floats(self, module: nn.Module, name: str) -> Tensor:
        found: Tensor = self._watch.note(module._parameters, name)
        _demand(
            found.is_cpu
            and found.is_contiguous()
            and found.dtype in (torch.float32, torch.bfloat16)
        )
        return found.detach()


def _demand(plain: bool) -> None:
    if not plain:
        raise _NotPlainError

"""The base of ternary modules: a packed weight, its training state, and how they are saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final, Literal, TypedDict, Unpack
from weakref import ReferenceType, WeakKeyDictionary

import torch
from attrs import evolve
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from arb_ternary.backends import ops
from arb_ternary.backends.dispatch import check_vote_bits, kernel, pack_votes
from arb_ternary.backends.layout import power_of_two, spread_over_columns
from arb_ternary.backends.protocol import VOTE_BITS, WeightShape
from arb_ternary.backends.select import current_backend, get_backend, serves
from arb_ternary.backends.vote_state import EXPONENT_RANGE, VoteState
from arb_ternary.counters.hashing import new_control
from arb_ternary.errors import CheckpointError, EnvironmentProblem, UsageProblem
from arb_ternary.ternary.encoding import decode_at_rest, encode_at_rest
from arb_ternary.ternary.vote_memory import ScaleRule, VoteMemory

GroupSize = int | Literal["row"]
#: Exponent groups along the input features; "row" is one exponent per row.
GROUP_SIZES: Final[tuple[GroupSize, ...]] = (32, 64, 128, 256, "row")
#: Share of a Gaussian that rounds to a non-zero trit: P(|w| > E|w| / 2).
GAUSSIAN_DENSITY: Final = 0.690
#: The backend that serves every device, and the device without memory.
_TORCH = "torch"
_META = "meta"

#: Whether initial trits are drawn. A model whose weights are loaded afterwards is built faster if
#: they are all 0.
DRAW_TRITS: Final = ContextVar("DRAW_TRITS", default=True)
#: The optimizer that took over the thresholds of a module when it was built.
OPTIMIZERS: Final[WeakKeyDictionary[torch.nn.Module, ReferenceType[object]]] = WeakKeyDictionary()


def initial_trits(rows: int, columns: int, generator: torch.Generator | None = None) -> Tensor:
    """``T = clip(round(w / mean|w|), -1, 1)`` of Gaussian ``w``, int8.

    This is the absmean rule of BitNet b1.58.
    """
    if not DRAW_TRITS.get():
        return torch.zeros(rows, columns, dtype=torch.int8)
    w = torch.randn(rows, columns, generator=generator)
    if not w.numel():
        return w.to(torch.int8)
    scale = w.abs().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (w / scale).round_().clamp_(-1, 1).to(torch.int8)


def initial_exponent(fan_in: int, offset: int = 0) -> int:
    """The power of two nearest to ``1 / sqrt(density * fan_in)``, plus an offset.

    Without an offset, inputs of unit variance give outputs of unit variance.

    Raises:
        ValueError: it is outside the range of exponents.
    """
    deviation = math.log2(GAUSSIAN_DENSITY * max(fan_in, 1))
    exponent = round(-0.5 * deviation) + offset
    if not EXPONENT_RANGE[0] <= exponent <= EXPONENT_RANGE[1]:
        raise ValueError(f"initial exponent {exponent} is outside {EXPONENT_RANGE}")
    return exponent


class VoteOptions(TypedDict, total=False):
    """How a ternary module learns, and with which kernels.

    Attributes:
        gradients: ``float``, the default, or ``int8`` (stochastically rounded; votes are then exact
            integers).
        scale_rule: how the exponents learn: ``residual`` (by votes, the default) or ``frozen``;
            those of an embedding also by ``correlation``.
        vote_bits: bits of an accumulator: 8, the default, 4 or 2 (which need a backend with the
            capability ``narrow_votes``).
        backend: the kernel backend; None, the default, takes the current one. On a device that it
            does not serve, weight and votes have the layout of torch, and the module cannot
            compute.
    """

    gradients: str
    scale_rule: ScaleRule
    vote_bits: int
    backend: str | None


class TernaryModule(VoteMemory):
    """A ternary weight ``W[n, k] = T[n, k] * 2**E[n, k // G]`` and the integers that it learns by.

    Buffers: ``weight`` (uint8, layout of ``backend``), ``exponent`` int8 ``[N, J]``,
    ``exponent_origin`` int8 broadcastable to ``[N, J]`` (the initial exponents, the centre of the
    band), ``votes`` (layout of ``backend``), ``exponent_votes`` int8 ``[N, J]``, ``control`` int64
    ``[4]``. There is no float parameter and no float buffer. State dicts hold the at-rest form of
    weight and votes. The base class has what a module needs within a step only.

    Args:
        rows: ``N``.
        columns: ``K``.
        group_size: columns that share an exponent.
        fan_in: determines the initial exponent.
        exponent_offset: added to the initial exponent.
        options: see :class:`VoteOptions`.

    Raises:
        ValueError: an argument is outside its range.
        EnvironmentProblem: the backend does not serve ``vote_bits``.
    """

    exponent: Tensor
    exponent_origin: Tensor
    exponent_votes: Tensor
    control: Tensor

    #: The scale rules that this kind of module supports.
    scale_rules: tuple[ScaleRule, ...] = ("residual", "frozen")

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        group_size: GroupSize,
        fan_in: int,
        exponent_offset: int = 0,
        **options: Unpack[VoteOptions],
    ) -> None:
        super().__init__()
        if rows < 0 or columns < 0:
            raise ValueError(f"features must not be negative, got {rows} x {columns}")
        gradients = options.get("gradients", "float")
        scale_rule = options.get("scale_rule", "residual")
        vote_bits = options.get("vote_bits", 8)
        _check_choice("group_size", group_size, GROUP_SIZES)
        _check_choice("gradients", gradients, ("float", "int8"))
        _check_choice("scale_rule", scale_rule, self.scale_rules)
        _check_choice("vote_bits", vote_bits, VOTE_BITS)
        # The backend that computes; ``self.backend`` is the one that owns the layout.
        backend = options.get("backend")
        self.chosen_backend = current_backend() if backend is None else backend
        get_backend(self.chosen_backend)
        check_vote_bits(self.chosen_backend, vote_bits)

        group = max(columns, 1) if group_size == "row" else int(group_size)
        self.group_size = group_size
        self.sizes = (rows, columns, group, vote_bits)
        self.allocate(WeightShape(rows, columns, group, vote_bits))
        self.gradients = gradients
        self.scale_rule: ScaleRule = scale_rule
        self.frozen = False
        self.accum_threshold = min(32, self.shape.largest_vote)
        self.e_accum_threshold = 32
        self.anchor = torch.empty(0, requires_grad=True)

        trits = initial_trits(rows, columns)
        self.backend = _layout_backend(self.chosen_backend, trits.device)
        pack = kernel(self.backend, "pack")
        self.register_buffer("weight", pack(trits))

        groups = self.shape.groups
        first = initial_exponent(fan_in, exponent_offset)
        exponents = torch.full((rows, groups), first, dtype=torch.int8)
        origin = torch.full((1, 1), first, dtype=torch.int8)
        self.register_buffer("exponent", exponents)
        self.register_buffer("exponent_origin", origin)

        voting_rows = rows if self.accumulates else 0
        no_votes = torch.zeros(voting_rows, columns, dtype=torch.int8)
        packed_votes = pack_votes(self.backend, no_votes, vote_bits)
        self.register_buffer("votes", packed_votes, persistent=self.accumulates)
        exponent_votes = torch.zeros(rows, groups, dtype=torch.int8)
        self.register_buffer("exponent_votes", exponent_votes)
        self.register_buffer("control", new_control())

    # --- weight and votes as logical values

    def trits(self) -> Tensor:
        """``T`` as int8 ``[N, K]``."""
        trits: Tensor = kernel(self.backend, "unpack")(self.weight, self.shape)
        return trits

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``T * 2**E`` as a float matrix ``[N, K]``; exact in float32 and bfloat16."""
        scale = spread_over_columns(power_of_two(self.exponent), self.shape)
        return (self.trits() * scale).to(dtype)

    def logical_votes(self, votes: Tensor | None = None) -> Tensor:
        """Return the accumulators, or others in their layout, as int8 ``[N, K]``.

        Collective if several ranks share them.
        """
        local = self.local_votes(votes)
        if self.shard is None:
            return local
        return self.shard.gather(local)

    def local_votes(self, votes: Tensor | None = None) -> Tensor:
        """Return :meth:`logical_votes` of the rows that this rank keeps."""
        packed = self.votes if votes is None else votes
        logical: Tensor = kernel(self.backend, "unpack_votes")(packed, self._local_shape())
        return logical

    def packed_votes(self, logical: Tensor) -> Tensor:
        """Return accumulators int8 ``[N, K]`` in the layout and on the device of the module.

        They are those of the rows that this rank keeps.
        """
        local = logical
        if self.shard is not None:
            local = logical[self.shard.rows]
        local = local.to(self.votes.device)
        return pack_votes(self.backend, local, self.shape.vote_bits)

    def _local_shape(self) -> WeightShape:
        """Return the shape of the rows that this rank keeps."""
        if self.shard is None:
            return self.shape
        rows = self.shard.rows
        return evolve(self.shape, out_features=rows.stop - rows.start)

    @torch.no_grad()
    def set_trits(
        self, trits: Tensor, exponent: Tensor | None = None, votes: Tensor | None = None
    ) -> None:
        """Replace the weight, and the votes.

        Args:
            trits: int8 ``[N, K]`` in {-1, 0, 1}.
            exponent: int8 ``[N, J]`` in -126..127; it also becomes the origin of the band. None
                keeps the exponents.
            votes: int8 ``[N, K]``, the accumulators, within their bits; None clears them.

        Raises:
            ValueError: a dtype, shape or range is wrong; nothing is changed.
        """
        self._check_matrix("trits", trits)
        if trits.numel() and int(trits.abs().amax()) > 1:
            raise ValueError("trits must be -1, 0 or 1")
        if votes is not None:
            self._check_matrix("votes", votes)
            self._check_votes(votes)
        if exponent is not None:
            self._check_exponent(exponent)
            self.exponent.copy_(exponent)
            if exponent.numel():
                first = exponent[:1, :1]
                origin = first if bool((exponent == first).all()) else exponent
                self.exponent_origin = origin.to(self.exponent.device, copy=True)
        pack = kernel(self.backend, "pack")
        self.weight.copy_(pack(trits.to(self.weight.device)))
        if votes is None:
            votes = torch.zeros_like(trits)
        self.set_votes(votes)
        self.exponent_votes.zero_()

    @torch.no_grad()
    def set_votes(self, votes: Tensor) -> None:
        """Replace the accumulators by int8 ``[N, K]`` that fit their bits."""
        self.commit_votes()
        self.votes.copy_(self.packed_votes(votes))

    def _check_matrix(self, name: str, tensor: Tensor) -> None:
        expected = (self.shape.out_features, self.shape.in_features)
        if tensor.dtype != torch.int8 or tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} must be int8 {expected}, got {tensor.dtype} {tuple(tensor.shape)}"
            )

    def _check_exponent(self, exponent: Tensor) -> None:
        if exponent.dtype != torch.int8 or exponent.shape != self.exponent.shape:
            raise ValueError(
                f"exponent must be int8 {tuple(self.exponent.shape)}, got {tuple(exponent.shape)}"
            )
        if exponent.numel() and int(exponent.amin()) < EXPONENT_RANGE[0]:
            raise ValueError(f"exponents must lie in {EXPONENT_RANGE}, got {int(exponent.amin())}")

    def _check_votes(self, votes: Tensor) -> None:
        low = self.shape.smallest_vote
        high = self.shape.largest_vote
        if votes.numel() == 0:
            return
        if int(votes.amin()) < low or int(votes.amax()) > high:
            raise ValueError(f"votes of {self.shape.vote_bits} bits lie in {low}..{high}")

    # --- backend and device

    def set_backend(self, name: str) -> None:
        """Compute with another backend. Weight and votes are repacked; no logical value changes."""
        get_backend(name)
        check_vote_bits(name, self.shape.vote_bits)
        self.chosen_backend = name
        self._repack(_layout_backend(name, self.weight.device))

    @torch.no_grad()
    def _repack(self, name: str) -> None:
        """Give weight and votes the layout of another backend."""
        if name == self.backend:
            return
        self.commit_votes()
        trits = self.trits()
        votes = self.local_votes()
        self.backend = name
        self.weight = kernel(name, "pack")(trits)
        self.votes = pack_votes(name, votes, self.shape.vote_bits)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The kernels of one device cannot read the layout of another. Weight and votes have the
        # layout of torch when they change device.
        before = self.weight.device
        moved = fn(torch.empty(0, dtype=torch.uint8, device=before))
        if moved.dtype != torch.uint8:
            raise UsageProblem(
                f"{type(self).__name__}: trits and accumulators are integers, and {moved.dtype} "
                f"would destroy them",
                "Use model.to(dtype), model.half() or model.bfloat16(), which convert float "
                "parameters only.",
            )
        after = moved.device
        if before.type != after.type and _META not in (before.type, after.type):
            self._repack(_TORCH)
        super()._apply(fn, recurse)
        if after.type != _META:
            self._repack(_layout_backend(self.chosen_backend, after))
        return self

    # --- forward

    def multiply(self, x: Tensor, activations: str, bias: Tensor | None = None) -> Tensor:
        """``x @ W.T + bias`` for ``x [..., K]``: ``[..., N]`` in the dtype of ``x``.

        Backward casts the votes. Under autocast ``x`` is converted to the dtype of autocast, as
        ``torch.nn.functional.linear`` does.
        """
        x = self.in_autocast(x)
        flat = x.reshape(-1, self.shape.in_features)
        anchor = self.vote_anchor()
        state = self.vote_state()
        y_MN, _, _ = ops.linear(flat, anchor, bias, *state, activations, self.gradients)
        if anchor is not None:
            self.expect_votes(y_MN)
        leading = x.shape[:-1]
        y: Tensor = y_MN.view(*leading, self.shape.out_features)
        return y

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``W[ids]`` for int64 ``ids [M]``: ``[M, K]`` in ``dtype``.

        Backward casts the votes of those rows.
        """
        anchor = self.vote_anchor()
        state = self.vote_state()
        rows: Tensor = ops.embedding(ids, anchor, *state, dtype, self.gradients)
        if anchor is not None:
            self.expect_votes(rows)
        return rows

    @staticmethod
    def in_autocast(x: Tensor) -> Tensor:
        """Return ``x`` in the dtype of autocast, if that is enabled."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return x
        return x.to(torch.get_autocast_dtype(kind))

    def vote_anchor(self) -> Tensor | None:
        """Return the tensor that makes backward reach this module; None if it casts no votes now.

        Raises:
            UsageProblem: the model is wrapped in torch's ``DistributedDataParallel``, which would
                replace all votes by those of rank 0, or in ``DataParallel``, which would lose them.
        """
        if self.frozen or not torch.is_grad_enabled():
            return None
        if DistributedDataParallel._active_ddp_module is not None:
            raise UsageProblem(
                "DistributedDataParallel: it averages float gradients, and leaves the ternary "
                "modules with the votes of their own rank, or overwrites them with those of rank 0",
                "Train with several processes: torchrun --nproc_per_node N -m arb_ternary train "
                "CONFIG",
            )
        if getattr(self, "_is_replica", False):
            raise UsageProblem(
                "DataParallel: its copies of a model are thrown away after each pass, with the "
                "votes that ternary modules cast in them",
                "Train on one device (CUDA_VISIBLE_DEVICES=0), or with several processes: torchrun "
                "--nproc_per_node N -m arb_ternary train CONFIG",
            )
        return self.anchor

    def vote_state(self) -> VoteState:
        """Return weight and training state as ops and kernels take them.

        Raises:
            EnvironmentProblem: the chosen backend does not serve the device.
        """
        if self.backend != self.chosen_backend:
            raise EnvironmentProblem(
                f"backend {self.chosen_backend!r} cannot compute on {self.weight.device}",
                "move the module to a device that it serves, or call set_backend: arb backends "
                "list",
            )
        state = VoteState(
            weight=self.weight,
            exponent=self.exponent,
            origin=self.exponent_origin,
            votes=self.votes,
            exponent_votes=self.voting_exponents(),
            stats=self.stats,
            control=self.control,
            limits=self.vote_limits,
            magnitudes=self.magnitudes,
            vote_scale=self.vote_scale,
            correlation=None,
            steps=None,
            sizes=self.sizes,
            backend=self.backend,
            transform=self.transform,
        )
        if self.sums is None:
            return state
        learns = state.exponent_votes is not None
        return state._replace(
            stats=self.sums.stats,
            magnitudes=self.sums.magnitudes,
            sums=self.sums.votes,
            exponent_sums=self.sums.exponent_votes if learns else None,
        )

    def voting_exponents(self) -> Tensor | None:
        """The accumulators of the exponents; None if these do not learn by residual votes."""
        return self.exponent_votes if self.scale_rule == "residual" else None

    # --- a step of an optimizer

    def add_votes(self, votes: Tensor, low: int) -> None:
        """Add integers ``[n, K]`` to the accumulators that this rank keeps.

        They are clipped at ``low`` and the largest vote.
        """
        own_kernel: Any = get_backend(self.backend).kernels.get("add_votes")
        if own_kernel is not None:
            own_kernel(self.votes, self._local_shape(), votes, low)
            torch.autograd.graph.increment_version((self.votes,))
            return
        total = torch.add(votes, self.local_votes())
        total = total.clamp_(low, self.shape.largest_vote).to(torch.int8)
        self.votes.copy_(pack_votes(self.backend, total, self.shape.vote_bits))

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """Turn votes into flips; return the number of trits that changed, an int64 scalar.

        ``op`` is ``apply_votes`` or ``apply_scaled_votes``; ``settings`` are those of the kernel.
        """
        if self.shard is not None:
            return self.shard.apply_votes(op, *settings)
        apply = kernel(self.backend, op)
        changed: Tensor = apply(self.vote_state(), *settings)
        torch.autograd.graph.increment_version((self.weight, self.votes))
        return changed

    def apply_exponent_votes(self, threshold: int, band: int, leak: int = 0) -> Tensor:
        """Move the exponents, if they learn by residual votes.

        Returns the number of exponents that changed, an int64 scalar. The arguments are those of
        the kernel of this name.
        """
        if self.voting_exponents() is None:
            return torch.zeros((), dtype=torch.int64, device=self.weight.device)
        # First, so that a backend may cache facts about the new exponents by their version.
        torch.autograd.graph.increment_version((self.exponent, self.exponent_votes))
        apply = kernel(self.backend, "apply_exponent_votes")
        moved: Tensor = apply(self.vote_state(), threshold, band, leak)
        return moved

    # --- state dicts, which hold the at-rest form

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = encode_at_rest(self.trits())
        if self.accumulates:
            votes = self.logical_votes()
            if self.shape.vote_bits == 2:
                votes = encode_at_rest(votes)
            destination[prefix + "votes"] = votes

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        self.commit_votes()
        converted = dict(state_dict)
        weight = prefix + "weight"
        if weight in converted:
            trits = decode_at_rest(converted[weight], self.shape.in_features, weight)
            if trits.shape[0] == self.shape.out_features:
                pack = kernel(self.backend, "pack")
                converted[weight] = pack(trits.to(self.weight.device))

        votes = prefix + "votes"
        saved = converted.pop(votes, None)
        if saved is not None and self.accumulates:
            logical = self._votes_from_rest(saved, votes)
            expected = (self.shape.out_features, self.shape.in_features)
            if tuple(logical.shape) == expected:
                converted[votes] = self.packed_votes(logical)
            else:
                converted[votes] = saved  # its shape is an error of loading

        origin = converted.get(prefix + "exponent_origin")
        if origin is not None and origin.shape in ((1, 1), self.exponent.shape):
            self.exponent_origin = self.exponent_origin.new_empty(origin.shape)
        super()._load_from_state_dict(converted, prefix, *others)

    def _votes_from_rest(self, saved: Tensor, name: str) -> Tensor:
        """Return the accumulators of a state dict as int8.

        Raises:
            CheckpointError: they were saved with other bits.
        """
        bits = self.shape.vote_bits
        if bits == 2:
            return decode_at_rest(saved, self.shape.in_features, name)
        if saved.dtype != torch.int8:
            raise CheckpointError(
                f"{name}: accumulators of {bits} bits are int8 at rest, got {saved.dtype}"
            )
        try:
            self._check_votes(saved)
        except ValueError as error:
            raise CheckpointError(
                f"{name}: {error}", "load it into a model with the vote_bits that wrote it"
            ) from error
        return saved

    def extra_repr(self) -> str:
        """The facts that ``print(model)`` shows."""
        bits = "" if self.shape.vote_bits == 8 else f", vote_bits={self.shape.vote_bits}"
        return (
            f"{self.shape.out_features}x{self.shape.in_features}, group_size={self.group_size!r}, "
            f"gradients={self.gradients}, backend={self.backend}{bits}"
        )


def _check_choice(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def _layout_backend(name: str, device: torch.device) -> str:
    """Return the backend that owns the layout on a device: ``name`` if it serves it, else torch."""
    if name == _TORCH or device.type == _META or serves(name, device.type):
        return name
    return _TORCH

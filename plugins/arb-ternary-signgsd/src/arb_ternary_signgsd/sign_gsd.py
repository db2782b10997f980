"""SignGSD for float parameters: a step by sign and a decay by sign, without optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ArbError, ConfigError, nearest
from arb_ternary.optim.protocol import StepOutcome

NanPolicy = Literal["error", "zero", "skip"]

#: What a step may do if a gradient is NaN.
NAN_POLICIES: Final[tuple[NanPolicy, ...]] = ("error", "zero", "skip")

_MIB = 1024 * 1024
_OPTIONS = ("lr", "weight_decay", "maximize", "foreach", "nan_policy", "kind")


class NanGradientError(ArbError):
    """A gradient holds NaN and the policy is ``"error"``; no parameter has been changed."""


class _Entry(NamedTuple):
    """A parameter that has a gradient, and its position in the param groups."""

    parameter: Tensor
    gradient: Tensor
    group: int
    position: int


class SignGSD(Optimizer):
    """``p -= lr * (sign(g) + weight_decay * sign(p))``.

    Only the direction of a gradient counts: every element with a non-zero gradient moves by the
    same amount, and ``state`` stays empty. Weight decay acts on the sign of a parameter and not on
    its value, so all non-zero elements decay by the same amount. An infinite gradient has a sign
    and is used; NaN has none and is handled by ``nan_policy``.

    Sparse (COO) gradients are never made dense. Without weight decay only the rows that have a
    gradient change; with it the other rows decay too. In both cases the result is bitwise that of
    the dense rule.

    Args:
        params: parameters, ``(name, parameter)`` pairs or param groups; real floating-point
            tensors.
        lr: size of the step of every element, >= 0.
        weight_decay: size of the decay as a multiple of ``lr``, >= 0.
        maximize: maximize the loss; the decay still points to zero.
        foreach: True updates the parameters of a group together, which is faster on an accelerator
            and needs temporary memory of the size of the group; False updates one parameter at a
            time; None chooses True for groups on an accelerator and False elsewhere. The results
            are bitwise equal.
        nan_policy: ``"error"`` raises :class:`NanGradientError`, ``"zero"`` treats NaN as a
            gradient of zero, ``"skip"`` drops the whole step and clears the gradients. Under
            ``"error"`` and ``"skip"`` no parameter of any group changes. If groups differ,
            ``"error"`` wins over ``"skip"``.

    Attributes:
        skipped_steps: steps dropped under ``nan_policy="skip"`` since construction; not part of
            ``state_dict``.

    Raises:
        ConfigError: an argument is outside its range, or a parameter is not a real floating-point
            tensor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        nan_policy: NanPolicy = "error",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "nan_policy": nan_policy,
            "kind": "float",
        }
        _check_options(defaults, "SignGSD")
        super().__init__(params, defaults)
        self.skipped_steps = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("skipped_steps", 0)
        for group in self.param_groups:
            # Only our own options: torch adds entries to ``defaults`` here, and a group that had
            # them would differ from that of a run that was never restored.
            for key in _OPTIONS:
                group.setdefault(key, self.defaults[key])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its options like those of the constructor."""
        where = f"SignGSD: param group {len(self.param_groups)}"
        _check_options({**self.defaults, **param_group}, where)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for index, parameter in enumerate(group["params"]):
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise ConfigError(
                    f"{where}, parameter {index}: dtype {parameter.dtype} has no sign",
                    "SignGSD trains real floating-point parameters (float32, float64, bfloat16, "
                    "float16)",
                )

    @property
    def refuses(self) -> bool:
        """True if a step may be skipped because of a NaN gradient."""
        return any(group["nan_policy"] == "skip" for group in self.param_groups)

    def may_step(self) -> bool:
        """Return whether a step would be taken and not skipped because of a NaN gradient.

        Raises:
            NanGradientError: as :meth:`step` does.
        """
        poisoned = _with_nan(self._entries())
        return not poisoned or self._may_continue(poisoned)

    @overload  # type: ignore[override]
    def step(self, closure: None = None) -> StepOutcome: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | StepOutcome:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss; run with gradients enabled.

        Returns:
            The result of ``closure``, as any torch optimizer does; without one, the outcome.

        Raises:
            NanGradientError: a gradient holds NaN under ``nan_policy="error"``; nothing has been
                changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        outcome = self._update()
        return outcome if loss is None else loss

    def _update(self) -> StepOutcome:
        entries = self._entries()
        poisoned = _with_nan(entries)
        if poisoned and not self._may_continue(poisoned):
            self.skipped_steps += 1
            self.zero_grad()
            return StepOutcome(stepped=False, skipped=True)
        clear_nan = bool(poisoned)
        for number, group in enumerate(self.param_groups):
            members = [entry for entry in entries if entry.group == number]
            sparse = [entry for entry in members if entry.gradient.is_sparse]
            dense = [entry for entry in members if not entry.gradient.is_sparse]
            together = [[entry] for entry in dense]
            if _takes_foreach(group["foreach"], dense):
                together = [dense]
            for some in together:
                _update_dense(some, group, clear_nan=clear_nan)
            for entry in sparse:
                _update_sparse(entry.parameter, entry.gradient, group, clear_nan=clear_nan)
        return StepOutcome()

    def get_memory_mb(self, params: Iterable[Tensor] | None = None) -> float:
        """Return the MiB of the given parameters, by default all of the optimizer's.

        The optimizer itself needs no memory.
        """
        if params is None:
            params = [parameter for group in self.param_groups for parameter in group["params"]]
        return sum(parameter.numel() * parameter.element_size() for parameter in params) / _MIB

    def planned_state_bytes(self) -> int:
        """Return 0: the optimizer has no state."""
        return 0

    def _entries(self) -> list[_Entry]:
        """Return every parameter with a gradient.

        Sparse gradients are coalesced: duplicates are summed before the sign is taken.
        """
        entries = []
        for number, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                entries.append(_Entry(parameter, gradient, number, position))
        return entries

    def _may_continue(self, poisoned: Sequence[_Entry]) -> bool:
        """Apply the policies of the groups whose gradients hold NaN.

        Returns:
            True if the step is taken (zero), False if it is dropped (skip).

        Raises:
            NanGradientError: a group has the policy ``"error"``.
        """
        policies = {entry.group: self.param_groups[entry.group]["nan_policy"] for entry in poisoned}
        for entry in poisoned:
            if policies[entry.group] == "error":
                values = _values(entry.gradient)
                count = int(values.isnan().sum())
                raise NanGradientError(
                    f"{self._describe(entry)}: the gradient holds {count} NaN of {values.numel()} "
                    "values; no parameter was changed",
                    'nan_policy "zero" treats NaN as a gradient of zero, "skip" drops the whole '
                    "step",
                )
        return "skip" not in policies.values()

    def _describe(self, entry: _Entry) -> str:
        names = self.param_groups[entry.group].get("param_names")
        name = f" ({names[entry.position]!r})" if names else ""
        shape = tuple(entry.parameter.shape)
        return (
            f"SignGSD: param group {entry.group}, parameter {entry.position}{name}, shape {shape}"
        )


#: The name of the source document that the rule comes from.
ScaledOptum = SignGSD


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a dense or coalesced sparse gradient."""
    return gradient._values() if gradient.is_sparse else gradient


def _with_nan(entries: Sequence[_Entry]) -> list[_Entry]:
    """Return the entries whose gradients hold NaN, in their order.

    The host usually waits once per device: a sum is NaN if one of its terms is, so only gradients
    with a NaN sum are searched (infinities of both signs give one too).
    """
    by_device: dict[torch.device, list[_Entry]] = {}
    for entry in entries:
        by_device.setdefault(entry.gradient.device, []).append(entry)
    found = []
    for members in by_device.values():
        sums = [_values(entry.gradient).sum(dtype=torch.float32) for entry in members]
        suspicious = torch.stack(sums).isnan().tolist()
        for entry, suspect in zip(members, suspicious, strict=True):
            if suspect and bool(_values(entry.gradient).isnan().any()):
                found.append(entry)
    return sorted(found, key=lambda entry: (entry.group, entry.position))


def _takes_foreach(requested: bool | None, entries: Sequence[_Entry]) -> bool:
    if requested is None:
        types = {entry.parameter.device.type for entry in entries}
        return bool(types) and types <= {"cuda", "xpu"}
    return requested


# Both updates below use the same elementwise operations in the same order, whatever is updated
# together. None of them can be contracted into a fused multiply-add, so the results are bitwise
# equal.


def _update_dense(entries: Sequence[_Entry], group: dict[str, Any], *, clear_nan: bool) -> None:
    by_type: dict[
        tuple[torch.device, torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]
    ] = {}
    for entry in entries:
        key = (entry.parameter.device, entry.parameter.dtype, entry.gradient.dtype)
        parameters, gradients = by_type.setdefault(key, ([], []))
        parameters.append(entry.parameter)
        gradients.append(entry.gradient)
    for parameters, gradients in by_type.values():
        updates = torch._foreach_sign(gradients)
        if clear_nan:
            for update in updates:
                update.nan_to_num_(nan=0.0)
        if group["maximize"]:
            torch._foreach_neg_(updates)
        if group["weight_decay"] != 0:
            decays = torch._foreach_sign(parameters)
            torch._foreach_mul_(decays, group["weight_decay"])
            torch._foreach_add_(updates, decays)
        torch._foreach_mul_(updates, -group["lr"])
        torch._foreach_add_(parameters, updates)


def _update_sparse(
    parameter: Tensor, gradient: Tensor, group: dict[str, Any], *, clear_nan: bool
) -> None:
    where = tuple(gradient._indices())
    signs = gradient._values().sign()
    if clear_nan:
        signs.nan_to_num_(nan=0.0)
    if group["maximize"]:
        signs.neg_()
    if group["weight_decay"] == 0:
        parameter[where] = parameter[where].add_(signs.mul_(-group["lr"]))
        return
    update = parameter.sign().mul_(group["weight_decay"])
    update[where] = signs.add_(update[where])
    parameter.add_(update.mul_(-group["lr"]))


def _check_options(options: dict[str, Any], where: str) -> None:
    for name in ("lr", "weight_decay"):
        value = options[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{where}: {name} must be a finite number >= 0, not {value!r}")
    if not isinstance(options["maximize"], bool):
        raise ConfigError(f"{where}: maximize must be true or false, not {options['maximize']!r}")
    if not (options["foreach"] is None or isinstance(options["foreach"], bool)):
        raise ConfigError(
            f"{where}: foreach must be true, false or None, not {options['foreach']!r}"
        )
    policy = options["nan_policy"]
    if policy not in NAN_POLICIES:
        close = nearest(policy, NAN_POLICIES) if isinstance(policy, str) else None
        hint = f"did you mean {close!r}? " if close else ""
        raise ConfigError(
            f"{where}: nan_policy must be one of {', '.join(map(repr, NAN_POLICIES))}, not "
            f"{policy!r}",
            hint.strip(),
        )

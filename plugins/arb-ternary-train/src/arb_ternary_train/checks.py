"""The checks ``pure`` and ``validation_loss``."""

from __future__ import annotations

from attrs import frozen

from arb_ternary.config.options import option, positive
from arb_ternary.protocols.runs import RunContext
from arb_ternary_train.protocols import CheckResult


class PureCheck:
    """Passes if the model has no float parameter and no float buffer."""

    def check(self, context: RunContext) -> CheckResult:
        """Audit the model of the run."""
        # Configs of checks are read without torch.
        from arb_ternary_train.audit import audit

        counted = audit(context.model)
        numbers = {
            "ternary_weights": float(counted.ternary_weights),
            "float_parameters": float(counted.float_parameters),
            "float_buffers": float(counted.float_buffers),
        }
        summary = (
            f"{counted.ternary_weights:,} ternary weights, {counted.float_parameters:,} float "
            f"parameters, {counted.float_buffers:,} floats in buffers"
        )
        return CheckResult(passed=counted.pure, summary=summary, metrics=numbers)


@frozen(kw_only=True)
class ValidationLossConfig:
    """Options of the check ``validation_loss``."""

    max: float = option(
        help="largest validation loss that passes, in nats per token", validator=positive
    )


class ValidationLossCheck:
    """Passes if the validation loss at the end of the run is at most ``config.max``."""

    def __init__(self, config: ValidationLossConfig) -> None:
        self.config = config

    def check(self, context: RunContext) -> CheckResult:
        """Compare the loss at the end of the run; one that is not a number does not pass."""
        loss = context.held_out_loss()
        return CheckResult(
            passed=loss <= self.config.max,
            summary=f"validation loss {loss:.4f}, at most {self.config.max:g} allowed",
            metrics={"validation_loss": loss, "max": self.config.max},
        )


def build_pure(config: None) -> PureCheck:
    """Build the check ``pure``."""
    return PureCheck()


def build_validation_loss(config: ValidationLossConfig) -> ValidationLossCheck:
    """Build the check ``validation_loss``."""
    return ValidationLossCheck(config)

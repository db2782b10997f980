"""A trained run whose model fills in hidden tokens, read back to draw text with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.errors import UsageProblem
from arb_ternary.protocols.data import MaskingStrategy
from arb_ternary_diffusion.text_sampler import Predict, predictor
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_train.build import require_protocol
from arb_ternary_train.capabilities import max_length, reserved_ids
from arb_ternary_train.restore import load_run


@frozen(eq=False)
class TextRun:
    """The parts of a run that are needed to draw text.

    Attributes:
        tokenizer: the tokenizer of the data that the model was trained on.
        predict: evaluates the model, which is in evaluation mode.
        mask_token: the id that stood for hidden tokens in training.
        context: the longest text that the model takes.
    """

    tokenizer: Tokenizer
    predict: Predict
    mask_token: int
    context: int


def load_text_run(path: Path, *, backend: str | None = None, device: str | None = None) -> TextRun:
    """Read a run directory or a checkpoint; see ``arb_ternary_train.restore.load_run``.

    Raises:
        UsageProblem: its masking hides no tokens, its model sees one side only, or its data is not
            text.
        CheckpointError: the checkpoint is damaged or missing.
    """
    trained = load_run(path, backend=backend, device=device)
    config = trained.config
    masking: Any = require_protocol(config.masking.build(), MaskingStrategy, config.masking)
    attached = trained.directory.attachments()
    if "tokenizer" not in attached:
        raise UsageProblem(
            f"{path}: its data {config.data.name!r} has no tokenizer, so it has no text"
        )
    tokenizer = from_json(attached["tokenizer"])
    reserved = reserved_ids(masking, tokenizer.vocabulary_size)
    context = max_length(trained.model)
    is_causal = getattr(config.model.options, "causal", False)
    if len(reserved) != 1 or context is None or is_causal:
        raise UsageProblem(
            f"{path}: its model {config.model.name!r}, trained with masking "
            f"{config.masking.name!r}, does not fill in hidden tokens",
            "Train with masking: absorbing and a model with causal: false, or continue a prompt "
            "with the generator of this model: arb generate RUN.",
        )
    (mask_token,) = reserved
    predict = predictor(trained.model, mask_token, tokenizer.vocabulary_size, trained.device)
    return TextRun(tokenizer, predict, mask_token, context)

"""Publishing on the Hugging Face Hub: a folder for transformers with a GGUF file and a card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError, ConfigError, EnvironmentProblem, UsageProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_interchange.components import named_exporter
from arb_ternary_interchange.export import export_opened
from arb_ternary_train.audit import audit
from arb_ternary_train.model_source import open_model

_CARD: Final = "README.md"
_USE: Final = """
## Use it

With ARB Ternary:

```
pip install "arb-ternary[hub,chat]"
arb generate hf://{repository} --prompt "Once"
```
"""
_LLAMA: Final = """
With llama.cpp, which downloads `{file}`:

```
llama-cli -hf {repository}
```
"""
_SIZE: Final = """
## Size

{weights:,} weights, {ternary:.1%} of them ternary; {bits:.2f} bits per weight in `{file}`.
"""


@frozen
class Publication:
    """Options of a published model.

    Attributes:
        repository: ``org/name`` on the hub.
        base_model: the model that it was made from; None = not said.
        licence: identifier of its licence; None = not said.
        private: make a new repository private.
    """

    repository: str
    base_model: str | None = None
    licence: str | None = None
    private: bool = False


def publish(source: str, publication: Publication) -> tuple[str, tuple[str, ...]]:
    """Upload a model; return its address, and notes about what was lost, a sentence each.

    The token is checked before the model is read.

    Raises:
        UsageProblem: a name is none, or there is no token, or the hub refuses it.
        EnvironmentProblem: ``huggingface_hub`` is missing, or the hub cannot be reached.
        ArbError: the model cannot be written.
    """
    hub = _library()
    _check_names(publication)
    api = hub.HfApi()
    if hub.get_token() is None:
        raise UsageProblem(
            "push: there is no token for the hub", "Run `hf auth login`, or set HF_TOKEN."
        )
    repository = publication.repository
    with _explained(repository):
        api.whoami()
    with tempfile.TemporaryDirectory(prefix="arb-push-") as temporary:
        folder = Path(temporary) / "model"
        notes = write_publication(source, folder, publication)
        with _explained(repository):
            address = api.create_repo(repository, private=publication.private, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message="Upload by arb push"
            )
    return str(address), notes


def write_publication(source: str, folder: Path, publication: Publication) -> tuple[str, ...]:
    """Write what :func:`publish` uploads to a new folder; return the notes.

    Raises:
        UsageProblem: a name is none, or the folder exists.
        ArbError: the model cannot be written.
    """
    hub = _library()
    _check_names(publication)
    exporter = named_exporter("hf")
    opened = open_model(source, accumulators=False)
    notes = list(export_opened(opened, folder, "hf", exporter).notes)
    try:
        file = folder / f"{publication.repository.partition('/')[2]}.gguf"
        try:
            export_opened(opened, file, "gguf", named_exporter("gguf"))
        except ConfigError as error:
            notes.append(f"no GGUF file is beside it: {error.what}")
        if publication.licence is None:
            notes.append("the card names no licence: --license ID")
        start = None if opened.run is None else opened.run.directory.record().get("init_from")
        if start is not None and publication.base_model is None:
            notes.append(
                f"the run began as {start}, and the card names no base model: --base-model ORG/NAME"
            )
        counted = audit(opened.module)
        text = _USE.format(repository=publication.repository)
        size = ""
        if file.exists():
            text += _LLAMA.format(file=file.name, repository=publication.repository)
            size = _SIZE.format(
                weights=counted.parameters,
                ternary=counted.ternary_weights / counted.parameters,
                bits=8 * file.stat().st_size / counted.parameters,
                file=file.name,
            )
        _complete_card(hub, folder / _CARD, publication, text + size)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return tuple(notes)


def _complete_card(hub: Any, path: Path, publication: Publication, text: str) -> None:
    """Add what is known about a publication to the card of an exported folder."""
    card = hub.ModelCard.load(path)
    card.data.base_model = publication.base_model
    card.data.license = publication.licence
    card.data.pipeline_tag = "text-generation"
    card.data.tags = ["ternary", "arb-ternary"]
    # The exporter does not know the name, and writes `folder`.
    named = card.text.replace("(folder, ", f'("{publication.repository}", ')
    card.text = named.replace("pretrained=folder", f"pretrained={publication.repository}") + text
    card.save(path)


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise EnvironmentProblem(
            "push: needs the package huggingface_hub, which is not installed",
            install_command("arb-ternary-interchange[hub]"),
        ) from error
    return huggingface_hub


def _check_names(publication: Publication) -> None:
    """Check that names are ``org/name``, as the hub does."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    for name in (publication.repository, publication.base_model):
        if name is None:
            continue
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise UsageProblem(f"push: {_first_line(error)}", "Write org/name.") from error
        if name.count("/") != 1:
            raise UsageProblem(f"push: {name!r} names no organisation or user", "Write org/name.")


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Have errors of the hub be one line each.

    Raises:
        UsageProblem: the hub refuses.
        EnvironmentProblem: it cannot be reached.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise UsageProblem(
                "push: the hub does not know this token", "Run `hf auth login` for a new one."
            ) from error
        if status == 403:
            raise UsageProblem(
                f"push: this token may not write to {repository}",
                "Use a token with the right to write, of a member of that organisation.",
            ) from error
        raise ArbError(f"push: the hub answers {status}: {_first_line(error)}") from error
    except (OSError, HTTPError) as error:
        raise EnvironmentProblem(
            f"push: the hub cannot be reached: {_first_line(error)}",
            "--dry-run FOLDER writes the files without it.",
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

"""Published models as runs: float scales are folded exactly, rounded or kept, and notes say so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from attrs import define, field
from torch import Tensor

from arb_ternary.config.choice import Choice
from arb_ternary.errors import ConfigError, DataError
from arb_ternary.plugins.manager import manager
from arb_ternary_interchange.decoder.conversion import convert
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.tensors import DecoderShape, is_bias
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_votes.scaled_votes import CELLS as CELLS_OF_THE_RULE

Restated = Callable[[Mapping[str, Tensor], DecoderConfig, Tensor], Tensor]

VOCABULARY = 19
SIZES: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 48,
    "max_length": 16,
    "norm_eps": 1e-3,
    "rotary_base": 500.0,
    "activations": "float",
}


@define
class Published:
    """A model in memory, as the reader of a format would present it."""

    architecture: str
    options: dict[str, Any]
    tensors: dict[str, Tensor | ScaledTrits]
    vocabulary_size: int = VOCABULARY
    tokenizer: dict[str, Any] | None = None
    unmapped: tuple[str, ...] = ()
    reads: list[str] = field(factory=list)

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> Tensor | ScaledTrits:
        self.reads.append(name)
        return self.tensors[name]

    def dense(self) -> dict[str, Tensor]:
        """Return the float64 weights that the published program computes with."""
        found = {}
        for name, tensor in self.tensors.items():
            if isinstance(tensor, ScaledTrits):
                scale = (
                    tensor.scale.double().view(1, 1)
                    if tensor.scale.numel() == 1
                    else tensor.scale.double()
                )
                wide = scale.repeat_interleave(tensor.group_size, dim=1)[:, : tensor.trits.shape[1]]
                tensor = tensor.trits * (wide if scale.shape[1] > 1 else scale)
            found[name] = tensor.double()
        return found


def published(
    architecture: str,
    *,
    seed: int = 0,
    gains: bool = True,
    biases: bool = False,
    floats: tuple[str, ...] = ("embedding",),
    scale: Callable[[torch.Generator, tuple[int, ...]], Tensor] | None = None,
    **options: Any,
) -> Published:
    """Make a random model with the structure of BitNet b1.58 2B4T or another: one float scale per
    matrix, gains, float ends.
    """
    generator = torch.Generator().manual_seed(seed)
    every = {**SIZES, **options}
    config = DecoderConfig(architecture=architecture, **every)  # type: ignore[arg-type]
    tensors: dict[str, Tensor | ScaledTrits] = {}
    for name, shape in DecoderShape(config, VOCABULARY).tensors(biases=biases):
        if len(shape) == 1:
            drawn = torch.rand(shape, generator=generator) + 0.5 if gains else torch.ones(shape)
            tensors[name] = drawn - 1 if is_bias(name) else drawn
        elif name.startswith(floats):
            tensors[name] = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        else:
            trits = torch.randint(-1, 2, shape, generator=generator).to(torch.int8)
            made = (
                0.05 + 0.4 * torch.rand(1, generator=generator)
                if scale is None
                else scale(generator, shape)
            )
            groups = 1 if made.numel() == 1 else made.shape[1]
            tensors[name] = ScaledTrits(trits, made, shape[1] if groups == 1 else 32)
    return Published(architecture, every, tensors)


def imported(source: Published, **options: Any) -> ImportedModel:
    return convert(source, ImportConfig(**options))


def compared(source: Published, model: Decoder, restated: Restated, tolerance: float) -> None:
    ids = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(5))
    config = DecoderConfig(architecture=source.architecture, **source.options)  # type: ignore[arg-type]
    expected = restated(source.dense(), config, ids)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(model(ids).double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize("activation", ["reglu2", "swiglu"])
def test_the_structure_of_bitnet_2b4t_imports_exactly(
    restated: Restated, activation: str, gains: bool, biases: bool, built: Any
) -> None:
    source = published("bitnet", gains=gains, biases=biases, activation=activation)
    found = imported(source)
    model = built(found)
    compared(source, model, restated, 1e-5)
    assert not found.notes
    assert model.config.group_size == "tensor"
    assert model.config.inner_gains
    assert model.config.stored_eps
    assert not model.config.linear_scales
    counted = audit(model)
    assert counted.float_buffers == 0
    biased = sum(p.numel() for name, p in model.named_parameters() if ".biases." in name)
    norms = 2 * (32 + 32 + 32 + 48) + 32
    assert counted.float_parameters == VOCABULARY * 32 + norms + biased
    assert counted.ternary_weights == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    # It comes back from a state dict with its eps.
    again = Decoder(model.config, VOCABULARY)
    again.load_state_dict(model.state_dict())
    compared(source, again, restated, 1e-5)


@pytest.mark.parametrize(
    ("architecture", "options", "left"),
    [
        ("llama", {}, 4),
        ("llama", {"activation": "reglu2"}, 2),
        ("qwen3", {}, 2),
        ("qwen3", {"activation": "reglu2"}, 0),
        ("arcee", {}, 2),
        ("llama", {"tie_embeddings": True}, 4),
    ],
)
@pytest.mark.parametrize("scales", ["fold", "float"])
def test_scales_fold_into_norms_and_the_rest_stays_float(
    restated: Restated,
    architecture: str,
    options: dict[str, Any],
    left: int,
    scales: Any,
    built: Any,
) -> None:
    source = published(architecture, biases=True, **options)
    found = imported(source, scales=scales)
    model = built(found)
    compared(source, model, restated, 1e-5)
    if scales == "fold":
        kept = [
            name
            for name, buffer in model.named_buffers()
            if name.endswith("scale") and float(buffer) != 1
        ]
        assert len(kept) == left
        assert {name.split(".")[-2] for name in kept} <= {"output", "down"}
        assert any("float factors of linears" in note for note in found.notes) == (left > 0)
    else:
        assert not model.config.stored_eps
    counted = audit(model)
    assert (counted.float_buffers > 0) == (left > 0 or scales == "float")
    assert not counted.pure


@torch.no_grad()
def test_int8_activations_do_not_change_what_folding_keeps(built: Any) -> None:
    folded, kept = (
        built(imported(published("bitnet", activation="reglu2", activations="int8"), scales=scales))
        for scales in ("fold", "float")
    )
    ids = torch.arange(11).view(1, -1)
    # An int8 code may still change if a product lies on the border of two: a few in a thousand.
    assert float((folded(ids) - kept(ids)).abs().mean()) < 1e-3


def test_rounding_takes_the_nearest_power_of_two(built: Any) -> None:
    source = published("llama")
    found = imported(source, scales="round")
    weights = {
        name: weight
        for name, weight in exported_weights(built(found))
        if isinstance(weight, TernaryWeight)
    }
    errors = {}
    for name, weight in weights.items():
        tensor = source.tensors[name]
        assert isinstance(tensor, ScaledTrits)
        assert torch.equal(weight.trits, tensor.trits)
        nearest = torch.log2(tensor.scale.double()).round()
        assert weight.exponent.unique().tolist() == [int(nearest)]
        errors[name] = abs(float(2**nearest / tensor.scale) - 1)
    worst = max(errors, key=errors.__getitem__)
    assert found.notes == (
        f"scales are rounded to powers of two: the largest relative error is {errors[worst]:.1%}, "
        f"of {worst}",
    )
    assert found.model.get("linear_scales") is None


def power(generator: torch.Generator, shape: tuple[int, ...], *, groups: int) -> Tensor:
    return torch.exp2(torch.randint(-6, 1, (shape[0], groups), generator=generator).float())


@pytest.mark.parametrize(("size", "grouping"), [("row", "row"), (32, 32)])
def test_powers_of_two_come_in_as_they_are_and_the_model_is_pure(
    restated: Restated, size: Any, grouping: Any, built: Any
) -> None:
    def scale(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        in_groups = size != "row" and shape[0] != VOCABULARY
        return power(generator, shape, groups=-(-shape[1] // 32) if in_groups else 1)

    source = published("qwen3", gains=False, floats=(), scale=scale)
    source.tensors["final_norm"] = torch.full((32,), 4.0)
    found = imported(source)
    model = built(found)
    compared(source, model, restated, 1e-4)
    assert not found.notes
    assert audit(model).pure
    # A width of 32 is one group, so that down alone, 48 wide, shows groups.
    assert model.config.group_size == grouping
    assert model.config.logit_scale == 2
    for name, weight in exported_weights(model):
        tensor = source.tensors[name]
        if isinstance(weight, TernaryWeight):
            assert isinstance(tensor, ScaledTrits)
            assert torch.equal(weight.trits, tensor.trits)
            assert torch.equal(
                torch.exp2(weight.exponent.float()).expand_as(tensor.scale), tensor.scale
            )
        else:
            assert torch.equal(weight, tensor)


def test_float_matrices_stay_float_parts(restated: Restated, built: Any) -> None:
    source = published("llama", floats=("",))
    found = imported(source)
    compared(source, built(found), restated, 1e-5)
    assert found.model["float_parts"] == ["embedding", "head", "norms", "linears"]


def test_where_only_some_linears_are_ternary_all_become_float(
    restated: Restated, built: Any
) -> None:
    source = published("llama", floats=("embedding", "blocks.1.feed_forward.down"))
    found = imported(source)
    compared(source, built(found), restated, 1e-5)
    assert "linears" in found.model["float_parts"]
    assert any("13 of 14 linears are ternary and become float" in note for note in found.notes)


def test_float_matrices_become_trits_and_residues(built: Any) -> None:
    source = published("llama", floats=("",), gains=False)
    model = built(imported(source, float_sources="ternary"))
    assert audit(model).pure
    for name, module in model.named_modules():
        weight = source.tensors.get(name)
        if not isinstance(weight, Tensor) or weight.dim() == 1 or name == "final_norm":
            continue
        # The rule's number is T + A / 64 in units of 2^E; within the rails that is the weight, to
        # half a quantum.
        exponent: Any = module.exponent
        expected = torch.log2(weight.double().abs().mean(dim=1, keepdim=True)).round()
        assert torch.equal(exponent.double(), expected)
        scaled = weight.double() / 2**expected
        trits: Any = module.trits()  # type: ignore[operator]
        votes: Any = module.logical_votes()  # type: ignore[operator]
        assert torch.equal(trits.double(), scaled.round().clamp(-1, 1))
        number = trits + votes / CELLS_OF_THE_RULE[8]
        inside = scaled.abs() < 2 - 1 / 64
        assert float((number - scaled)[inside].abs().max()) <= 1 / 128 + 1e-6
        assert int(votes.abs().max()) < CELLS_OF_THE_RULE[8]


def float16_rows(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Return a scale per row that float16 holds."""
    return (0.05 + 0.4 * torch.rand(shape[0], 1, generator=generator)).half().float()


@pytest.mark.parametrize("scales", ["fold", "float"])
@pytest.mark.parametrize("architecture", ["bitnet", "llama"])
def test_scales_of_rows_that_float16_holds_are_factors_of_rows(
    restated: Restated, architecture: str, scales: Any, built: Any
) -> None:
    source = published(architecture, scale=float16_rows)
    # A scale of a whole matrix that float16 holds: all rows have the same factor.
    key = source.tensors["blocks.0.attention.key"]
    assert isinstance(key, ScaledTrits)
    source.tensors["blocks.0.attention.key"] = ScaledTrits(key.trits, torch.tensor([0.375]), 32)
    found = imported(source, scales=scales)
    model = built(found)
    compared(source, model, restated, 1e-5)
    assert found.notes == (
        "rows have float factors, which are trained; `--scales round` makes them powers of two",
    )
    assert model.config.row_scales
    assert not model.config.linear_scales
    assert not model.config.stored_eps
    factors = model.get_parameter("blocks.0.attention.key.row_scale")
    assert torch.equal(factors, torch.full((16,), 0.75))
    assert built(imported(source, scales="round")).config.row_scales is False


def test_a_left_over_factor_is_refused_with_factors_of_rows() -> None:
    source = published("llama", scale=float16_rows)
    down = source.tensors["blocks.1.feed_forward.down"]
    assert isinstance(down, ScaledTrits)
    source.tensors["blocks.1.feed_forward.down"] = ScaledTrits(down.trits, torch.tensor([0.3]), 48)
    with pytest.raises(
        ConfigError, match=r"blocks\.1\.feed_forward\.down: no norm takes its factor"
    ) as error:
        imported(source)
    assert "--scales round" in error.value.hint


def test_scales_that_no_factor_takes_are_refused(built: Any) -> None:
    def rows(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return 0.1 + torch.rand(shape[0], 1, generator=generator)

    source = published("llama", scale=rows)
    for scales in ("fold", "float"):
        with pytest.raises(
            ConfigError, match=r"blocks\.0\.attention\.query: its scales differ"
        ) as error:
            imported(source, scales=scales)
        assert "--scales round" in error.value.hint
    assert built(imported(source, scales="round")).config.group_size == "row"


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_with_a_float_scale_is_a_float_part(
    restated: Restated, tied: bool, built: Any
) -> None:
    source = published("qwen3", floats=(), tie_embeddings=tied)
    found = imported(source)
    compared(source, built(found), restated, 1e-5)
    assert found.model["float_parts"] == ["embedding", *(["head"] if tied else []), "norms"]
    assert any(
        note.startswith("embedding: its scales are not powers of two") for note in found.notes
    )
    assert "embedding" not in imported(source, scales="round").model["float_parts"]


def test_a_scale_of_zero_or_below_changes_trits(restated: Restated, built: Any) -> None:
    def rows(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        made = torch.full((shape[0], 1), 0.25)
        made[1] = 0.0
        made[2] = -0.5
        return made

    source = published("arcee", scale=rows)
    compared(source, built(imported(source)), restated, 1e-5)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("blocks.0.attention.query", None, "blocks.0.attention.query: not in the model"),
        ("blocks.0.attention.norm", torch.ones(31), "blocks.0.attention.norm: of shape (31,)"),
        ("embedding", torch.full((VOCABULARY, 32), torch.nan), "embedding: a number is not finite"),
        (
            "blocks.0.attention.query",
            ScaledTrits(torch.ones(32, 32, dtype=torch.int8), torch.tensor([torch.inf]), 32),
            "a scale is not finite",
        ),
        (
            "blocks.0.attention.query",
            ScaledTrits(torch.ones(32, 32, dtype=torch.int8), torch.ones(3, 1), 32),
            "do not fit 32 x 32",
        ),
        (
            "blocks.0.attention.norm",
            ScaledTrits(torch.ones(32, dtype=torch.int8), torch.ones(1), 32),
            "has to be float",
        ),
    ],
)
def test_a_damaged_tensor_is_named(name: str, tensor: Any, says: str) -> None:
    source = published("llama")
    if tensor is None:
        del source.tensors[name]
    else:
        source.tensors[name] = tensor
    with pytest.raises(DataError) as error:
        imported(source)
    assert says in error.value.what


def test_a_false_number_of_layers_takes_no_time() -> None:
    source = published("llama")
    source.options["layers"] = 4096
    with pytest.raises(DataError, match=r"blocks\.2\.attention\.norm: not in the model"):
        imported(source)
    source.options["layers"] = 10**12
    with pytest.raises(ConfigError, match="from 1 to 4096, not 1000000000000"):
        imported(source)


def test_what_the_decoder_lacks_is_noted() -> None:
    source = published("llama", tie_embeddings=True)
    source.tensors["head"] = torch.zeros(VOCABULARY, 32)
    source.tensors["blocks.0.attention.sinks"] = torch.zeros(4)
    source.unmapped = ("a chat template",)
    notes = imported(source).notes
    assert notes[0] == "a chat template"
    assert notes[1].startswith("head: left out")
    assert notes[2].startswith("blocks.0.attention.sinks: left out")


def test_a_layer_without_biases_gets_zeros(restated: Restated) -> None:
    source = published("llama", biases=True)
    for name in ("query", "key", "value"):
        del source.tensors[f"blocks.1.attention.biases.{name}"]
    found = imported(source)
    model = Decoder(
        DecoderConfig(**{k: v for k, v in found.model.items() if k != "name"}), VOCABULARY
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # what an import starts from is not drawn
    found.fill(model)
    compared(source, model.eval(), restated, 1e-5)


def test_a_bitnet_with_a_head_of_its_own_is_held_by_options(restated: Restated, built: Any) -> None:
    source = published("bitnet")
    source.options["tie_embeddings"] = False
    source.tensors["head"] = torch.randn(VOCABULARY, 32)
    found = imported(source)
    assert "architecture" not in found.model
    assert "not quite of architecture bitnet" in found.notes[0]
    source.options.pop("tie_embeddings")
    compared(source, built(found), restated, 1e-4)


@pytest.mark.parametrize(
    ("tokenizer", "attached", "data"),
    [
        (
            None,
            {"kind": "ids", "vocabulary_size": VOCABULARY},
            {"name": "tokens", "train": "tokens.npy", "vocabulary_size": VOCABULARY},
        ),
        (
            {"kind": "characters", "alphabet": "ab"},
            {
                "kind": "padded",
                "tokenizer": {"kind": "characters", "alphabet": "ab"},
                "vocabulary_size": VOCABULARY,
            },
            {"name": "shakespeare", "tokenizer": "{run}/tokenizer.json"},
        ),
    ],
)
def test_the_tokenizer_travels_and_fits_the_ids_of_the_model(
    tokenizer: Any, attached: Any, data: Any
) -> None:
    source = published("llama")
    source.tokenizer = tokenizer
    found = imported(source)
    assert found.attachments == {"tokenizer": attached}
    assert found.data == data
    source.tokenizer = {"kind": "bytes"}
    with pytest.raises(DataError, match="it has 256 ids, but the model 19"):
        imported(source)


def test_the_model_section_is_a_config_of_the_decoder() -> None:
    found = imported(published("bitnet", activation="reglu2"))
    spec = manager().registry.get("model", "decoder").spec
    options = DecoderConfig(**{key: value for key, value in found.model.items() if key != "name"})
    assert Choice("decoder", options, frozenset(), spec).build(VOCABULARY).config == options

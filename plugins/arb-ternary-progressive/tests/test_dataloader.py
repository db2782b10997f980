"""Batches for the stack in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError, DataError, UsageProblem
from arb_ternary.protocols.data import Batch, MaskedBatch
from arb_ternary_progressive import ProgressiveDataLoader, StackWiseConfig, TimeStepMasking
from arb_ternary_progressive.masking import MlmMasking, ProgressiveMasking
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_train.evaluate import masked_loss

VOCABULARY = 60
POSITIONS = 40
MASK = 59
KEYS = {
    "input_ids",
    "targets",
    "masks",
    "loss_mask",
    "time_step",
    "time",
    "stack_idx",
    "trunk_activations",
    "training_objective",
    "sample_ids",
}


def config(**progressive: Any) -> StackWiseConfig:
    made = StackWiseConfig()
    made.model.vocab_size = VOCABULARY
    for key, value in progressive.items():
        setattr(made.training.progressive, key, value)
    return made


def samples(batches: int = 3, rows: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY - 1, (rows, POSITIONS), generator=generator),
            "sample_ids": torch.arange(rows) + rows * number,
        }
        for number in range(batches)
    ]


def loader(base: Any = None, strategy: Any = None, **options: Any) -> ProgressiveDataLoader:
    """Return a loader; what is not its own option is one of ``training.progressive``."""
    own = {
        key: options.pop(key)
        for key in ("stack_idx", "trunk_activations", "cache_activations")
        if key in options
    }
    given = config(**options)
    return ProgressiveDataLoader(
        samples() if base is None else base,
        TimeStepMasking(given) if strategy is None else strategy,
        config=given,
        **own,
    )


def rows_by_id(batches: list[dict[str, Any]], key: str) -> dict[int, list[Any]]:
    return {
        int(sample): batch[key][row].tolist()
        for batch in batches
        for row, sample in enumerate(batch["sample_ids"])
    }


# --- what is in a batch


def test_a_batch_has_every_key() -> None:
    for batch in loader():
        assert set(batch) == KEYS
        assert batch["trunk_activations"] is None
    for batch in loader(training_objective="clm"):
        assert set(batch) == KEYS | {"clm_mask", "combined_masks"}


def test_mlm_hides_tokens_and_predicts_them() -> None:
    given = samples()
    for batch, raw in zip(loader(given, stack_idx=3, max_stacks=8), given, strict=True):
        masks = batch["masks"]
        assert masks.sum(dim=1).tolist() == [18] * 4, "floor(40 * 0.45)"
        assert torch.equal(batch["loss_mask"], masks)
        assert torch.equal(batch["targets"], raw["input_ids"])
        assert bool((batch["input_ids"][masks] == MASK).all())
        assert torch.equal(batch["input_ids"][~masks], raw["input_ids"][~masks])
        assert batch["time_step"].tolist() == [3] * 4
        assert batch["time"].tolist() == [3.5 / 8] * 4
        assert (batch["stack_idx"], batch["training_objective"]) == (3, "mlm")


def test_clm_excludes_the_last_position() -> None:
    given = samples()
    for batch, raw in zip(loader(given, training_objective="clm"), given, strict=True):
        tokens = raw["input_ids"]
        assert torch.equal(batch["input_ids"], tokens)
        assert torch.equal(batch["targets"][:, :-1], tokens[:, 1:])
        assert not batch["clm_mask"][:, -1].any()
        assert batch["clm_mask"][:, :-1].all()
        assert torch.equal(batch["combined_masks"], batch["masks"] & batch["clm_mask"])
        assert torch.equal(batch["loss_mask"], batch["combined_masks"])


def test_custom_needs_targets_in_the_batch() -> None:
    given = [{**raw, "targets": raw["input_ids"] % 7} for raw in samples()]
    for batch, raw in zip(loader(given, training_objective="custom"), given, strict=True):
        assert torch.equal(batch["targets"], raw["targets"])
        assert torch.equal(batch["input_ids"], raw["input_ids"])
        assert torch.equal(batch["loss_mask"], batch["masks"])
    with pytest.raises(DataError, match="no 'targets'"):
        list(loader(training_objective="custom"))


def test_without_a_strategy_every_position_counts() -> None:
    batches = list(ProgressiveDataLoader(samples(), config=config(training_objective="clm")))
    assert all(bool(batch["masks"].all()) for batch in batches)
    assert all(torch.equal(batch["loss_mask"], batch["clm_mask"]) for batch in batches)


def test_other_keys_pass_through() -> None:
    given = [{**raw, "weight": torch.ones(4)} for raw in samples(1)]
    (batch,) = loader(given)
    assert torch.equal(batch["weight"], torch.ones(4))


def test_batches_may_be_tensors_tuples_or_core_batches() -> None:
    tokens = samples(1)[0]["input_ids"]
    ids = samples(1)[0]["sample_ids"]
    core = Batch(torch.cat((tokens, tokens[:, :1]), dim=1), ids)
    (by_dict,) = loader(samples(1))
    (by_batch,) = loader([core])
    assert torch.equal(by_dict["input_ids"], by_batch["input_ids"])
    for raw in (tokens, (tokens,)):
        (batch,) = loader([raw])
        assert torch.equal(batch["targets"], tokens)


def test_a_torch_dataloader_works() -> None:
    tokens = torch.cat([raw["input_ids"] for raw in samples()])
    base = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=5)
    made = loader(base)
    assert len(made) == 3
    assert torch.equal(torch.cat([batch["targets"] for batch in made]), tokens)


def test_the_guides_loop_over_clm_batches_works() -> None:
    logits = torch.randn(4, POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    for batch in loader(training_objective="clm"):
        assert batch["training_objective"] == "clm"
        loss_mask = batch["combined_masks"]
        targets = batch["targets"]
        expected = torch.nn.functional.cross_entropy(logits[loss_mask], targets[loss_mask])
        masked = MaskedBatch(batch["input_ids"], targets, batch["loss_mask"])
        assert masked_loss(logits, masked).item() == pytest.approx(expected.item(), rel=1e-5)


# --- masks and times


@pytest.mark.parametrize(
    "strategy", [TimeStepMasking(config()), MlmMasking(), ProgressiveMasking()]
)
def test_masks_do_not_depend_on_the_order_of_samples(strategy: Any) -> None:
    given = samples()
    shuffled = [
        {"input_ids": raw["input_ids"][[2, 0, 3, 1]], "sample_ids": raw["sample_ids"][[2, 0, 3, 1]]}
        for raw in reversed(given)
    ]
    options = {"strategy": strategy, "stack_idx": 1, "max_stacks": 4}
    first, second = (list(loader(base, **options)) for base in (given, shuffled))
    assert rows_by_id(first, "input_ids") == rows_by_id(second, "input_ids")


def test_depth_decides_how_much_is_hidden() -> None:
    strategy = ProgressiveMasking()
    counts = []
    for stack in range(4):
        made = loader(strategy=strategy, stack_idx=stack, max_stacks=4)
        counts.append(int(next(iter(made))["masks"][0].sum()))
    assert counts == [6, 16, 26, 36], "floor(40 * (.15, .40, .65, .90))"


def test_time_sampling_by_sample_gives_each_row_a_time() -> None:
    made = loader(samples(1, 200), time_interpretation="input", time_sampling="sample")
    (batch,) = made
    steps = batch["time_step"]
    assert len(steps.unique()) == 8
    expected = (POSITIONS * (0.15 + 0.1 * steps) + 1e-6).floor().long()
    assert torch.equal(batch["masks"].sum(dim=1), expected)
    assert torch.equal(batch["time"], (steps + 0.5) / 8)


def test_time_as_input_is_drawn_for_each_batch_and_epoch() -> None:
    def epochs(**options: Any) -> list[list[int]]:
        made = loader(samples(12), time_interpretation="input", **options)
        return [[int(batch["time_step"][0]) for batch in made] for _ in range(2)]

    first, second = epochs()
    assert len(set(first)) > 3
    assert first != second
    assert epochs() == [first, second]
    assert epochs(seed=1) != [first, second]
    assert epochs(stack_idx=1) != [first, second]


def test_the_global_generator_is_not_used() -> None:
    before = torch.random.get_rng_state()
    list(loader(time_interpretation="input"))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_exhausted_iterator_is_an_error() -> None:
    made = loader(iter(samples()))
    assert len(list(made)) == 3
    with pytest.raises(DataError, match="gives no batch in epoch 1"):
        list(made)


# --- the trunk


class Trunk(nn.Module):
    """A frozen trunk that counts the rows that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8).requires_grad_(False)
        self.computed = 0

    def forward(self, inputs_BS: Tensor) -> Tensor:
        self.computed += len(inputs_BS)
        hidden: Tensor = self.table(inputs_BS)
        return hidden.cumsum(dim=1)


def test_an_uncached_trunk_runs_for_every_batch() -> None:
    trunk = Trunk()
    made = loader(stack_idx=1, trunk_activations=trunk)
    for _ in range(2):
        for batch in made:
            assert torch.equal(
                batch["trunk_activations"], trunk.table(batch["input_ids"]).cumsum(dim=1)
            )
    assert trunk.computed == 2 * 12


def test_a_cached_trunk_computes_every_sample_once() -> None:
    trunk = Trunk()
    order = torch.Generator().manual_seed(3)

    class Shuffled:
        def __iter__(self) -> Any:
            tokens = torch.cat([raw["input_ids"] for raw in samples()])
            for rows in torch.randperm(12, generator=order).split(5):
                yield {"input_ids": tokens[rows], "sample_ids": rows}

    made = loader(Shuffled(), stack_idx=1, trunk_activations=trunk, cache_activations=True)
    for _ in range(3):
        for batch in made:
            assert torch.equal(
                batch["trunk_activations"], trunk.table(batch["input_ids"]).cumsum(dim=1)
            )
    assert trunk.computed == 12


def test_a_changed_trunk_misses_the_cache() -> None:
    trunk = Trunk()
    made = loader(stack_idx=1, trunk_activations=trunk, cache_activations=True)
    list(made)
    trunk.table.weight[3, 2] += 1
    for batch in made:
        assert torch.equal(
            batch["trunk_activations"], trunk.table(batch["input_ids"]).cumsum(dim=1)
        )
    assert trunk.computed == 2 * 12


def test_hidden_states_may_be_a_tensor() -> None:
    hidden = torch.randn(4, POSITIONS, 8)
    assert all(batch["trunk_activations"] is hidden for batch in loader(trunk_activations=hidden))


def test_hidden_states_of_another_shape_are_an_error() -> None:
    with pytest.raises(
        DataError, match=r"of shape \[3, 40, 8\] do not belong to inputs of shape \[4, 40\]"
    ):
        list(loader(trunk_activations=torch.zeros(3, POSITIONS, 8)))


def test_a_learning_trunk_is_not_cached() -> None:
    trunk = Trunk()
    trunk.table.requires_grad_(True)
    with pytest.raises(UsageProblem, match="can learn"):
        loader(trunk_activations=trunk, cache_activations=True)


def test_the_first_stack_has_nothing_to_cache() -> None:
    assert len(list(loader(cache_activations=True))) == 3


# --- what does not go together


def test_a_strategy_that_does_not_hide_cannot_serve_mlm() -> None:
    made = loader(strategy=CausalMasking(), training_objective="mlm")
    with pytest.raises(
        ConfigError, match="mlm asks for the hidden tokens, and CausalMasking for others"
    ):
        list(made)
    assert len(list(loader(strategy=CausalMasking(), training_objective="clm"))) == 3


def test_the_vocabulary_must_be_known_to_hide_tokens() -> None:
    with pytest.raises(ConfigError, match="the vocabulary must be known"):
        ProgressiveDataLoader(samples(), MlmMasking())


def test_an_unknown_stack_is_an_error() -> None:
    with pytest.raises(UsageProblem, match="a rack of 3 stacks has no stack 3"):
        loader(stack_idx=3, max_stacks=3)


def test_the_mask_token_in_the_data_is_an_error_for_mlm_only() -> None:
    given = [{"input_ids": torch.full((2, POSITIONS), MASK)}]
    with pytest.raises(DataError, match="token id 59 at position 0 is the mask token"):
        list(loader(given))
    assert len(list(loader(given, training_objective="clm"))) == 1

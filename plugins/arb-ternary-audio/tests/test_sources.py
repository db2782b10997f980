"""The data sources ``formants`` and ``sounds``."""

import shutil

import attrs
import numpy as np
import pytest
import soundfile

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import BatchRequest
from arb_ternary_audio.data import formants, sounds
from arb_ternary_audio.data.formants import FormantsConfig, synthetic_words
from arb_ternary_audio.data.phones import WORDS
from arb_ternary_audio.data.sounds import SoundsConfig
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_testing.component import make_choice

FEW = FormantsConfig(words=40, held_out=20)


def test_batches_are_pictures_of_words_with_their_classes():
    source = formants.build(FEW)
    assert source.classes == tuple(WORDS)
    assert source.vocabulary_size == 10
    assert source.image_shape == (1, 32, 40)
    batch = next(source.batches(BatchRequest(8, 1, 0)))
    assert batch.data.shape == (8, 1, 32, 40)
    assert float(batch.data.abs().max()) == 1.0
    assert batch.extras["labels"].tolist() == [index % 10 for index in batch.sample_ids.tolist()]
    (whole,) = source.held_out(32, 1, None)
    assert whole.extras["labels"].tolist() == list(range(10)) * 2
    assert source.prediction_noun == "sound"


def test_a_word_depends_on_seed_part_and_place_alone():
    many = synthetic_words(FEW, 0, 40)
    np.testing.assert_array_equal(many.samples[:10], synthetic_words(FEW, 0, 10).samples)
    assert not (many.samples[:10] == synthetic_words(FEW, 1, 10).samples).all(axis=1).any()
    assert (
        not (many.samples[:10] == synthetic_words(attrs.evolve(FEW, seed=1), 0, 10).samples)
        .all(axis=1)
        .any()
    )
    assert np.abs(many.samples).max() <= round(0.9 * 32768)


def test_tuning_leaves_the_held_out_words_alone():
    source = formants.build(FEW)
    tuning = formants.build(attrs.evolve(FEW, tuning=True))
    # of four words of a class one is a fifth, rounded
    assert (len(tuning.train), len(tuning.validation)) == (30, 10)
    both = np.concatenate((tuning.train_sounds.samples, tuning.validation_sounds.samples))
    assert {row.tobytes() for row in both} == {row.tobytes() for row in source.train_sounds.samples}


def test_fingerprints_tell_sounds_and_features_apart():
    same = [formants.build(FEW).fingerprint() for _ in range(2)]
    others = [
        formants.build(attrs.evolve(FEW, **change)).fingerprint()
        for change in (
            {"seed": 1},
            {"noise_db": 11.0},
            {"features": MelConfig(range_db=60.0)},
            {"held_out": 21},
        )
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 5


def test_a_folder_by_class(tones):
    source = sounds.build(SoundsConfig(path=str(tones), seconds=0.25, validation_fraction=0.25))
    assert source.classes == ("high", "low")
    assert source.image_shape == (1, 32, 12)
    assert sorted(source.train_sounds.labels.tolist()) == [0, 0, 0, 1, 1, 1, 1]
    assert source.validation_sounds.labels.tolist() == [0, 1]
    assert not source.train_sounds.samples[:, 1600:].any()
    picture = source.train.read(np.arange(7)).data[:, 0, :, 2:8].mean(dim=2).argmax(dim=1)
    assert (picture[:3] > picture[3:].max()).all()
    assert source.attachments()["sounds"] == {
        "sample_rate": 8000,
        "samples": 2000,
        "features": attrs.asdict(MelConfig()),
    }


def test_other_rates_are_resampled(tones):
    slow = sounds.build(
        SoundsConfig(
            path=str(tones),
            sample_rate=6000,
            features=MelConfig(high=3000.0),
            validation_fraction=0.25,
        )
    )
    assert slow.train_sounds.samples.shape[1] == 6000


def test_a_folder_of_its_own_for_validation(tones, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tones, other)
    source = sounds.build(SoundsConfig(path=str(tones), validation=str(other)))
    assert len(source.train) == len(source.validation) == 9
    shutil.move(other / "low", other / "lwo")
    with pytest.raises(DataError, match=r"its classes are not those of .*: low, lwo"):
        sounds.build(SoundsConfig(path=str(tones), validation=str(other)))


def _text(folder):
    (folder / "low" / "notes.txt").write_text("x")


def _nothing(folder):
    (folder / "mid").mkdir()


def _one(folder):
    shutil.rmtree(folder / "low")


def _hidden(folder):
    shutil.rmtree(folder / "low")
    (folder / ".low").mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_text, r"notes\.txt: not a sound file; supported are \.wav, \.flac, \.ogg"),
        (_nothing, "mid: the folder is empty"),
        (_one, "1 folders; there must be one per class"),
        (_hidden, "1 folders; there must be one per class"),
    ],
)
def test_folders_that_cannot_be_used_are_named(tones, spoil, words):
    spoil(tones)
    with pytest.raises(DataError, match=words):
        sounds.build(SoundsConfig(path=str(tones)))


def test_other_faults_of_folders(tones, tmp_path):
    with pytest.raises(DataError, match="tone: no such folder") as caught:
        sounds.build(SoundsConfig(path=str(tmp_path / "tone")))
    assert f"Did you mean {tones}?" in caught.value.hint
    with pytest.raises(DataError, match="this is the folder of the training sounds"):
        sounds.build(SoundsConfig(path=str(tones), validation=str(tones)))
    with pytest.raises(ValueError, match="exclude each other"):
        SoundsConfig(path="a", validation="b", validation_fraction=0.1)
    with pytest.raises(DataError, match="too few for a validation share"):
        sounds.build(SoundsConfig(path=str(tones), validation_fraction=0.05))


def test_memory_is_bounded_before_a_file_is_read(tones, monkeypatch):
    monkeypatch.setattr(sounds, "_MEMORY", 9 * 8000 * 2 - 1)
    monkeypatch.setattr(sounds, "read_sound", lambda *_: pytest.fail("a file was read"))
    with pytest.raises(DataError, match="9 sounds of 1 s at 8000 Hz"):
        sounds.build(SoundsConfig(path=str(tones)))


def test_hidden_files_do_not_count(tones):
    (tones / "low" / ".DS_Store").write_bytes(b"x")
    soundfile.write(tones / "low" / "9.WAV", np.zeros(100), 8000, format="WAV")
    assert len(sounds.read_folder(tones, SoundsConfig(path=str(tones)))) == 10


def test_a_file_beside_the_folders_of_the_classes_is_not_passed_over(tones):
    soundfile.write(tones / "stray.wav", np.zeros(100), 8000)
    with pytest.raises(DataError, match=r"stray\.wav: a file next to the folders of the classes"):
        sounds.build(SoundsConfig(path=str(tones)))


def test_words_too_few_to_tune_with_and_values_out_of_range():
    with pytest.raises(DataError, match="tuning: 10 training sounds in 10 classes are too few"):
        formants.build(FormantsConfig(words=10, held_out=10, tuning=True))
    for wrong in ({"seed": 1 << 64}, {"noise_db": float("nan")}, {"noise_db": -1e6}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make_choice("data", "formants", wrong)

"""The data sources ``formants`` and ``sounds``."""

import shutil

import attrs
import numpy as np
import pytest
import soundfile

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import BatchRequest
from arb_ternary_audio.data import formants, sounds
from arb_ternary_audio.data.decode import SUFFIXES
from arb_ternary_audio.data.formants import FormantsConfig, synthetic_words
from arb_ternary_audio.data.phones import WORDS
from arb_ternary_audio.data.sounds import SoundsConfig
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_testing.component import make_choice
from arb_ternary_vision.data.class_folders import list_class_folders

FEW = FormantsConfig(words=40, held_out=20)


def test_formants_batches_are_labelled_spectrograms():
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


def test_word_depends_on_seed_part_and_index_only():
    many = synthetic_words(FEW, 0, 40)
    np.testing.assert_array_equal(many.samples[:10], synthetic_words(FEW, 0, 10).samples)
    assert not (many.samples[:10] == synthetic_words(FEW, 1, 10).samples).all(axis=1).any()
    assert (
        not (many.samples[:10] == synthetic_words(attrs.evolve(FEW, seed=1), 0, 10).samples)
        .all(axis=1)
        .any()
    )
    assert np.abs(many.samples).max() <= round(0.9 * 32768)


def test_tuning_uses_training_words_only():
    source = formants.build(FEW)
    tuning = formants.build(attrs.evolve(FEW, tuning=True))
    # A fifth of the four words of a class is one, rounded.
    assert (len(tuning.train), len(tuning.validation)) == (30, 10)
    both = np.concatenate((tuning.train_sounds.samples, tuning.validation_sounds.samples))
    assert {row.tobytes() for row in both} == {row.tobytes() for row in source.train_sounds.samples}


def test_fingerprint_depends_on_sounds_and_features():
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


def test_sounds_are_read_by_class(tones):
    source = sounds.build(SoundsConfig(path=str(tones), seconds=0.25, validation_fraction=0.25))
    assert source.classes == ("high", "low")
    assert source.image_shape == (1, 32, 12)
    assert sorted(source.train_sounds.labels.tolist()) == [0, 0, 0, 1, 1, 1, 1]
    assert source.validation_sounds.labels.tolist() == [0, 1]
    assert not source.train_sounds.samples[:, 1600:].any()
    loudest_band = source.train.read(np.arange(7)).data[:, 0, :, 2:8].mean(dim=2).argmax(dim=1)
    assert (loudest_band[:3] > loudest_band[3:].max()).all()
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


def test_separate_validation_folder(tones, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tones, other)
    source = sounds.build(SoundsConfig(path=str(tones), validation=str(other)))
    assert len(source.train) == len(source.validation) == 9
    shutil.move(other / "low", other / "lwo")
    with pytest.raises(
        DataError, match=r"lwo: the training sounds have no class of this name\nDid you mean low\?"
    ):
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
    ("damage", "words"),
    [
        (_text, r"notes\.txt: not a supported sound file; supported are \.flac, \.ogg, \.wav"),
        (_nothing, "mid: the class has no sound"),
        (_one, "there must be at least two classes"),
        (_hidden, "there must be at least two classes"),
    ],
)
def test_build_names_the_folder_that_cannot_be_used(tones, damage, words):
    damage(tones)
    with pytest.raises(DataError, match=words):
        sounds.build(SoundsConfig(path=str(tones)))


def test_build_names_other_faults(tones, tmp_path):
    with pytest.raises(DataError, match="tone: no such folder") as caught:
        sounds.build(SoundsConfig(path=str(tmp_path / "tone")))
    assert f"Did you mean {tones}?" in caught.value.hint
    with pytest.raises(DataError, match="this is the folder of the training sounds"):
        sounds.build(SoundsConfig(path=str(tones), validation=str(tones)))
    with pytest.raises(ValueError, match="exclude each other"):
        SoundsConfig(path="a", validation="b", validation_fraction=0.1)
    with pytest.raises(DataError, match=r"no class has enough samples to hold out 0\.05"):
        sounds.build(SoundsConfig(path=str(tones), validation_fraction=0.05))


def test_memory_is_checked_before_a_file_is_read(tones, monkeypatch):
    monkeypatch.setattr(sounds, "_MEMORY", 9 * 8000 * 2 - 1)
    monkeypatch.setattr(sounds, "read_sounds", lambda *_, **__: pytest.fail("a file was read"))
    with pytest.raises(DataError, match="9 sounds of 1 s at 8000 Hz"):
        sounds.build(SoundsConfig(path=str(tones)))


def test_hidden_files_are_ignored(tones):
    (tones / "low" / ".DS_Store").write_bytes(b"x")
    soundfile.write(tones / "low" / "9.WAV", np.zeros(100), 8000, format="WAV")
    listed = list_class_folders(tones, "sound", SUFFIXES)
    assert len(sounds.read_recordings(listed, SoundsConfig(path=str(tones)))) == 10


def test_file_next_to_the_class_folders_is_refused(tones):
    soundfile.write(tones / "stray.wav", np.zeros(100), 8000)
    with pytest.raises(DataError, match=r"stray\.wav: a file next to the folders of the classes"):
        sounds.build(SoundsConfig(path=str(tones)))


def test_formants_refuses_values_out_of_range():
    with pytest.raises(DataError, match="tuning: 10 training sounds in 10 classes are too few"):
        formants.build(FormantsConfig(words=10, held_out=10, tuning=True))
    for wrong in ({"seed": 1 << 64}, {"noise_db": float("nan")}, {"noise_db": -1e6}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make_choice("data", "formants", wrong)

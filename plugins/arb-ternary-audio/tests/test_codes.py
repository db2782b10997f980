"""Audio codes: k-means, the codec and the data source ``audio_codes``."""

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import BatchRequest
from arb_ternary_audio.codes import source as codes_source
from arb_ternary_audio.codes.codebook import fit_codebook, nearest_codes
from arb_ternary_audio.codes.codec import SoundCodec
from arb_ternary_audio.codes.source import CODEC
from arb_ternary_audio.data import formants
from arb_ternary_audio.data.decode import as_pcm
from arb_ternary_audio.data.formants import FormantsConfig
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_audio.features.spectrogram import mel_images


def _frames(count=600, bands=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, bands)).astype(np.uint8)


def test_codes_are_of_the_nearest_entry():
    frames = _frames()
    book = _frames(20, seed=1)
    np.testing.assert_array_equal(nearest_codes(frames, book), cdist(frames, book).argmin(axis=1))


def test_ties_go_to_the_lowest_code():
    book = np.array([[10], [20], [20]], dtype=np.uint8)
    assert nearest_codes(np.array([[15], [25]], dtype=np.uint8), book).tolist() == [0, 1]


def test_codebook_finds_separate_clusters():
    rng = np.random.default_rng(0)
    centres = np.array([[20, 20], [20, 200], [200, 20], [200, 200]])
    frames = (centres[rng.integers(0, 4, 400)] + rng.integers(-5, 6, (400, 2))).astype(np.uint8)
    book = fit_codebook(frames, 4, 50, 0)
    means = [
        frames[(np.abs(frames.astype(int) - centre) < 50).all(axis=1)].mean(axis=0)
        for centre in centres
    ]
    found = book[np.lexsort((book[:, 1], book[:, 0]))]
    np.testing.assert_allclose(found, means, atol=0.5)


def test_codebook_is_as_good_as_scikit_learns():
    frames = _frames(400)
    initial = fit_codebook(frames, 12, 0, 3)
    fitted = fit_codebook(frames, 12, 300, 3)
    other = KMeans(12, init=initial.astype(np.float64), n_init=1, max_iter=300, tol=0).fit(
        frames.astype(np.float64)
    )
    inertia = ((frames.astype(float) - fitted[nearest_codes(frames, fitted)]) ** 2).sum()
    assert inertia == pytest.approx(other.inertia_, rel=0.01)


def test_entry_without_frames_moves_to_the_farthest(monkeypatch):
    # The entry without frames becomes 200. Then 68, the mean of 1, 2 and 200, has no frames and
    # becomes 2.
    frames = np.array([[0], [1], [2], [200]], dtype=np.uint8)
    first = np.array([[1], [1], [0]], dtype=np.uint8)
    monkeypatch.setattr("arb_ternary_audio.codes.codebook._initial_book", lambda *_: first)
    assert sorted(fit_codebook(frames, 3, 50, 0)[:, 0].tolist()) == [1, 2, 200]


def test_codebook_refuses_too_few_distinct_frames():
    with pytest.raises(DataError, match="3 codes need as many distinct frames, and there are 2"):
        fit_codebook(np.array([[1], [2], [2], [1]], dtype=np.uint8), 3, 5, 0)


@pytest.fixture(scope="module")
def words():
    return formants.build(
        FormantsConfig(words=20, held_out=10, noise_db=30.0, features=MelConfig(hop=128))
    )


@pytest.fixture(scope="module")
def codes(words):
    choice = SimpleNamespace(build=lambda: words, name="formants")
    return codes_source.build(SimpleNamespace(sounds=choice, codes=64, rounds=20, seed=0))


def test_every_sound_begins_with_the_separator(codes):
    assert codes.vocabulary_size == 65
    assert codes.train.shape == (20 * 51 + 1,)
    assert (codes.train[::51] == 64).all()
    assert (np.delete(codes.train, np.arange(0, 20 * 51 + 1, 51)) < 64).all()
    # Blocks of one sound and its separator hold whole sounds and predict the end of each.
    batch = next(codes.batches(BatchRequest(4, 51, 0)))
    assert (batch.data[:, [0, -1]] == 64).all()


def test_stream_holds_the_codes_of_the_sounds(codes, words):
    ids = codes.codec.encode(words.validation_sounds.samples)
    np.testing.assert_array_equal(codes.validation[:-1].reshape(10, 51)[:, 1:], ids)
    levels = words.validation.data[:, 0].transpose(0, 2, 1).reshape(-1, 32)
    np.testing.assert_array_equal(
        ids.reshape(-1), cdist(levels, codes.codec.codebook).argmin(axis=1)
    )


def test_codec_is_restored_from_attachments(codes):
    attached = codes.attachments()
    assert attached["tokenizer"] == {"kind": "ids", "vocabulary_size": 65}
    codec = SoundCodec.from_json(attached[CODEC])
    np.testing.assert_array_equal(codec.codebook, codes.codec.codebook)
    assert (codec.features, codec.sample_rate) == (codes.codec.features, 8000)


def test_decoded_sound_has_the_spectrogram_of_its_codes(codes):
    ids = codes.train[1:51].tolist()
    wave = codes.codec.decode(ids)
    assert wave.shape == (50 * 128,)
    heard = mel_images(as_pcm(wave)[None], codes.codec.features, 8000)[0, 0].astype(float)
    error = (heard - codes.codec.spectrogram(ids).astype(float)) * 80 / 255
    assert np.sqrt(np.mean(error**2)) < 6.0


def test_no_codes_are_no_sound(codes):
    assert codes.codec.decode([]).shape == (0,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codebook", [[1, 2]]),
        ("codebook", [[300] * 32]),
        ("features", {"mel": 3}),
        ("sample_rate", "x"),
        ("sample_rate", 0),
    ],
)
def test_codec_refuses_damaged_state(codes, key, value):
    with pytest.raises(DataError, match="sound codec: "):
        SoundCodec.from_json({**codes.codec.to_json(), key: value})


def test_build_refuses_a_source_without_sounds():
    choice = SimpleNamespace(build=lambda: None, name="shakespeare")
    with pytest.raises(DataError, match="the data source 'shakespeare' has no sounds"):
        codes_source.build(SimpleNamespace(sounds=choice))


def test_fingerprint_depends_on_sounds_and_seed(words, codes):
    choice = SimpleNamespace(build=lambda: words, name="formants")
    again = codes_source.build(SimpleNamespace(sounds=choice, codes=64, rounds=20, seed=0))
    other = codes_source.build(SimpleNamespace(sounds=choice, codes=64, rounds=20, seed=1))
    assert again.fingerprint() == codes.fingerprint() != other.fingerprint()
    assert attrs.evolve(codes, name="x").fingerprint() == codes.fingerprint()

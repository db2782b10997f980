"""What a model of audio codes draws, judged by a classifier of the same words.

    python plugins/arb-ternary-audio/studies/codes.py CODES_RUN WORDS_RUN --out RESULT.json

Held-out words are made codes and sounds again, and classified: what the codes and the made-up
phases keep of a word. Then words are drawn from the model, and classified: how sure the classifier
is, and how many of the ten it hears.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arb_ternary_audio.codes.codec import SoundCodec
from arb_ternary_audio.codes.source import CODEC
from arb_ternary_audio.data.recordings import as_pcm
from arb_ternary_audio.features.spectrogram import as_pictures, mel_pictures
from arb_ternary_text.models.generate import generate
from arb_ternary_train.restore import TrainedRun, load_run


def heard(words: TrainedRun, source: Any, sounds: np.ndarray) -> torch.Tensor:
    """Probabilities of the classes."""
    pictures = as_pictures(
        mel_pictures(sounds, source.features, source.train_sounds.sample_rate)
    ).float()
    with torch.no_grad():
        return torch.cat([words.model(part) for part in pictures.split(64)]).softmax(dim=1)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("codes", type=Path)
    parser.add_argument("words", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--count", type=int, default=100, help="words to draw, and held-out words to take"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    codes = load_run(arguments.codes)
    words = load_run(arguments.words)
    codec = SoundCodec.from_json(codes.directory.attachments()[CODEC])
    # The words that the codes were made of, and not those of the classifier, which have more noise
    # around them.
    clean = codes.config.data.options.sounds.build().validation_sounds
    source = words.config.data.build()
    taken = clean.samples[: arguments.count]
    labels = torch.from_numpy(clean.labels[: arguments.count])
    again = np.stack([as_pcm(codec.decode(ids)) for ids in codec.encode(taken)])
    drawn = np.zeros_like(taken)
    lengths = []
    for number in range(arguments.count):
        frames = generate(
            codes.model,
            [codec.boundary],
            max_new_tokens=60,
            temperature=0.8,
            seed=number,
            stop=(codec.boundary,),
        )
        wave = as_pcm(codec.decode(list(frames)))
        lengths.append(len(wave) // codec.features.hop)
        drawn[number, : len(wave)] = wave[: drawn.shape[1]]
    of_drawn = heard(words, source, drawn)
    result = {
        "words": len(taken),
        "accuracy_of_the_words_themselves": float(
            (heard(words, source, taken).argmax(dim=1) == labels).double().mean()
        ),
        "accuracy_after_codes": float(
            (heard(words, source, again).argmax(dim=1) == labels).double().mean()
        ),
        "drawn": arguments.count,
        "frames_of_drawn": {
            "median": float(np.median(lengths)),
            "least": min(lengths),
            "most": max(lengths),
        },
        "surely_one_of_the_words": float((of_drawn.max(dim=1).values > 0.9).double().mean()),
        "words_heard": sorted({source.classes[place] for place in of_drawn.argmax(dim=1).tolist()}),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

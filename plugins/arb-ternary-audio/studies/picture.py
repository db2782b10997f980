"""Held-out sounds of a run as pictures, with what the model takes them for.

    python plugins/arb-ternary-audio/studies/picture.py RUN --out docs/images/words.png

One sound of each class, the first of the held-out ones; below them sounds that the model takes for
something else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from arb_ternary_train.restore import load_run


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wrong", type=int, default=5, help="misunderstood sounds to show at most")
    arguments = parser.parse_args()
    trained = load_run(arguments.run)
    source = trained.config.data.build()
    batch = source.validation.read(np.arange(len(source.validation)))
    labels = batch.extras["labels"]
    with torch.no_grad():
        chance = torch.cat([trained.model(part) for part in batch.data.split(64)]).softmax(dim=1)
    taken_for = chance.argmax(dim=1)
    first = [int((labels == label).nonzero()[0]) for label in range(len(source.classes))]
    wrong = (taken_for != labels).nonzero().flatten().tolist()[: arguments.wrong]
    columns = 5
    shown = [*first, *wrong]
    rows = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 1.9 * rows), layout="constrained"
    )
    for axis in axes.flat:
        axis.axis("off")
    sounds = source.validation_sounds
    features = source.features
    seconds = sounds.samples.shape[1] / sounds.sample_rate
    for axis, index in zip(axes.flat, shown, strict=False):
        axis.axis("on")
        axis.imshow(
            batch.data[index, 0],
            origin="lower",
            aspect="auto",
            cmap="magma",
            extent=(0, seconds, 0, features.mels),
        )
        said = source.classes[int(labels[index])]
        heard = source.classes[int(taken_for[index])]
        right = said == heard
        share = f"{float(chance[index].max()):.0%}"
        axis.set_title(
            f"{said}: {share}" if right else f"{said}, heard {heard}: {share}",
            fontsize=9,
            color="black" if right else "firebrick",
        )
        axis.tick_params(labelsize=7)
        if index == shown[0]:
            axis.set_xlabel("seconds", fontsize=7)
            axis.set_ylabel("mel band", fontsize=7)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, dpi=110)
    print(f"{arguments.out}: {int((taken_for == labels).sum())} of {len(labels)} right")


if __name__ == "__main__":
    main()

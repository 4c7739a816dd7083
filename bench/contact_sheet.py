"""A contact sheet of RandAugment: the fourteen operations at strength 10 on images of five domains.

python bench/contact_sheet.py docs/pictures/randaugment.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from PIL import Image

from fedloom.augment.operations import OPERATIONS
from fedloom.augment.randaugment import applied
from fedloom.data import load

SEVEN = 7  # the digit that is shown


def sheet(path: Path) -> None:
    data = load("digits_five", per_domain=100)
    names = data.group_names
    rows = [((data.y == SEVEN) & (data.groups == group)).nonzero()[0][1] for group in range(len(names))]
    originals = torch.from_numpy(data.x[rows])
    figure, axes = plt.subplots(2 * len(rows), len(OPERATIONS), figsize=(14, 10.6), dpi=60)
    for column, (name, operation) in enumerate(OPERATIONS.items()):
        for sign in (1.0, -1.0):
            shown = applied(operation, originals, torch.full((len(rows),), sign))
            for number, picture in enumerate(shown):
                place = axes[2 * number + (sign < 0), column]
                place.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest")
                place.set_xticks([])
                place.set_yticks([])
                if not column:
                    place.set_ylabel(f"{names[number]} {'+' if sign > 0 else '-'}", fontsize=9)
        axes[0, column].set_title(name, fontsize=9)
    figure.tight_layout(pad=0.3)
    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)  # a document's picture, not a print


if __name__ == "__main__":
    sheet(Path(sys.argv[1]))

"""Data of one's own: an .npz file in the layout that fedloom reads. Here, noisy stripes at two angles, by two makers.

Write it with: python examples/mydata.py stripes.npz
Train on it with: fedloom run fedavg --dataset stripes.npz --partition domain --clients 2
"""

import sys

import numpy as np


def stripes(count: int, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Pictures (N, 16, 16), labels 0 or 1 (the angle) and groups 0 or 1 (dark or light paper)."""
    labels, groups = generator.integers(0, 2, (2, count))
    phase = generator.uniform(0, 2 * np.pi, (count, 1, 1))
    waves = np.sin(np.arange(16) * 1.2 + phase)  # (N, 1, 16): the same in every row
    upright = np.broadcast_to(waves, (count, 16, 16))
    pictures = np.where(labels[:, None, None] == 0, upright, upright.transpose(0, 2, 1))
    paper = np.where(groups == 0, 90, 160)[:, None, None]
    noisy = paper + 40 * pictures + generator.normal(0, 25, pictures.shape)
    return {"x": np.clip(noisy, 0, 255).astype(np.uint8), "y": labels, "g": groups}


if __name__ == "__main__":
    drawn = np.random.default_rng(0)
    parts = {"train": stripes(600, drawn), "test": stripes(200, drawn)}
    arrays = {f"{key}_{part}": array for part, made in parts.items() for key, array in made.items()}
    np.savez_compressed(sys.argv[1], class_names=["upright", "level"], group_names=["dark", "light"], **arrays)

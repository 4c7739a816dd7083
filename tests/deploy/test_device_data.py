import numpy as np
import pytest
from PIL import Image

from fedloom.deploy.worlds import device_data
from fedloom.errors import InputError


def pictures(folder, **counts):
    """So many grey pictures a class, each of one level: ten times its number."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(np.full((8, 8), 10 * number, np.uint8)).save(folder / name / f"{number}.png")


def test_a_folder_of_images_is_a_devices_data(tmp_path):
    pictures(tmp_path / "train", cat=6, dog=4, owl=0)
    pictures(tmp_path / "test", cat=1, dog=2)
    dataset, dealt = device_data(tmp_path, validation=0.2)
    assert dataset.class_names == ("cat", "dog", "owl")  # of which it has none: numbered as everywhere
    assert dataset.x.shape == (13, 3, 8, 8)  # folders are read in colour
    assert dataset.y.tolist() == [0] * 6 + [1] * 4 + [0, 1, 1]
    assert dataset.x[5, 0, 0, 0] == 50
    assert [len(rows[0]) for rows in (dealt.train, dealt.validation, dealt.test)] == [8, 2, 3]


def test_a_folder_without_a_test_part_keeps_a_fifth_back(tmp_path):
    pictures(tmp_path, cat=6, dog=4)
    _, dealt = device_data(tmp_path, validation=0.0)
    held = set(dealt.test[0].tolist())
    assert len(held) == 2
    assert held | set(dealt.train[0].tolist()) == set(range(10))


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    with pytest.raises(InputError, match="holds no folders of images"):
        device_data(tmp_path)

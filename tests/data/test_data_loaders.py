"""Every loader reads small files of its usual layout and refuses damaged ones with a sentence that names them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pooch
import pytest
import scipy.io
from PIL import Image

from fedloom.data import load
from fedloom.errors import InputError

Home = Path
GENERATOR = np.random.default_rng(0)


def images(count: int, *shape: int) -> npt.NDArray[np.uint8]:
    return GENERATOR.integers(0, 256, (count, *shape), np.uint8)


def labels(count: int, classes: int = 10) -> npt.NDArray[np.int64]:
    return np.arange(count) % classes


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_mnist(folder: Path, suffix: str = "") -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    folder.mkdir(parents=True, exist_ok=True)
    x, y = images(30, 28, 28), labels(30).astype(np.uint8)
    for name, part in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        for kind, array in (("images-idx3", x[part]), ("labels-idx1", y[part])):
            data = idx(array)
            (folder / f"{name}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    return x, y


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_found_in_its_usual_places(home: Home, folder: str, suffix: str) -> None:
    x, y = write_mnist(home / folder, suffix)
    dataset = load("mnist")
    assert np.array_equal(dataset.x[:, 0], x)
    assert np.array_equal(dataset.y, y)
    assert (dataset.trained, dataset.channels, dataset.size, dataset.classes) == (20, 1, 28, 10)
    assert dataset.y.dtype == np.int64
    assert dataset.test_rows.tolist() == list(range(20, 30))


def test_fashion_is_never_taken_from_mnist_files(home: Home) -> None:
    write_mnist(home)
    with pytest.raises(InputError, match="fashion_mnist"):
        load("fashion_mnist")
    write_mnist(home / "FashionMNIST" / "raw")
    assert load("fashion_mnist").class_names[0] == "T-shirt/top"


def test_emnist_letters_stand_upright_and_count_from_zero(home: Home) -> None:
    x, y = images(52, 28, 28), (labels(52, 26) + 1).astype(np.uint8)
    (home / "emnist").mkdir()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part in ("train", "test"):
            archive.writestr(f"gzip/emnist-letters-{part}-images-idx3-ubyte.gz", gzip.compress(idx(x)))
            archive.writestr(f"gzip/emnist-letters-{part}-labels-idx1-ubyte.gz", gzip.compress(idx(y)))
    (home / "emnist" / "gzip.zip").write_bytes(packed.getvalue())
    dataset = load("emnist_letters")
    assert np.array_equal(dataset.x[:52, 0], x.transpose(0, 2, 1))
    assert dataset.y[:3].tolist() == [0, 1, 2]
    assert dataset.class_names[25] == "z"
    assert load("emnist", split="letters").classes == 26
    with pytest.raises(InputError, match="Did you mean 'digits'"):
        load("emnist", split="digit")


def test_emnist_balanced_has_47_classes(home: Home) -> None:
    for part in ("train", "test"):
        (home / f"emnist-balanced-{part}-images-idx3-ubyte").write_bytes(idx(images(47, 28, 28)))
        (home / f"emnist-balanced-{part}-labels-idx1-ubyte").write_bytes(idx(labels(47, 47).astype(np.uint8)))
    dataset = load("emnist")
    assert (dataset.classes, dataset.class_names[46]) == (47, "t")


def damage_idx(data: bytes) -> list[bytes]:
    return [data[:-5], data + b"x", b"\x00\x00\x0d\x03" + data[4:], b"", data[:6]]


@pytest.mark.parametrize("case", range(5))
def test_damaged_idx_files_are_named(home: Home, case: int) -> None:
    write_mnist(home / "mnist")
    file = home / "mnist" / "train-images-idx3-ubyte"
    file.write_bytes(damage_idx(file.read_bytes())[case])
    with pytest.raises(InputError, match="train-images-idx3-ubyte is damaged"):
        load("mnist")


def test_damaged_gzip_and_missing_part(home: Home) -> None:
    write_mnist(home / "mnist", ".gz")
    file = home / "mnist" / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte.gz is damaged"):
        load("mnist")
    file.unlink()
    with pytest.raises(InputError, match="not t10k-images-idx3-ubyte"):
        load("mnist")


def test_counts_and_labels_are_checked(home: Home) -> None:
    write_mnist(home / "mnist")
    file = home / "mnist" / "train-labels-idx1-ubyte"
    file.write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(InputError, match="20 images but 19"):
        load("mnist")
    file.write_bytes(idx(np.full(20, 10, np.uint8)))
    with pytest.raises(InputError, match=r"label 10, outside 0 \.\. 9"):
        load("mnist")


def cifar_batch(count: int, **entries: object) -> dict[bytes, object]:
    return {b"data": images(count, 3072), b"labels": labels(count).tolist()} | {
        k.encode(): v for k, v in entries.items()
    }


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(cifar_batch(10), protocol=2))
    names = [f"class {number}".encode() for number in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, protocol=2))


@pytest.mark.parametrize("folder", ["cifar10/cifar-10-batches-py", "cifar-10-batches-py", "CIFAR10"])
def test_cifar10_batches(home: Home, folder: str) -> None:
    write_cifar10(home / folder)
    dataset = load("cifar10")
    first = pickle.loads((home / folder / "data_batch_1").read_bytes())[b"data"]
    assert np.array_equal(dataset.x[:10].reshape(10, 3072), first)
    assert (dataset.x.shape, dataset.trained, dataset.natural) == ((60, 3, 32, 32), 50, True)
    assert dataset.class_names[3] == "class 3"


def test_cifar100_from_the_archive(home: Home) -> None:
    with tarfile.open(home / "cifar-100-python.tar.gz", "w:gz") as tar:
        names = {b"fine_label_names": [f"fine {number}".encode() for number in range(100)]}
        for name, content in (("train", cifar_batch(100)), ("test", cifar_batch(100)), ("meta", names)):
            content = content | {b"fine_labels": labels(100, 100).tolist()} if name != "meta" else content
            data = pickle.dumps(content, protocol=2)
            member = tarfile.TarInfo(f"cifar-100-python/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (home / "cifar100").mkdir()
    (home / "cifar-100-python.tar.gz").rename(home / "cifar100" / "cifar-100-python.tar.gz")
    dataset = load("cifar100")
    assert (dataset.classes, dataset.trained, dataset.class_names[99]) == (100, 100, "fine 99")


class Malicious:
    """A pickle that would make a folder when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_is_refused_and_not_run(home: Home) -> None:
    write_cifar10(home / "cifar10")
    target = home / "made-by-the-pickle"
    evil = cifar_batch(10, extra=Malicious(target))
    (home / "cifar10" / "data_batch_3").write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(InputError, match=r"data_batch_3 asks for posix.mkdir.*refused"):
        load("cifar10")
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": images(10, 3072)}, protocol=2),
        pickle.dumps({b"data": images(10, 99), b"labels": []}, protocol=2),
        pickle.dumps(cifar_batch(10), protocol=2)[:-500],
    ],
)
def test_damaged_cifar_batches_are_named(home: Home, content: bytes) -> None:
    write_cifar10(home / "cifar10")
    (home / "cifar10" / "data_batch_2").write_bytes(content)
    with pytest.raises(InputError, match="data_batch_2 is damaged"):
        load("cifar10")


def test_cifar_with_a_missing_or_short_part(home: Home) -> None:
    write_cifar10(home / "cifar10")
    short = cifar_batch(10) | {b"labels": [0] * 9}
    (home / "cifar10" / "test_batch").write_bytes(pickle.dumps(short, protocol=2))
    with pytest.raises(InputError, match="10 images but 9"):
        load("cifar10")
    (home / "cifar10" / "test_batch").unlink()
    with pytest.raises(InputError, match="no file test_batch"):
        load("cifar10")


def test_svhn_mat(home: Home) -> None:
    x = images(20, 32, 32, 3)
    for part in ("train", "test"):
        content = {"X": x.transpose(1, 2, 3, 0), "y": np.where(labels(20) == 0, 10, labels(20))[:, None]}
        scipy.io.savemat(home / f"{part}_32x32.mat", content)
    dataset = load("svhn")
    assert np.array_equal(dataset.x[:20], x.transpose(0, 3, 1, 2))
    assert np.array_equal(dataset.y[:20], labels(20))
    scipy.io.savemat(home / "test_32x32.mat", {"X": x})
    with pytest.raises(InputError, match=r"test_32x32.mat is damaged.*'y'"):
        load("svhn")
    whole = (home / "train_32x32.mat").read_bytes()
    (home / "train_32x32.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"train_32x32.mat is damaged"):
        load("svhn")
    (home / "train_32x32.mat").write_bytes(b"")
    with pytest.raises(InputError, match=r"train_32x32.mat is damaged"):
        load("svhn")


def test_usps_text(home: Home) -> None:
    line = " ".join(f"{index}:{2 * index / 256 - 1:.5f}" for index in range(1, 257))
    for name in ("usps.bz2", "usps.t.bz2"):
        (home / name).write_bytes(bz2.compress("".join(f"{label} {line}\n" for label in range(1, 11)).encode()))
    dataset = load("usps")
    assert (dataset.x.shape, dataset.trained) == ((20, 1, 16, 16), 10)
    assert dataset.y[:10].tolist() == list(range(10))
    assert (dataset.x[0, 0, 0, 0], dataset.x[0, 0, -1, -1]) == (1, 255)
    (home / "usps.t.bz2").write_bytes(bz2.compress(b"1 0:0.5\n"))
    with pytest.raises(InputError, match=r"usps.t.bz2 is damaged.*pixel 0 in line 1"):
        load("usps")
    (home / "usps.t.bz2").unlink()
    with pytest.raises(InputError, match=r"not usps.t.bz2"):
        load("usps")


def test_usps_h5(home: Home) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(home / "usps.h5", "w") as file:
        for part in ("train", "test"):
            file[f"{part}/data"], file[f"{part}/target"] = np.full((10, 256), 0.5, np.float32), labels(10)
    dataset = load("usps")
    assert dataset.x.shape == (20, 1, 16, 16)
    assert dataset.x.max() == 128
    with h5py.File(home / "usps.h5", "w") as file:
        file["train/data"] = np.zeros((10, 256))
    with pytest.raises(InputError, match=r"usps.h5 is damaged"):
        load("usps")


def leaf(writers: list[str], count: int = 5) -> str:
    data = {w: {"x": GENERATOR.random((count, 784)).tolist(), "y": [61] * count} for w in writers}
    return json.dumps({"users": writers, "num_samples": [count] * len(writers), "user_data": data})


def test_leaf_femnist(home: Home) -> None:
    for part in ("train", "test"):
        (home / "femnist" / "data" / part).mkdir(parents=True)
        (home / "femnist" / "data" / part / "all_data_0.json").write_text(leaf(["w1", "w0"]))
        (home / "femnist" / "data" / part / "all_data_1.json").write_text(leaf(["w2"]))
    dataset = load("femnist")
    assert (dataset.x.shape, dataset.trained, dataset.classes) == ((30, 1, 28, 28), 15, 62)
    assert dataset.group_names == ("w0", "w1", "w2")
    assert dataset.groups is not None
    assert dataset.groups[:15].tolist() == [1] * 5 + [0] * 5 + [2] * 5
    file = home / "femnist" / "data" / "test" / "all_data_1.json"
    for wrong in ("{", "[]", json.dumps({"user_data": {"w": {"x": [[0] * 784], "y": [1, 2]}}})):
        file.write_text(wrong)
        with pytest.raises(InputError, match=r"all_data_1.json is damaged"):
            load("femnist")


def test_leaf_without_a_split_gives_each_writer_a_test_part(home: Home) -> None:
    (home / "femnist" / "all_data").mkdir(parents=True)
    (home / "femnist" / "all_data" / "all.json").write_text(leaf(["a", "b"], 10))
    dataset = load("femnist")
    assert dataset.groups is not None
    assert np.bincount(dataset.groups[dataset.trained :]).tolist() == [2, 2]


def picture(path: Path, side: int = 20, colour: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), (colour, 2 * colour, 3 * colour)).save(path)


@pytest.mark.parametrize("base", ["PACS/kfold", "pacs"])
def test_domain_folders(home: Home, base: str) -> None:
    for domain in ("art_painting", "sketch"):
        for label, name in enumerate(("dog", "house")):
            for number in range(10):
                picture(home / base / domain / name / f"{number}.png", 20 + number, 10 * label + 5)
    dataset = load("pacs", size=16)
    assert (dataset.x.shape, dataset.trained) == ((40, 3, 16, 16), 32)
    assert dataset.group_names == ("art_painting", "sketch")
    assert dataset.class_names == ("dog", "house")
    assert dataset.groups is not None
    # The held out fifth is even over domains and classes.
    assert np.bincount(dataset.groups[32:] * 2 + dataset.y[32:]).tolist() == [2, 2, 2, 2]
    assert dataset.x[dataset.y == 1, :, 0, 0].tolist() == [[15, 30, 45]] * 20
    assert load("pacs").size == 64
    (home / base / "sketch" / "dog" / "0.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(InputError, match=r"0.png is damaged"):
        load("pacs")


def test_vlcs_first_release(home: Home) -> None:
    for domain in ("CALTECH", "SUN"):
        for part in ("full", "train"):
            for name in ("0", "1"):
                for number in range(5):
                    picture(home / "VLCS" / domain / part / name / f"{number}.jpg")
    dataset = load("vlcs")
    assert (len(dataset.y), dataset.group_names, dataset.class_names) == (20, ("CALTECH", "SUN"), ("0", "1"))


def test_mnist_m_folders(home: Home) -> None:
    for part in ("train", "test"):
        lines = [f"{number:08d}.png {number % 10}" for number in range(20)]
        for line in lines:
            picture(home / "mnist_m" / f"mnist_m_{part}" / line.split()[0], 32)
        (home / "mnist_m" / f"mnist_m_{part}_labels.txt").write_text("\n".join(lines))
    dataset = load("mnist_m", limit=10)
    assert (dataset.x.shape, dataset.trained) == ((30, 3, 32, 32), 10)
    assert np.bincount(dataset.y[:10]).tolist() == [1] * 10
    picture(home / "mnist_m" / "mnist_m_test" / "00000003.png", 31)
    with pytest.raises(InputError, match=r"00000003.png is damaged"):
        load("mnist_m")
    (home / "mnist_m" / "mnist_m_test_labels.txt").write_text("00000000.png eleven")
    with pytest.raises(InputError, match=r"mnist_m_test_labels.txt is damaged"):
        load("mnist_m")


def test_mnist_m_class_folders(home: Home) -> None:
    for part in ("training", "testing"):
        for label in range(10):
            picture(home / "mnist-m" / part / str(label) / "1.png", 28)
    assert load("mnist_m").x.shape == (20, 3, 28, 28)


def test_cinic10(home: Home) -> None:
    for part in ("train", "valid", "test"):
        for name in ("airplane", "truck"):
            picture(home / "CINIC-10" / part / name / "a.png", 32)
    assert (load("cinic10").trained, load("cinic10", validation=True).trained) == (2, 4)
    (home / "CINIC-10" / "test" / "truck" / "a.png").unlink()
    with pytest.raises(InputError, match="truck holds no images"):
        load("cinic10")


def test_tiny_imagenet(home: Home) -> None:
    base = home / "tiny-imagenet-200"
    for name in ("n01", "n02"):
        picture(base / "train" / name / "images" / f"{name}_0.JPEG", 64)
        picture(base / "val" / "images" / f"val_{name}.JPEG", 64)
    (base / "val" / "val_annotations.txt").write_text("val_n01.JPEG\tn01\t0\t0\t9\t9\nval_n02.JPEG\tn02\t0\t0\t9\t9\n")
    (base / "words.txt").write_text("n01\tgoldfish, Carassius auratus\n")
    dataset = load("tiny_imagenet", size=32)
    assert (dataset.x.shape, dataset.y.tolist()) == ((4, 3, 32, 32), [0, 1, 0, 1])
    assert dataset.class_names == ("goldfish", "n02")


def write_npz(path: Path, **changed: npt.NDArray[np.generic] | None) -> None:
    arrays = {
        "x_train": images(20, 9, 9),
        "y_train": labels(20),
        "x_test": images(10, 9, 9),
        "y_test": labels(10),
    } | changed
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})  # type: ignore[arg-type]


def test_npz_by_name_by_option_and_by_path(home: Home) -> None:
    groups = {"g_train": labels(20, 2), "g_test": labels(10, 2), "group_names": np.array(["left", "right"])}
    write_npz(home / "usps.npz", **groups)
    assert load("usps").x.shape == (30, 1, 9, 9)
    path = str(home / "usps.npz")
    for dataset in (load(path), load("npz", path=path)):
        assert (dataset.name, dataset.trained, dataset.group_names) == ("usps", 20, ("left", "right"))
    assert load(path, size=5, limit=10).x.shape == (20, 1, 5, 5)
    write_npz(home / "mine.npz", x_test=None, y_test=None, x_train=images(20, 9, 9, 3))
    mine = load(str(home / "mine.npz"))
    assert (mine.channels, mine.trained, len(mine.test_rows)) == (3, 20, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x_train": None}, "no array 'x_train'"),
        ({"y_train": labels(19)}, "20 images but 19"),
        ({"y_train": labels(20).astype(float)}, "float64"),
        ({"y_train": labels(20) - 1}, "label -1"),
        ({"x_train": images(20, 9, 9).astype(np.float32)}, "expected uint8"),
        ({"x_train": images(20, 9, 9, 2)}, "expected \\(N, H, W\\)"),
        ({"x_test": images(10, 8, 8)}, "test images"),
        ({"x_train": images(0, 9, 9), "y_train": labels(0)}, "no training images"),
        ({"y_test": None}, "y_test is missing"),
        ({"class_names": np.array(["a", "b"])}, "label 9, outside 0 .. 1"),
        ({"g_train": labels(20, 2)}, "g_test is missing"),
        ({"x_tarin": labels(3)}, "Did you mean 'x_train'"),
        ({"g_train": labels(20, 2), "g_test": labels(10, 2), "group_names": np.array(["one"])}, "groups must be"),
    ],
)
def test_wrong_npz_files_are_refused(
    tmp_path: Path, changed: dict[str, npt.NDArray[np.generic] | None], said: str
) -> None:
    write_npz(tmp_path / "mine.npz", **changed)
    with pytest.raises(InputError, match=said) as caught:
        load(str(tmp_path / "mine.npz"))
    assert "mine.npz" in str(caught.value)


def test_truncated_pickled_or_absent_npz(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    with pytest.raises(InputError, match="does not exist"):
        load(str(path))
    write_npz(path)
    whole = path.read_bytes()
    for content in (whole[:1000], b"", b"text", pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"mine.npz is damaged"):
            load(str(path))
    np.savez(path, x_train=np.array([{}], object), y_train=labels(1))
    with pytest.raises(InputError, match=r"mine.npz is damaged"):
        load(str(path))


ABSENT = [
    "mnist", "emnist", "emnist_letters", "fashion_mnist", "femnist", "cifar10", "cifar100", "svhn", "usps", "mnist_m",
    "pacs", "vlcs", "cinic10", "tiny_imagenet",
]  # fmt: skip


@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_data_set_says_what_to_put_where(home: Home, name: str) -> None:
    with pytest.raises(InputError) as caught:
        load(name)
    sentence = str(caught.value)
    assert "put " in sentence
    assert str(home / name) in sentence
    assert f"{name}.npz" in sentence
    assert "\n" not in sentence


def test_without_fedloom_data_and_with_a_wrong_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_DATA")
    with pytest.raises(InputError, match="FEDLOOM_DATA is not set"):
        load("mnist")
    monkeypatch.setenv("FEDLOOM_DATA", str(home / "nowhere"))
    with pytest.raises(InputError, match="not a folder"):
        load("mnist")


def test_a_download_lands_in_the_cache_and_is_read_from_there(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(home / "elsewhere", ".gz")
    asked = []

    def retrieve(url: str, known_hash: str, fname: str, path: Path, **_: object) -> None:
        asked.append((url, known_hash))
        path.mkdir(parents=True, exist_ok=True)
        (path / fname).write_bytes((home / "elsewhere" / fname).read_bytes())

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert load("mnist").trained == 20
    assert load("mnist").trained == 20
    assert len(asked) == 4
    assert all(known.startswith("md5:") for _, known in asked)


def test_a_download_with_a_wrong_checksum_is_said(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(*_: object, **__: object) -> None:
        raise ValueError("hash differs")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(InputError, match="known checksum"):
        load("cifar10")


def test_names_and_options_are_checked(home: Home) -> None:
    with pytest.raises(InputError, match="Did you mean 'mnist'"):
        load("mnits")
    with pytest.raises(InputError, match="Did you mean 'limit'"):
        load("digits", limits=3)
    with pytest.raises(InputError, match="needs the option 'path'"):
        load("npz")
    with pytest.raises(InputError, match="size of data set 'digits' must be at least 1; got 0"):
        load("digits", size=0)
    with pytest.raises(InputError, match="returned Iid; expected"):
        load("fedloom.data.partition:Iid")
    with pytest.raises(InputError, match="expected a function"):
        load("builtins:dict")
    assert load("fedloom.data.digits:digits").name == "digits"

"""Data sets: readers against files written here, augmentation against slow twins, streams against themselves."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import sys
import tarfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from equinorm.errors import UserError
from equinorm.lab.data import (
    DataSet,
    augment,
    data_folder,
    draw_lambda,
    is_streamed,
    keep,
    load,
    mix,
    mixed_loss,
    names,
    normalise,
    prepare,
)
from equinorm.lab.data import hub as hub_module
from equinorm.lab.data import loading as loading_module
from equinorm.lab.data.augment import Placement, centre, crop, draw_placement, magnify
from equinorm.lab.data.catalogue import CATALOGUE, CatalogueEntry, File, Layout
from equinorm.lab.data.copies import copy_path
from equinorm.lab.data.folder import Files, batches, centre_box, decode, find_folder, random_box, stream
from equinorm.lab.data.formats import Raw, cifar_binary, cifar_python, gunzip, idx, idx_pair, svhn_mat, untar
from equinorm.lab.data.splits import statistics
from equinorm.lab.training.runs import Data

Pair = tuple[np.ndarray, np.ndarray]


def pictures(n: int, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, seed: int = 0) -> Pair:
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(n, *shape), dtype=np.uint8), draw.integers(classes, size=n)


# -- writers of every format -------------------------------------------------------------------------------------------


def binary(pair: Pair, coarse: bool = False) -> bytes:
    images, labels = pair
    rows = [bytes([7] if coarse else []) + bytes([y]) + x.tobytes() for x, y in zip(images, labels, strict=True)]
    return b"".join(rows)


class Python2(pickle._Pickler):  # type: ignore[name-defined]
    """Writes what Python 2 wrote, as in the official files: all texts and bytes as `str`, numpy where it was then."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def text(self, value: str | bytes) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    def named(self, value: Any) -> None:
        home = "numpy.core.multiarray" if value.__name__ == "_reconstruct" else "numpy"
        self.write(f"c{home}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch |= {str: text, bytes: text, type: named, types.FunctionType: named, types.BuiltinFunctionType: named}


def pickled(pair: Pair, key: str = "labels", python2: bool = True) -> bytes:
    images, labels = pair
    batch = {"data": images.reshape(len(images), -1), key: labels.tolist(), "filenames": ["a.png"] * len(labels)}
    if not python2:
        return pickle.dumps(batch, protocol=2)
    file = io.BytesIO()
    Python2(file, 2).dump(batch)
    return file.getvalue()


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def mat(pair: Pair) -> bytes:
    images, labels = pair
    file = io.BytesIO()
    y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    scipy.io.savemat(file, {"X": images.transpose(2, 3, 1, 0), "y": y}, do_compression=True)
    return file.getvalue()


def tar_gz(files: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def parts_of(pair: Pair, n: int) -> Iterator[Pair]:
    return zip(np.array_split(pair[0], n), np.array_split(pair[1], n), strict=True)


def cifar10_files(train: Pair, test: Pair, python: bool, python2: bool = True) -> dict[str, bytes]:
    if python:
        batches = {f"data_batch_{i}": pickled(p, python2=python2) for i, p in enumerate(parts_of(train, 5), 1)}
        return {**batches, "test_batch": pickled(test, python2=python2)}
    return {
        **{f"data_batch_{i}.bin": binary(p) for i, p in enumerate(parts_of(train, 5), 1)},
        "test_batch.bin": binary(test),
    }


def mnist_files(train: Pair, test: Pair) -> dict[str, bytes]:
    return {
        f"{name}-{what}-ubyte": idx_bytes(array)
        for name, (images, labels) in (("train", train), ("t10k", test))
        for what, array in (("images-idx3", images[:, 0]), ("labels-idx1", labels.astype(np.uint8)))
    }


def under(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def packed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content) for name, content in files.items()}


RGB_TRAIN, RGB_TEST = pictures(12), pictures(5, seed=1)
FINE_TRAIN, FINE_TEST = pictures(12, classes=100), pictures(5, classes=100, seed=1)
GREY_TRAIN, GREY_TEST = pictures(12, (1, 28, 28)), pictures(5, (1, 28, 28), seed=1)
BIN, PY = (cifar10_files(RGB_TRAIN, RGB_TEST, python) for python in (False, True))
BIN100 = {"train.bin": binary(FINE_TRAIN, coarse=True), "test.bin": binary(FINE_TEST, coarse=True)}
PY100 = {"train": pickled(FINE_TRAIN, "fine_labels"), "test": pickled(FINE_TEST, "fine_labels")}
MNIST = mnist_files(GREY_TRAIN, GREY_TEST)
SVHN = {"train_32x32.mat": mat(RGB_TRAIN), "test_32x32.mat": mat(RGB_TEST)}

# what is below the data directory, for every set and every place in which it is looked for
LAYOUTS: dict[str, tuple[str, dict[str, bytes], Pair, Pair]] = {
    "cifar10 binary": ("cifar10", under("cifar-10-batches-bin", BIN), RGB_TRAIN, RGB_TEST),
    "cifar10 binary, nested": ("cifar10", under("cifar10/cifar-10-batches-bin", BIN), RGB_TRAIN, RGB_TEST),
    "cifar10 binary, itself": ("cifar10", BIN, RGB_TRAIN, RGB_TEST),
    "cifar10 binary, archive": (
        "cifar10",
        {"cifar-10-binary.tar.gz": tar_gz(under("cifar-10-batches-bin", BIN))},
        RGB_TRAIN,
        RGB_TEST,
    ),
    "cifar10 python": ("cifar10", under("cifar-10-batches-py", PY), RGB_TRAIN, RGB_TEST),
    "cifar10 python 3": (
        "cifar10",
        under("cifar-10-batches-py", cifar10_files(RGB_TRAIN, RGB_TEST, python=True, python2=False)),
        RGB_TRAIN,
        RGB_TEST,
    ),
    "cifar10 python, archive": (
        "cifar10",
        {"cifar10/cifar-10-python.tar.gz": tar_gz(under("./cifar-10-batches-py", PY))},
        RGB_TRAIN,
        RGB_TEST,
    ),
    "cifar100 binary": ("cifar100", under("cifar-100-binary", BIN100), FINE_TRAIN, FINE_TEST),
    "cifar100 binary, archive": (
        "cifar100",
        {"cifar-100-binary.tar.gz": tar_gz(under("cifar-100-binary", BIN100))},
        FINE_TRAIN,
        FINE_TEST,
    ),
    "cifar100 python": ("cifar100", under("cifar-100-python", PY100), FINE_TRAIN, FINE_TEST),
    "cifar100 python, archive": (
        "cifar100",
        {"cifar-100-python.tar.gz": tar_gz(under("cifar-100-python", PY100))},
        FINE_TRAIN,
        FINE_TEST,
    ),
    "svhn": ("svhn", under("svhn", SVHN), RGB_TRAIN, RGB_TEST),
    "mnist": ("mnist", under("mnist", MNIST), GREY_TRAIN, GREY_TEST),
    "mnist, as torchvision keeps it": ("mnist", under("MNIST/raw", MNIST | packed(MNIST)), GREY_TRAIN, GREY_TEST),
    "mnist, packed": ("mnist", under("mnist", packed(MNIST)), GREY_TRAIN, GREY_TEST),
    "fashion_mnist": ("fashion_mnist", under("fashion-mnist", MNIST), GREY_TRAIN, GREY_TEST),
    "fashion_mnist, packed": ("fashion_mnist", under("FashionMNIST/raw", packed(MNIST)), GREY_TRAIN, GREY_TEST),
}


def assert_holds(data: DataSet, train: Pair, test: Pair) -> None:
    for split, (images, labels) in ((data.train, train), (data.test, test)):
        assert split.images.dtype == torch.uint8
        assert split.labels.dtype == torch.int64
        assert split.images.is_contiguous()
        np.testing.assert_array_equal(split.images.numpy(), images)
        np.testing.assert_array_equal(split.labels.numpy(), labels)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_found_and_read(layout: str, tmp_path: Path) -> None:
    name, files, train, test = LAYOUTS[layout]
    write(tmp_path, files)
    data = load(name, tmp_path, verify=False)
    assert_holds(data, train, test)
    assert data.name == name
    assert data.classes == CATALOGUE[name].classes
    assert data.shape == train[0].shape[1:]


def test_the_data_directory_is_the_argument_or_the_environment_or_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EQUINORM_DATA", raising=False)
    assert data_folder() == Path("data")
    monkeypatch.setenv("EQUINORM_DATA", str(tmp_path / "elsewhere"))
    assert data_folder() == tmp_path / "elsewhere"
    assert data_folder(tmp_path) == tmp_path
    write(tmp_path / "elsewhere", under("mnist", MNIST))
    assert_holds(load("mnist", verify=False), GREY_TRAIN, GREY_TEST)


def test_a_data_set_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, under("mnist", MNIST))
    first = load("mnist", tmp_path, verify=False)
    assert load("mnist", tmp_path, verify=False) is first
    assert load("mnist", tmp_path, verify=False, channels=3) is not first


def test_extra_images_of_svhn_follow_the_training_images(tmp_path: Path) -> None:
    extra = pictures(4, seed=2)
    write(tmp_path, under("svhn", {**SVHN, "extra_32x32.mat": mat(extra)}))
    both = tuple(np.concatenate(parts) for parts in zip(RGB_TRAIN, extra, strict=True))
    assert_holds(load("svhn", tmp_path, verify=False, extra=True), both, RGB_TEST)  # type: ignore[arg-type]
    assert_holds(load("svhn", tmp_path, verify=False), RGB_TRAIN, RGB_TEST)


@given(st.integers(1, 4), st.integers(0, 2**32), st.sampled_from([1, 2]))
@settings(max_examples=20)
def test_cifar_records(n: int, seed: int, label_bytes: int) -> None:
    images, labels = pictures(n, seed=seed)
    read = cifar_binary([Raw("x", binary((images, labels), coarse=label_bytes == 2))], label_bytes=label_bytes)
    np.testing.assert_array_equal(read[0], images)
    np.testing.assert_array_equal(read[1], labels)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=40)
def test_idx_holds_arrays_of_any_shape(shape: list[int], seed: int) -> None:
    array = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    np.testing.assert_array_equal(idx(Raw("x", idx_bytes(array))), array)


# -- what is wrong with files ------------------------------------------------------------------------------------------

READERS: dict[str, tuple[bytes, Callable[[Raw], Any]]] = {
    "binary": (BIN["test_batch.bin"], lambda raw: cifar_binary([raw], label_bytes=1)),
    "python": (PY["test_batch"], lambda raw: cifar_python([raw], labels="labels")),
    "idx": (MNIST["t10k-images-idx3-ubyte"], idx),
    "gz": (gzip.compress(MNIST["t10k-labels-idx1-ubyte"]), lambda raw: idx(gunzip(raw))),
    "tar": (tar_gz({"a/b": b"xyz" * 999}), lambda raw: untar(raw, ["a/b"])),
    "mat": (mat(RGB_TEST), lambda raw: svhn_mat([raw])),
}


@pytest.mark.parametrize("kind", READERS)
@given(share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=25)
def test_a_file_that_is_cut_short_is_named(kind: str, share: float) -> None:
    content, read = READERS[kind]
    read(Raw("some/file", content))
    cut = content[: int(share * len(content))]
    if kind == "binary" and cut and len(cut) % 3073 == 0:
        return  # whole records are missing: the sum and the number of images tell
    with pytest.raises(UserError, match=r"some/file.*fetch it again"):
        read(Raw("some/file", cut))


def test_fewer_images_than_there_should_be(tmp_path: Path) -> None:
    write(tmp_path, under("cifar-100-binary", BIN100))  # whose files have no published sums
    with pytest.raises(UserError, match=r"CIFAR-100.*12 images in the part train instead of 50,000.*verify=False"):
        load("cifar100", tmp_path)


def test_a_wrong_sum_names_file_sums_and_remedy(tmp_path: Path) -> None:
    write(tmp_path, under("cifar-10-batches-bin", BIN))
    found = hashlib.md5(BIN["data_batch_1.bin"]).hexdigest()
    with pytest.raises(UserError) as caught:
        load("cifar10", tmp_path)
    message = str(caught.value)
    for part in ("data_batch_1.bin", found, "5dd7e06a14cb22eb9f671a540d1b7c25", "fetch it again", "verify=False"):
        assert part in message


def with_true_sums(entry: CatalogueEntry, files: Mapping[str, bytes], counts: Mapping[str, int]) -> CatalogueEntry:
    """The entry as if `files` were what is published."""

    def summed(file: File) -> File:
        md5, gz = (hashlib.md5(files[n]).hexdigest() if n in files else n for n in (file.name, f"{file.name}.gz"))
        return File(file.name, md5, gz if file.gz_md5 else None)

    def layout(old: Layout) -> Layout:
        parts = {part: tuple(summed(f) for f in group) for part, group in old.parts.items()}
        return replace(old, parts=parts, archive=summed(old.archive) if old.archive else None)

    return replace(entry, layouts=tuple(map(layout, entry.layouts)), counts=counts)


@pytest.mark.parametrize("layout", ["cifar10 binary", "cifar10 python, archive", "mnist", "mnist, packed", "svhn"])
def test_right_sums_pass_and_one_changed_bit_does_not(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, files, train, test = LAYOUTS[layout]
    by_name = {Path(path).name: content for path, content in files.items()}
    counts = {"train": len(train[1]), "test": len(test[1])}
    patched = {**CATALOGUE, name: with_true_sums(CATALOGUE[name], by_name, counts)}
    monkeypatch.setattr(loading_module, "CATALOGUE", patched)
    write(tmp_path / "good", files)
    assert_holds(load(name, tmp_path / "good"), train, test)
    for path, content in files.items():
        spoilt = bytearray(content)
        spoilt[len(content) // 2] ^= 1
        write(tmp_path / "bad", {**files, path: bytes(spoilt)})
        with pytest.raises(UserError, match=Path(path).name):
            load(name, tmp_path / "bad")


def test_published_sums_are_sums() -> None:
    files = [f for e in CATALOGUE.values() for la in e.layouts for g in la.parts.values() for f in g]
    archives = [la.archive for e in CATALOGUE.values() for la in e.layouts if la.archive]
    sums = [s for f in [*files, *archives] for s in (f.md5, f.gz_md5) if s]
    assert all(len(s) == 32 and set(s) <= set("0123456789abcdef") for s in sums)
    assert len(set(sums)) == len(sums)
    assert all(archive.md5 for archive in archives)


def test_missing_files_are_named_with_their_place_and_source(tmp_path: Path) -> None:
    write(tmp_path, under("cifar-10-batches-py", {"data_batch_2": PY["data_batch_2"]}))
    with pytest.raises(UserError) as caught:
        load("cifar10", tmp_path)
    message = str(caught.value)
    for part in (
        str(tmp_path),
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin/",
        "data_batch_1.bin",
        "test_batch.bin",
        "cifar-10-python.tar.gz",
        "has only data_batch_2",
        "Krizhevsky",
        "EQUINORM_DATA",
        "--data-dir",
    ):
        assert part in message


def test_missing_extra_images_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path, under("svhn", SVHN))
    with pytest.raises(UserError, match=r"extra_32x32\.mat"):
        load("svhn", tmp_path, verify=False, extra=True)


def test_labels_out_of_range(tmp_path: Path) -> None:
    write(tmp_path, under("cifar-10-batches-bin", {**BIN, "test_batch.bin": binary(pictures(30, classes=200))}))
    with pytest.raises(UserError, match=r"cifar10, test: labels from \d+ to 1\d\d where 10"):
        load("cifar10", tmp_path, verify=False)


def test_an_archive_without_the_files(tmp_path: Path) -> None:
    write(tmp_path, {"cifar-10-binary.tar.gz": tar_gz({"cifar-10-batches-bin/readme.html": b"hello"})})
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz: does not hold .*data_batch_1\.bin"):
        load("cifar10", tmp_path, verify=False)


class Harmful:
    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.harm_was_done = True",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_wants_to_run_code_is_refused(protocol: int) -> None:
    content = pickle.dumps({"data": Harmful(), "labels": [1]}, protocol=protocol)
    with pytest.raises(UserError, match=r"batch: .*exec"):
        cifar_python([Raw("batch", content)], labels="labels")
    assert not hasattr(sys, "harm_was_done")


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {"data": np.zeros((1, 3072), np.uint8)},
        {"data": np.zeros((2, 3072), np.uint8), "labels": [1]},
        {"data": np.zeros((1, 3072)), "labels": [1]},
        {"data": np.zeros((1, 3072), np.uint8), "labels": ["cat"]},
        {"data": "pixels", "labels": [1]},
    ],
)
def test_a_pickle_of_something_else_is_refused(batch: Any) -> None:
    with pytest.raises(UserError, match="some/file"):
        cifar_python([Raw("some/file", pickle.dumps(batch, protocol=2))], labels="labels")


def test_files_of_something_else_are_refused() -> None:
    images, labels = (Raw(name, MNIST[f"t10k-{name}-ubyte"]) for name in ("images-idx3", "labels-idx1"))
    with pytest.raises(UserError, match="labels-idx1: holds an array with 1 axes"):
        idx_pair([labels, labels])
    with pytest.raises(UserError, match="one label for each of the 5 images"):
        idx_pair([images, Raw("y", MNIST["train-labels-idx1-ubyte"])])
    for content in ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, {"X": np.zeros((2, 2), np.uint8), "y": np.ones(2)}):
        file = io.BytesIO()
        scipy.io.savemat(file, content)
        with pytest.raises(UserError, match=r"some/file: .*X"):
            svhn_mat([Raw("some/file", file.getvalue())])


# -- the Hugging Face hub ----------------------------------------------------------------------------------------------


class StubHub(types.ModuleType):
    """Stands for the package `datasets`: rows of pillow images, as its `Image` feature gives them."""

    def __init__(self, parts: Mapping[str, Pair], columns: tuple[str, str]) -> None:
        super().__init__("datasets")
        self.__spec__ = ModuleSpec("datasets", None, origin="site-packages/datasets/__init__.py")
        self.parts, self.columns, self.asked = parts, columns, []

    def load_dataset(self, path: str, name: str | None = None, *, split: str) -> dict[str, list[Any]]:
        self.asked.append((path, name, split))
        if split not in self.parts:
            raise ConnectionError("the net is down")
        images, labels = self.parts[split]
        pixels = images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)
        return dict(zip(self.columns, ([Image.fromarray(p) for p in pixels], labels.tolist()), strict=True))


@pytest.mark.parametrize(
    ("name", "train", "test", "columns", "asked"),
    [
        ("cifar100", FINE_TRAIN, FINE_TEST, ("img", "fine_label"), ("uoft-cs/cifar100", None)),
        ("fashion_mnist", GREY_TRAIN, GREY_TEST, ("image", "label"), ("zalando-datasets/fashion_mnist", None)),
        ("svhn", RGB_TRAIN, RGB_TEST, ("image", "label"), ("ufldl-stanford/svhn", "cropped_digits")),
    ],
)
def test_what_is_missing_is_downloaded_once(
    name: str,
    train: Pair,
    test: Pair,
    columns: tuple[str, str],
    asked: tuple[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = StubHub({"train": train, "test": test}, columns)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    counts = {"train": len(train[1]), "test": len(test[1])}
    monkeypatch.setattr(loading_module, "CATALOGUE", {**CATALOGUE, name: replace(CATALOGUE[name], counts=counts)})
    folder = tmp_path / "new"
    assert_holds(load(name, folder), train, test)
    assert hub.asked == [(*asked, "train"), (*asked, "test")]
    loading_module._load.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_holds(load(name, folder), train, test)  # the copy
    assert sorted(p.name for p in (folder / "equinorm").iterdir()) == [f"{name}-test.npz", f"{name}-train.npz"]


def test_a_download_that_fails_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", StubHub({"train": RGB_TRAIN}, ("img", "label")))
    with pytest.raises(UserError, match=r"(?s)cifar-10-binary\.tar\.gz.*uoft-cs/cifar10 .*the net is down"):
        load("cifar10", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_download_of_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", StubHub({"train": RGB_TRAIN, "test": RGB_TEST}, ("img", "label")))
    with pytest.raises(UserError, match="12 images in the part train"):
        load("cifar10", tmp_path)
    assert not list(tmp_path.iterdir())


def test_official_files_go_before_copies_and_a_torn_copy_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a", under("mnist", MNIST))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        counts = {"train": 12, "test": 5}
        entry = with_true_sums(CATALOGUE["mnist"], MNIST, counts)
        patch.setattr(loading_module, "CATALOGUE", {**CATALOGUE, "mnist": entry})
        keep("mnist", tmp_path / "a", to=tmp_path / "b")
    assert_holds(load("mnist", tmp_path / "b", verify=False), GREY_TRAIN, GREY_TEST)
    path = copy_path(tmp_path / "b", "mnist", "train")
    for length in (0, 100, path.stat().st_size - 1):
        loading_module._load.cache_clear()
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(UserError, match=r"mnist-train\.npz: .*delete it"):
            load("mnist", tmp_path / "b", verify=False)
    write(tmp_path / "b", under("mnist", MNIST))
    assert_holds(load("mnist", tmp_path / "b", verify=False), GREY_TRAIN, GREY_TEST)


def test_a_copy_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("digits", to=tmp_path)
    before = copy_path(tmp_path, "digits", "train").read_bytes()

    def full(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(UserError, match=r"cannot keep digits in .*No space left"):
        keep("digits", to=tmp_path)
    assert copy_path(tmp_path, "digits", "train").read_bytes() == before
    assert len(list((tmp_path / "equinorm").iterdir())) == 2


def test_a_folder_called_datasets_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "datasets").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    assert not hub_module.available()


# -- digits ------------------------------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn() -> None:
    data = load("digits")
    pixels, labels = load_digits(return_X_y=True)
    rows = {tuple(row): label for row, label in zip(pixels.astype(int).tolist(), labels.tolist(), strict=True)}
    for split in (data.train, data.test):
        x = augment(split.images, Data("digits"), data.mean, data.std, training=False, dtype=torch.float64)
        assert abs(float(x.mean())) < 0.05  # standardized by the training images, in 17 shades as 256
        assert abs(float(x.std()) - 1) < 0.05
        back = (split.images.double() * (16 / 255)).round().int().flatten(1)
        assert [rows[tuple(row)] for row in back.tolist()] == split.labels.tolist()


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
def test_digits_in_the_shape_of_cifar(interpolation: str) -> None:
    small, large = load("digits"), load("digits", size=32, channels=3, interpolation=interpolation)
    assert large.shape == (3, 32, 32)
    assert len(large.mean) == len(large.std) == 3
    assert len(large.train) == 1347
    assert len(large.test) == 450
    for channel in large.test.images.unbind(1):
        back = F.avg_pool2d(channel[:, None].float(), 4)
        assert (back - small.test.images).abs().mean() < (20 if interpolation == "bilinear" else 1e-6)


def test_digits_without_scikit_learn_come_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = load("digits")
    keep("digits", to=tmp_path / "copy")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    copy = load("digits", tmp_path / "copy")
    assert torch.equal(copy.train.images, original.train.images)
    assert torch.equal(copy.test.labels, original.test.labels)
    with pytest.raises(UserError, match=r"digits needs scikit-learn.*equinorm\[lab\].*copy"):
        load("digits", tmp_path / "none")


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(UserError, match="digits has no option extra, width; there are size, channels"):
        load("digits", extra=True, width=3)
    with pytest.raises(UserError, match="bilinear or nearest, not 'cubic'"):
        load("digits", size=9, interpolation="cubic")
    assert set(names()) == {"digits", *CATALOGUE}


def test_colours_cannot_be_multiplied(tmp_path: Path) -> None:
    write(tmp_path, under("svhn", SVHN))
    with pytest.raises(UserError, match="3 channels cannot be given 4"):
        load("svhn", tmp_path, verify=False, channels=4)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=30)
def test_statistics_are_mean_and_deviation(n: int, channels: int, side: int, seed: int) -> None:
    images, _ = pictures(n, (channels, side, side), seed=seed)
    mean, std = statistics(torch.from_numpy(images))
    pixels = images.astype(np.float64) / 255
    np.testing.assert_allclose(mean, pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std((0, 2, 3)), rtol=1e-9, atol=1e-9)


# -- the part of a run -------------------------------------------------------------------------------------------------


def rows(images: Tensor) -> set[bytes]:
    return {bytes(image.numpy().tobytes()) for image in images}


@given(st.integers(0, 1346), st.integers(1, 1347))
@settings(max_examples=15)
def test_held_out_images_are_never_trained_on(held_out: int, train: int) -> None:
    data = Data("digits", train=train, held_out=held_out, evaluate="held_out" if held_out else "test")
    whole = load("digits")
    if held_out + train > 1347:
        with pytest.raises(UserError, match="1,347 training images"):
            prepare("digits", data, None, "cpu")
        return
    part = prepare("digits", data, None, "cpu")
    assert len(part.train) == train
    assert part.mean == whole.mean
    if held_out:
        assert len(part.test) == held_out
        duplicates = 1347 - len(rows(whole.train.images))
        assert len(rows(part.train.images) & rows(part.test.images)) <= duplicates
        assert rows(part.test.images) <= rows(whole.train.images)
        alone = prepare("digits", replace(data, train=None), None, "cpu")
        assert torch.equal(alone.test.images, part.test.images)  # whatever is trained on
        assert len(alone.train) == 1347 - held_out
        tested = prepare("digits", replace(data, evaluate="test"), None, "cpu")
        assert torch.equal(tested.train.images, part.train.images)
        assert torch.equal(tested.test.images, whole.test.images)
    else:
        assert torch.equal(part.test.images, whole.test.images)


def test_images_keep_their_labels_when_drawn() -> None:
    whole, part = load("digits"), prepare("digits", Data("digits", train=100, held_out=50), None, "cpu")
    label = {image.numpy().tobytes(): int(y) for image, y in zip(whole.train.images, whole.train.labels, strict=True)}
    assert [label[image.numpy().tobytes()] for image in part.train.images] == part.train.labels.tolist()
    assert prepare("digits", Data("digits", train=100, held_out=50), None, "cpu") is part  # runs share it


def test_the_draw_is_the_same_for_ever() -> None:
    """Results of different versions can be compared only while this holds."""
    part = prepare("digits", Data("digits", train=64, held_out=270, evaluate="held_out"), None, "cpu")
    assert part.train.labels[:10].tolist() == [7, 8, 9, 5, 0, 0, 9, 0, 4, 5]
    assert part.test.labels[:10].tolist() == [6, 7, 7, 5, 9, 1, 4, 1, 8, 2]


def test_prepare_refuses_what_makes_no_sense() -> None:
    with pytest.raises(UserError, match="set held_out"):
        prepare("digits", Data("digits", evaluate="held_out"), None, "cpu")
    with pytest.raises(UserError, match="'test' or 'held_out', not 'train'"):
        prepare("digits", Data("digits", evaluate="train"), None, "cpu")


def test_a_split_moves_and_is_indexed() -> None:
    split = load("digits").test
    assert len(split[torch.tensor([3, 1])]) == 2
    assert torch.equal(split[torch.tensor([3, 1])].labels, split.labels[[3, 1]])
    assert split.to("meta").images.device.type == "meta"


# -- augmentation ------------------------------------------------------------------------------------------------------


def slow_crop(x: np.ndarray, top: int, left: int, flip: bool, size: tuple[int, int], padding: int) -> np.ndarray:
    """One image, as one would write it down."""
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding)))
    cut = padded[:, top : top + size[0], left : left + size[1]]
    assert cut.shape[1:] == size
    return cut[:, :, ::-1] if flip else cut


def slow_magnify(
    x: np.ndarray, top: float, left: float, flip: bool, scale: float, size: tuple[int, int], padding: int
) -> np.ndarray:
    """One image, pixel by pixel: the four neighbours of the point that a pixel's centre comes from."""

    def pixel(row: int, column: int) -> np.ndarray:
        inside = 0 <= row < x.shape[1] and 0 <= column < x.shape[2]
        return x[:, row, column].astype(np.float64) if inside else np.zeros(len(x))

    out = np.zeros((len(x), *size))
    for i in range(size[0]):
        for j in range(size[1]):
            y = (i + 0.5 + top - padding) / scale - 0.5
            z = (j + 0.5 + left - padding) / scale - 0.5
            r, c = int(np.floor(y)), int(np.floor(z))
            a, b = y - r, z - c
            upper = (1 - b) * pixel(r, c) + b * pixel(r, c + 1)
            lower = (1 - b) * pixel(r + 1, c) + b * pixel(r + 1, c + 1)
            out[:, i, size[1] - 1 - j if flip else j] = (1 - a) * upper + a * lower
    return out


@st.composite
def batches_and_data(draw: st.DrawFn) -> tuple[Tensor, Data, int]:
    n, channels = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    padding = draw(st.integers(0, 3))
    cut = draw(st.none() | st.integers(1, min(height, width) + 2 * padding))
    seed = draw(st.integers(0, 2**32))
    images, _ = pictures(n, (channels, height, width), seed=seed)
    return torch.from_numpy(images), Data(crop=cut, padding=padding, flip=draw(st.booleans())), seed


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(batches_and_data())
def test_crop_and_flip_against_the_slow_twin(case: tuple[Tensor, Data, int]) -> None:
    x, data, seed = case
    size = (data.crop, data.crop) if data.crop else (x.shape[2], x.shape[3])
    place = draw_placement(x, data, generator(seed))
    expected = [
        slow_crop(image.numpy(), int(t), int(le), bool(f), size, data.padding)
        for image, t, le, f in zip(x, place.top, place.left, place.flip, strict=True)
    ]
    out = crop(x, place, size, data.padding)
    assert out.dtype == torch.uint8
    np.testing.assert_array_equal(out.numpy(), np.stack(expected))
    unit = augment(x, replace(data, inputs="unit"), (), (), True, generator(seed))
    np.testing.assert_array_equal(unit.numpy(), np.stack(expected).astype(np.float32) / np.float32(255))


@given(batches_and_data(), st.floats(0.5, 2), st.floats(0.5, 2))
@settings(max_examples=60)
def test_magnification_against_the_slow_twin(case: tuple[Tensor, Data, int], a: float, b: float) -> None:
    x, data, seed = case
    data = replace(data, scale=(min(a, b), max(a, b)), inputs="unit")
    size = (data.crop, data.crop) if data.crop else (x.shape[2], x.shape[3])
    place = draw_placement(x, data, generator(seed))
    assert place.scale is not None
    assert data.scale is not None
    assert (place.scale >= data.scale[0] - 1e-6).all()
    assert (place.scale <= data.scale[1] + 1e-6).all()
    expected = np.stack(
        [
            slow_magnify(image.numpy(), float(t), float(le), bool(f), float(s), size, data.padding)
            for image, t, le, f, s in zip(x, place.top, place.left, place.flip, place.scale, strict=True)
        ]
    )
    np.testing.assert_allclose(magnify(x, place, size, data.padding).numpy(), expected, atol=0.02)
    out = augment(x, data, (), (), True, generator(seed))
    np.testing.assert_allclose(out.numpy(), expected / 255, atol=1e-4)


@given(batches_and_data())
def test_magnification_by_one_at_whole_pixels_is_a_crop(case: tuple[Tensor, Data, int]) -> None:
    x, data, seed = case
    size = (data.crop, data.crop) if data.crop else (x.shape[2], x.shape[3])
    place = draw_placement(x, data, generator(seed))
    one = Placement(place.top.float(), place.left.float(), place.flip, torch.ones(len(x)))
    torch.testing.assert_close(magnify(x, one, size, data.padding), crop(x, place, size, data.padding).float())


@given(batches_and_data())
def test_testing_takes_the_centre(case: tuple[Tensor, Data, int]) -> None:
    x, data, _ = case
    size = (data.crop, data.crop) if data.crop else (x.shape[2], x.shape[3])
    p = 10  # enough for every size
    padded = F.pad(x, (p, p, p, p))
    top, left = ((old - new) // 2 + p for old, new in zip(x.shape[2:], size, strict=True))
    expected = padded[:, :, top : top + size[0], left : left + size[1]]
    assert torch.equal(centre(x, size), expected)
    data = replace(data, scale=(0.5, 2.0), inputs="unit")  # chance has no part in it
    assert torch.equal(augment(x, data, (), (), False), expected / 255)


def test_every_place_is_as_likely_as_any_other() -> None:
    x = torch.zeros(20_000, 1, 4, 4, dtype=torch.uint8)
    place = draw_placement(x, Data(padding=2, flip=True), generator(0))
    cells = torch.bincount(place.top * 5 + place.left, minlength=25)
    assert len(cells) == 25
    assert (cells - 800).abs().max() < 5 * 800**0.5
    assert abs(int(place.flip.sum()) - 10_000) < 5 * 5_000**0.5
    assert abs(np.corrcoef(place.top, place.left)[0, 1]) < 0.03
    assert abs(np.corrcoef(place.flip, place.left)[0, 1]) < 0.03


@given(st.integers(1, 2**20))
def test_the_last_place_is_never_passed(places: int) -> None:
    """The largest number below 1 that `rand` draws, times the number of places, stays below that number."""
    largest = torch.tensor(1 - 2**-24)
    assert int((largest * places).long()) == places - 1


def test_without_chance_nothing_is_drawn() -> None:
    x, own = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), generator(0)
    before = own.get_state()
    augment(x, Data(), (0.5,), (0.1,), True, own)
    augment(x, Data(padding=2, flip=True), (0.5,), (0.1,), False, own)
    assert torch.equal(own.get_state(), before)


def test_augmentation_draws_from_its_own_generator() -> None:
    x, data = torch.from_numpy(pictures(8)[0]), Data(padding=4, flip=True, scale=(0.8, 1.2), inputs="unit")
    state = torch.get_rng_state()
    first, second = (augment(x, data, (), (), True, generator(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert not torch.equal(first, augment(x, data, (), (), True, generator(4)))


@given(
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_normalisation(channels: int, channels_last: bool, dtype: torch.dtype, tensors: bool, seed: int) -> None:
    x = torch.from_numpy(pictures(3, (channels, 4, 5), seed=seed)[0])
    mean, std = [0.1 + 0.2 * i for i in range(channels)], [0.2 + 0.1 * i for i in range(channels)]
    given_mean, given_std = (torch.tensor(mean), torch.tensor(std)) if tensors else (mean, std)
    out = normalise(x, "standard", given_mean, given_std, channels_last=channels_last, dtype=dtype)
    expected = torch.stack([(x[:, i].double() / 255 - mean[i]) / std[i] for i in range(channels)], 1)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    rounding = 1e-5 if dtype != torch.bfloat16 else 2**-8
    torch.testing.assert_close(out.double(), expected, atol=rounding, rtol=rounding)
    unit = normalise(x, "unit", (), (), channels_last=channels_last)
    assert torch.equal(unit, x.float() / 255)


def test_augmentation_refuses_what_cannot_be() -> None:
    x = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(UserError, match="cannot cut 13 x 13 from 8 x 8 padded by 2"):
        augment(x, Data(crop=13, padding=2), (), (), True)
    with pytest.raises(UserError, match="not 'raw'"):
        augment(x, Data(inputs="raw"), (), (), True)


class NoHost(TorchDispatchMode):
    """Refuses what cannot be captured: waiting for a value, shapes that depend on values, tensors made from lists."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "item", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.FORBIDDEN, func
        return func(*args, **(kwargs or {}))


VARIANTS = [
    Data(padding=4, flip=True),
    Data(crop=28, flip=True),
    Data(scale=(0.8, 1.2), padding=2, flip=True, inputs="unit"),
    Data(),
]


@pytest.mark.parametrize("data", VARIANTS)
@pytest.mark.parametrize("tensors", [True, False])
def test_augmentation_can_be_captured(data: Data, tensors: bool) -> None:
    x, own = torch.from_numpy(pictures(4)[0]), generator(0)
    mean: Any = torch.full((3,), 0.5) if tensors else (0.5, 0.5, 0.5)
    lam, permutation, y = torch.tensor(0.3), torch.tensor([1, 0, 3, 2]), torch.arange(4)
    with NoHost():
        out = augment(x, data, mean, mean, True, own, channels_last=True)
        mixed = mix(out, lam, permutation)
        mixed_loss(F.cross_entropy, mixed.flatten(1), y, lam, permutation)
    with pytest.raises(AssertionError), NoHost():
        torch.zeros(2).sum().item()


@pytest.mark.gpu
@pytest.mark.parametrize("data", VARIANTS)
def test_augmentation_in_a_cuda_graph(data: Data) -> None:
    x = torch.from_numpy(pictures(64)[0]).cuda()
    mean = torch.full((3,), 0.5, device="cuda")
    own = torch.Generator("cuda").manual_seed(0)
    expected = [augment(x, data, mean, mean, True, own) for _ in range(3)]
    own.manual_seed(0)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(own)
    with torch.cuda.graph(graph):
        out = augment(x, data, mean, mean, True, own)
    own.manual_seed(0)
    for want in expected:
        graph.replay()
        torch.testing.assert_close(out, want)


# -- mixup -------------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.integers(1, 6), st.integers(0, 2**32), st.booleans())
def test_mixtures_are_weighted_sums(lam: float, n: int, seed: int, tensor: bool) -> None:
    x = torch.randn(n, 3, generator=generator(seed), dtype=torch.float64)
    y, permutation = torch.arange(n) % 3, torch.randperm(n, generator=generator(seed))
    weight = torch.tensor(lam, dtype=torch.float64) if tensor else lam
    expected = torch.stack([lam * x[i] + (1 - lam) * x[permutation[i]] for i in range(n)])
    torch.testing.assert_close(mix(x, weight, permutation), expected)
    soft = lam * F.one_hot(y, 3) + (1 - lam) * F.one_hot(y[permutation], 3)
    loss = mixed_loss(F.cross_entropy, x, y, weight, permutation)
    torch.testing.assert_close(loss, F.cross_entropy(x, soft.double()))


def test_mixing_in_half_precision_keeps_it() -> None:
    x = torch.randn(4, 2).bfloat16()
    assert mix(x, torch.tensor(0.25), torch.tensor([1, 0, 3, 2])).dtype == torch.bfloat16


@pytest.mark.parametrize("alpha", [0.2, 1.0, 6.0])
def test_lambda_has_its_distribution(alpha: float) -> None:
    own = generator(0)
    lams = np.array([draw_lambda(alpha, own) for _ in range(2000)])
    assert ((lams >= 0) & (lams <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(lams.mean() - 0.5) < 5 * (variance / 2000) ** 0.5
    assert lams.var() == pytest.approx(variance, rel=0.15)


def test_lambda_follows_the_generator() -> None:
    first, again = ([draw_lambda(6.0, own) for _ in range(5)] for own in (generator(1), generator(1)))
    assert first == again
    assert len(set(first)) == 5
    assert draw_lambda(0.0, generator(1)) == 1.0


# -- folders of images -------------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for split, n in (("train", 7), ("val", 3)):
        for label in ("ant", "bee", "cat"):
            folder = tmp_path / "insects" / split / label
            folder.mkdir(parents=True)
            for i in range(n):
                size = tuple(draw.integers(20, 40, 2))
                pixels = draw.integers(256, size=(*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
            (folder / "notes.txt").write_text("not an image")
    return tmp_path


def collect(stream_: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return list(stream_)


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def test_an_image_folder_is_found(image_folder: Path) -> None:
    folder = find_folder("insects", image_folder)
    assert folder.classes == ("ant", "bee", "cat")
    assert len(folder.train) == 21
    assert folder.test.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert folder.test.path(4) == image_folder / "insects/val/bee/1.png"
    assert is_streamed(Data("insects"))
    assert not is_streamed(Data("insects", {"size": 32}))
    assert not is_streamed(Data("cifar10"))
    assert not is_streamed(Data("digits"))


def test_a_small_folder_is_loaded(image_folder: Path) -> None:
    data = load("insects", image_folder, size=16)
    assert data.shape == (3, 16, 16)
    assert data.classes == 3
    path = image_folder / "insects/val/bee/1.png"
    with Image.open(path) as image:
        side, (width, height) = min(image.size), image.size
        box = ((width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2)
        expected = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR, box=box))
    np.testing.assert_array_equal(data.test.images[4].permute(1, 2, 0), expected)
    with pytest.raises(UserError, match=r"stream"):
        load("insects", image_folder)
    with pytest.raises(UserError, match=r"no option channels"):
        load("insects", image_folder, size=16, channels=3)
    with pytest.raises(UserError, match=r"GiB: leave out the size"):
        load("insects", image_folder, size=40_000)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on forking beside threads
def test_a_stream_depends_on_seed_and_epoch_only(image_folder: Path) -> None:
    folder, data = find_folder("insects", image_folder), Data("insects", crop=8)
    state = torch.get_rng_state()
    first = collect(stream(folder, data, 4, training=True, seed=1, epoch=2))
    assert torch.equal(torch.get_rng_state(), state)
    assert [x.shape for x, _ in first] == [(4, 3, 8, 8)] * 5  # the 21st image is left out
    assert first[0][0].dtype == torch.uint8
    assert same(first, collect(stream(folder, data, 4, training=True, seed=1, epoch=2, workers=2)))
    assert same(first[3:], collect(stream(folder, data, 4, training=True, seed=1, epoch=2, start=3)))
    assert not same(first, collect(stream(folder, data, 4, training=True, seed=1, epoch=3)))
    assert not same(first, collect(stream(folder, data, 4, training=True, seed=2, epoch=2)))
    for other in ({"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 2}):  # both the order and the crops
        assert batches(21, 4, training=True, **other) != batches(21, 4, training=True, seed=1, epoch=2)
        whole, changed = (next(stream(folder, data, 21, training=True, **k)) for k in ({"seed": 1, "epoch": 2}, other))
        assert not rows(whole[0]) & rows(changed[0])


def test_a_test_stream_has_every_image_once_in_order(image_folder: Path) -> None:
    folder = find_folder("insects", image_folder)
    batches = collect(stream(folder, Data("insects", crop=8), 4, training=False))
    assert torch.equal(torch.cat([y for _, y in batches]), folder.test.labels)
    expected = torch.stack([decode(folder.test.path(i), 8) for i in range(9)])
    assert torch.equal(torch.cat([x for x, _ in batches]), expected)
    (images, _) = next(stream(folder, Data("insects"), 2, training=False))
    assert images.shape == (2, 3, 224, 224)


def test_streamed_images_go_through_augment_unchanged_but_for_flips(image_folder: Path) -> None:
    folder, data = find_folder("insects", image_folder), Data("insects", crop=8, flip=True, inputs="unit")
    images, _ = next(stream(folder, data, 8, training=True))
    out = augment(images, data, folder.mean, folder.std, True, generator(0)) * 255
    flipped = [bool(torch.equal(o.round(), i.flip(2).float())) for o, i in zip(out, images, strict=True)]
    plain = [bool(torch.equal(o.round(), i.float())) for o, i in zip(out, images, strict=True)]
    assert all(a != b for a, b in zip(flipped, plain, strict=True))


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5))
def test_batches_of_all_processes_share_the_images(n: int, batch: int, world: int, seed: int, epoch: int) -> None:
    parts = [batches(n, batch, training=False, rank=r, world=world) for r in range(world)]
    assert sorted(i for part in parts for b in part for i in b) == list(range(n))
    if n < batch * world:
        with pytest.raises(UserError, match="smaller batch"):
            batches(n, batch, training=True, world=world)
        return
    parts = [batches(n, batch, training=True, seed=seed, epoch=epoch, rank=r, world=world) for r in range(world)]
    assert {len(part) for part in parts} == {n // (batch * world)}
    assert all(len(b) == batch for part in parts for b in part)
    seen = [i for part in parts for b in part for i in b]
    assert len(set(seen)) == len(seen)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32))
def test_random_boxes_lie_within_the_image(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = random_box(width, height, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    w, h = right - left, bottom - top
    if min(w, h) > 20:  # else rounding to pixels matters
        assert 3 / 4 - 0.06 <= w / h <= 4 / 3 + 0.06
        assert w * h >= 0.08 * width * height * 0.9 or max(width / height, height / width) > 4 / 3
    left, top, right, bottom = centre_box(width, height)
    assert right - left == pytest.approx(min(width, height) * 224 / 256)
    assert left + right == pytest.approx(width)
    assert top + bottom == pytest.approx(height)


def test_random_boxes_cover_areas_evenly() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(400, 400, rng) for _ in range(2000)])
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 160_000
    assert areas.min() >= 0.079
    assert areas.max() > 0.9
    assert abs(areas.mean() - 0.5) < 0.05  # a little below the middle of 8 to 100 %: the largest often do not fit
    ratios = np.log((boxes[:, 2] - boxes[:, 0]) / (boxes[:, 3] - boxes[:, 1]))
    assert abs(ratios.mean()) < 0.02


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_all_kinds_of_images_become_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("x.jpg" if mode == "CMYK" else "x.png")
    Image.fromarray(pictures(1, (32, 32, 3))[0][0]).convert(mode).save(path)
    assert decode(path, 8).shape == (3, 8, 8)


def test_an_image_that_is_cut_short_is_named(image_folder: Path) -> None:
    path = image_folder / "insects/val/ant/0.png"
    path.write_bytes(path.read_bytes()[:500])
    folder = find_folder("insects", image_folder)
    with pytest.raises(UserError, match=r"ant/0\.png: cannot be read as an image"):
        collect(stream(folder, Data("insects", crop=8), 4, training=False))
    path.write_text("hello")
    with pytest.raises(UserError, match=r"ant/0\.png: cannot be read as an image"):
        decode(path, 8)


def test_folders_that_are_not_there_or_not_sorted(image_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no data set 'cifra10': known are digits, cifar10.*train/CLASS/\*"):
        load("cifra10", tmp_path, size=8)
    with pytest.raises(UserError, match=r"imagenet.*ILSVRC"):
        find_folder("imagenet", tmp_path)
    flat = tmp_path / "flat"
    (flat / "train/ant").mkdir(parents=True)
    (flat / "val").mkdir()
    Image.fromarray(pictures(1, (8, 8, 3))[0][0]).save(flat / "train/ant/x.png")
    Image.fromarray(pictures(1, (8, 8, 3))[0][0]).save(flat / "val/x.png")
    with pytest.raises(UserError, match=r"flat/val holds no images in class folders"):
        find_folder("flat", tmp_path)
    (flat / "val/wasp").mkdir()
    with pytest.raises(UserError, match=r"flat/val has classes that train has not: wasp"):
        find_folder("flat", tmp_path)
    with pytest.raises(UserError, match="leave out scale and padding"):
        stream(find_folder("insects", image_folder), Data("insects", padding=4), 4, training=True)


def test_paths_with_odd_names_survive(tmp_path: Path) -> None:
    odd = tmp_path / "é ü.png"
    assert Files(np.array([str(odd).encode()]), torch.tensor([0])).path(0) == odd


# -- folders in tar files ----------------------------------------------------------------------------------------------


def tar_of(path: Path, part: str, pictures: dict[str, list[Image.Image]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for label, several in pictures.items():
            for i, picture in enumerate(several):
                content = io.BytesIO()
                picture.save(content, "png")
                member = tarfile.TarInfo(f"{part}/{label}/{i}.png")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)


def pictures_of(size: int, n: int) -> dict[str, list[Image.Image]]:
    return {
        label: [Image.new("RGB", (size, size), (30 * k, i, 0)) for i in range(n)] for k, label in enumerate("ba", 1)
    }


def test_two_tar_files_are_a_data_set_and_are_decoded_once(tmp_path: Path) -> None:
    tar_of(tmp_path / "nets" / "train8.tar", "train", pictures_of(8, 3))
    tar_of(tmp_path / "nets" / "val8.tar", "val", pictures_of(8, 2))
    data = load("nets", tmp_path, size=8)
    assert (data.classes, len(data.train), len(data.test)) == (2, 6, 4)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]  # by the names of classes: a, b
    assert data.train.images[:, 0, 0, 0].tolist() == [60, 60, 60, 30, 30, 30]
    assert data.train.images[1, 1].eq(1).all()
    for path in (tmp_path / "nets").glob("*.tar"):
        path.unlink()
    loading_module._load.cache_clear()
    assert torch.equal(load("nets", tmp_path, size=8).train.images, data.train.images)


def test_tar_files_are_read_at_another_size_and_from_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar_of(tmp_path / "nets" / "train.tar", "train", pictures_of(9, 1))
    tar_of(tmp_path / "nets" / "test.tar", "test", pictures_of(9, 1))

    def refused(*_: object) -> None:
        raise UserError("read only")

    monkeypatch.setattr("equinorm.lab.data.tars.write_copy", refused)
    assert load("nets", tmp_path, size=4).train.images.shape == (2, 3, 4, 4)
    assert not (tmp_path / "equinorm").exists()


def test_a_damaged_tar_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    for name in ("train.tar", "val.tar"):
        (tmp_path / "nets" / name).write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"train\.tar: cannot be read"):
        load("nets", tmp_path, size=4)
    tar_of(tmp_path / "nets" / "train.tar", "train", {})
    with pytest.raises(UserError, match="holds no images"):
        load("nets", tmp_path, size=5)

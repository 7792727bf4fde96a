"""The data sets known by name: which files they come in, where those usually lie, and their published md5 sums.

A data set is handed out in one or more *layouts* (CIFAR-10: a binary and a python one). Every layout lists its files
for each part, the sub-folders of the data directory in which people keep them, and the archive they come in. Sums are
those of the official pages and of torchvision's lists; a file without one is checked by the number of its images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ...errors import UserError
from .formats import Arrays, Raw, cifar_binary, cifar_python, gunzip, idx_pair, svhn_mat, untar

__all__ = ["CATALOGUE", "CatalogueEntry", "File", "Hub", "Layout", "Reader", "find", "missing"]


@dataclass(frozen=True)
class File:
    """A file and its md5 sum. With `gz_md5` it may also lie there packed, as NAME.gz."""

    name: str
    md5: str | None = None
    gz_md5: str | None = None

    def forms(self) -> Iterator[File]:
        yield self
        if self.gz_md5 is not None:
            yield File(f"{self.name}.gz", self.gz_md5)

    def read(self, path: Path, verify: bool, source: str) -> Raw:
        """The file's bytes, once their sum was compared with the published one."""
        raw = Raw(str(path), path.read_bytes())
        if verify and self.md5 is not None:
            found = hashlib.md5(raw.data, usedforsecurity=False).hexdigest()
            if found != self.md5:
                raise UserError(
                    f"{path}: its md5 sum is {found}, the published one is {self.md5}. The file is damaged or another "
                    f"one: fetch it again from {source}, or say verify=False to read it as it is"
                )
        return raw


@dataclass(frozen=True)
class Layout:
    """One form in which a data set is handed out."""

    parts: Mapping[str, tuple[File, ...]]  # the files of "train", "test", ...
    read: Callable[[Sequence[Raw]], Arrays]
    folders: tuple[str, ...]  # below the data directory; the first is the one to recommend, and that of the archive
    archive: File | None = None


@dataclass(frozen=True)
class Hub:
    """Where the Hugging Face hub keeps a copy, and what its columns are called."""

    path: str
    config: str | None = None
    image: str = "image"
    label: str = "label"


@dataclass(frozen=True)
class CatalogueEntry:
    """A data set: what it is called, how many images each part has, and where it comes from."""

    name: str
    title: str
    classes: int
    counts: Mapping[str, int]
    source: str
    layouts: tuple[Layout, ...]
    hub: Hub
    optional: tuple[str, ...] = field(default=())  # parts that are only read when asked for


Reader: TypeAlias = Callable[[bool], dict[str, Arrays]]  # whether to compare sums -> images and labels by part

Present: TypeAlias = tuple[tuple[File, Path], ...]

# -- looking for files -------------------------------------------------------------------------------------------------


def find(entry: CatalogueEntry, data_dir: Path, parts: Sequence[str]) -> Reader | None:
    """A reader of the first complete layout below `data_dir`: folders before archives, which take longer."""
    for layout in entry.layouts:
        for folder in layout.folders:
            files = {part: _present(data_dir / folder, layout.parts[part]) for part in parts}
            if all(len(files[part]) == len(layout.parts[part]) for part in parts):
                return partial(_read_files, entry, layout, files)
    for layout in entry.layouts:
        for path in _archives(entry, layout, data_dir):
            if path.is_file():
                return partial(_read_archive, entry, layout, path, parts)
    return None


def _read_files(entry: CatalogueEntry, layout: Layout, files: Mapping[str, Present], verify: bool) -> dict[str, Arrays]:
    return {
        part: layout.read([_unpacked(file.read(path, verify, entry.source)) for file, path in group])
        for part, group in files.items()
    }


def _read_archive(
    entry: CatalogueEntry, layout: Layout, path: Path, parts: Sequence[str], verify: bool
) -> dict[str, Arrays]:
    assert layout.archive is not None
    archive = layout.archive.read(path, verify, entry.source)
    names = {part: [f"{layout.folders[0]}/{file.name}" for file in layout.parts[part]] for part in parts}
    members = untar(archive, (name for group in names.values() for name in group))
    return {part: layout.read([members[name] for name in group]) for part, group in names.items()}


def _unpacked(raw: Raw) -> Raw:
    return gunzip(raw) if raw.where.endswith(".gz") else raw


def missing(entry: CatalogueEntry, data_dir: Path, parts: Sequence[str]) -> str:
    """Which files to put where, and from where."""
    lines = [f"{entry.title} is not in {data_dir.resolve()}. Put one of these there:"]
    for layout in entry.layouts:
        if layout.archive is not None:
            lines.append(f"  {layout.archive.name}")
        names = ", ".join(_name(file) for part in parts for file in layout.parts[part])
        lines.append(f"  {layout.folders[0]}/ with {names}")
        for folder in layout.folders:
            here = [path.name for part in parts for _, path in _present(data_dir / folder, layout.parts[part])]
            if here:
                lines.append(f"    ({data_dir / folder} has only {', '.join(here)})")
    lines.append(f"They come from {entry.source}.")
    lines.append("Is it elsewhere? Say so with --data-dir or in the environment variable EQUINORM_DATA.")
    return "\n".join(lines)


def _present(folder: Path, files: Sequence[File]) -> Present:
    """Those of `files` that lie in `folder`, packed or not, each with its path."""
    here = (next(((f, folder / f.name) for f in file.forms() if (folder / f.name).is_file()), None) for file in files)
    return tuple(pair for pair in here if pair is not None)


def _archives(entry: CatalogueEntry, layout: Layout, data_dir: Path) -> Iterator[Path]:
    if layout.archive is not None:
        yield data_dir / layout.archive.name
        yield data_dir / entry.name / layout.archive.name


def _name(file: File) -> str:
    return f"{file.name}[.gz]" if file.gz_md5 is not None else file.name


# -- the data sets -----------------------------------------------------------------------------------------------------


def _cifar10() -> CatalogueEntry:
    binary = (
        File("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
        File("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
        File("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
        File("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
        File("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
    )
    python = (
        File("data_batch_1", "c99cafc152244af753f735de768cd75f"),
        File("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
        File("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
        File("data_batch_4", "634d18415352ddfa80567beed471001a"),
        File("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
    )
    return CatalogueEntry(
        name="cifar10",
        title="CIFAR-10",
        classes=10,
        counts={"train": 50_000, "test": 10_000},
        source='Alex Krizhevsky\'s page "The CIFAR-10 dataset" (University of Toronto)',
        hub=Hub("uoft-cs/cifar10", image="img"),
        layouts=(
            Layout(
                parts={"train": binary, "test": (File("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),)},
                read=partial(cifar_binary, label_bytes=1),
                folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10", "."),
                archive=File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
            ),
            Layout(
                parts={"train": python, "test": (File("test_batch", "40351d587109b95175f43aff81a1287e"),)},
                read=partial(cifar_python, labels="labels"),
                folders=("cifar-10-batches-py", "cifar10/cifar-10-batches-py", "cifar10", "."),
                archive=File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
            ),
        ),
    )


def _cifar100() -> CatalogueEntry:
    return CatalogueEntry(
        name="cifar100",
        title="CIFAR-100",
        classes=100,
        counts={"train": 50_000, "test": 10_000},
        source='Alex Krizhevsky\'s page "The CIFAR-100 dataset" (University of Toronto)',
        hub=Hub("uoft-cs/cifar100", image="img", label="fine_label"),
        layouts=(
            Layout(
                parts={"train": (File("train.bin"),), "test": (File("test.bin"),)},
                read=partial(cifar_binary, label_bytes=2),
                folders=("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
                archive=File("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
            ),
            Layout(
                parts={
                    "train": (File("train", "16019d7e3df5f24257cddd939b257f8d"),),
                    "test": (File("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
                },
                read=partial(cifar_python, labels="fine_labels"),
                folders=("cifar-100-python", "cifar100/cifar-100-python", "cifar100"),
                archive=File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
            ),
        ),
    )


def _svhn() -> CatalogueEntry:
    return CatalogueEntry(
        name="svhn",
        title="SVHN",
        classes=10,
        counts={"train": 73_257, "extra": 531_131, "test": 26_032},
        source='the page "The Street View House Numbers (SVHN) Dataset" (Stanford University), format 2',
        hub=Hub("ufldl-stanford/svhn", "cropped_digits"),
        optional=("extra",),
        layouts=(
            Layout(
                parts={
                    "train": (File("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),),
                    "extra": (File("extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),),
                    "test": (File("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),),
                },
                read=svhn_mat,
                folders=("svhn", "SVHN", "."),
            ),
        ),
    )


def _mnist(
    name: str, title: str, source: str, hub: str, folders: tuple[str, ...], sums: Mapping[str, tuple[str, str]]
) -> CatalogueEntry:
    """MNIST or a set in its form; `sums` has the md5 of each file, plain and packed."""

    def part(prefix: str) -> tuple[File, File]:
        images, labels = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        return File(images, *sums[images]), File(labels, *sums[labels])

    layout = Layout({"train": part("train"), "test": part("t10k")}, idx_pair, folders)
    return CatalogueEntry(name, title, 10, {"train": 60_000, "test": 10_000}, source, (layout,), Hub(hub))


CATALOGUE: Mapping[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        _cifar10(),
        _cifar100(),
        _svhn(),
        _mnist(
            "mnist",
            "MNIST",
            'Yann LeCun\'s page "The MNIST database of handwritten digits", or a mirror of it',
            "ylecun/mnist",
            ("mnist", "MNIST/raw", "mnist/raw", "MNIST"),
            {
                "train-images-idx3-ubyte": ("6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
                "train-labels-idx1-ubyte": ("a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
                "t10k-images-idx3-ubyte": ("2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
                "t10k-labels-idx1-ubyte": ("27ae3e4e09519cfbb04c329615203637", "ec29112dd5afa0611ce80d1b7f02629c"),
            },
        ),
        _mnist(
            "fashion_mnist",
            "Fashion-MNIST",
            "the repository fashion-mnist of Zalando Research",
            "zalando-datasets/fashion_mnist",
            ("fashion-mnist", "FashionMNIST/raw", "fashion_mnist", "fashion-mnist/data/fashion", "FashionMNIST"),
            {
                "train-images-idx3-ubyte": ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                "train-labels-idx1-ubyte": ("9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
                "t10k-images-idx3-ubyte": ("8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
                "t10k-labels-idx1-ubyte": ("15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
            },
        ),
    )
}

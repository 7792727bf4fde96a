"""The data sets of the laboratory.

    data = load("digits", size=32, channels=3)          # always there, in the shape that a net for CIFAR wants
    data = load("cifar10", Path("data"))                # official files, checked; an error says what to put where
    data = prepare("cifar10", run.data, None, "cuda")   # what one run trains and is tested on, on its device

Small sets live on the device as bytes and are augmented there, a batch at a time (`augment`); sets of the size of
ImageNet are folders of image files, which `folder.stream` decodes in worker processes. Files are looked for in
`data_dir`, else in the folder that the environment variable EQUINORM_DATA names, else in ./data.

In reading order:

splits       what a data set is once it is read
loading      from a name to a data set, and to a run's part of it
catalogue    the sets known by name: their files and published sums
formats      readers of those files
digits       the set that is always there
hub          download from the Hugging Face hub
copies       plain copies of what was downloaded
folder       folders of image files, decoded in worker processes
tars         such folders in tar files, decoded once
augment      augmentation on the device, a batch at a time
"""

from __future__ import annotations

from .augment import augment, draw_lambda, mix, mixed_loss, normalise
from .loading import data_folder, is_streamed, keep, load, names, prepare
from .splits import DataSet, Split

__all__ = [
    "DataSet",
    "Split",
    "augment",
    "data_folder",
    "draw_lambda",
    "is_streamed",
    "keep",
    "load",
    "mix",
    "mixed_loss",
    "names",
    "normalise",
    "prepare",
]

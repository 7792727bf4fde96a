"""The data set that is always there: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import UserError
from .copies import read_copy
from .formats import Arrays, need

__all__ = ["TEST_IMAGES", "digits"]

TEST_IMAGES = 450


def digits(data_dir: Path) -> dict[str, Arrays]:
    """1,347 images to train on and 450 to test on: one stratified split for ever, that of `equinorm demo`.

    Where scikit-learn is not installed, a copy in the data directory does as well.
    """
    try:
        datasets = need("sklearn.datasets", "the data set digits")
        model_selection = need("sklearn.model_selection", "the data set digits")
    except UserError as error:
        copy = read_copy(data_dir, "digits", ("train", "test"))
        if copy is None:
            raise UserError(f"{error}, or bring a copy (equinorm.lab.data.keep) to {data_dir.resolve()}") from error
        return copy
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = np.rint(pixels * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)  # 17 shades of grey
    train, test, train_y, test_y = model_selection.train_test_split(
        images, labels.astype(np.int64), test_size=TEST_IMAGES, random_state=0, stratify=labels
    )
    return {"train": (train, train_y), "test": (test, test_y)}

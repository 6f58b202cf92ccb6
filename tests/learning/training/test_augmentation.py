"""Views of records: moved by whole places, mirrored, and nothing else."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dpagent.errors import ConfigurationError, ParameterError
from dpagent.learning.training.augmentation import Augmentation


def test_views_are_the_record_moved_and_mirrored() -> None:
    image = np.arange(1, 5 * 6 * 2 + 1, dtype=np.uint8).reshape(1, 5, 6, 2)
    possible = {}
    padded = np.pad(image[0], ((2, 2), (2, 2), (0, 0)))
    turned = np.pad(image[0, :, ::-1], ((2, 2), (2, 2), (0, 0)))
    for down in range(-2, 3):
        for across in range(-2, 3):
            for name, source in (("as it is", padded), ("mirrored", turned)):
                moved = source[2 - down : 7 - down, 2 - across : 8 - across]
                possible[moved.tobytes()] = (down, across, name)
    assert len(possible) == 50
    views = Augmentation(views=64, shift=2, flip=True).views_of(np.repeat(image, 40, axis=0))
    assert views.shape == (40, 64, 5, 6, 2)
    assert views.dtype == np.uint8
    seen = Counter(possible[view.tobytes()] for record in views for view in record)
    # 2,560 draws of 50 moves: one that is missing has a probability below 1e-20.
    assert len(seen) == 50


def test_series_move_along_their_length_only() -> None:
    series = np.arange(1, 7, dtype=np.float32).reshape(1, 6, 1)
    views = Augmentation(views=64, shift=1).views_of(series)
    assert {tuple(view[:, 0].tolist()) for view in views[0]} == {
        (1, 2, 3, 4, 5, 6),
        (2, 3, 4, 5, 6, 0),
        (0, 1, 2, 3, 4, 5),
    }


def test_without_moves_all_views_are_alike() -> None:
    inputs = np.random.default_rng(0).random((3, 4, 4, 1), np.float32)
    views = Augmentation(views=2).views_of(inputs)
    assert (views == inputs[:, np.newaxis]).all()
    assert Augmentation(views=2).views_of(inputs[:0]).shape == (0, 2, 4, 4, 1)


@pytest.mark.parametrize("arguments", [(0,), (65,), (2, -1), (2, 1025)])
def test_bad_numbers_are_named(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ParameterError, match=r"views is|shift is"):
        Augmentation(*arguments)


@pytest.mark.parametrize(
    ("augmentation", "shape", "text"),
    [
        (Augmentation(2), (5,), "no places to shift"),
        (Augmentation(2, shift=5), (5, 9, 1), "shift is 5; expected less than the 5 places"),
        (Augmentation(2, flip=True), (5, 2), "flip mirrors images"),
    ],
)
def test_records_that_cannot_be_moved_so_are_refused(
    augmentation: Augmentation, shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        augmentation.check_fits(shape)
    Augmentation(2, shift=4, flip=True).check_fits((5, 9, 1))

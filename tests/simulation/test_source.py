"""Pictures of one's own that turn out damaged when they are decoded do not end a demo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demos import own
from pictures import damaged_inside, encoded, folder_of, noise, write, zip_of

from dpagent.errors import DataError
from simulation.data.remarks import remarks_on
from simulation.data.source import open_source
from simulation.fitting_model import derived_model

NAMES = [f"{label}/{number}.png" for label in "ab" for number in range(10)]


@pytest.mark.parametrize("packed", [False, True])
def test_the_others_are_used_and_the_damaged_ones_named(tmp_path: Path, packed: bool) -> None:
    root = tmp_path / "photos"
    folder_of(root, *NAMES)
    write(root / "a" / "3.png", damaged_inside(encoded(noise(3))))
    if packed:
        root = zip_of(tmp_path / "x.zip", {name: (root / name).read_bytes() for name in NAMES})
    source = open_source(own(root), seed=0)
    assert len(source.train) + len(source.test) == len(NAMES) - 1
    for part in (source.train, source.test):
        part.batch(np.arange(len(part)))
    remarks = " ".join(remarks_on(source, derived_model(source.train.shape, 2)))
    assert "Left out: " in remarks
    assert "a/3.png" in remarks


def test_halves_are_found_beside_a_damaged_picture(tmp_path: Path) -> None:
    for half in ("train", "test"):
        folder_of(tmp_path / half, *NAMES)
    write(tmp_path / "train" / "a" / "3.png", damaged_inside(encoded(noise(3))))
    source = open_source(own(tmp_path), seed=0)
    assert (len(source.train), len(source.test)) == (19, 20)


def test_of_nothing_but_damaged_pictures_there_is_no_demo(tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        write(tmp_path / name, damaged_inside(encoded(noise(number))))
    with pytest.raises(DataError, match=r"No picture can be read\. The first: .*a/0\.png"):
        open_source(own(tmp_path), seed=0)

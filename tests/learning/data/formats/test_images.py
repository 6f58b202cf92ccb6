"""Pictures by class: what is decoded is what was saved, whatever the folder or the archive holds besides."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import open_images
from pictures import encoded, folder_of, noise, write, zip_of
from PIL import Image

from dpagent.errors import ConfigurationError, DataError
from dpagent.learning.data.dataset import Dataset
from dpagent.learning.data.formats.images.dataset import ImageDataset
from dpagent.learning.data.formats.images.decoding import PictureForm, read_form
from dpagent.learning.data.opening import list_declared, open_declared
from dpagent.learning.data.settings import DatasetSettings

CIFAR = Path(__file__).parents[5] / "shared" / "data" / "cifar10-jpeg.zip"


def all_of(data: Dataset) -> Any:
    return data.batch(np.arange(len(data)))[0]


def test_folders_are_classes_in_sorted_order_and_pictures_in_that_of_their_names(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "cat/b.png", "cat/a.png", "ant/deeper/c.png", "bee/x.PNG")
    data = open_images(tmp_path)
    assert data.class_names == ("ant", "bee", "cat")
    assert (data.shape, data.dtype) == ((8, 12, 3), np.uint8)
    assert data.labels.tolist() == [0, 1, 2, 2]
    order = np.array([3, 0, 2, 1])
    inputs, labels = data.batch(order)
    expected = [saved[2], saved[3], saved[1], saved[0]]
    assert np.array_equal(inputs, np.stack([expected[number] for number in order]))
    assert labels.tolist() == [2, 0, 2, 1]
    assert "sorted order" in " ".join(data.origin.warnings)


def test_a_public_list_numbers_the_classes_and_may_have_some_that_are_missing_here(tmp_path: Path) -> None:
    folder_of(tmp_path, "cat/a.png", "ant/c.png")
    data = open_images(tmp_path, classes=["cat", "dog", "ant"])
    assert data.labels.tolist() == [2, 0]
    assert data.class_counts().tolist() == [1, 0, 1]
    assert "sorted order" not in " ".join(data.origin.warnings)
    others = open_images(tmp_path, classes=["cat", "dog"])
    assert others.labels.tolist() == [0]
    (sentence,) = others.origin.left_out
    assert sentence == "1 file: in the folder 'ant', which is no class; expected one of cat, dog"


def test_folders_called_by_numbers_are_those_classes(tmp_path: Path) -> None:
    folder_of(tmp_path, "10/a.png", "2/b.png", "0/c.png")
    data = open_images(tmp_path)
    assert (data.classes, data.class_names) == (11, ())
    assert data.labels.tolist() == [0, 10, 2]


def test_an_empty_folder_is_a_class_without_records(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/a.png", "c/c.png")
    (tmp_path / "b").mkdir()
    assert open_images(tmp_path).class_counts().tolist() == [1, 0, 1]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("prefix", ["", "mine/", "mine/train/"])
def test_an_archive_is_read_like_a_folder(tmp_path: Path, method: int, prefix: str) -> None:
    pixels = {f"{name}/{number}.png": noise(number) for number, name in enumerate(["b", "a", "b", "a"])}
    files = {prefix + name: encoded(one) for name, one in pixels.items()}
    others = {f"__MACOSX/{prefix}a/._1.png": b"?", f"{prefix}a/.DS_Store": b"?", f"{prefix}a/notes.txt": b"?"}
    data = open_images(zip_of(tmp_path / "mine.zip", files | others, method))
    assert data.class_names == ("a", "b")
    assert data.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(all_of(data), np.stack([pixels[name] for name in sorted(pixels)]))
    assert data.origin.left_out == ("1 file: no picture by its name",)


def test_of_two_halves_one_is_taken(tmp_path: Path) -> None:
    saved = folder_of(tmp_path, "train/a/1.png", "train/b/2.png", "val/a/3.png")
    assert len(open_images(tmp_path, "train")) == 2
    assert np.array_equal(all_of(open_images(tmp_path, "test", ["a", "b"])), saved[2][np.newaxis])
    (tmp_path / "val" / "a" / "3.png").unlink()
    (tmp_path / "val" / "a").rmdir()
    (tmp_path / "val").rmdir()
    with pytest.raises(DataError, match="has the folder 'train', and none called test or val"):
        open_images(tmp_path, "test")
    # Classes that happen to be called so hold pictures, not folders.
    folder_of(tmp_path / "vehicles", "train/1.png", "bus/2.png")
    assert open_images(tmp_path / "vehicles").class_names == ("bus", "train")


def decoded(data: bytes, mode: Any = "rgb", size: tuple[int, int] | None = None) -> Any:
    return PictureForm(size or read_form(data)[0], mode).decode(data)


def test_every_mode_of_pixels_becomes_grey_or_rgb() -> None:
    rgb, grey = noise(1), noise(2, channels=1)
    assert np.array_equal(decoded(encoded(rgb)), rgb)
    assert np.array_equal(decoded(encoded(grey), "grey"), grey)
    assert np.array_equal(decoded(encoded(grey)), np.repeat(grey, 3, axis=2))
    # ITU-R 601: the luma that Pillow documents.
    luma = rgb @ np.array([0.299, 0.587, 0.114])
    assert np.abs(decoded(encoded(rgb), "grey")[..., 0] - luma).max() <= 1
    alpha = np.concatenate([rgb, noise(3, channels=1)], axis=2)
    assert np.array_equal(decoded(encoded(alpha)), rgb)
    sixteen = Image.fromarray(np.array([[0, 255, 256, 65_535]], np.uint16))
    buffer = io.BytesIO()
    sixteen.save(buffer, "PNG")
    assert decoded(buffer.getvalue(), "grey").ravel().tolist() == [0, 0, 1, 255]
    buffer = io.BytesIO()
    Image.fromarray(rgb).quantize(256).save(buffer, "PNG", transparency=bytes([0, 128]))
    assert decoded(buffer.getvalue()).shape == (8, 12, 3)
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2, 2), np.float32)).save(buffer, "PPM")
    with pytest.raises(DataError, match="mode F, whose range is unknown"):
        decoded(buffer.getvalue())
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "TIFF")
    with pytest.raises(DataError, match="not a picture of a known kind"):
        decoded(buffer.getvalue())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(tmp_path: Path, orientation: int) -> None:
    """Against the standard's own words: which side of the scene row 0 and column 0 of the file are."""
    upright = noise(4, 10, 6)
    undo = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.transpose(1, 0, 2), 6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1], 8: upright.transpose(1, 0, 2)[:, ::-1],
    }  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(np.ascontiguousarray(undo[orientation]), "PNG", exif=exif)
    assert np.array_equal(decoded(data), upright)
    write(tmp_path / "a" / "1.png", data)
    (tmp_path / "b").mkdir()
    assert open_images(tmp_path).shape == (6, 10, 3)


def test_a_size_covers_and_cuts_evenly() -> None:
    """Left half black, right half white: the cut keeps the middle."""
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 20:] = 255
    made = decoded(encoded(wide), size=(10, 10))
    assert made.shape == (10, 10, 3)
    assert made[:, :4].max() == 0
    assert made[:, 6:].min() == 255
    assert decoded(encoded(wide), size=(7, 21)).shape == (21, 7, 3)
    # A photograph is decoded smaller by the JPEG library; a flat one keeps its colour.
    flat = np.full((1200, 1600, 3), (200, 100, 50), np.uint8)
    assert np.abs(decoded(encoded(flat, "JPEG"), size=(32, 32)).astype(int) - (200, 100, 50)).max() <= 2


def test_sizes_that_differ_need_a_size(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    write(tmp_path / "b" / "3.png", encoded(noise(9, 5, 7)))
    with pytest.raises(
        DataError, match=r"b/3\.png: it is 5 × 7 pixels.*the first picture is 12 × 8"
    ) as caught:
        open_images(tmp_path)
    assert "`size`" in str(caught.value)
    assert len(open_images(tmp_path, size=(6, 6))) == 3


def damaged() -> dict[str, bytes]:
    png, jpeg = encoded(noise(1, 64, 64)), encoded(noise(1, 64, 64), "JPEG")
    return {
        "cut.png": png[: len(png) // 2], "cut.jpg": jpeg[: len(jpeg) // 2], "no.png": b"hello, I am text",
        "empty.gif": b"", "flipped.png": png[:60] + bytes([png[60] ^ 255]) + png[61:-12],
        "header.jpg": jpeg[:4], "svg.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    }  # fmt: skip


def test_damaged_pictures_are_left_out_and_named(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/good.png", "b/good.png", width=64, height=64)
    for name, data in damaged().items():
        write(tmp_path / "a" / name, data)
    data = open_images(tmp_path)
    assert isinstance(data, ImageDataset)
    assert list(data.names) == ["a/good.png", "b/good.png"]
    sentences = "\n".join(data.origin.left_out)
    assert len(data.origin.left_out) == len(damaged())
    assert all(f"a/{name}: " in sentences for name in damaged())


def test_damaged_members_of_an_archive_are_errors_when_read_and_left_out_of_training(tmp_path: Path) -> None:
    files = {f"a/{name}": data for name, data in damaged().items()} | {"b/x.png": encoded(noise(7, 64, 64))}
    data = open_images(zip_of(tmp_path / "x.zip", files), size=(64, 64), mode="rgb")
    assert len(data) == len(damaged())  # without the empty one, which the archive itself tells
    with pytest.raises(DataError, match=r"a/cut\.(jpg|png): .*5 more cannot be read either"):
        all_of(data)
    ((inputs, labels),) = data.readable_batches()
    assert np.array_equal(inputs, noise(7, 64, 64)[np.newaxis])
    assert labels.tolist() == [1]


def bomb(width: int, height: int) -> bytes:
    """A small PNG that says it is gigantic."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [5_000, 9_000, 12_000, 60_000])
def test_a_decompression_bomb_is_refused_before_it_goes_off(side: int) -> None:
    with pytest.raises(DataError, match=r"pixels large; expected at most|exceeds limit"):
        decoded(bomb(side, side), size=(8, 8))


def test_hostile_archives_end_in_sentences(tmp_path: Path) -> None:
    good = {"a/1.png": encoded(noise(1)), "b/2.png": encoded(noise(2))}
    path = zip_of(tmp_path / "x.zip", good | {"../../a/3.png": encoded(noise(3))})
    assert len(open_images(path)) == 2  # above the archive is nowhere: that name begins with a dot
    whole = zip_of(path, good, zipfile.ZIP_DEFLATED).read_bytes()
    for content in (b"", b"PK", b"no archive", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.zip is not a zip archive, or a damaged one"):
            open_images(path)
    # A flag says that the first member is encrypted; another's method is unknown.
    for place, value, text in ((8, 1, "is encrypted"), (10, 99, "method 99")):
        changed = bytearray(whole)
        changed[whole.index(b"PK\x01\x02") + place] = value
        path.write_bytes(changed)
        data = open_images(path)
        assert len(data) == 1
        assert text in " ".join(data.origin.left_out)
    # The listing says less than the member holds.
    changed = bytearray(whole)
    central = whole.index(b"PK\x01\x02")
    changed[central + 24 : central + 28] = struct.pack("<I", 10)
    path.write_bytes(changed)
    with pytest.raises(DataError, match=r"none of 2 pictures|do not match their checksum"):
        all_of(open_images(path, size=(8, 8)))


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "a" / "dangling.png").symlink_to("nowhere")
    (tmp_path / "a" / "self.png").symlink_to("self.png")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    (tmp_path / "a" / "linked.png").symlink_to(tmp_path / "b" / "2.png")
    (tmp_path / "loose.png").write_bytes(encoded(noise(5)))
    (tmp_path / "README").write_text("mine")
    data = open_images(tmp_path)
    assert isinstance(data, ImageDataset)
    assert list(data.names) == ["a/1.png", "a/linked.png", "b/2.png"]
    sentences = "\n".join(data.origin.left_out)
    for expected in (
        "pipe.png: it is no regular file",
        "dangling.png: it cannot be read",
        "self.png: ",
        "a picture that lies in no class folder",
        "no picture by its name",
    ):
        assert expected in sentences


def test_a_folder_without_pictures_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("x")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"holds no pictures in class folders.*no picture by its name"):
        open_images(tmp_path)
    write(tmp_path / "a" / "1.png", b"no picture")
    with pytest.raises(DataError, match=r"of 1 picture none can be read.*a/1\.png: it is not a picture"):
        open_images(tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    program = (
        "import sys; sys.modules['PIL'] = None\n"
        "from pathlib import Path\n"
        "from dpagent.learning.data.opening import open_dataset\n"
        "from dpagent.learning.data.settings import DatasetSettings\n"
        "try: open_dataset(DatasetSettings(path=Path(sys.argv[1])))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(ConfigurationError.__name__)
    assert "'images'" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(not CIFAR.is_file(), reason="CIFAR-10 is not beside the project")
def test_cifar_10_as_jpeg_is_read_from_its_archive() -> None:
    data = open_images(CIFAR, "test")
    assert (len(data), data.shape, data.classes) == (10_000, (32, 32, 3), 10)
    assert data.class_counts().tolist() == [1_000] * 10
    indices = np.array([9_999, 0, 4_321])
    inputs, _ = data.batch(indices)
    with zipfile.ZipFile(CIFAR) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("test/") and n.endswith(".jpg"))
        for number, found in zip(indices, inputs, strict=True):
            with archive.open(names[number]) as member:
                assert np.array_equal(found, np.asarray(Image.open(member)))


def test_a_board_takes_no_archive(tmp_path: Path) -> None:
    """One entry that is odd in the archive's list alone kept all others out: a version that nobody has."""
    settings = DatasetSettings.checked(
        {
            "path": zip_of(tmp_path / "x.zip", {"a/1.png": encoded(noise(1))}), "kind": "images",
            "classes": ["a", "b"], "max_records": 5,
            "images": {"size": [12, 8], "mode": "rgb", "folder": "."},
        }
    )  # fmt: skip
    assert len(open_declared(settings)) == 1
    with pytest.raises(DataError, match=r"x\.zip is no folder; expected one.*Unpack it there"):
        list_declared(settings, growing=True)

"""Sets larger than memory: what a process holds grows with labels and places, not with the records."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

# Opens, reads a lot from all over, then every record in pieces; says how much memory that took at its peak.
pytestmark = pytest.mark.heavy

READ = """
import json, sys
from pathlib import Path
import numpy as np
from dpagent.learning.data.opening import open_dataset
from dpagent.learning.data.settings import DatasetSettings

def peak_mib():
    # Of this program: getrusage would give what was in memory before it was started, if that was more.
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024

settings = DatasetSettings.checked(json.loads(sys.argv[1]) | {"path": Path(sys.argv[2])})
before = peak_mib()
data = open_dataset(settings)
opened = peak_mib()
lot = np.random.default_rng(0).permutation(len(data))[:500]
inputs, labels = data.batch(lot)
seen = sum(len(part) for part, _ in data.batches()) if json.loads(sys.argv[3]) else None
print(json.dumps({
    "records": len(data), "seen": seen, "opened": opened - before, "peak": peak_mib() - before,
    "right": bool((inputs.reshape(500, -1)[:, 0] == lot % 251).all() and (labels == lot % 2).all()),
}))
"""


def read(path: Path, settings: dict[str, object], *, all_of_it: bool = True) -> dict[str, float]:
    arguments = [json.dumps(settings), str(path), json.dumps(all_of_it)]
    result = subprocess.run(
        [sys.executable, "-c", READ, *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, float] = json.loads(result.stdout)
    assert found["right"]
    assert found["seen"] in (None, found["records"])
    return found


def stamped(path: Path, start: int, count: int, size: int) -> None:
    """Give each record, ``size`` bytes in a file with holes, its number as its first byte."""
    with path.open("r+b") as file:
        for number in range(count):
            file.seek(start + number * size)
            file.write(bytes([number % 251]))


def test_400_mib_of_idx_are_read_in_a_few(tmp_path: Path) -> None:
    count, size = 6_400, 256 * 256
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    with images.open("wb") as file:
        file.write(struct.pack(">BBBBIII", 0, 0, 8, 3, count, 256, 256))
        file.truncate(16 + count * size)
    stamped(images, 16, count, size)
    labels.write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, count) + bytes(n % 2 for n in range(count)))
    found = read(tmp_path, {"classes": ["even", "odd"]})
    assert found["records"] == count
    assert found["opened"] < 4
    # The lot itself is 31 MiB, and read in one piece.
    assert found["peak"] < 31 + 25


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_400_mib_of_npz_stored_or_packed_are_read_in_a_few(tmp_path: Path, method: int) -> None:
    count, size = 102_400, 4_096
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
        with archive.open("inputs.npy", "w", force_zip64=True) as member:
            header = {"descr": "|u1", "fortran_order": False, "shape": (count, size)}
            np.lib.format.write_array_header_1_0(member, header)
            piece = np.zeros((1_004, size), np.uint8)  # four times 251
            piece[:, 0] = np.arange(1_004) % 251
            for start in range(0, count, 1_004):
                member.write(piece[: count - start].tobytes())
        with archive.open("labels.npy", "w") as member:
            np.lib.format.write_array(member, np.arange(count) % 2)
    found = read(path, {})
    assert found["records"] == count
    assert found["opened"] < 12
    assert found["peak"] < 30


@pytest.mark.slow
def test_what_a_table_keeps_is_places_and_labels(tmp_path: Path) -> None:
    """80 MB of text, 200,000 rows: in float64 the numbers alone would take 150 MiB, as text far more."""
    path, rest = tmp_path / "x.csv", ",0.25" * 79
    with path.open("w") as file:
        file.write(",".join(["label", *(f"c{place}" for place in range(80))]) + "\n")
        for number in range(200_000):
            file.write(f"{number % 2},{number % 251}{rest}\n")
    found = read(path, {}, all_of_it=False)
    assert found["records"] == 200_000
    # Four times eight bytes a record while they are gathered, and again as arrays.
    assert found["peak"] < 30

"""``dpagent data check``: what a person and a script are told, and how it ends."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import hostile_files as hostile
import numpy as np
import pytest
import yaml
from brokers import wait_until
from children import Child
from commands import Result, command_line, dpagent, dpagent_process
from fleets import write_agent
from formats import two_records
from pictures import encoded, folder_of, noise, write, zip_of

from agent.data_settings import DataSettings
from agent.settings import load_agent_settings
from dpagent.configuration import load_settings
from dpagent.errors import StateInUseError
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.opening import declare, open_dataset, open_declared
from dpagent.learning.data.registry import FORMATS
from dpagent.learning.data.settings import DatasetSettings
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.schema.json_values import json_values
from dpagent.storage import StateDirectory


def check(*arguments: str | Path) -> Result:
    return dpagent("data", "check", *arguments)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    folder_of(root, "cat/1.png", "cat/2.png", "cat/3.png", "fox/4.png", width=8, height=8)
    write(root / "fox" / "bad.png", b"no picture")
    return root


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    rows = [f"{x:.3f},{y:.3f},{'run' if n % 40 < 20 else 'sit'},p{n // 100}" for n, (x, y) in
            enumerate(generator.normal(size=(200, 2)))]  # fmt: skip
    return write(tmp_path / "walks.csv", "\n".join(["ax,a$y,act,who", *rows, ""]).encode())


def test_a_person_is_told_what_was_read_and_what_to_mind(photos: Path) -> None:
    result = check(photos)
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"{photos}, a folder of pictures by class (recognised)" in lines
    assert "records 4" in lines
    assert "shape 8 × 8 × 3 (height × width × channels)" in lines
    assert any(line.startswith("cat ####") and line.endswith(" 3 75.0%") for line in lines)
    text = " ".join(lines)
    assert "fox/bad.png: it is not a picture" in text
    assert "list them in `--classes`" in text


def test_the_lines_for_agent_yaml_read_the_same(walks: Path, tmp_path: Path) -> None:
    options = [
        "--label", "act", "--group", "who", "--window", "10", "--stride", "5", "--mixed", "drop",
        "--offset", "ax=0.5,a$y=-1", "--scale", "2", "--classes", "sit,run,3",
    ]  # fmt: skip
    result = check(walks, *options)
    assert result.returncode == 0, result.stderr
    assert "THE WINDOWS OVERLAP" in result.stdout
    block = yaml.safe_load(result.stdout.split("for these records):")[1])
    file = tmp_path / "data.yaml"
    file.write_text(yaml.safe_dump(block["data"]))
    data = open_declared(load_settings(file, DataSettings))
    assert data.class_names == ("sit", "run", "3")
    printed = json.loads(check(walks, *options, "--json", "-").stdout)
    assert printed["records"] == len(data)
    assert printed["shape"] == list(data.shape) == [10, 2]


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_printed_is_all_that_a_board_needs(tmp_path: Path, kind: str) -> None:
    """Of every format: pasted as it stands, it opens the same records."""
    path = two_records(kind, tmp_path / "data")
    block = yaml.safe_load(check(path).stdout.split("for these records):")[1])
    file = tmp_path / "data.yaml"
    file.write_text(yaml.safe_dump(block["data"]))
    declared = load_settings(file, DataSettings)
    board, here = open_declared(declared), open_dataset(DatasetSettings(path=path))
    assert (board.labels.tolist(), board.shape, board.dtype) == (here.labels.tolist(), here.shape, here.dtype)
    assert np.array_equal(board.batch(np.arange(2))[0], here.batch(np.arange(2))[0])
    assert declared.max_records == 4


def test_a_half_of_an_archive_is_declared_by_its_folder(tmp_path: Path) -> None:
    files = {f"all/{half}/{c}/1.png": encoded(noise(ord(c))) for half in ("train", "val") for c in "ab"}
    path = zip_of(tmp_path / "x.zip", files)
    block = yaml.safe_load(check(path, "--half", "test").stdout.split("for these records):")[1])
    assert block["data"]["images"] == {"size": [12, 8], "mode": "rgb", "folder": "all/val"}
    declared = DataSettings.checked({**block["data"], "path": path})
    assert len(open_declared(declared)) == 2


def test_a_script_is_told_the_same_as_json(photos: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = check(
        photos, "--classes", "fox,owl,cat", "--model", "digits", "--mode", "grey", "--json", target
    )
    assert (result.returncode, result.stdout) == (4, ""), result.stderr
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["classes"] == [
        {"name": "fox", "records": 1}, {"name": "owl", "records": 0}, {"name": "cat", "records": 3},
    ]  # fmt: skip
    assert (found["kind"], found["fits"], found["dtype"]) == ("images", False, "uint8")
    assert "3 classes (fox, owl, cat); model 'digits' has 10" in found["misfit"]


def test_data_that_fit_a_model_are_told_so(tmp_path: Path) -> None:
    data = ArrayDataset(np.zeros((20, 8, 8, 1), np.uint8), np.arange(20, dtype=np.int64) % 10, 10)
    save_npz(tmp_path / "x.npz", data)
    result = check(tmp_path / "x.npz", "--model", "digits")
    assert result.returncode == 0
    assert "Fits the model digits." in result.stdout
    model = tmp_path / "mine.yaml"
    model.write_text("{name: mine, input_shape: [64], classes: 10, layers: [{dense: 10}]}")
    assert "set `--shape 64`" in " ".join(check(tmp_path / "x.npz", "--model", model).stdout.split())
    result = check(tmp_path / "x.npz", "--model", model, "--shape", "64")
    assert result.returncode == 0, result.stdout
    assert check(tmp_path / "x.npz", "--model", "no-such").returncode == 3


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["missing"], 4, "There is no file or directory missing"),
        (["{walks}"], 4, "no column 'label'; found: ax, a$y, act, who. Set `--label`"),
        (["{walks}", "--label", "act"], 4, "walks.csv:2: the column 'who' holds 'p0'"),
        (["{walks}", "--label", "act", "--features", "ax", "--classes", "hop,skip"], 4, "one of hop, skip"),
        (["{walks}", "--label", "act", "--group", "who", "--scale", "0"], 9, "`--scale` is 0.0"),
        (["{walks}", "--label", "act", "--group", "who", "--scale", "az=2"], 3, "'az', which is no input"),
        (["{walks}", "--stride", "5"], 2, "`--stride` is given without `--window`"),
        (["{walks}", "--window", "0"], 9, "`--window`: got 0; expected a number of at least 1"),
        (["{walks}", "--size", "8x8"], 3, "`--size` is set"),
        (["{photos}", "--kind", "csv"], 4, "holds no CSV files"),
        (["{photos}", "--kind", "npz"], 4, "photos"),
        (["{photos}", "--classes", "cat"], 2, "--classes"),
        (["{photos}", "--classes", "owl,bat"], 4, "in the folder 'fox', which is no class"),
        (["{photos}", "--max-records", "1"], 4, "expected at most 1. Raise `--max-records`"),
        (["{photos}", "--size", "wide"], 2, "expected WIDTHxHEIGHT, such as 32x32"),
        (["{walks}", "--window", "abc"], 2, "got 'abc'; expected a whole number, such as 64"),
        (["{photos}/fox"], 4, "make a folder for each class"),
        (["{photos}/fox/4.png"], 4, "is a single picture"),
        (["{photos}", "--offset", "much"], 2, "expected a number, or COLUMN=NUMBER"),
        (["{photos}", "--kind", "tar"], 2, "got 'tar'; expected one of auto, npz, idx"),
        (["{photos}", "--picture", "x.pdf"], 2, "a name that ends in .svg or .png"),
        (["{photos}", "--picture", "no/x.svg"], 8, "no/x.svg"),
        (["{photos}", "--json", "no/x.json"], 8, "no/x.json"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_a_code(
    photos: Path, walks: Path, arguments: list[str], code: int, text: str
) -> None:
    result = check(*(part.format(photos=photos, walks=walks) for part in arguments))
    assert result.returncode == code, result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


def test_columns_and_many_classes_are_shown_as_far_as_they_are_read(tmp_path: Path) -> None:
    rows = [f"{n},{n % 7 - 2.5},c{n // 2:02d}" for n in range(60)]
    file = write(tmp_path / "x.csv", "\n".join(["t,hr,label", *rows, ""]).encode())
    result = check(file)
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "t 0 59 only grows" in lines
    assert "hr -2.5 3.5" in lines
    assert "(10 more) 20 33.3%" in lines
    assert sum(line.startswith("c") and line.endswith("3.3%") for line in lines) == 20
    text = " ".join(lines)
    assert "A column that only grows is taken as input: t." in text
    assert "from the column 'label', give 30 classes, 30 of them with no more than 2 records" in text
    told = json.loads(check(file, "--json", "-").stdout)
    assert len(told["classes"]) == 30
    assert told["columns"] == [
        {"name": "t", "minimum": 0.0, "maximum": 59.0, "only_grows": True},
        {"name": "hr", "minimum": -2.5, "maximum": 3.5, "only_grows": False},
    ]


def test_pictures_take_the_size_of_a_model_and_a_misfit_says_what_to_do(photos: Path) -> None:
    result = check(photos, "--model", "cifar-cnn")
    text = " ".join(result.stdout.split())
    assert result.returncode == 4
    assert "32 × 32 × 3" in text
    assert (
        "`dpagent model show cifar-cnn --yaml > mine.yaml`, and in that file set classes and the units"
        in text
    )
    assert "size: [32, 32]" in text
    text = " ".join(check(photos, "--model", "cifar-cnn", "--size", "8").stdout.split())
    assert "8 × 8 × 3" in text
    assert "Read them with `--size 32x32` and `--mode rgb`" in text


def words_of(svg: bytes) -> str:
    root = ElementTree.fromstring(svg)
    return " ".join("".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize("kind", ["images", "series", "table"])
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_names_the_classes_and_is_the_owners_alone(
    photos: Path, walks: Path, tmp_path: Path, kind: str, suffix: str
) -> None:
    file = tmp_path / f"sheet{suffix}"
    rows = [walks, "--label", "act", "--group", "who"]
    arguments = {"images": [photos], "series": [*rows, "--window", "20"], "table": rows}[kind]
    result = check(*arguments, "--picture", file)
    assert result.returncode == 0, result.stderr
    assert f"{file} shows private records" in result.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    data = file.read_bytes()
    if suffix == ".png":
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        return
    words = words_of(data)
    assert "Private: records of this device" in words
    names = ["cat", "3 records", "fox"] if kind == "images" else ["run", "sit", "ax", "a$y"]
    for name in names:
        assert name in words, name


def test_a_picture_survives_odd_names_and_values(tmp_path: Path) -> None:
    rows = ["x$^2,label", "1,$\\frac", "inf,<b>&", "nan,$\\frac", ""]
    path = write(tmp_path / "x.csv", "\n".join(rows).encode())
    file = tmp_path / "x.svg"
    for window in ([], ["--window", "1"]):
        result = check(path, *window, "--picture", file)
        assert result.returncode == 0, result.stderr
        assert "<b>&" in words_of(file.read_bytes())


def test_without_matplotlib_or_pillow_the_extra_is_named(photos: Path, tmp_path: Path) -> None:
    hide = "import sys; sys.modules[{!r}] = None"
    result = dpagent_process(
        "data", "check", photos, "--picture", tmp_path / "x.svg", before=hide.format("matplotlib")
    )
    assert (result.returncode, "'demo'" in result.stderr) == (3, True)
    result = dpagent_process("data", "check", photos, before=hide.format("PIL"))
    assert (result.returncode, "'images'" in result.stderr) == (3, True)


def scheduling_of(process: int) -> set[tuple[int, int]]:
    """Niceness and policy of all threads, by proc_pid_stat(5)."""
    stats = [
        each.read_text().rpartition(")")[2].split() for each in Path(f"/proc/{process}/task").glob("*/stat")
    ]
    return {(int(fields[16]), int(fields[38])) for fields in stats}


def test_it_gives_way_to_a_round(tmp_path: Path) -> None:
    """How long it takes, and how much memory, is a matter of records. Before, training on one core took ten
    times as long beside it, if one was slow to decode."""
    folder_of(tmp_path / "photos", "cat/1.png", "fox/2.png", width=8, height=8)
    write(tmp_path / "photos" / "fox" / "slow.jpg", hostile.slow_jpeg())
    command = command_line("data", "check", tmp_path / "photos", "--size", "8", "--mode", "rgb")
    with Child(command, tmp_path / "check.log") as child:
        process = child.process.pid
        wait_until(lambda: (19, os.SCHED_IDLE) in scheduling_of(process), "its place behind all others")
        assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"


def test_whoever_looks_has_its_place_again(photos: Path) -> None:
    def place() -> tuple[set[tuple[int, int]], str]:
        return scheduling_of(os.getpid()), Path("/proc/self/oom_score_adj").read_text()

    before = place()
    assert check(photos).returncode == 0
    # The system has a thread on its list for a moment after it has ended.
    wait_until(lambda: place() == before, "its place")


def test_control_characters_of_a_file_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    folder_of(tmp_path, "a/1.png", "b/2.png")
    write(tmp_path / "a" / "\x1b[2Jevil.png", b"no picture")
    write(tmp_path / "c\x1b[31m" / "3.png", encoded(noise(1)))
    result = check(tmp_path)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "evil.png" in result.stdout


def test_decode_takes_in_all_that_is_new_and_says_how_many_there_are(photos: Path, tmp_path: Path) -> None:
    declared = json_values(declare(DatasetSettings(path=photos))[0].as_dict(only_given=True))
    key = Signer(new_signing_secret(), "testers").public_key
    of_size = {"dtype": "uint8", "shape": [8, 8, 3], "max_records": 20}
    file = write_agent(tmp_path, None, key, data=declared | of_size)
    result = dpagent("data", "decode", "--config", str(file))
    assert (result.returncode, result.stdout) == (0, "digits: 4 records, all that can be used.\n"), (
        result.stderr
    )
    assert "fox/bad.png" in result.stderr
    folder_of(photos, "cat/5.png", width=8, height=8)
    with StateDirectory(load_agent_settings(file).state_dir):
        result = dpagent("data", "decode", "--config", str(file))
        assert (result.returncode, result.stdout) == (StateInUseError.exit_code, "")
    assert "digits: 5 records" in dpagent("data", "decode", "--config", str(file)).stdout
    folder_of(photos, *(f"cat/{number}.png" for number in range(10, 30)), width=8, height=8)
    result = dpagent("data", "decode", "--config", str(file))
    assert result.returncode == 4
    assert "expected at most 20" in result.stderr


def test_decode_takes_in_records_of_any_format(tmp_path: Path) -> None:
    file = write_agent(tmp_path, None, Signer(new_signing_secret(), "testers").public_key)
    result = dpagent("data", "decode", "--config", str(file))
    assert result.returncode == 0
    assert result.stdout == "digits: 50 records, all that can be used.\n"

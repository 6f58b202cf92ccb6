"""``dpagent predict``: answers that numpy gives as well, for every kind of input, and what goes wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import Result, dpagent, dpagent_process
from exported_models import SENTENCE, answers, write_model
from fleets import agent_values
from pictures import encoded, folder_of, noise, write, zip_of
from PIL import Image

from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.learning.data.input_form import InputForm
from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.models.layers import Dense
from dpagent.learning.models.spec import ModelSpec
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(range(32)), "testers").public_key
SHAPE = (8, 12, 3)
NAMES = ["cat", "fox", "owl"]


def run(*arguments: str | Path) -> Result:
    return dpagent("predict", *arguments)


def predicted(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.returncode == code, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def expected(pixels: list[np.ndarray], shape: tuple[int, ...] = SHAPE) -> list[tuple[str, float]]:
    """Class and probability of each picture."""
    shares = answers(shape, 3, np.stack(pixels))
    return [(NAMES[row.argmax()], pytest.approx(row.max(), abs=2e-6)) for row in shares]


def told(document: dict[str, Any]) -> list[tuple[str, float]]:
    return [(one["class"], one["probability"]) for one in document["predictions"]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.onnx", SHAPE, 3, NAMES)


def test_pictures_are_answered_one_a_line_and_the_rest_goes_to_stderr(model: Path, tmp_path: Path) -> None:
    pixels = folder_of(tmp_path, "a.png", "b.png")
    result = run(model, tmp_path / "a.png", tmp_path / "b.png", "--top", "2")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["class", "probability", "class", "probability", "label", "input"]
    for line, name, share in zip(
        lines[1:], ("a.png", "b.png"), answers(SHAPE, 3, np.stack(pixels)), strict=True
    ):
        first, second = np.argsort(-share)[:2]
        assert line == [
            NAMES[first], f"{share[first]:.4f}", NAMES[second], f"{share[second]:.4f}", "-",
            str(tmp_path / name),
        ]  # fmt: skip
    text = " ".join(result.stderr.split())
    assert "Model linear after round 7: inputs of 8 × 12 × 3, 3 classes." in text
    assert f"Privacy: {SENTENCE}. Up to this round: ε = 1.50001." in text
    assert text.count("Privacy:") == 1
    assert "2 inputs." in text
    assert "scaled" not in text


def test_a_folder_by_class_gives_accuracy_and_confusions(model: Path, tmp_path: Path) -> None:
    names = [f"photos/{name}/{number}.png" for name in NAMES for number in range(4)]
    pixels = folder_of(tmp_path, *names)
    right = [name for name, _ in expected(pixels)]
    labels = [name for name in NAMES for _ in range(4)]
    document = predicted(model, tmp_path / "photos", "--batch", "5")
    assert told(document) == expected(pixels)
    assert [one["label"] for one in document["predictions"]] == labels
    assert [one["input"] for one in document["predictions"]] == [str(tmp_path / name) for name in names]
    summary = document["summary"]
    hits = sum(map(str.__eq__, right, labels))
    assert (summary["right"], summary["labelled"], summary["accuracy"]) == (hits, 12, hits / 12)
    pairs = {(one["label"], one["class"]): one["inputs"] for one in summary["confusions"]}
    assert pairs == {
        pair: [*zip(labels, right, strict=True)].count(pair) for pair in zip(labels, right, strict=True)
    }
    result = run(model, tmp_path / "photos", "--summary")
    assert f"Accuracy: {100 * hits / 12:.2f} %, {hits} of 12 with a label." in result.stdout
    rows = {line.split()[0]: line.split()[1:-2] for line in result.stdout.splitlines()[3:] if line}
    assert rows["fox"] == [
        str(pairs.get(("fox", name), "."))
        for name in NAMES
        if any(p[1] == name for p in pairs) or name in labels
    ]
    assert "Accuracy" in run(model, tmp_path / "photos").stderr


def test_pictures_of_any_size_and_mode_are_made_to_fit_and_it_is_said(model: Path, tmp_path: Path) -> None:
    large = noise(3, width=48, height=32)
    write(tmp_path / "large.png", encoded(large))
    grey = noise(4, channels=1)
    write(tmp_path / "grey.png", encoded(grey))
    result = run(model, tmp_path / "large.png", tmp_path / "grey.png")
    assert "1 picture was scaled and cut to the model's input of 12 × 8." in " ".join(result.stderr.split())
    document = predicted(model, tmp_path / "large.png", tmp_path / "grey.png")
    small = np.asarray(Image.fromarray(large).resize((12, 8), Image.Resampling.BILINEAR))
    assert told(document) == expected([small, np.repeat(grey, 3, axis=2)])
    assert [one["scaled_from"] for one in document["predictions"]] == [[48, 32], None]


def test_what_is_unreadable_is_named_and_the_others_are_answered(model: Path, tmp_path: Path) -> None:
    pixels = folder_of(tmp_path / "x", "1.png", "3.png")
    write(tmp_path / "x" / "2.png", b"no picture")
    write(tmp_path / "x" / "cut.png", encoded(noise(5))[:-60])
    write(tmp_path / "x" / "\x1b[31mnotes.txt", b"hello")
    result = run(model, tmp_path / "missing", tmp_path / "x")
    assert result.returncode == 4
    assert len(result.stdout.splitlines()) == 3
    text = " ".join(result.stderr.split())
    assert "2.png: it is not a picture" in text
    assert "cut.png: " in text
    assert f"There is no file or directory {tmp_path / 'missing'}" in text
    assert "1 path could not be read as inputs, as said above. 4 inputs. 2 without an answer" in text
    assert "\x1b" not in result.stderr
    document = predicted(model, tmp_path / "x", code=4)
    (first, _), (third, _) = expected(pixels)
    assert [one["class"] for one in document["predictions"]] == [first, None, third, None]
    assert [one["input"].rpartition("/")[2] for one in document["predictions"]][1::2] == ["2.png", "cut.png"]
    assert document["summary"]["unanswered"] == 2


def test_a_zip_archive_is_read_with_and_without_classes(model: Path, tmp_path: Path) -> None:
    pixels = [noise(seed) for seed in range(3)]
    one, two, three = map(encoded, pixels)
    archive = zip_of(tmp_path / "x.zip", {"fox/1.png": one, "holiday/2.png": two, "3.png": three})
    document = predicted(model, archive)
    assert told(document) == expected(pixels)
    assert [one["label"] for one in document["predictions"]] == ["fox", None, None]
    assert document["predictions"][2]["input"] == f"{archive}/3.png"
    assert "no class of the model, so taken for unlabelled: holiday" in run(model, archive).stderr


def test_of_two_halves_the_test_half_is_taken(model: Path, tmp_path: Path) -> None:
    folder_of(tmp_path / "x", "train/cat/1.png", "test/fox/2.png", "train/fox/3.png")
    assert [one["label"] for one in predicted(model, tmp_path / "x")["predictions"]] == ["fox"]
    labels = [one["label"] for one in predicted(model, tmp_path / "x", "--half", "train")["predictions"]]
    assert labels == ["cat", "fox"]


def test_arrays_and_idx_and_cifar_have_numbers_for_labels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (7, 4, 4, 1), np.uint8)
    labels = generator.integers(0, 3, 7)
    model = write_model(tmp_path / "model.onnx", (4, 4, 1), 3)
    save_npz(tmp_path / "x.npz", ArrayDataset(inputs, labels, 3))
    folder = tmp_path / "idx"
    folder.mkdir()
    (folder / "t10k-images-idx3-ubyte").write_bytes(
        struct.pack(">4B3I", 0, 0, 8, 3, 7, 4, 4) + inputs.tobytes()
    )
    (folder / "t10k-labels-idx1-ubyte").write_bytes(
        struct.pack(">4BI", 0, 0, 8, 1, 7) + labels.astype(np.uint8).tobytes()
    )
    shares = answers((4, 4, 1), 3, inputs)
    for path in (tmp_path / "x.npz", folder):
        document = predicted(model, path)
        assert [one["class"] for one in document["predictions"]] == [str(row.argmax()) for row in shares]
        assert [one["label"] for one in document["predictions"]] == list(map(str, labels))
        assert [one["record"] for one in document["predictions"]] == list(range(7))
        assert document["summary"]["accuracy"] == np.mean(shares.argmax(axis=1) == labels)
    cifar = write_model(tmp_path / "cifar.onnx", (32, 32, 3), 10)
    record = generator.integers(0, 256, 3073, np.uint8)
    record[0] = 4
    (tmp_path / "test_batch.bin").write_bytes(record.tobytes())
    (one,) = predicted(cifar, tmp_path / "test_batch.bin")["predictions"]
    image = record[1:].reshape(1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert (one["label"], one["class"]) == ("4", str(answers((32, 32, 3), 10, image).argmax()))


READINGS = np.random.default_rng(1).normal(size=(20, 2)).round(3)


def table(path: Path, *, labels: bool, group: bool = False, extra: str = "") -> Path:
    lines = [",".join(["ax", "ay", *["act"] * labels, *["who"] * group])]
    for number, (x, y) in enumerate(READINGS):
        lines.append(",".join([str(x), str(y), *[NAMES[number % 3]] * labels, *[f"p{number // 10}"] * group]))
    return write(path, ("\n".join([*lines, *([extra] if extra else [])]) + "\n").encode())


def test_rows_of_a_table_are_answered_with_and_without_labels(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (2,), 3, NAMES)
    with_labels = predicted(model, table(tmp_path / "a.csv", labels=True), "--label", "act", "--scale", "2")
    without = predicted(model, table(tmp_path / "b.csv", labels=False), "--scale", "2")
    shares = answers((2,), 3, (READINGS / 2).astype(np.float32))
    wanted = [(NAMES[row.argmax()], pytest.approx(row.max(), abs=2e-6)) for row in shares]
    assert told(with_labels) == told(without) == wanted
    assert [one["label"] for one in with_labels["predictions"]] == [NAMES[n % 3] for n in range(20)]
    assert {one["label"] for one in without["predictions"]} == {None}


def test_windows_without_labels_are_those_of_training(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES)
    options = [
        "--window",
        "4",
        "--stride",
        "3",
        "--group",
        "who",
        "--offset",
        "ax=0.5",
        "--features",
        "ay,ax",
    ]
    with_labels = predicted(
        model, table(tmp_path / "a.csv", labels=True, group=True), "--label", "act", *options
    )
    without = predicted(model, table(tmp_path / "b.csv", labels=False, group=True), *options)
    assert told(without) == told(with_labels)
    starts = [0, 3, 6, 12, 15]  # four rows each, of ten rows a person
    values = (READINGS - [0.5, 0])[:, ::-1]
    windows = np.stack([values[start : start + 4] for start in starts]).astype(np.float32)
    assert told(without) == [
        (NAMES[row.argmax()], pytest.approx(row.max(), abs=2e-6)) for row in answers((4, 2), 3, windows)
    ]


WALKS = {"features": ["ay", "ax"], "offset": {"ay": 9.81}, "scale": 10, "window": 4, "stride": 2}


def readings(path: Path) -> Path:
    """A table as a user has it: columns in another order, one more than the model takes, none scaled."""
    lines = ["ax,who,ay", *(f"{10 * x},p,{10 * y + 9.81}" for x, y in READINGS)]
    return write(path, ("\n".join(lines) + "\n").encode())


def test_a_model_that_says_what_its_inputs_are_needs_no_options(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    raw = readings(tmp_path / "raw.csv")
    document = predicted(model, raw)
    assert document["model"]["inputs"] == {"csv": WALKS}
    windows = np.stack([READINGS[start : start + 4, ::-1] for start in range(0, 17, 2)])
    wanted = [
        (NAMES[row.argmax()], pytest.approx(row.max(), abs=1e-5))
        for row in answers((4, 2), 3, windows.astype(np.float32))
    ]
    assert told(document) == wanted
    same = ["--features", "ay,ax", "--offset", "ax=0,ay=9.81", "--scale", "ax=10,ay=10", "--window", "4"]
    assert told(predicted(model, raw, *same)) == wanted
    # Where windows begin is the user's: each is one that the model takes.
    assert told(predicted(model, raw, "--window", "4", "--stride", "4")) == wanted[::2]
    assert told(predicted(model, raw, "--window", "4", "--stride", "4", "--group", "who")) == wanted[::2]
    assert "does not say what columns" not in run(model, raw).stderr
    # Arrays are taken as they are: they have no columns to scale.
    save_npz(tmp_path / "x.npz", ArrayDataset(windows.astype(np.float32), np.zeros(9, np.int64), 3))
    assert told(predicted(model, tmp_path / "x.npz")) == wanted


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        (["--scale", "1"], "`--scale 1`", "`--scale 10`"),
        (["--offset", "0"], "`--offset 0`", "`--offset ay=9.81`"),
        (["--offset", "ay=9.81,az=1"], "`--offset ay=9.81,az=1`", "`--offset ay=9.81`"),
        (["--features", "ax,ay"], "`--features ax,ay`", "`--features ay,ax`"),
        (["--window", "8"], "`--window 8`", "`--window 4`"),
    ],
)
def test_an_option_that_contradicts_the_model_is_refused(
    tmp_path: Path, options: list[str], given: str, expected: str
) -> None:
    model = write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    result = run(model, readings(tmp_path / "raw.csv"), *options)
    assert (result.returncode, result.stdout) == (3, ""), result.stderr
    text = " ".join(result.stderr.split())
    assert given in text
    assert expected in text
    assert f"Leave `{options[0]}` out." in text


def test_a_column_cannot_be_input_and_something_else(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (4, 2), 3, NAMES, {"csv": WALKS})
    result = run(model, readings(tmp_path / "raw.csv"), "--group", "ax")
    assert result.returncode == 3, result.stderr
    assert "`--group`" in result.stderr
    assert "Traceback" not in result.stderr


def test_pictures_that_became_rows_need_no_options_either(tmp_path: Path) -> None:
    form = {"images": {"size": [8, 4], "mode": "grey"}}
    model = write_model(tmp_path / "model.onnx", (32,), 3, NAMES, form)
    pixels = noise(1, width=8, height=4, channels=1)
    write(tmp_path / "a.png", encoded(pixels))
    (one,) = told(predicted(model, tmp_path / "a.png"))
    row = answers((32,), 3, pixels[np.newaxis])[0]
    assert one == (NAMES[row.argmax()], pytest.approx(row.max(), abs=2e-6))
    assert run(model, tmp_path / "a.png", "--mode", "rgb").returncode == 3


def test_forgotten_scaling_costs_what_it_did_before_models_said_it(tmp_path: Path) -> None:
    """Three ways to move, told apart by a linear model of what the sensor reads beside gravity."""
    generator = np.random.default_rng(4)
    labels = np.arange(300) % 3
    centres = np.array([[1.5, 0.0], [-1.0, 1.5], [-1.0, -1.5]])
    scaled = centres[labels] + generator.normal(0, 0.5, (300, 2))
    spec = ModelSpec("walks", (2,), 3, (Dense(3),))
    weights = np.concatenate([centres.T.ravel(), -(centres**2).sum(1) / 2]).astype(np.float32)
    form = InputForm.checked({"csv": {"features": ["ax", "ay"], "offset": {"ay": 9.81}, "scale": 2}})
    about = {"dpagent.classes": json.dumps(NAMES)}
    for name, more in (("told.onnx", {"dpagent.inputs": form.text()}), ("untold.onnx", {})):
        (tmp_path / name).write_bytes(export_onnx(spec, weights, metadata=about | more))
    lines = [f"{2 * x},{2 * y + 9.81},{NAMES[label]}" for (x, y), label in zip(scaled, labels, strict=True)]
    raw = write(tmp_path / "raw.csv", "\n".join(["ax,ay,label", *lines, ""]).encode())
    accuracy = predicted(tmp_path / "told.onnx", raw)["summary"]["accuracy"]
    assert accuracy > 0.95
    given = ["--offset", "ay=9.81", "--scale", "2"]
    assert predicted(tmp_path / "untold.onnx", raw, *given)["summary"]["accuracy"] == accuracy
    assert predicted(tmp_path / "untold.onnx", raw)["summary"]["accuracy"] < 0.4
    result = run(tmp_path / "untold.onnx", raw)
    assert "does not say what columns it takes" in " ".join(result.stderr.split())
    assert result.stderr.count("does not say") == 1


def test_the_latest_model_of_a_board_is_found_by_its_configuration(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(yaml.safe_dump(agent_values(None, KEY, model={"file": "board/model.onnx"})))
    rows = table(tmp_path / "rows.csv", labels=False)
    result = run("--latest", rows, "--config", config)
    assert result.returncode == 4
    assert "has no model yet" in result.stderr
    (tmp_path / "board").mkdir()
    write_model(tmp_path / "board" / "model.onnx", (2,), 3, NAMES)
    assert len(predicted("--latest", rows, rows, "--config", config)["predictions"]) == 40
    assert run("--latest", "--config", config).returncode == 2
    assert run("--latest", rows, "--config", tmp_path / "none.yaml").returncode == 3


def test_a_missing_value_and_a_broken_row_cost_their_own_answers_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (2,), 3, NAMES)
    gap = table(tmp_path / "gap.csv", labels=False, extra="nan,1")
    broken = table(tmp_path / "broken.csv", labels=False, extra="much,1")
    document = predicted(model, gap, broken, code=4)
    problems = [one["problem"] for one in document["predictions"]]
    assert len(problems) == 42
    assert "NaN" in problems[20]
    assert "broken.csv:22: the column 'ax' holds 'much'" in problems[41]
    assert "`--features`" in problems[41]
    assert [problem for problem in problems if problem] == [problems[20], problems[41]]


def test_a_model_of_a_part_of_a_job_says_when_its_epsilon_is_a_bound(tmp_path: Path) -> None:
    always, there = "The noise is fixed before.", "The job ends after these rounds whatever came of them."
    file = write_model(
        tmp_path / "round-0007.onnx", SHAPE, 3, NAMES,
        **{
            "dpagent.privacy_statement": json.dumps({"epsilon": 2.0, "assumptions": [always]}),
            "dpagent.spent": json.dumps([{"epsilon": 1.5, "assumptions": [always, there]}]),
        },
    )  # fmt: skip
    folder_of(tmp_path, "a.png")
    said = " ".join(run(file, tmp_path / "a.png").stderr.split())
    assert f"Privacy: {SENTENCE}. Up to this round: ε = 1.50001. {there}" in said
    assert always not in said


def test_json_goes_to_a_file_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    folder_of(tmp_path, "a.png")
    target = tmp_path / "out.json"
    result = run(model, tmp_path / "a.png", "--json", target, "--top", "9")
    assert (result.returncode, result.stdout) == (0, "")
    document = json.loads(target.read_text())
    assert document["model"]["privacy"] == SENTENCE
    assert document["model"]["spent"] == [{"epsilon": 1.5}]
    assert document["model"]["classes"] == NAMES
    (one,) = document["predictions"]
    assert sum(each["probability"] for each in one["top"]) == pytest.approx(1, abs=1e-5)
    assert one["top"][0]["class"] == one["class"]
    before = sorted(tmp_path.iterdir())
    assert run(model, tmp_path / "a.png", "--size", "3x3", "--json", target).returncode == 3
    assert json.loads(target.read_text()) == document
    assert sorted(tmp_path.iterdir()) == before


def test_classes_may_be_named_for_a_model_that_does_not(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", SHAPE, 3)
    pixels = folder_of(tmp_path / "x", "fox/1.png", "cat/2.png")
    assert "does not name its classes" in run(model, tmp_path / "x").stderr
    document = predicted(model, tmp_path / "x", "--classes", ",".join(NAMES))
    assert [one["label"] for one in document["predictions"]] == ["cat", "fox"]
    assert sorted(told(document)) == sorted(expected(pixels))


def test_a_file_that_is_no_model_of_ours_is_refused(tmp_path: Path) -> None:
    """More of them: tests/learning/inference/test_prediction.py."""
    folder_of(tmp_path, "a.png")
    bad = write_model(tmp_path / "bad.onnx", SHAPE, 3)
    bad.write_bytes(bad.read_bytes().replace(b"dpagent", b"\x1b[2Jabc", 1))
    result = run(bad, tmp_path / "a.png")
    assert (result.returncode, result.stdout) == (4, ""), result.stderr
    assert "bad.onnx is an ONNX file of" in result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["missing.onnx", "{png}"], 4, "There is no model file missing.onnx"),
        (["{tmp}", "{png}"], 4, "is a directory; expected a model file"),
        (["{model}"], 2, "Missing argument 'INPUT'"),
        (["--latest"], 2, "Missing argument '[MODEL] INPUT...'"),
        (["{model}", "{npz}"], 4, "a record has 4 values; model 'linear' takes 8 × 12 × 3"),
        (["{model}", "{png}", "--size", "3x3"], 3, "have 27 values; model 'linear' takes 288"),
        (["{model}", "{png}", "--classes", "a,b"], 3, "There are 2 classes (a, b); model 'linear' has 3"),
        (["{model}", "{png}", "--classes", "owl,fox,cat"], 3, "itself names cat, fox, owl"),
        (["{flat}", "{png}"], 3, "which is no picture"),
        (["{model}", "{empty}"], 4, "is an empty folder"),
        (["{model}", "{png}", "--json", "no/x.json"], 8, "no/x.json"),
        (["{model}", "{png}", "--json", "/dev/null"], 8, "regular file"),
        (["{model}", "{png}", "--json", "{loop}/x.json"], 8, "x.json"),
        (["{model}", "{png}", "--top", "0"], 9, "`--top`: got '0'; expected a number of at least 1"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_a_code(
    model: Path, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    folder_of(tmp_path, "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    save_npz(tmp_path / "x.npz", ArrayDataset(np.zeros((3, 4), np.uint8), np.arange(3), 3))
    places = {
        "tmp": tmp_path, "model": model, "png": tmp_path / "a.png", "npz": tmp_path / "x.npz",
        "empty": tmp_path / "empty", "loop": tmp_path / "loop",
        "flat": write_model(tmp_path / "flat.onnx", (4,), 3),
    }  # fmt: skip
    result = run(*(part.format(**places) for part in arguments))
    assert result.returncode == code, result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.heavy
def test_memory_does_not_grow_with_the_inputs(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (256, 256, 1), 2)
    program = (
        "import atexit; atexit.register(lambda: print(*[line for line in open('/proc/self/status')"
        " if line.startswith('VmHWM')]))"
    )
    peaks = []
    for count in (600, 3000):
        inputs, labels = np.zeros((count, 256, 256, 1), np.uint8), np.zeros(count, np.int64)
        np.savez(tmp_path / "x.npz", inputs=inputs, labels=labels)  # 38 and 190 MiB: both are read by number
        result = dpagent_process(
            "predict", model, tmp_path / "x.npz", "--summary", "--batch", "16", before=program
        )
        assert result.returncode == 0, result.stderr
        assert f"of {count:,} with a label" in result.stdout
        peaks.append(int(result.stdout.rpartition("VmHWM:")[2].split()[0]))
    assert peaks[1] - peaks[0] < 20 << 10


def test_a_reader_that_leaves_ends_it_quietly(model: Path, tmp_path: Path) -> None:
    folder_of(tmp_path / "x", *(f"{number}.png" for number in range(40)))
    command = f"{sys.executable} -m cli.main predict {model} {tmp_path / 'x'} --batch 1 | head -2"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert len(result.stdout.splitlines()) == 2
    assert "Traceback" not in result.stderr
    assert "cannot be written" not in result.stderr


def test_records_of_another_shape_are_a_path_and_no_input(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.onnx", (4,), 2)
    save_npz(tmp_path / "wide.npz", ArrayDataset(np.zeros((3, 5), np.float32), np.array([0, 1, 0]), 2))
    (tmp_path / "rows.csv").write_text("a,b,c\n1,2,3\n")
    (tmp_path / "marks.csv").write_text("a;b;c;d\n1;2;3;4\n")
    paths = [tmp_path / name for name in ("wide.npz", "rows.csv", "marks.csv")]
    result = run(model, *paths)
    assert (result.returncode, result.stdout) == (4, "")
    for expected in (
        f"{paths[0]}: a record has 5 values; model 'linear' takes 4 values.",
        f"{paths[1]}: a record has 3 values; model 'linear' takes 4 values.",
        f"{paths[2]}: the cells of the first row, 'a;b;c;d', seem to be separated by ';'",
        "3 paths could not be read as inputs",
    ):
        assert expected in result.stderr
    assert "1 input" not in result.stderr
    images = write_model(tmp_path / "images.onnx", SHAPE, 3)
    assert "takes 8 × 12 × 3 values" in run(images, paths[0]).stderr

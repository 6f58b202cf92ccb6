"""``dpagent bench``: figures of real processes, whatever becomes of them, and none left behind."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import PATIENCE_S
from commands import Result, command_line, dpagent, dpagent_process

from cli.bench import measuring
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.onnx_graph.signature import known_digests

pytestmark = pytest.mark.heavy

TINY = "{name: tiny, input_shape: [4], classes: 2, layers: [{dense: 2}]}"
ENVIRONMENT = os.environ | {"NO_COLOR": "1", "COLUMNS": "100"}


def bench(*arguments: str | Path) -> Result:
    """In this process; the measurements are in children of it anyway."""
    return dpagent("bench", *arguments, NO_COLOR="1", COLUMNS="100")


@pytest.fixture(scope="module", autouse=True)
def _brief() -> Iterator[None]:
    """Each engine computes for a tenth of a second, and at least three lots: no test is about its speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_SECONDS", 0.1)
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both engines on a built-in model and on one of one's own."""
    tiny = tmp_path_factory.mktemp("bench") / "tiny.yaml"
    tiny.write_text(TINY)
    result = bench("digits", tiny, "--lot", "40", "--microbatch", "8", "--processes", "2", "--json", "-")
    assert result.returncode == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values | {"stderr": result.stderr}


def test_every_engine_has_its_figures(found: dict[str, Any]) -> None:
    assert (found["lot"], found["microbatch"], found["processes"]) == (40, 8, 2)
    assert [model["name"] for model in found["models"]] == ["digits", "tiny"]
    for model in found["models"]:
        assert [figures["engine"] for figures in model["engines"]] == ["numpy", "onnx"]
        for figures in model["engines"]:
            assert figures["why_not"] == ""
            assert figures["examples_per_s"] > 0
            assert figures["lots"] >= 3
            assert 5 < figures["peak_mib"] < 2_000
        speeds = model["auto_examples_per_s"]
        assert model["auto"] == ("onnx" if speeds["onnx"] > 1.5 * speeds["numpy"] else "numpy")
    digits = found["models"][0]
    assert digits["parameters"] == 9_930
    assert (built_in("digits").digest().hex(), digits["graph_digest"]) in known_digests()


def test_an_engine_does_not_weigh_what_the_other_needs(found: dict[str, Any]) -> None:
    """onnxruntime alone maps more than 10 MiB: the numpy engine's process must be without it."""
    for model in found["models"]:
        numpy, onnx = (figures["peak_mib"] for figures in model["engines"])
        assert numpy + 10 < onnx


def test_machine_and_progress_are_told(found: dict[str, Any]) -> None:
    machine = found["machine"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["processor"]
    for package in ("numpy", "onnxruntime", "onnx", "python", "dpagent"):
        assert machine[package], package
    assert "digits: numpy …" in found["stderr"]


def test_a_person_gets_a_table(tiny: Path) -> None:
    result = bench(tiny, "--engine", "numpy", "--lot", "8")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["model", "engine", "parameters", "examples/s", "peak", "MiB"]
    assert lines[1][:3] == ["tiny", "numpy", "10"]
    assert math.isfinite(float(lines[1][3].replace(",", "")))
    assert "in lots of 8" in result.stdout
    assert "\x1b" not in result.stdout
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_only_the_layers_behind_a_front_end_are_timed() -> None:
    result = bench("scattering", "--engine", "numpy", "--lot", "8")
    assert result.returncode == 0, result.stderr
    assert "only the layers after the front end" in " ".join(result.stdout.split())


def test_without_onnx_it_is_said_where_graphs_come_from(tiny: Path) -> None:
    hide = "import sys; sys.modules['onnx'] = None"
    result = dpagent_process("bench", tiny, "--lot", "8", "--json", "-", before=hide)
    assert result.returncode == 0, result.stderr
    (model,) = json.loads(result.stdout)["models"]
    numpy, onnx = model["engines"]
    assert (model["auto"], onnx["examples_per_s"]) == ("numpy", None)
    assert numpy["examples_per_s"] > 0
    assert "come from the coordinator" in onnx["why_not"]
    result = dpagent_process("bench", tiny, "--engine", "onnx", before=hide)
    assert result.returncode == 3
    assert "come from the coordinator" in result.stderr


def test_an_engine_that_dies_is_a_result(tiny: Path, tmp_path: Path) -> None:
    """As an onnxruntime does that a processor cannot run: it is there, and kills whoever imports it."""
    library = tmp_path / "library" / "onnxruntime"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    result = subprocess.run(
        command_line("bench", tiny, "--lot", "8"), capture_output=True, text=True, timeout=120, check=False,
        env=ENVIRONMENT | {"PYTHONPATH": f"{library.parent}:{Path(__file__).parents[2]}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "tiny, onnx: its process was ended by SIGILL" in text
    assert "this processor lacks" in text
    assert "numpy *" in text, "which the agent takes"


def children_of(pid: int) -> set[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return set()
    return {int(child) for child in text.split()}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="no /proc/…/children"
)
@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_no_child_is_left(number: signal.Signals) -> None:
    process = subprocess.Popen(
        command_line("bench", "cifar-cnn", "--lot", "4096", "--engine", "numpy"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        children: set[int] = set()
        until = time.monotonic() + 30
        while not children and time.monotonic() < until:
            children = children_of(process.pid)
            time.sleep(0.05)
        assert children
        time.sleep(0.5)
        assert any(map(is_alive, children))
        process.send_signal(number)
        _, complaint = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
    assert "Traceback" not in complaint
    assert process.returncode == (130 if number == signal.SIGINT else -number)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["no-such"], 3, "expected one of cifar-cnn, digits"),
        (["--engine", "torch"], 2, "'torch' is not one of"),
        (["{tiny}", "--lot", "0"], 9, "at least 1"),
        (["{tiny}", "--microbatch", "65"], 9, "at most 64"),
        (["{tiny}", "--engine", "numpy", "--json", "no/x.json"], 8, "no/x.json"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_a_code(
    tiny: Path, arguments: list[str], code: int, text: str
) -> None:
    result = bench(*(part.format(tiny=tiny) for part in arguments))
    assert result.returncode == code, result.stderr
    assert text in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr

"""``dpagent personalise``: a board's own model beside the fleet's, private, and asked like any other."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from brokers import wait_until
from children import Child
from commands import Result, command_line, dpagent, dpagent_process
from exported_models import write_model
from fleets import Program, digits, write_agent

from dpagent.learning.inference.export.model import export_onnx
from dpagent.learning.inference.model_bytes import metadata_of
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.models.description import ARCHITECTURE_KEY
from dpagent.learning.training.local_sgd import LocalSgd
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.protocol.signing import Signer

KEY = Signer(bytes(range(32)), "testers").public_key
SPEC = built_in("digits")
ABOUT = {ARCHITECTURE_KEY: json.dumps(SPEC.describe())}


def board(directory: Path, **changes: Any) -> Path:
    """A board with 50 digits, and a model that knows none of them."""
    file = write_agent(directory, None, KEY, **changes)
    model = export_onnx(SPEC, SPEC.initial_weights(0), metadata=ABOUT)
    (directory / "state").mkdir(exist_ok=True)
    (directory / "state" / "model.onnx").write_bytes(model)
    return file


def personalise(config: Path, *options: str) -> Result:
    return dpagent_process("personalise", "--config", config, *options)  # It gives way, for good.


def test_a_board_has_a_model_of_its_own_that_nobody_else_reads(tmp_path: Path) -> None:
    config = board(tmp_path, serve={"socket": "ask.sock", "model": "personal"})
    ledger = {file: file.read_bytes() for file in (tmp_path / "state").glob("*.db*")}
    result = personalise(config, "--layers", "all", "--epochs", "60", "--learning-rate", "0.2")
    assert result.returncode == 0, result.stderr
    assert "Accuracy on 10 records held out: " in result.stdout
    assert "after training on 40 records." in " ".join(result.stdout.split())
    file = tmp_path / "state" / "model.personal.onnx"
    assert f"{file} holds private data of this board, and must not leave it." in result.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert metadata_of(file.read_bytes())["dpagent.personal"] == "true"
    # No budget is spent, and nothing else is left behind.
    assert {file: file.read_bytes() for file in (tmp_path / "state").glob("*.db*")} == ledger
    assert not list((tmp_path / "state").glob("personalise-*"))
    asked = dpagent("predict", file, tmp_path / "data.npz", "--summary")
    assert asked.returncode == 0, asked.stderr
    assert "it must not leave the board" in " ".join(asked.stderr.split())
    with Program("serve", "--config", config, log=tmp_path / "serve.log") as server:
        wait_until(lambda: "model.personal.onnx" in server.said(), "the personal model")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "ask.sock"))
            client.sendall(b'{"about": true}\n')
            assert "must not leave" in json.loads(client.makefile().readline())["privacy"]
        assert server.stop() == 0


def test_what_came_of_it_is_for_scripts_too(tmp_path: Path) -> None:
    config = board(tmp_path)
    found = json.loads(personalise(config, "--layers", "all", "--epochs", "60", "--json", "-").stdout)
    assert found["file"] == str(tmp_path / "state" / "model.personal.onnx")
    assert (found["trained"], found["held_out"], found["left_out"]) == (40, 10, 0)
    assert found["after"] >= found["before"]


def test_a_worse_model_is_not_kept(tmp_path: Path) -> None:
    config = board(tmp_path)
    # It knows every digit of the board, and no better than that: a model that is sure of them all, no step
    # moves. 25 steps at this rate make it forget: of 40 runs, none knew more than 68 % of them then.
    engine, weights, known = NumpyEngine(SPEC), SPEC.initial_weights(0), digits(0, 50)
    rows = known.batch(np.arange(len(known)))
    while engine.accuracy(weights, *rows) < 1.0:
        weights = LocalSgd(10, 32, 0.1, 1e6).train(engine, weights, known)
    (tmp_path / "state" / "model.onnx").write_bytes(export_onnx(SPEC, weights, metadata=ABOUT))
    result = personalise(config, "--layers", "all", "--epochs", "10", "--learning-rate", "10")
    assert result.returncode == 0, result.stderr
    assert "100.0 % before" in result.stdout
    assert "It is less accurate, and not kept." in result.stdout
    assert not (tmp_path / "state" / "model.personal.onnx").exists()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--epochs", "0"], 9, "`--epochs`"),
        (["--held-out", "1"], 9, "`--held-out`"),
        (["--layers", "some"], 2, "--layers"),
        (["--learning-rate", "nan"], 9, "learning"),
    ],
)
def test_what_is_asked_wrongly_is_refused(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    result = personalise(board(tmp_path), *options)
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "state" / "model.personal.onnx").exists()


def test_a_board_that_cannot_have_one_is_told(tmp_path: Path) -> None:
    config = board(tmp_path)
    (tmp_path / "state" / "model.onnx").unlink()
    result = personalise(config)
    assert result.returncode == 4
    assert "There is no model yet" in result.stderr
    csv = {"features": ["ax", "ay"], "scale": 10}
    write_model(tmp_path / "state" / "model.onnx", (2,), 3, inputs={"csv": csv})
    values = yaml.safe_load(config.read_text())
    (tmp_path / "rows.csv").write_text("ax,ay,label\n1,2,a\n")
    values["data"] = {
        "name": "x", "kind": "csv", "path": "rows.csv", "classes": ["a", "b", "c"], "max_records": 9,
        "csv": csv | {"scale": 1},
    }  # fmt: skip
    config.write_text(yaml.safe_dump(values))
    result = personalise(config)
    assert result.returncode == 3
    assert "data.csv.scale is 1.0 on this board, and its fleet's model was trained with 10.0" in result.stderr
    values["governor"] = {"least_free_disk_mib": 1}
    config.write_text(yaml.safe_dump(values))
    result = personalise(config)
    assert result.returncode == 3
    assert "`dpagent personalise` may read records" in " ".join(result.stderr.split())


def scheduling_of(process: int) -> tuple[int, int]:
    """Niceness and policy, by proc_pid_stat(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[16]), int(fields[38])


def test_it_gives_way_to_a_round(tmp_path: Path) -> None:
    """How long it takes, and how much memory, is a matter of records, and the fleet's operator chooses when a
    model comes, after which an owner's command may run it. Before, it went before training, which was late
    for it; and where memory ran out, the system ended the larger of the two."""
    config = board(tmp_path)
    options = ("--config", config, "--epochs", "1000", "--layers", "all")
    with Child(command_line("personalise", *options), tmp_path / "personalise.log") as child:
        pid = child.process.pid
        wait_until(lambda: scheduling_of(pid) == (19, os.SCHED_IDLE), "its place behind all others")
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_what_one_left_that_was_killed_is_gone_with_the_next(tmp_path: Path) -> None:
    """Features of records. After so many jobs, they would fill the disk."""
    config = board(tmp_path)
    left = tmp_path / "state" / "personalise-killed"
    left.mkdir()
    (left / "features.f32").write_bytes(bytes(1 << 20))
    assert personalise(config, "--epochs", "1").returncode == 0
    assert not list((tmp_path / "state").glob("personalise-*"))

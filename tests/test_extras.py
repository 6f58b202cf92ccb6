"""A missing optional package names its extra, and how to install it from where the program came."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import dpagent_process
from fleets import write_agent, write_fleet

from dpagent import extras
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.protocol.signing import Signer

WITHOUT_RUNTIME = "import sys; sys.modules['onnxruntime'] = None"


def test_a_coordinator_without_its_extra_says_how_to_install_it(tmp_path: Path) -> None:
    file = write_fleet(tmp_path, None)
    program = "import sys; sys.modules['onnx'] = None; from cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program, "coordinator", "run", "--config", str(file)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == ExitCode.CONFIGURATION
    assert "'onnx'" in ended.stderr
    assert extras.install_command("coordinator") in ended.stderr


@pytest.mark.parametrize("command", ["predict", "personalise", "serve"])
def test_what_needs_onnx_runtime_says_so_where_there_is_none(tmp_path: Path, command: str) -> None:
    board = write_agent(tmp_path, None, Signer(bytes(range(32)), "testers").public_key)
    asked = {"predict": ("--latest", board.with_name("data.npz"))}.get(command, ())
    ended = dpagent_process(command, *asked, "--config", board, before=WITHOUT_RUNTIME)
    assert ended.returncode == ExitCode.CONFIGURATION
    assert f"`dpagent {command}` needs the Python package 'onnxruntime'" in ended.stderr
    assert f"{sys.executable} -m pip install onnxruntime" in ended.stderr


def test_on_32_bits_nobody_is_sent_to_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.sys, "maxsize", 2**31 - 1)
    assert "64 bits" in extras.runtime_remedy()
    assert "pip" not in extras.runtime_remedy()


@pytest.mark.parametrize(
    ("engine", "code", "words"),
    [
        ("numpy", ExitCode.OK, "numpy trains; models with a frozen network, `dpagent predict`"),
        ("auto", ExitCode.OK, "numpy trains; models with a frozen network, `dpagent predict`"),
        ("onnx", ExitCode.CONFIGURATION, "Set engine: numpy. Install it:"),
    ],
)
def test_a_board_without_onnx_runtime_hears_from_the_doctor_what_does_not_run(
    tmp_path: Path, engine: str, code: ExitCode, words: str
) -> None:
    board = write_agent(tmp_path, None, Signer(bytes(range(32)), "testers").public_key, engine=engine)
    ended = dpagent_process("doctor", "--no-broker", "--config", board, before=WITHOUT_RUNTIME)
    assert ended.returncode == code, ended.stdout
    assert words in ended.stdout


def test_a_missing_module_of_our_own_is_a_fault_and_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), extras.extra_needed("demo", "This"):
        raise ModuleNotFoundError(name="dpagent.nothing")
    with pytest.raises(ConfigurationError, match="'somebody'"), extras.extra_needed("demo", "This"):
        raise ModuleNotFoundError(name="somebody.elses")


@pytest.mark.parametrize(
    ("written", "advised"),
    [
        ({"url": "file:///opt/it%20here", "dir_info": {}}, "'/opt/it here[images]'"),
        ({"url": "file:///opt/it", "dir_info": {"editable": True}}, "--editable '/opt/it[images]'"),
        (
            {"url": "https://example.org/it", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "'dpagent[images] @ git+https://example.org/it'",
        ),
        ({"url": "file:///tmp/it.whl", "archive_info": {}}, "'dpagent[images] @ file:///tmp/it.whl'"),
        ("no JSON", "'.[images]'"),
        (None, "'.[images]'"),
    ],
)
def test_the_advice_follows_where_the_program_came_from(
    monkeypatch: pytest.MonkeyPatch, written: Any, advised: str
) -> None:
    class Installed:
        def read_text(self, _name: str) -> str | None:
            return written if written is None or isinstance(written, str) else json.dumps(written)

    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: Installed())
    assert f"-m pip install {advised}" in extras.install_command("images")

"""What ``dpagent`` says, and exits with, where a standard stream is closed, full, or has lost its reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from children import PATIENCE_S

pytestmark = pytest.mark.usefixtures("executed")
COMMAND = f"{sys.executable} -P -m cli.main"
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        env=os.environ | variables,
    )  # fmt: skip


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error(closed: str) -> None:
    """Before, the log of a daemon ended it, or its next file was opened in the place of the stream."""
    shown = shell(f"{COMMAND} --version {closed}")
    assert (shown.returncode, shown.stderr) == (0, "")
    unknown = shell(f"{COMMAND} run --config /none.yaml {closed}")
    assert unknown.returncode == 3
    assert ("/none.yaml" in unknown.stderr) == ("2>" not in closed)


def test_no_file_gets_the_number_of_a_stream_that_is_closed() -> None:
    opens = "import os; from cli.reporting import reported; reported(lambda: print(os.dup(0)))"
    assert int(shell(f'{sys.executable} -c "{opens}" 2>&-').stdout) > 2


@FULL
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("asked", ["--version", "--help", "methods list"])
def test_an_output_that_is_full_is_named(asked: str, unbuffered: str) -> None:
    result = shell(f"{COMMAND} {asked} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    said = "dpagent: the output cannot be written (No space left on device).\n"
    assert (result.returncode, result.stderr) == (8, said)


@FULL
@pytest.mark.parametrize(("asked", "code"), [("nosuch", 2), ("status --config /none.yaml", 3)])
def test_the_exit_code_stands_where_no_error_can_be_told(asked: str, code: int) -> None:
    """Before, it was 1."""
    assert shell(f"{COMMAND} {asked} 2> /dev/full").returncode == code


@pytest.mark.parametrize("asked", ["--help", "methods list"])
def test_a_reader_that_has_left_is_no_error(asked: str) -> None:
    """Before, of help it was an internal one, by the exit code alone."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        words = [sys.executable, "-P", "-m", "cli.main", *asked.split()]
        ended = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_working_directory_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = shell(f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && {COMMAND} status")
    assert gone.returncode == 8
    assert gone.stderr == "dpagent: the directory that this command runs in is gone. Run it in another one.\n"


def test_an_interrupt_is_no_error_of_what_is_interrupted(tmp_path: Path) -> None:
    """Before, `dpagent doctor` called it a problem of the configuration, or of whatever it was at."""
    file = tmp_path / "program.py"
    file.write_text(
        "import os, signal\n"
        "from cli.reporting import reported\n"
        "def program():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except Exception as error:\n"
        "        print('a problem', error)\n"
        "reported(program)\n"
    )
    ended = shell(f"{sys.executable} {file}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dpagent: Interrupted.\n")


@pytest.mark.parametrize("temporary", ["/tmp", "/proc"])
def test_what_the_system_refuses_is_not_said_of_the_output(temporary: str) -> None:
    """Also where the details can be kept nowhere."""
    program = "import os; from cli.reporting import reported; reported(lambda: os.fstat(1234))"
    keeps = f"import tempfile; tempfile.tempdir = '{temporary}'; {program}"
    result = shell(f'{sys.executable} -c "{keeps}"')
    assert result.returncode == 8
    assert result.stderr.startswith("dpagent: the system refuses something (Bad file descriptor).")
    _, _, log = result.stderr.strip().rstrip(".").rpartition("The details are in ")
    if temporary == "/proc":
        assert "details" not in result.stderr
    else:
        assert "OSError: [Errno 9]" in Path(log).read_text()
        Path(log).unlink()

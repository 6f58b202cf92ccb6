"""A program that is forked does what one that is executed does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import launching.starts
import pytest
from brokers import wait_until
from commands import command_line

Result = subprocess.CompletedProcess[bytes]


@pytest.fixture(autouse=True)
def _forking(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("executed"):
        pytest.skip("nothing is forked")


@pytest.fixture(params=["forked", "executed"])
def how(request: pytest.FixtureRequest) -> str:
    """How programs are started."""
    if request.param == "executed":
        request.getfixturevalue("executed")
    return str(request.param)


@pytest.fixture
def waiting(how: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts programs that wait for their order on standard input."""
    started: list[subprocess.Popen[bytes]] = []
    reading, writing = os.pipe()

    def start(*, pass_fds: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.decoding", str(reading)], stdin=subprocess.PIPE,
            cwd=tmp_path, pass_fds=[reading, *pass_fds], **options,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    os.close(reading)
    os.close(writing)


def ran(*words: str, **options: Any) -> Result:
    return subprocess.run(command_line(*words), capture_output=True, timeout=60, check=False, **options)


def test_codes_and_streams_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cases = (
        ["--version"],
        ["--nothing"],
        ["methods"],
        ["run", "--config", "ε/agent.yaml"],
        ["budget", "show"],
    )
    forked = [ran(*words, cwd=tmp_path, env=os.environ | {"COLUMNS": "60"}) for words in cases]
    monkeypatch.setenv(launching.starts.EXECUTED, "1")
    for words, fork in zip(cases, forked, strict=True):
        executed = ran(*words, cwd=tmp_path, env=os.environ | {"COLUMNS": "60"})
        lines = [
            [line.partition(b"INFO")[2] or line for line in each.stderr.splitlines()]
            for each in (fork, executed)
        ]
        assert (fork.returncode, fork.stdout, lines[0]) == (executed.returncode, executed.stdout, lines[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_that_ends_a_program_is_its_code(
    waiting: Callable[..., subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    process = waiting()
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == -number
    assert process.poll() == -number


def test_what_was_waited_for_is_gone(waiting: Callable[..., subprocess.Popen[bytes]]) -> None:
    for _ in range(20):
        process = waiting()
        process.kill()
        process.wait(60)
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_descriptors_session_and_directory_are_those_that_were_asked_for(
    waiting: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    # Whatever numbers the server has at that moment, some of these are among them.
    given = [writing, *(os.dup(writing) for _ in range(12))]
    try:
        process = waiting(pass_fds=given, start_new_session=True)
        place = Path(f"/proc/{process.pid}")
        # The kernel has it a moment after the start is known to be one.
        wait_until(lambda: b"agent.decoding" in (place / "cmdline").read_bytes(), "its command line")
        assert (place / "cwd").readlink() == tmp_path.resolve()
        # The program opens and closes files of its own meanwhile, so a listing may name one that is gone.
        found = {}
        for each in (place / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found[int(each.name)] = each.readlink()
        assert {found[each] for each in given} == {Path(f"/proc/self/fd/{writing}").readlink()}
        assert reading not in found
        assert os.getsid(process.pid) == process.pid
    finally:
        for each in (reading, *given):
            os.close(each)


def test_a_worker_of_pytest_is_a_fork_of_the_process_that_has_collected_the_tests() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("this process is no worker")
    assert b"launching.server" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert sys.argv[0] == "-c", "as of a worker that is executed"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {**os.environ, "LC_ALL": "C"}},
        {"env": {**os.environ, "OPENSSL_CONF": "/elsewhere/openssl.cnf"}},
        {"env": {**os.environ, "PYTHONPATH": "/elsewhere"}},
        {"user": os.getuid()},
    ],
)
def test_what_only_a_start_reads_is_executed(changes: dict[str, Any]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cli.main", "--version"], stdout=subprocess.PIPE, **changes
    )
    process.communicate(timeout=60)
    assert isinstance(process, launching.starts.Popen)
    assert not process.is_fork

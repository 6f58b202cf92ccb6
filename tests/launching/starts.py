"""Asks for forks (:mod:`launching.server`) where a test or a program starts one of :data:`PROGRAMS`.

:class:`Popen` takes the place of ``subprocess.Popen`` in the tests' processes and in the forks. It is that
class, but that ``[sys.executable, "-P", "-m", PROGRAM, …]`` becomes a fork, and so does a worker of pytest
where tests are handed out. All other commands are executed. So is a program whose start would differ: with
other variables that only the start of an interpreter reads, other places of imports, another user, a function
of the test's own before it; in a test with the fixture ``executed``; and where coverage is measured.

What a fork lacks: its parent is the server and not the one who asked, and allocators have read their
variables before it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from execnet.gateway_io import popen_bootstrapline

OF_BOARDS: Final = (
    "agent.decoding", "agent.worker_program", "agent.serving.program", "agent.model_keeping",
    "agent.opening_program", "agent.pricing_program",
)  # fmt: skip
"""Modules that run as programs, often, and need little: the less the process has that forks, the sooner."""
OF_SERVERS: Final = ("coordinator.model_program", "simulation.programs.embedded_broker")
"""Those of the fleet's other side."""
PROGRAMS: Final = (
    *OF_BOARDS, *OF_SERVERS, "cli.main", "simulation.programs.baseline",
)  # fmt: skip
"""All of them."""
Kind = Literal["boards", "agents", "servers", "programs", "workers"]
KINDS: Final = get_args(Kind)
"""Of forks, each of a process that has imported what they need."""
MOST_BYTES: Final = 1 << 20
"""Of a start, as JSON."""
MOST_DESCRIPTORS: Final = 64
NUMBER: Final = struct.Struct("=i")
"""A process, or its status."""
_PYTHON: Final = sys.executable
_TESTS: Final = Path(__file__).parents[1]
_PACKAGES: Final = sysconfig.get_path("purelib")
EXECUTED: Final = "TESTS_EXECUTE"
"""A variable: with it, nothing is forked."""
_READ_AT_A_START: Final = (
    "PYTHON", "LC_", "LANG", "TZ", "LD_", "OPENBLAS_", "OMP_", "NPY_", "OPENSSL_", "MALLOC_", "GLIBC_",
)  # fmt: skip
"""Beginnings of variables that no fork can be given: the interpreter and libraries read them once."""
_ANY: Final = (
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONMALLOC", "MALLOC_",
    "PYTHONBREAKPOINT",
)  # fmt: skip
"""But for these: the places of imports are compared; the server heeds what is unbuffered; tests that look at
memory execute; and Ray sets the last, which nobody uses."""
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""As the server has them."""
_ROOM: Final = 4_096 * " "
"""On the server's command line, where each fork shows its own."""
_LIMITS: Final = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_STACK", "RLIMIT_CPU")
_START_S: Final = 120.0
"""The server may still be importing, on a busy machine."""


class Fault(TypedDict):
    """Where a program kills itself."""

    point: str
    """Of :class:`dpagent.faults.FaultPoint`."""
    times: int
    """At which time that it comes there, from 1."""
    delay_s: float
    """How long its other threads go on before the kill."""


class Start(TypedDict):
    """A program to start."""

    module: str
    """Which is run; empty: the code is."""
    code: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    umask: int
    limits: dict[str, tuple[int, int]]
    """As of ``setrlimit``, by name."""
    blocked: list[int]
    """Signals."""
    process_group: int | None
    is_session: bool
    before: str | None
    """A function that runs before the program, pickled, in hexadecimal digits."""
    descriptors: list[int]
    """The numbers of those that come along."""
    is_under_fire: bool
    """Whether SIGUSR1 makes it write the stacks of its threads to standard error."""
    fault: Fault | None


_HOW: Final = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen``, which forks what it can.

    Args:
        is_under_fire: a program that may be killed at a fault point; it is forked whatever else holds.
        fault: which.
        first: what the program is to do first, as a function of a module beside the tests; it is forked, too.
    """

    _connection: socket.socket | None = None

    def __init__(
        self,
        *words: Any,
        is_under_fire: bool = False,
        fault: Fault | None = None,
        first: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        self._is_under_fire, self._fault, self._first = is_under_fire, fault, first
        super().__init__(*words, **options)

    def _execute_child(self, *how: Any) -> None:
        asked = _HOW.bind(self, *how).arguments
        start = self._start_of(asked)
        if start is None:
            super()._execute_child(*how)  # type: ignore[misc]
            return
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        self.pid, self._connection = _fork(start, [*standard, *asked["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _start_of(self, asked: dict[str, Any]) -> Start | None:
        """What to ask the server for; None: the command is executed."""
        args, variables = asked["args"], asked["env"]
        before = self._first or asked["preexec_fn"]
        if isinstance(args, (str, bytes, os.PathLike)) or os.fspath(args[0]) != _PYTHON:
            return None
        words = [os.fsdecode(word) for word in args[1:]]
        if words[:1] == ["-P"]:
            del words[0]
        environment = {
            os.fsdecode(name): os.fsdecode(value)
            for name, value in (os.environ if variables is None else variables).items()
        }
        is_worker = _hands_out and words == ["-u", "-c", popen_bootstrapline]
        if (
            not (is_worker or (words[:1] == ["-m"] and words[1] in PROGRAMS))
            or not (before in (None, self._first) or before.__module__.startswith("simulation."))
            or any(asked[name] for name in ("shell", "executable"))
            or any(asked[name] is not None for name in ("uid", "gid", "gids"))
            or not (self._is_under_fire or self._first or _is_like_here(environment))
        ):
            return None
        return Start(
            module="" if is_worker else words[1], code=words[2] if is_worker else "",
            arguments=[] if is_worker else words[2:], environment=environment,
            directory=str(Path(asked["cwd"] or "").absolute()), umask=_umask(),
            limits={name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
            blocked=[*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
            process_group=None if asked["process_group"] < 0 else asked["process_group"],
            is_session=asked["start_new_session"],
            before=None if before is None else pickle.dumps(before).hex(),
            descriptors=[0, 1, 2, *asked["pass_fds"]],
            is_under_fire=self._is_under_fire, fault=self._fault,
        )  # fmt: skip

    @property
    def is_fork(self) -> bool:
        """Whether it was not executed."""
        return self._connection is not None

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, no-any-return]
        waiting = select.poll()
        waiting.register(self._connection, select.POLLIN)
        if not waiting.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        with self._connection as connection:
            said = connection.recv(NUMBER.size)
            # It is a zombie until the server has waited for it, which closes its end then.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
        # Without its last word, the server was ended, and took all forks along.
        return self.pid, NUMBER.unpack(said)[0] if said else signal.SIGKILL

    def _internal_poll(self, *words: Any, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*words, **options)  # type: ignore[misc, no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    process, status = self._try_wait(os.WNOHANG)
                    if process:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


class Server:
    """The processes that fork (:mod:`launching.server`), which end with this one.

    Args:
        collected: arguments of pytest for the tests that workers are forked for; None: no workers are.

    Attributes:
        address: for :func:`use`, in other processes: the directory of their sockets.
    """

    def __init__(self, collected: Sequence[str] | None = None) -> None:
        self.address = tempfile.mkdtemp(prefix="dpagent-starts-")
        places = [str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")]
        # -P and no file: not from a folder of the tests', some of which are called like the packages.
        program = "import sys; from launching.server import main; main(*sys.argv[1:])"
        arguments = "" if collected is None else json.dumps(list(collected))
        with contextlib.ExitStack() as closing:
            listeners = [closing.enter_context(_listening(f"{self.address}/{kind}")) for kind in KINDS]
            descriptors = [listener.fileno() for listener in listeners]
            with _log(self.address).open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable, "-P", "-c", program, self.address, arguments, *map(str, descriptors),
                        _ROOM,
                    ],
                    stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=descriptors,
                    start_new_session=True,  # A terminal's Ctrl-C is for the tests, which end the programs.
                    env=os.environ | _ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
                )  # fmt: skip

    def close(self) -> None:
        """End it, and all forks that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_START_S)
        shutil.rmtree(self.address)


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(1_000)
    return listener


_address: str | None = None
_hands_out = False
_like: dict[str, str] = {}
_places: set[str] = set()
_own: list[Server] = []


def use(address: str | None, *, hands_out: bool = False) -> None:
    """Let this process start programs by forks.

    Args:
        address: of the server; None: one is started when it is needed, and ends with :func:`close`.
        hands_out: whether the workers of pytest that this process starts are forks too.
    """
    global _address, _hands_out
    _address, _hands_out = address, hands_out
    _like.update(_read_at_a_start(os.environ))
    _places.update(sys.path, [""])
    subprocess.Popen = Popen  # type: ignore[misc]


def close() -> None:
    """End the server of this process's own, if there is one."""
    global _address
    while _own:
        _own.pop().close()
        _address = None


def _read_at_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_A_START)
        and not name.startswith(_ANY)
        and (name, value) not in _ONE_THREAD.items()
    }


def _is_like_here(environment: Mapping[str, str]) -> bool:
    """Whether a program would start with this environment as it starts here."""
    # pytest adds the folders of tests as it imports them, and Ray one of its own.
    places = {
        place
        for place in environment.get("PYTHONPATH", "").split(os.pathsep)
        if not any(Path(place).is_relative_to(known) for known in (_TESTS, _PACKAGES))
    }
    return (
        EXECUTED not in environment
        and not is_measured(environment)
        and _read_at_a_start(environment) == _like
        and _places.issuperset(places)
    )


def is_measured(environment: Mapping[str, str]) -> bool:
    """Whether coverage is measured in programs with this environment, from their start."""
    return any(name.startswith("COVERAGE_PROCESS") for name in environment)


def _umask() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:")
    ]
    return int(line.split()[1], 8)


def _log(address: str) -> Path:
    return Path(address) / "log"


def _kind_of(start: Start) -> Kind:
    if start["module"] in OF_BOARDS:
        return "boards"
    if start["module"] == "cli.main" and start["arguments"][:1] == ["run"]:
        return "agents"
    if start["module"] in OF_SERVERS or start["arguments"][:1] in (["coordinator"], ["mixer"]):
        return "servers"
    return "programs" if start["module"] else "workers"


def _server() -> str:
    """The address of the server."""
    global _address
    if _address is None:
        _own.append(Server())
        _address = _own[-1].address
    return _address


def _fork(start: Start, descriptors: Sequence[int]) -> tuple[int, socket.socket]:
    """The process of a start, and the connection on which its status will come."""
    address = _server()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = b""
    with contextlib.ExitStack() as closing:
        closing.enter_context(connection)
        connection.settimeout(_START_S)
        connection.connect(f"{address}/{_kind_of(start)}")
        socket.send_fds(connection, [json.dumps(start).encode()], descriptors)
        with contextlib.suppress(ConnectionError):
            said = connection.recv(NUMBER.size)
        if not said:
            what = start["module"] or "a worker"
            raise RuntimeError(f"the server of forks did not start {what}: {_log(address).read_text()}")
        connection.settimeout(None)
        closing.pop_all()
    return NUMBER.unpack(said)[0], connection

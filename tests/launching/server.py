"""Forks programs, and workers of pytest, for :mod:`launching.starts`.

Five processes do, each a fork of the one before: the first has imported what agents start, the second agents,
the third coordinators and brokers, the fourth all programs, and the fifth has collected the tests, whose
modules the workers find in memory. Each has one thread. The more memory it has, the longer a fork takes.

Each connection asks for one start (:class:`launching.starts.Start`, as JSON, with the descriptors of the
program), and gets the id of the process, and at its end the status as of ``waitpid``. A program runs as
``python -m`` would run it: as ``__main__``, with the arguments, environment, directory, limits and
descriptors that were asked for. When standard input ends, all programs are killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib.util
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, NoReturn

from dpagent import faults
from launching.starts import (
    KINDS,
    MOST_BYTES,
    MOST_DESCRIPTORS,
    NUMBER,
    OF_BOARDS,
    OF_SERVERS,
    PROGRAMS,
    Fault,
    Start,
    use,
)

_LATER_ON_BOARDS: Final = (
    "agent.training", "dpagent.learning.data.formats.npz", "dpagent.learning.training.onnx_engine",
    "encodings.cp437", "importlib.metadata", "numpy.random", "onnxruntime",
)  # fmt: skip
"""What the programs of boards import when they first need it; what is missing, they do without, or say so."""
_OF_AGENTS: Final = (
    "cli.main", "cli.run", "agent.daemon", "agent.other_brokers", "agent.overview", "cli.agent_program",
    "cryptography.hazmat.backends.openssl.backend", "encodings.idna", "firmware_profiles",
    "importlib.readers", "pydantic.plugin._loader", "typer._adapters", "typer._click.decorators",
)  # fmt: skip
"""What ``dpagent run`` does."""
_OF_SERVERS: Final = (
    *OF_SERVERS, "cli.coordinator", "cli.mixer", "coordinator.daemon", "coordinator.worker", "mixer.daemon",
    "coordinator.database.postgresql", "dpagent.learning.inference.export.model",
    "dpagent.learning.inference.onnx_evaluator", "dpagent.learning.training.onnx_graph.build",
    "amqtt.broker", "amqtt.plugins.authentication", "argon2", "pwdlib.hashers.argon2", "typer.rich_utils",
)  # fmt: skip
"""What coordinators, mixers and brokers do."""
_LATER: Final = (
    "simulation.fleet", "sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_svg",
    "matplotlib.backends.backend_agg",
)  # fmt: skip
"""What all others do."""
_HIGH: Final = 900
"""Descriptors move there before they go where the program wants them, which may be where others are."""
_execve = os.execve


def import_all(modules: Iterable[str]) -> None:
    """Import what the forks find in memory, as far as it is there; and freeze it."""
    for module in modules:
        with contextlib.suppress(ImportError):
            import_module(module)
    gc.collect()
    gc.freeze()


def hurry_trials() -> None:
    """Let forks time each engine five times, and not for half a second: no test is about which is faster."""
    from dpagent.learning.training import engine_choice

    vars(engine_choice)["_TRIED_S"] = 0.0


def arm(fault: Fault) -> None:
    """Let this process kill itself."""
    left, point = fault["times"], faults.FaultPoint(fault["point"])

    def reached(at: faults.FaultPoint) -> None:
        nonlocal left
        if at is point:
            left -= 1
            if left == 0:
                time.sleep(fault["delay_s"])
                os.kill(os.getpid(), signal.SIGKILL)

    faults.reached = reached


def run(start: Start, descriptors: list[int], connection: socket.socket) -> NoReturn:
    """The fork's part."""
    code = 1
    try:
        (high,) = moved_up([connection.detach()])
        settle(start, moved_up(descriptors))
        with socket.socket(fileno=high) as connection:
            connection.send(NUMBER.pack(os.getpid()))
        execute(start)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        # As the interpreter ends, but that it would take its memory apart; multiprocessing ends its forks so.
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code & 0xFF)


def moved_up(descriptors: list[int]) -> list[int]:
    """The same descriptors with high numbers."""
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return moved


def settle(start: Start, descriptors: list[int]) -> None:
    """Become the process that was asked for."""
    if start["is_session"]:
        os.setsid()
    if start["process_group"] is not None:
        os.setpgid(0, start["process_group"])
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["directory"])
    os.umask(start["umask"])
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked"])
    for descriptor, number in zip(descriptors, start["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name, limits in start["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    renew_streams(is_unbuffered=bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.argv = [start["module"] or "-c", *start["arguments"]]
    how = ["-P", "-m", start["module"]] if start["module"] else ["-u", "-c", start["code"]]
    show_command([sys.executable, *how, *start["arguments"]])
    if start["is_under_fire"]:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    if start["fault"] is not None:
        arm(start["fault"])
    os.execve = become  # type: ignore[assignment]
    if start["before"] is not None:
        pickle.loads(bytes.fromhex(start["before"]))()


def become(program: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """In place of ``os.execve``, by which a program goes on as another one: ``python … -m MODULE …``, or what
    is not Python, such as a broker."""
    if program != sys.executable:
        _execve(program, words, environment)
    show_command([*words])
    module, *arguments = words[words.index("-m") + 1 :]
    sys.argv = [module, *arguments]
    run_module(module)
    raise SystemExit(0)


def show_command(words: list[str]) -> None:
    """Let others see this process by its own command, in the room that the server's has (proc(5))."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def renew_streams(*, is_unbuffered: bool) -> None:
    """Open the standard streams as the interpreter does at its start."""
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, name)
        stream = open(descriptor, mode, encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
        if mode == "w":
            stream.reconfigure(
                line_buffering=descriptor == 2 or os.isatty(descriptor),
                write_through=is_unbuffered or descriptor == 2,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def execute(start: Start) -> None:
    """Run a module as ``python -m`` does, or code as ``python -c`` does."""
    if start["module"]:
        run_module(start["module"])
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(start["code"], program.__dict__)


def run_module(module: str) -> None:
    """Run a module as ``python -m`` does."""
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    assert spec.origin is not None
    program.__dict__.update(
        __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent
    )
    sys.argv[0] = spec.origin
    exec(spec.loader.get_code(module), program.__dict__)  # type: ignore[attr-defined]


class Forks:
    """Takes starts until standard input ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._running: dict[int, socket.socket] = {}
        self._ended: dict[socket.socket, int] = {}
        """Those that nobody has waited for: what the kernel knows of them can be read until then."""
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork, and tell of ends."""
        while True:
            ready, _, _ = select.select([0, self._listener, self._woken, *self._ended], [], [])
            if 0 in ready:
                break
            for connection in self._ended.keys() & set(ready):
                # The one who asked has taken the status, or has ended.
                os.waitpid(self._ended.pop(connection), 0)
                connection.close()
            if self._woken in ready:
                os.read(self._woken, 4_096)
                self._tell_ends()
            if self._listener in ready:
                self._take_start()
        for process in self._running:
            os.kill(process, signal.SIGKILL)  # It was not waited for: it is none of another's.

    def _take_start(self) -> None:
        connection, _ = self._listener.accept()
        data, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_DESCRIPTORS)
        if not data:  # The one who asked has ended.
            connection.close()
            return
        process = os.fork()
        if process == 0:
            self._forget()
            run(json.loads(data), descriptors, connection)
        for descriptor in descriptors:
            os.close(descriptor)
        self._running[process] = connection

    def _forget(self) -> None:
        """What is the server's alone."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._woken)
        os.close(self._wakes)
        for other in (self._listener, *self._running.values(), *self._ended):
            other.close()

    def _tell_ends(self) -> None:
        for process, connection in [*self._running.items()]:
            end = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                continue
            del self._running[process]
            self._ended[connection] = process
            dumped = 0x80 if end.si_code == os.CLD_DUMPED else 0
            status = end.si_status << 8 if end.si_code == os.CLD_EXITED else end.si_status | dumped
            with contextlib.suppress(OSError):
                connection.send(NUMBER.pack(status))


def collect(arguments: list[str]) -> None:
    """Import the modules of the tests as pytest does; what goes wrong, each worker will say."""
    import pytest

    # As for the workers, whose own collection finds them in memory.
    pytest.main([*arguments, "-n", "0", "--collect-only", "-qq"])
    gc.collect()
    gc.freeze()


def main(address: str, arguments: str, *rest: str) -> None:
    """Serve on sockets that listen.

    Args:
        address: for what the forks start.
        arguments: of pytest, as JSON; empty: no worker will be asked for.
        rest: descriptors of the sockets, in the order of ``KINDS``; and room for the commands of the forks.
    """
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in rest[: len(KINDS)]]
    gc.disable()  # What is imported stays; to look for what does not takes a quarter of the time.
    use(address)
    import_all([*OF_BOARDS, *_LATER_ON_BOARDS])
    hurry_trials()
    followers: list[Callable[[], None]] = [_import_agents, _import_servers, _import_programs]
    if arguments:
        followers.append(lambda: collect(json.loads(arguments)))
    for prepare in followers:
        if follower := os.fork():
            serve(listeners, follower)
        listeners.pop(0).close()
        prepare()
    serve(listeners, None)


def _import_agents() -> None:
    import_all(_OF_AGENTS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `cli.main` has taken it.


def _import_servers() -> None:
    import_all(_OF_SERVERS)


def _import_programs() -> None:
    from cli.main import _Root

    import_all([*PROGRAMS, *(place.partition(":")[0] for place in _Root.places.values()), *_LATER])


def serve(listeners: list[socket.socket], follower: int | None) -> NoReturn:
    """Fork for the first of the sockets until standard input ends, and wait for the process that follows."""
    for other in listeners[1:]:
        other.close()
    gc.enable()
    Forks(listeners[0]).serve()
    if follower is not None:
        os.waitpid(follower, 0)
    os._exit(0)

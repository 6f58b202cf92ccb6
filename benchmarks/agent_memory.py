"""Memory of the agent by phase, its start, what it writes to the disk, and the coordinator's memory.

A real fleet of one device over TLS: Mosquitto, the coordinator, and ``dpagent run`` with 6,000 records of
MNIST, for 60 rounds of `mnist-cnn` and of `scattering`. Every 30 ms all processes of the agent are looked at.
What they share counts once, and pages of files as if no other program had them in memory
(``benchmarks/process_memory.py``): so much a board has to have. The phases are those of the agent's log:
*starting*, until it waits for a plan; *idle* before one; *preparing*, from the first plan to the first
charge, in which engines are tried; *training beside a look*, to the 20th round, as a look at the data begins
after the first and stands still in each; *training*, from then to the last round; and once the job is over
and its model is kept, *finished*. Imports are looked at in processes of their own. The profile is that of a
Raspberry Pi Zero 2 W with one core, where training and pricing end with the round. The pages of the records'
rows and features, which the agent keeps in memory where the system lets it, have a figure of their own.

The bytes that a round writes are what the kernel was given for the disk (``write_bytes`` of
``/proc/PID/io``) by the agent's main process from the second round's spool to the last one's, the fragments,
what is noted of each, and what goes from the database's log into it included: so the job has 60 rounds. The
coordinator of 100 devices is that of `swarm_rounds`; for a second of its start, another program makes its
model's files.

Programs find the bytecode of all that they load, as those of the Debian package do. Without it, importing
`agent.daemon` takes 5 MiB more, and twice the time.

Limits: a PC, not a board: without onnxruntime, or with another microbatch or more cores, memory differs. The
start is from that of the process to the broker's acceptance, median of 3, with records that are decoded
already.
"""

from __future__ import annotations

import contextlib
import getpass
import gzip
import os
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.certificates import broker_certificate
from benchmarks.demo import mnist_directory
from benchmarks.figures import BenchmarkError, Figure, Skipped
from benchmarks.process_memory import Watch, memory_of
from benchmarks.programs import ROOT, environment, python, run_program, stop
from benchmarks.swarm import run_swarm
from benchmarks.swarm_rounds import SETTINGS, SUMS
from coordinator.brokers.mosquitto import find_mosquitto
from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.settings import DatasetSettings
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.data.shards import prepare_data
from simulation.data.source import open_source
from simulation.layout import Layout
from simulation.programs.broker import BrokerAddress, reserved_port, wait_until_ready
from simulation.programs.configurations import write_configurations
from simulation.programs.ledgers import begin_ledgers
from simulation.programs.supervisor import Supervisor, python_module
from simulation.request import DataSelection, Request

_RECORDS: Final = 6_000
_ROUNDS: Final = 60
_LOOK_IS_OVER: Final = 20
"""The round after which a look at the data is over."""
_OF_RECORDS: Final = ("records.rows", "features.f32")
_PROFILE: Final = "extends: raspberry-pi-zero-2-w\nprocesses: 1\n"
_IDLE_S: Final = 3.0
_CONNECT_S: Final = 60.0
_JOB_S: Final = 1_200.0
_WANTED: Final = {"mnist-cnn": 80.0, "scattering": 110.0}
_WANTED_IDLE: Final = 48.0
_WANTED_COORDINATOR: Final = 100.0
_WANTED_BYTES: Final = 64 << 10
_PROGRAMS: Final = (
    "cli.agent_program", "agent.daemon", "agent.pricing_program", "agent.opening_program",
    "agent.model_keeping", "agent.worker_program", "agent.decoding", "onnxruntime", "cli.coordinator",
    "coordinator.daemon",
)  # fmt: skip
_STEPS: Final = {
    "Python": "sys",
    "and the libraries": "yaml, cbor2, sqlite3, ssl, paho.mqtt.client, cryptography.hazmat.primitives.hpke",
    "and `agent.daemon`": "agent.daemon",
}


@dataclass(frozen=True, slots=True)
class _Run:
    """What one job took of a device.

    Attributes:
        most: MiB by phase, besides what is kept of records.
        kept: MiB of rows and features that the agent keeps in memory.
        bytes_a_round: written to the disk.
        fragments: bytes of a round's sealed fragments, of which that is one part.
        start_s: median time from the start of the program to the connection, or 0 where it was not measured.
    """

    most: dict[str, float]
    kept: float
    bytes_a_round: float
    fragments: int
    start_s: float = 0.0


def run() -> list[Figure]:
    """Look at imports, at a device during two jobs, and at the coordinator.

    Raises:
        Skipped: Mosquitto or MNIST is missing.
    """
    data = mnist_directory()
    if find_mosquitto() is None:
        raise Skipped("Mosquitto is not installed: apt-get install mosquitto.")
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name, _bytecode(Path(name, "bytecode")):
        root = Path(name)
        figures = [Figure(f"imports: {name}", mib, "MiB") for name, mib in _imports()]
        write_part(data, root / "mnist")
        for model, wanted in _WANTED.items():
            run = _run_job(root / model, root / "mnist", model)
            most = run.most
            if run.start_s:
                figures.append(
                    Figure("start of `dpagent run` until the broker has accepted it", run.start_s, "s")
                )
            figures += [
                Figure(f"{model}: starting, at most", most["starting"], "MiB"),
                _against(f"{model}: idle, connected, before a plan", most["idle"], _WANTED_IDLE),
                Figure(f"{model}: preparing, at most", most["preparing"], "MiB"),
                Figure(f"{model}: training beside a look, at most", most["training beside a look"], "MiB"),
                _against(f"{model}: training, at most", most["training"], wanted),
                Figure(f"{model}: the job is finished", most["finished"], "MiB"),
                Figure(f"{model}: besides, the rows and features of records", run.kept, "MiB"),
                Figure(f"{model}: written to the disk in a round", run.bytes_a_round, "bytes"),
                Figure(
                    f"{model}: of that, besides its fragments", besides := run.bytes_a_round - run.fragments,
                    "bytes", f"wanted: {_WANTED_BYTES:,}", besides / _WANTED_BYTES,
                ),
            ]  # fmt: skip
        starts, rounds = _coordinator()
        figures += [
            Figure("coordinator of 100 devices: until its first plan, at most", starts, "MiB"),
            _against("coordinator of 100 devices: from then on, at most", rounds, _WANTED_COORDINATOR),
        ]
    return figures


@contextmanager
def _bytecode(directory: Path) -> Iterator[None]:
    """Programs that start here find the bytecode of what they load, whatever is written elsewhere."""
    names = {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        run_program(python("-c", f"import {', '.join(_PROGRAMS)}"), timeout_s=_CONNECT_S)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _against(name: str, mib: float, wanted: float) -> Figure:
    return Figure(name, mib, "MiB", f"wanted: {wanted:g} MiB", mib / wanted)


def _imports() -> Iterator[tuple[str, float]]:
    """Memory of a process that has imported so much and waits."""
    names: list[str] = []
    for step, modules in _STEPS.items():
        names.append(modules)
        program = f"import {', '.join(names)}; print(flush=True); input()"
        with subprocess.Popen(
            python("-c", program), cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield step, memory_of(process.pid)
            process.kill()


def write_part(data: Path, part: Path) -> None:
    """The first records of MNIST, in files of their own."""
    part.mkdir()
    for name, count in (("train", _RECORDS), ("t10k", 1_000)):
        for kind, header, record in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            file = data / f"{name}-{kind}-ubyte"
            raw = file.read_bytes() if file.exists() else gzip.decompress(Path(f"{file}.gz").read_bytes())
            cut = raw[:4] + count.to_bytes(4, "big") + raw[8 : header + count * record]
            (part / file.name).write_bytes(cut)


def prepared_fleet(root: Path, data: Path, model: str, rounds: int, address: BrokerAddress) -> Layout:
    """The files of a fleet of one device, its ledger begun.

    Args:
        root: for the files.
        data: MNIST, or a part of it.
        model: a built-in one.
        rounds: of the job.
        address: the broker's.
    """
    selection = DataSelection(dataset="mnist", train=DatasetSettings(path=data))
    request = Request(data=selection, devices=1, rounds=rounds, epsilon=2.0, model=model)
    settings, _ = settle(request, open_source(selection, 0).form, model, built_in(model))
    layout = Layout(root)
    prepare_data(settings, layout)
    write_configurations(settings, layout, address)
    begin_ledgers(layout, 1)
    return layout


def _run_job(root: Path, data: Path, model: str) -> _Run:
    """One device, from its start to the end of a job."""
    with tls_broker(root / "broker") as (command, address), Supervisor(root / "logs") as supervisor:
        layout = prepared_fleet(root, data, model, _ROUNDS, address)
        file = layout.agent_file(1)
        (file.parent / "board.yaml").write_text(_PROFILE)
        file.write_text(file.read_text() + "profile: board.yaml\n")
        supervisor.start("broker", command)
        wait_until_ready(address)
        log = root / "agent.log"
        starts = [_connect(layout.agent_file(1), log) for _ in range(4)][1:] if model == "mnist-cnn" else []
        watched = _agent(layout.agent_file(1), log)
        with watched as process, Watch(process.pid, "starting", besides=_OF_RECORDS) as watch:
            await_said("waiting for a plan", log, process, _CONNECT_S)
            watch.enter("idle")
            time.sleep(_IDLE_S)
            watch.enter("preparing")
            coordinator = python_module("cli.main", "coordinator", "run", "--config", str(layout.fleet_file))
            supervisor.start("coordinator", coordinator, may_end=True)
            await_said("round 1 of", log, process, _JOB_S)
            watch.enter("training beside a look")
            # Whole rounds, with receipts and the database's checkpoints, and without the model at the end.
            await_said(f"round 2 of {_ROUNDS}: spooled", log, process, _JOB_S)
            before, fragments = _written(process.pid), _fragment_bytes(layout.agent_file(1).parent / "state")
            await_said(f"round {_LOOK_IS_OVER} of {_ROUNDS}: spooled", log, process, _JOB_S)
            watch.enter("training")
            await_said(f"round {_ROUNDS} of {_ROUNDS}: spooled", log, process, _JOB_S)
            written = _written(process.pid) - before
            watch.enter("keeping the model")
            await_said("is finished", log, process, _JOB_S)
            time.sleep(_IDLE_S)
            watch.enter("finished")
            time.sleep(_IDLE_S)
            kept = memory_of(process.pid) - memory_of(process.pid, besides=_OF_RECORDS)
    start_s = statistics.median(starts) if starts else 0.0
    return _Run(watch.most, kept, written / (_ROUNDS - 2), fragments, start_s)


@contextmanager
def tls_broker(directory: Path) -> Iterator[tuple[list[str], BrokerAddress]]:
    """The command of a Mosquitto that speaks TLS alone; who starts here trusts its authority."""
    files = broker_certificate(directory)
    before = os.environ.get("SSL_CERT_FILE")
    with reserved_port(0) as port:
        configuration = directory / "mosquitto.conf"
        lines = [
            f"user {getpass.getuser()}",
            f"listener {port} 127.0.0.1",
            "allow_anonymous true",
            *files.options,
        ]
        configuration.write_text("\n".join(lines))
        os.environ["SSL_CERT_FILE"] = str(files.authority)
        try:
            mosquitto = find_mosquitto()
            assert mosquitto is not None
            address = BrokerAddress(f"mqtts://127.0.0.1:{port}", None, None, "auto", "mosquitto")
            yield [mosquitto, "-c", str(configuration)], address
        finally:
            del os.environ["SSL_CERT_FILE"]
            if before is not None:
                os.environ["SSL_CERT_FILE"] = before


@contextmanager
def _agent(configuration: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as stream:
        process = subprocess.Popen(
            python("-m", "cli.main", "run", "--config", str(configuration)),
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        stop(process)


def _connect(configuration: Path, log: Path) -> float:
    """Seconds from the start of an agent to its connection."""
    began = time.monotonic()
    with _agent(configuration, log) as process:
        await_said("connected to", log, process, _CONNECT_S)
        return time.monotonic() - began


def await_said(text: str, log: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a log has a text.

    Raises:
        BenchmarkError: The process ends, or the time is over.
    """
    until = time.monotonic() + seconds
    while text not in (said := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > until:
            raise BenchmarkError(f"The agent did not come to {text!r}; it said: {said}")
        time.sleep(0.002)


def _written(process: int) -> int:
    """Bytes that the kernel has been given for the disk by a process."""
    for line in Path(f"/proc/{process}/io").read_text(encoding="ascii").splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise BenchmarkError("The kernel does not tell what a process writes; this benchmark needs Linux.")


def _fragment_bytes(state: Path) -> int:
    """Of the fragments that are spooled, all of one round."""
    with contextlib.closing(sqlite3.connect(f"file:{state / 'ledger.db'}?mode=ro", uri=True)) as connection:
        sealed = "SELECT SUM(LENGTH(message)) FROM fragments JOIN messages USING (number) GROUP BY round"
        sizes = [int(size) for (size,) in connection.execute(sealed)]
    if not sizes:
        raise BenchmarkError("No fragment was spooled any more when the round's were to be counted.")
    return max(sizes)


def _coordinator() -> tuple[float, float]:
    """The most that the coordinator of 100 devices takes with its programs: at its start, and then; MiB."""
    nothing = ArrayDataset(np.zeros((0, 28, 28, 1), np.float32), np.zeros(0, np.int64), 10)
    watches: list[Watch] = []

    def watch(process: int) -> Watch:
        watches.append(Watch(process))
        return watches[-1]

    run_swarm(SETTINGS | SUMS, [nothing] * 100, watch=watch, announced=lambda: watches[0].enter("rounds"))
    return watches[0].most[""], watches[0].most["rounds"]

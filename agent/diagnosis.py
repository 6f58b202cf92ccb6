"""What is right and what is wrong with a board, before and while its agent runs; for ``dpagent doctor``.

Everything is read as the agent would read it, and nothing is changed. What it finds of the data (how many
records, which are left out) is private, like a look at them: it is for their owner's eyes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from agent.audit import audit, open_ledger, verify
from agent.board import Board
from agent.charges import Budget, BudgetChange, Charge
from agent.database import no_ledger, no_second_head
from agent.energy import EnergyMeter
from agent.governor import Governor, require_public_room
from agent.heads import read_second_head
from agent.ledger_room import LedgerRoom
from agent.limit_settings import LimitSettings
from agent.limits import BeyondLimitError, UnwantedReceiptsError, require_receipts
from agent.model_keeping import disagreements
from agent.plan_limits import require_within
from agent.profile import LoadedProfile, fits_memory, open_profile
from agent.rounds import declined_rounds
from agent.rows import RowStore
from agent.sensors import Sensors
from agent.settings import AgentSettings, on_board
from agent.status import OF_ANOTHER_VERSION, OTHER_VERSION_REMEDY, OtherStatus, presence_of, read_status
from dpagent.clock import SystemClock
from dpagent.database_file import database_errors
from dpagent.diagnosis import (
    Finding,
    clock,
    entropy,
    fine,
    memory,
    private,
    problem,
    problem_of,
    skipped,
    storage,
    warning,
)
from dpagent.errors import DpagentError, ExitCode, PlanError, StorageError
from dpagent.extras import ONNX_RUNTIME, runtime_remedy
from dpagent.learning.data.opening import list_declared
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.engine_choice import Bench, UnsuitableEngineError
from dpagent.notation import downwards, plain_bound, plain_bounds, upwards
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Plan
from dpagent.protocol.receipts import receipt_place
from dpagent.protocol.signing import Verifier
from dpagent.protocol.task import RoundTask
from dpagent.protocol.topics import Topics
from dpagent.status_file import Presence
from dpagent.storage import disk_errors
from dpagent.transport.diagnosis import BrokerExamination
from dpagent.wording import counted, lasting

_TRAINING_MIB: Final = 160
_IMPORT_S: Final = 60.0
_GOVERNOR_S: Final = 5.0
"""A load is measured in two seconds, and most commands answer in less."""
_SOON: Final = 0.1
"""Share of a lifetime budget below which its owner is warned."""
_ROUNDING: Final = 1e-9
"""By which sums may exceed a lifetime budget, as admission has it: they add up prices in another order."""


def examine(settings: AgentSettings, *, asks_broker: bool = True) -> Iterator[Finding]:
    """Look at a board, from the ground up: machine, profile, engine, ledger, data, broker, plan.

    Args:
        settings: ``agent.yaml``.
        asks_broker: whether to connect. Who runs the broker sees that, as any connection of the agent.
    """
    yield clock()
    yield entropy()
    try:
        loaded = open_profile(settings.profile)
    except DpagentError as error:
        yield problem_of("profile", error)
        return
    yield from misfits(loaded, Board.this())
    settings = on_board(settings, loaded.profile)
    yield memory(_TRAINING_MIB)
    room = LedgerRoom.of(settings.limits, has_tokens=_is_member(settings))
    yield from storage(settings.state_dir, room.missing_bytes(settings.ledger_files.database))
    yield from _running(settings.state_dir)
    yield from governed(settings, Sensors())
    yield from _engine(settings, loaded)
    yield from _ledger(settings)
    yield private(_data(settings))
    yield private(_model(settings))  # Whether it found room tells of the records beside it.
    if not asks_broker:
        yield skipped("broker", "not asked")
        return
    topics = Topics(settings.fleet)
    # A receipt's topic of nobody's: any of them says whether the broker lets a board hear its own.
    own = (topics.receipt(receipt_place(os.urandom(16))),) if _is_member(settings) else ()
    examination = BrokerExamination(
        settings.mqtt,
        reads=(topics.plan, topics.model_chunk(0), topics.receipts, *own),
        writes=(topics.fragments,),
        awaited=(topics.plan,),
    )
    yield from examination.run()
    if examination.is_through:
        yield from _plan(settings, topics, examination.received.get(topics.plan))
    else:
        yield skipped("plan", "not tried: see above")


def misfits(loaded: LoadedProfile, board: Board) -> Iterator[Finding]:
    """Where a profile fits a board, and where not."""
    profile, facts = loaded.profile, loaded.profile.board
    other = "`dpagent profiles detect` names the profile of this board."
    text = f"this system is {board.architecture}"
    if facts.architecture == board.architecture:
        yield fine("architecture", text)
    else:
        yield problem("architecture", f"{text}; profile {loaded.name} is for {facts.architecture}", other)
    text = f"this board has {board.memory_mib:,} MiB"
    if fits_memory(facts, board):
        yield fine("board memory", text)
    else:
        yield problem("board memory", f"{text}; profile {loaded.name} is for {facts.memory_mib:,}", other)
    text = f"this system may use {counted(board.cores, 'core')}"
    if profile.processes <= board.cores:
        yield fine("cores", text)
    else:
        # The agent tries how many of them pay.
        yield warning(
            "cores", f"{text}; processes is {profile.processes}", "Lower it in a profile of your own."
        )
    if not (facts.compatible and board.compatible):
        yield fine("profile", f"{loaded.name}: {profile.description}")
    elif {*facts.compatible} & {*board.compatible}:
        yield fine("profile", f"{loaded.name}; this is {board.model or board.compatible[0]}")
    else:
        name = board.model or board.compatible[0]
        yield warning("profile", f"{loaded.name} is for another board; this is {name}", other)


def _running(state_dir: Path) -> Iterator[Finding]:
    """Whether the agent that runs here is the one that this program knows."""
    try:
        status = read_status(state_dir)
    except DpagentError as error:
        yield problem_of("agent", error)
        return
    if isinstance(status, OtherStatus) and presence_of(status) in (Presence.RUNS, Presence.ELSEWHERE):
        yield warning("agent", OF_ANOTHER_VERSION, OTHER_VERSION_REMEDY)


def governed(settings: AgentSettings, sensors: Sensors) -> Iterator[Finding]:
    """What the governor sees, and whether a round would begin now.

    Args:
        settings: ``agent.yaml``, with the profile's.
        sensors: of the board.
    """
    wanted = settings.governor
    if not wanted.as_dict(only_changed=True):
        yield fine("governor", "trains whenever there is a round: no `governor` in agent.yaml or the profile")
        return
    try:
        require_public_room(wanted, settings.state_dir, settings.data.path, reader=settings.model.reader)
    except DpagentError as error:
        yield problem_of("governor", error)
        return
    governor = Governor(wanted, settings.state_dir, sensors, SystemClock())
    try:
        until = time.monotonic() + _GOVERNOR_S
        while governor.why_not(begins=True) and governor.awaits and time.monotonic() < until:
            time.sleep(governor.due_in_s())
        time.sleep(governor.due_in_s())  # What is known by now counts.
        why_not = governor.why_not(begins=True)
        readings = ", ".join(governor.readings())
    finally:
        governor.stop()
    seen = f" ({readings})" if readings else ""
    if why_not is None:
        found = fine("governor", f"a round would begin now{seen}")
    else:
        found = warning(
            "governor", f"no round would begin now: {why_not}{seen}", "It begins when that is over."
        )
    yield private(found)  # It has what heat and free memory are now.
    if (source := EnergyMeter(sensors.root, SystemClock()).source) is not None:
        yield fine("energy", f"{source} measures what each round takes; `dpagent budget show` has it")
    for absent in governor.absent():
        yield warning("governor", absent, "Take the key out, or let `command` answer.")


def _engine(settings: AgentSettings, loaded: LoadedProfile) -> Iterator[Finding]:
    profile = loaded.profile
    bench = Bench(built_in("digits"), microbatch=profile.microbatch)
    try:
        bench.make("numpy")
    except UnsuitableEngineError as error:
        yield problem_of("engine", error)
    else:
        yield fine("engine", "numpy: a record's numbers do not depend on its neighbours")
    if find_spec(ONNX_RUNTIME) is None:
        if settings.engine == "onnx":
            yield problem("engine", "onnxruntime is not installed", f"Set engine: numpy. {runtime_remedy()}")
        else:
            yield fine(
                "engine", "onnxruntime is not installed, so numpy trains; models with a frozen network, "
                "`dpagent predict`, `serve` and `personalise` do not run here",
            )  # fmt: skip
        return
    if settings.engine == "numpy":
        return
    # In a process of its own: a build for another processor ends it (SIGILL).
    try:
        ended = subprocess.run(
            [sys.executable, "-c", "import dpagent.learning.onnx_session"],
            capture_output=True, timeout=_IMPORT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield problem("engine", f"onnxruntime cannot be tried ({error})", "Set engine: numpy.")
        return
    if ended.returncode:
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
        yield problem(
            "engine", f"importing onnxruntime ends with {how}", "Install another build, or set engine: numpy."
        )
    else:
        yield fine("engine", "onnxruntime can be imported")


def _ledger(settings: AgentSettings) -> Iterator[Finding]:
    files = settings.ledger_files
    try:
        second = read_second_head(files.second_head)
        if not files.database.exists():
            yield problem_of("ledger", no_ledger(files, second))
            return
        if second is None:
            yield problem_of("ledger", no_second_head(files))
            return
        verified = verify(files.state_dir, files.second_head)
        ledger = audit(files.state_dir)
    except DpagentError as error:
        yield problem_of("ledger", error)
        return
    yield fine(
        "ledger", f"{counted(verified.charges, 'charge')}; chain, prices and both heads are as they should be"
    )
    known = {
        entry.record.dataset: entry.record
        for entry in ledger.entries
        if isinstance(entry.record, BudgetChange)
    }
    jobs: dict[str, dict[str, None]] = {}
    for entry in ledger.entries:
        if isinstance(entry.record, Charge):
            jobs.setdefault(entry.record.dataset, {})[entry.record.job] = None
    for account, wanted in settings.lifetime_budgets.items():
        last = next(reversed(jobs.get(account, {})), None)
        job = None if last is None else ledger.accounts.job(account, last)
        reserved = ledger.accounts.reserved(account)
        if ledger.accounts.is_exposed(account):  # No job is taken there any more, in whichever account.
            reserved = Budget(math.inf, reserved.delta)
        last_price = None if job is None else Budget(job.epsilon, job.delta)
        yield _budget(account, wanted, known.get(account), reserved, last_price)
    yield from _declined(settings)


def _budget(
    account: str, wanted: Budget, known: BudgetChange | None, reserved: Budget, last_price: Budget | None
) -> Finding:
    """What is left of an account's lifetime budget.

    Args:
        account: its name in the ledger.
        wanted: the configured budget.
        known: that in the ledger.
        reserved: by all jobs so far.
        last_price: of the last job; None before the first.
    """
    if known is None or wanted.epsilon > known.epsilon or wanted.delta > known.delta:
        have = "none" if known is None else plain_bounds(known.epsilon, known.delta)
        return problem(
            "budget",
            f"the configuration gives {account!r} {plain_bounds(wanted.epsilon, wanted.delta)}; "
            f"the ledger: {have}",
            "If that is meant, run `dpagent budget raise`. Else write what the ledger has.",
            ExitCode.LEDGER,
        )
    if math.isinf(reserved.epsilon):
        return problem(
            "budget",
            f"{account}: nothing is left of {plain_bounds(wanted.epsilon, wanted.delta)}: rounds that "
            "guarantee nothing have been run on these records",
            "Nothing: no larger budget has a job with a guarantee run on them again.",
            ExitCode.LEDGER,
        )
    epsilon, delta = wanted.epsilon - reserved.epsilon, wanted.delta - reserved.delta
    if epsilon <= 0 or delta <= 0:
        return problem(
            "budget",
            f"{account}: nothing is left of {plain_bounds(wanted.epsilon, wanted.delta)}",
            "Nothing, if these data have trained enough. `dpagent budget raise` gives away more privacy.",
            ExitCode.LEDGER,
        )
    text = f"{account}: ε = {downwards(epsilon)} of {plain_bound(wanted.epsilon)} is left"
    if last_price is not None and 0 < last_price.epsilon < math.inf:
        jobs = min(
            int((budget * (1 + _ROUNDING) - others) / price)
            for budget, others, price in (
                (wanted.epsilon, reserved.epsilon, last_price.epsilon),
                (wanted.delta, reserved.delta, last_price.delta),
            )
        )
        text += (
            f", for {counted(jobs, 'job')} like the last one (ε = {upwards(last_price.epsilon)}, "
            f"δ = {plain_bound(last_price.delta)})"
        )
    if epsilon < _SOON * wanted.epsilon:
        return warning("budget", text, "Soon these records train no more: that is what a budget is for.")
    return fine("budget", text)


def _declined(settings: AgentSettings) -> Iterator[Finding]:
    """Why the board sat out rounds of the job that it heard of last."""
    try:
        with closing(open_ledger(settings.state_dir)[0]) as connection, database_errors(settings.state_dir):
            declined = declined_rounds(connection)
    except DpagentError:
        return  # The ledger was read just now.
    if declined:
        last = declined[-1]
        yield warning(
            "rounds", f"round {last.round} of job {last.job[:8]} was declined: {last.reason}",
            "`dpagent budget show` lists all.",
        )  # fmt: skip


def _data(settings: AgentSettings) -> Finding:
    data = settings.data
    try:
        dataset = list_declared(data, growing=True)
    except DpagentError as error:
        return problem_of("data", error)
    number, left_out = len(dataset), dataset.origin.left_out
    text = f"{data.name}: {counted(number, 'record')} in {data.path}"
    remedy = f"`dpagent data check {data.path}` looks at each."
    assert data.max_records is not None  # or they could not be listed
    if number > data.max_records:
        return problem(
            "data", f"{text}, and data.max_records is {data.max_records:,}", "Raise it, or remove records.",
            ExitCode.DATA,
        )  # fmt: skip
    try:
        RowStore(settings.state_dir, data).require_room(dataset.record_bytes)
    except DpagentError as error:
        return problem_of("data", error)
    if not number:
        return warning("data", f"{text}: the board would send noise alone", remedy)
    if left_out:
        return warning("data", f"{text}; left out: {left_out[0]}", remedy)
    return fine("data", text)


def _model(settings: AgentSettings) -> Finding:
    file = settings.model_file
    try:
        with disk_errors(file):
            written_at = file.stat().st_mtime if file.exists() else None
            model = b"" if written_at is None else file.read_bytes()
    except StorageError as error:
        return problem_of("model", error)
    if written_at is None:
        return fine("model", "none yet; it comes when a job is finished")
    if odd := disagreements(model, settings.data):
        return warning("model", odd[0], "Correct agent.yaml, or ask the operator.")
    return fine("model", f"{file}, of {datetime.fromtimestamp(written_at, UTC):%Y-%m-%d %H:%M} UTC")


def _plan(settings: AgentSettings, topics: Topics, payload: bytes | None) -> Iterator[Finding]:
    if payload is None:
        yield warning(
            "plan", f"the broker has none on {topics.plan}",
            f"The coordinator of {settings.fleet} has announced no job yet, or `fleet` is another's name, "
            "or this user may not read the topic.",
        )  # fmt: skip
        return
    try:
        plan = Verifier(settings.coordinator_key, settings.fleet).open(payload, Plan, "plan")
    except MessageError as error:
        if error.reason == "bad signature":
            text, remedy = (
                f"that on {topics.plan} is signed by another key than coordinator_key",
                "Set coordinator_key to what `dpagent coordinator key` prints there.",
            )
        else:
            text, remedy = f"that on {topics.plan}: {error}", "Install the coordinator's version of dpagent."
        yield problem("plan", text, remedy)
        return
    name = f"job {plan.job.hex()[:8]}"
    if plan.state == "finished":
        yield fine("plan", f"{name} is finished; the board waits for the next")
        return
    late_s = time.time() - plan.deadline
    text = f"round {plan.round} of {name}, {plan.method}"
    if late_s > 0:
        yield warning(
            "plan", f"{text}, was to end {lasting(late_s)} ago",
            "Is the coordinator running? Is this machine's clock right?",
        )  # fmt: skip
    yield _would_run(plan, text, settings.limits, is_member=_is_member(settings))


def _is_member(settings: AgentSettings) -> bool:
    """Whether the board has a certificate."""
    return settings.mqtt.cert_file is not None


def _would_run(plan: Plan, text: str, limits: LimitSettings, *, is_member: bool) -> Finding:
    try:
        require_receipts(plan, is_member=is_member)
        require_within(RoundTask.of(plan), limits)
    except (BeyondLimitError, UnwantedReceiptsError, PlanError) as error:
        return problem("plan", f"{text}: this board declines: {error}", "")
    return fine("plan", f"{text}, is within this board's limits")

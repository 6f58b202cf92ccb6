"""The broker looks at what each connection sends, to learn which devices take part in a round.

Claim: with ``limits.dummy_traffic``, a device that declines a round sends as many messages as one that takes
    part, of the same size, to the same topic, in the same window, and as seldom again; what the broker writes
    to its log of the two connections differs in nothing but the order of random times.
Parameters: digits, 5 fragments, 2 rounds; one device that trains and one whose job does not fit its budget.
    Real coordinator, real agents, real Mosquitto with its whole log. Then 100 rounds on a clock that stands
    still, for the times.

Power: on the code of before the test fails always: the device that declines is silent. The counts, sizes and
    windows of the new code have no randomness; the two-sample test of the times fails by chance once in 10⁶,
    and found a window that is shifted or stretched by a third in all of 2,000 tries.

Outcome: nothing tells the two apart. What stays: the broker sees that *some* device sits out, since the round
    then stays open until its deadline; the coordinator counts dummies, and knows who sends them if it is the
    broker too.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from brokers import PATIENCE_S, Broker, wait_until
from clocks import MovableClock
from daemons import agent_thread, attentive_daemons, coordinator_thread
from devices import PERIOD_S, Device, Mortal, Slow, open_device
from fleets import make_plan, write_agent
from observers import Observer
from scipy import stats
from test_time_tells_no_training import OTHER_JOB, SLOT_S, plan
from watched_fleets import WatchedFleet, charges

from agent.pricing import Pricing, Verdict
from agent.pricing_messages import PriceQuestion

ROUNDS, LEVEL = 2, 1e-6
TIMES = {"compute_slot_s": 0.5, "jitter_window_s": 0.5, "deadline_s": 10.0}
SITS_OUT: dict[str, Any] = {"maximum_job_epsilon": 1e-6}


@pytest.fixture
def _attentive() -> Iterator[None]:
    with attentive_daemons():
        yield


def seen_by(broker: Broker, fleet: str) -> dict[str, Counter[str]]:
    """The lines in the broker's log of each client of a fleet, without its name and numbers of messages.

    Of the ends of subscriptions it counts topics: two chunks that come in one packet end theirs in one.
    """
    clients: dict[str, Counter[str]] = {}
    for line in (broker.directory / "broker.log").read_text(errors="replace").splitlines():
        if found := re.search(r"(Received|Sending) \w+ (?:from|to) (\w{20})\b(.*)", line):
            what = re.sub(r"\bm\d+\b|Mid: \d+", "", line.split(": ", 1)[1].replace(found[2], "DEVICE"))
            if not re.search("PING|UNSUB", what):
                clients.setdefault(found[2], Counter())[what] += 1
        elif found := re.search(r": (\w{20}) (?:1 )?dpagent/", line):
            clients.setdefault(found[1], Counter())[line.split(": ", 1)[1].replace(found[1], "DEVICE")] += 1
    return clients


@pytest.mark.usefixtures("_attentive")
def test_the_brokers_log_does_not_tell_who_takes_part(tmp_path: Path, new_broker: Any) -> None:
    for attempt in range(3):
        first, second = logs_of_two(tmp_path / str(attempt), new_broker())
        if asked(first) == asked(second):
            break
        # A machine so busy that chunks came late, and one of them asked for them again.
    assert first == second


def asked(log: Counter[str]) -> int:
    """How often a client has asked for retained messages."""
    return sum(count for line, count in log.items() if "Received SUBSCRIBE" in line)


def have_all_they_asked_for(broker: Broker) -> bool:
    """Whether the last thing that each device did with its subscriptions was to end some."""
    log = (broker.directory / "broker.log").read_text(errors="replace")
    last = {name: kind for kind, name in re.findall(r"Received (\w*SUBSCRIBE) from (\w{20})\b", log)}
    return set(last.values()) == {"UNSUBSCRIBE"}


def logs_of_two(directory: Path, broker: Broker) -> list[Counter[str]]:
    """What a broker sees of a device that takes part in all rounds, and of one that sits all out."""
    with (broker.directory / "mosquitto.conf").open("a") as configuration:
        configuration.write("log_type all\n")
    broker.start()
    fleet = WatchedFleet(directory, broker, rounds=ROUNDS, round=TIMES)
    files = [
        write_agent(
            directory / f"device-{number}", broker, fleet.public_key, number, fleet=fleet.name,
            limits={"dummy_traffic": True, **changes},
        )
        for number, changes in enumerate(({}, SITS_OUT))
    ]  # fmt: skip
    clock = MovableClock()
    with (
        Observer(broker, fleet.name) as observer,
        agent_thread(files[0], clock),
        agent_thread(files[1], clock),
    ):
        # On a busy machine a start takes longer than a round on this clock, which would come too late.
        wait_until(lambda: list(map(asked, seen_by(broker, fleet.name).values())) == [1, 1], "both devices")
        with coordinator_thread(fleet.file, clock) as coordinator:
            wait_until(lambda: charges(files[0]) == 1, "a round that is prepared")
            clock.advance_until(lambda: not coordinator.is_running, "the end of the job", 0.05)
            wait_until(lambda: fleet.is_farewell(observer.plans[-1]), "the farewell")
            wait_until(lambda: have_all_they_asked_for(broker), "the last model")
    assert [charges(file) for file in files] == [ROUNDS, 0]
    assert [record.fragments for record in fleet.rounds()] == [fleet.blocks] * ROUNDS
    assert fleet.counters() == {"dummies": ROUNDS * fleet.blocks}
    logs = list(seen_by(broker, fleet.name).values())
    for log in logs:
        fragments = [count for line, count in log.items() if "/fragments'" in line]
        assert fragments == [ROUNDS * fleet.blocks], "all of one size, each once"
    return logs


def times_of(
    directory: Path, rounds: int, deciding_s: float, jitter_s: float, longest_s: float = 0.0, **limits: Any
) -> list[float]:
    """When the messages of a device leave, from the time of each plan."""
    with open_device(directory, limits={"dummy_traffic": True, **limits}) as device:
        device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
        device.worker.longest_s = longest_s
        device.give()
        admit = device.cycle._questions.price

        def slow_to_decide(*arguments: Any) -> Any:
            device.clock.advance(deciding_s)
            return admit(*arguments)

        device.cycle._questions.price = slow_to_decide  # type: ignore[method-assign]
        began_at, found = device.clock.monotonic(), []
        for number in range(1, rounds + 1):
            # Plans come at various times between two points of the grid.
            came_at = began_at + PERIOD_S * (200 * number + number / rounds)
            device.clock.advance(came_at - device.clock.monotonic())
            device.take_plan(
                make_plan(
                    round=number, compute_slot_s=8 * PERIOD_S, jitter_window_s=jitter_s,
                    mechanism={"noise_multipliers": [40.0] * rounds},
                )
            )  # fmt: skip
            for _ in range(120):
                device.clock.advance(PERIOD_S / 4)
                device.cycle.advance()
            found += [time - came_at for time in due_times(device)]
        return found


class SlowToStart:
    """Prices of a board on which programs take so long to start; the work of a price is beside that.

    Args:
        device: whose prices they become.
        seconds: until a process has started.
    """

    def __init__(self, device: Device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self._pricing = Pricing()
        device.cycle._questions._prices = self

    def ask(self, question: PriceQuestion) -> Future[Verdict]:
        began_at = time.monotonic()
        verdict = self._pricing.ask(question).result(PATIENCE_S)
        if verdict.spent_s:  # It was not known from before.
            assert 0 < verdict.started_s < time.monotonic() - began_at
            self._device.clock.advance(self._seconds)
            verdict = verdict._replace(started_s=self._seconds, spent_s=0.0)
        answer: Future[Verdict] = Future()
        answer.set_result(verdict)
        return answer

    def end(self) -> None:
        self._pricing.end()

    def tend(self) -> None:
        pass


def slots_begin(directory: Path, starting_s: float, longest_s: float, **limits: Any) -> list[float]:
    """When the slots of two rounds begin, from the time of each plan, and those of the second one again, from
    when it comes after a power cut."""
    found = []
    for numbers in ((1, 2), (2,)):
        with open_device(directory, limits={"dummy_traffic": True, **limits}) as device:
            device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
            device.worker.longest_s = longest_s
            SlowToStart(device, starting_s)
            device.give()
            for number in numbers:
                came_at = device.clock.monotonic()
                device.take_plan(plan(round=number, mechanism={"noise_multipliers": [40.0] * 2}))
                until = came_at + (20 if number < max(numbers) or numbers == (2,) else 2) * SLOT_S
                while device.clock.monotonic() < until:
                    device.clock.advance(PERIOD_S / 4)
                    device.cycle.advance()
                found.append(device.announcements._slots.begins_at - came_at)
    return found


@pytest.mark.parametrize("starting", [0.2, 2.6], ids=["soon", "late"])
def test_how_long_the_pricing_process_takes_to_start_does_not_tell_who_takes_part(
    tmp_path: Path, starting: float
) -> None:
    """Before, a device that took part waited for it in each round, and after a power cut, and one that sat
    out began by so much sooner: on a board where programs start in seconds, by a period of its grid or more.
    """
    longest_s = 3.5 * SLOT_S
    takes_part = slots_begin(tmp_path / "a", starting * PERIOD_S, longest_s)
    sits_out = slots_begin(tmp_path / "b", starting * PERIOD_S, longest_s, **SITS_OUT)
    assert sits_out == pytest.approx(takes_part, abs=1e-9)


def due_times(device: Device) -> list[float]:
    rows = device.state.connection.execute("SELECT due_at FROM times")
    return [row[0] for row in rows]


@pytest.mark.parametrize("deciding_s", [1e-3, 5 * PERIOD_S])
@pytest.mark.parametrize("slots", [1, 3])
def test_the_window_opens_at_the_same_time_however_long_declining_and_training_take(
    tmp_path: Path, deciding_s: float, slots: int
) -> None:
    """No jitter, a pinned grid: times are compared exactly. A job that does not fit is priced again and
    again, one that runs is priced once. Before, dummies left after one slot, and an update after as many as
    its training takes."""
    longest_s = (slots - 0.5) * 8 * PERIOD_S
    takes_part = times_of(tmp_path / "a", 5, 1e-3, 0.0, longest_s)
    sits_out = times_of(tmp_path / "b", 5, deciding_s, 0.0, longest_s, **SITS_OUT)
    assert sits_out == pytest.approx(takes_part, abs=1e-9)


def test_the_times_within_the_window_have_one_distribution(tmp_path: Path) -> None:
    takes_part = times_of(tmp_path / "a", 50, 1e-3, 1.0)
    sits_out = times_of(tmp_path / "b", 50, 1e-3, 1.0, **SITS_OUT)
    assert len(takes_part) == len(sits_out) == 500
    assert stats.ks_2samp(takes_part, sits_out).pvalue > LEVEL


def left_at(directory: Path, after: float, kind: str, slots: int, **limits: Any) -> list[float]:
    """When the messages of a round leave, if the broker sends signed plans that it has, once more."""
    with open_device(directory, limits={"dummy_traffic": True, **limits}) as device:
        device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
        longest_s = (slots - 0.5) * SLOT_S
        slow = Slow(device, longest_s / 2, longest_s)
        device.give()
        began_at = device.clock.monotonic()
        device.take_plan(plan())
        slow.pass_time(after * SLOT_S)
        match kind:
            case "again":
                pass
            case "an old one":
                device.take_plan(plan(job=OTHER_JOB, deadline=4_000.0))
                slow.pass_time(PERIOD_S)
            case "an old one for long":
                device.take_plan(plan(job=OTHER_JOB, deadline=4_000.0))
                slow.pass_time(6 * SLOT_S)
            case "another in time":
                device.take_plan(plan(job=OTHER_JOB, delta=1e-3))  # None can take part in it.
                slow.pass_time(6 * SLOT_S)
            case "an end":
                device.take_plan(plan(job=OTHER_JOB, state="finished"))
                slow.pass_time(PERIOD_S)
        device.take_plan(plan(deadline=plan().deadline + 1.0) if kind == "later" else plan())
        device.give()
        slow.pass_time(8 * SLOT_S)
        rows = device.state.connection.execute(
            "SELECT DISTINCT due_at FROM times JOIN fragments USING (digest) WHERE job = ?",
            (plan().job.hex(),),
        )
        return [float(row[0]) - began_at for row in rows]


@pytest.mark.parametrize(
    "kind", ["again", "later", "an old one", "an old one for long", "another in time", "an end"]
)
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("after", [0.6, 2.6])
def test_plans_that_the_broker_sends_again_do_not_tell_who_takes_part(
    tmp_path: Path, after: float, slots: int, kind: str
) -> None:
    """Before, dummies left slots sooner or later than an update, or not at all: a plan of another job that
    was declined took them away, and made a device that trained begin again. Now one for which there still is
    time takes away what both have still to send."""
    takes_part = left_at(tmp_path / "a", after, kind, slots)
    sits_out = left_at(tmp_path / "b", after, kind, slots, **SITS_OUT)
    assert len(takes_part) == (0 if kind == "another in time" else 1)
    assert sits_out == pytest.approx(takes_part, abs=1e-9)


def left_with_failures(
    directory: Path, prepares: int, updates: int, again: str, **limits: Any
) -> list[float]:
    """When the messages of a round leave, if training ends at the first questions of each kind."""
    with open_device(directory, limits={"dummy_traffic": True, **limits}) as device:
        device.cycle._publisher._epoch = device.clock.monotonic() - PERIOD_S / 3
        slow = Slow(device, SLOT_S / 2, 1.5 * SLOT_S)
        Mortal(device, prepares=prepares, updates=updates)
        device.give()
        began_at = device.clock.monotonic()
        # By the time of the second attempt it would be too late for a device that had still to decide.
        soon = device.clock.unix() + 3 * SLOT_S + 1.0
        device.take_plan(plan(deadline=soon))
        for _ in range(4):
            slow.pass_time(10.0)
            if again == "again":
                device.take_plan(plan(deadline=soon))
        rows = device.state.connection.execute("SELECT DISTINCT due_at FROM times")
        return [float(row[0]) - began_at for row in rows]


@pytest.mark.parametrize("again", ["once", "again"])
@pytest.mark.parametrize(("prepares", "updates"), [(1, 0), (0, 1), (0, 2), (0, 3)])
def test_ending_the_training_process_does_not_tell_who_takes_part(
    tmp_path: Path, prepares: int, updates: int, again: str
) -> None:
    """Before, a device that sat out needed none: dummies left after 3.5 s, and an update after 31."""
    sits_out = left_with_failures(tmp_path / "b", prepares, updates, again, **SITS_OUT)
    takes_part = left_with_failures(tmp_path / "a", prepares, updates, again)
    assert len(takes_part) == 1
    assert sits_out == pytest.approx(takes_part, abs=1e-9)

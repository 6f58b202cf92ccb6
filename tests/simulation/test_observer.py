"""A look at a run from outside: what its devices have still to send, and which take no part."""

from __future__ import annotations

from pathlib import Path

from ledgers import charge_rounds, open_state

from simulation.layout import Layout
from simulation.observer import Observer


def test_what_is_in_flight_and_who_declined_is_seen_while_the_agents_run(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for number in (1, 2):
        layout.agent_state(number).mkdir(parents=True)
    one, two = open_state(layout.agent_state(1)), open_state(layout.agent_state(2))
    observer = Observer(layout, devices=3)  # The third has not started.
    try:
        charge_rounds(one, 1)
        job = (b"j" * 16).hex()
        two.offer(job, 1, bytes(32), 0.0)
        two.decline(job, 1, "no budget is left", 0.0)
        glimpse = observer.glimpse()
        assert (glimpse.in_flight, glimpse.declined) == (3, 1)
        assert glimpse.reason == "device 2: no budget is left"
        assert glimpse.epsilon_spent > 0
        one.expire_job(job, 0.0)
        assert observer.glimpse().in_flight == 0
    finally:
        observer.close()
        one.close()
        two.close()

"""The coordinator's publications at a real broker."""

from __future__ import annotations

from brokers import Broker, wait_until
from fleets import make_plan
from floods import publish_all

from coordinator.announcer import Announcer
from dpagent.clock import SystemClock
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.topics import Topics
from dpagent.transport.connection import WINDOW
from dpagent.transport.events import Received

FLEET = "farewell"


def test_fragments_that_come_during_a_farewell_do_not_stop_those_of_the_next_job(mosquitto: Broker) -> None:
    """A broker sends so many messages as it has no acknowledgement for, and then no other."""
    topics = Topics(FLEET)
    with mosquitto.session(f"coordinator-{FLEET}", topics.fragments, persistent=True) as session:
        wait_until(lambda: session.next_event(0.1) is None and session.connected, "the connection")
        announcer = Announcer(session, Signer(new_signing_secret(), FLEET), topics, SystemClock())
        publish_all(mosquitto, topics.fragments, [b"of the job that ends"] * 2 * WINDOW)
        assert announcer.say_goodbye(make_plan(fleet=FLEET, state="finished"), {})
        publish_all(mosquitto, topics.fragments, [b"of the next job"])

        def arrives() -> bool:
            event = session.next_event(0.1)
            if isinstance(event, Received):
                session.acknowledge([event])
            return isinstance(event, Received) and event.payload == b"of the next job"

        wait_until(arrives, "a fragment of the next job")

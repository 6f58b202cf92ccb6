"""The MQTT topic: requests of the board's programs that speak MQTT, over a broker on the board.

Who runs the broker, and everyone that it lets read the topics, sees inputs and answers. So the broker of the
fleet is refused unless the owner says otherwise, and no request over a topic names a file of the board.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Final

from agent.other_brokers import are_one
from agent.serving.answers import Answers
from agent.serving.lines import error_line
from agent.settings import AgentSettings
from dpagent.errors import BrokerError, ConfigurationError, DpagentError
from dpagent.transport.events import Connected, Disconnected, Received
from dpagent.transport.session import MqttSession, Subscription
from dpagent.wording import counted

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.2


def require_another_broker(settings: AgentSettings) -> None:
    """Refuse the fleet's broker, by whatever name and port, unless the owner has said that it may be asked
    over. The board's own model is not asked over it at all: the fleet's operator could ask it as well. A name
    may lead there only later, so this is asked at each connection, too.

    Raises:
        ConfigurationError: it is the fleet's.
    """
    asked, fleet, serve = settings.serve.mqtt, settings.mqtt, settings.serve
    if asked is None or not are_one(asked, fleet):
        return
    if serve.model == "personal":
        raise ConfigurationError(
            f"serve.model is personal, and serve.mqtt.url is {asked.url}, on the host of the fleet's broker"
            f" ({fleet.url}): who runs it could ask the board's own model, which reveals its records. "
            "Take a broker on this board, or serve.model: latest."
        )
    if not serve.fleet_broker:
        raise ConfigurationError(
            f"serve.mqtt.url is {asked.url}, the broker of the fleet ({fleet.url}), or one on its host: who "
            "runs it would see inputs and answers of this board. Take a broker on this board, or set "
            "serve.fleet_broker: true."
        )


class TopicServer:
    """Answers at a topic, in a thread, until it is closed.

    Args:
        settings: of the board, with ``serve.mqtt``.
        answers: of the model.

    Raises:
        ConfigurationError: a file of the credentials cannot be read.
    """

    def __init__(self, settings: AgentSettings, answers: Answers) -> None:
        assert settings.serve.mqtt is not None
        self._settings = settings
        self._url, self._topic = settings.serve.mqtt.url, settings.serve.topic
        self._longest = settings.serve.maximum_request_mib << 20
        self._answers = answers
        self._session = MqttSession(
            settings.serve.mqtt,
            client_id=None,
            subscriptions=[Subscription(f"{self._topic}/ask")],
            persistent=False,
        )
        self._stop = threading.Event()
        self.failure: DpagentError | None = None
        """Why it has ended by itself."""
        self._thread = threading.Thread(target=self._serve, name="topic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests; the one that is being answered is."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> TopicServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            with self._session:
                while not self._stop.is_set():
                    match self._session.next_event(_LOOK_S):
                        case Connected():
                            # At the start, a board without a network knows no name's addresses.
                            require_another_broker(self._settings)
                            log.info("connected to %s, answers at %s/answer", self._url, self._topic)
                        case Disconnected(reason):
                            log.warning("%s: %s; reconnecting", self._url, reason)
                        case Received(_, payload):
                            self._session.publish(f"{self._topic}/answer", self._answer(payload))
                        case _:
                            pass
        except (BrokerError, ConfigurationError) as error:
            self.failure = error

    def _answer(self, payload: bytes) -> bytes:
        if len(payload) > self._longest:
            return error_line(
                f"The request has {counted(len(payload), 'byte')}; expected at most {self._longest:,}."
            )
        return self._answers.answer(payload, reads_files=False)

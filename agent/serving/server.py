"""The server of ``dpagent serve``: a socket, perhaps a topic, and the latest model behind both."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Final

from agent.latest_model import personal_of
from agent.serving.answers import Answers
from agent.serving.socket_server import SocketServer
from agent.serving.topic import TopicServer, require_another_broker
from agent.settings import AgentSettings
from dpagent.service_manager import ServiceManager

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
_OF_ITS_OWN: Final = "answers with the board's own model, if there is one"
"""For the service manager, which tells every user of the board: whether there is one, and which, follows from
the board's records."""


def serve(settings: AgentSettings, stop: threading.Event) -> None:
    """Answer until ``stop`` is set.

    Args:
        settings: ``agent.yaml``.
        stop: ends it; what is being answered then is.

    Raises:
        StateInUseError: another server listens at the socket.
        ConfigurationError, StorageError: it cannot start; the text gives the reason. Or the name of the
            topic's broker leads to the fleet's by now.
        BrokerError: the broker of the topic refuses us.
    """
    require_another_broker(settings)
    wanted, manager = settings.serve, ServiceManager()
    path = wanted.socket_in(settings.state_dir)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as first:
        first.callback(stop.set)  # Whatever ends it, no request waits for a model from then on.
        file = settings.model_file if wanted.model == "latest" else personal_of(settings.model_file)
        answers = Answers(file, wanted.timeout_s, stop, is_of_records=wanted.model == "personal")
        held.callback(answers.close)
        longest = wanted.maximum_request_mib << 20
        held.enter_context(SocketServer(path, int(wanted.mode, 8), answers, longest))
        topic = held.enter_context(TopicServer(settings, answers)) if wanted.mqtt is not None else None
        answers.begin()
        log.info("listening at %s: %s", path, answers.status)
        manager.ready()
        while not stop.wait(_LOOK_S):
            manager.alive()
            answers.refresh()
            manager.status(answers.status if wanted.model == "latest" else _OF_ITS_OWN)
            if topic is not None and topic.failure is not None:
                raise topic.failure
        manager.stopping()

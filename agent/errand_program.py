"""What the programs that :mod:`agent.errand` starts have in common: a question, its answer, the end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from agent.channel import Channel
from agent.child_log import SaidOver
from agent.errand import Answer, ErrandError, Refusal
from agent.priority import ERRANDS_END_BEFORE, end_before_parent
from dpagent.errors import DpagentError, said

log = logging.getLogger(__name__)

_KNOWN: Final = ("agent.declined", "agent.limits", "dpagent.errors")
"""Where the errors are defined that the agent knows; of another, it gets the first base that is."""
_NO_MEMORY: Final = "there is no memory for the answer on this board now"


def answer(answered: Callable[[Any], object]) -> None:
    """Answer the questions that come over the descriptor which the command line names, until it closes.

    Args:
        answered: the answer to one.
    """
    # A terminal's Ctrl-C and a service manager's SIGTERM go to all programs; the agent ends this one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Whether there is an answer follows from no record: so it ends after a look at the data.
    end_before_parent(ERRANDS_END_BEFORE)
    channel = Channel(int(sys.argv[1]))
    questions: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=[channel, questions], daemon=True).start()
    way, before_s = SaidOver(channel), 0.0
    logging.basicConfig(handlers=[way], format="%(message)s")
    while True:
        if (asked := questions.get()) is None:
            way.send(Refusal(ErrandError, _NO_MEMORY, time.process_time() - before_s))
            continue
        level, question = asked
        logging.getLogger().setLevel(level)
        way.send(outcome(answered, question, before_s))
        before_s = time.process_time()


def outcome(answered: Callable[[Any], object], question: Any, before_s: float = 0.0) -> Answer | Refusal:
    """The answer to a question, or the reason why there is none.

    Args:
        answered: the answer to it.
        question: to be answered.
        before_s: processor time that the process had taken before, in seconds.
    """
    asked_at = time.monotonic()
    kind: type[DpagentError] = DpagentError
    try:
        value = answered(question)
        return Answer(value, time.process_time() - before_s, asked_at)
    except DpagentError as error:
        kind = next(each for each in type(error).__mro__ if each.__module__ in _KNOWN)
        reason = str(error)
    except MemoryError:  # There may be an answer when others have given some back.
        kind, reason = ErrandError, _NO_MEMORY
    except Exception as error:
        log.debug("the details", exc_info=True)
        reason = said(error)
    return Refusal(kind, reason, time.process_time() - before_s, asked_at)


def _hear(channel: Channel, questions: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
    """Take what is asked; the process ends with the agent, or where a question cannot be understood."""
    while True:
        try:
            questions.put(channel.receive())
        except MemoryError:
            questions.put(None)
        except (EOFError, OSError):
            os._exit(0)
        except Exception:  # noqa: BLE001 - nobody else could end the process, and the agent would wait
            os._exit(1)

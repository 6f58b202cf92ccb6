"""What the agent's short processes answer, answered in the tests' process, by what those processes run.

Rounds in tests would else wait for programs to start, and clocks that tests move would run away meanwhile.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import agent.daemon
from agent.data_form import DataForm
from agent.data_settings import DataSettings
from agent.errand_program import outcome
from agent.opening import OpenQuestion
from agent.opening_program import opened
from agent.pricing import Verdict, verdict_of
from agent.pricing_messages import PriceQuestion
from agent.pricing_program import answered
from agent.replay import replay


class PricedHere:
    """Prices in the tests' process, before it answers, as the pricing process does."""

    def ask(self, question: PriceQuestion) -> Future[Verdict]:
        answer: Future[Verdict] = Future()
        said = outcome(answered, question)
        # Processor time is what the test says.
        answer.set_result(verdict_of(said)._replace(spent_s=0.0))
        return answer

    def end(self) -> None:
        pass

    def tend(self) -> None:
        pass


class OpenedHere:
    """Replays ledgers, and opens records, in the tests' process."""

    replay = staticmethod(replay)

    def form(self, settings: DataSettings, state_dir: Path) -> DataForm:
        return opened(OpenQuestion(settings, state_dir))

    def end(self) -> None:
        pass


def answer_here() -> None:
    """Let agents that are made in this process, from now on, start no short processes."""

    for name, here in (
        ("Opening", OpenedHere),
        ("Pricing", lambda stays_s: PricedHere()),
    ):  # fmt: skip
        setattr(agent.daemon, name, here)

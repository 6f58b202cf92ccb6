"""The latest model's file, written in the tests' process: for tests in which writing it fails, or waits."""

from __future__ import annotations

import pytest

from agent.latest_model import KeepQuestion, Kept
from agent.model_keeping import kept


def kept_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be written here from now on, by what that process runs."""

    class Here:
        process = None

        def __init__(self, program: str) -> None:
            assert program == "agent.model_keeping"

        def wait(self, question: KeepQuestion) -> Kept:
            return kept(question)

        def end(self) -> None:
            pass

    monkeypatch.setattr("agent.latest_model.Errand", Here)

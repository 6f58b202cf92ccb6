"""The latest model's file, written in the tests' process: for tests in which writing it fails, or waits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from brokers import PATIENCE_S

import agent.model_keeping
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


def written_once(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written until this is set."""
    goes_on, original = threading.Event(), agent.model_keeping.write_atomically

    def write(path: Path, data: bytes) -> None:
        goes_on.wait(PATIENCE_S)
        original(path, data)

    monkeypatch.setattr("agent.model_keeping.write_atomically", write)
    return goes_on

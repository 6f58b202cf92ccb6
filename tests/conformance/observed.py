"""What the suite saw on each broker: the records behind the table of docs/brokers.md.

``RECORD_BROKERS=1 make test-brokers`` writes them; otherwise each observation has to be the one on record.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from coordinator.brokers.registry import BROKERS

RECORDS: Final = Path(__file__).parents[2] / "docs" / "brokers"
_RECORDS_NOW: Final = bool(os.environ.get("RECORD_BROKERS"))


def version_of(software: str) -> str:
    """Of the broker that the suite starts."""
    if software == "amqtt":
        return importlib.metadata.version("amqtt")
    program = BROKERS[software].find()
    assert program is not None
    if software == "rabbitmq":
        (folder,) = Path(program).parents[1].glob("lib/rabbitmq_server-*")
        return folder.name.removeprefix("rabbitmq_server-")
    option = "-h" if software == "mosquitto" else "--version"
    said = subprocess.run([program, option], capture_output=True, text=True, timeout=30, check=False).stdout
    found = re.search(r"\d+\.\d+\.\d+", said)
    assert found is not None, said
    return found.group()


class Observations:
    """Of one broker, of one version."""

    def __init__(self, software: str) -> None:
        self.version = version_of(software)
        self._file = RECORDS / f"{software}-{self.version}.json"
        self._software = software

    def note(self, question: str, answer: str) -> None:
        """Record an answer, or compare it with the one on record."""
        known = self._known()
        if _RECORDS_NOW:
            answers = {**known.get("answers", {}), question: answer}
            record = {"software": self._software, "version": self.version, "answers": answers}
            RECORDS.mkdir(exist_ok=True)
            self._file.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            return
        if not known:
            pytest.skip(
                f"nothing is on record of {self._software} {self.version}: RECORD_BROKERS=1 records it"
            )
        assert answer == known["answers"].get(question), f"{self._software} {self.version}: {question}"

    def _known(self) -> dict[str, Any]:
        return json.loads(self._file.read_text()) if self._file.exists() else {}

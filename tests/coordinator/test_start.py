"""What a coordinator says and refuses before it holds anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleets import write_fleet

from coordinator.daemon import Coordinator
from coordinator.settings import load_fleet_settings
from dpagent.errors import DataError


@pytest.mark.parametrize(("delta", "is_told"), [(1e-4, False), (0.01, True), (0.5, True)])
def test_a_delta_that_guarantees_little_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, delta: float, is_told: bool
) -> None:
    file = write_fleet(
        tmp_path, None, privacy={"delta": delta}, mqtt={"url": "mqtt://127.0.0.1:1"},
        test_data={"path": "missing.npz"},
    )  # fmt: skip
    with pytest.raises(DataError, match=r"missing\.npz"):
        Coordinator(load_fleet_settings(file))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [sentence.startswith(f"δ = {delta:g} ") for sentence in told] == [True] * is_told

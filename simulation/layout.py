"""Where the files of a simulated fleet are.

Every device gets a directory of its own with its data, its ``agent.yaml`` and its state, as
it would on a board of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.settings import FIRST_JOB


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything of a run is."""

    root: Path

    @property
    def fleet_file(self) -> Path:
        """The coordinator's configuration."""
        return self.root / "coordinator" / "fleet.yaml"

    @property
    def model_file(self) -> Path:
        """The architecture, where it is no built-in one."""
        return self.root / "coordinator" / "model.yaml"

    @property
    def network_file(self) -> Path:
        """The frozen network that the model begins with, if it does."""
        return self.root / "coordinator" / "frozen-network.onnx"

    @property
    def coordinator_state(self) -> Path:
        """The coordinator's state directory."""
        return self.root / "coordinator" / "state"

    @property
    def coordinator_keys(self) -> Path:
        """The directory of the coordinator's keys."""
        return self.root / "coordinator" / "keys"

    @property
    def mixer_file(self) -> Path:
        """The mixer's configuration."""
        return self.root / "mixer" / "mixer.yaml"

    @property
    def trained_model(self) -> Path:
        """The model of the fleet's job."""
        return self.coordinator_state / "jobs" / FIRST_JOB / "model.onnx"

    @property
    def test_file(self) -> Path:
        """Public test data."""
        return self.root / "coordinator" / "test.npz"

    @property
    def baseline_file(self) -> Path:
        """Accuracies of the run without noise."""
        return self.root / "baseline.json"

    @property
    def logs(self) -> Path:
        """One log a program."""
        return self.root / "logs"

    def device(self, number: int) -> Path:
        """The directory of device ``number``, from 1."""
        return self.root / f"device-{number:03d}"

    def agent_file(self, number: int) -> Path:
        """A device's configuration."""
        return self.device(number) / "agent.yaml"

    def agent_state(self, number: int) -> Path:
        """A device's state directory, with its ledger."""
        return self.device(number) / "state"

    def shard_file(self, number: int) -> Path:
        """A device's data."""
        return self.device(number) / "data.npz"

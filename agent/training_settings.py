"""What training needs to know of ``agent.yaml`` and of the board's profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.data_settings import DataSettings


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of training on this board.

    Attributes:
        data: the records, declared.
        state_dir: the agent's.
        engine: as ``engine`` of ``agent.yaml``.
        trusted_graphs: SHA-256 of ONNX files that the device's owner allows.
        processor_share: part of the time, in (0, 1], in which training runs.
        microbatch, processes, engine_memory_mib, niceness: as of the profile.
    """

    data: DataSettings
    state_dir: Path
    engine: Literal["auto", "numpy", "onnx"]
    trusted_graphs: tuple[str, ...]
    processor_share: float
    microbatch: int
    processes: int
    engine_memory_mib: int | None
    niceness: int

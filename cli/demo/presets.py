"""What the demo trains, by data set; what these settings lead to is measured in docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DatasetName(StrEnum):
    """Data that the demo can split over devices."""

    DIGITS = "digits"
    MNIST = "mnist"


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of one data set."""

    model: str
    devices: int
    rounds: int
    epsilon: float
    sampling_rate: float
    clip_norm: float
    learning_rate: float
    momentum: float
    compute_slot_s: float
    jitter_window_s: float


PRESETS = {
    DatasetName.DIGITS: Preset(
        model="digits", devices=5, rounds=40, epsilon=4.0, sampling_rate=0.5, clip_norm=0.5,
        learning_rate=2.0, momentum=0.5, compute_slot_s=0.3, jitter_window_s=0.4,
    ),
    DatasetName.MNIST: Preset(
        model="mnist-cnn", devices=10, rounds=100, epsilon=2.0, sampling_rate=0.1, clip_norm=1.0,
        learning_rate=2.4, momentum=0.5, compute_slot_s=1.0, jitter_window_s=0.5,
    ),
}  # fmt: skip

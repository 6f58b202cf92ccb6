"""M3's figures 3 and 5: MNIST with all records in one place, by ε, lot, clip norm, step and width.

Abadi et al. (CCS 2016) train with all 60,000 records in one trusted place, on 60 directions of a private PCA
and 1,000 hidden units, with lots of 600, and vary one setting at a time. Here one device has all records and
trains the 26,010-parameter CNN from scratch, without a projection, for ten epochs (1,000 rounds with a lot
of 600) with the product's own noise, accounting and wire, at ε = 2 and δ = 1e-5; then one setting at a time
differs. Where the clip norm differs, so does the learning rate, so that a step is as long. Hidden units are
those of a dense network on the pixels (784, h, 10).

Accuracies are means over two seeds ± their standard error. The published values beside them are those that
the paper's text gives; their network, their number of epochs and their accountant (the moments accountant,
whose ε is larger for the same noise) are others, so they are a reference and no fair comparison. The picture
is `docs/methods/dp-sgd-mnist.svg`.

Limits: two seeds. The settings were chosen with the test set in view. The data are not part of the project:
without the four IDX files in ``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR``
names, this benchmark is skipped.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.figures import STANDARD_ERROR, Figure
from benchmarks.plots import METHODS, Panel, Point, draw
from benchmarks.simulation import mean_and_error, mnist, over_seeds
from dpagent.learning.model_files import find_model
from simulation.choices import settle
from simulation.request import DataSelection, Request
from simulation.settings import DataForm

_SEEDS: Final = range(2)
_EPOCHS: Final = 10
_LOT: Final = 600
_STEP: Final = 0.6
"""Learning rate times clip norm."""
_PUBLISHED: Final = {0.5: 90.0, 2.0: 95.0, 8.0: 97.0}
"""Accuracy in percent by ε."""
_LINE: Final = "one device, 60,000 records"


def run() -> list[Figure]:
    """Train all settings, and draw the picture.

    Raises:
        Skipped: The data are not there.
    """
    data, form = mnist()
    with tempfile.TemporaryDirectory(prefix="dpagent-bench-") as name:
        sweeps: dict[str, dict[float, dict[str, Any]]] = {
            "ε": {epsilon: {"epsilon": epsilon} for epsilon in _PUBLISHED},
            "lot": {lot: {"lot": lot} for lot in (300, 600, 1_200, 2_400)},
            "clip norm": {norm: {"clip_norm": norm} for norm in (0.1, 1.0, 4.0, 10.0)},
            "learning rate": {step: {"step": step} for step in (0.15, 0.6, 1.2, 2.4)},
            "hidden units": {
                units: {"model": _dense(Path(name), units)} for units in (50, 200, 1_000)
            },
        }  # fmt: skip
        figures: list[Figure] = []
        panels: list[Panel] = []
        for what, settings in sweeps.items():
            points: list[Point] = []
            for value, changes in settings.items():
                accuracy, error = _accuracy(data, form, **changes)
                points.append(Point(value, accuracy, error))
                published = _PUBLISHED.get(value) if what == "ε" else None
                figures += [
                    Figure(
                        f"{what} {value:g}", accuracy, "%",
                        None if published is None else f"published: {published:g} %",
                        None if published is None else accuracy / published,
                    ),
                    Figure(f"{what} {value:g}{STANDARD_ERROR}", error, "%"),
                ]  # fmt: skip
            lines = {_LINE: points}
            if what == "ε":
                lines["published, PCA and 1,000 units"] = [Point(x, y, 0.0) for x, y in _PUBLISHED.items()]
            panels.append(Panel(what, lines))
    draw(
        METHODS / "dp-sgd-mnist.svg", "MNIST at ε = 2 unless said, ten epochs, 2 seeds", [panels],
        x="", y="accuracy, %",
    )  # fmt: skip
    return figures


def _accuracy(
    data: DataSelection,
    form: DataForm,
    *,
    epsilon: float = 2.0,
    lot: float = _LOT,
    clip_norm: float = 1.0,
    step: float = _STEP,
    model: str = "mnist-cnn",
) -> tuple[float, float]:
    """Mean accuracy in percent, and its standard error."""
    rate = lot / form.train_records
    request = Request(
        data=data, model=model, devices=1, epsilon=epsilon, rounds=round(_EPOCHS / rate), sampling_rate=rate,
        clip_norm=clip_norm, learning_rate=step / clip_norm, schedule="uniform", cap="none",
    )  # fmt: skip
    settings, _ = settle(request, form, model, find_model(model))
    return mean_and_error([100 * run.accuracy for run in over_seeds(settings, seeds=_SEEDS)])


def _dense(directory: Path, units: int) -> str:
    file = directory / f"dense-{units}.yaml"
    layers: list[Any] = [{"dense": units}, "relu", {"dense": 10}]
    description = {"name": "dense", "input_shape": [28, 28, 1], "classes": 10, "layers": layers}
    file.write_text(yaml.safe_dump(description))
    return str(file)

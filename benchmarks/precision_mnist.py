"""Few bits both ways on MNIST: the accuracy that they cost.

The README's MNIST job (ten devices, 100 rounds, lots of 600 on each, ε = 2, 26,010 parameters) is trained as
in `precision`, five times a setting with the seeds 0 to 4. Accuracies are means over the seeds, ± their
standard error.

Interpretation: no cost shows. Few bits both ways differ by -0.07 ± 0.10 percentage points from float32 down,
and by +0.06 ± 0.11 from float32 down with the finer grid. That is within 0.2 points in the mean; by two
errors, five seeds exclude a cost above 0.3.

Limits: five seeds. The data are not part of the project: without the four IDX files in
``../shared/data/mnist``, or the directory that the variable ``MNIST_DIR`` names, this benchmark is skipped.
"""

from __future__ import annotations

from benchmarks.figures import Figure
from benchmarks.one_process import SEEDS, mnist
from benchmarks.precision import sides
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.request import Request


def run() -> list[Figure]:
    """Simulate all settings.

    Raises:
        Skipped: The data are not there.
    """
    data, form = mnist()
    settings, _ = settle(Request(data=data), form, "mnist-cnn", built_in("mnist-cnn"))
    return sides(settings, SEEDS)

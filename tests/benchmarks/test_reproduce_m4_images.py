"""The benchmark of central training on images: its longer setting."""

from __future__ import annotations

from benchmarks.reproduce_m4_images import as_published


def test_the_longer_setting_takes_the_epochs_of_the_paper() -> None:
    """Each of ten devices trains on its tenth of the records three times a round."""
    job = as_published(50_000)
    assert job.rounds == 100
    assert abs(job.steps * job.batch - 3 * 5_000) <= job.batch / 2

"""``python -m benchmarks``: its command line, and the commands that it notes beside figures."""

from __future__ import annotations

import pytest

from benchmarks import sampler
from benchmarks.__main__ import _measure, main
from benchmarks.figures import Figure, stamp


def test_a_benchmark_without_a_longer_setting_is_refused_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--long", "sampler"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "sampler" in said
    assert "reproduce_m3" in said


@pytest.mark.parametrize(
    ("options", "command"),
    [("", "make bench ARGS=reproduce_m3"), (" --long", 'make bench ARGS="reproduce_m3 --long"')],
)
def test_a_figure_names_the_command_that_measures_it_again(options: str, command: str) -> None:
    (figure,) = stamp([Figure("accuracy", 1.0, "%")], "reproduce_m3", "a machine", options)
    assert (figure.name, figure.command) == ("reproduce_m3: accuracy", command)


def test_a_figure_beside_a_published_one_needs_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures were lost: it ended the program before they were kept."""
    monkeypatch.setattr(sampler, "run", lambda: [Figure("accuracy", 1.0, "%", "published: 96 to 97 %")])
    (figure,) = _measure("sampler", long=False)
    assert figure.ratio is None
    assert "published: 96 to 97 %" in capsys.readouterr().err

"""The pictures of ``dpagent plan``: the file that ``--picture`` makes, and the chart on the terminal."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import dpagent, dpagent_process

from cli.plan.chart import noise_chart
from cli.plan.comparison import compare
from cli.plan.picture import draw
from cli.plan.target import PlanTarget

SVG = "{http://www.w3.org/2000/svg}"


def words_of(svg: bytes) -> list[str]:
    """Every text of the picture, lines apart."""
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_svg_explains_itself(tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    result = dpagent("plan", "--devices", "200", "--epsilon", "3", "--rounds", "150", "--picture", str(file))
    assert result.returncode == 0, result.stderr
    assert str(file) in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["plan.svg"]
    assert 5_000 < file.stat().st_size < 200_000
    words = " ".join(words_of(file.read_bytes()))
    for expected in (
        "150 rounds",
        "ε = 3 (δ = 1e-5)",
        "one record on one device",
        "add-or-remove-one",
        "Trusted: no one",
        "200 devices",
        "noise multiplier σ in each round",
        "ε spent after each round",
        "target ε = 3",
        "at round 75",
        "20.1-fold",
    ):
        assert expected in words, expected
    for kind in ("uniform", "incrementing", "linear"):
        # Beside the lines of either panel.
        assert words.count(kind) >= 2


def test_svg_draws_a_line_for_each_schedule_in_each_panel() -> None:
    picture = ElementTree.fromstring(draw(compare(PlanTarget(rounds=50)), ".svg"))
    for panel in ("axes_1", "axes_2"):
        (axes,) = (group for group in picture.iter(f"{SVG}g") if group.get("id") == panel)
        lines = [
            path
            for path in axes.iter(f"{SVG}path")
            if path.get("d", "").count("L") >= 20 and "fill: none" in (path.get("style") or "")
        ]
        assert len({path.get("style") for path in lines}) == 3


def test_equal_plans_give_equal_files() -> None:
    comparison = compare(PlanTarget(rounds=3))
    assert draw(comparison, ".svg") == draw(comparison, ".svg")
    assert draw(comparison, ".png") == draw(comparison, ".png")


@pytest.mark.parametrize("rounds", [1, 2, 50])
def test_no_label_leaves_the_picture_or_touches_another(rounds: int) -> None:
    """Texts are given boxes from matplotlib itself, from the picture as drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from cli.plan import picture

    kept: list[Figure] = []

    class Kept(Figure):
        def savefig(self, *args: object, **kwargs: object) -> None:
            kept.append(self)

    weights = (1.0,) * (rounds - 1) + (9.0,)
    target = PlanTarget(rounds=rounds, epsilon=0.7, schedule="linear", ratio=100.0, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure", Kept)
        picture.draw(compare(target), ".png")
    (figure,) = kept
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert len(texts) > 10
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    for name, box in boxes:
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for place, (name, box) in enumerate(boxes):
        for other, beside in boxes[place + 1 :]:
            assert not box.overlaps(beside), (name, other)


def test_png_is_a_picture_of_reasonable_size(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    result = dpagent("plan", "--rounds", "4", "--picture", str(file), "--json", str(tmp_path / "plan.json"))
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 <= width <= 3000
    assert 500 <= height <= 2000


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "svg"])
def test_other_kinds_of_picture_are_usage_errors(tmp_path: Path, name: str) -> None:
    result = dpagent("plan", "--rounds", "3", "--picture", str(tmp_path / name))
    assert result.returncode == 2
    assert ".svg or .png" in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_picture_in_a_missing_directory_is_a_sentence(tmp_path: Path) -> None:
    result = dpagent("plan", "--rounds", "3", "--picture", str(tmp_path / "no" / "plan.svg"))
    assert result.returncode == 8
    assert "no/plan.svg" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['matplotlib'] = None"
    result = dpagent_process("plan", "--rounds", "3", "--picture", tmp_path / "plan.svg", before=hide)
    assert result.returncode == 3
    assert "'demo'" in result.stderr
    assert "Traceback" not in result.stderr


LINES = {"uniform": [2.0] * 9, "linear": [3 - n / 4 for n in range(9)]}


def test_chart_has_a_letter_and_a_name_for_each_schedule() -> None:
    chart = noise_chart(LINES, first="linear", width=80, encoding="utf-8")
    rows = chart.splitlines()
    assert max(map(len, rows)) <= 80
    assert "│" in chart
    assert chart.count(" uniform") == chart.count(" linear") == 1
    marks = ["".join(row[8:].split()).removesuffix("uniform").removesuffix("linear") for row in rows[1:12]]
    # The falling line starts at the top and ends at the bottom, the even one stays in one row.
    assert marks[0].startswith("l")
    assert marks[-1].endswith("l")
    assert sum("u" in row for row in marks) == 1
    assert "3.000" in rows[1]
    assert "1.000" in rows[11]
    assert rows[-1].split() == ["1", "9"]


def test_chart_knows_plain_characters() -> None:
    noise_chart(LINES, first="linear", width=80, encoding="latin-1").replace("σ", "").encode("latin-1")


@pytest.mark.parametrize(
    ("lines", "width"),
    [
        (LINES, 40),
        ({"uniform": [1.0], "linear": [2.0]}, 80),
        ({"uniform": [1.0, 1.0, 1.0], "linear": [1.0, 1.0, 1.0]}, 80),
    ],
)
def test_no_chart_where_it_would_not_help(lines: dict[str, list[float]], width: int) -> None:
    assert noise_chart(lines, first="linear", width=width, encoding="utf-8") == ""

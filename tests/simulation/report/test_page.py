"""The report's page: it stands alone, has five pictures, and is drawn for every edge."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from demos import own
from matplotlib.figure import Figure
from pages import Structure
from run_records import record_of, with_notes, with_settings, words_of

from dpagent.errors import StorageError
from dpagent.privacy.mechanisms.device_noise import DeviceGaussian
from simulation.layout import Layout
from simulation.record import RunRecord
from simulation.report.device_pictures import MAX_ROWS
from simulation.report.drawing import round_axis
from simulation.report.page import render_report, write_report
from simulation.settings import DataForm


@pytest.mark.usefixtures("unrendered")
def test_page_is_written_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report"
    path = write_report(record_of(rounds=3), target)
    assert path == target / "index.html"
    assert "3 rounds" in path.read_text(encoding="utf-8")
    assert write_report(record_of(rounds=4), target) == path
    assert "4 rounds" in path.read_text(encoding="utf-8")
    assert [file.name for file in target.iterdir()] == ["index.html"]


@pytest.mark.usefixtures("unrendered")
def test_disk_error_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, no directory")
    with pytest.raises(StorageError, match="taken"):
        write_report(record_of(rounds=2), tmp_path / "taken")


@functools.cache
def page_of_a_run() -> str:
    return render_report(record_of(), Path("report"))


def test_five_labelled_pictures_in_a_sound_page() -> None:
    structure = Structure(page_of_a_run())
    assert structure.open == []
    assert structure.seen.count("figure") == structure.seen.count("figcaption") == 5
    assert structure.seen.count("svg") == 5
    assert all(structure.labels)
    assert len(set(structure.ids)) == len(structure.ids)
    assert structure.seen.count("tr") == 1 + 30


def test_page_stands_alone() -> None:
    page = page_of_a_run()
    structure = Structure(page)
    assert structure.references
    for reference in structure.references:
        assert reference.startswith("#")
        assert reference[1:] in structure.ids
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(structure.seen)
    assert "://" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_pictures_follow_light_and_dark_mode() -> None:
    page = page_of_a_run()
    assert "@media (prefers-color-scheme: dark)" in page
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        fixed = re.sub(r"var\(--\w+, #\w+\)", "", svg)
        assert not re.findall(r"(?:fill|stroke|color): #\w+", fixed)
        # Text without a colour of its own would be black, also on a dark page.
        assert all("fill: var(" in text for text in re.findall(r"<text[^>]*>", svg))


@pytest.mark.usefixtures("unrendered")
def test_names_are_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert('x')<script>&\"$\\alpha$"
    record = with_settings(
        replace(record_of(rounds=2), model=hostile, layout=Layout(tmp_path / "x" / hostile)),
        data=own(Path("/d") / hostile), schedule=hostile, cap=hostile,
        form=DataForm(100, 10, (8,), 2, (hostile, "b")),
    )  # fmt: skip
    record = with_notes(record, broker=hostile, remarks=(hostile, f"`{hostile}`", f"`{hostile}"))
    page = render_report(record, tmp_path)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;script&gt;&amp;&#34;") >= 10
    assert Structure(page).open == []


def test_equal_records_give_equal_pages(tmp_path: Path) -> None:
    assert render_report(record_of(rounds=2), tmp_path) == render_report(record_of(rounds=2), tmp_path)


@pytest.mark.usefixtures("unrendered")
def test_files_beside_the_report_are_named_relative_to_it(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), layout=Layout(tmp_path))
    page = render_report(record, tmp_path / "report")
    assert "../coordinator/state/jobs/first/model.onnx" in page
    assert str(tmp_path) not in page
    elsewhere = replace(record, layout=Layout(Path("/elsewhere")))
    page = render_report(elsewhere, tmp_path / "report")
    assert "<code>/elsewhere/coordinator/state/jobs/first/model.onnx</code>" in page


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = {name: value for name, value in matplotlib.rcParams.items() if name != "backend"}
    render_report(record_of(rounds=2), tmp_path)
    assert before == {name: value for name, value in matplotlib.rcParams.items() if name != "backend"}


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(record_of(devices=1, rounds=1, fragments=1), id="one of everything"),
        pytest.param(
            with_settings(
                with_notes(
                    replace(record_of(rounds=1), clamped=()), agent_peak_mib=None, coordinator_peak_mib=None
                ),
                cap="none",
            ),
            id="one round, no memory, no cap",
        ),
        pytest.param(
            replace(
                record_of(devices=1), accuracy_history=(0.1, 0.4, 0.6), epsilon_spent=(5.0, 400.0, 900.0)
            ),
            id="one device, short accuracy, huge epsilon",
        ),
        pytest.param(
            replace(record_of(devices=60, rounds=3, fragments=4), baseline_history=()),
            id="many devices, no baseline",
        ),
        pytest.param(record_of(rounds=200, fragments=2), id="many rounds"),
        pytest.param(
            replace(
                record_of(rounds=3),
                accuracy_history=(math.nan, 0.4, 0.6),
                baseline_history=(math.nan, 0.5, 0.7),
            ),
            id="a first round without a step",
        ),
    ],
)
def test_edges_are_drawn(record: RunRecord, tmp_path: Path) -> None:
    structure = Structure(render_report(record, tmp_path))
    assert structure.open == []
    assert structure.seen.count("svg") == 5
    assert structure.seen.count("tr") == 1 + record.settings.rounds


@pytest.mark.parametrize(
    ("rounds", "ticks"),
    [(1, [1]), (5, [1, 2, 3, 4, 5]), (8, [2, 4, 6, 8]), (40, [10, 20, 30, 40]), (200, [50, 100, 150, 200])],
)
def test_rounds_are_counted_in_round_numbers(rounds: int, ticks: list[int]) -> None:
    axes = Figure().add_subplot()
    round_axis(axes, rounds)
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == ticks


@pytest.mark.usefixtures("unrendered")
def test_one_fragment_has_no_order(tmp_path: Path) -> None:
    words = words_of(render_report(record_of(devices=1, rounds=1, fragments=1), tmp_path))
    assert "No round has two fragments to compare" in words


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    record = replace(
        record_of(), accuracy_history=(), baseline_history=(), arrivals=(), budgets=(), epsilon_spent=(),
        numbers=(), noise_multipliers=(), clamped=(), seconds_by_round=(),
    )  # fmt: skip
    record = with_notes(record, agent_peak_mib=None, coordinator_peak_mib=None)
    page = render_report(record, tmp_path)
    structure = Structure(page)
    assert structure.seen.count("figure") == 5
    assert structure.seen.count("svg") == 1, "only the method's"
    words = words_of(page)
    assert "No fragment arrived" in words
    assert "not measured" in words
    assert "None" not in words


def test_many_devices_show_some_and_say_so(tmp_path: Path) -> None:
    record = record_of(devices=60, rounds=2, fragments=2)
    poor = tuple(
        replace(
            budget,
            epsilon_spent=3.5 if budget.device == 57 else budget.epsilon_spent,
            verified=budget.device != 41,
        )
        for budget in record.budgets
    )
    page = render_report(replace(record, budgets=poor), tmp_path)
    assert f"{MAX_ROWS} of 60 devices" in page
    bars = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)[3]
    assert len(re.findall(r">device \d+<", bars)) == MAX_ROWS
    assert ">device 57<" in bars
    assert "ledger not verified" in bars


@pytest.mark.usefixtures("unrendered")
def test_title_tells_mixed_from_sorted_arrivals(tmp_path: Path) -> None:
    mixed = record_of(rounds=6)
    assert "arrive mixed, as in a random order" in words_of(render_report(mixed, tmp_path))
    one_by_one = tuple(
        replace(arrival, arrived_at=arrival.sent_at + 100.0 * arrival.device) for arrival in mixed.arrivals
    )
    words = words_of(render_report(replace(mixed, arrivals=one_by_one), tmp_path))
    assert "together more often than in a random order" in words


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    ("method", "noise", "unit", "sends"),
    [
        ("dp-sgd", "gaussian", "record", "one block of noisy sums"),
        ("ldp-fl", "two-point", "device", "one block of random bits"),
        ("central", "gaussian", "device", "one block of updates without noise"),
    ],
)
def test_the_words_are_those_of_the_method(
    tmp_path: Path, method: str, noise: str, unit: str, sends: str
) -> None:
    """Of the unit that ε is for, of what the coordinator sees, and of whom ε does not hold against."""
    run = with_settings(record_of(rounds=2), method=method, noise=noise, cap="none")
    words = words_of(render_report(run, tmp_path))
    assert f"1.993 for each {unit}." in words
    assert f"Privacy spent, for each {unit}" in words
    assert sends in words
    assert ("the guarantee counts on nobody’s ignorance" in words) == (method != "central")
    assert ("but the coordinator and those with whom it shares" in words) == (method == "central")


@pytest.mark.usefixtures("unrendered")
def test_the_words_with_noise_of_devices_name_both_figures(tmp_path: Path) -> None:
    run = with_settings(
        record_of(rounds=2), method="central", noise="gaussian", cap="none", device_noise=30.0
    )
    alone = DeviceGaussian.job_statement(29.5, run.settings.delta)
    words = words_of(render_report(replace(run, columns=(*run.columns, alone)), tmp_path))
    assert "Against the coordinator too: ε = 29.500 for the device" in words
    assert "one block of updates with noise of their devices" in words
    assert "updates without noise" not in words


@pytest.mark.usefixtures("unrendered")
def test_no_picture_of_a_run_without_guarantee_claims_one(tmp_path: Path) -> None:
    run = with_settings(record_of(rounds=2), method="incrementing", noise="laplace", cap="published")
    words = words_of(render_report(run, tmp_path))
    assert "incrementing: nothing is guaranteed, against anybody" in words
    assert "by more than ε and δ" not in words
    assert "(ε, δ) for each" not in words

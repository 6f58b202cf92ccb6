"""The demo's report: what stands on the page, that it stands alone, and what the edges do."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
from demos import own

from cli.demo.summary import print_summary
from dpagent.errors import StorageError
from dpagent.learning.models.built_ins import built_in
from simulation.choices import settle
from simulation.collection import ChargedFragment, tally_fragments
from simulation.layout import Layout
from simulation.notes import RunNotes
from simulation.outlook import Outlook
from simulation.record import Arrival, DeviceBudget, FragmentTally, RunRecord
from simulation.report.device_pictures import MAX_ROWS
from simulation.report.interleaving import measure_interleaving
from simulation.report.page import render_report, write_report
from simulation.report.results import as_json
from simulation.request import Request
from simulation.settings import DataForm, RunSettings

NBSP = "\N{NO-BREAK SPACE}"
VOID = {"meta", "br", "link", "img", "hr", "input"}


def arrivals_of(devices: int, rounds: int, fragments: int, *, window_s: float = 4.0) -> tuple[Arrival, ...]:
    """Fragments sent at independent uniform times in each round's window, as agents do."""
    draw = random.Random(20)
    arrivals = []
    for number in range(1, rounds + 1):
        opens_at = 1.7e9 + 6.0 * number
        for device in range(1, devices + 1):
            for _ in range(fragments):
                sent = opens_at + draw.uniform(0.0, window_s)
                arrivals.append(Arrival(device, number, sent, sent + draw.uniform(0.002, 0.03)))
    return tuple(arrivals)


@functools.cache
def settled_for(devices: int) -> tuple[RunSettings, Outlook]:
    form = DataForm(1_437, 360, (8, 8, 1), 10)
    return settle(Request(devices=devices, epsilon=2), form, "digits", built_in("digits"))


def record_of(devices: int = 5, rounds: int = 30, fragments: int = 16) -> RunRecord:
    """A record as a run of the demo leaves it."""
    draw = random.Random(7)
    progress = [(t + 1) / rounds for t in range(rounds)]
    sent = devices * rounds * fragments
    settings, outlook = settled_for(devices)
    return RunRecord(
        settings=settings.model_copy(update={"rounds": rounds}),
        notes=RunNotes(
            broker="amqtt", seconds=187.3, agent_peak_mib=71.4, coordinator_peak_mib=143.2, restarts=1,
            finished=True,
        ),
        outlook=replace(outlook, signal_to_noise=5.3),
        layout=Layout(Path("demo")),
        model="digits",
        parameters=2_410,
        noise_multipliers=tuple(2.61 / math.sqrt(1 + 0.3 * (2 * p - 1)) for p in progress),
        epsilon_spent=tuple(1.99231 * p**0.6 for p in progress),
        accuracy_history=tuple(0.913 - 0.62 * math.exp(-7 * p) + draw.gauss(0, 0.006) for p in progress),
        baseline_history=tuple(0.958 - 0.60 * math.exp(-9 * p) + draw.gauss(0, 0.003) for p in progress),
        majority_class_accuracy=0.103,
        clamped=tuple(draw.randrange(180, 260) for _ in progress),
        kept=tuple(0.5 + 0.25 * p for p in progress),
        budgets=tuple(DeviceBudget(d, 1.99231, 4.0, rounds, True) for d in range(1, devices + 1)),
        fragments=FragmentTally(
            charged=sent, sent=sent - 1, counted=sent - 3, expired=3, duplicates=12, rejected=1, lost=0
        ),
        arrivals=arrivals_of(devices, rounds, fragments),
        bytes_up=104_862.0,
        bytes_down=48_211.0,
        seconds_by_round=tuple(6.0 + draw.random() for _ in progress),
    )  # fmt: skip


def with_settings(record: RunRecord, **changes: Any) -> RunRecord:
    return replace(record, settings=record.settings.model_copy(update=changes))


def with_notes(record: RunRecord, **changes: Any) -> RunRecord:
    return replace(record, notes=replace(record.notes, **changes))


def test_every_charged_fragment_is_counted_expired_or_lost() -> None:
    closed_at = {1: 100.0}
    fragments = [
        ChargedFragment(b"counted", 1, 90.0, True),
        ChargedFragment(b"counted, receipt lost", 1, 90.0, False),
        ChargedFragment(b"counted, the note of sending lost", 1, None, False),
        ChargedFragment(b"receipted and not counted", 1, 99.5, True),
        ChargedFragment(b"sent in good time and not counted", 1, 97.9, False),
        ChargedFragment(b"sent just before the end", 1, 98.1, False),
        ChargedFragment(b"sent too late", 1, 101.0, False),
        ChargedFragment(b"never sent", 1, None, False),
        ChargedFragment(b"of a round that is open", 2, 103.0, False),
    ]
    counted = {fragment.digest for fragment in fragments if fragment.digest.startswith(b"counted")}
    tally = tally_fragments(fragments, counted | {b"a stranger's"}, closed_at, duplicates=4, rejected=5)
    assert tally == FragmentTally(
        charged=9, sent=8, counted=3, expired=4, duplicates=4, rejected=5, lost=2
    )  # fmt: skip
    assert tally.charged == tally.counted + tally.expired + tally.lost
    assert tally_fragments([], set(), {}, duplicates=0, rejected=0) == FragmentTally(0, 0, 0, 0, 0, 0, 0)


def words_of(page: str) -> str:
    """The text of the page with its white space made single."""
    text = re.sub(r"<(style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


class Structure(HTMLParser):
    """Checks that what is opened is closed, and collects ids and references."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.labels: list[str | None] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.references += [
            value or "" for name, value in attrs if name in ("href", "src", "xlink:href", "data")
        ]
        self.references += [
            match for value in values.values() for match in re.findall(r"url\(([^)]*)\)", value or "")
        ]
        if tag == "svg":
            self.labels.append(values.get("aria-label"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_written_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report"
    path = write_report(record_of(rounds=3), target)
    assert path == target / "index.html"
    assert "3 rounds" in path.read_text(encoding="utf-8")
    assert write_report(record_of(rounds=4), target) == path
    assert "4 rounds" in path.read_text(encoding="utf-8")
    assert [file.name for file in target.iterdir()] == ["index.html"]


def test_disk_error_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, no directory")
    with pytest.raises(StorageError, match="taken"):
        write_report(record_of(rounds=2), tmp_path / "taken")


def test_four_labelled_pictures_in_a_sound_page(tmp_path: Path) -> None:
    structure = Structure(render_report(record_of(), tmp_path))
    assert structure.open == []
    assert structure.seen.count("figure") == structure.seen.count("figcaption") == 4
    assert structure.seen.count("svg") == 4
    assert all(structure.labels)
    assert len(set(structure.ids)) == len(structure.ids)
    assert structure.seen.count("tr") == 1 + 30


def test_page_stands_alone(tmp_path: Path) -> None:
    page = render_report(record_of(), tmp_path)
    structure = Structure(page)
    assert structure.references
    for reference in structure.references:
        assert reference.startswith("#")
        assert reference[1:] in structure.ids
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(structure.seen)
    assert "://" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_pictures_follow_light_and_dark_mode(tmp_path: Path) -> None:
    page = render_report(record_of(), tmp_path)
    assert "@media (prefers-color-scheme: dark)" in page
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        fixed = re.sub(r"var\(--\w+, #\w+\)", "", svg)
        assert not re.findall(r"(?:fill|stroke|color): #\w+", fixed)
        # Text without a colour of its own would be black, also on a dark page.
        assert all("fill: var(" in text for text in re.findall(r"<text[^>]*>", svg))


def test_numbers_of_the_record_are_on_the_page(tmp_path: Path) -> None:
    record = record_of()
    words = words_of(render_report(record, tmp_path)).replace(NBSP, " ")
    accuracy, baseline = record.accuracy_history[-1], record.baseline_history[-1]
    for expected in (
        f"{100 * accuracy:.1f} % of the test records right",
        f"without noise {100 * baseline:.1f} %",
        f"{100 * (baseline - accuracy):.1f} points below",
        "ε = 1.993",
        "of 2, at δ = 1e-5",
        "5 devices",
        "2,400 paid for first",
        "2,399 left a device",
        "2,397 in a sum",
        "12 seen, not counted",
        "3 min 7 s",
        "105 kB up",
        "48.2 kB down",
        "71 MiB",
        "143 MiB",
        "1 restart",
        "e ε = 7.34 times",
        f"σ = {record.noise_multipliers[0]:.2f} in round 1",
        f"it clamped {fmean(record.clamped):,.0f} of 2,410 coordinates and shortened the step to "
        f"{100 * fmean(record.kept):.1f} % of its length in a round, on average",
        "5 ledgers show ε = 1.993 spent of 4 in 30 charges, and 5 of 5 verified",
        "50.2 % of the lifetime budget left",
        "digits: records of 8 × 8 × 1, 360 of them to test on",
        "the others were dealt to the devices at random (iid)",
        "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        "Signal to noise 5.3",
    ):
        assert expected in words


def test_guarantee_names_unit_adjacency_trust_and_limits(tmp_path: Path) -> None:
    words = words_of(render_report(record_of(), tmp_path))
    assert "Unit: the record" in words
    assert "add-or-remove-one" in words
    assert "nobody" in words
    for limit in ("takes part, and when", "A device, or a person with many records", "poisoning"):
        assert limit in words
    assert "The incrementing schedule is a choice; see dpagent plan for uniform side by side" in words


def test_uniform_schedule_is_not_called_incrementing(tmp_path: Path) -> None:
    record = with_settings(record_of(rounds=4), schedule="uniform")
    record = replace(record, noise_multipliers=(2.0,) * 4)
    words = words_of(render_report(record, tmp_path))
    assert "incrementing" not in words
    assert "Every round has the same noise" in words


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ({"cap": "none"}, "Noise cap none."),
        ({"cap_at": "device"}, "devices do not tell"),
    ],
)
def test_cap_that_the_coordinator_did_not_apply(cap: dict[str, str], expected: str, tmp_path: Path) -> None:
    record = with_settings(record_of(rounds=3), **cap)
    record = replace(record, clamped=(0, 0, 0), kept=(1.0, 1.0, 1.0))
    words = words_of(render_report(record, tmp_path))
    assert expected in words
    assert "it clamped" not in words


def test_a_cap_that_only_shortens_is_not_said_to_do_nothing(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), clamped=(0, 0), kept=(0.6, 0.66))
    words = words_of(render_report(record, tmp_path)).replace(NBSP, " ")
    assert "it clamped 0 of 2,410 coordinates and shortened the step to 63.0 % of its length" in words
    assert "60.0 %" in words[words.index("Every round in numbers") :]


def test_epsilon_is_rounded_up(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), epsilon_spent=(1.0, 1.4001), budgets=())
    assert "ε = 1.401" in words_of(render_report(record, tmp_path))


def test_a_ledger_that_shows_more_than_the_schedule_is_what_the_run_has_spent(tmp_path: Path) -> None:
    record = record_of(rounds=2)
    more = (replace(record.budgets[0], epsilon_spent=2.1), *record.budgets[1:])
    page = render_report(replace(record, budgets=more), tmp_path)
    words = words_of(page)
    assert "ε = 2.100 of 2" in words
    assert "ε ends at 2.100 of the target 2" in words
    assert "spent more than its target" in words
    assert "is covered by the ε of the whole job" in words


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


def test_many_classes_and_a_poor_outlook_are_said(tmp_path: Path) -> None:
    record = record_of(rounds=2)
    form = replace(record.settings.form, classes=40, class_names=tuple(map(str, range(100, 140))))
    record = with_settings(record, form=form, clipping="quantile")
    record = replace(record, outlook=replace(record.outlook, signal_to_noise=0.041))
    page = render_report(record, tmp_path)
    words = words_of(page)
    (alarm,) = re.findall(r'role="alert">(.*?)</p>', page)
    assert alarm.startswith("Expect hardly anything to be learnt.")
    assert "40: 100, 101, 102" in words
    assert "111 and 28 more" in words
    assert "Signal to noise 0.041" in words
    assert "it follows the median of the gradients’ norms" in words


def test_all_that_was_said_of_the_data_is_said_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = with_notes(replace(record_of(), majority_class_accuracy=0.4), remarks=("Give `--x y` and <b>.",))
    record = replace(record, outlook=replace(record.outlook, signal_to_noise=0.2))
    assert record.cautions == ("Give `--x y` and <b>.", record.outlook.warning)
    page = render_report(record, tmp_path)
    assert "Give <code>--x y</code> and &lt;b&gt;." in page
    assert f"always answering the commonest class: 40.0{NBSP}%" in page
    results = as_json(record)
    assert (results["guessing_accuracy"], results["minds"]) == (0.4, list(record.cautions))
    print_summary(results | {"predict": ["dpagent predict MODEL FILE"]})
    said = capsys.readouterr().out
    assert "Note: Give `--x y` and <b>.\n" in said
    assert re.search(r"always answering the commonest class +40\.00%", said)
    assert "Records held out: demo/coordinator/test.npz\n" in said
    assert "Try: dpagent predict MODEL FILE\n" in said


@pytest.mark.parametrize(("accuracy", "learned"), [(0.5, False), (0.54, False), (0.545, True), (0.3, False)])
def test_what_does_not_beat_the_commonest_class_beyond_chance_is_not_called_learning(
    tmp_path: Path, accuracy: float, learned: bool
) -> None:
    # Of 400 records, half of them of one class: 217 right answers or more are luck in 4.9 % of all tests.
    record = replace(record_of(rounds=2), accuracy_history=(0.1, accuracy), majority_class_accuracy=0.5)
    record = with_settings(record, form=replace(record.settings.form, test_records=400))
    assert record.has_learned == learned
    page = words_of(render_report(record, tmp_path))
    assert ("has not learned" in page) != learned
    assert ("learned no more than the commonest class" in page) != learned
    assert any("has not learned" in sentence for sentence in as_json(record)["minds"]) != learned


@pytest.mark.parametrize(
    ("baseline", "blamed"),
    [((0.1, 0.5), True), ((0.9, 0.54), True), ((0.1, 0.55), False), ((0.1, 0.9), False), ((), False)],
)
def test_a_model_that_does_not_beat_guessing_without_noise_is_not_blamed_on_noise(
    baseline: tuple[float, ...], blamed: bool
) -> None:
    record = replace(record_of(), baseline_history=baseline, majority_class_accuracy=0.5)
    record = with_settings(record, form=replace(record.settings.form, test_records=400))
    assert any("noise is not the cause" in sentence for sentence in record.cautions) == blamed


def test_a_round_that_took_no_step_has_no_accuracy(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), accuracy_history=(math.nan, 0.5), baseline_history=(math.nan, 0.6))
    words = words_of(render_report(record, tmp_path)).replace(NBSP, " ")
    assert "nan" not in words
    assert "gets 50.0 % of the test records right, 10.0 points below the run without noise" in words
    results = as_json(record)
    assert (results["accuracy_history"], results["accuracy"]) == ([None, 0.5], 0.5)


def test_equal_records_give_equal_pages(tmp_path: Path) -> None:
    assert render_report(record_of(), tmp_path) == render_report(record_of(), tmp_path)


def test_files_beside_the_report_are_named_relative_to_it(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), layout=Layout(tmp_path))
    page = render_report(record, tmp_path / "report")
    assert "../coordinator/state/model.onnx" in page
    assert str(tmp_path) not in page
    elsewhere = replace(record, layout=Layout(Path("/elsewhere")))
    page = render_report(elsewhere, tmp_path / "report")
    assert "<code>/elsewhere/coordinator/state/model.onnx</code>" in page


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = {name: value for name, value in matplotlib.rcParams.items() if name != "backend"}
    render_report(record_of(rounds=2), tmp_path)
    assert before == {name: value for name, value in matplotlib.rcParams.items() if name != "backend"}


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(record_of(rounds=1), id="one round"),
        pytest.param(record_of(devices=1), id="one device"),
        pytest.param(record_of(devices=1, rounds=1, fragments=1), id="one of everything"),
        pytest.param(record_of(devices=60, rounds=3, fragments=4), id="many devices"),
        pytest.param(record_of(rounds=200, fragments=2), id="many rounds"),
        pytest.param(with_notes(record_of(), agent_peak_mib=None, coordinator_peak_mib=None), id="no memory"),
        pytest.param(replace(record_of(), accuracy_history=(0.1, 0.4, 0.6)), id="short accuracy"),
        pytest.param(replace(record_of(), baseline_history=()), id="no baseline"),
        pytest.param(replace(record_of(), epsilon_spent=(5.0, 400.0, 900.0)), id="huge epsilon"),
        pytest.param(with_settings(replace(record_of(), clamped=()), cap="none"), id="no cap"),
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
    assert structure.seen.count("svg") == 4
    assert structure.seen.count("tr") == 1 + record.settings.rounds


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    record = replace(
        record_of(), accuracy_history=(), baseline_history=(), arrivals=(), budgets=(), epsilon_spent=(),
        noise_multipliers=(), clamped=(), seconds_by_round=(),
    )  # fmt: skip
    record = with_notes(record, agent_peak_mib=None, coordinator_peak_mib=None)
    page = render_report(record, tmp_path)
    structure = Structure(page)
    assert structure.seen.count("figure") == 4
    assert "svg" not in structure.seen
    words = words_of(page)
    assert "No fragment arrived" in words
    assert "not measured" in words
    assert "None" not in words


def test_missing_baseline_and_short_accuracy_are_compared_with_nothing_else(tmp_path: Path) -> None:
    without = words_of(render_report(replace(record_of(), baseline_history=()), tmp_path))
    assert "not run without noise" in without
    assert "points below" not in without
    short = replace(record_of(), accuracy_history=(0.1, 0.5), baseline_history=(0.2, 0.51, 0.9))
    words = words_of(render_report(short, tmp_path)).replace(NBSP, " ")
    assert "gets 50.0 % of the test records right, 1.0 point below the run without noise" in words
    stopped = replace(record_of(), accuracy_history=(0.1, 0.5, 0.8), baseline_history=(0.2, 0.45))
    words = words_of(render_report(stopped, tmp_path))
    assert "at round 2 it is 5.0 points above the run without noise" in words


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


def test_alarms_stand_at_the_top(tmp_path: Path) -> None:
    record = record_of(rounds=2)
    broken = (replace(record.budgets[0], verified=False), *record.budgets[1:])
    record = replace(
        record, budgets=broken, epsilon_spent=(1.0, 2.5), fragments=replace(record.fragments, lost=2)
    )
    page = render_report(record, tmp_path)
    alarms = re.findall(r'role="alert">(.*?)</p>', page)
    assert len(alarms) == 3
    assert "1 device: 1." in alarms[0]
    assert 'role="alert"' not in render_report(record_of(rounds=2), tmp_path)


@pytest.mark.parametrize("counts", [(2, 3), (1, 1, 1), (4,), (2,), (1, 1), (3, 2, 2), (1, 2)])
def test_interleaving_of_a_random_order_against_all_orders(counts: tuple[int, ...]) -> None:
    devices = [device for device, count in enumerate(counts) for _ in range(count)]
    mixed = [
        sum(a != b for a, b in itertools.pairwise(order)) for order in itertools.permutations(devices)
    ]  # fmt: skip
    measured = measure_interleaving(
        Arrival(device, 1, 0.0, float(place)) for place, device in enumerate(devices)
    )
    assert measured is not None
    assert measured.pairs == len(devices) - 1
    assert measured.mixed == len(counts) - 1
    assert measured.expected_mixed == pytest.approx(fmean(mixed))
    assert measured.deviation == pytest.approx(math.sqrt(pvariance(mixed)), abs=1e-6)


def test_interleaving_adds_rounds_up_and_does_not_pair_across_them() -> None:
    arrivals = [
        Arrival(1, 1, 0.0, 0.0),
        Arrival(2, 1, 0.0, 1.0),
        Arrival(1, 2, 0.0, 2.0),
        Arrival(1, 2, 0.0, 3.0),
    ]
    measured = measure_interleaving(arrivals)
    assert measured is not None
    assert (measured.pairs, measured.mixed) == (2, 1)
    assert measured.expected_mixed == pytest.approx(1.0)
    assert measure_interleaving([Arrival(1, 1, 0.0, 0.0), Arrival(1, 2, 0.0, 1.0)]) is None
    assert measure_interleaving([]) is None


def test_title_tells_mixed_from_sorted_arrivals(tmp_path: Path) -> None:
    mixed = record_of(rounds=6)
    assert "arrive mixed, as in a random order" in words_of(render_report(mixed, tmp_path))
    one_by_one = tuple(
        replace(arrival, arrived_at=arrival.sent_at + 100.0 * arrival.device) for arrival in mixed.arrivals
    )
    words = words_of(render_report(replace(mixed, arrivals=one_by_one), tmp_path))
    assert "together more often than in a random order" in words

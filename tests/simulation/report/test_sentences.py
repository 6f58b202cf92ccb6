"""The sentences and figures of the report."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from run_records import record_of, with_notes, with_settings, words_of

from cli.demo.summary import print_summary
from simulation.report.page import render_report
from simulation.report.results import as_json

pytestmark = pytest.mark.usefixtures("undrawn")
NBSP = "\N{NO-BREAK SPACE}"


def test_numbers_of_the_record_are_on_the_page(tmp_path: Path) -> None:
    record = record_of()
    words = words_of(render_report(record, tmp_path)).replace(NBSP, " ")
    accuracy, baseline = record.accuracy_history[-1], record.baseline_history[-1]
    for expected in (
        f"{100 * accuracy:.1f} % of the test records correctly",
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
        "digits: records of 8 × 8 × 1, 360 of them for testing",
        "the others were dealt to the devices at random (iid)",
        "10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9",
        "Signal to noise 5.3",
    ):
        assert expected in words


def test_guarantee_names_unit_adjacency_trust_and_limits(tmp_path: Path) -> None:
    words = words_of(render_report(with_settings(record_of(), schedule="incrementing"), tmp_path))
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
    assert "Schedule uniform Noise cap" in words
    assert "Every round has the same noise" in words


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ({"cap": "none"}, "Noise cap none "),
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


def test_a_clip_norm_of_updates_that_follows_a_quantile_is_in_every_round(tmp_path: Path) -> None:
    record = with_settings(record_of(rounds=2), method="central", noise="gaussian", clipping="quantile")
    words = words_of(render_report(replace(record, clip_norms=(0.5, 0.4375)), tmp_path))
    assert "it follows the median of the updates’ norms" in words
    assert "round clip norm σ" in words
    assert "2 0.438" in words


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


def test_a_job_that_a_bounded_cap_ended_says_so() -> None:
    record = with_settings(record_of(rounds=3), cap="bounded", rounds=5)
    assert any("ended after 3 of 5 rounds" in sentence for sentence in record.cautions)
    for other in (with_settings(record, rounds=3), with_settings(record, cap="clamp")):
        assert not any("ended after" in sentence for sentence in other.cautions)


def test_a_round_that_took_no_step_has_no_accuracy(tmp_path: Path) -> None:
    record = replace(record_of(rounds=2), accuracy_history=(math.nan, 0.5), baseline_history=(math.nan, 0.6))
    words = words_of(render_report(record, tmp_path)).replace(NBSP, " ")
    assert "nan" not in words
    assert "classifies 50.0 % of the test records correctly, 10.0 points below the run without noise" in words
    results = as_json(record)
    assert (results["accuracy_history"], results["accuracy"]) == ([None, 0.5], 0.5)


def test_missing_baseline_and_short_accuracy_are_compared_with_nothing_else(tmp_path: Path) -> None:
    without = words_of(render_report(replace(record_of(), baseline_history=()), tmp_path))
    assert "not run without noise" in without
    assert "points below" not in without
    short = replace(record_of(), accuracy_history=(0.1, 0.5), baseline_history=(0.2, 0.51, 0.9))
    words = words_of(render_report(short, tmp_path)).replace(NBSP, " ")
    assert "classifies 50.0 % of the test records correctly, 1.0 point below the run without noise" in words
    stopped = replace(record_of(), accuracy_history=(0.1, 0.5, 0.8), baseline_history=(0.2, 0.45))
    words = words_of(render_report(stopped, tmp_path))
    assert "at round 2 it is 5.0 points above the run without noise" in words


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


def test_a_run_of_reports_promises_what_it_keeps(tmp_path: Path) -> None:
    """Whole devices, and no word of clipping or of lots."""
    run = with_settings(record_of(), method="ldp-fl", noise="two-point", cap="none")
    words = words_of(render_report(run, tmp_path)).replace(NBSP, " ")
    assert "Take any one device." in words
    assert "all records of the device replaced by any others" in words
    assert "20 local steps of 32 records" in words
    assert "Clip norm" not in words
    assert "Sampling rate" not in words
    assert "Take any one record" in words_of(render_report(record_of(), tmp_path))

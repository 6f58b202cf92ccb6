"""The demo's report: one HTML page with its pictures in it, to be read, sent on or printed.

Every sentence on the page is drawn from the :class:`~cli.demo.record.DemoRecord`. The page
fetches nothing: style and pictures are inline, there are no scripts, and its content security
policy forbids the rest. Equal records give equal pages, to the byte.

matplotlib is used through its ``Figure`` object, never through pyplot's global state. Its colours
come out as CSS variables, so that the pictures follow the reader's light or dark mode.

The measure of interleaving is the share of consecutive arrivals in a round that come from
different devices. For a uniformly random order of the round's N arrivals, n_i of device i, the
number S of consecutive pairs of the *same* device has

- E[S] = (N−1)·p₂ with p₂ = Σ n_i(n_i−1) / N(N−1), and
- E[S²] = (N−1)·p₂ + 2(N−2)·p₃ + (N−2)(N−3)·p₂₂, where p₃ is the probability that three places
  have one device and p₂₂ that two disjoint pairs of places have one device each.

It shows what the mixing does to the *order* of arrivals, and nothing else. No privacy figure
rests on it.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import matplotlib
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cli.demo.record import Arrival, DemoRecord, DeviceBudget
from dpagent.storage import disk_errors, write_atomically

#: With more devices than this, pictures with a row for each show as many.
MAX_ROWS: Final = 20

# Name of the CSS variable: colour in light mode, and where the variable is unknown. The hues are
# Okabe and Ito's (2008), distinct for colour-blind readers, darkened where white is behind them.
_COLOURS: Final = {
    "ink": "#4c5560",
    "grid": "#dfe3e8",
    "stone": "#7a828c",
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "purple": "#b0578d",
    "amber": "#b87f00",
    "sky": "#3d9fdc",
    "left": "#c3d9e8",
}
# The same hues, lightened for a dark page.
_DARK: Final = {
    "ink": "#c3cbd4",
    "grid": "#2d353e",
    "stone": "#8f99a4",
    "blue": "#58b4ea",
    "orange": "#f08a4b",
    "green": "#35c493",
    "purple": "#d796c1",
    "amber": "#dcab3c",
    "sky": "#9ad3f7",
    "left": "#2f4a5e",
}
_DEVICE_COLOURS: Final = ("blue", "orange", "green", "purple", "amber", "sky")

_WIDTH_IN: Final = 9.6
_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "none",
    "path.simplify": False,
    "font.size": 9.0,
    "text.color": _COLOURS["ink"],
    "axes.edgecolor": _COLOURS["stone"],
    "axes.facecolor": "none",
    "axes.labelcolor": _COLOURS["ink"],
    "axes.linewidth": 0.7,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.7,
    "xtick.color": _COLOURS["stone"],
    "ytick.color": _COLOURS["stone"],
    "xtick.labelcolor": _COLOURS["ink"],
    "ytick.labelcolor": _COLOURS["ink"],
    "figure.facecolor": "none",
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and what it says. ``svg`` is None where there is nothing to draw."""

    key: str
    title: str
    caption: str
    note: str
    svg: Markup | None


@dataclass(frozen=True, slots=True)
class Interleaving:
    """How mixed the order of arrivals is, over all rounds together.

    Attributes:
        pairs: consecutive arrivals in the same round, at least 1.
        mixed: those of them that come from different devices.
        expected_mixed: their mean number if each round's order were uniformly random.
        deviation: the standard deviation of that number.
    """

    pairs: int
    mixed: int
    expected_mixed: float
    deviation: float

    @property
    def share(self) -> float:
        """Measured share of mixed pairs, 0 to 1."""
        return self.mixed / self.pairs

    @property
    def expected_share(self) -> float:
        """The same for a uniformly random order."""
        return self.expected_mixed / self.pairs


@dataclass(frozen=True, slots=True)
class _KeyFigure:
    label: str
    value: str
    detail: str


def write_report(record: DemoRecord, directory: Path) -> Path:
    """Write the report of a finished run to ``directory/index.html``; return that path.

    The directory is made if it is not there; a page already in it is replaced.

    Raises:
        StorageError: The disk is full, or the page cannot be written there.
    """
    page = render_report(record, directory)
    path = directory / "index.html"
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    return path


def render_report(record: DemoRecord, directory: Path) -> str:
    """The page as text. Files beside and below ``directory`` are named relative to it."""
    template = resources.files("cli.demo").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    spent = _last(record.epsilon_spent, 0.0)
    return environment.from_string(template).render(
        record=record,
        key_figures=_key_figures(record),
        fragments=_fragment_figures(record),
        alarms=_alarms(record),
        pictures=[_accuracy(record), _budget(record), _arrivals(record), _budgets_left(record)],
        round_rows=_round_rows(record),
        epsilon=_epsilon(spent),
        target=_plain(record.epsilon_target),
        delta=_plain(record.delta),
        factor=_factor(spent),
        sampling_rate=_percent(record.sampling_rate),
        clip_norm=_plain(record.clip_norm),
        parameters=f"{record.parameters:,}",
        devices=_counted(record.devices, "device"),
        rounds=_counted(record.rounds, "round"),
        accuracy=_percent(record.accuracy_history[-1]) if record.accuracy_history else None,
        cap_effect=_cap_effect(record),
        model_file=_name_of(record.model_file, directory),
        state_dir=_name_of(record.state_dir, directory),
        dark=_DARK,
        light=_COLOURS,
    )


def _plain(value: float) -> str:
    """Few digits: 0.1, 2, 1e-5."""
    return re.sub(r"e([+-])0*(\d)", lambda m: "e" + m[1].replace("+", "") + m[2], f"{value:.4g}")


def _epsilon(value: float) -> str:
    """ε to three decimals, rounded up: it is a bound."""
    return f"{math.ceil(value * 1000 - 1e-6) / 1000:.3f}" if math.isfinite(value) else "∞"


def _factor(epsilon: float) -> str:
    """e^ε, rounded up."""
    if epsilon > 700:
        return "more than 10³⁰⁰"
    factor = math.exp(epsilon)
    return f"{math.ceil(factor * 100) / 100:,.2f}" if factor < 100 else f"{math.ceil(factor):,}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def _points(difference: float) -> str:
    """A difference of two shares: '2.1 points below', 'level with'."""
    points = f"{abs(100 * difference):.1f}"
    if points == "0.0":
        return "level with"
    return f"{points} {'point' if points == '1.0' else 'points'} {'above' if difference > 0 else 'below'}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f}\N{NO-BREAK SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    shown = f"{minutes}\N{NO-BREAK SPACE}min {rest}\N{NO-BREAK SPACE}s"
    return f"{hours}\N{NO-BREAK SPACE}h {shown}" if hours else shown


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        amount = count / scale
        if amount >= 0.9995:
            shown = f"{amount:.3g}" if amount < 999.5 else f"{amount:,.0f}"
            return f"{shown}\N{NO-BREAK SPACE}{unit}"
    return f"{count:.0f}\N{NO-BREAK SPACE}B"


def _mebibytes(amount: float | None) -> str:
    return "not measured" if amount is None else f"{amount:.0f}\N{NO-BREAK SPACE}MiB"


def _range(values: Iterable[float], show: Callable[[float], str]) -> str:
    """'x', or 'x to y' where they differ as shown."""
    ordered = sorted(values)
    low, high = show(ordered[0]), show(ordered[-1])
    return low if low == high else f"{low} to {high}"


def _last(values: Sequence[float], otherwise: float) -> float:
    return values[-1] if values else otherwise


def _name_of(file: str, directory: Path) -> str:
    """``file`` as seen from the page, if it lies with it in one directory; else as it is."""
    try:
        absolute, here = Path(file).resolve(), directory.resolve()
    except OSError:
        return file
    return os.path.relpath(absolute, here) if absolute.is_relative_to(here.parent) else file


def _key_figures(record: DemoRecord) -> list[_KeyFigure]:
    accuracy, baseline = record.accuracy_history, record.baseline_history
    without_noise = f"without noise {_percent(baseline[-1])}" if baseline else "not run without noise"
    pace = f"{_duration(median(record.seconds_by_round))} a round (median)" if record.seconds_by_round else ""
    records = f"about {record.records_per_device:,.0f} records each"
    restarts = "no restarts" if record.restarts == 0 else _counted(record.restarts, "restart")
    return [
        _KeyFigure("Test accuracy", _percent(accuracy[-1]) if accuracy else "–", without_noise),
        _KeyFigure(
            "Privacy spent, for each record",
            f"ε = {_epsilon(_last(record.epsilon_spent, 0.0))}",
            f"of {_plain(record.epsilon_target)}, at δ = {_plain(record.delta)}",
        ),
        _KeyFigure(
            "Devices",
            f"{record.devices:,}",
            f"{records}; {restarts}",
        ),
        _KeyFigure("Rounds", f"{record.rounds:,}", f"{record.schedule} schedule"),
        _KeyFigure("Time", _duration(record.seconds_total), pace),
        _KeyFigure(
            "Traffic of a device",
            f"{_size(record.bytes_up)} up",
            f"{_size(record.bytes_down)} down; mean of a round",
        ),
        _KeyFigure("Agent’s peak memory", _mebibytes(record.agent_peak_mib), "the largest of all devices"),
        _KeyFigure(
            "Coordinator’s peak memory",
            _mebibytes(record.coordinator_peak_mib),
            f"for {record.parameters:,} parameters",
        ),
    ]


def _fragment_figures(record: DemoRecord) -> list[_KeyFigure]:
    tally = record.fragments
    return [
        _KeyFigure("sent", f"{tally.sent:,}", "charged first"),
        _KeyFigure("counted", f"{tally.counted:,}", "in a sum, once"),
        _KeyFigure("expired", f"{tally.expired:,}", "round was over"),
        _KeyFigure("lost", f"{tally.lost:,}", "neither of these"),
        _KeyFigure("duplicates", f"{tally.duplicates:,}", "seen, not counted"),
        _KeyFigure("rejected", f"{tally.rejected:,}", "failed a check"),
    ]


def _alarms(record: DemoRecord) -> list[str]:
    """What a reader has to know before the rest."""
    alarms = []
    broken = [str(budget.device) for budget in record.budgets if not budget.verified]
    if broken:
        which = ", ".join(broken[:MAX_ROWS]) + (" and others" if len(broken) > MAX_ROWS else "")
        alarms.append(f"The ledger did not verify on {_counted(len(broken), 'device')}: {which}.")
    if _last(record.epsilon_spent, 0.0) > record.epsilon_target * (1 + 1e-9):
        alarms.append("The run spent more than its target.")
    if record.fragments.lost:
        alarms.append(
            f"{_counted(record.fragments.lost, 'fragment')} lost: sent, but neither counted nor expired."
        )
    return alarms


def _cap_effect(record: DemoRecord) -> str | None:
    if not record.clamped or record.cap.startswith("none"):
        return None
    if "device" in record.cap and not any(record.clamped):
        return "how often it acted is not known, for devices do not tell"
    mean = fmean(record.clamped)
    share = mean / record.parameters if record.parameters else 0.0
    return (
        f"it held back {mean:,.0f} of {record.parameters:,} coordinates in a round "
        f"on average ({_percent(share)})"
    )


def _round_rows(record: DemoRecord) -> list[tuple[str, ...]]:
    def cell(values: Sequence[float], index: int, show: Callable[[float], str]) -> str:
        return show(values[index]) if index < len(values) else "–"

    return [
        (
            str(index + 1),
            cell(record.noise_multipliers, index, lambda value: f"{value:.3f}"),
            cell(record.epsilon_spent, index, _epsilon),
            cell(record.accuracy_history, index, lambda value: _percent(value, 2)),
            cell(record.baseline_history, index, lambda value: _percent(value, 2)),
            cell(record.clamped, index, lambda value: f"{value:,.0f}"),
            cell(record.seconds_by_round, index, lambda value: f"{value:.1f}"),
        )
        for index in range(record.rounds)
    ]


def _svg(key: str, title: str, height_in: float, draw: Callable[[Figure], None]) -> Markup:
    """Draw an SVG element fit to stand in an HTML page beside others."""
    buffer = io.StringIO()
    style: Any = {**_STYLE, "svg.hashsalt": f"dpagent-{key}"}
    with matplotlib.rc_context():
        # Not the reader's own style, and not a random salt: the same record gives the same picture.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        draw(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    # In a page, names are shared with the other pictures, and some of matplotlib's differ from run
    # to run: number those that are referred to, and drop the rest.
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    number = {name: f"{key}-{place}" for place, name in enumerate(dict.fromkeys(used), start=1)}
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{number[m[1]]}"' if m[1] in number else "", text)
    text = re.sub(r'xlink:href="#([^"]+)"', lambda m: f'href="#{number[m[1]]}"', text)
    text = re.sub(r"url\(#([^)]+)\)", lambda m: f"url(#{number[m[1]]})", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    for name, colour in _COLOURS.items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    view_box = re.search(r'viewBox="[^"]*"', text)
    if view_box is None:
        raise ValueError("matplotlib wrote an SVG without a viewBox.")
    opening = Markup('<svg {} role="img" aria-label="{}">').format(Markup(view_box[0]), title)
    return opening + Markup(text[text.index(">") + 1 :])


def _round_axis(axes: Axes, rounds: int) -> None:
    axes.set_xlim(0.4, rounds + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.set_xlabel("round")


def _line(axes: Axes, values: Sequence[float], colour: str, width: float, *, dashed: bool = False) -> None:
    """A value for each round from the first; the points are marked while there are few."""
    axes.plot(
        range(1, len(values) + 1),
        values,
        color=_COLOURS[colour],
        linewidth=width,
        linestyle=(0, (4, 2)) if dashed else "-",
        marker="o" if len(values) <= 40 else "",
        markersize=1.75 * width,
        zorder=2 if dashed else 3,
    )


def _accuracy(record: DemoRecord) -> Picture:
    accuracy, baseline = record.accuracy_history, record.baseline_history
    if not accuracy:
        return Picture("accuracy", "Accuracy was not measured", "There were no test data.", "", None)
    caption = f"After round {len(accuracy)} the model gets {_percent(accuracy[-1])} of the test records right"
    note = ""
    if baseline:
        # Compare like with like, also where one of the two is shorter.
        together = min(len(accuracy), len(baseline))
        difference = _points(accuracy[together - 1] - baseline[together - 1])
        title = f"Training with noise ends {difference} training without"
        place = ", " if together == len(accuracy) else f"; at round {together} it is "
        caption += f"{place}{difference} the run without noise."
        note = (
            "The run without noise has the same lots’ rate, clipping and optimiser. It protects nobody: "
            "the demo can make it because it owns all the data. One run each; both would come out "
            "a little different next time."
        )
    else:
        title = f"Accuracy reaches {_percent(accuracy[-1])}"
        caption += "."

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ends = [(accuracy[-1], len(accuracy), "blue", "with noise")]
        _line(axes, accuracy, "blue", 2)
        if baseline:
            _line(axes, baseline, "orange", 1.5, dashed=True)
            ends.append((baseline[-1], len(baseline), "orange", "without noise"))
        # The upper label sits a little higher and the lower one a little lower: they never overlap.
        ends.sort()
        for position, (value, at, colour, name) in enumerate(ends):
            rise = 0 if len(ends) == 1 else (7 if position else -7)
            axes.annotate(
                f"{name} {_percent(value)}", (at, value), xytext=(9, rise), textcoords="offset points",
                va="center", color=_COLOURS[colour], fontweight="bold", annotation_clip=False,
            )  # fmt: skip
        _round_axis(axes, max(record.rounds, len(accuracy), len(baseline)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}\N{NO-BREAK SPACE}%"))
        axes.set_title("share of test records classified correctly")
        axes.grid(axis="y")
        axes.margins(y=0.12)
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))

    return Picture("accuracy", title, caption, note, _svg("accuracy", f"{title}. {caption}", 3.3, draw))


def _budget(record: DemoRecord) -> Picture:
    spent, noise = record.epsilon_spent, record.noise_multipliers
    if not spent or not noise:
        return Picture("budget", "No round was charged", "The record holds no charges.", "", None)
    first, last = noise[0], noise[-1]
    if math.isclose(first, last, rel_tol=5e-3):
        trend, noise_words = "Every round has the same noise", f"Noise is σ = {last:.2f}"
    else:
        trend = f"Later rounds have {'less' if last < first else 'more'} noise"
        verb = "falls" if last < first else "rises"
        noise_words = f"Noise {verb} from σ = {first:.2f} in round 1 to σ = {last:.2f} in round {len(noise)}"
    used = spent[-1] / record.epsilon_target
    title = f"{trend}, and the run ends with {_percent(used)} of its budget spent"
    if len(noise) == 1:
        title = f"One round spends {_percent(used)} of the budget"
    caption = (
        f"{noise_words}, and ε ends at {_epsilon(spent[-1])} of the target {_plain(record.epsilon_target)} "
        f"(δ = {_plain(record.delta)})."
    )
    note = ""
    if len(spent) > 1:
        note = (
            "ε does not add up over rounds: a round’s bar is how much the bound on the whole run grew by it, "
            "and early rounds look dear because of what δ costs once."
        )
    growth = [now - before for before, now in zip((0.0, *spent), spent, strict=False)]

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
        rounds = max(record.rounds, len(spent), len(noise))
        left.axhline(record.epsilon_target, color=_COLOURS["stone"], linestyle=(0, (4, 2)), linewidth=1.2)
        left.annotate(
            f"target {_plain(record.epsilon_target)}", (0.02, record.epsilon_target), xytext=(0, 4),
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
        left.fill_between(range(1, len(spent) + 1), spent, color=_COLOURS["blue"], alpha=0.14, linewidth=0)
        _line(left, spent, "blue", 2)
        left.set_ylim(0, 1.14 * max(record.epsilon_target, *spent))
        left.set_title("ε of the run so far")
        middle.bar(range(1, len(growth) + 1), growth, color=_COLOURS["sky"], width=0.75, linewidth=0)
        middle.set_title("growth of ε in each round")
        _line(right, noise, "orange", 2)
        right.set_ylim(0, 1.14 * max(noise))
        right.set_title("noise multiplier σ")
        for axes in (left, middle, right):
            _round_axis(axes, rounds)
            axes.grid(axis="y")

    return Picture("budget", title, caption, note, _svg("budget", f"{title}. {caption}", 2.9, draw))


def measure_interleaving(arrivals: Iterable[Arrival]) -> Interleaving | None:
    """The interleaving of all rounds; None if no round has two arrivals."""
    by_round: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in arrivals:
        by_round[arrival.round].append(arrival)
    pairs, mixed, expected_same, variance = 0, 0, 0.0, 0.0
    for members in by_round.values():
        if len(members) < 2:
            continue
        order = [arrival.device for arrival in sorted(members, key=_arrival_order)]
        pairs += len(order) - 1
        mixed += sum(one != other for one, other in itertools.pairwise(order))
        mean, spread = _same_device_pairs(Counter(order).values())
        expected_same += mean
        variance += spread
    if not pairs:
        return None
    return Interleaving(pairs, mixed, pairs - expected_same, math.sqrt(variance))


def _arrival_order(arrival: Arrival) -> tuple[float, float]:
    return arrival.arrived_at, arrival.sent_at


def _same_device_pairs(counts: Iterable[int]) -> tuple[float, float]:
    """Mean and variance of S, see the head of this module."""
    counts = list(counts)
    total = sum(counts)
    twos = [math.perm(count, 2) for count in counts]
    p2 = sum(twos) / math.perm(total, 2)
    mean = (total - 1) * p2
    square = mean
    if total >= 3:
        square += 2 * (total - 2) * sum(math.perm(count, 3) for count in counts) / math.perm(total, 3)
    if total >= 4:
        disjoint = sum(math.perm(count, 4) for count in counts) + sum(twos) ** 2 - sum(two**2 for two in twos)
        square += (total - 2) * (total - 3) * disjoint / math.perm(total, 4)
    return mean, max(square - mean**2, 0.0)


def _arrivals(record: DemoRecord) -> Picture:
    by_round: dict[int, list[Arrival]] = defaultdict(list)
    for arrival in record.arrivals:
        by_round[arrival.round].append(arrival)
    if not by_round:
        return Picture("arrivals", "No fragment arrived", "The record holds no arrivals.", "", None)
    seen = sorted(by_round)
    middle = len(seen) // 2
    chosen = seen[max(middle - 1, 0) : middle + 1]
    devices = sorted({arrival.device for arrival in record.arrivals})
    shown = devices[:MAX_ROWS]
    title, caption = _interleaving_words(measure_interleaving(record.arrivals), len(devices), len(seen))
    numbers = " and ".join(str(number) for number in chosen)
    note = f"A mark is a fragment; shown {'are rounds' if len(chosen) > 1 else 'is round'} {numbers}"
    if len(shown) < len(devices):
        note += f" and {len(shown)} of {len(devices):,} devices; the last row has the arrivals of all of them"
    note += (
        ". Only the demo, which owns the devices’ disks, can tell the rows apart. The broker sees who sends; "
        "no privacy figure on this page relies on the mixing."
    )

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
        bottom = len(shown)
        for axes, number in zip(panels, chosen, strict=True):
            members = by_round[number]
            start = min(arrival.sent_at for arrival in members)
            times_of_all = [arrival.arrived_at - start for arrival in members]
            axes.axhspan(bottom - 0.1, bottom + 1.1, color=_COLOURS["stone"], alpha=0.13, linewidth=0)
            for row, device in enumerate(shown):
                times = [arrival.arrived_at - start for arrival in members if arrival.device == device]
                colour = _COLOURS[_DEVICE_COLOURS[row % len(_DEVICE_COLOURS)]]
                axes.axhline(row, color=_COLOURS["grid"], linewidth=0.7, zorder=0)
                _ticks(axes, times, row, colour, 1.5)
            _ticks(axes, times_of_all, bottom + 0.5, _COLOURS["ink"], 1.1)
            axes.set_title(f"round {number}")
            axes.set_xlabel("seconds since the first fragment was sent")
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            span = max(*times_of_all, 1e-3)
            axes.set_xlim(min(0.0, *times_of_all) - 0.01 * span, 1.02 * span)
        labels = [*(f"device {device}" for device in shown), "all, as the\ncoordinator sees"]
        panels[0].set_yticks([*range(len(shown)), bottom + 0.5], labels=labels)
        panels[0].set_ylim(bottom + 1.15, -0.6)

    height = 1.7 + 0.24 * len(shown)
    return Picture("arrivals", title, caption, note, _svg("arrivals", f"{title}. {caption}", height, draw))


def _ticks(axes: Axes, times: Sequence[float], row: float, colour: str, width: float) -> None:
    """A vertical mark for each time, as one path: thousands of marks stay small in the page."""
    xs = [x for time in times for x in (time, time, math.nan)]
    ys = [y for _ in times for y in (row - 0.33, row + 0.33, math.nan)]
    axes.plot(xs, ys, color=colour, linewidth=width, solid_capstyle="butt")


def _interleaving_words(measured: Interleaving | None, devices: int, rounds: int) -> tuple[str, str]:
    """Title and caption."""
    where = f"Over {_counted(rounds, 'round')}" if rounds > 1 else "In the one round"
    if measured is None:
        return "Too few fragments arrived to see an order", f"{where} no two fragments arrived together."
    if devices == 1:
        return (
            "One device has nobody to mix with",
            f"{where} all fragments came from the same device.",
        )
    excess = measured.mixed - measured.expected_mixed
    if abs(excess) <= 3 * measured.deviation + 1e-9:
        title = "Fragments of all devices arrive mixed, as in a random order"
    elif excess < 0:
        title = "Fragments of a device arrive together more often than in a random order"
    else:
        title = "Fragments of a device arrive together less often than in a random order"
    caption = (
        f"{where} {_percent(measured.share)} of {measured.pairs:,} pairs of consecutive arrivals "
        "came from different devices; "
        f"a uniformly random order would give {_percent(measured.expected_share)}, "
        f"give or take {200 * measured.deviation / measured.pairs:.1f} points (two standard deviations)."
    )
    return title, caption


def _budgets_left(record: DemoRecord) -> Picture:
    budgets = sorted(record.budgets, key=lambda budget: budget.device)
    if not budgets:
        return Picture("left", "No ledger was read", "The record holds no budgets.", "", None)
    share = _range(map(_share_left, budgets), _percent)
    has = "The device has" if len(budgets) == 1 else "Devices have"
    title = f"{has} {share} of the lifetime budget left"
    charges = _range((budget.charges for budget in budgets), lambda value: f"{value:,.0f}")
    charges += " charge" if charges == "1" else " charges"
    verified = sum(budget.verified for budget in budgets)
    caption = (
        f"{_counted(len(budgets), 'ledger')} {'shows' if len(budgets) == 1 else 'show'} "
        f"ε = {_range((budget.epsilon_spent for budget in budgets), _epsilon)} spent "
        f"of {_range((budget.epsilon_total for budget in budgets), _plain)} "
        f"in {charges}, "
        f"and {verified:,} of {len(budgets):,} verified."
    )
    note = (
        "The device enforces its lifetime budget itself, over all jobs and coordinators, and declines "
        "a round that would exceed it. The charge is on its disk before a byte leaves, so a crash can waste "
        "budget but never under-count it."
    )
    shown = _with_least_left(budgets)
    if len(shown) < len(budgets):
        which = "unverified ledgers first, then the least left"
        note = f"Shown are {len(shown)} of {len(budgets):,} devices: {which}. {note}"

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        rows = range(len(shown))
        spent = [budget.epsilon_spent for budget in shown]
        rest = [_share_left(budget) * budget.epsilon_total for budget in shown]
        axes.barh(rows, spent, height=0.62, color=_COLOURS["blue"], linewidth=0, label="spent")
        axes.barh(rows, rest, left=spent, height=0.62, color=_COLOURS["left"], linewidth=0, label="left")
        for row, budget in enumerate(shown):
            broken = "" if budget.verified else ", ledger not verified"
            axes.annotate(
                f"{_epsilon(budget.epsilon_spent)} of {_plain(budget.epsilon_total)}{broken}",
                (max(budget.epsilon_total, budget.epsilon_spent), row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=_COLOURS["ink" if budget.verified else "orange"],
                annotation_clip=False,
            )
        axes.set_yticks(rows, labels=[f"device {budget.device}" for budget in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.margins(x=0)
        axes.set_xlabel("ε")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handlelength=1.2)

    height = 1.2 + 0.27 * len(shown)
    return Picture("left", title, caption, note, _svg("left", f"{title}. {caption}", height, draw))


def _share_left(budget: DeviceBudget) -> float:
    return max(1 - budget.epsilon_spent / budget.epsilon_total, 0.0) if budget.epsilon_total else 0.0


def _with_least_left(budgets: Sequence[DeviceBudget]) -> list[DeviceBudget]:
    """At most :data:`MAX_ROWS` of them, unverified ledgers first of all, in the devices' order."""
    scarce = sorted(budgets, key=lambda b: (b.verified, b.epsilon_total - b.epsilon_spent, b.device))
    return sorted(scarce[:MAX_ROWS], key=lambda budget: budget.device)

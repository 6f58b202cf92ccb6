"""The pictures over rounds: accuracy, and budget."""

from __future__ import annotations

import itertools
import math

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dpagent.notation import plain_bound, upwards
from dpagent.privacy.methods import method_named
from simulation.job_record import JobRecord
from simulation.report.drawing import COLOURS, Picture, draw_picture, line, round_axis
from simulation.report.notation import percent, points


def accuracy_picture(record: JobRecord) -> Picture:
    """Test accuracy after each round, beside the run without noise."""
    accuracy, baseline = record.accuracy_history, record.baseline_history
    rounds, without = record.numbers, range(1, len(record.baseline_history) + 1)
    if not accuracy or math.isnan(record.majority_class_accuracy):
        return Picture("accuracy", "Accuracy was not measured", "There were no test data.")
    right, last_round = percent(accuracy[-1]), rounds[len(accuracy) - 1]
    caption = f"After round {last_round} the model classifies {right} of the test records correctly"
    if baseline:
        # Compare like with like, also where one of the two is shorter.
        together = min(len(accuracy), len(baseline))
        difference = points(accuracy[together - 1] - baseline[together - 1])
        title = f"Training with noise ends {difference} training without"
        if not record.has_learned:
            title = "With noise, the model has learned no more than the commonest class"
        place = ", " if together == len(accuracy) else f"; at round {together} it is "
        caption += f"{place}{difference} the run without noise."
        unbounded = ""
        if method_named(record.settings.method).trains_locally:
            unbounded = ", but what devices train is neither clipped nor kept within ranges"
        note = (
            f"The run without noise trains in the same way, with the same settings{unbounded}. It gives no "
            "privacy: the simulation can do it because it owns all the data. One run each; a second pair "
            "would differ a little."
        )
    else:
        title = f"Accuracy reaches {percent(accuracy[-1])}"
        if not record.has_learned:
            title = "The model has learned no more than the commonest class"
        caption += "."
        note = ""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        ends = [(accuracy[-1], last_round, "blue", "with noise")]
        line(axes, rounds, accuracy, "blue", 2)
        if baseline:
            line(axes, without, baseline, "orange", 1.5, dashed=True)
            ends.append((baseline[-1], len(baseline), "orange", "without noise"))
        # The upper label sits a little higher and the lower one a little lower: they never overlap.
        ends.sort()
        for (value, at, colour, name), rise in zip(ends, (-7, 7) if baseline else (0,), strict=True):
            axes.annotate(
                f"{name} {percent(value)}", (at, value), xytext=(9, rise), textcoords="offset points",
                va="center", color=COLOURS[colour], fontweight="bold", annotation_clip=False,
            )  # fmt: skip
        round_axis(axes, max(record.settings.rounds, record.last_round, len(baseline)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}\N{NO-BREAK SPACE}%"))
        axes.set_title("share of test records classified correctly")
        axes.grid(axis="y")
        axes.margins(y=0.12)
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))

    return draw_picture("accuracy", title, caption, note, 3.3, draw)


def budget_picture(record: JobRecord) -> Picture:
    """ε of the run so far, its growth in each round, and the noise that bought it."""
    spent, noise, rounds = record.epsilon_spent, record.noise_multipliers, record.numbers
    if not spent or not noise:
        return Picture("budget", "No round was charged", "The record holds no charges.")
    if not record.is_private:
        return Picture("budget", "No budget bounds this run", "Its rounds guarantee nothing.")
    first, last = noise[0], noise[-1]
    if math.isclose(first, last, rel_tol=5e-3):
        trend, noise_words = "Every round has the same noise", f"Noise is σ = {last:.2f}"
    else:
        less, verb = ("less", "falls") if last < first else ("more", "rises")
        trend = f"Later rounds have {less} noise"
        noise_words = (
            f"Noise {verb} from σ = {first:.2f} in round {rounds[0]} to σ = {last:.2f} in round {rounds[-1]}"
        )
    used = percent(record.epsilon / record.settings.epsilon)
    title = f"{trend}, and the run ends with {used} of its budget spent"
    if len(noise) == 1:
        title = f"One round spends {used} of the budget"
    caption = (
        f"{noise_words}, and ε ends at {upwards(record.epsilon, of=record.settings.epsilon)} of the target "
        f"{plain_bound(record.settings.epsilon)} (δ = {plain_bound(record.settings.delta)})."
    )
    note = (
        "ε so far is the cost of a run planned in advance to end with that round. A job that is unfinished, "
        "or that ended early because of its results, is covered by the ε of the whole job."
    )
    if len(spent) > 1:
        note += (
            " ε does not add up over rounds: a round’s bar is the growth of the bound on the whole run, and "
            "early rounds look expensive because δ has a cost that is paid once."
        )

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
        left.axhline(record.settings.epsilon, color=COLOURS["stone"], linestyle=(0, (4, 2)), linewidth=1.2)
        left.annotate(
            f"target {plain_bound(record.settings.epsilon)}", (0.02, record.settings.epsilon), xytext=(0, 4),
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
        left.fill_between(rounds[: len(spent)], spent, color=COLOURS["blue"], alpha=0.14, linewidth=0)
        line(left, rounds, spent, "blue", 2)
        left.set_ylim(0, 1.14 * max(record.settings.epsilon, *spent))
        left.set_title("ε of the run so far")
        growth = [now - before for before, now in itertools.pairwise((0.0, *spent))]
        middle.bar(rounds[: len(growth)], growth, color=COLOURS["sky"], width=0.75, linewidth=0)
        middle.set_title("growth of ε in each round")
        line(right, rounds, noise, "orange", 2)
        right.set_ylim(0, 1.14 * max(noise))
        right.set_title("noise multiplier σ")
        for axes in (left, middle, right):
            round_axis(axes, max(record.settings.rounds, record.last_round))
            axes.grid(axis="y")

    return draw_picture("budget", title, caption, note, 2.9, draw)

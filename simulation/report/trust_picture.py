"""The picture of a method: who sees what, and where the guarantee begins."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from dpagent.privacy.mechanisms.mechanism import Mechanism
from dpagent.privacy.methods import Method
from dpagent.privacy.statement import Trust
from simulation.report.drawing import COLOURS, Picture, draw_picture
from simulation.settings import NOISY_UPDATES

_WIDTH: Final = 1.0
_GAP: Final = 0.36
_HEIGHT: Final = 1.0
_UNPROVEN: Final = "clips the gradients of its records, adds noise by a rule that proves nothing"
_CHARACTERS: Final = 100
"""That fit side by side, of all boxes together."""


@dataclass(frozen=True, slots=True)
class _Party:
    """One who takes part, and what it does or sees in the clear."""

    name: str
    sees: str


def trust_picture(
    method: Method,
    mechanism: type[Mechanism],
    key: str = "trust",
    *,
    is_mixed: bool = False,
    has_device_noise: bool = False,
) -> Picture:
    """Who sees what with a method.

    Args:
        method: the method.
        mechanism: what adds its noise.
        key: of the picture in its page.
        is_mixed: whether fragments pass through a mixer.
        has_device_noise: whether devices add noise to updates besides the coordinator.
    """
    sends = NOISY_UPDATES if has_device_noise else method.sends
    coordinator = f"sees {sends}, without a name"
    if mechanism.trust is Trust.COORDINATOR:
        coordinator += "; adds noise to their sum"
    device = method.device if mechanism.is_private else _UNPROVEN
    device += ", and adds its own noise" if has_device_noise else ""
    mixer = _Party("mixer", "takes off the outer seal and mixes; can open nothing else")
    parties = (
        _Party("each device", device),
        _Party("broker", "sees who sends, when and how much; can open nothing"),
        *([mixer] if is_mixed else []),
        _Party("coordinator", coordinator),
        _Party("users of the model", "see the model of every round"),
    )
    trusted = len(parties) - 1 if mechanism.trust is Trust.COORDINATOR else 1
    title = {
        Trust.NONE: f"{method.name}: all that leaves a device has its noise already",
        Trust.SHUFFLER: f"{method.name}: all that leaves a device has noise, and hides among the others'",
        Trust.COORDINATOR: f"{method.name}: the coordinator sees updates without noise, and is trusted",
    }[mechanism.trust]
    caption = (
        f"To the right of the line, nothing depends on {mechanism.unit.meaning} by more than ε and δ say, "
        "even if all who stand there work together. "
        + (
            "The coordinator, on its left, has to keep to the protocol; the broker sees nothing but seals."
            if mechanism.trust is Trust.COORDINATOR
            else "The device, on its left, keeps to the protocol for its own sake."
        )
    )
    if has_device_noise:
        title = f"{method.name}: the coordinator sees {NOISY_UPDATES}"
        caption += " Without trust in it, the ε of the devices' own noise holds, from the broker on."
    note = (
        "Arrows are sealed fragments: the broker carries them and cannot open them. It knows the sender, so "
        "a coordinator that is the broker too knows whose they are"
        + (", unless it only looks and the mixer works with neither." if is_mixed else ".")
    )
    if not mechanism.is_private:
        title = f"{method.name}: nothing is guaranteed, against anybody"
        caption = "No line separates those who can learn of a record from those who cannot."
        trusted = len(parties)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.axis("off")
        step = _WIDTH + _GAP
        end = len(parties) * step - _GAP + 0.1
        line = min(trusted * step - _GAP / 2, end)
        axes.axvspan(-0.1, line, color=COLOURS["amber"], alpha=0.10, linewidth=0)
        left = "noise of devices alone" if has_device_noise else "without noise"
        labels = [(left if line < end else "no guarantee", line - 0.07, "right", "amber")]
        if line < end:
            axes.axvspan(line, end, color=COLOURS["green"], alpha=0.10, linewidth=0)
            axes.axvline(line, color=COLOURS["green"], linewidth=2.0)
            labels.append((f"(ε, δ) for each {mechanism.unit}", line + 0.07, "left", "green"))
        for words, x, side, colour in labels:
            axes.text(x, _HEIGHT + 0.18, words, ha=side, color=COLOURS[colour], fontweight="bold")
        for place, party in enumerate(parties):
            _box(axes, place * step, party, _CHARACTERS // len(parties))
            if place:
                axes.annotate(
                    "", (place * step - 0.02, _HEIGHT / 2), (place * step - _GAP + 0.02, _HEIGHT / 2),
                    arrowprops={"arrowstyle": "-|>", "color": COLOURS["ink"], "linewidth": 1.2},
                )  # fmt: skip
        axes.set_xlim(-0.1, end)
        axes.set_ylim(-0.08, _HEIGHT + 0.4)

    return draw_picture(key, title, caption, note, 2.0, draw)


def _box(axes: Axes, left: float, party: _Party, characters: int) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left, 0), _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.05", mutation_aspect=0.6,
            facecolor="none", edgecolor=COLOURS["stone"], linewidth=1.0,
        )
    )  # fmt: skip
    axes.text(left + 0.07, _HEIGHT - 0.11, party.name, va="top", color=COLOURS["ink"], fontweight="bold")
    words = textwrap.fill(party.sees, characters, break_on_hyphens=False)
    axes.text(left + 0.07, _HEIGHT - 0.31, words, va="top", color=COLOURS["ink"], fontsize=8.0)

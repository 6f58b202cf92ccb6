"""What a person is told when a run begins, or goes on: data, model, settings, and what is to be expected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from simulation.choices import facts_of, model_in_words
from simulation.layout import Layout
from simulation.programs.broker import BrokerAddress
from simulation.programs.timing import RoundTimes
from simulation.settings import DemoOptions

if TYPE_CHECKING:
    from simulation.fleet import PreparedRun

_WORTH_SAYING_S: Final = 10.0
_MOST_COLUMNS: Final = 20


def say_what_goes_on(
    prepared: PreparedRun, layout: Layout, console: Console, *, closed: int, is_finished: bool
) -> None:
    """That no run begins here, and what it goes on with; ``closed`` rounds of it are done."""
    text = f"Goes on with the run in {layout.root} after round {closed} of {prepared.choice.options.rounds}."
    if is_finished:
        text = f"The run in {layout.root} is finished: nothing is trained, and this is its summary."
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    if prepared.changed:
        console.print(
            "Mind: the data have changed since; this run goes on with the earlier ones. Another --state-dir "
            "begins a run with those of now.",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip


def say_what_is_trained(prepared: PreparedRun, layout: Layout, console: Console) -> None:
    """Data, model and settings, and what is to be expected of them."""
    choice = prepared.choice
    options, spec, form = choice.options, choice.spec, choice.options.form

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    shape = " × ".join(map(str, form.shape)) + " features" * (len(form.shape) == 1)
    say(
        f"Data: {options.data.name}, {form.train_records:,} records to train on and {form.test_records:,} to "
        f"test on, {shape}, {form.classes} classes; dealt to {options.devices} devices "
        f"{options.data.split_in_words}"
    )
    file = f"; written to {layout.model_file}" if layout.model_file.exists() else ""
    say(f"Model: {model_in_words(options, spec)}, {spec.parameter_count:,} parameters{file}")
    say(
        f"Settings: {options.rounds} rounds, ε = {options.epsilon:g}, δ = {options.delta:g}, sampling rate "
        f"{options.sampling_rate:g}, clip norm {options.clip_norm:g} ({options.clipping}), learning rate "
        f"{options.learning_rate:g}"
    )
    if columns := prepared.notes.columns:
        more = f" and {len(columns) - _MOST_COLUMNS:,} more" if len(columns) > _MOST_COLUMNS else ""
        say(f"Inputs: {', '.join(columns[:_MOST_COLUMNS])}{more}")
    for remark in prepared.notes.remarks:
        say(f"Mind: {remark}")
    if (warning := facts_of(options, spec, choice.outlook)["warning"]) is not None:
        say(f"Mind: {warning}")


def say_where(
    options: DemoOptions, times: RoundTimes, address: BrokerAddress, root: Path, console: Console
) -> None:
    """Which broker the agents use, and what the first round takes."""
    text = f"{options.devices} agents train over {address.name} ({address.url}); state in {root}"
    if times.features_s > _WORTH_SAYING_S:
        text += (
            f". The first round takes about {times.features_s:.0f} s longer: each agent computes its "
            "features, once"
        )
    console.print(text, highlight=False, soft_wrap=True, markup=False)

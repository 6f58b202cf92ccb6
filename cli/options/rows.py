"""The table: a row for each setting that has an option.

To give a setting an option, add a row; the commands that take the table have it then, and so have their help
texts, their errors, and the commands that the demo proposes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cli.options.forms import (
    CLASSES,
    CONSTANTS,
    COUNT,
    DELIMITER,
    FILE,
    NAMES,
    NUMBER,
    ROWS,
    SHAPE,
    SIZE,
    SWITCH,
    SWITCH_OFF,
    TEXT,
    WEIGHTS,
    choice,
    registered,
)
from cli.options.table import Option, OptionTable

_TRAINING: Final = "Training (defaults: docs/first-model.md)"
_FLEET: Final = "Fleet and output"


def _kinds() -> tuple[str, ...]:
    # Importing the formats takes a third of a second, too long for every `dpagent --help`.
    from dpagent.learning.data.registry import FORMATS
    from dpagent.learning.data.settings import AUTO

    return (AUTO, *FORMATS)


def _methods() -> tuple[str, ...]:
    from dpagent.privacy.methods import METHODS

    return tuple(METHODS)


def _noises() -> tuple[str, ...]:
    from dpagent.privacy.methods import METHODS

    return tuple(dict.fromkeys(noise for method in METHODS.values() for noise in method.mechanisms))


_METHOD: Final = (
    Option("method", registered(_methods, "METHOD"), "How the fleet trains: `dpagent methods list`.",
           default="dp-sgd"),
    Option("noise", registered(_noises, "NOISE"), "Kind of the noise.", default="the method's own"),
)  # fmt: skip
_OWN_SCHEDULE: Final = "uniform; incrementing with --step and the method incrementing"
DATA: Final = OptionTable(
    Option("kind", registered(_kinds, "KIND"), "Format of the data (docs/data.md).", default="auto"),
    Option("half", choice("train", "test"), "Which half, if the data come in two.", default="train"),
    Option("classes", CLASSES, "All classes of the fleet: the names in order, or how many numbers."),
    Option("shape", SHAPE, "Reshape each record; the number of values must stay the same."),
    Option("dtype", choice("uint8", "float32"), "Type of a record's values.", default="that of the file"),
    Option("max_records", COUNT, "Refuse data with more records."),
    Option("cifar.layout", choice("cifar-10", "cifar-100"), "CIFAR: how records are stored and files called.",
           default="by the names of the files"),
    Option("images.size", SIZE, "Images: scale and crop every image to this size; one number: a square."),
    Option("images.mode", choice("grey", "rgb"), "Images: one channel or three."),
    Option("images.folder", TEXT, "Images: the folder that holds the class folders.",
           default="the path, or its half"),
    Option("images.max_pixels", COUNT, "Images: largest number of pixels of an image as it is stored.",
           default="8388608"),
    Option("csv.label", TEXT, "CSV: the label column.", default="label"),
    Option("csv.features", NAMES, "CSV: the input columns.", default="all others"),
    Option("csv.offset", CONSTANTS, "CSV: inputs are (cell - offset) / scale. Public constants!"),
    Option("csv.scale", CONSTANTS, "CSV: see --offset; above 0."),
    Option("csv.window", ROWS, "CSV: rows per record, for a time series.", default="one row"),
    Option("csv.stride", ROWS, "CSV: rows from one window to the next.", default="the window"),
    Option("csv.group", TEXT, "CSV: a column whose value is constant within a window."),
    Option("csv.mixed", choice("majority", "drop"), "CSV: windows with several labels.", default="majority"),
    Option("csv.delimiter", DELIMITER, "CSV: one character, or `tab`.", default=","),
    Option("csv.decimal", choice(".", ","), "CSV: the mark before the fraction of a number.", default="."),
    Option("csv.header", SWITCH_OFF, "CSV: the first row is data; columns are 1, 2, ….", name="--no-header"),
    Option("csv.width", COUNT, "CSV: cells in a row, for --no-header.", default="as in the first row"),
    Option("csv.first_column", TEXT, "CSV: name of a first column that the header leaves out (R) or empty."),
)  # fmt: skip
"""How records are read: the section `data` of agent.yaml."""

PLAN: Final = OptionTable(
    *_METHOD,
    Option("epsilon", NUMBER, "Target ε of the whole job, for each record.", default="2"),
    Option("delta", NUMBER, "Target δ of the whole job.", default="1e-5"),
    Option("device_noise", NUMBER,
           "central: target ε for each device, nobody trusted, of noise that it adds itself besides."),
    Option("rounds", COUNT, "Rounds of the job, up to 5000.", default="100"),
    Option("sampling_rate", NUMBER, "Probability that a record is in a round's lot.", default="0.1"),
    Option("schedule", choice("incrementing", "uniform", "linear"), "How the rounds share the budget.",
           default=_OWN_SCHEDULE),
    Option("step", NUMBER, "incrementing: the step, as a fraction (0 to 0.99) of its allowed maximum.",
           default="0.3"),
    Option("ratio", NUMBER, "linear: the last round's budget over the first round's.", default="3"),
    Option("custom", WEIGHTS, "Your own schedule: the rounds' shares of the budget as 1,2,3 or a file of "
           "numbers. It is the requested schedule, unless --schedule names another."),
    Option("local_steps", COUNT, "Noisy steps a device takes in a round.", default="1"),
    Option("devices", COUNT, "Devices that take part in a round.", default="100"),
    Option("records_per_device", NUMBER, "Records on a device, a public estimate.", default="1000"),
    Option("parameters", COUNT, "Parameters of the model.", default="26010, of mnist-cnn"),
)  # fmt: skip
"""What a plan is asked for."""

RUN: Final = OptionTable(
    Option("devices", COUNT, "Agents to run.", default="5; mnist and ldp-fl: 10; central: 20"),
    Option("rounds", COUNT, "Rounds of training.",
           default="40; mnist: 100; your own data: 60; ldp-fl: 20; central: 10"),
    Option("epsilon", NUMBER, "ε of the job, for each record; ldp-fl and central: for each device.",
           default="4; mnist: 2; ldp-fl: 900; central: 8"),
    Option("delta", NUMBER, "δ of the job.", default="1e-5"),
    Option("data.dataset", choice("digits", "mnist"), "digits (bundled with scikit-learn) or mnist.",
           default="digits, unless --data-dir is given"),
    Option("data.train.path", FILE, "Your own data: a folder of images by class or a zip of one, CSV, NPZ, "
           "IDX, CIFAR. With --dataset mnist, its IDX files.", name="--data-dir"),
    Option("data.test", FILE, "Data to test on.", name="--test-data",
           default="the test half, if the data have one"),
    Option("data.test_share", NUMBER, "Share of the records held out for testing.",
           default="0.2, if there is no test half"),
    Option("model", TEXT, "A built-in model or a model file (.yaml).", default="one that fits the data"),
    Option("data.split", choice("iid", "dirichlet", "class", "file"),
           "How the records are dealt to the devices.", default="iid"),
    Option("data.alpha", NUMBER, "dirichlet: the smaller, the more devices differ.", default="0.5"),
    Option("data.classes_per_device", COUNT, "class: shards of the sorted records for each device.",
           default="2"),
    *(replace(option, panel=_TRAINING) for option in _METHOD),
    Option("schedule", choice("incrementing", "uniform", "linear"),
           "How the budget is spread over the rounds.", default=_OWN_SCHEDULE, panel=_TRAINING),
    Option("step", NUMBER, "incrementing: the step as a fraction of its maximum.", default="0.3",
           panel=_TRAINING),
    Option("clip_norm", NUMBER,
           "Norm that gradients of records, or updates of devices, are clipped to: L2; laplace noise: L1.",
           panel=_TRAINING),
    Option("device_noise", NUMBER,
           "central: let each device add noise to its update besides, for this ε of the job for each device "
           "with nobody trusted.", panel=_TRAINING),
    Option("learning_rate", NUMBER, "Learning rate of the coordinator's step.", panel=_TRAINING),
    Option("sampling_rate", NUMBER, "Probability that a record is in a round's lot.", panel=_TRAINING),
    Option("clipping", choice("whole", "layers", "quantile"),
           "Clip the whole gradient (or update), each layer, or to a private quantile of the norms.",
           default="whole",
           panel=_TRAINING),
    Option("cap", choice("clamp", "none", "bounded", "published"),
           "Noise cap; published guarantees no privacy.", panel=_TRAINING),
    Option("allow_unproven", SWITCH, "published: run rounds that guarantee nothing.",
           name="--allow-unproven", panel=_TRAINING),
    Option("cap_at", choice("coordinator", "device"), "Where the cap acts.", default="coordinator",
           panel=_TRAINING),
    Option("engine", choice("auto", "numpy", "onnx"),
           "What computes the agents' gradients; `auto` takes `onnx` if it is much faster.", default="auto",
           panel=_TRAINING),
    Option("baseline", SWITCH, "Also run the same training without noise.", name="--baseline/--no-baseline",
           default="baseline", panel=_TRAINING),
    Option("seed", COUNT, "Seed of splits and initial weights, never of noise.", default="0",
           panel=_TRAINING),
    Option("mixer", SWITCH, "Let fragments pass through a mixer.", name="--mixer/--no-mixer",
           default="no-mixer", panel=_FLEET),
    Option("jitter_window_s", NUMBER, "Seconds over which each agent spreads its fragments.",
           name="--jitter-window", default="by data set", panel=_FLEET),
)  # fmt: skip
"""What a run of the demo is asked for: the fields of a simulation's Request."""

_RAY: Final = "Ray"
SIMULATION: Final = OptionTable(
    *(row for row in RUN.without("engine", "mixer", "jitter_window_s", "baseline", "devices").rows),
    Option("devices", COUNT, "Virtual devices, up to 1,000,000.",
           default="5; mnist and ldp-fl: 10; central: 20"),
    Option("baseline", SWITCH, "Also run the same training without noise.", name="--baseline/--no-baseline",
           default="no-baseline", panel=_TRAINING),
    Option("insecure_noise_seed", COUNT, "Draw lots and noise from this seed, to repeat a run to the bit. "
           "Nothing is guaranteed then, and every output says so.", panel=_TRAINING),
)  # fmt: skip
"""What a run of virtual devices is asked for: the fields of a VirtualRequest."""

CLUSTER: Final = OptionTable(
    Option("address", TEXT, "HOST:PORT of a Ray cluster.", default="Ray is started on this machine",
           panel=_RAY),
    Option("cores", COUNT, "Cores of this machine to use.", default="all", panel=_RAY),
)  # fmt: skip
"""Which Ray a simulation uses."""

COMPARISON: Final = OptionTable(
    Option("compare", NAMES, "Train with each of these methods in turn, and put them side by side: "
           "`dp-sgd,ldp-fl`.", panel=_TRAINING),
)  # fmt: skip
"""Which methods a demo puts side by side."""

BROKER: Final = OptionTable(
    Option("broker", TEXT, "auto, embedded, mosquitto, or mqtt://host:port of a running one.", default="auto",
           panel=_FLEET),
    Option("broker_port", COUNT, "Port of the broker that is started; 0 takes a free one.", default="0",
           panel=_FLEET),
    Option("mqtt_username", TEXT, "User name for --broker mqtt://….", panel=_FLEET),
    Option("mqtt_password_file", FILE, "Password file for --broker mqtt://….", panel=_FLEET),
)  # fmt: skip
"""Which broker a run uses."""

OUTPUT: Final = OptionTable(
    Option("state_dir", FILE, "Where everything is kept; a stopped run goes on.",
           default="dpagent-demo/DATE-TIME-PID", panel=_FLEET),
    Option("json", FILE, "Write the results as JSON (`-`: standard output).", panel=_FLEET),
    Option("report", FILE, "Directory of the HTML report.", default="report in the state directory",
           panel=_FLEET),
)  # fmt: skip
"""Where a run leaves what it makes."""

SWEEP_OUTPUT: Final = OUTPUT.with_default("state_dir", "dpagent-sweep/DATE-TIME-PID")
"""Where a sweep leaves what it makes."""

"""The section of each format in the settings, by its kind: what a configuration may say of records.

They stand apart from the formats (:mod:`dpagent.learning.data.registry`), which read the records: the agent
reads its configuration, and leaves records to other processes.
"""

from __future__ import annotations

from typing import Final

from dpagent.learning.data.declared import NoSettings
from dpagent.learning.data.formats.cifar.settings import CifarSettings
from dpagent.learning.data.formats.images.settings import ImageSettings
from dpagent.learning.data.formats.tables.settings import CsvSettings
from dpagent.settings import Settings

SECTIONS: Final[dict[str, type[Settings]]] = {
    "npz": NoSettings, "idx": NoSettings, "cifar": CifarSettings, "images": ImageSettings, "csv": CsvSettings
}  # fmt: skip

"""The form of the device's records, without any: all that the agent knows of them."""

from __future__ import annotations

from dataclasses import dataclass

from dpagent.learning.data.declared import DType


@dataclass(frozen=True, slots=True)
class DataForm:
    """What is declared of the records. Public.

    Attributes:
        shape: of one record.
        dtype: of its values.
        classes: number of classes that the labels are drawn from.
        class_names: the name of each, or empty where classes are numbers only.
    """

    shape: tuple[int, ...]
    dtype: DType
    classes: int
    class_names: tuple[str, ...] = ()

"""The common base of layers and front-end stages: a kind, values, and a rule for shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, TypeAlias

from dpagent.wording import shortened

_LONGEST: Final = 200

Shape: TypeAlias = tuple[int, ...]
"""Of one record: ``(features,)``, ``(length, channels)`` or ``(height, width, channels)``."""


@dataclass(frozen=True, slots=True)
class Part(ABC):
    """One item of a model file's lists: a frozen record of public numbers.

    A field is an ``int``, a ``float``, a ``str``, a ``Shape`` or a tuple of layers;
    :mod:`~dpagent.learning.models.description` reads it by that type.
    """

    kind: ClassVar[str]

    @abstractmethod
    def shape_after(self, shape: Shape) -> Shape:
        """The shape of one record after this part.

        Raises:
            ConfigurationError, ParameterError: it does not fit a record of ``shape``. The text gives the
                reason; the caller knows which part of the model it is.
        """

    @property
    def shown(self) -> str:
        """What a sentence calls it; of one with very many values the first."""
        return shortened(repr(self), _LONGEST)

    def describe(self) -> Any:
        """The kind alone, or a map from the kind to the values, in plain lists, maps, numbers and strings."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {self.kind: values} if values else self.kind


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.describe() if isinstance(value, Part) else value

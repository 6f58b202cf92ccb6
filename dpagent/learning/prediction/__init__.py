"""What a finished model says of inputs. Needs ONNX Runtime; pictures need Pillow.

:class:`ExportedModel` reads the file that a coordinator wrote, :class:`InputReader` reads inputs of any
known kind one by one, with or without labels, and :func:`predict` brings the two together, a batch at a time.
"""

from __future__ import annotations

from dpagent.learning.prediction.exported_model import ExportedModel
from dpagent.learning.prediction.inputs import Input
from dpagent.learning.prediction.outcome import Outcome, Tally, predict
from dpagent.learning.prediction.reader import InputReader

__all__ = ["ExportedModel", "Input", "InputReader", "Outcome", "Tally", "predict"]

"""The section ``serve`` of ``agent.yaml``: who may ask the board's model, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dpagent.configuration import resolve
from dpagent.schema.base import rule
from dpagent.schema.limits import Limits
from dpagent.settings import FilePath, Settings
from dpagent.transport.settings import MqttSettings

Topic = Annotated[str, Limits(pattern=r"^[^+#\x00/$][^+#\x00]*$", max_length=1_000)]


class ServeSettings(Settings):
    """Answers of the board's model for its other programs (``dpagent serve``)."""

    model: Literal["latest", "personal"] = "latest"
    """Which model answers: that of the last finished job, or the copy that ``dpagent personalise`` made of
    one, which reveals the board's records to whoever may ask it often."""
    socket: FilePath | None = None
    """Unix socket that is listened on, relative to this file. Default: ``predict.sock`` in ``state_dir``,
    which only the agent's user reaches."""
    mode: Literal["0600", "0660"] = "0600"
    """Who may ask: the user of ``dpagent serve``, or its group as well."""
    timeout_s: Annotated[float, Limits(gt=0, le=600)] = 10.0
    """An answer that takes longer is given up, alone."""
    maximum_request_mib: Annotated[int, Limits(ge=1, le=64)] = 4
    """The largest request; a picture in it takes a third more than its file. Reading one may take thirty
    times as much memory."""
    mqtt: MqttSettings | None = None
    """A broker to be asked over, besides the socket. **It sees what is asked, and the answers**: take one on
    this board. By default none."""
    topic: Topic = "dpagent"
    """Requests are taken at ``topic`` and ``/ask``, and answered at ``topic`` and ``/answer``."""
    fleet_broker: bool = False
    """Whether ``serve.mqtt`` may be the broker of the fleet, whose operator then sees inputs and answers of
    this board, which no noise protects. For ``model: personal`` it may not be."""

    @rule
    def _is_no_topic_of_a_fleet(self) -> None:
        if self.topic.startswith("dpagent/v1"):
            raise ValueError(
                f"serve.topic is {self.topic!r}; expected one outside of dpagent/v1, the fleets'"
            )

    def resolved(self, file: Path) -> ServeSettings:
        """The same settings with paths resolved relative to the configuration ``file``."""
        return self.with_values(
            {
                "socket": self.socket and resolve(self.socket, file),
                "mqtt": self.mqtt and self.mqtt.resolved(file),
            }
        )

    def socket_in(self, state_dir: Path) -> Path:
        """Where the socket is."""
        return self.socket or state_dir / "predict.sock"

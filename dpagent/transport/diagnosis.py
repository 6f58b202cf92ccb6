"""The way to the broker, step by step: name, port, TLS, login, the right to each topic.

Each step is tried as the program would, and the first that fails is named with its reason: a session only
says that nobody answers.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dpagent.diagnosis import Finding, fine, problem, problem_of, skipped, warning
from dpagent.errors import BrokerError, ConfigurationError, ExitCode
from dpagent.transport.bounds import MAX_PACKET_BYTES
from dpagent.transport.events import Acknowledged, Connected, Disconnected, Received, Subscribed
from dpagent.transport.session import MqttSession, Pace, Subscription
from dpagent.transport.settings import MqttSettings

_STEPS: Final = ("name", "port", "TLS", "login", "topics")
_VERSION_TOPIC: Final = "$SYS/broker/version"
_VERSION_S: Final = 0.5
_PACE: Final = Pace(answer_s=3.0, pause_s=0.1, longest_s=3.0)
_FEW_DAYS: Final = 14
_TLS_REASONS: Final = {
    9: ("the certificate is not valid yet", "Set this machine's clock, or wait."),
    10: ("the certificate has expired", "Renew the broker's certificate; check this machine's clock."),
    18: ("the certificate is signed by itself", "Set mqtt.ca_file to that certificate (PEM)."),
    19: (
        "an authority signed the certificate that is not trusted",
        "Set mqtt.ca_file to its certificate (PEM).",
    ),
    20: (
        "an authority signed the certificate that is not trusted",
        "Set mqtt.ca_file to its certificate (PEM).",
    ),
    62: ("the certificate is for another name", "Write the name in mqtt.url that the certificate has."),
    64: ("the certificate is for another address", "Write the name in mqtt.url that the certificate has."),
}
"""By OpenSSL's verification error."""


@dataclass(slots=True)
class BrokerExamination:
    """Looks at a broker.

    Args:
        settings: address and credentials.
        reads: topics that the program subscribes to.
        writes: topics that it publishes to; an empty message goes there, which nobody takes for more.
        patience_s: for each step.
        listens_s: for what the broker retains on ``reads``, unless all of ``awaited`` came.
        awaited: topics of retained messages.

    Attributes:
        received: the messages that came, by topic.
        is_through: whether every step went well.
    """

    settings: MqttSettings
    reads: Sequence[str]
    writes: Sequence[str]
    patience_s: float = 5.0
    listens_s: float = 2.0
    awaited: Sequence[str] = ()
    received: dict[str, bytes] = field(default_factory=dict)
    is_through: bool = False

    def run(self) -> Iterator[Finding]:
        """Take the steps, as far as they lead."""
        done = 0
        for step in (self._name, self._port, self._tls, self._login, self._topics):
            findings = list(step())
            yield from findings
            done += 1
            if any(finding.exit_code != ExitCode.OK for finding in findings):
                break
        else:
            self.is_through = True
        for name in _STEPS[done:]:
            yield skipped(name, "not tried: see above")

    def _name(self) -> Iterator[Finding]:
        host = self.settings.host
        try:
            found = socket.getaddrinfo(host, self.settings.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            yield problem(
                "name", f"{host} cannot be resolved ({_reason(error)})",
                "Check the name in mqtt.url, and this machine's network and DNS.", ExitCode.BROKER,
            )  # fmt: skip
            return
        addresses = sorted({str(address[0]) for *_, address in found})
        text = host if [host] == addresses else f"{host} is {', '.join(addresses)}"
        yield fine("name", text)

    def _port(self) -> Iterator[Finding]:
        try:
            self._connected().close()
        except OSError as error:
            port = self.settings.port
            if isinstance(error, ConnectionRefusedError):
                text, remedy = (
                    f"nothing listens on port {port}",
                    "Start the broker; check the port in mqtt.url.",
                )
            elif isinstance(error, TimeoutError):
                text = f"port {port} does not answer within {self.patience_s:g} s"
                remedy = "Check mqtt.url, and firewalls between here and there."
            else:
                text, remedy = f"port {port} cannot be reached ({_reason(error)})", "Check the network."
            yield problem("port", text, remedy, ExitCode.BROKER)
            return
        yield fine("port", f"{self.settings.port} answers")

    def _tls(self) -> Iterator[Finding]:
        if not self.settings.tls:
            if self._speaks_tls():
                yield problem(
                    "TLS", f"port {self.settings.port} speaks TLS, and mqtt.url says mqtt://",
                    "Write mqtts:// in mqtt.url.", ExitCode.BROKER,
                )  # fmt: skip
            elif _is_local(self.settings.host):
                yield fine("TLS", "none, and the broker is on this machine")
            else:
                yield warning(
                    "TLS", "none: who is on the network reads the password, and which messages are whose",
                    "Give the broker a certificate, and write mqtts:// in mqtt.url.",
                )  # fmt: skip
            return
        try:
            context = self.settings.tls_context()
        except ConfigurationError as error:
            yield problem_of("TLS", error)
            return
        yield from _own_certificate(self.settings)
        try:
            with (
                self._connected() as plain,
                context.wrap_socket(plain, server_hostname=self.settings.host) as secure,
            ):
                yield from _certificate(secure)
        except ssl.SSLCertVerificationError as error:
            text, remedy = _TLS_REASONS.get(
                error.verify_code, (error.verify_message, "Check the broker's certificate and mqtt.ca_file.")
            )
            yield problem("TLS", text, remedy, ExitCode.BROKER)
        except (ssl.SSLError, OSError) as error:
            if self._answers_plainly():
                text = f"port {self.settings.port} speaks MQTT without TLS, and mqtt.url says mqtts://"
                remedy = "Write the port that speaks TLS (by default 8883), or mqtt://."
            else:
                text = f"port {self.settings.port} does not speak TLS ({_reason(error)})"
                remedy = "Check the port in mqtt.url, and the broker's log."
            yield problem("TLS", text, remedy, ExitCode.BROKER)

    def _login(self) -> Iterator[Finding]:
        user = self.settings.username or "nobody"
        try:
            self.settings.password()
        except ConfigurationError as error:
            yield problem_of("login", error)
            return
        try:
            with self._session() as session:
                connected = self._first(session, Connected)
        except BrokerError as error:
            yield problem_of("login", error)
            return
        if isinstance(connected, Connected):
            yield from _limits(connected, user, self._version())
        else:
            reason = connected.reason if isinstance(connected, Disconnected) else "no answer"
            yield problem(
                "login", f"the broker does not accept a connection as {user}: {reason}",
                "Check the broker's log.", ExitCode.BROKER,
            )  # fmt: skip

    def _topics(self) -> Iterator[Finding]:
        for topic in self.reads:
            try:
                with self._session(topic) as session:
                    self._listen(session, topic)
            except BrokerError:
                yield problem(
                    "topics", f"{self.settings.username or 'nobody'} may not read {topic}",
                    "Give this user the right, in the broker's access rules; check the fleet's name.",
                    ExitCode.BROKER,
                )  # fmt: skip
                return
        for topic in self.writes:
            try:
                with self._session() as session:
                    self._first(session, Connected)
                    handle = session.publish(topic, b"")
                    taken = handle is not None and self._first(session, Acknowledged)
            except BrokerError:
                taken = False
            if not isinstance(taken, Acknowledged):
                yield problem(
                    "topics", f"{self.settings.username or 'nobody'} may not write to {topic}",
                    "Give this user the right, in the broker's access rules; check the fleet's name.",
                    ExitCode.BROKER,
                )  # fmt: skip
                return
        yield fine("topics", "the broker takes the subscriptions and an empty message")

    def _session(self, *topics: str) -> MqttSession:
        return MqttSession(
            self.settings, client_id=None, persistent=False, pace=_PACE,
            subscriptions=[Subscription(topic) for topic in topics],
        )  # fmt: skip

    def _listen(self, session: MqttSession, topic: str) -> None:
        """Take what the broker retains on a topic.

        Raises:
            BrokerError: It may not be read.
        """
        self._first(session, Subscribed)
        until = time.monotonic() + (self.listens_s if topic in self.awaited else 0.0)
        while (left_s := until - time.monotonic()) > 0:
            event = session.next_event(left_s)
            if isinstance(event, Received) and event.topic in self.awaited:
                self.received[event.topic] = event.payload
                return

    def _first(
        self, session: MqttSession, kind: type[Connected | Subscribed | Acknowledged]
    ) -> Connected | Subscribed | Acknowledged | Disconnected | None:
        """The first event of a kind, or the last failure, or None for silence.

        Raises:
            BrokerError: The broker refuses.
        """
        failure: Disconnected | None = None
        until = time.monotonic() + self.patience_s
        while (left_s := until - time.monotonic()) > 0:
            match session.next_event(left_s):
                case Connected() | Subscribed() | Acknowledged() as event if isinstance(event, kind):
                    return event
                case Disconnected() as event:
                    failure = event
                case _:
                    pass
        return failure

    def _version(self) -> str:
        """What the broker says it is; not all do."""
        try:
            with self._session(_VERSION_TOPIC) as session:
                self._first(session, Subscribed)
                event = session.next_event(_VERSION_S)
        except BrokerError:
            return ""
        if not isinstance(event, Received):
            return ""
        text = event.payload[:60].decode(errors="replace")
        return "".join(each for each in text if each.isprintable())

    def _connected(self) -> socket.socket:
        return socket.create_connection((self.settings.host, self.settings.port), self.patience_s)

    def _speaks_tls(self) -> bool:
        """Whether the port answers a TLS greeting, whoever it belongs to."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with self._connected() as plain, context.wrap_socket(plain):
                return True
        except ssl.SSLError as error:
            # It asks for what we have not, such as a client's certificate: in TLS.
            return "ALERT" in (error.reason or "")
        except OSError:
            return False

    def _answers_plainly(self) -> bool:
        """Whether the port answers an MQTT 3.1.1 CONNECT."""
        name = b"dpagent-doctor"
        body = b"\x00\x04MQTT\x04\x02\x00\x0a" + len(name).to_bytes(2, "big") + name
        try:
            with self._connected() as plain:
                plain.sendall(bytes([0x10, len(body)]) + body)
                return plain.recv(1) == b"\x20"
        except OSError:
            return False


def _own_certificate(settings: MqttSettings) -> Iterator[Finding]:
    """How long the program's own certificate lasts, if that is not long."""
    if settings.cert_file is None:
        return
    from cryptography import x509

    ends = x509.load_pem_x509_certificate(settings.cert_file.read_bytes()).not_valid_after_utc
    days = (ends.timestamp() - time.time()) / 86_400
    remedy = (
        "A board's is replaced with a code of `dpagent coordinator devices replace`, others by `ca client`."
    )
    if days < 0:
        yield problem("TLS", f"mqtt.cert_file ended on {ends:%Y-%m-%d}", remedy, ExitCode.BROKER)
    elif days < _FEW_DAYS:
        yield warning("TLS", f"mqtt.cert_file ends on {ends:%Y-%m-%d}, and was not renewed", remedy)


def _certificate(secure: ssl.SSLSocket) -> Iterator[Finding]:
    certificate = secure.getpeercert() or {}
    ends = str(certificate.get("notAfter", ""))
    days = (ssl.cert_time_to_seconds(ends) - time.time()) / 86_400 if ends else float("inf")
    text = f"{secure.version()}; the certificate is valid until {ends or 'further notice'}"
    if days < _FEW_DAYS:
        yield warning("TLS", f"{text}: {days:.0f} days", "Renew the broker's certificate.")
    else:
        yield fine("TLS", text)


def _limits(connected: Connected, user: str, version: str) -> Iterator[Finding]:
    """What the broker said of itself when it accepted the connection."""
    name = f"{version}, " if version else ""
    yield fine("login", f"{name}MQTT {connected.protocol}, as {user}")
    limits = connected.limits
    if limits.maximum_qos < 1:
        yield problem("login", "the broker takes messages of QoS 0 alone", "Allow QoS 1.", ExitCode.BROKER)
    if not limits.retains:
        yield problem(
            "login", "the broker retains no messages: a board that comes later gets no plan",
            "Allow retained messages.", ExitCode.BROKER,
        )  # fmt: skip
    if limits.maximum_packet_bytes < MAX_PACKET_BYTES:
        yield problem(
            "login", f"the broker takes packets of up to {limits.maximum_packet_bytes:,} bytes",
            f"Raise its limit to at least {MAX_PACKET_BYTES:,}.", ExitCode.BROKER,
        )  # fmt: skip


def _is_local(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

"""The test vectors of docs/protocol.md: made by its generator, and read by dpagent and by a second client."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_client
import yaml
from daemons import running_job
from fleets import agent_values, records, write_fleet

from agent.custody import begin_ledger
from agent.daemon import Agent
from agent.settings import load_agent_settings
from coordinator.daemon import Coordinator
from coordinator.settings import load_fleet_settings
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.codec import MessageError, decode, encode
from dpagent.protocol.fragments import cut, read_block
from dpagent.protocol.messages import Fragment, Layout, ModelChunk, Plan, Receipts
from dpagent.protocol.mixing import Inner, OuterOpener, key_text, plan_digest, seal_for
from dpagent.protocol.packing import pack, unpack
from dpagent.protocol.receipts import receipt_digest, receipt_place
from dpagent.protocol.sealing import Opener, seal
from dpagent.protocol.signing import SignedKind, Verifier
from dpagent.protocol.task import RoundTask
from dpagent.protocol.terms import Message
from dpagent.protocol.topics import Topics
from mixer.daemon import Mixer
from mixer.settings import MixerSettings

DOCS = Path(__file__).parents[2] / "docs"
FILES: dict[str, Any] = {
    file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (DOCS / "protocol/vectors").iterdir()
}
FLEET = FILES["fleet"]
NAME = FLEET["fleet"]
SIGNING_SECRET, SIGNING_KEY, SEALING_SECRET, SEALING_KEY = (
    bytes.fromhex(FLEET[key]) for key in ("signing_secret", "signing_key", "sealing_secret", "sealing_key")
)
MIXER_SECRET = bytes.fromhex(FLEET["mixer_secret"])
VERIFIER, OPENER = Verifier(FLEET["coordinator_key"], NAME), Opener(SEALING_SECRET, NAME)
SIGNED: dict[SignedKind, type[Message | Layout]] = {"plan": Plan, "model": ModelChunk, "receipts": Receipts}
VECTORS = [(kind, vector) for kind in (*SIGNED, "fragment") for vector in FILES[kind]["vectors"]]
PLAN, MIXED_PLAN = FILES["plan"]["vectors"][:2]
JOB = bytes.fromhex(PLAN["message"]["job"][2:-1])
every_vector = pytest.mark.parametrize(
    ("kind", "vector"), [pytest.param(*each, id=f"{each[0]}: {each[1]['description']}") for each in VECTORS]
)


def parsed(value: Any) -> Any:
    """A message out of a file: ``h'…'`` are bytes."""
    if isinstance(value, dict):
        return {key: parsed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [parsed(item) for item in value]
    is_bytes = isinstance(value, str) and value.startswith("h'")
    return bytes.fromhex(value[2:-1]) if is_bytes else value


def sent(case: dict[str, Any]) -> bytes:
    return bytes.fromhex(case["message"]) + bytes(case.get("then_zeros", 0))


def cases(*names: str) -> pytest.MarkDecorator:
    found = [case for name in names for case in FILES["receiving"][name]]
    ids = [f"{case['topic'].split('/')[3]}: {case['description']}" for case in found]
    return pytest.mark.parametrize("case", found, ids=ids)


# --- the files and the page -----------------------------------------------------------------------


def test_files_and_examples_are_what_the_generator_makes() -> None:
    made = runpy.run_path(str(DOCS / "make_vectors.py"))
    files = {file.name: file.read_text(encoding="utf-8") for file in (DOCS / "protocol/vectors").iterdir()}
    assert made["render"]() == files, "run: python docs/make_vectors.py"
    page = (DOCS / "protocol.md").read_text(encoding="utf-8")
    assert made["render_page"](page) == page, "run: python docs/make_vectors.py"


def test_every_reason_on_the_page_has_a_message_that_is_rejected_for_it() -> None:
    text = (DOCS / "protocol.md").read_text(encoding="utf-8").split("## Rejection reasons\n")[1]
    named = set(re.findall(r"^\| `([a-z ]+)` \|", text.split("\n## ")[0], flags=re.MULTILINE))
    # All vectors are for an open round.
    assert named == {case["reason"] for case in FILES["receiving"]["rejected"]} | {"no open round"}


# --- dpagent --------------------------------------------------------------------------------------


@every_vector
def test_dpagent_reads_a_vector(kind: str, vector: dict[str, Any]) -> None:
    envelope = bytes.fromhex(vector["envelope"])
    message: Message | Layout
    if kind == "fragment":
        message = OPENER.open(envelope, JOB)
        assert decode(bytes.fromhex(vector["bytes"]), Fragment) == message
    else:
        message = VERIFIER.open(envelope, SIGNED[kind], kind)
        assert decode(bytes.fromhex(vector["bytes"]), SIGNED[kind]) == message
    fields = message.as_dict() if isinstance(message, Plan) else asdict(message)  # type: ignore[call-overload]
    assert fields == parsed(vector["message"])


def test_dpagents_mixer_opens_a_vector() -> None:
    opener = OuterOpener(MIXER_SECRET, NAME)
    assert key_text(opener.public_key) == FLEET["mixer_key"]
    for vector, fragment in zip(FILES["mixed"]["vectors"], FILES["fragment"]["vectors"], strict=True):
        inner = opener.open(bytes.fromhex(vector["envelope"]))
        assert inner == Inner(bytes.fromhex(vector["plan"]), bytes.fromhex(vector["sealed"]))
        assert inner.sealed.hex() == fragment["envelope"]


def test_dpagent_finds_a_plans_digest_whatever_its_deadline_says() -> None:
    digests = set()
    for vector in FILES["plan"]["vectors"]:
        plan = Plan.checked(parsed(vector["message"]))
        assert plan_digest(plan).hex() == vector["digest"]
        assert plan_digest(plan.with_values({"deadline": plan.deadline + 1})) == plan_digest(plan)
        digests.add(vector["digest"])
    assert len(digests) == len(FILES["plan"]["vectors"])


Receivers = tuple[Agent, Coordinator, Mixer]


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receivers]:
    """An agent and a coordinator in the round of the first plan, and a mixer."""
    device, fleet = tmp_path_factory.mktemp("device"), tmp_path_factory.mktemp("fleet")
    save_npz(device / "data.npz", records(50))
    values = agent_values(None, FLEET["coordinator_key"], fleet=NAME)
    (device / "agent.yaml").write_text(yaml.safe_dump(values))
    settings = load_agent_settings(device / "agent.yaml")
    begin_ledger(settings.ledger_files, settings.lifetime_budgets)
    agent = Agent(settings)
    agent._receive(PLAN["topic"], bytes.fromhex(PLAN["envelope"]))
    coordinator = Coordinator(load_fleet_settings(write_fleet(fleet, None, fleet=NAME)))
    intake = running_job(coordinator).cycle._intake
    intake._opener, intake._job = OPENER, JOB
    intake.begin(RoundTask.of(Plan.checked(parsed(PLAN["message"]))), None)
    keys = tmp_path_factory.mktemp("mixer")
    mixer = Mixer(MixerSettings(fleet=NAME, coordinator_key=FLEET["coordinator_key"], keys_dir=keys))
    mixer._opener = OuterOpener(MIXER_SECRET, NAME)
    mixer._receive(MIXED_PLAN["topic"], bytes.fromhex(MIXED_PLAN["envelope"]))
    yield agent, coordinator, mixer
    agent.close()
    coordinator.close()
    mixer.close()


Outcome = Callable[[dict[str, Any]], str | None]


@pytest.fixture
def outcome(receivers: Receivers, caplog: pytest.LogCaptureFixture) -> Outcome:
    """Hands a message to its receiver: the reason for its rejection, or None."""
    agent, coordinator, mixer = receivers

    def receive(case: dict[str, Any]) -> str | None:
        if case["topic"] == FLEET["topics"]["fragments"]:
            try:
                running_job(coordinator).cycle._intake.read(sent(case))
            except MessageError as error:
                return error.reason
            return None
        if case["topic"] == FLEET["topics"]["mixer"]:
            mixer._rejected.clear()
            mixer._receive(case["topic"], sent(case))
            return next(iter(mixer._rejected), None)
        agent._warned.clear()
        caplog.clear()
        agent._receive(case["topic"], sent(case))
        said = [argument for record in caplog.records for argument in record.args or ()]
        return next((each.reason for each in said if isinstance(each, MessageError)), None)

    return receive


@cases("accepted")
def test_dpagent_accepts(case: dict[str, Any], outcome: Outcome) -> None:
    assert outcome(case) is None


@cases("rejected", "outside_the_tables")
def test_dpagent_rejects(case: dict[str, Any], outcome: Outcome) -> None:
    assert outcome(case) == case["reason"]


# --- the second client ----------------------------------------------------------------------------


def receive(case: dict[str, Any]) -> None:
    """Hand a message to the second client, which has taken the first plan."""
    if case["topic"] == FLEET["topics"]["fragments"]:
        second_client.Coordinator(parsed(PLAN["message"]), SEALING_SECRET).receive(sent(case))
    elif case["topic"] == FLEET["topics"]["mixer"]:
        second_mixer().receive(case["topic"], sent(case))
    else:
        second_device().receive(case["topic"], sent(case))


def second_mixer() -> second_client.Mixer:
    mixer = second_client.Mixer(NAME, MIXER_SECRET, SIGNING_KEY)
    mixer.receive(MIXED_PLAN["topic"], bytes.fromhex(MIXED_PLAN["envelope"]))
    return mixer


def second_device(plan: dict[str, Any] = PLAN) -> second_client.Device:
    device = second_client.Device(NAME, SIGNING_KEY)
    device.receive(plan["topic"], bytes.fromhex(plan["envelope"]))
    return device


@every_vector
def test_the_second_client_reads_and_writes_a_vector(kind: str, vector: dict[str, Any]) -> None:
    body, envelope = bytes.fromhex(vector["bytes"]), bytes.fromhex(vector["envelope"])
    if kind == "plan":
        assert second_client.decode(body) == parsed(vector["message"])
        assert second_client.encode(parsed(vector["message"])) == body
    if kind == "fragment":
        info = second_client.info_of(NAME, JOB)
        assert info.hex() == vector["info"]
        assert second_client.open_sealed(envelope, info, SEALING_SECRET) == body
        ephemeral = bytes.fromhex(vector["ephemeral_secret"])
        assert second_client.seal(body, info, SEALING_KEY, ephemeral) == envelope
    else:
        assert second_client.open_signed(envelope, kind, NAME, SIGNING_KEY) == body
        assert second_client.sign(body, kind, NAME, SIGNING_SECRET) == envelope
        assert second_client.signed_bytes(body, kind, NAME).hex() == vector["signed_bytes"]


@cases("accepted")
def test_the_second_client_accepts(case: dict[str, Any]) -> None:
    receive(case)


@cases("rejected")
def test_the_second_client_rejects(case: dict[str, Any]) -> None:
    with pytest.raises(second_client.Rejected, match=f"^{case['reason']}$"):
        receive(case)


def test_the_second_client_finds_the_same_in_a_plan() -> None:
    for vector in FILES["plan"]["vectors"]:
        plan = parsed(vector["message"])
        assert second_client.dimension(plan) == vector["dimension"]
        assert second_client.wire_unit(plan) == pytest.approx(vector["wire_unit"], rel=1e-12)
        assert second_client.plan_digest(plan).hex() == vector["digest"]
        text = vector["architecture_text"]
        assert hashlib.sha256(text.encode()).digest() == plan["model"]["architecture"]
        assert json.loads(text)["model"] == second_client.decode(plan["model"]["description"])


def test_both_clients_read_the_same_in_a_payload() -> None:
    for case in FILES["fragment"]["packing"]:
        payload, values, size = bytes.fromhex(case["payload"]), case["values"], case["size"]
        assert second_client.unpack(payload, len(values)) == values
        read, level = unpack(payload, len(values), size)
        assert (read.tolist(), level) == (values, case["level"])
        if level == 0:
            assert unpack(second_client.pack(values, size), len(values), size)[0].tolist() == values
            assert second_client.unpack(pack(np.array(values), size), len(values)) == values


def test_the_second_client_puts_chunks_together() -> None:
    (vector,), device = FILES["model"]["vectors"], second_device()
    assert device.weights() is None
    device.receive(vector["topic"], bytes.fromhex(vector["envelope"]))
    assert list(device.weights() or ()) == FILES["model"]["weights"]
    packed = FILES["model"]["int8"]
    count, found = len(packed["weights"]), bytes.fromhex(packed["data"])
    assert list(second_client.weights_of(found, count, "int8")) == packed["weights"]
    asset, data = FILES["model"]["asset"], bytes(place % 251 for place in range(100_000))
    digest = bytes.fromhex(asset["digest"])
    for chunk in reversed(asset["chunks"]):
        assert device.assembled(digest, len(data)) is None
        start = chunk["index"] * second_client.CHUNK_BYTES
        body = digest + chunk["index"].to_bytes(4, "big") + data[start : start + chunk["size"]]
        assert hashlib.sha256(body).hexdigest() == chunk["sha256"]
        topic = f"dpagent/v1/{NAME}/asset/training-graph/{chunk['index']}"
        device.receive(topic, second_client.sign(body, "model", NAME, SIGNING_SECRET))
    assert device.assembled(digest, len(data)) == data


def test_the_second_client_runs_the_round_of_the_vectors() -> None:
    vectors, (receipts,) = FILES["fragment"]["vectors"], FILES["receipts"]["vectors"]
    coordinator = second_client.Coordinator(parsed(PLAN["message"]), SEALING_SECRET)
    for number, update in enumerate(FILES["fragment"]["updates"]):
        own, device = vectors[2 * number : 2 * number + 2], second_device()
        drawn = [part for each in own for part in (each["message"]["id"][2:-1], each["ephemeral_secret"])]
        random_bytes = iter(map(bytes.fromhex, drawn))
        messages = device.send(update, lambda _size, random_bytes=random_bytes: next(random_bytes))
        assert [message.hex() for message in messages] == [each["envelope"] for each in own]
        for message in messages * 2:
            coordinator.receive(message)
        device.receive(receipts["topic"], bytes.fromhex(receipts["envelope"]))
        assert not device.pending
    assert coordinator.mean() == pytest.approx(FILES["fragment"]["mean"], rel=1e-12)


def test_both_clients_have_the_same_receipts_on_topics_of_their_own() -> None:
    topics, fragments = Topics(NAME), FILES["fragment"]["vectors"]
    for vector, own in zip(fragments, FILES["receipts"]["own"], strict=True):
        identity, message = bytes.fromhex(own["id"]), bytes.fromhex(own["message"])
        assert vector["message"]["id"] == f"h'{own['id']}'"
        assert topics.receipt(receipt_place(identity)) == own["topic"]
        assert second_client.receipt_topic(identity, NAME) == own["topic"]
        assert (receipt_digest(identity), second_client.receipt(identity)) == (message, message)


def test_the_second_client_hears_a_receipt_on_its_own_topic() -> None:
    device = second_device()
    assert device.plan is not None
    device.plan |= {"receipts": "fragment"}
    device.send([0] * 6, lambda size: os.urandom(size))
    waiting = dict(zip(device.heard, device.pending, strict=True))
    assert len(waiting) == 2
    for topic, digest in waiting.items():
        device.receive(topic, bytes(16))
        assert digest in device.pending
        device.receive(topic, digest)
        assert digest not in device.pending


def test_the_second_client_sends_the_round_of_the_vectors_through_its_mixer() -> None:
    fragments, vectors = FILES["fragment"]["vectors"], FILES["mixed"]["vectors"]
    mixer = second_mixer()
    for number, update in enumerate(FILES["fragment"]["updates"]):
        drawn = [
            part
            for place in (2 * number, 2 * number + 1)
            for part in (
                fragments[place]["message"]["id"][2:-1], fragments[place]["ephemeral_secret"],
                vectors[place]["ephemeral_secret"],
            )
        ]  # fmt: skip
        random_bytes = iter(map(bytes.fromhex, drawn))
        messages = second_device(MIXED_PLAN).send(update, lambda _size, drawn=random_bytes: next(drawn))
        expected = [vector["envelope"] for vector in vectors[2 * number : 2 * number + 2]]
        assert [message.hex() for message in messages] == expected
        for message in messages * 2:
            mixer.receive(FLEET["topics"]["mixer"], message)
    assert mixer.leave(5) == []
    left = mixer.leave(4)
    assert {message.hex() for message in left} == {each["envelope"] for each in fragments}
    mixer.receive(FLEET["topics"]["mixer"], bytes.fromhex(vectors[0]["envelope"]))
    assert mixer.leave(1) == []
    coordinator = second_client.Coordinator(parsed(MIXED_PLAN["message"]), SEALING_SECRET)
    for message in left:
        coordinator.receive(message)
    assert coordinator.mean() == pytest.approx(FILES["fragment"]["mean"], rel=1e-12)


# --- each with the other --------------------------------------------------------------------------


def test_dpagent_counts_what_the_second_client_sends() -> None:
    task = RoundTask.of(Plan.checked(parsed(PLAN["message"])))
    total = np.zeros(task.release.blocks * task.plan.wire.block, np.int64)
    for update in FILES["fragment"]["updates"]:
        for message in second_device().send(update, os.urandom):
            fragment = OPENER.open(message, JOB)
            values, _ = read_block(fragment, task.plan.wire, task.release.blocks)
            total[fragment.position * len(values) :][: len(values)] += values
    expected = np.sum(FILES["fragment"]["updates"], axis=0)
    assert total[: task.release.dimension].tolist() == expected.tolist()


def test_the_second_client_counts_what_dpagent_sends() -> None:
    plan = Plan.checked(parsed(PLAN["message"]))
    coordinator = second_client.Coordinator(parsed(PLAN["message"]), SEALING_SECRET)
    for update in FILES["fragment"]["updates"]:
        for fragment in cut(np.array(update), plan):
            coordinator.receive(seal(encode(fragment), plan))
    assert coordinator.mean() == pytest.approx(FILES["fragment"]["mean"], rel=1e-12)


def test_the_second_clients_mixer_opens_what_dpagent_sends() -> None:
    plan = Plan.checked(parsed(MIXED_PLAN["message"]))
    mixer = second_mixer()
    coordinator = second_client.Coordinator(parsed(MIXED_PLAN["message"]), SEALING_SECRET)
    for update in FILES["fragment"]["updates"]:
        for fragment in cut(np.array(update), plan):
            mixer.receive(FLEET["topics"]["mixer"], seal_for(encode(fragment), plan))
    for message in mixer.leave(4):
        coordinator.receive(message)
    assert coordinator.mean() == pytest.approx(FILES["fragment"]["mean"], rel=1e-12)


def test_the_second_client_packs_and_counts_reports_as_dpagent_does() -> None:
    file = FILES["reports"]
    (vector,) = file["vectors"]
    plan = parsed(vector["message"])
    assert decode(bytes.fromhex(vector["bytes"]), Plan) == Plan.checked(plan)
    packed = [second_client.pack_two_point(update, plan) for update in file["updates"]]
    payloads = [payload for update in packed for payload in update]
    assert [payload.hex() for payload in payloads] == [each["payload"] for each in file["payloads"]]
    blocks = len(packed[0])
    reports = [
        report
        for number, payload in enumerate(payloads)
        for report in second_client.unpack_two_point(payload, number % blocks, plan)
    ]
    means = second_client.two_point_means(reports, plan, vector["sizes"])
    known = [mean for mean in file["means"] if mean is not None]
    assert [mean for mean in means if mean is not None] == pytest.approx(known, rel=1e-6)
    assert [count == 0 for count in file["reports"]] == [mean is None for mean in means]


@pytest.mark.parametrize("name", ["clipped", "counted", "noisy"])
def test_the_second_client_clips_and_packs_updates_as_dpagent_does(name: str) -> None:
    file = FILES[name]
    (vector,) = file["vectors"]
    plan = parsed(vector["message"])
    assert decode(bytes.fromhex(vector["bytes"]), Plan) == Plan.checked(plan)
    updates = [second_client.clipped_update(change, plan) for change in file["changes"]]
    if "noise" in file:
        drawn = zip(updates, file["noise"], strict=True)
        updates = [second_client.with_noise(update, noise, plan) for update, noise in drawn]
    assert updates == file["updates"]
    packed = [second_client.pack_update(update, plan) for update in updates]
    assert [payload.hex() for each in packed for payload in each] == [
        each["payload"] for each in file["payloads"]
    ]
    read = [
        [
            value
            for place, payload in enumerate(each)
            for value in second_client.unpack_update(payload, place, plan)
        ]
        for each in packed
    ]
    assert read == updates
    total = [sum(values) for values in zip(*read, strict=True)]
    assert total == file["sum"]
    unit = second_client.update_unit(plan)
    devices = plan["release"]["expected_devices"]
    assert [value * unit / devices for value in total] == pytest.approx(file["mean"], rel=1e-12)


def test_topics_and_names() -> None:
    topics = Topics(NAME)
    assert FLEET["topics"] == {
        "plan": topics.plan, "model chunk 3": topics.model_chunk(3), "receipts": topics.receipts,
        "projection chunk 0": topics.asset_chunk("projection", 0), "fragments": topics.fragments,
        "mixer": topics.mixer,
    }  # fmt: skip
    for name in FLEET["accepted_names"]:
        Topics(name)
    for name in FLEET["refused_names"]:
        with pytest.raises(ValueError, match="1 to 63"):
            Topics(name)

"""The certificate authority, judged by OpenSSL: what it issues has one purpose, until it is revoked."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from members import certified, key_pem, new_authority

from coordinator.authority import (
    Authority,
    adopt_authority,
    begin_change,
    end_change,
    load_authorities,
    pem_of,
)
from dpagent.errors import ConfigurationError, UsageError
from dpagent.storage import write_atomically

NOW = datetime.now(UTC)


def openssl(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["openssl", *map(str, words)], capture_output=True, text=True, timeout=30, check=False
    )


def verified(directory: Path, certificate: bytes, purpose: str, crl: bytes | None = None) -> bool:
    (directory / "leaf.crt").write_bytes(certificate)
    options: list[str | Path] = ["-x509_strict", "-CAfile", directory / "ca.crt", "-purpose", purpose]
    if crl is not None:
        (directory / "list.crl").write_bytes(crl)
        options += ["-crl_check", "-CRLfile", directory / "list.crl"]
    return openssl("verify", *options, directory / "leaf.crt").returncode == 0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return new_authority(tmp_path)


def test_a_boards_certificate_is_a_clients_and_no_servers(authority: Authority, tmp_path: Path) -> None:
    pem = pem_of([certified(authority).certificate])
    assert verified(tmp_path, pem, "sslclient")
    assert not verified(tmp_path, pem, "sslserver")
    assert not verified(tmp_path, pem, "crlsign")


def test_a_brokers_certificate_is_a_servers_by_its_names(authority: Authority, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    names = ["broker.example", "192.0.2.7", "2001:db8::7"]
    pem = pem_of([authority.issue_server(key, names, days=30, now=NOW)])
    assert verified(tmp_path, pem, "sslserver")
    assert not verified(tmp_path, pem, "sslclient")
    for option, name in (("-verify_hostname", names[0]), ("-verify_ip", names[1]), ("-verify_ip", names[2])):
        options = ("-CAfile", tmp_path / "ca.crt", option, name)
        assert openssl("verify", *options, tmp_path / "leaf.crt").returncode == 0
    wrong = openssl(
        "verify", "-CAfile", tmp_path / "ca.crt", "-verify_hostname", "other.example", tmp_path / "leaf.crt"
    )
    assert wrong.returncode != 0
    for bad in ("", "a b", "*", "-x", "x" * 300, "http://x"):
        with pytest.raises(UsageError):
            authority.issue_server(key, [bad], days=30, now=NOW)


def test_no_program_is_named_like_a_board(authority: Authority) -> None:
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    for name in ("0123456789abcdef" * 2, "", "x" * 65):
        with pytest.raises(UsageError, match="cannot be a program's"):
            authority.issue_client(key, name, days=1, now=NOW)


def test_a_revocation_list_refuses_who_is_on_it_and_lasts_as_the_authority(
    authority: Authority, tmp_path: Path
) -> None:
    gone, member = certified(authority), certified(authority)
    crl = authority.revocation_list([(gone.certificate.serial_number, time.time())], now=NOW)
    assert not verified(tmp_path, pem_of([gone.certificate]), "sslclient", crl)
    assert verified(tmp_path, pem_of([member.certificate]), "sslclient", crl)
    nobody = authority.revocation_list([], now=NOW)
    assert verified(tmp_path, pem_of([gone.certificate]), "sslclient", nobody)
    # Ten years later brokers still let members in.
    later = str(int(time.time()) + 10 * 365 * 86_400)
    long_lived = certified(authority, days=7300)
    (tmp_path / "leaf.crt").write_bytes(pem_of([long_lived.certificate]))
    options = (
        "-attime",
        later,
        "-crl_check",
        "-CRLfile",
        tmp_path / "list.crl",
        "-CAfile",
        tmp_path / "ca.crt",
    )
    assert openssl("verify", *options, tmp_path / "leaf.crt").returncode == 0


def test_an_authority_is_begun_once(authority: Authority, tmp_path: Path) -> None:
    assert load_authorities(tmp_path, now=NOW).issuing.fingerprint == authority.fingerprint
    with pytest.raises(UsageError, match="every board must then enrol again"):
        new_authority(tmp_path)
    (tmp_path / "ca.key").chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_authorities(tmp_path, now=NOW)
    with pytest.raises(ConfigurationError, match="ca init"):
        load_authorities(tmp_path / "elsewhere", now=NOW)


def test_the_operators_own_authority_issues_below_its_root(tmp_path: Path) -> None:
    """A root and an intermediate that OpenSSL made, as a company has them."""
    root, own, fleet = tmp_path / "root", tmp_path / "own", tmp_path / "fleet"
    usage = "keyUsage=critical,keyCertSign,cRLSign"
    for name, subject in ((root, "/CN=root"), (own, "/CN=fleets")):
        made = openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes", "-subj", subject,
            "-keyout", f"{name}.key", "-out", f"{name}.crt", "-x509", "-days", "30",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", usage,
            *(() if name == root else ("-CA", f"{root}.crt", "-CAkey", f"{root}.key")),
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    chain = tmp_path / "chain.crt"
    chain.write_bytes((tmp_path / "own.crt").read_bytes() + (tmp_path / "root.crt").read_bytes())
    authority = adopt_authority(fleet, chain, tmp_path / "own.key", now=datetime.now(UTC))
    assert verified(fleet, pem_of([certified(authority, days=7).certificate]), "sslclient")
    assert len(authority.chain) == 2
    for certificate, key in ((chain, "root.key"), (tmp_path / "root.key", "own.key"), (chain, "own.crt")):
        with pytest.raises(ConfigurationError):
            adopt_authority(tmp_path / "other", certificate, tmp_path / key, now=datetime.now(UTC))
    backwards = tmp_path / "backwards.crt"
    backwards.write_bytes((tmp_path / "root.crt").read_bytes() + (tmp_path / "own.crt").read_bytes())
    with pytest.raises(ConfigurationError, match="is not issued by the certificate after it"):
        adopt_authority(tmp_path / "other", backwards, tmp_path / "root.key", now=datetime.now(UTC))
    assert not (tmp_path / "other").exists()


def test_a_certificate_that_may_not_issue_makes_no_authority(authority: Authority, tmp_path: Path) -> None:
    board = certified(authority)
    (tmp_path / "board.crt").write_bytes(pem_of([board.certificate, authority.certificate]))
    (tmp_path / "board.key").write_bytes(key_pem(board.private_key))
    with pytest.raises(ConfigurationError, match="CA:TRUE"):
        adopt_authority(
            tmp_path / "other", tmp_path / "board.crt", tmp_path / "board.key", now=datetime.now(UTC)
        )


def test_during_a_change_two_are_trusted_and_the_new_one_issues(authority: Authority, tmp_path: Path) -> None:
    during = begin_change(tmp_path, "meadow", None, now=NOW)
    assert during.retiring is not None
    assert during.anchor.fingerprint == authority.fingerprint
    assert load_authorities(tmp_path, now=NOW).issuing.fingerprint == during.issuing.fingerprint
    old, new = certified(authority).certificate, certified(during.issuing).certificate
    for each in (old, new):
        assert verified(tmp_path, pem_of([each]), "sslclient")
        lists = during.revocation_lists([], now=NOW)
        assert verified(tmp_path, pem_of([each]), "sslclient", b"".join(lists))
        gone = during.revocation_lists([(each.serial_number, time.time())], now=NOW)
        assert not verified(tmp_path, pem_of([each]), "sslclient", b"".join(gone))
    assert (during.issuing.has_issued(old), during.issuing.has_issued(new)) == (False, True)
    with pytest.raises(UsageError, match="under way"):
        begin_change(tmp_path, "meadow", None, now=NOW)
    after = end_change(tmp_path, now=NOW)
    assert after.retiring is None
    assert verified(tmp_path, pem_of([new]), "sslclient")
    assert not verified(tmp_path, pem_of([old]), "sslclient")
    assert (tmp_path / "ca.key").read_text().count("BEGIN") == 1
    with pytest.raises(UsageError, match="No authority retires"):
        end_change(tmp_path, now=NOW)


@pytest.mark.parametrize("step", ["begin", "end"])
def test_a_change_that_is_cut_off_after_any_file_leaves_authorities_that_can_issue(
    authority: Authority, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut: what is on disk is the files before one of the writes."""
    if step == "end":
        begin_change(tmp_path, "meadow", None, now=NOW)

    class CutError(Exception):
        pass

    def cut(path: Path, data: bytes, *, mode: int = 0o644) -> None:
        if writes[0] == 0:
            raise CutError
        writes[0] -= 1
        write_atomically(path, data, mode=mode)

    for number in (0, 1):
        writes = [number]
        with monkeypatch.context() as patch:
            patch.setattr("coordinator.authority.write_atomically", cut)
            with pytest.raises(CutError):
                end_change(tmp_path, now=NOW) if step == "end" else begin_change(
                    tmp_path, "meadow", None, now=NOW
                )
        for each in load_authorities(tmp_path, now=NOW).all:
            assert verified(tmp_path, pem_of([certified(each).certificate]), "sslclient")
    assert (tmp_path / "ca.key").read_text().count("BEGIN") == 2
    end_change(tmp_path, now=NOW)
    assert (tmp_path / "ca.key").read_text().count("BEGIN") == 1


def test_an_authority_does_not_follow_itself(authority: Authority, tmp_path: Path) -> None:
    given = tmp_path / "ca.crt", tmp_path / "ca.key"
    with pytest.raises(UsageError, match="of another name"):
        begin_change(tmp_path, "meadow", given, now=NOW)


def test_two_authorities_in_one_file_are_not_adopted(authority: Authority, tmp_path: Path) -> None:
    begin_change(tmp_path, "meadow", None, now=NOW)
    with pytest.raises(ConfigurationError, match="is not issued by the certificate after it"):
        adopt_authority(tmp_path / "other", tmp_path / "ca.crt", tmp_path / "ca.key", now=NOW)

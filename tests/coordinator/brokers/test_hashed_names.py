"""The hash of a name, against OpenSSL's."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.brokers.hashed_names import name_hash

KEY = ec.generate_private_key(ec.SECP256R1())
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from(" \tAZaz"), min_size=1
)
NAMES = TEXTS.filter(lambda text: len(text.encode()) <= 64)


@given(common=NAMES, organisation=NAMES)
@example(common="Fleet  CA", organisation="Müller & Söhne GmbH, ÄÖ")
@example(common="x" * 64, organisation="y" * 64)
@settings(max_examples=25, deadline=None)
def test_a_name_is_found_where_openssl_looks(common: str, organisation: str) -> None:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.COUNTRY_NAME, "DE"),
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation),
            x509.NameAttribute(NameOID.COMMON_NAME, common),
        ]
    )
    now = datetime.now(UTC)
    listed = x509.CertificateRevocationListBuilder(name, now, now + timedelta(days=1))
    pem = listed.sign(KEY, hashes.SHA256()).public_bytes(Encoding.PEM)
    said = subprocess.run(
        ["openssl", "crl", "-hash", "-noout"], input=pem, capture_output=True, timeout=30, check=True
    )
    assert said.stdout.decode().strip() == name_hash(name)

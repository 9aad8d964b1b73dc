"""What encryption costs both ends of a link: TLS 1.3 of the standard library, and Noise records.

    python benchmarks/ciphers.py [--rounds 15] [--json]

Both ends are in this process, without a socket between them: TLS through memory BIOs, with
self-signed Ed25519 certificates that each end pins; Noise records with ChaCha20-Poly1305 and with
AES-256-GCM. The kinds take turns, and the least processor time of all rounds counts, so that other
programs on the machine disturb little. To see a processor without instructions for AES (x86):

    OPENSSL_ia32cap=~0x200000200000000 python benchmarks/ciphers.py
"""

import argparse
import datetime
import json
import os
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from linkcpp.link.noise import KK, XX_PSK0, CipherState, Handshake, Pattern

_SIZES_BYTES = (64, 1 << 10, 16 << 10, 60 << 10)
_ROUND_BYTES = 4 << 20
_MAX_ROUND_RECORDS = 2_000
_ROUND_HANDSHAKES = 50


class _ChaChaState(CipherState):
    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._cipher = cast(AESGCM, ChaCha20Poly1305(key))  # both are called alike


class TlsMachine:
    """A machine with a certificate of its own, valid for ever so that no clock matters."""

    def __init__(self, folder: Path, name: str) -> None:
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC))
            .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC))
            .sign(key, None)
        )
        self.certificate = certificate.public_bytes(Encoding.PEM).decode()
        self._file = folder / f"{name}.pem"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._file.write_bytes(private + self.certificate.encode())

    def context(self, protocol: int, peer: "TlsMachine") -> ssl.SSLContext:
        """Make what a connection to or from one peer needs: only that peer is taken."""
        made = ssl.SSLContext(protocol)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(self._file)
        made.load_verify_locations(cadata=peer.certificate)
        return made


class _TlsPair:
    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
        to_client, self._to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        from_server, self._from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._client = client.wrap_bio(to_client, self._from_client)
        self._server = server.wrap_bio(self._to_server, from_server, server_side=True)
        waiting = [self._client, self._server]
        while waiting:
            for end in list(waiting):
                try:
                    end.do_handshake()
                    waiting.remove(end)
                except ssl.SSLWantReadError:
                    pass
                self._to_server.write(self._from_client.read())
                to_client.write(from_server.read())

    def carry(self, record: bytes) -> int:
        """Send from the client to the server; return how many bytes came."""
        self._client.write(record)
        self._to_server.write(self._from_client.read())
        size = 0
        while size < len(record):
            size += len(self._server.read(len(record) - size))
        return size


def tls_contexts(client: TlsMachine, server: TlsMachine) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make what the client and what the server needs, for connections between two machines."""
    return (
        client.context(ssl.PROTOCOL_TLS_CLIENT, server),
        server.context(ssl.PROTOCOL_TLS_SERVER, client),
    )


def _noise_carrier(kind: type[CipherState]) -> Callable[[bytes], int]:
    key = os.urandom(32)
    sending, receiving = kind(key), kind(key)
    return lambda record: len(receiving.decrypt(sending.encrypt(record)))


def _shake_noise_hands(
    pattern: Pattern, keys: tuple[X25519PrivateKey, X25519PrivateKey], psk: bytes
) -> None:
    writer, reader = (
        Handshake(
            pattern,
            is_initiator=is_initiator,
            static_key=own,
            peer_static_key=peer.public_key() if pattern.pre_messages else None,
            psk=psk if pattern.has_psk else None,
            prologue=b"",
        )
        for is_initiator, own, peer in ((True, keys[0], keys[1]), (False, keys[1], keys[0]))
    )
    for _ in pattern.messages:
        reader.read_message(writer.write_message(bytes(40)))
        writer, reader = reader, writer
    assert writer.finish().handshake_hash == reader.finish().handshake_hash


def _least(rounds: int, calls: Mapping[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Return the least processor microseconds of one call, of each kind, over all rounds."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for kind, call in calls.items():
            begun = time.process_time()
            for _ in range(count):
                call()
            least[kind] = min(least[kind], (time.process_time() - begun) / count * 1e6)
    return least


def _measure_records(rounds: int, tls: _TlsPair) -> dict[int, dict[str, float]]:
    carriers = {
        "TLS 1.3": tls.carry,
        "ChaCha20-Poly1305": _noise_carrier(_ChaChaState),
        "AES-256-GCM": _noise_carrier(CipherState),
    }
    measured = {}
    for size in _SIZES_BYTES:
        record = os.urandom(size)
        assert all(carry(record) == size for carry in carriers.values())
        calls = {kind: partial(carry, record) for kind, carry in carriers.items()}
        count = min(_ROUND_BYTES // size, _MAX_ROUND_RECORDS)
        measured[size] = _least(rounds, calls, count)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    keys = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    psk = os.urandom(32)
    with tempfile.TemporaryDirectory() as folder:
        machines = [TlsMachine(Path(folder), name) for name in ("client", "server")]
        contexts = tls_contexts(*machines)
        records = _measure_records(arguments.rounds, _TlsPair(*contexts))
        handshakes = _least(
            arguments.rounds,
            {
                "TLS 1.3": lambda: _TlsPair(*contexts),
                "TLS 1.3 with new contexts": lambda: _TlsPair(*tls_contexts(*machines)),
                "Noise KK": lambda: _shake_noise_hands(KK, keys, psk),
                "Noise XXpsk0": lambda: _shake_noise_hands(XX_PSK0, keys, psk),
            },
            _ROUND_HANDSHAKES,
        )
    if arguments.json:
        print(json.dumps({"record_us": records, "handshake_us": handshakes}))
        return
    print("both ends together, processor time\n")
    for size, costs in records.items():
        for kind, cost_us in costs.items():
            ratio = cost_us / costs["AES-256-GCM"]
            seconds_a_gb = cost_us / size * 1e3
            print(f"{size:7,} B  {kind:18} {cost_us:8.1f} us {seconds_a_gb:7.2f} s/GB {ratio:6.2f}")
    for kind, cost_us in handshakes.items():
        print(f"handshake  {kind:26} {cost_us:8.0f} us")


if __name__ == "__main__":
    main()

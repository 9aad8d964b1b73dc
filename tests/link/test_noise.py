"""The handshakes against published vectors, another implementation, and those who alter them."""

import random
from unittest.mock import Mock

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from dissononce.cipher.aesgcm import AESGCMCipher
from dissononce.dh.x25519.private import PrivateKey
from dissononce.dh.x25519.public import PublicKey
from dissononce.dh.x25519.x25519 import X25519DH
from dissononce.hash.sha256 import SHA256Hash
from dissononce.processing.handshakepatterns.interactive.KK import KKHandshakePattern
from dissononce.processing.handshakepatterns.interactive.XX import XXHandshakePattern
from dissononce.processing.impl.cipherstate import CipherState as OtherCipherState
from dissononce.processing.impl.handshakestate import HandshakeState
from dissononce.processing.impl.symmetricstate import SymmetricState
from dissononce.processing.modifiers.psk import PSKPatternModifier
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.link.noise import (
    KK,
    MAX_MESSAGE_BYTES,
    TAG_BYTES,
    XX_PSK0,
    CipherState,
    Handshake,
    NoiseError,
    Pattern,
)
from tests.support.lengths import repeated

HANDSHAKE_MESSAGES = [
    pytest.param(pattern, number, id=f"{pattern.name}-{number}")
    for pattern in (KK, XX_PSK0)
    for number in range(len(pattern.messages))
]
PATTERNS = [pytest.param(pattern, id=pattern.name) for pattern in (KK, XX_PSK0)]

# The vector of this suite in the collection that the Haskell implementation "cacophony" published.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
INITIATOR_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
RESPONDER_PUBLIC = "31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"
INITIATOR_PUBLIC = "6bc3822a2aa7f4e6981d6538692b3cdf3e6df9eea6ed269eb41d93c22757b75a"
HANDSHAKE_HASH = "c03693acd830588fac76dd414c9e100e8c601d27511de855100239f7705fa3f2"
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "8564738a841228e693caeec4c497a8bd562231c3e51a1f03c4fd45dfe3a67870",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "b94504c4d83506f5dd2568b68490eba8ed6f9cf2cca194a273c56d7ae3c558",
    ),
    ("462e20412e20486179656b", "6a5c10a201d4e3a08f79f64949e55731f774913a4d949bda3fcebf"),
    ("4361726c204d656e676572", "4e8a1bf06926fdd74e2f516e2b0c11cc1dc3387fadeb75389d4342"),
    (
        "4a65616e2d426170746973746520536179",
        "c1df7194ca8ea51d4dd99059bc9b90288112d47237d8481f1773fb26a31629a05c",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "3edba4feaf590ee88dd8f5fba51db4bee651cf41afd410fe476c524ac9b1db24252fc55ff8",
    ),
]
# The last message of this pattern's handshake in the tests of the Rust implementation "snow".
XX_PSK0_LAST = (
    "1b6d7cc3b13bd02217f9cdb98c50870db96281193dca4df570bf6230a603b686"
    "fd90d2914c7e797d9276ef8fb34b0c9d87faa048ce4bc7e7af21b6a450352275"
)
PSK = bytes(range(32))


def private(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def public(text: str) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(bytes.fromhex(text))


def side(
    pattern: Pattern,
    *,
    is_initiator: bool,
    static_key: X25519PrivateKey | None = None,
    peer_static_key: X25519PublicKey | None = None,
    psk: bytes = PSK,
    prologue: bytes = PROLOGUE,
    ephemeral_key: X25519PrivateKey | None = None,
) -> Handshake:
    """One side with the keys of the published vector, where no others are given."""
    own, peer = (INITIATOR_STATIC, RESPONDER_PUBLIC), (RESPONDER_STATIC, INITIATOR_PUBLIC)
    own_text, peer_text = own if is_initiator else peer
    return Handshake(
        pattern,
        is_initiator=is_initiator,
        static_key=static_key or private(own_text),
        peer_static_key=(peer_static_key or public(peer_text)) if pattern.pre_messages else None,
        psk=psk if pattern.has_psk else None,
        prologue=prologue,
        ephemeral_key=ephemeral_key
        or private(INITIATOR_EPHEMERAL if is_initiator else RESPONDER_EPHEMERAL),
    )


def pair(pattern: Pattern, *, prologue: bytes = PROLOGUE) -> tuple[Handshake, Handshake]:
    return side(pattern, is_initiator=True), side(pattern, is_initiator=False, prologue=prologue)


def exchange(pattern: Pattern, number: int) -> tuple[Handshake, bytes]:
    """Shake hands as far as message ``number``; return who reads it, and the message."""
    writer, reader = pair(pattern)
    for _ in range(number):
        reader.read_message(writer.write_message(b"hello"))
        writer, reader = reader, writer
    return reader, writer.write_message(b"hello")


def every_message(pattern: Pattern) -> range:
    return range(len(pattern.messages))


def test_the_published_vector() -> None:
    initiator, responder = pair(KK)
    first, second, *rest = [tuple(map(bytes.fromhex, message)) for message in MESSAGES]
    assert initiator.write_message(first[0]) == first[1]
    assert responder.read_message(first[1]) == first[0]
    assert responder.write_message(second[0]) == second[1]
    assert initiator.read_message(second[1]) == second[0]
    left, right = initiator.finish(), responder.finish()
    assert left.handshake_hash == right.handshake_hash == bytes.fromhex(HANDSHAKE_HASH)
    for turn, (payload, ciphertext) in enumerate(rest):
        sender, receiver = (left, right) if turn % 2 == 0 else (right, left)
        assert sender.sending.encrypt(payload) == ciphertext
        assert receiver.receiving.decrypt(ciphertext) == payload


def test_the_published_vector_with_a_shared_secret() -> None:
    def counted_from(first: int) -> bytes:
        return bytes(range(first, first + 32))

    initiator, responder = (
        Handshake(
            XX_PSK0,
            is_initiator=is_initiator,
            static_key=X25519PrivateKey.from_private_bytes(counted_from(static)),
            psk=counted_from(4),
            prologue=bytes([1, 2, 3]),
            ephemeral_key=X25519PrivateKey.from_private_bytes(counted_from(ephemeral)),
        )
        for is_initiator, static, ephemeral in ((True, 0, 32), (False, 1, 33))
    )
    assert responder.read_message(initiator.write_message(b"abc")) == b"abc"
    assert initiator.read_message(responder.write_message(b"defg")) == b"defg"
    last = initiator.write_message(b"")
    assert last.hex() == XX_PSK0_LAST
    assert responder.read_message(last) == b""


def other_side(
    pattern: Pattern, *, is_initiator: bool, static: bytes, peer_static: bytes, prologue: bytes
) -> HandshakeState:
    """The same side as the other implementation has it."""
    other = HandshakeState(
        SymmetricState(OtherCipherState(AESGCMCipher()), SHA256Hash()), X25519DH()
    )
    is_kk = pattern is KK
    other.initialize(
        KKHandshakePattern() if is_kk else PSKPatternModifier(0).modify(XXHandshakePattern()),
        is_initiator,
        prologue,
        s=X25519DH().generate_keypair(PrivateKey(static)),
        rs=PublicKey(peer_static) if is_kk else None,
        psks=None if is_kk else [PSK],
    )
    assert other.protocol_name.encode() == pattern.protocol_name
    return other


@pytest.mark.parametrize("pattern", PATTERNS)
@given(payloads=st.lists(st.binary(max_size=300), min_size=3, max_size=3), asks=st.booleans())
def test_another_implementation_understands_it(
    pattern: Pattern, payloads: list[bytes], asks: bool
) -> None:
    own_static, peer_static = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    own = side(
        pattern,
        is_initiator=asks,
        static_key=own_static,
        peer_static_key=peer_static.public_key(),
        prologue=payloads[0],
    )
    other = other_side(
        pattern,
        is_initiator=not asks,
        static=peer_static.private_bytes_raw(),
        peer_static=own_static.public_key().public_bytes_raw(),
        prologue=payloads[0],
    )
    ciphers = None
    for number, payload in zip(every_message(pattern), payloads, strict=False):
        buffer = bytearray()
        if (number % 2 == 0) == asks:
            ciphers = other.read_message(own.write_message(payload), buffer)
            assert bytes(buffer) == payload
        else:
            ciphers = other.write_message(payload, buffer)
            assert own.read_message(bytes(buffer)) == payload
    keys = own.finish()
    assert own.peer_static_key == peer_static.public_key()
    assert keys.handshake_hash == other.symmetricstate.get_handshake_hash()
    assert ciphers is not None
    other_receives, other_sends = ciphers if asks else reversed(ciphers)
    for payload in payloads:
        assert other_receives.decrypt_with_ad(b"", keys.sending.encrypt(payload)) == payload
        assert keys.receiving.decrypt(other_sends.encrypt_with_ad(b"", payload)) == payload


def test_the_peers_key_is_known_once_the_message_that_proves_it_was_read() -> None:
    initiator, responder = pair(XX_PSK0)
    responder.read_message(initiator.write_message(b""))
    assert initiator.peer_static_key is None
    initiator.read_message(responder.write_message(b""))
    assert initiator.peer_static_key == public(RESPONDER_PUBLIC)
    last = initiator.write_message(b"")
    assert responder.peer_static_key is None
    with pytest.raises(NoiseError):
        responder.read_message(last[:-1] + bytes([last[-1] ^ 1]))
    assert responder.peer_static_key is None


def test_a_first_message_with_another_secret_costs_no_operation_with_a_key() -> None:
    first = side(XX_PSK0, is_initiator=True, psk=bytes(32)).write_message(b"")
    own = Mock(spec=X25519PrivateKey)
    responder = Handshake(
        XX_PSK0,
        is_initiator=False,
        static_key=own,
        psk=PSK,
        prologue=PROLOGUE,
        ephemeral_key=own,
    )
    with pytest.raises(NoiseError, match="altered"):
        responder.read_message(first)
    assert own.mock_calls == []


@pytest.mark.parametrize("place", [0, 31, 32, 40, -17, -1])
@pytest.mark.parametrize(("pattern", "number"), HANDSHAKE_MESSAGES)
def test_an_altered_handshake_message_is_refused_and_ends_the_handshake(
    pattern: Pattern, number: int, place: int
) -> None:
    reader, message = exchange(pattern, number)
    altered = bytearray(message)
    altered[place] ^= 1
    with pytest.raises(NoiseError):
        reader.read_message(bytes(altered))
    with pytest.raises(NoiseError, match="has ended"):
        reader.read_message(message)
    with pytest.raises(NoiseError, match="not complete"):
        reader.finish()


@pytest.mark.parametrize(("pattern", "number"), HANDSHAKE_MESSAGES)
def test_a_message_of_another_handshake_is_refused(pattern: Pattern, number: int) -> None:
    _, recorded = exchange(pattern, number)
    writer, reader = (
        side(pattern, is_initiator=is_initiator, ephemeral_key=X25519PrivateKey.generate())
        for is_initiator in (True, False)
    )
    for _ in range(number):
        reader.read_message(writer.write_message(b""))
        writer, reader = reader, writer
    if number == 0:
        # A recorded first message opens, but whoever sends it can go no further.
        assert reader.read_message(recorded) == b"hello"
        reader.write_message(b"")
    else:
        with pytest.raises(NoiseError):
            reader.read_message(recorded)


@pytest.mark.parametrize("size", [0, 31, 47, MAX_MESSAGE_BYTES + 1])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_message_of_an_impossible_size_is_refused(pattern: Pattern, size: int) -> None:
    _, responder = pair(pattern)
    with pytest.raises(NoiseError, match="too short or too long"):
        responder.read_message(bytes(size))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_payload_that_fits_no_message_is_refused(pattern: Pattern) -> None:
    for size, fits in ((MAX_MESSAGE_BYTES - 48, True), (MAX_MESSAGE_BYTES - 47, False)):
        initiator, responder = pair(pattern)
        if fits:
            assert len(responder.read_message(initiator.write_message(bytes(size)))) == size
        else:
            with pytest.raises(NoiseError, match="longer than the protocol allows"):
                initiator.write_message(bytes(size))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_other_prologues_do_not_meet(pattern: Pattern) -> None:
    initiator, responder = pair(pattern, prologue=b"another edge")
    with pytest.raises(NoiseError):
        responder.read_message(initiator.write_message(b""))


def test_a_stranger_does_not_meet_who_expects_another_key() -> None:
    stranger = side(KK, is_initiator=True, static_key=X25519PrivateKey.generate())
    _, responder = pair(KK)
    with pytest.raises(NoiseError):
        responder.read_message(stranger.write_message(b""))
    initiator = side(
        KK, is_initiator=True, peer_static_key=X25519PrivateKey.generate().public_key()
    )
    _, responder = pair(KK)
    with pytest.raises(NoiseError):
        responder.read_message(initiator.write_message(b""))


@pytest.mark.parametrize(
    ("pattern", "peer_static_key", "psk"),
    [
        (KK, None, None),
        (KK, public(RESPONDER_PUBLIC), PSK),
        (XX_PSK0, public(RESPONDER_PUBLIC), PSK),
        (XX_PSK0, None, None),
        (XX_PSK0, None, b""),
        (XX_PSK0, None, PSK[:-1]),
    ],
)
def test_a_handshake_begins_only_with_what_its_pattern_needs(
    pattern: Pattern, peer_static_key: X25519PublicKey | None, psk: bytes | None
) -> None:
    with pytest.raises(ValueError, match="does not fit the pattern"):
        Handshake(
            pattern,
            is_initiator=True,
            static_key=private(INITIATOR_STATIC),
            peer_static_key=peer_static_key,
            psk=psk,
            prologue=b"",
        )


def test_a_key_that_makes_every_secret_zero_is_refused() -> None:
    _, responder = pair(KK)
    with pytest.raises(NoiseError, match="not a usable one"):
        responder.read_message(bytes(32) + bytes(TAG_BYTES))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_messages_out_of_turn_are_refused_and_change_nothing(pattern: Pattern) -> None:
    writer, reader = pair(pattern)
    for _ in every_message(pattern):
        with pytest.raises(NoiseError, match="out of turn"):
            reader.write_message(b"")
        with pytest.raises(NoiseError, match="out of turn"):
            writer.read_message(b"")
        with pytest.raises(NoiseError, match="not complete"):
            writer.finish()
        reader.read_message(writer.write_message(b""))
        writer, reader = reader, writer
    assert writer.finish().handshake_hash == reader.finish().handshake_hash
    with pytest.raises(NoiseError, match="has ended"):
        writer.write_message(b"")


def altered(message: bytes, others: list[bytes], seeded: random.Random) -> bytes:
    """Return something that is not ``message``."""
    changed = bytearray(message)
    match seeded.randrange(5):
        case 0:
            changed[seeded.randrange(len(message))] ^= 1 << seeded.randrange(8)
        case 1:
            del changed[seeded.randrange(len(message)) :]
        case 2:
            changed += seeded.randbytes(seeded.randint(1, 40))
        case 3:
            changed[:] = seeded.randbytes(seeded.randint(0, 200))
        case _:
            changed[:] = seeded.choice(others)
    return bytes(changed)


def test_nothing_but_the_next_record_opens() -> None:
    seeded = random.Random(17)  # noqa: S311
    key = seeded.randbytes(32)
    sending = CipherState(key)
    payloads = [seeded.randbytes(seeded.randint(0, 120)) for _ in range(20)]
    records = [sending.encrypt(payload) for payload in payloads]
    for turn in range(repeated(40_000)):
        receiving = CipherState(key)
        taken = turn % 4
        for record in records[:taken]:
            receiving.decrypt(record)
        others = records[:taken] + records[taken + 1 :]
        with pytest.raises(NoiseError):
            receiving.decrypt(altered(records[taken], others, seeded))


@pytest.mark.parametrize(("pattern", "number"), HANDSHAKE_MESSAGES)
def test_no_handshake_message_opens_but_the_right_one(pattern: Pattern, number: int) -> None:
    seeded = random.Random(number)  # noqa: S311
    others = [
        exchange(other, turn)[1]
        for other in (KK, XX_PSK0)
        for turn in every_message(other)
        if (other, turn) != (pattern, number)
    ]
    for _ in range(repeated(100)):
        reader, message = exchange(pattern, number)
        with pytest.raises(NoiseError):
            reader.read_message(altered(message, others, seeded))

"""The handshake against published vectors, another implementation, and those who alter it."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from dissononce.cipher.chachapoly import ChaChaPolyCipher
from dissononce.dh.x25519.private import PrivateKey
from dissononce.dh.x25519.public import PublicKey
from dissononce.dh.x25519.x25519 import X25519DH
from dissononce.hash.sha256 import SHA256Hash
from dissononce.processing.handshakepatterns.interactive.KK import KKHandshakePattern
from dissononce.processing.impl.cipherstate import CipherState as OtherCipherState
from dissononce.processing.impl.handshakestate import HandshakeState
from dissononce.processing.impl.symmetricstate import SymmetricState
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.link.noise import MAX_MESSAGE_BYTES, TAG_BYTES, Handshake, NoiseError

# The vector of this suite in the collection that the Haskell implementation "cacophony" published.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
INITIATOR_STATIC = "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1"
INITIATOR_EPHEMERAL = "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
RESPONDER_STATIC = "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893"
RESPONDER_EPHEMERAL = "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
RESPONDER_PUBLIC = "31e0303fd6418d2f8c0e78b91f22e8caed0fbe48656dcf4767e4834f701b8f62"
INITIATOR_PUBLIC = "6bc3822a2aa7f4e6981d6538692b3cdf3e6df9eea6ed269eb41d93c22757b75a"
HANDSHAKE_HASH = "24c6b51ecb76277140ca018b5985bc9f03de321dae2d34dcae433dafef0131d9"
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "0177015efc1fe7a37c629af7120a96274e6ab7afcc9261901d0e09ae32a5bb96",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "b274d3429adc47ca093ba63ef90f8da89fda108db471dccfa4894aa7b00003",
    ),
    ("462e20412e20486179656b", "966b05bc69ec01b8454d3160a214e6f24a3d884eb31ec2408af63f"),
    ("4361726c204d656e676572", "0ad887fba4f611bbb4afe44ba3556b8164332ca7d5934634d63d80"),
    (
        "4a65616e2d426170746973746520536179",
        "012b28ae646ae7830e2c5472cb023eab071c1db3d8413ec69b513b83832f974c2d",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "bb3e6a48160d9c5971d37f975727294e0d868342db31832e54d07191ab0ca3c3703b5ed3d9",
    ),
]


def private(text: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(text))


def public(text: str) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(bytes.fromhex(text))


def pair(*, prologue: bytes = PROLOGUE) -> tuple[Handshake, Handshake]:
    initiator = Handshake(
        is_initiator=True,
        static_key=private(INITIATOR_STATIC),
        peer_static_key=public(RESPONDER_PUBLIC),
        prologue=PROLOGUE,
        ephemeral_key=private(INITIATOR_EPHEMERAL),
    )
    responder = Handshake(
        is_initiator=False,
        static_key=private(RESPONDER_STATIC),
        peer_static_key=public(INITIATOR_PUBLIC),
        prologue=prologue,
        ephemeral_key=private(RESPONDER_EPHEMERAL),
    )
    return initiator, responder


def test_the_published_vector() -> None:
    initiator, responder = pair()
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


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=64), st.booleans())
def test_another_implementation_understands_it(
    question: bytes, answer: bytes, prologue: bytes, other_asks: bool
) -> None:
    own_static, peer_static = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    own = Handshake(
        is_initiator=not other_asks,
        static_key=own_static,
        peer_static_key=peer_static.public_key(),
        prologue=prologue,
    )
    other = HandshakeState(
        SymmetricState(OtherCipherState(ChaChaPolyCipher()), SHA256Hash()), X25519DH()
    )
    pair_of_other = X25519DH().generate_keypair(PrivateKey(peer_static.private_bytes_raw()))
    other.initialize(
        KKHandshakePattern(),
        other_asks,
        prologue,
        s=pair_of_other,
        rs=PublicKey(own_static.public_key().public_bytes_raw()),
    )
    message, payload = bytearray(), bytearray()
    if other_asks:
        other.write_message(question, message)
        assert own.read_message(bytes(message)) == question
        ciphers = other.read_message(own.write_message(answer), payload)
        assert bytes(payload) == answer
        other_sends, other_receives = ciphers
    else:
        other.read_message(own.write_message(question), payload)
        assert bytes(payload) == question
        ciphers = other.write_message(answer, message)
        assert own.read_message(bytes(message)) == answer
        other_receives, other_sends = ciphers
    keys = own.finish()
    for _ in range(3):
        sealed = keys.sending.encrypt(question)
        assert other_receives.decrypt_with_ad(b"", sealed) == question
        assert keys.receiving.decrypt(other_sends.encrypt_with_ad(b"", answer)) == answer


@pytest.mark.parametrize("message", [0, 1])
@pytest.mark.parametrize("place", [0, 31, 32, 40, -1])
def test_an_altered_handshake_message_is_refused(message: int, place: int) -> None:
    initiator, responder = pair()
    altered = bytearray(initiator.write_message(b"hello, node"))
    if message == 0:
        altered[place] ^= 1
        with pytest.raises(NoiseError):
            responder.read_message(bytes(altered))
        return
    responder.read_message(bytes(altered))
    altered = bytearray(responder.write_message(b"hello, backbone"))
    altered[place] ^= 1
    with pytest.raises(NoiseError):
        initiator.read_message(bytes(altered))


@pytest.mark.parametrize("size", [0, 31, 47, MAX_MESSAGE_BYTES + 1])
def test_a_message_of_an_impossible_size_is_refused(size: int) -> None:
    _, responder = pair()
    with pytest.raises(NoiseError, match="too short or too long"):
        responder.read_message(bytes(size))


def test_other_prologues_and_other_keys_do_not_meet() -> None:
    initiator, responder = pair(prologue=b"another edge")
    with pytest.raises(NoiseError):
        responder.read_message(initiator.write_message(b""))
    stranger = Handshake(
        is_initiator=True,
        static_key=X25519PrivateKey.generate(),
        peer_static_key=public(RESPONDER_PUBLIC),
        prologue=PROLOGUE,
    )
    _, responder = pair()
    with pytest.raises(NoiseError):
        responder.read_message(stranger.write_message(b""))


def test_a_key_that_makes_every_secret_zero_is_refused() -> None:
    _, responder = pair()
    with pytest.raises(NoiseError, match="not a usable one"):
        responder.read_message(bytes(32) + bytes(TAG_BYTES))


def test_messages_out_of_turn_are_refused() -> None:
    initiator, responder = pair()
    with pytest.raises(NoiseError, match="out of turn"):
        responder.write_message(b"")
    first = initiator.write_message(b"")
    with pytest.raises(NoiseError, match="out of turn"):
        initiator.write_message(b"")
    with pytest.raises(NoiseError, match="not complete"):
        initiator.finish()
    responder.read_message(first)
    with pytest.raises(NoiseError, match="out of turn"):
        responder.read_message(first)

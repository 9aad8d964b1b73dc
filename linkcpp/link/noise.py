"""The Noise Protocol Framework's KK handshake (revision 34), with one suite of algorithms.

``Noise_KK_25519_ChaChaPoly_SHA256``: both sides know each other's static public key beforehand, and
two messages give them keys that no recording opens later, even with both static keys. The names
are those of the specification (https://noiseprotocol.org/noise.html).
"""

from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PROTOCOL_NAME = b"Noise_KK_25519_ChaChaPoly_SHA256"
MAX_MESSAGE_BYTES = 65_535
KEY_BYTES = 32
TAG_BYTES = 16

_MAX_NONCE = 2**64 - 1  # the specification keeps the last one for itself


class NoiseError(Exception):
    """A message was altered, comes out of turn, or was made with other keys."""


class CipherState:
    """A key and the number of the next message; every message is sealed or opened once."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._nonce = 0

    def encrypt(self, plaintext: bytes, associated_data: bytes = b"") -> bytes:
        """Return the ciphertext and its tag.

        Raises:
            NoiseError: the message is too long, or the numbers are used up.
        """
        if len(plaintext) > MAX_MESSAGE_BYTES - TAG_BYTES:
            raise NoiseError("a message is longer than the protocol allows")
        return self._cipher.encrypt(self._next_nonce(), plaintext, associated_data)

    def decrypt(self, ciphertext: bytes, associated_data: bytes = b"") -> bytes:
        """Return the plaintext.

        Raises:
            NoiseError: the message is not the next one that the peer sealed.
        """
        if not TAG_BYTES <= len(ciphertext) <= MAX_MESSAGE_BYTES:
            raise NoiseError("a message is too short or too long")
        try:
            return self._cipher.decrypt(self._next_nonce(), ciphertext, associated_data)
        except InvalidTag:
            raise NoiseError("a message was altered, left out, repeated or reordered") from None

    def _next_nonce(self) -> bytes:
        if self._nonce >= _MAX_NONCE:
            raise NoiseError("the numbers of messages are used up")
        nonce = bytes(4) + self._nonce.to_bytes(8, "little")
        self._nonce += 1
        return nonce


class TransportKeys(NamedTuple):
    """What a finished handshake leaves: a cipher each way, and a hash of all that was said."""

    sending: CipherState
    receiving: CipherState
    handshake_hash: bytes


class _SymmetricState:
    """Chaining key, handshake hash and current cipher."""

    def __init__(self) -> None:
        self.hash = PROTOCOL_NAME  # exactly 32 bytes, so it is not hashed (section 5.2)
        self._chaining_key = PROTOCOL_NAME
        self._cipher: CipherState | None = None

    def mix_key(self, input_key: bytes) -> None:
        self._chaining_key, key = self._expand(input_key)
        self._cipher = CipherState(key)

    def mix_hash(self, data: bytes) -> None:
        digest = Hash(SHA256())
        digest.update(self.hash)
        digest.update(data)
        self.hash = digest.finalize()

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        assert self._cipher is not None  # noqa: S101 - KK mixes a key before the first payload
        ciphertext = self._cipher.encrypt(plaintext, self.hash)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        assert self._cipher is not None  # noqa: S101 - as above
        plaintext = self._cipher.decrypt(ciphertext, self.hash)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = self._expand(b"")
        return CipherState(first), CipherState(second)

    def _expand(self, input_key: bytes) -> tuple[bytes, bytes]:
        # Noise's HKDF with two outputs is RFC 5869's with an empty info and twice the length.
        output = HKDF(SHA256(), 2 * KEY_BYTES, salt=self._chaining_key, info=b"").derive(input_key)
        return output[:KEY_BYTES], output[KEY_BYTES:]


class Handshake:
    """One side of one handshake: the initiator writes and then reads, the responder the reverse.

    ``ephemeral_key`` is for test vectors only; a fresh one is made otherwise.
    """

    def __init__(
        self,
        *,
        is_initiator: bool,
        static_key: X25519PrivateKey,
        peer_static_key: X25519PublicKey,
        prologue: bytes,
        ephemeral_key: X25519PrivateKey | None = None,
    ) -> None:
        self._is_initiator = is_initiator
        self._static = static_key
        self._peer_static = peer_static_key
        self._ephemeral = ephemeral_key or X25519PrivateKey.generate()
        self._peer_ephemeral: X25519PublicKey | None = None
        self._messages = 0
        self._state = _SymmetricState()
        self._state.mix_hash(prologue)
        pair = (static_key.public_key(), peer_static_key)
        for key in pair if is_initiator else reversed(pair):
            self._state.mix_hash(key.public_bytes_raw())

    def write_message(self, payload: bytes) -> bytes:
        """Make this side's message.

        Raises:
            NoiseError: it is not this side's turn, or the payload is too long.
        """
        self._take_turn(self._is_initiator)
        public = self._ephemeral.public_key().public_bytes_raw()
        self._state.mix_hash(public)
        self._mix_keys()
        message = public + self._state.encrypt_and_hash(payload)
        if len(message) > MAX_MESSAGE_BYTES:
            raise NoiseError("a message is longer than the protocol allows")
        return message

    def read_message(self, message: bytes) -> bytes:
        """Take the peer's message and return its payload.

        Raises:
            NoiseError: the message was altered, or made with other keys or another prologue.
        """
        self._take_turn(not self._is_initiator)
        if not KEY_BYTES + TAG_BYTES <= len(message) <= MAX_MESSAGE_BYTES:
            raise NoiseError("a handshake message is too short or too long")
        public, sealed = message[:KEY_BYTES], message[KEY_BYTES:]
        self._peer_ephemeral = X25519PublicKey.from_public_bytes(public)
        self._state.mix_hash(public)
        self._mix_keys()
        return self._state.decrypt_and_hash(sealed)

    def finish(self) -> TransportKeys:
        """Return the keys for all further messages.

        Raises:
            NoiseError: not both messages were exchanged yet.
        """
        if self._messages != 2:
            raise NoiseError("the handshake is not complete")
        first, second = self._state.split()
        sending, receiving = (first, second) if self._is_initiator else (second, first)
        return TransportKeys(sending, receiving, self._state.hash)

    def _take_turn(self, is_first: bool) -> None:
        if self._messages != (0 if is_first else 1):
            raise NoiseError("a handshake message comes out of turn")
        self._messages += 1

    def _mix_keys(self) -> None:
        """Mix in what the pattern names: ``es, ss`` in the first message, ``ee, se`` after."""
        own_ephemeral_here = (self._messages == 1) == self._is_initiator
        if self._messages == 1:
            self._mix(*self._between(own_ephemeral_here))
            self._mix(self._static, self._peer_static)
        else:
            self._mix(self._ephemeral, self._peer_ephemeral)
            self._mix(*self._between(own_ephemeral_here))

    def _between(self, is_own_ephemeral: bool) -> tuple[X25519PrivateKey, X25519PublicKey | None]:
        if is_own_ephemeral:
            return self._ephemeral, self._peer_static
        return self._static, self._peer_ephemeral

    def _mix(self, private: X25519PrivateKey, public: X25519PublicKey | None) -> None:
        assert public is not None  # noqa: S101 - read with the message that needs it
        try:
            self._state.mix_key(private.exchange(public))
        except ValueError:
            raise NoiseError("the peer's key is not a usable one") from None

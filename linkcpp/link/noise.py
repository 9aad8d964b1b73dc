"""Two handshakes of the Noise Protocol Framework (revision 34), with one suite of algorithms.

``Noise_KK_25519_AESGCM_SHA256`` is for machines that know each other's static public key.
``Noise_XXpsk0_25519_AESGCM_SHA256`` is for machines that share a secret and learn each other's key:
who does not have the secret gets no answer and costs no Diffie-Hellman operation. Either leaves
keys that no recording opens later, even with both static keys and the secret. The names are those
of the specification (https://noiseprotocol.org/noise.html).
"""

import struct
from typing import Literal, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MAX_MESSAGE_BYTES = 65_535
KEY_BYTES = 32
TAG_BYTES = 16

_MAX_NONCE = 2**64 - 1  # the specification keeps the last one for itself
_NONCE = struct.Struct(">4xQ")

_Token = Literal["e", "s", "ee", "es", "se", "ss", "psk"]
# What the tokens that stand for a sent key take of a message.
_SENT_BYTES = {"e": KEY_BYTES, "s": KEY_BYTES + TAG_BYTES}


class Pattern(NamedTuple):
    """What each message of a handshake has; the initiator writes the first, then they take turns.

    ``pre_messages`` are the keys that both sides know beforehand, in the same turns.
    """

    name: str
    pre_messages: tuple[tuple[_Token, ...], ...]
    messages: tuple[tuple[_Token, ...], ...]

    @property
    def protocol_name(self) -> bytes:
        """The pattern and the suite, as the specification writes them."""
        return f"Noise_{self.name}_25519_AESGCM_SHA256".encode()

    @property
    def has_psk(self) -> bool:
        """Whether a shared secret is mixed in."""
        return any("psk" in tokens for tokens in self.messages)


KK = Pattern("KK", (("s",), ("s",)), (("e", "es", "ss"), ("e", "ee", "se")))
XX_PSK0 = Pattern("XXpsk0", (), (("psk", "e"), ("e", "ee", "s", "es"), ("s", "se")))


class NoiseError(Exception):
    """A message was altered, comes out of turn, or was made with other keys."""


class CipherState:
    """A key and the number of the next message; every message is sealed or opened once."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
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
        nonce = _NONCE.pack(self._nonce)
        self._nonce += 1
        return nonce


class TransportKeys(NamedTuple):
    """What a finished handshake leaves: a cipher each way, and a hash of all that was said."""

    sending: CipherState
    receiving: CipherState
    handshake_hash: bytes


class _SymmetricState:
    """Chaining key, handshake hash and current cipher."""

    def __init__(self, protocol_name: bytes) -> None:
        # No name here is longer than a hash, so it is filled up and not hashed (section 5.2).
        self.hash = self._chaining_key = protocol_name.ljust(SHA256.digest_size, b"\0")
        self._cipher: CipherState | None = None

    def mix_key(self, input_key: bytes) -> None:
        self._chaining_key, key = self._expand(input_key, 2)
        self._cipher = CipherState(key)

    def mix_hash(self, data: bytes) -> None:
        digest = Hash(SHA256())
        digest.update(self.hash)
        digest.update(data)
        self.hash = digest.finalize()

    def mix_key_and_hash(self, input_key: bytes) -> None:
        self._chaining_key, data, key = self._expand(input_key, 3)
        self.mix_hash(data)
        self._cipher = CipherState(key)

    def encrypt_and_hash(self, plaintext: bytes) -> bytes:
        assert self._cipher is not None  # noqa: S101 - both patterns mix a key before
        ciphertext = self._cipher.encrypt(plaintext, self.hash)
        self.mix_hash(ciphertext)
        return ciphertext

    def decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        assert self._cipher is not None  # noqa: S101 - as above
        plaintext = self._cipher.decrypt(ciphertext, self.hash)
        self.mix_hash(ciphertext)
        return plaintext

    def split(self) -> tuple[CipherState, CipherState]:
        first, second = self._expand(b"", 2)
        return CipherState(first), CipherState(second)

    def _expand(self, input_key: bytes, count: int) -> list[bytes]:
        # Noise's HKDF is RFC 5869's with an empty info, its output cut into keys.
        size = count * KEY_BYTES
        output = HKDF(SHA256(), size, salt=self._chaining_key, info=b"").derive(input_key)
        return [output[start : start + KEY_BYTES] for start in range(0, size, KEY_BYTES)]


class Handshake:
    """One side of one handshake: the sides take turns, and a failure ends it.

    ``peer_static_key`` is for patterns in which it is known beforehand, ``psk`` (32 bytes) for
    those with a shared secret. ``ephemeral_key`` is for test vectors only; a fresh one is made
    otherwise.

    Raises:
        ValueError: what the pattern needs is missing, or it has no use for what is given.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        is_initiator: bool,
        static_key: X25519PrivateKey,
        peer_static_key: X25519PublicKey | None = None,
        psk: bytes | None = None,
        prologue: bytes,
        ephemeral_key: X25519PrivateKey | None = None,
    ) -> None:
        if bool(pattern.pre_messages) != (peer_static_key is not None):
            raise ValueError(f"the peer's key does not fit the pattern {pattern.name}")
        if (len(psk) if psk is not None else 0) != (KEY_BYTES if pattern.has_psk else 0):
            raise ValueError(f"the shared secret does not fit the pattern {pattern.name}")
        self._pattern = pattern
        self._is_initiator = is_initiator
        self._static = static_key
        self._peer_static = peer_static_key
        self._psk = psk or b""
        self._ephemeral = ephemeral_key
        self._peer_ephemeral: X25519PublicKey | None = None
        self._turn: int | None = 0  # the number of the next message; none after a failure
        self._state = _SymmetricState(pattern.protocol_name)
        self._state.mix_hash(prologue)
        for number, tokens in enumerate(pattern.pre_messages):
            is_own = self._is_own_turn(number)
            for _ in tokens:  # every one is "s"
                key = static_key.public_key() if is_own else peer_static_key
                assert key is not None  # noqa: S101 - checked above
                self._state.mix_hash(key.public_bytes_raw())

    @property
    def peer_static_key(self) -> X25519PublicKey | None:
        """The peer's key: known beforehand, or once the message that proves it was read."""
        return None if self._turn is None else self._peer_static

    def write_message(self, payload: bytes) -> bytes:
        """Make this side's next message.

        Raises:
            NoiseError: it is not this side's turn, or the payload is too long.
        """
        turn = self._begin_turn(is_writing=True)
        message = b""
        for token in self._pattern.messages[turn]:
            match token:
                case "e":
                    self._ephemeral = self._ephemeral or X25519PrivateKey.generate()
                    public = self._ephemeral.public_key().public_bytes_raw()
                    self._mix_ephemeral(public)
                    message += public
                case "s":
                    public = self._static.public_key().public_bytes_raw()
                    message += self._state.encrypt_and_hash(public)
                case _:
                    self._mix_secret(token)
        message += self._state.encrypt_and_hash(payload)
        if len(message) > MAX_MESSAGE_BYTES:
            raise NoiseError("a message is longer than the protocol allows")
        self._turn = turn + 1
        return message

    def read_message(self, message: bytes) -> bytes:
        """Take the peer's message and return its payload.

        Raises:
            NoiseError: the message was altered, or made with other keys, another shared secret or
                another prologue.
        """
        turn = self._begin_turn(is_writing=False)
        tokens = self._pattern.messages[turn]
        least = sum(_SENT_BYTES.get(token, 0) for token in tokens) + TAG_BYTES
        if not least <= len(message) <= MAX_MESSAGE_BYTES:
            raise NoiseError("a handshake message is too short or too long")
        start = 0
        for token in tokens:
            sent = message[start : start + _SENT_BYTES.get(token, 0)]
            start += len(sent)
            match token:
                case "e":
                    self._peer_ephemeral = X25519PublicKey.from_public_bytes(sent)
                    self._mix_ephemeral(sent)
                case "s":
                    public = self._state.decrypt_and_hash(sent)
                    self._peer_static = X25519PublicKey.from_public_bytes(public)
                case _:
                    self._mix_secret(token)
        payload = self._state.decrypt_and_hash(message[start:])
        self._turn = turn + 1
        return payload

    def finish(self) -> TransportKeys:
        """Return the keys for all further messages.

        Raises:
            NoiseError: not all messages were exchanged.
        """
        if self._turn != len(self._pattern.messages):
            raise NoiseError("the handshake is not complete")
        first, second = self._state.split()
        sending, receiving = (first, second) if self._is_initiator else (second, first)
        return TransportKeys(sending, receiving, self._state.hash)

    def _is_own_turn(self, number: int) -> bool:
        return (number % 2 == 0) == self._is_initiator

    def _begin_turn(self, *, is_writing: bool) -> int:
        """Return the number of the message; without a next one until this one has succeeded."""
        turn = self._turn
        if turn is None or turn >= len(self._pattern.messages):
            raise NoiseError("the handshake has ended")
        if self._is_own_turn(turn) != is_writing:
            raise NoiseError("a handshake message comes out of turn")
        self._turn = None
        return turn

    def _mix_ephemeral(self, public: bytes) -> None:
        self._state.mix_hash(public)
        if self._pattern.has_psk:  # so that no two handshakes seal with the same key (section 9.2)
            self._state.mix_key(public)

    def _mix_secret(self, token: _Token) -> None:
        match token:
            case "psk":
                self._state.mix_key_and_hash(self._psk)
            case _:  # the initiator's key is named first
                own, peer = (0, 1) if self._is_initiator else (1, 0)
                self._mix_exchange(token[own], token[peer])

    def _mix_exchange(self, own: str, peer: str) -> None:
        private = self._ephemeral if own == "e" else self._static
        public = self._peer_ephemeral if peer == "e" else self._peer_static
        assert private is not None and public is not None  # noqa: S101 - sent before
        try:
            self._state.mix_key(private.exchange(public))
        except ValueError:
            raise NoiseError("the peer's key is not a usable one") from None

"""Tokens and tickets: who signed them, for what, and until when."""

import uuid
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from linkcpp.registry.edges import EdgeRole
from linkcpp.registry.records import Role
from linkcpp.registry.relay import Hello, RelayCloseCode, decode_hello, encode_hello
from linkcpp.registry.tickets import (
    EdgeClaims,
    HubKey,
    NodeClaims,
    TicketError,
    sign_edge_ticket,
    sign_node_token,
    verify_edge_ticket,
    verify_node_token,
)

HUB_ID, NODE_ID, GATEWAY_ID = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
KEY = Ed25519PrivateKey.generate()
HUB = HubKey(HUB_ID, KEY.public_key())
NOW = 1.8e9
EDGE = "ab" * 16


def node_claims(**changes: Any) -> NodeClaims:
    known = {"iss": HUB_ID, "sub": NODE_ID, "role": Role.NODE, "iat": NOW, "exp": NOW + 900}
    return NodeClaims.model_validate(known | {"jti": "one"} | changes)


def edge_claims(**changes: Any) -> EdgeClaims:
    known = {"iss": HUB_ID, "sub": NODE_ID, "edge": EDGE, "role": EdgeRole.NODE}
    return EdgeClaims.model_validate(known | {"gateway": GATEWAY_ID, "exp": NOW + 600} | changes)


def test_what_was_signed_is_read_again_until_it_ends() -> None:
    token = sign_node_token(KEY, node_claims())
    ticket = sign_edge_ticket(KEY, edge_claims(gateway=None))
    assert verify_node_token(HUB, token, now=NOW + 899) == node_claims()
    assert verify_edge_ticket(HUB, ticket, now=NOW + 599) == edge_claims(gateway=None)
    for verify, text, end in ((verify_node_token, token, 900), (verify_edge_ticket, ticket, 600)):
        with pytest.raises(TicketError) as ended:
            verify(HUB, text, now=NOW + end)
        assert ended.value.code == "expired_token"


def test_a_token_opens_no_relay_and_a_ticket_no_hub() -> None:
    with pytest.raises(TicketError):
        verify_edge_ticket(HUB, sign_node_token(KEY, node_claims()), now=NOW)
    with pytest.raises(TicketError):
        verify_node_token(HUB, sign_edge_ticket(KEY, edge_claims()), now=NOW)


@pytest.mark.parametrize(
    "forged",
    [
        sign_edge_ticket(Ed25519PrivateKey.generate(), edge_claims()),
        sign_edge_ticket(KEY, edge_claims(iss=NODE_ID)),
        jwt.encode({**edge_claims().model_dump(mode="json"), "aud": "linkcpp-edge"}, "", "none"),
        jwt.encode(
            {**edge_claims().model_dump(mode="json"), "aud": "linkcpp-edge"},
            KEY.public_key().public_bytes_raw().hex(),
            "HS256",
        ),
        jwt.encode({"aud": "linkcpp-edge", "iss": HUB_ID, "exp": NOW + 9}, KEY, "EdDSA"),
        "x" * 5000,
        "a.b.c",
        "",
    ],
)
def test_what_the_hub_did_not_sign_as_a_ticket_is_none(forged: str) -> None:
    with pytest.raises(TicketError) as refused:
        verify_edge_ticket(HUB, forged, now=NOW)
    assert refused.value.code == "invalid_token"


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_ticket_with_one_changed_byte_is_never_taken_for_another(place: int, change: int) -> None:
    ticket = sign_edge_ticket(KEY, edge_claims()).encode()
    at = place % (len(ticket) - 1)  # the last character has bits that mean nothing
    altered = bytes([*ticket[:at], ticket[at] ^ change, *ticket[at + 1 :]])
    with pytest.raises(TicketError):
        verify_edge_ticket(HUB, altered.decode("latin-1"), now=NOW)


def test_the_first_message_of_a_relay_is_read_as_it_was_written() -> None:
    hello = Hello(EdgeRole.BACKBONE, EDGE, "a.b.c")
    message = encode_hello(hello)
    assert message == b"LCR1\x01" + bytes.fromhex(EDGE) + b"a.b.c"
    assert decode_hello(message) == hello


@given(st.binary(max_size=64) | st.builds(lambda rest: b"LCR1" + rest, st.binary(max_size=5000)))
def test_any_bytes_are_a_first_message_or_refused_in_words(message: bytes) -> None:
    try:
        hello = decode_hello(message)
    except ValueError as error:
        assert str(error)
    else:
        assert encode_hello(hello) == message


def test_every_close_code_is_a_private_one_with_a_meaning_of_its_own() -> None:
    assert all(4400 <= code < 4500 for code in RelayCloseCode)
    assert len(set(RelayCloseCode)) == len(RelayCloseCode.__members__)

"""Types that several records of the hub's API share."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from linkcpp.cluster.records import NodeId

MAX_GATEWAYS = 64
MAX_ADDRESSES = 16
MAX_SEGMENTS = 4096
MAX_MODELS_HELD = 64
MAX_EDGES_PER_GATEWAY = 4096
MAX_EDGES_PER_NODE = 256
MAX_TOKEN_CHARACTERS = 4096

_URL = re.compile(r"(https?|wss?)://[^\s\x00-\x20\x7f@]+")


def _check_url(text: str) -> str:
    if not _URL.fullmatch(text):
        raise ValueError("not an http, https, ws or wss address without a user name")
    return text


def _check_text(text: str) -> str:
    # PostgreSQL stores neither NUL nor lone surrogates, and a terminal should see no control.
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"

# A machine's id (a UUID), a hub's or gateway's id, an edge's id (16 bytes in hexadecimal).
MachineId = Annotated[NodeId, Field(pattern=UUID_PATTERN)]
EdgeId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
# 32 bytes (a raw Ed25519 or X25519 key) and 64 bytes (a signature), base64url without padding.
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]
Signature = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{86}$")]
Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,64}$")]
Token = Annotated[str, Field(pattern=r"^[A-Za-z0-9._~+/=-]+$", max_length=MAX_TOKEN_CHARACTERS)]
# Seconds since 1970, as ``time.time()`` gives them.
UnixTime = Annotated[float, Field(ge=0, lt=2**40, allow_inf_nan=False)]
Url = Annotated[str, Field(min_length=8, max_length=512), AfterValidator(_check_url)]
Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_check_text)]
Label = Annotated[str, Field(max_length=64), AfterValidator(_check_text)]
ModelDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RttMs = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
RttsByGateway = Annotated[dict[MachineId, RttMs], Field(max_length=MAX_GATEWAYS)]

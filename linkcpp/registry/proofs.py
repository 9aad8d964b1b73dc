"""Signatures by which a machine proves to a hub that it has its Ed25519 key.

The signed message is a context string and all values, each with its length before it, so that no
two different lists give one message, and no proof for one call fits another. Pure: the time and the
nonce are arguments.
"""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from linkcpp.registry.encoding import decode, encode
from linkcpp.registry.records import JoinRequest, Proof, RenewRequest

PROOF_WINDOW_SECONDS = 60.0

_JOIN = "linkcpp-join-v1"
_RENEW = "linkcpp-renew-v1"


def join_request(
    key: Ed25519PrivateKey,
    *,
    hub_id: str,
    token: str,
    node_id: str,
    name: str,
    signing_key: str,
    edge_key: str,
    time: float,
    nonce: str,
) -> JoinRequest:
    """Write a signed request to join the hub ``hub_id`` with a join token."""
    values = (_JOIN, hub_id, token, node_id, name, signing_key, edge_key)
    proof = _sign(key, values, time, nonce)
    return JoinRequest.model_validate(
        {
            "token": token,
            "node_id": node_id,
            "name": name,
            "signing_key": signing_key,
            "edge_key": edge_key,
            "proof": proof,
        }
    )


def renew_request(
    key: Ed25519PrivateKey, *, hub_id: str, node_id: str, time: float, nonce: str
) -> RenewRequest:
    """Write a signed request for a new node token of the hub ``hub_id``."""
    proof = _sign(key, (_RENEW, hub_id, node_id), time, nonce)
    return RenewRequest.model_validate({"node_id": node_id, "proof": proof})


def is_join_proven(request: JoinRequest, *, hub_id: str) -> bool:
    """Tell whether the machine has the signing key that it names; the time is not looked at."""
    machine = (request.node_id, request.name, request.signing_key, request.edge_key)
    return _verify(request.signing_key, (_JOIN, hub_id, request.token, *machine), request.proof)


def is_renewal_proven(request: RenewRequest, *, hub_id: str, signing_key: str) -> bool:
    """Tell whether a known machine signed this; the time is not looked at."""
    return _verify(signing_key, (_RENEW, hub_id, request.node_id), request.proof)


def is_in_time(proof: Proof, now: float) -> bool:
    """Tell whether a proof was made within the window around ``now``."""
    return abs(proof.time - now) <= PROOF_WINDOW_SECONDS


def _sign(key: Ed25519PrivateKey, values: tuple[str, ...], time: float, nonce: str) -> Proof:
    signature = encode(key.sign(_message(values, time, nonce)))
    return Proof(time=time, nonce=nonce, signature=signature)


def _verify(signing_key: str, values: tuple[str, ...], proof: Proof) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(decode(signing_key))
        key.verify(decode(proof.signature), _message(values, proof.time, proof.nonce))
    except (ValueError, InvalidSignature):
        return False
    return True


def _message(values: tuple[str, ...], time: float, nonce: str) -> bytes:
    # repr writes a float so that it is read back to the bit, the same on every machine.
    parts = [part.encode() for part in (*values, repr(time), nonce)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

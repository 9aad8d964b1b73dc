"""The tables of a hub, the same in SQLite and PostgreSQL. Times are seconds since 1970."""

from sqlalchemy import Column, Float, Index, Integer, MetaData, String, Table, Text

METADATA = MetaData()

_ID = String(36)

JOIN_TOKENS = Table(
    "join_tokens",
    METADATA,
    Column("token_id", _ID, primary_key=True),
    Column("secret_sha256", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("label", String(64), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("use_limit", Integer, nullable=False),
    Column("use_count", Integer, nullable=False),
    Column("revoked_at", Float(53)),
)

# Every machine that joined, in whatever role. ``state`` is a ``NodeState`` in JSON.
MACHINES = Table(
    "machines",
    METADATA,
    Column("node_id", _ID, primary_key=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("signing_key", String(43), nullable=False),
    Column("edge_key", String(43), nullable=False),
    Column("token_id", _ID, nullable=False),
    Column("joined_at", Float(53), nullable=False),
    Column("revoked_at", Float(53)),
    Column("last_seen", Float(53)),
    Column("state", Text),
    Column("left_at", Float(53)),
)

GATEWAYS = Table(
    "gateways",
    METADATA,
    Column("gateway_id", _ID, primary_key=True),
    Column("url", String(512), nullable=False),
    Column("edge_count", Integer, nullable=False),
    Column("last_seen", Float(53), nullable=False),
)

EDGES = Table(
    "edges",
    METADATA,
    Column("edge_id", String(32), primary_key=True),
    Column("backbone_node_id", _ID, nullable=False),
    Column("node_id", _ID, nullable=False),
    Column("gateway_id", _ID),
    Column("created_at", Float(53), nullable=False),
    Column("closed_at", Float(53)),
    Index("edges_closed_at", "closed_at"),
)

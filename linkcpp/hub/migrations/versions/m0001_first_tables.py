"""Join tokens, machines, gateways and edges."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "join_tokens",
        sa.Column("token_id", sa.String(36), primary_key=True),
        sa.Column("secret_sha256", sa.String(64), nullable=False, unique=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("use_limit", sa.Integer, nullable=False),
        sa.Column("use_count", sa.Integer, nullable=False),
        sa.Column("revoked_at", sa.Float(53)),
    )
    op.create_table(
        "machines",
        sa.Column("node_id", sa.String(36), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("signing_key", sa.String(43), nullable=False),
        sa.Column("edge_key", sa.String(43), nullable=False),
        sa.Column("token_id", sa.String(36), nullable=False),
        sa.Column("joined_at", sa.Float(53), nullable=False),
        sa.Column("revoked_at", sa.Float(53)),
        sa.Column("last_seen", sa.Float(53)),
        sa.Column("sequence", sa.BigInteger),
        sa.Column("state", sa.Text),
    )
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.String(36), primary_key=True),
        sa.Column("url", sa.String(512), nullable=False),
        sa.Column("edge_count", sa.Integer, nullable=False),
        sa.Column("last_seen", sa.Float(53), nullable=False),
    )
    op.create_table(
        "edges",
        sa.Column("edge_id", sa.String(32), primary_key=True),
        sa.Column("backbone_node_id", sa.String(36), nullable=False),
        sa.Column("node_id", sa.String(36), nullable=False),
        sa.Column("gateway_id", sa.String(36)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("closed_at", sa.Float(53)),
    )
    op.create_index("edges_closed_at", "edges", ["closed_at"])

"""The number of a machine's last heartbeat, which nobody read."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the column."""
    op.drop_column("machines", "sequence")

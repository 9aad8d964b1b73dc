"""How Alembic runs the migrations: on the connection that ``linkcpp.hub.database`` hands over."""

from alembic import context

from linkcpp.hub.schema import METADATA

connection = context.config.attributes["connection"]
# SQLite changes tables by copying them, which Alembic calls a batch.
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()

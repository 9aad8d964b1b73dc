"""Alembic migrations of the hub's database; ``linkcpp.hub.database`` runs them at every start."""

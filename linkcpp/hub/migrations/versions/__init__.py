"""One module a migration, in the order of its number."""

"""Steps from one version of the tables to the next; Alembic runs them when a store opens."""

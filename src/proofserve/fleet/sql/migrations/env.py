"""What Alembic runs: it migrates over the connection that ``schema.migrate`` hands in."""

from alembic import context

from proofserve.fleet.sql.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    # The caller's transaction covers all steps, on SQLite too.
    transactional_ddl=True,
)
context.run_migrations()

"""The first version: all tables as ``sql.tables`` has them.

Nothing was released with earlier ones. Once this one is released it must stay as it is: before the
tables change again, write them out here, and add a step.
"""

from alembic import op

from proofserve.fleet.sql.tables import batches, counters, desired, metadata

revision = "1"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind(), checkfirst=False)
    op.bulk_insert(desired, [{"id": 1, "state": "IDLE"}])
    op.bulk_insert(counters, [{"id": 1, "last_batch": 0, "last_seq": 0}])
    if op.get_context().dialect.name == "postgresql":
        # Vectors do not compress: trying it would take most of the time of an insert. And of a
        # value stored like this a part is read without the rest.
        for column in ("nonces", "found"):
            op.execute(f"ALTER TABLE {batches.name} ALTER COLUMN {column} SET STORAGE EXTERNAL")

"""Brings the tables to the present version, inside a transaction of the caller."""

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from proofserve.fleet.errors import NewerDatabase
from proofserve.fleet.sql.tables import VERSION_TABLE

# An advisory lock of PostgreSQL: several controllers may start at the same time.
_MIGRATING = 0x70726F6F66_01


def migrate(connection: Connection) -> None:
    """Create or change the tables. Raises NewerDatabase, and the errors of the database."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATING})
    else:
        _require_own(connection)
    config = Config()
    config.set_main_option("script_location", "proofserve.fleet.sql:migrations")
    config.attributes["connection"] = connection
    found = version_of(connection)
    known = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    if found not in {None, *known}:
        raise NewerDatabase(
            f"the fleet's database has version {found}, this proofserve knows up to"
            f" {known[0]}: use the newer proofserve or another database"
        )
    if found != known[0]:
        command.upgrade(config, "head")


def version_of(connection: Connection) -> str | None:
    """The version of the tables; None for a database without them."""
    options = {"version_table": VERSION_TABLE}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _require_own(connection: Connection) -> None:
    """Raise for a file of another part of proofserve; those number their versions in this place."""
    user_version = connection.execute(text("PRAGMA user_version")).scalar_one()
    if user_version and VERSION_TABLE not in inspect(connection).get_table_names():
        raise NewerDatabase(
            "the file is a database of another program, an outbox for example: name another file"
        )

"""What both databases can do, and SQLAlchemy has in a function for each."""

from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def insert_into(connection: Connection, table: Table) -> Any:
    """An INSERT that can have ON CONFLICT, which both databases write alike."""
    dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)

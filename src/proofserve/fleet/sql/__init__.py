"""The fleet's store on SQLite and PostgreSQL: members, rounds, lanes, results and callbacks."""

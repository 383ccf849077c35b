"""How sure a verdict is: honest nodes and cheats that are tried, and what becomes of each."""

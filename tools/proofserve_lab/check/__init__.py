"""``proofserve check``: whether a server does what its documents say."""

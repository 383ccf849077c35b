"""Rules of HTTP that the node and the gateway share; this package knows nothing of proofs."""

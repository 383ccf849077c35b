"""URL paths of the node's API and of callbacks."""

PROOFS = "/api/v1/pow"
RECEIPTS = "/api/v1/receipts"
# What a node appends to the callback address of a request.
GENERATED = "generated"
VALIDATED = "validated"
LOGGED = "logged"

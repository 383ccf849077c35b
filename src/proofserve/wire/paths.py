"""URL paths of the node's API and of callbacks."""

PROOFS = "/api/v1/pow"
# What a node appends to the callback address of a request.
GENERATED = "generated"
VALIDATED = "validated"

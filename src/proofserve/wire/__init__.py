"""The format of all messages between clients, nodes and receivers, and the paths of their URLs."""

PROOFS = "/api/v1/pow"
RECEIPTS = "/api/v1/receipts"
FLEET = "/api/v1/fleet"
# What a node appends to the callback address of a request.
GENERATED = "generated"
VALIDATED = "validated"
LOGGED = "logged"
# What a fleet appends to the address that its policy names for convictions.
CONVICTED = "convicted"

"""The gateway's own endpoints, and who may operate them."""

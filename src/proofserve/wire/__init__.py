"""The wire format of both proof protocols: what clients, nodes and receivers send each other."""

"""The format of all messages between clients, nodes and receivers, for both proof protocols."""

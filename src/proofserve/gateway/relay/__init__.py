"""One request and its answer on their way between a client and a backend."""

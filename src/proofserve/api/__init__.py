"""The HTTP API of both protocols, for any FastAPI application to include."""

"""The HTTP API of the artifact protocol, for any FastAPI application to include."""

"""The client's side of the gateway: HTTP server, application, and shutdown."""

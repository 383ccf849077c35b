"""The client's side of the gateway: the HTTP server, the application and its orderly end."""

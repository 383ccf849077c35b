"""The dashboard of one node: what is read for it, and where it is served."""

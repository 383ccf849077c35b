"""A callback receiver that keeps what it gets, for trying a node out and for watching one."""

"""Many servers that answer as one node: desired state in SQL, and what its members found."""

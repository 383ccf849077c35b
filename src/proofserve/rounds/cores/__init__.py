"""Several engine cores at the nonces of one lane."""

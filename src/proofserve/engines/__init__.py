"""Deployed models that can prove their compute: one package or module per kind of engine."""

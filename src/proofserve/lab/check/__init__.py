"""Checks of a running server: do its proofs and its chat behave as the documents say?"""

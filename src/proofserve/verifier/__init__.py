"""Judges what others computed, and measures what honest nodes look like: the validator's part."""

"""Verification as rows: jobs, verdicts, and the samples that workers recompute."""

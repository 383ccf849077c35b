"""The two proof protocols as pure functions of tensors and numbers: no clock, no I/O, no settings.

Start with ``schemes``; ``comparison`` and ``statistics`` judge what a scheme computed.
"""

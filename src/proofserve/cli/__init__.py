"""The command line. Each command is a file; words for people live here, not below."""

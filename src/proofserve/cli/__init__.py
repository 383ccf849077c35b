"""The command line. Each command is a module; texts for users are here, not in lower packages."""

"""Settings: the only package that reads the environment. Other packages get frozen values."""

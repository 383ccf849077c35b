"""Property tests run on shared machines: no deadlines."""

from hypothesis import settings

settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")

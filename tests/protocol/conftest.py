"""Property tests run on shared machines: no deadlines, few examples."""

from hypothesis import settings

settings.register_profile("protocol", deadline=None, max_examples=40)
settings.load_profile("protocol")

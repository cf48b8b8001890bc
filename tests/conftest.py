"""Settings of all tests: Hypothesis sets no time limit per example, since a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("counterpoint", deadline=None)
settings.load_profile("counterpoint")

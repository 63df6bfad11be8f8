"""Shared by all tests."""

from hypothesis import settings

# Times never gate the suite, and every run sees the same examples.
settings.register_profile("dapo", deadline=None, derandomize=True)
settings.load_profile("dapo")

"""Settings of all tests."""

from hypothesis import settings

# how long an example takes says more about the machine; the same examples each time: a red test is one that changed
settings.register_profile("headway", deadline=None, derandomize=True)
settings.load_profile("headway")

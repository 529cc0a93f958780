"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("headway", deadline=None)  # how long an example takes says more about the machine
settings.load_profile("headway")

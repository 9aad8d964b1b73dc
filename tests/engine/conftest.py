"""Settings of the property tests: they say what holds, not how fast this machine is today."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

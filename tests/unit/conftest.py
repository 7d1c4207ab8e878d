"""No limit of time for an example of a property: machines are shared, and how long one takes says nothing."""

from hypothesis import settings

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

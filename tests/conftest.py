"""What holds for every test: property tests are not timed, since the machine they run on may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("millrace", deadline=None)
settings.load_profile("millrace")

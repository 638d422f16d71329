"""A module that is never imported: it takes for ever."""

import threading

threading.Event().wait()

"""A module whose import lasts until the process that started this one is gone."""

import os
import time

_parent = os.getppid()
print("importing", flush=True)
while os.getppid() == _parent:
    time.sleep(0.005)

"""What a grammar might allow, without a grammar."""

from __future__ import annotations

import numpy as np

from serving.grammar.grammars import Allowed

EVENS = Allowed(np.full(4096, 0x55, dtype=np.uint8), ended=False)
"""Every other token, the first one too, of 32,768."""

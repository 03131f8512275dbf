"""Names for the kinds of NumPy arrays that the interpreter works on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[Any]
"""One element per thread, of a register's type; 0-d for a constant that all threads share."""
Mask = NDArray[np.bool_]
"""One bool per thread: who executes, waits or is alive."""
Numbers = NDArray[np.integer[Any]]
"""Integers that count or point: indices of threads or bytes, times, counts."""
Octets = NDArray[np.uint8]
"""Bytes of a memory."""

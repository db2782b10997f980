"""Put this folder on the path: its tests share modules that compile and read GPU kernels."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

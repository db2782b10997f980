"""``python -m arb_ternary``: the command ``arb``, for launchers that start modules (``torchrun
-m``).
"""

import sys

from arb_ternary.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""The program ``arb``: Ctrl-C ends it without a traceback, also while it imports its parts.

This module is not in the package, whose import takes time.
"""

import signal


def main() -> int:
    """Run ``arb`` and return its exit code."""
    handler = signal.getsignal(signal.SIGINT)
    interruptible = handler is signal.default_int_handler
    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from arb_ternary.cli.main import main as run

        signal.signal(signal.SIGINT, handler)
        return run()
    except KeyboardInterrupt:
        # Another one came while the command handled the first.
        return 128 + signal.SIGINT
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

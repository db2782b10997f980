"""The ``arb`` command: its options, and the exit code of whatever happens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from arb_ternary import API_VERSION, __version__
from arb_ternary.cli.groups import RegistryGroup
from arb_ternary.cli.options import plugin_files
from arb_ternary.cli.streams import (
    READER_HAS_GONE,
    describe_failure,
    discard_output,
    flush_output,
    prepare_streams,
    reader_has_gone,
)
from arb_ternary.errors import (
    ArbError,
    Interrupted,
    is_out_of_memory,
    out_of_memory,
    render,
)

_INTERFACE = ".".join(map(str, API_VERSION))


@click.group(cls=RegistryGroup, context_settings={"help_option_names": ["-h", "--help"]})
@plugin_files
@click.version_option(
    __version__, prog_name="arb", message=f"%(prog)s %(version)s (plugins {_INTERFACE})"
)
def arb() -> None:
    """Train, convert and ship pure-ternary neural networks."""
    # Not imported for --help: it takes time.
    from arb_ternary.cli.log import show_log

    show_log()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``arb`` and return its exit code.

    0: ok, 1: failure, 2: usage or config, 3: environment, 130: interrupted, 141: whoever read the
    output has gone.

    Args:
        arguments: the command line without the name of the program; that of ``sys.argv`` if None.
    """
    try:
        prepare_streams()
        result: Any = arb.main(arguments, prog_name="arb", standalone_mode=False)
        flush_output()
    except BrokenPipeError:
        discard_output()
        return READER_HAS_GONE
    except SystemExit:
        # click makes exit code 1 of a broken pipe.
        if reader_has_gone():
            return READER_HAS_GONE
        raise
    except OSError as error:
        click.echo(f"error: {describe_failure(error)}", err=True)
        discard_output()
        return ArbError.exit_code
    except ValueError:
        if sys.stdout is None or not sys.stdout.closed:
            raise
        # A plugin has closed it.
        click.echo("error: standard output is closed", err=True)
        return ArbError.exit_code
    except ArbError as error:
        click.echo(render(error), err=True)
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as stop:
        # click raises it for an interrupt, an end of input in a prompt, and a "no" to a question.
        if isinstance(stop.__cause__ or stop.__context__, KeyboardInterrupt):
            return _interrupted()
        click.echo("aborted", err=True)
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        click.echo(render(out_of_memory(error)), err=True)
        return ArbError.exit_code
    # Outside the standalone mode, click returns what the command returned.
    is_exit_code = isinstance(result, int) and not isinstance(result, bool)
    return result if is_exit_code else 0


def _interrupted() -> int:
    click.echo("interrupted", err=True)
    return Interrupted.exit_code


if __name__ == "__main__":
    sys.exit(main())

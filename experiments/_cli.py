"""What every command does around its work: flags, quiet logs, clear errors."""

from collections.abc import Callable, Sequence
import sys
from typing import Any

from absl import app, flags, logging


class UserError(RuntimeError):
  """An error whose message tells the person at the keyboard what to do.

  Commands print the message alone. Subclass it where none of Python's own
  error types fits.
  """


# Errors that commands report without a traceback.
REPORTED = (ValueError, OSError, ImportError, UserError)


def run(main: Callable[[Any], int | None]) -> None:
  """Runs a command: parses its flags, calls `main`, reports its errors.

  Adds `--traceback`, which shows where an error comes from. Define the
  command's own flags before calling this.

  Args:
    main: takes absl's flag values and returns an exit code; None means 0.
  """
  flags.DEFINE_bool("traceback", False, "Show where an error comes from.")
  # Else --help would list the flags of the command's own module only.
  values = flags.FLAGS
  values.register_key_flag_for_module(sys.argv[0], values["traceback"])

  def start(argv: Sequence[str]) -> int | None:
    logging.set_verbosity(logging.WARNING)  # Orbax logs every step it takes.
    try:
      if len(argv) > 1:
        raise ValueError(f"unexpected arguments {argv[1:]}; see --help")
      return main(values)
    except REPORTED as error:
      if values.traceback:
        raise
      sys.exit(f"error: {error}")

  app.run(start)

"""Runs `--help` of many commands in one process, because JAX imports slowly.

  python tests/helpers/command_help.py MODULE...

Prints a JSON object: for each module its exit code, its text and its flags.
"""

import contextlib
import io
import json
import runpy
import sys

from absl import app, flags


def _help_of(module: str) -> dict:
  """Runs a module with `--help`, then removes the flags that it defined."""
  known = set(flags.FLAGS)
  printed, sys.argv = io.StringIO(), [module, "--help"]
  code = None
  with contextlib.redirect_stdout(printed):
    try:
      runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
      code = stop.code
    except Exception as error:  # The other commands are still run.
      code = repr(error)
  new = sorted(set(flags.FLAGS) - known)
  for name in new:
    delattr(flags.FLAGS, name)
  flags.FLAGS.unparse_flags()
  return {"code": code, "text": printed.getvalue(), "flags": new}


if __name__ == "__main__":
  app.define_help_flags()
  print(json.dumps({module: _help_of(module) for module in sys.argv[1:]}))

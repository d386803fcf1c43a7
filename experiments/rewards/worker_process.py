"""The process that scores responses. It must not import JAX.

`workers` starts it and talks to it through a socket. It sends the pickled
`Rewards` first, then one `(example, completion)` after another, and each is
answered by a tuple of a kind and its content.
"""

import faulthandler
from multiprocessing import connection
import os
import pickle
from typing import Any

# Kinds of answers.
READY, FAILED, VALUES, ERROR, BAD = "ready", "failed", "values", "error", "bad"
# Seconds past the limit at which the process ends itself. The process that
# started it ends it earlier, unless that is gone.
_GRACE = 5.0


def main(handle: int, limit: float) -> None:
  """Scores responses until the socket is closed.

  Args:
    handle: File descriptor of the socket.
    limit: Seconds allowed for one response.
  """
  silence = os.open(os.devnull, os.O_RDWR)
  for standard in (0, 1, 2):  # Rewards might print, or read from stdin.
    os.dup2(silence, standard)
  socket: connection.Connection = connection.Connection(handle)
  try:
    rewards = pickle.loads(socket.recv_bytes())
  except EOFError:
    return
  except Exception as error:
    socket.send((FAILED, _describe(error)))
    return
  socket.send((READY, None))
  while True:
    try:
      example, completion = socket.recv()
    except (EOFError, OSError):
      return
    # This is a thread in C, which runs even if Python code holds the GIL.
    faulthandler.dump_traceback_later(limit + _GRACE, exit=True, file=2)
    answer = score(rewards, example, completion)
    faulthandler.cancel_dump_traceback_later()
    socket.send(answer)


def score(rewards: Any, example: Any, completion: str) -> tuple[str, Any]:
  """Scores one response.

  Args:
    rewards: A `parts.Rewards`.
    example: The problem.
    completion: The response.

  Returns:
    `(VALUES, values)`; `(ERROR, text)` if a part raised; or `(BAD, text)` if a
    part returned something other than a finite number.
  """
  from experiments.rewards import parts

  try:
    return VALUES, rewards(example, completion)
  except parts.BadReward as error:
    return BAD, str(error)
  except (Exception, SystemExit) as error:
    return ERROR, _describe(error)


def _describe(error):
  """Describes an exception in one line."""
  return f"{type(error).__name__}: {error}"[:500]

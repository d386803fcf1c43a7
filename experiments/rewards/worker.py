"""The process that scores responses. It must not import JAX.

It is started by `workers`, which talks to it through a socket: first the
pickled `Rewards`, then one `(example, completion)` after another, each
answered by a tuple of a kind and its content.
"""

import faulthandler
from multiprocessing import connection
import os
import pickle
from typing import Any

# Kinds of answers.
READY, FAILED, VALUES, ERROR, BAD = "ready", "failed", "values", "error", "bad"
# Seconds after its limit at which a process ends by itself: whoever started it
# has ended it before, unless they are gone.
_GRACE = 5.0


def main(handle: int, limit: float) -> None:
  """Scores until the socket is closed.

  Args:
    handle: file descriptor of the socket.
    limit: seconds for a response.
  """
  silence = os.open(os.devnull, os.O_RDWR)
  for standard in (0, 1, 2):  # Rewards may print or ask.
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
    # A thread of C code: it works while Python code holds the interpreter.
    faulthandler.dump_traceback_later(limit + _GRACE, exit=True, file=2)
    answer = score(rewards, example, completion)
    faulthandler.cancel_dump_traceback_later()
    socket.send(answer)


def score(rewards: Any, example: Any, completion: str) -> tuple[str, Any]:
  """Kind and content of the answer to one response.

  Args:
    rewards: a `parts.Rewards`.
    example: what was asked.
    completion: the response.

  Returns:
    `(VALUES, values)`; `(ERROR, text)` if a part raised; or `(BAD, text)` if it
    returned something that is no reward.
  """
  from experiments.rewards import parts

  try:
    return VALUES, rewards(example, completion)
  except parts.BadReward as error:
    return BAD, str(error)
  except (Exception, SystemExit) as error:
    return ERROR, _describe(error)


def _describe(error):
  """An exception in one line."""
  return f"{type(error).__name__}: {error}"[:500]

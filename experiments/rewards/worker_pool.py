"""Scores many responses in other processes, with a time limit.

If a reward function hangs, raises or ends its process, the response gets reward
0 and is counted, and the run goes on. What a function prints is dropped.
Functions are called with one response at a time, so that rewards depend neither
on the number of processes nor on the other responses.
"""

import collections
from collections.abc import Sequence
import math
from multiprocessing import connection
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from experiments import _cli
from experiments.rewards import parts, worker_process
from experiments.tasks import base

# Seconds in which a process must be ready; imports are slow on a busy machine.
_START_LIMIT = 180.0
# Most failures of different kinds to warn of, as each response could have one.
_KINDS_TOLD = 20
# `multiprocessing` would import the main program again, and with it JAX.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:];"
    " from experiments.rewards import worker_process;"
    " worker_process.main(int(sys.argv[1]), float(sys.argv[2]))"
)


class Scores(NamedTuple):
  """Rewards of B responses.

  Attributes:
    total: `[B]` float32, the weighted sum of the parts.
    parts: `[B]` float32 for each part by name, before its weight.
    timeouts: Number of responses that met the time limit; their parts are 0.
    errors: Number of responses whose function raised or ended the process;
      their parts are 0 too.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  timeouts: int
  errors: int


class RewardWorkers:
  """Scores responses; a context manager that ends its processes.

  The processes start with the first responses, and end with the program if not
  before.
  """

  def __init__(
      self,
      task: base.Task,
      reward: str = "correctness",
      *,
      workers: int = 1,
      timeout: float = 10.0,
  ):
    """Finds the parts of the reward.

    Args:
      task: The task whose responses are scored.
      reward: A weighted sum of parts, see `parts.Rewards`.
      workers: Number of processes; 0 scores in this one, without a limit.
      timeout: Seconds allowed for one response.

    Raises:
      ValueError: If a part is unknown, a number is out of range, or the task
        cannot be pickled.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
      raise ValueError(f"workers must be an int of at least 0, got {workers!r}")
    if not (math.isfinite(timeout) and timeout > 0):
      raise ValueError(
          f"timeout must be a positive number of seconds, got {timeout!r}"
      )
    self.rewards = parts.Rewards(task, reward)
    self._count = workers
    self._timeout = float(timeout)
    self._processes: list[_Process] = []
    self._told: set[str] = set()
    if workers:
      try:
        self._pickled = pickle.dumps(self.rewards)
      except Exception as error:
        raise ValueError(
            f"task {task.name!r} with reward {reward!r} cannot be sent to"
            f" another process ({error}); define its class and functions at the"
            " top level of a module, or score with workers=0"
        ) from error

  def __enter__(self) -> "RewardWorkers":
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    """Ends the processes; the next `score` starts new ones."""
    while self._processes:
      self._processes.pop().end()

  def score(
      self, examples: Sequence[base.Example], completions: Sequence[str]
  ) -> Scores:
    """Scores responses.

    Args:
      examples: One per response; repeated for each response of a group.
      completions: The responses as text.

    Returns:
      The rewards, in the order of the responses.

    Raises:
      ValueError: If a part returns something other than a finite number; names
        the task, the part, the index and the value.
      RuntimeError: If the processes cannot start.
    """
    base.check_pairs(examples, completions)
    items = list(zip(examples, completions, strict=True))
    if self._count:
      try:
        answers = self._score_elsewhere(items)
      except BaseException:
        self.close()  # The processes still work on the abandoned batch.
        raise
    else:
      answers = [worker_process.score(self.rewards, *item) for item in items]
    return self._collect(items, answers)

  def _collect(self, items, answers):
    """Makes the scores of the answers to all responses."""
    names = self.rewards.names
    values = np.zeros((len(items), len(names)), np.float64)
    counts = collections.Counter(kind for kind, _ in answers)
    for i, (kind, content) in enumerate(answers):
      if kind == worker_process.VALUES:
        values[i] = content
      elif kind == worker_process.BAD:
        raise ValueError(f"{content}, at index {i}, for {items[i][1]!r}")
      else:
        self._tell(content)
    return Scores(
        total=(values @ np.asarray(self.rewards.weights)).astype(np.float32),
        parts={
            name: values[:, k].astype(np.float32)
            for k, name in enumerate(names)
        },
        timeouts=counts[_TIMEOUT],
        errors=counts[worker_process.ERROR],
    )

  def _tell(self, problem):
    """Warns once of each kind of failure, up to a number of kinds."""
    if problem not in self._told and len(self._told) < _KINDS_TOLD:
      self._told.add(problem)
      logging.warning("a reward failed and counts as 0: %s", problem)

  def _score_elsewhere(self, items):
    """Lets the processes answer each item."""
    answers = [("", None)] * len(items)
    left = collections.deque(range(len(items)))
    done = 0
    while done < len(items):
      self._staff(len(items) - done)
      for process in self._processes:
        if process.idle and left:
          process.give(left.popleft(), items)
      for process in self._wait():
        index, answer = process.take()
        if index is not None:
          answers[index] = answer
          done += 1
    return answers

  def _staff(self, needed):
    """Replaces processes that ended; starts no more than there is work for."""
    for process in self._processes:
      process.check()
    self._processes = [p for p in self._processes if not p.ended]
    while len(self._processes) < min(self._count, needed):
      self._processes.append(_Process(self._pickled, self._timeout))

  def _wait(self):
    """Waits for processes that answered, ended, or exceeded their limit."""
    busy = [p for p in self._processes if not p.idle]
    first = min(p.deadline for p in busy)
    ready = connection.wait(
        [p.socket for p in busy], max(0.0, first - time.monotonic())
    )
    now = time.monotonic()
    return [p for p in busy if p.socket in ready or p.deadline <= now]


_TIMEOUT = "timeout"


class _Process:
  """A process and the response that it works on."""

  def __init__(self, pickled: bytes, limit: float):
    self._limit = limit
    self._index: int | None = None
    self._loaded = False
    self.ended = False
    self.socket, theirs = connection.Pipe()
    # NumPy's threads would only compete with the other processes.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    self._popen = subprocess.Popen(
        [
            *(sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(limit)),
            *sys.path,
        ],
        pass_fds=[theirs.fileno()],
        env=environment,
        # A group of its own, so that Ctrl-C does not reach it, and the
        # processes that it starts end with it.
        start_new_session=True,
    )
    theirs.close()
    self.deadline = time.monotonic() + _START_LIMIT
    try:
      self.socket.send_bytes(pickled)
    except OSError:
      pass  # The process has ended; `take` notices it.

  @property
  def idle(self) -> bool:
    """Whether the process is ready and has no response."""
    return self._loaded and self._index is None and not self.ended

  def check(self):
    """Notices whether the process ended while it had no response."""
    if self.idle and self._popen.poll() is not None:
      self.end()

  def give(self, index, items):
    """Gives the process a response to score."""
    self._index = index
    self.deadline = time.monotonic() + self._limit
    try:
      self.socket.send(items[index])
    except OSError:
      pass  # The process has ended; `take` notices it.

  def take(self) -> tuple[int | None, tuple[str, Any]]:
    """Takes the index and the answer; None if it only loaded the rewards."""
    index, self._index = self._index, None
    try:
      # An answer counts if it came just before the limit.
      kind, content = (
          self.socket.recv() if self.socket.poll() else (_TIMEOUT, None)
      )
    except (EOFError, OSError):
      self.end(seconds=1.0)
      status = self._popen.returncode
      kind, content = (
          worker_process.ERROR,
          f"its process ended with status {status}",
      )
    if not self._loaded:
      self._check_start(kind, content)
    elif kind == _TIMEOUT:
      self.end()
      content = f"no reward within {self._limit} s"
    return index, (kind, content)

  def _check_start(self, kind, content):
    """Raises RuntimeError if the process cannot score at all."""
    if kind != worker_process.READY:
      self.end()
      raise _cli.UserError(
          "a process that scores responses did not start:"
          f" {content or f'not ready after {_START_LIMIT} s'}; score with"
          " workers=0 to see where it fails"
      )
    self._loaded = True

  def end(self, seconds: float = 0.0) -> None:
    """Ends the process and its children, after some seconds to end itself."""
    self.ended = True
    self.socket.close()
    try:
      self._popen.wait(seconds)
    except subprocess.TimeoutExpired:
      pass
    try:
      os.killpg(self._popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass  # The process has ended itself.
    self._popen.wait()

"""Rewards of many responses, scored in other processes with a time limit.

A response whose reward function hangs, raises or ends its process gets reward
0 and is counted; the run goes on. What a function prints is dropped. Functions
are called with one response at a time, so that rewards depend neither on the
number of processes nor on the other responses.
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

from experiments.rewards import parts, worker
from experiments.tasks import base

# Seconds in which a process must be ready: imports on a busy machine.
_START_LIMIT = 180.0
# Different failures that are put in words; a run may have one per response.
_KINDS_TOLD = 20
# Not `multiprocessing`: it would import the main program again, with JAX.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:];"
    " from experiments.rewards import worker;"
    " worker.main(int(sys.argv[1]), float(sys.argv[2]))"
)


class Scores(NamedTuple):
  """Rewards of B responses.

  Attributes:
    total: `[B]` float32, the weighted sum of the parts.
    parts: `[B]` float32 of each part by name, not weighted.
    timeouts: responses that ran into the time limit; all their parts are 0.
    errors: responses whose function raised or ended the process; likewise.
  """

  total: np.ndarray
  parts: dict[str, np.ndarray]
  timeouts: int
  errors: int


class RewardWorkers:
  """Scores responses by a reward; a context manager that ends its processes.

  Processes start with the first responses. They need not be ended if the
  program ends.
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
      task: whose responses are scored.
      reward: a weighted sum of parts, see `parts.Rewards`.
      workers: processes; 0 scores in this one, without a limit.
      timeout: seconds for one response.

    Raises:
      ValueError: for an unknown part, a number that is out of range, or a task
        that cannot be pickled.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
      raise ValueError(f"workers must be an int of at least 0, got {workers!r}")
    if not (math.isfinite(timeout) and timeout > 0):
      raise ValueError(f"timeout must be positive seconds, got {timeout!r}")
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
            " top of a module, or score with workers=0"
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
    """Rewards of responses, in their order.

    Args:
      examples: one per response; repeated for each response of a group.
      completions: the responses as text.

    Returns:
      The rewards.

    Raises:
      ValueError: a part returned something that is not a finite number; names
        the task, the part, the index and the value.
      RuntimeError: the processes cannot start.
    """
    base.check_pairs(examples, completions)
    items = list(zip(examples, completions, strict=True))
    if self._count:
      try:
        answers = self._score_elsewhere(items)
      except BaseException:
        self.close()  # They hold responses of a batch that is given up.
        raise
    else:
      answers = [worker.score(self.rewards, *item) for item in items]
    return self._collect(items, answers)

  def _collect(self, items, answers):
    """Scores from the answer to each response."""
    names = self.rewards.names
    values = np.zeros((len(items), len(names)), np.float64)
    counts = collections.Counter(kind for kind, _ in answers)
    for i, (kind, content) in enumerate(answers):
      if kind == worker.VALUES:
        values[i] = content
      elif kind == worker.BAD:
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
        errors=counts[worker.ERROR],
    )

  def _tell(self, problem):
    """Warns once of each kind of failure, of the first few kinds."""
    if problem not in self._told and len(self._told) < _KINDS_TOLD:
      self._told.add(problem)
      logging.warning("a reward failed and counts as 0: %s", problem)

  def _score_elsewhere(self, items):
    """The answer to each item, from the processes."""
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
    """Replaces processes that ended; starts no more than have work."""
    for process in self._processes:
      process.check()
    self._processes = [p for p in self._processes if not p.ended]
    while len(self._processes) < min(self._count, needed):
      self._processes.append(_Process(self._pickled, self._timeout))

  def _wait(self):
    """Processes with news: an answer, an end, or a limit that has passed."""
    busy = [p for p in self._processes if not p.idle]
    first = min(p.deadline for p in busy)
    ready = connection.wait(
        [p.socket for p in busy], max(0.0, first - time.monotonic())
    )
    now = time.monotonic()
    return [p for p in busy if p.socket in ready or p.deadline <= now]


_TIMEOUT = "timeout"


class _Process:
  """One process and the response it works on."""

  def __init__(self, pickled: bytes, limit: float):
    self._limit = limit
    self._index: int | None = None
    self._loaded = False
    self.ended = False
    self.socket, theirs = connection.Pipe()
    # Threads of NumPy would only compete with those of the other processes.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    self._popen = subprocess.Popen(
        [
            *(sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(limit)),
            *sys.path,
        ],
        pass_fds=[theirs.fileno()],
        env=environment,
        # Of its own group: an interrupt from the keyboard does not reach it,
        # and what it has started ends with it.
        start_new_session=True,
    )
    theirs.close()
    self.deadline = time.monotonic() + _START_LIMIT
    try:
      self.socket.send_bytes(pickled)
    except OSError:
      pass  # It has ended; `take` finds out.

  @property
  def idle(self) -> bool:
    """Whether it is ready and has no response."""
    return self._loaded and self._index is None and not self.ended

  def check(self):
    """Notices that it ended while it had no response."""
    if self.idle and self._popen.poll() is not None:
      self.end()

  def give(self, index, items):
    """Hands out a response."""
    self._index = index
    self.deadline = time.monotonic() + self._limit
    try:
      self.socket.send(items[index])
    except OSError:
      pass  # It has ended; `take` finds out.

  def take(self) -> tuple[int | None, tuple[str, Any]]:
    """Index and answer after news; no index if it has loaded the rewards."""
    index, self._index = self._index, None
    try:
      # An answer that came just before the limit counts.
      kind, content = (
          self.socket.recv() if self.socket.poll() else (_TIMEOUT, None)
      )
    except (EOFError, OSError):
      self.end(seconds=1.0)
      status = self._popen.returncode
      kind, content = worker.ERROR, f"its process ended with status {status}"
    if not self._loaded:
      self._check_start(kind, content)
    elif kind == _TIMEOUT:
      self.end()
      content = f"no reward within {self._limit} s"
    return index, (kind, content)

  def _check_start(self, kind, content):
    """Refuses processes that cannot score at all."""
    if kind != worker.READY:
      self.end()
      raise RuntimeError(
          "a process that scores responses did not start:"
          f" {content or f'not ready after {_START_LIMIT} s'}"
      )
    self._loaded = True

  def end(self, seconds: float = 0.0) -> None:
    """Ends it and what it has started; `seconds` to end by itself."""
    self.ended = True
    self.socket.close()
    try:
      self._popen.wait(seconds)
    except subprocess.TimeoutExpired:
      pass
    try:
      os.killpg(self._popen.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
      pass  # It has ended by itself.
    self._popen.wait()

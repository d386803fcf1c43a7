"""Reward functions and tasks that a run must survive, and one that works."""

import ctypes
import os
import subprocess
import sys
import time

from experiments import tasks


def short(example, completion):
  """Returns a reward that falls with the length of the response."""
  del example
  return 1.0 / (1 + len(completion))


def behave(example, completion):
  """Does what the first word says; returns the length of the rest."""
  del example
  word, _, rest = completion.partition(" ")
  match word:
    case "hang":
      time.sleep(1000)
    case "spin":
      while True:
        pass
    case "exit":
      os._exit(3)
    case "leave":
      sys.exit(4)
    case "crash":
      ctypes.string_at(0)
    case "raise":
      raise KeyError("no such key")
    case "print":
      print(rest)
      os.write(1, b"on the descriptor\n")
      sys.stderr.write("on the error stream\n")
    case "read":
      assert sys.stdin.read() == ""
    case "child":
      subprocess.Popen(["sleep", "1000"])
      time.sleep(1000)
    case "value":
      return eval(rest)
    case "pid":
      return float(os.getpid())
    case "jax":
      return float("jax" in sys.modules)
  return float(len(rest))


class Other(tasks.Addition):
  """A task that has no answer format and cannot be pickled."""

  well_formed = tasks.Task.well_formed

  def __init__(self, seed):
    super().__init__("1", seed)
    self.unpicklable = lambda: None


class Absent(tasks.Addition):
  """A task that cannot be unpickled."""

  def __init__(self, seed):
    super().__init__("1", seed)

  def __setstate__(self, state):
    raise OSError("no such disk")

"""Kills a run again and again, and compares it with one that was left alone.

python -m experiments.benchmarks.soak --config=experiments/configs/soak.py \
  --workdir=/tmp/soak --out=docs/results/soak

The training program runs as a user starts it. Some seconds after its first
update it gets SIGKILL or SIGTERM, and is started again, until it is done. Then
every array of its last checkpoint, and every number of its record that is not
of the machine, must be that of the undisturbed run, bit for bit.

The run that is killed keeps compiled programs on disk, the other has none.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from absl import app, flags
import numpy as np

from experiments.runs import checkpoints, metric_names, progress, record

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
# Exit codes of a run that was killed; with a signal's number it was at once.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)


def kills(
    seed: int, shortest: float, longest: float
) -> Iterator[tuple[float, signal.Signals]]:
  """An endless plan: seconds after the first update, and the signal.

  Raises:
    ValueError: the seconds are not 0 <= shortest <= longest.
  """
  if not 0 <= shortest <= longest:
    raise ValueError(
        f"shortest={shortest} and longest={longest}: seconds between kills"
        " must be 0 <= shortest <= longest"
    )
  generator = random.Random(seed)
  while True:
    yield generator.uniform(shortest, longest), generator.choice(SIGNALS)


class _Attempt:
  """One start of the training program, killed after a while."""

  def __init__(self, workdir: pathlib.Path, delay: float, number: int | None):
    self._workdir = workdir
    self._delay = delay
    self._signal = number  # None: it is left alone.
    self._process: subprocess.Popen[str]
    self.update = 0
    self.resumed_at = 0
    self.saving = False
    self.sent = False

  def run(
      self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]
  ) -> int:
    """Runs the program to its end, of either kind; returns its exit code."""
    self._process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(self._delay, self._kill)
    assert self._process.stdout is not None
    for line in self._process.stdout:
      log.write(line)
      words = line.split()
      if line.startswith("resuming after update"):
        self.resumed_at = int(words[3])
      if line.startswith("update "):
        self.update = int(words[1].partition("/")[0])
        if self._signal is not None and timer.ident is None:
          timer.start()
    timer.cancel()
    return self._process.wait()

  def _kill(self) -> None:
    folder = self._workdir / "checkpoints"
    self.saving = any(folder.glob(".tmp-*"))
    self.sent = True
    assert self._signal is not None
    self._process.send_signal(self._signal)


def disturbed(
    command: Sequence[str],
    workdir: pathlib.Path,
    plan: Iterator[tuple[float, signal.Signals]],
    out: pathlib.Path,
) -> list[dict[str, Any]]:
  """Runs `command` as often as it takes, and writes `out/log.jsonl`.

  Args:
    command: starts a run in `workdir`, or resumes it.
    workdir: of that run.
    plan: of `kills`.
    out: directory for the log, and for `train.log`, what the program printed.

  Returns:
    The log: one entry for each start of the program.

  Raises:
    RuntimeError: it ended by itself with an error.
  """
  environment = {
      "JAX_COMPILATION_CACHE_DIR": str(workdir.absolute() / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }
  start = time.monotonic()
  entries: list[dict[str, Any]] = []
  with (
      (out / "log.jsonl").open("w") as file,
      (out / "train.log").open("w") as output,
  ):
    for delay, number in plan:
      attempt = _Attempt(workdir, delay, number)
      code = attempt.run(command, environment, output)
      entry = {
          "seconds": round(time.monotonic() - start, 1),
          "resumed_at": attempt.resumed_at,
          "update": attempt.update,
          "signal": number.name if attempt.sent else None,
          "while_saving": attempt.saving,
          "exit_code": code,
      }
      entries.append(entry)
      file.write(json.dumps(entry) + "\n")
      file.flush()
      progress.say(json.dumps(entry))
      if code == 0:
        break
      if code not in _KILLED:
        raise RuntimeError(f"the run failed; see {out / 'train.log'}")
  return entries


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """What two finished runs do not have in common, a line each.

  Compares the arrays of the newest checkpoints by their bytes, and the lines
  of the records but for what `metric_names.repeats` denies.
  """
  found = []
  states = []
  for workdir in (one, other):
    saved = checkpoints.Checkpoints(workdir / "checkpoints")
    states.append(saved.load(saved.updates()[-1]))
  for name in sorted(states[0].keys() | states[1].keys()):
    arrays = [state.get(name, np.zeros(0)) for state in states]
    if _bytes(arrays[0]) != _bytes(arrays[1]):
      found.append(f"array {name}")
  rows = [_repeated(workdir / record.FILENAME) for workdir in (one, other)]
  if len(rows[0]) != len(rows[1]):
    found.append(f"lines of the record: {len(rows[0])} and {len(rows[1])}")
  for here, there in zip(*rows, strict=False):
    for name in sorted(here.keys() | there.keys()):
      if here.get(name, ...) != there.get(name, ...):
        found.append(f"update {here['update']}: {name}")
  return found


def _bytes(array: np.ndarray) -> tuple[Any, ...]:
  return array.shape, array.dtype, array.tobytes()


def _repeated(path: pathlib.Path) -> list[dict[str, Any]]:
  """The lines of a record with what the machine has no part in."""
  rows = [
      {name: row[name] for name in row if metric_names.repeats(name)}
      for row in record.read_rows(path)
  ]
  return [row for row in rows if row.keys() != {"update"}]


def soak(
    command: Sequence[str],
    workdir: pathlib.Path,
    out: pathlib.Path,
    plan: Iterator[tuple[float, signal.Signals]],
) -> dict[str, Any]:
  """The run that is killed, the one that is not, and what tells them apart.

  Args:
    command: starts or resumes a run; `--workdir=` is added.
    workdir: for the runs, `killed` and `undisturbed`.
    out: for the log and `summary.json`.
    plan: of `kills`.

  Returns:
    The summary.
  """
  out.mkdir(parents=True, exist_ok=True)
  killed, undisturbed = workdir / "killed", workdir / "undisturbed"
  with_workdir = lambda path: [*command, f"--workdir={path}"]
  entries = disturbed(with_workdir(killed), killed, plan, out)
  start = time.monotonic()
  with (out / "train.log").open("a") as output:
    code = _Attempt(undisturbed, 0.0, None).run(
        with_workdir(undisturbed), {}, output
    )
  if code:
    raise RuntimeError(f"the run failed; see {out / 'train.log'}")
  sent = [entry["signal"] for entry in entries]
  saved = checkpoints.Checkpoints(killed / "checkpoints")
  arrays = saved.load(saved.updates()[-1])
  summary = {
      "updates": saved.updates()[-1],
      "starts": len(entries),
      **{number.name: sent.count(number.name) for number in SIGNALS},
      "while_saving": sum(entry["while_saving"] for entry in entries),
      "seconds_killed": entries[-1]["seconds"],
      "seconds_undisturbed": round(time.monotonic() - start, 1),
      "arrays": len(arrays),
      "array_bytes": sum(array.nbytes for array in arrays.values()),
      "rows": len(record.read_rows(killed / record.FILENAME)),
      "differences": differences(killed, undisturbed),
  }
  (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
  return summary


def main(names: flags.FlagValues) -> None:
  command = [sys.executable, "-m", "experiments.train"]
  command.append(f"--config={names.config}")
  if names.updates:
    command.append(f"--config.updates={names.updates}")
  plan = kills(names.seed, names.shortest, names.longest)
  summary = soak(
      command, pathlib.Path(names.workdir), pathlib.Path(names.out), plan
  )
  progress.say(json.dumps(summary, indent=2))
  if summary["differences"]:
    sys.exit("error: the run that was killed is not the other")


if __name__ == "__main__":
  flags.DEFINE_string("config", "experiments/configs/soak.py", "Of the runs.")
  flags.DEFINE_string("workdir", None, "Directory of both runs.")
  flags.DEFINE_string("out", "docs/results/soak", "Of the log and summary.")
  flags.DEFINE_integer("updates", 0, "In place of the config's.")
  flags.DEFINE_integer("seed", 0, "Of the kills.")
  flags.DEFINE_float("shortest", 20.0, "Seconds between kills, at least.")
  flags.DEFINE_float("longest", 60.0, "Seconds between kills, at most.")
  flags.mark_flag_as_required("workdir")
  app.run(lambda argv: main(flags.FLAGS))

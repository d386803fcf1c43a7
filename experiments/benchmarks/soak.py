r"""Kills a run again and again, and compares it with an undisturbed one.

  python -m experiments.benchmarks.soak --config=experiments/configs/soak.py \
    --workdir=/tmp/soak --out=docs/results/soak

The training command runs as a user would start it. Some seconds after its first
update it gets SIGKILL or SIGTERM and is started again, until the run is done.
Then every array of its last checkpoint, and every number of its record that
does not depend on the machine, must equal the undisturbed run's bit for bit.

The killed run keeps its compiled programs on disk; the undisturbed one does
not.
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

from absl import flags
import numpy as np

from experiments import _cli
from experiments.runs import checkpoints, metric_names, progress, record

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
# Exit codes of a killed run: negative if the signal ended the process itself.
_KILLED = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)


def kill_plan(
    seed: int, shortest: float, longest: float
) -> Iterator[tuple[float, signal.Signals]]:
  """Yields when to kill each start of the run, and by which signal.

  Args:
    seed: Random seed.
    shortest: Least seconds between the first update and the signal.
    longest: Most seconds between the first update and the signal.

  Yields:
    Seconds after the first update, and the signal; without end.

  Raises:
    ValueError: The seconds are not 0 <= shortest <= longest.
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
  """One start of the training command, which can be killed after a while."""

  def __init__(self, workdir: pathlib.Path, delay: float, number: int | None):
    self._workdir = workdir
    self._delay = delay
    self._signal = number  # None: do not kill it.
    self._process: subprocess.Popen[str]
    self.update = 0
    self.resumed_at = 0
    self.saving = False
    self.sent = False

  def run(
      self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]
  ) -> int:
    """Runs the command until it ends or is killed; returns its exit code."""
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


def run_with_kills(
    command: Sequence[str],
    workdir: pathlib.Path,
    plan: Iterator[tuple[float, signal.Signals]],
    out: pathlib.Path,
) -> list[dict[str, Any]]:
  """Restarts `command` until the run is done, and writes `out/log.jsonl`.

  Args:
    command: Starts a run in `workdir`, or resumes it.
    workdir: Directory of the run.
    plan: When to send which signal; see `kill_plan`.
    out: Directory for the log and for `train.log`, the command's output.

  Returns:
    The log, one entry per start of the command.

  Raises:
    UserError: The command failed by itself.
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
        raise _run_failed(out)
  return entries


def _run_failed(out: pathlib.Path) -> _cli.UserError:
  return _cli.UserError(f"the run failed; see {out / 'train.log'}")


def differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
  """Lists the differences between two finished runs, one line each.

  Compares the arrays of the newest checkpoints byte by byte, and the records
  in all metrics that repeat according to `metric_names.repeats`.
  """
  different = []
  states = []
  for workdir in (one, other):
    saved = checkpoints.Checkpoints(workdir / "checkpoints")
    states.append(saved.load(saved.updates()[-1]))
  for name in sorted(states[0].keys() | states[1].keys()):
    arrays = [state.get(name, np.zeros(0)) for state in states]
    if _bytes(arrays[0]) != _bytes(arrays[1]):
      different.append(f"array {name}")
  rows = [_repeatable_rows(path / record.FILENAME) for path in (one, other)]
  if len(rows[0]) != len(rows[1]):
    different.append(f"lines of the record: {len(rows[0])} and {len(rows[1])}")
  for here, there in zip(*rows, strict=False):
    for name in sorted(here.keys() | there.keys()):
      if here.get(name, ...) != there.get(name, ...):
        different.append(f"update {here['update']}: {name}")
  return different


def _bytes(array: np.ndarray) -> tuple[Any, ...]:
  return array.shape, array.dtype, array.tobytes()


def _repeatable_rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a record, without machine-dependent metrics."""
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
  """Does a run with kills and one without, and compares them.

  Args:
    command: Starts or resumes a run; `--workdir=` is added.
    workdir: Directory of both runs, `killed` and `undisturbed`.
    out: Directory for the log and `summary.json`.
    plan: When to send which signal; see `kill_plan`.

  Returns:
    The content of `summary.json`.

  Raises:
    UserError: A run failed by itself.
  """
  out.mkdir(parents=True, exist_ok=True)
  killed, undisturbed = workdir / "killed", workdir / "undisturbed"
  with_workdir = lambda path: [*command, f"--workdir={path}"]
  entries = run_with_kills(with_workdir(killed), killed, plan, out)
  start = time.monotonic()
  with (out / "train.log").open("a") as output:
    code = _Attempt(undisturbed, 0.0, None).run(
        with_workdir(undisturbed), {}, output
    )
  if code:
    raise _run_failed(out)
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


def main(values: flags.FlagValues) -> None:
  command = [sys.executable, "-m", "experiments.train"]
  command.append(f"--config={values.config}")
  if values.updates:
    command.append(f"--config.updates={values.updates}")
  plan = kill_plan(values.seed, values.shortest, values.longest)
  out = pathlib.Path(values.out)
  summary = soak(command, pathlib.Path(values.workdir), out, plan)
  progress.say(json.dumps(summary, indent=2))
  if summary["differences"]:
    raise _cli.UserError(
        "the killed run differs from the undisturbed one; see"
        f" {out / 'summary.json'}"
    )


def _define_flags() -> None:
  flags.DEFINE_string(
      "config", "experiments/configs/soak.py", "Config file of both runs."
  )
  flags.DEFINE_string("workdir", None, "Directory of both runs.")
  flags.DEFINE_string(
      "out", "docs/results/soak", "Folder for the log and the summary."
  )
  flags.DEFINE_integer(
      "updates", 0, "Updates of each run; 0 means the config's number."
  )
  flags.DEFINE_integer("seed", 0, "Random seed of the times and signals.")
  flags.DEFINE_float("shortest", 20.0, "Least seconds between kills.")
  flags.DEFINE_float("longest", 60.0, "Most seconds between kills.")
  flags.mark_flag_as_required("workdir")


if __name__ == "__main__":
  _define_flags()
  _cli.run(main)

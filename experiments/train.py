"""Trains a language model by reinforcement learning.

  python -m experiments.train --config=experiments/configs/quickstart.py \\
    --workdir=DIR

Start a run, or resume it from its newest checkpoint: the same command does
both. Ctrl-C and SIGTERM save a checkpoint first. Change any field:

  python -m experiments.train --config=experiments/configs/quickstart.py \\
    --workdir=DIR --config.optimizer.rank=64 --config.updates=40

Train on several hosts, which share one workdir:

  python -m experiments.train --config=FILE --workdir=DIR --distributed

docs/config.md explains every field of the config, docs/tasks.md the tasks. In a
notebook: `experiments.runs.loop.train(get_config(), workdir)`.
"""

import pathlib
import signal
import sys

from absl import flags
import jax
from ml_collections import config_flags

from experiments import _cli
from experiments.parallel import processes
from experiments.runs import loop, progress, record, run_plot


def report(path: pathlib.Path, result: loop.Result, updates: int) -> None:
  """Prints how a run stands and where its files are, and draws its picture.

  Args:
    path: The run's directory.
    result: What `loop.train` returned.
    updates: Updates that the config asks for.
  """
  rows = record.read_rows(path / record.FILENAME)
  accuracy = record.column(rows, "eval/accuracy")
  if len(accuracy[0]) > 1:
    progress.say(
        f"held-out accuracy: {accuracy[1][0]:.3f} before,"
        f" {accuracy[1][-1]:.3f} after {accuracy[0][-1]} updates"
    )
  if record.column(rows, "train/reward")[0]:
    seconds = sum(sum(record.column(rows, name)[1]) for name in loop.PHASES)
    progress.say(f"training:   {seconds / 60:.1f} minutes in all")
    progress.say(f"picture:    {run_plot.draw_run(path)}")
  progress.say(f"metrics:    {path / record.FILENAME}")
  progress.say(f"checkpoint: {path / 'checkpoints'}")
  progress.say(
      f"export:     python -m experiments.export --workdir={path} --out=DIR"
  )
  if result.stopped_by is not None:
    progress.say(
        f"stopped by {signal.Signals(result.stopped_by).name} after update"
        f" {result.update} of {updates}; the same command resumes"
    )


def main(values: flags.FlagValues) -> None:
  if values.distributed:
    jax.distributed.initialize()
  result = loop.train(values.config, values.workdir)
  if processes.is_first_process():
    path = pathlib.Path(values.workdir).absolute()
    report(path, result, values.config.updates)
  processes.wait_for_all("reported")
  if result.stopped_by is not None:
    sys.exit(128 + result.stopped_by)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
      "config", None, "Path of a config file.", lock_config=True
  )
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_bool(
      "distributed",
      False,
      "This is one of several processes that share the workdir; see"
      " jax.distributed.initialize.",
  )
  flags.mark_flags_as_required(["config", "workdir"])
  _cli.run(main)

"""Measures memory of each method's update, as its compiler states it.

  python -m experiments.studies.learning_curves.memory \\
    --out=docs/results/learning_curves

Nothing is run: the updates are compiled only.
"""

from collections.abc import Sequence
import json
import os
import pathlib

from absl import flags
import jax

from experiments import _cli
from experiments.learning import compiled_step
from experiments.parallel import sharding
from experiments.reporting.units import MIB
from experiments.runs import progress
from experiments.studies import small_model, sweeps
from experiments.studies.learning_curves import sweep

FILENAME = "memory.json"
# The programs of a method: with the KL probe and without it.
BUDGETS = ("budget", "no budget")


def measure_memory(
    out: str | os.PathLike[str],
    labels: Sequence[str] = tuple(sweep.METHODS),
) -> dict[str, dict[str, dict[str, int]]]:
  """Compiles the update of each method and writes `out/memory.json`.

  Learning rates do not change the program.

  Args:
    out: Directory of the results, which is made if it does not exist.
    labels: The methods, as keys of `sweep.METHODS`.

  Returns:
    A dict of label to name in `BUDGETS` to `compiled_step.sizes`, in bytes.
  """
  out = pathlib.Path(out)
  out.mkdir(parents=True, exist_ok=True)
  part = sweep.FULL[0]
  methods: dict[str, dict[str, dict[str, int]]] = {}
  for label in labels:
    for budget in BUDGETS:
      values = sweep.METHODS[label] | {"kl.enabled": budget == "budget"}
      sizes = _compile(part, sweeps.Cell(label, values))
      methods.setdefault(label, {})[budget] = sizes
      progress.say(f"{label}, {budget}: {sizes['peak_bytes'] / MIB:.1f} MiB")
  text = json.dumps({"jax": jax.__version__, "methods": methods}, indent=1)
  (out / FILENAME).write_text(text + "\n")
  return methods


def read(
    out: str | os.PathLike[str],
) -> dict[str, dict[str, dict[str, int]]]:
  """Reads what `measure_memory` wrote to a directory; `{}` if it did not."""
  path = pathlib.Path(out) / FILENAME
  return json.loads(path.read_text())["methods"] if path.exists() else {}


def _compile(part: sweeps.Part, cell: sweeps.Cell) -> dict[str, int]:
  """Compiles the update of a cell and returns its sizes in bytes."""
  config = sweeps.run_config(part, cell, 0)
  mesh = sharding.make_mesh(config.mesh)
  # Compiling needs no weights, so the small model need not exist.
  lowered = compiled_step.lower_update(small_model.make_config(), config, mesh)
  return compiled_step.sizes(lowered.compile())


def main(values: flags.FlagValues) -> None:
  measure_memory(values.out)


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Directory of the results.")
  flags.mark_flag_as_required("out")
  _cli.run(main)

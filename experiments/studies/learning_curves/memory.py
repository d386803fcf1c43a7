"""Memory of each method's compiled update, as the compiler states it.

  python -m experiments.studies.learning_curves.memory \
    --out=docs/results/learning_curves
"""

from collections.abc import Sequence
import json
import os
import pathlib
import sys

from absl import app, flags
import jax

from experiments.learning import compiled_step
from experiments.parallel import sharding
from experiments.runs import progress
from experiments.studies import small_model, sweeps
from experiments.studies.learning_curves import sweep

FILENAME = "memory.json"
# A method's cells, by whether their KL is measured.
BUDGETS = ("budget", "no budget")


def measure_memory(
    out: str | os.PathLike[str],
    labels: Sequence[str] = tuple(sweep.METHODS),
) -> dict[str, dict[str, dict[str, int]]]:
  """Compiles the update of each method and writes `out/memory.json`.

  Args:
    out: directory of the results; made if it is not there.
    labels: keys of `sweep.METHODS`.

  Returns:
    Label to each of `BUDGETS` to `program.sizes`, bytes. Learning rates do not
    change the program.
  """
  out = pathlib.Path(out)
  out.mkdir(parents=True, exist_ok=True)
  part = sweep.FULL[0]
  found: dict[str, dict[str, dict[str, int]]] = {}
  for label in labels:
    for budget in BUDGETS:
      values = sweep.METHODS[label] | {"kl.enabled": budget == "budget"}
      sizes = _compile(part, sweeps.Cell(label, values))
      found.setdefault(label, {})[budget] = sizes
      progress.say(f"{label}, {budget}: {sizes['peak_bytes'] / 2**20:.1f} MiB")
  text = json.dumps({"jax": jax.__version__, "methods": found}, indent=1)
  (out / FILENAME).write_text(text + "\n")
  return found


def read(
    out: str | os.PathLike[str],
) -> dict[str, dict[str, dict[str, int]]]:
  """What `measure_memory` found; `{}` where it has not run."""
  path = pathlib.Path(out) / FILENAME
  return json.loads(path.read_text())["methods"] if path.exists() else {}


def _compile(part: sweeps.Part, cell: sweeps.Cell) -> dict[str, int]:
  config = sweeps.config_of(part, cell, 0)
  mesh = sharding.make_mesh(config.mesh)
  # Weights are not needed, so that the model need not have been taught.
  lowered = compiled_step.lower_update(small_model.make_config(), config, mesh)
  return compiled_step.sizes(lowered.compile())


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    sys.exit(f"unexpected arguments {argv[1:]}")
  measure_memory(flags.FLAGS.out)


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Directory of the results.")
  flags.mark_flag_as_required("out")
  app.run(main)

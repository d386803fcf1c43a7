"""Writes a run's newest checkpoint as a Hugging Face directory.

  python -m experiments.export --workdir=DIR --out=HF_DIR [--dtype=bfloat16]

`docs/export.md` says how to make a GGUF file of it.
"""

import pathlib
import sys

from absl import app, flags, logging
from jax.typing import DTypeLike

from experiments.models import hf
from experiments.runs import checkpoints, restore


def export(
    workdir: str | pathlib.Path,
    out: str | pathlib.Path,
    dtype: DTypeLike | None = None,
    best: bool = False,
) -> int:
  """Exports a checkpoint of a run.

  Args:
    workdir: directory of a run.
    out: directory for `transformers` to load; made if it is not there.
    dtype: of the weights in the files; None keeps the run's.
    best: whether to take the checkpoint with the highest score, and not the
      newest whole one.

  Returns:
    The number of updates that the exported model has seen.

  Raises:
    ValueError: there is no run or no such checkpoint in `workdir`.
  """
  update, model = restore.load_run(workdir, best)
  hf.save(out, model.config, model.params, model.tokenizer, dtype=dtype)
  return update


def main(names: flags.FlagValues) -> None:
  logging.set_verbosity(logging.WARNING)
  try:
    update = export(names.workdir, names.out, names.dtype, names.best)
  except (ValueError, OSError, checkpoints.CheckpointError) as error:
    sys.exit(f"error: {error}")
  print(f"{names.out}: the model after {update} updates")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_string("out", None, "Directory to write.")
  flags.DEFINE_enum(
      "dtype", None, ["float32", "bfloat16", "float16"], "Else the run's own."
  )
  flags.DEFINE_bool("best", False, "The best checkpoint, not the newest.")
  flags.mark_flags_as_required(["workdir", "out"])
  app.run(lambda argv: main(flags.FLAGS))

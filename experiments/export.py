"""Writes a run's newest checkpoint as a Hugging Face directory.

  python -m experiments.export --workdir=DIR --out=HF_DIR [--dtype=bfloat16]

The run's base model is not needed. docs/export.md explains how to go on to a
GGUF file.
"""

import pathlib

from absl import flags
from jax.typing import DTypeLike

from experiments import _cli
from experiments.models import hf
from experiments.runs import restore


def export(
    workdir: str | pathlib.Path,
    out: str | pathlib.Path,
    dtype: DTypeLike | None = None,
    best: bool = False,
) -> int:
  """Exports a checkpoint of a run.

  Args:
    workdir: Directory of the run.
    out: Directory for `transformers` to load; created if it does not exist.
    dtype: Dtype of the weights in the files; None keeps the run's.
    best: Whether to take the checkpoint with the highest score instead of the
      newest undamaged one.

  Returns:
    The number of updates that the exported model has seen.

  Raises:
    ValueError: If there is no run or no such checkpoint in `workdir`.
  """
  update, model = restore.load_run(workdir, best)
  hf.save(out, model.config, model.params, model.tokenizer, dtype=dtype)
  return update


def main(values: flags.FlagValues) -> None:
  update = export(values.workdir, values.out, values.dtype, values.best)
  print(f"{values.out}: the model after {update} updates")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_string("out", None, "Directory to write.")
  flags.DEFINE_enum(
      "dtype",
      None,
      ["float32", "bfloat16", "float16"],
      "Dtype of the weights; default: the run's.",
  )
  flags.DEFINE_bool(
      "best", False, "Export the best checkpoint instead of the newest."
  )
  flags.mark_flags_as_required(["workdir", "out"])
  _cli.run(main)

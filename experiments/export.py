"""Writes a run's newest checkpoint as a Hugging Face directory.

python -m experiments.export --workdir=DIR --out=HF_DIR
"""

import pathlib
import sys

from absl import app, flags, logging
import jax

from experiments import checkpoints, hf, learner, lora, optimizers, train
from experiments import workdir as workdir_lib


def export(workdir: str | pathlib.Path, out: str | pathlib.Path) -> int:
  """Exports the newest whole checkpoint.

  Args:
    workdir: directory of a run.
    out: directory for `transformers` to load; made if it is not there.

  Returns:
    The number of updates that the exported model has seen.

  Raises:
    ValueError: there is no run or no checkpoint in `workdir`.
  """
  config = workdir_lib.load_config(workdir)
  folder = pathlib.Path(workdir) / "checkpoints"
  saved = checkpoints.Checkpoints(folder)
  if not saved.updates():
    raise ValueError(
        f"{folder} holds no checkpoint yet; train until the first one"
        f" (config.checkpoint.every={config.checkpoint.every} updates)"
    )
  loaded = train.load_model(config)
  tx = optimizers.make_optimizer(config)

  def make_state(params):
    return learner.init_state(optimizers.init_params(config, params), tx)

  template = jax.eval_shape(make_state, loaded.params)
  restored = saved.restore(template)
  assert restored is not None  # There are checkpoints.
  update, state = restored
  hf.save(out, loaded.config, lora.merge(state.params), loaded.tokenizer)
  return update


def main(workdir: str, out: str) -> None:
  logging.set_verbosity(logging.WARNING)
  try:
    update = export(workdir, out)
  except (ValueError, FileNotFoundError) as error:
    sys.exit(f"error: {error}")
  print(f"{out}: the model after {update} updates")


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_string("out", None, "Directory to write.")
  flags.mark_flags_as_required(["workdir", "out"])
  app.run(lambda argv: main(flags.FLAGS.workdir, flags.FLAGS.out))

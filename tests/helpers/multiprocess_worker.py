"""One of the processes that `multiprocess_test.py` starts.

  python multiprocess_worker.py TASK FOLDER PORT N_PROCESSES INDEX

TASK is `step`, one update on fixed data whose results go to
`FOLDER/step.npz`, or `train`, a short training run in FOLDER.
"""

import pathlib
import sys

import jax
import numpy as np

from experiments.configs import quickstart
from experiments.learning import batches, compiled_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder, load, tiny
from experiments.parallel import processes, sharding
from experiments.rollouts.rollout import Rollout
from experiments.runs import loop


def make_config():
  """A small quickstart config for all devices of all processes."""
  config = quickstart.get_config().unlock()
  config.update_from_flattened_dict(
      {
          "model": "tiny",
          "updates": 2,
          "mesh.fsdp": 2,
          "mesh.tensor": jax.device_count() // 2,
          "rollout.prompts": 8,
          "rollout.responses": 8,
          "rollout.temperature": 1.0,
          "rollout.max_prompt_tokens": 16,
          "rollout.max_new_tokens": 2,
          "loss.row_tokens": (32,),
          "loss.micro_rows": 4,
          "optimizer.rank": 4,
          "optimizer.learning_rate": 1e-3,
          "kl.budget": 1e-4,
          "kl.final_budget": 1e-4,
          "evaluate.every": 2,
          "evaluate.prompts": 16,
          "checkpoint.every": 1,
          "log.tensorboard": False,
      }
  )
  return config.lock()


def make_batch(config, n_words):
  """A batch of random responses, the same in every process."""
  rng = np.random.default_rng(0)
  n = config.rollout.prompts * config.rollout.responses
  shape = (n, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
  new = np.arange(shape[1])[None] >= config.rollout.max_prompt_tokens
  completion = np.broadcast_to(new, shape)
  log_probs = np.where(completion, -np.log(n_words), 0.0)
  rollout = Rollout(
      tokens=rng.integers(n_words, size=shape).astype(np.int32),
      valid=np.ones(shape, bool),
      completion_mask=completion,
      log_probs=log_probs.astype(np.float32),
      finished=np.ones(n, bool),
  )
  return batches.make_batch(
      BatchSettings.of_config(config), rollout, rng.normal(size=n)
  )[0]


def step(folder):
  config = make_config()
  mesh = sharding.make_mesh(config.mesh)
  loaded = tiny.make_tiny(config.seed)
  model = decoder.Decoder(load.configure(loaded.config, config))
  tx = UpdateSettings.of_config(config).make_optimizer()
  with jax.set_mesh(mesh):
    state = compiled_step.init_state(
        UpdateSettings.of_config(config).optimizer, loaded.params, tx, mesh
    )
    batch = make_batch(config, loaded.config.vocab_size)
    batch = batches.put(batch, mesh)
    update = compiled_step.jit_update(
        model, tx, UpdateSettings.of_config(config), state, mesh
    )
    before = sharding.fetch(state.params)
    state, metrics = update(state, batch)
    results = sharding.fetch(
        {"after": state.params, "state": state.opt_state, "metrics": metrics}
    )
  leaves = jax.tree_util.tree_leaves_with_path(results | {"before": before})
  if processes.is_first_process():
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    np.savez(folder / "step.npz", **arrays)


def main(task, folder, port, n_processes, index):
  if int(n_processes) > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", int(n_processes), int(index)
    )
  folder = pathlib.Path(folder)
  if task == "step":
    step(folder)
  else:
    loop.train(make_config(), folder)


if __name__ == "__main__":
  main(*sys.argv[1:])

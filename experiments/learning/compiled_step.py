"""The update as a compiled program: for a mesh at hand, or one far away.

Nothing here allocates an array, so a model may be larger than the machine.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections

from experiments.learning import batches, optimizers, train_step
from experiments.models import load
from experiments.models.decoder import Decoder, DecoderConfig
from experiments.parallel import sharding
from experiments.planning import targets


def init_state(
    config: ml_collections.ConfigDict, params: Any, tx: Any, mesh: Mesh
) -> train_step.TrainState:
  """The state before the first update, laid out over the mesh.

  Args:
    config: a config like `configs/quickstart.py`.
    params: the model's parameters, the same in every process.
    tx: of `optimizers.make_optimizer`.
    mesh: of `sharding.make_mesh`.
  """
  params = optimizers.init_params(config, params)
  params = sharding.put(params, sharding.shardings(params, params, mesh))
  make = lambda params: train_step.init_state(params, tx)
  where = sharding.shardings(jax.eval_shape(make, params), params, mesh)

  def others(params):  # Returned from here the weights would be copies.
    state = make(params)
    return state.opt_state, state.update

  made = jax.jit(others, out_shardings=(where.opt_state, where.update))
  return train_step.TrainState(params, *made(params))


def jit_update(
    model: Decoder,
    tx: Any,
    config: ml_collections.ConfigDict,
    state: train_step.TrainState,
    mesh: Mesh,
    eos_ids: Sequence[int] = (),
) -> Any:
  """The jitted train step; it donates its state, which stays where it lies.

  Args:
    model: the policy.
    tx: of `optimizers.make_optimizer`.
    config: a config like `configs/quickstart.py`.
    state: arrays or `jax.ShapeDtypeStruct`.
    mesh: of `sharding.make_mesh`; call the step inside `jax.set_mesh(mesh)`.
    eos_ids: tokens that end a response.
  """
  where = sharding.shardings(state, state.params, mesh)
  return jax.jit(
      train_step.make_train_step(model, tx, config, eos_ids),
      donate_argnums=0,
      out_shardings=(where, sharding.replicated(mesh)),
  )


def abstract_arguments(
    architecture: DecoderConfig, config: ml_collections.ConfigDict, mesh: Mesh
) -> tuple[train_step.TrainState, train_step.Batch]:
  """Shapes, dtypes and shardings of the arguments of the train step."""
  model = Decoder(load.configure(architecture, config))
  tx = optimizers.make_optimizer(config)

  def make():
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    params = optimizers.init_params(config, params)
    return train_step.init_state(params, tx)

  state = jax.eval_shape(make)
  batch = batches.abstract_batch(config)
  place = lambda x, where: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=where
  )
  return (
      jax.tree.map(place, state, sharding.shardings(state, state.params, mesh)),
      jax.tree.map(place, batch, batches.shardings(batch, mesh)),
  )


def lower_update(
    architecture: DecoderConfig, config: ml_collections.ConfigDict, mesh: Mesh
) -> jax.stages.Lowered:
  """The whole update, ready to compile for the mesh's devices.

  Args:
    architecture: shapes of the model; dtypes and recomputation are the
      config's.
    config: a config like `configs/quickstart.py`.
    mesh: of `sharding.make_mesh`, of real or described devices.

  Raises:
    ValueError: the mesh cannot split the model or the batch.
  """
  sharding.check_model(architecture, mesh)
  sharding.check_batch("config.loss.micro_rows", config.loss.micro_rows, mesh)
  model = Decoder(load.configure(architecture, config))
  tx = optimizers.make_optimizer(config)
  state, batch = abstract_arguments(architecture, config, mesh)
  step = jit_update(model, tx, config, state, mesh)
  # The devices may only be described: nothing can run on them.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = step.trace(state, batch)
  found = mesh.devices.reshape(-1)
  return traced.lower(lowering_platforms=targets.lowering_platforms(found))


def sizes(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes on one device, as the compiler states them.

  Returns:
    `argument_bytes`, `output_bytes`, `aliased_bytes`, `temporary_bytes`, and
    `peak_bytes`: arguments + outputs - aliased + temporaries.
  """
  stated = compiled.memory_analysis()
  found = {
      "argument_bytes": stated.argument_size_in_bytes,
      "output_bytes": stated.output_size_in_bytes,
      "aliased_bytes": stated.alias_size_in_bytes,
      "temporary_bytes": stated.temp_size_in_bytes,
  }
  peak = sum(found.values()) - 2 * found["aliased_bytes"]
  return found | {"peak_bytes": peak}

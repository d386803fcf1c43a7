"""The update as a compiled program, for a real or only a described mesh.

Except for `init_state`, nothing here allocates arrays, so that a model can be
larger than the machine that plans for it.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections
import optax

from experiments.learning import batches, optimizers, train_step
from experiments.models import load
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import platforms, sharding


def init_state(
    optimizer: optimizers.OptimizerSettings,
    params: optax.Params,
    tx: optax.GradientTransformation,
    mesh: Mesh,
) -> train_step.TrainState:
  """The state before the first update, laid out over the mesh.

  Args:
    optimizer: Settings of the optimizer.
    params: The model's parameters, the same in every process.
    tx: The optimizer itself.
    mesh: The mesh, from `sharding.make_mesh`.
  """
  params = optimizers.init_params(optimizer, params)
  params = sharding.put(params, sharding.shardings(params, params, mesh))
  make = lambda params: train_step.init_state(params, tx)
  where = sharding.shardings(jax.eval_shape(make, params), params, mesh)

  def others(params):  # Returning the weights here would copy them.
    state = make(params)
    return state.opt_state, state.update

  made = jax.jit(others, out_shardings=(where.opt_state, where.update))
  return train_step.TrainState(params, *made(params))


def jit_update(
    model: Decoder,
    tx: optax.GradientTransformationExtraArgs,
    settings: train_step.UpdateSettings,
    state: train_step.TrainState,
    mesh: Mesh,
    eos_ids: Sequence[int] = (),
) -> jax.stages.Wrapped:
  """Jits the train step, which donates its state and keeps its shardings.

  Args:
    model: The policy.
    tx: The optimizer of `settings`.
    settings: What the update reads of a config.
    state: Arrays or `jax.ShapeDtypeStruct`s.
    mesh: The mesh, from `sharding.make_mesh`. Call the step inside
      `jax.set_mesh(mesh)`.
    eos_ids: Tokens that end a response.
  """
  where = sharding.shardings(state, state.params, mesh)
  return jax.jit(
      train_step.make_train_step(model, tx, settings, eos_ids),
      donate_argnums=0,
      out_shardings=(where, sharding.replicated(mesh)),
  )


@functools.lru_cache(maxsize=64)
def programs(
    model: Decoder,
    mesh: Mesh,
    settings: train_step.UpdateSettings,
    eos_ids: tuple[int, ...],
) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
  """Returns the jitted `prepare` and update of a run.

  Equal arguments give the same two programs, so they are compiled only once.
  The update donates its state: new parameters replace the old ones in place.

  Args:
    model: The policy.
    mesh: The mesh, from `sharding.make_mesh`.
    settings: The `program_key` of the update's settings.
    eos_ids: Tokens that end a response.

  Returns:
    `prepare` of `train_step.make_prepare`, and the step of `jit_update`.
  """
  tx = settings.make_optimizer()
  state = abstract_state(model, settings, mesh)
  step = jit_update(model, tx, settings, state, mesh, eos_ids)
  return jax.jit(train_step.make_prepare(model, settings, eos_ids)), step


def abstract_state(
    model: Decoder, settings: train_step.UpdateSettings, mesh: Mesh
) -> train_step.TrainState:
  """Shapes, dtypes and shardings of the training state."""
  tx = settings.make_optimizer()

  def make():
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    params = optimizers.init_params(settings.optimizer, params)
    return train_step.init_state(params, tx)

  state = jax.eval_shape(make)
  where = sharding.shardings(state, state.params, mesh)
  return jax.tree.map(_placed, state, where)


def abstract_batch(
    settings: batches.BatchSettings, mesh: Mesh
) -> train_step.Batch:
  """Shapes, dtypes and shardings of the largest batch."""
  batch = batches.abstract_batch(settings)
  return jax.tree.map(_placed, batch, batches.shardings(batch, mesh))


def _placed(
    x: jax.ShapeDtypeStruct, where: jax.sharding.Sharding
) -> jax.ShapeDtypeStruct:
  """The same shape and dtype with this sharding."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def lower_update(
    architecture: DecoderConfig, config: ml_collections.ConfigDict, mesh: Mesh
) -> jax.stages.Lowered:
  """Lowers the whole update, ready to compile for the mesh's devices.

  Args:
    architecture: The model's shapes; dtypes and rematerialisation come from
      the config.
    config: A config like `configs/quickstart.py`.
    mesh: The mesh, from `sharding.make_mesh`, of real or described devices.

  Raises:
    ValueError: If the mesh cannot split the model or the batch.
  """
  sharding.check_model(architecture, mesh)
  sharding.check_batch("config.loss.micro_rows", config.loss.micro_rows, mesh)
  settings = train_step.UpdateSettings.of_config(config)
  model = Decoder(load.configure(architecture, config))
  state = abstract_state(model, settings, mesh)
  batch = abstract_batch(batches.BatchSettings.of_config(config), mesh)
  step = jit_update(model, settings.make_optimizer(), settings, state, mesh)
  # Nothing can run on devices that are only described, hence the abstract mesh.
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = step.trace(state, batch)
  names = platforms.lowering_platforms(mesh.devices.reshape(-1))
  return traced.lower(lowering_platforms=names)


def sizes(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Memory of a program on one device in bytes, as the compiler states it.

  Returns:
    `argument_bytes`, `output_bytes`, `aliased_bytes`, `temporary_bytes`, and
    `peak_bytes`: arguments + outputs - aliased + temporaries.
  """
  stated = compiled.memory_analysis()
  parts = {
      "argument_bytes": stated.argument_size_in_bytes,
      "output_bytes": stated.output_size_in_bytes,
      "aliased_bytes": stated.alias_size_in_bytes,
      "temporary_bytes": stated.temp_size_in_bytes,
  }
  peak = sum(parts.values()) - 2 * parts["aliased_bytes"]
  return parts | {"peak_bytes": peak}

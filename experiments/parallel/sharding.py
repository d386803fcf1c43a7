"""Where arrays lie on a mesh: rules by name, for weights and activations.

Three mesh axes. `data`: whole replicas, each with its own responses. `fsdp`:
devices with their own responses that share one copy of the weights, each
holding a part and gathering a layer's when it computes it. `tensor`: devices
that share responses, and split heads and features among them.

`fsdp` splits a kernel's inputs, so that gathered parts lie in memory one after
the other (split by outputs, XLA keeps a transposed second copy of all weights),
and for the same reason a sketch's rank. An axis that does not divide a size is
left out, or goes to the array's other axis: at worst the array is whole on
those devices.
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

AXES = ("data", "fsdp", "tensor")

# Mesh axes that an array's axis of this name is split over, in that order.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    # Responses of all fsdp devices together, as a split vocabulary needs them.
    "gathered_batch": ("data",),
    "sequence": ("tensor",),
    "heads": ("tensor",),
    "features": ("tensor",),
    "vocab": ("tensor", "fsdp"),
    # Kernels that split their outputs over heads or features ...
    "whole_in": ("fsdp",),
    "split_out": ("tensor", "fsdp"),
    # ... and those that take such a split input.
    "split_in": ("tensor", "fsdp"),
    "whole_out": ("fsdp",),
    # A sketch's rank, beside outputs that are split, or whole.
    "rank": ("fsdp",),
    "split_rank": ("fsdp", "tensor"),
}

_SPLIT, _JOIN = ("whole_in", "split_out"), ("split_in", "whole_out")
# Names of a parameter's last axes, by the end of its path; others are whole.
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    # `kernel/kernel` is what LoRA's adapters, `a` and `b`, stand beside.
    r"(q|k|v|gate|up)_proj/kernel(/kernel)?": _SPLIT,
    r"(o|down)_proj/kernel(/kernel)?": _JOIN,
    r"(q|k|v|gate|up)_proj/kernel/a": (_SPLIT[0], None),
    r"(q|k|v|gate|up)_proj/kernel/b": (None, _SPLIT[1]),
    r"(o|down)_proj/kernel/a": (_JOIN[0], None),
    r"(o|down)_proj/kernel/b": (None, _JOIN[1]),
    r"embed/embedding": ("vocab", None),
    r"lm_head/kernel": (None, "vocab"),
}


def make_mesh(
    sizes: Mapping[str, int], devices: Sequence[Any] | None = None
) -> Mesh:
  """A mesh with the axes `AXES`.

  Args:
    sizes: devices along each axis, as `config.mesh`.
    devices: what to lay out; None means all devices of all processes.

  Returns:
    The mesh; `with jax.set_mesh(mesh)` puts the constraints into effect.

  Raises:
    ValueError: a size is no positive int, or the sizes do not multiply to the
      number of devices.
  """
  for name in AXES:
    size = sizes[name]
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
      raise ValueError(f"config.mesh.{name}={size!r} must be a positive int")
  devices = jax.devices() if devices is None else list(devices)
  shape = tuple(sizes[name] for name in AXES)
  if math.prod(shape) != len(devices):
    asked = " * ".join(f"{name}={sizes[name]}" for name in AXES)
    raise ValueError(
        f"config.mesh asks for {asked} = {math.prod(shape)} devices, but there"
        f" are {len(devices)}; the product must be the number of devices"
    )
  return Mesh(np.asarray(devices, dtype=object).reshape(shape), AXES)


def check_model(config: Any, mesh: Mesh) -> None:
  """Raises ValueError where the tensor axis cannot split the model.

  Key-value heads may be fewer: they are then computed by several devices.

  Args:
    config: a `DecoderConfig`.
    mesh: of `make_mesh`.
  """
  tensor = mesh.shape["tensor"]
  for name in ("n_heads", "d_ff"):
    size = vars(config)[name]
    if size % tensor:
      raise ValueError(
          f"config.mesh.tensor={tensor} cannot split the model's"
          f" {name}={size}; give a divisor of it, and the rest of the devices"
          " to config.mesh.fsdp"
      )


def check_batch(name: str, size: int, mesh: Mesh) -> None:
  """Raises ValueError where devices cannot have equally many responses."""
  shards = data_shards(mesh)
  if size % shards:
    raise ValueError(
        f"{name}={size} responses cannot be split over config.mesh.data *"
        f" config.mesh.fsdp = {shards} devices; give a multiple of it"
    )


def data_shards(mesh: Mesh) -> int:
  """Devices that have responses of their own."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def spec(
    names: Sequence[str | None], shape: Sequence[int], mesh: Any
) -> PartitionSpec:
  """How an array with these axes is split; the first axis chooses first.

  Args:
    names: of each axis, in `RULES`, or None for one that is whole.
    shape: of the array.
    mesh: a mesh, or the abstract mesh of the function being traced.
  """
  free = {name: size for name, size in mesh.shape.items() if size > 1}
  entries: list[Any] = []
  for name, size in zip(names, shape, strict=True):
    axes: list[str] = []
    for axis in RULES[name] if name else ():
      if axis in free and size % free[axis] == 0:
        size //= free.pop(axis)
        axes.append(axis)
    # A tuple of one axis is another sharding to JAX than the axis itself.
    one = axes[0] if axes else None
    entries.append(tuple(axes) if len(axes) > 1 else one)
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """`x`, split by the names of its axes; as it is where there is no mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(names, x.shape, mesh))


def _names(path: str, ndim: int) -> tuple[str | None, ...]:
  """Names of a parameter's axes; leading ones (layers) have none."""
  for pattern, names in PARAMETERS.items():
    if re.search(rf"(^|/){pattern}$", path):
      return (None,) * (ndim - len(names)) + names
  return (None,) * ndim


def path_of(key_path: Any) -> str:
  """`layers/q_proj/kernel`, of a key path of `jax.tree_util`."""
  return jax.tree_util.keystr(key_path, simple=True, separator="/")


def _leaf_names(
    path: str, shape: Sequence[int], owners: Mapping[str, Sequence[int]]
) -> tuple[str | None, ...]:
  """Names of the axes of a parameter, or of what is kept for one.

  What is kept for a parameter has its shape (a moment), or at its end the
  outputs of it (a sketch, RowAdam's scale), or is small and stays whole. The
  scales are small, and needed where the sketch's rank is split: on every fsdp
  device.
  """
  ends = [owner for owner in owners if f"/{path}".endswith(f"/{owner}")]
  if not ends:
    return (None,) * len(shape)
  owner = max(ends, key=len)
  names = _names(owner, len(owners[owner]))
  if tuple(shape) == tuple(owners[owner]):
    return names
  whole = (None,) * len(shape)
  if len(shape) == len(names) > 1 and shape[-1] != owners[owner][-1]:
    # GaLore's projections and moments: [d_in or d_out, rank].
    sides = dict(zip(owners[owner][-2:][::-1], names[-2:][::-1], strict=True))
    return (*whole[:-2], sides.get(shape[-2]), None)
  if not shape or shape[-1] != owners[owner][-1]:
    return whole
  split = names[-1] == "split_out"
  if len(shape) == len(names) > 1:
    return (*whole[:-2], "rank" if split else "split_rank", names[-1])
  return (*whole[:-1], "features") if split else whole


def _owners(params: Any) -> dict[str, Sequence[int]]:
  """Shapes of the parameters by path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {path_of(path): leaf.shape for path, leaf in leaves}


def shardings(tree: Any, params: Any, mesh: Mesh) -> Any:
  """Where each leaf of a state lies.

  Args:
    tree: arrays or `jax.ShapeDtypeStruct`: parameters, an optimizer's state, a
      train state. What belongs to a parameter ends in the parameter's path.
    params: the parameters, for their paths and shapes.
    mesh: of `make_mesh`.

  Returns:
    A tree of `NamedSharding`.
  """
  owners = _owners(params)

  def one(path: Any, leaf: Any) -> NamedSharding:
    names = _leaf_names(path_of(path), leaf.shape, owners)
    return NamedSharding(mesh, spec(names, leaf.shape, mesh))

  return jax.tree_util.tree_map_with_path(one, tree)


def constrain_gradients(grads: Any, params: Any) -> Any:
  """Gradients and sketches, each split like the parameter it is of."""
  owners = _owners(params)

  def one(path: Any, leaf: jax.Array) -> jax.Array:
    return constrain(leaf, *_leaf_names(path_of(path), leaf.shape, owners))

  return jax.tree_util.tree_map_with_path(one, grads)


def replicated(mesh: Mesh) -> NamedSharding:
  """Whole on every device."""
  return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, where: Any) -> Any:
  """Arrays that every process has whole, laid out over all processes.

  Args:
    tree: arrays, the same in every process.
    where: a tree of shardings like `tree`, or one for all of it.
  """
  if isinstance(where, NamedSharding):
    where = jax.tree.map(lambda _: where, tree)

  def one(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
      return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(one, tree, where)


def fetch(tree: Any) -> Any:
  """Arrays that lie anywhere, whole in every process, as NumPy arrays."""

  def one(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(one, tree)

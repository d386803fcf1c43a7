"""Rules for how arrays are split over a mesh of devices, by axis name.

The mesh has three axes:

- `data`: whole replicas of the model, each with its own responses.
- `fsdp`: devices that share one copy of the weights and have their own
  responses. Each holds a part of every kernel and gathers a layer's kernels
  when it computes the layer.
- `tensor`: devices that share responses and split heads and features.

`fsdp` splits the inputs of a kernel, so that gathered parts lie in memory one
after the other. If it split the outputs, XLA would keep a transposed second
copy of all weights. For the same reason it splits the rank of a sketch. A mesh
axis that does not divide a size is left out, or moves to the array's other
axis; in the worst case every one of those devices holds the whole array.
"""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any, Protocol

import chex
import jax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
import numpy as np
import optax

AXES = ("data", "fsdp", "tensor")

# The mesh axes that split an array axis of this name, in order of preference.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    # The responses of all fsdp devices together, which a split vocabulary
    # needs.
    "gathered_batch": ("data",),
    "sequence": ("tensor",),
    "heads": ("tensor",),
    "features": ("tensor",),
    "vocab": ("tensor", "fsdp"),
    # Inputs and outputs of kernels that split their outputs by heads or
    # features ...
    "whole_in": ("fsdp",),
    "split_out": ("tensor", "fsdp"),
    # ... and of kernels that take such a split input.
    "split_in": ("tensor", "fsdp"),
    "whole_out": ("fsdp",),
    # The rank of a sketch whose outputs are split, or whole.
    "rank": ("fsdp",),
    "split_rank": ("fsdp", "tensor"),
}

_SPLIT, _JOIN = ("whole_in", "split_out"), ("split_in", "whole_out")
# Names of a parameter's last axes, by a pattern for the end of its path. All
# other axes are whole.
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    # `kernel/kernel` is the kernel that has LoRA's adapters `a` and `b`.
    r"(q|k|v|gate|up)_proj/kernel(/kernel)?": _SPLIT,
    r"(o|down)_proj/kernel(/kernel)?": _JOIN,
    r"(q|k|v|gate|up)_proj/kernel/a": (_SPLIT[0], None),
    r"(q|k|v|gate|up)_proj/kernel/b": (None, _SPLIT[1]),
    r"(o|down)_proj/kernel/a": (_JOIN[0], None),
    r"(o|down)_proj/kernel/b": (None, _JOIN[1]),
    r"embed/embedding": ("vocab", None),
    r"lm_head/kernel": (None, "vocab"),
}


class ModelSizes(Protocol):
  """The sizes of a model that the tensor axis splits."""

  @property
  def n_heads(self) -> int:
    """Number of query heads."""

  @property
  def d_ff(self) -> int:
    """Width of the feed-forward layer."""


def make_mesh(
    sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Makes a mesh with the axes `AXES`.

  Args:
    sizes: Number of devices along each axis, such as `config.mesh`.
    devices: The devices; None means all devices of all processes.

  Returns:
    The mesh. Constraints take effect inside `jax.set_mesh(mesh)`.

  Raises:
    ValueError: If a size is not a positive int, or the product of the sizes is
      not the number of devices.
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


def check_model(model: ModelSizes, mesh: Mesh | AbstractMesh) -> None:
  """Checks that the tensor axis can split a model.

  There may be fewer key-value heads than devices along the axis: several
  devices then compute the same head.

  Args:
    model: Sizes of the model, such as a `DecoderConfig`.
    mesh: The mesh, from `make_mesh`.

  Raises:
    ValueError: If the axis does not divide `n_heads` or `d_ff`.
  """
  tensor = mesh.shape["tensor"]
  for name, size in (("n_heads", model.n_heads), ("d_ff", model.d_ff)):
    if size % tensor:
      raise ValueError(
          f"config.mesh.tensor={tensor} cannot split the model's"
          f" {name}={size}; give a divisor of it, and the rest of the devices"
          " to config.mesh.fsdp"
      )


def check_batch(name: str, size: int, mesh: Mesh | AbstractMesh) -> None:
  """Checks that all devices can have equally many responses.

  Args:
    name: Name of the setting, for the error.
    size: Number of responses.
    mesh: The mesh, from `make_mesh`.

  Raises:
    ValueError: If `size` is not a multiple of `data_shards(mesh)`.
  """
  shards = data_shards(mesh)
  if size % shards:
    raise ValueError(
        f"{name}={size} responses cannot be split over config.mesh.data *"
        f" config.mesh.fsdp = {shards} devices; give a multiple of it"
    )


def data_shards(mesh: Mesh | AbstractMesh) -> int:
  """Number of shards that the responses are split into: `data` times `fsdp`."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def spec(
    names: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
  """Returns how an array with named axes is split.

  The first axis of the array takes its mesh axes first.

  Args:
    names: The name of each axis, a key of `RULES`; None for a whole axis.
    shape: The array's shape.
    mesh: A mesh, or the abstract mesh of the function being traced.
  """
  free = {name: size for name, size in mesh.shape.items() if size > 1}
  entries: list[Any] = []
  for name, size in zip(names, shape, strict=True):
    axes: list[str] = []
    for axis in RULES[name] if name else ():
      if axis in free and size % free[axis] == 0:
        size //= free.pop(axis)
        axes.append(axis)
    # JAX takes a tuple of one axis for a different sharding than the axis.
    one = axes[0] if axes else None
    entries.append(tuple(axes) if len(axes) > 1 else one)
  return PartitionSpec(*entries)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
  """Splits `x` by the names of its axes; does nothing without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, spec(names, x.shape, mesh))


def path_of(key_path: KeyPath) -> str:
  """Formats a key path of `jax.tree_util` as `layers/q_proj/kernel`."""
  return jax.tree_util.keystr(key_path, simple=True, separator="/")


def _parameter_axes(path: str, ndim: int) -> tuple[str | None, ...]:
  """Names of a parameter's axes; leading axes, such as layers, have none."""
  for pattern, names in PARAMETERS.items():
    if re.search(rf"(^|/){pattern}$", path):
      return (None,) * (ndim - len(names)) + names
  return (None,) * ndim


def _leaf_axes(
    path: str, shape: Sequence[int], owners: Mapping[str, Sequence[int]]
) -> tuple[str | None, ...]:
  """Names of the axes of a parameter, or of optimizer state that belongs to it.

  Such state has the parameter's shape (a moment), or ends with its outputs (a
  sketch, RowAdam's scale), or is small and stays whole. RowAdam's scales are
  small too, and needed wherever the sketch's rank is split: on every fsdp
  device.
  """
  ends = [owner for owner in owners if f"/{path}".endswith(f"/{owner}")]
  if not ends:
    return (None,) * len(shape)
  owner = max(ends, key=len)
  names = _parameter_axes(owner, len(owners[owner]))
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


def _parameter_shapes(params: optax.Params) -> dict[str, Sequence[int]]:
  """Shapes of the parameters by path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {path_of(path): leaf.shape for path, leaf in leaves}


def shardings(
    tree: chex.ArrayTree, params: optax.Params, mesh: Mesh | AbstractMesh
) -> Any:
  """Returns where each leaf of a state lies.

  Args:
    tree: Arrays or `jax.ShapeDtypeStruct`s: parameters, an optimizer's state,
      or a whole training state. The path of a leaf that belongs to a parameter
      ends with the parameter's path.
    params: The parameters, for their paths and shapes.
    mesh: The mesh, from `make_mesh`.

  Returns:
    A tree like `tree` whose leaves are `NamedSharding`s.
  """
  owners = _parameter_shapes(params)

  def place(path: KeyPath, leaf: Any) -> NamedSharding:
    names = _leaf_axes(path_of(path), leaf.shape, owners)
    return NamedSharding(mesh, spec(names, leaf.shape, mesh))

  return jax.tree_util.tree_map_with_path(place, tree)


def constrain_gradients(
    grads: optax.Updates, params: optax.Params
) -> optax.Updates:
  """Splits gradients and sketches like the parameters they belong to."""
  owners = _parameter_shapes(params)

  def place(path: KeyPath, leaf: jax.Array) -> jax.Array:
    return constrain(leaf, *_leaf_axes(path_of(path), leaf.shape, owners))

  return jax.tree_util.tree_map_with_path(place, grads)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of an array that is whole on every device."""
  return NamedSharding(mesh, PartitionSpec())


def put(tree: chex.ArrayTree, where: Any) -> Any:
  """Lays out arrays over the devices of all processes.

  Args:
    tree: Whole arrays, the same in every process.
    where: A tree of `NamedSharding`s like `tree`, or one for all arrays.
  """
  if isinstance(where, NamedSharding):
    where = jax.tree.map(lambda _: where, tree)

  def place(x: Any, sharding: NamedSharding) -> jax.Array:
    if sharding.is_fully_addressable:
      return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(place, tree, where)


def fetch(tree: chex.ArrayTree) -> Any:
  """Returns whole NumPy arrays in every process, wherever the arrays lie."""

  def gather(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
      return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)

  return jax.tree.map(gather, tree)

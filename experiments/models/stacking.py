"""Weights one layer at a time, as files hold them, and stacked, as we do.

A parameter is named by its path in the decoder's tree, such as
`("layers", "q_proj", "kernel")`, with the layer's number beside it.
"""

from collections.abc import Callable, Iterator

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder

Path = tuple[str, ...]


def param_shapes(config: DecoderConfig) -> dict[Path, tuple[int, ...]]:
  """Shape of each parameter of `Decoder(config)`, stacked, by its path."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)
  flat = traverse_util.flatten_dict(tree["params"])
  return {path: leaf.shape for path, leaf in flat.items()}


def stack(
    config: DecoderConfig,
    read: Callable[[Path, int | None], tuple[str, np.ndarray]],
) -> dict:
  """Builds the decoder's parameter tree, holding one layer twice at most.

  Args:
    config: the decoder's configuration; its `param_dtype` is the tree's.
    read: gives the file's name for the parameter and its value in our layout
      (`[d_in, d_out]` for kernels), from path and layer. The layer is None
      for a parameter that does not belong to one.

  Returns:
    The nested dict of jax arrays that `Decoder(config).apply` takes.

  Raises:
    ValueError: if a value has another shape than the configuration says.
  """
  dtype = jnp.dtype(config.param_dtype)
  flat = {}
  for path, shape in param_shapes(config).items():
    if path[0] != "layers":
      value = _checked(*read(path, None), shape)
      flat[path] = jnp.asarray(value.astype(dtype, copy=False))
      continue
    stacked = np.empty(shape, dtype)
    for layer in range(config.n_layers):
      stacked[layer] = _checked(*read(path, layer), shape[1:])
    flat[path] = jnp.asarray(stacked)
  return traverse_util.unflatten_dict(flat)


def unstack(
    config: DecoderConfig, params: dict
) -> Iterator[tuple[Path, int | None, jax.Array]]:
  """Yields path, layer and *stacked* value of each parameter of each layer.

  The caller takes `value[layer]` when it needs it; the layer is None for a
  parameter that does not belong to one.

  Args:
    config: the decoder's configuration.
    params: its parameter tree.

  Raises:
    ValueError: if the tree is not that of `Decoder(config)`.
  """
  flat = traverse_util.flatten_dict(params)
  shapes = param_shapes(config)
  if flat.keys() != shapes.keys():
    wrong = sorted("/".join(p) for p in flat.keys() ^ shapes.keys())
    raise ValueError(f"params and config disagree about {', '.join(wrong)}")
  for path, value in flat.items():
    _checked("/".join(path), value, shapes[path])
    if path[0] != "layers":
      yield path, None, value
      continue
    for layer in range(config.n_layers):
      yield path, layer, value


def _checked(name, value, shape):
  """The value, once its shape is what the configuration implies."""
  if value.shape != shape:
    raise ValueError(
        f"{name} has shape {list(value.shape)} (kernels: [d_in, d_out]) where "
        f"the configuration implies {list(shape)}: weights and configuration "
        "are of different models"
    )
  return value

"""Converts between weights of single layers and weights stacked over layers.

Model files hold the former, the decoder's parameters are the latter. A
parameter is named by its path in the decoder's tree, such as
`("layers", "q_proj", "kernel")`, and by the number of its layer.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder

Path = tuple[str, ...]


def param_shapes(config: DecoderConfig) -> dict[Path, tuple[int, ...]]:
  """Returns the shape of each stacked parameter of `Decoder(config)`."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  tree = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)
  flat = traverse_util.flatten_dict(tree["params"])
  return {path: leaf.shape for path, leaf in flat.items()}


def stack(
    config: DecoderConfig,
    read: Callable[[Path, int | None], tuple[str, np.ndarray]],
) -> dict[str, Any]:
  """Builds the decoder's parameters from those of single layers.

  At most one layer's parameter is in memory twice.

  Args:
    config: The decoder's configuration. Parameters get its `param_dtype`.
    read: Takes path and layer of a parameter, and returns the parameter's name
      in the file and its value in the decoder's layout (`[d_in, d_out]` for
      kernels). The layer is None for a parameter outside the layers.

  Returns:
    The nested dict of JAX arrays that `Decoder(config).apply` takes.

  Raises:
    ValueError: If a value does not have the shape that the configuration
      implies.
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
    config: DecoderConfig, params: Mapping[str, Any]
) -> Iterator[tuple[Path, int | None, jax.Array]]:
  """Yields path, layer and *stacked* value of each parameter of each layer.

  The caller takes `value[layer]` when it needs it. The layer is None for a
  parameter outside the layers.

  Args:
    config: The decoder's configuration.
    params: Parameters of `Decoder(config)`.

  Raises:
    ValueError: If the parameters are not those of `Decoder(config)`.
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


def _checked(name: str, value: Any, shape: tuple[int, ...]) -> Any:
  """Returns the value if it has the shape that the configuration implies."""
  if value.shape != shape:
    raise ValueError(
        f"{name} has shape {list(value.shape)} (kernels: [d_in, d_out]) where "
        f"the configuration implies {list(shape)}: weights and configuration "
        "are of different models"
    )
  return value

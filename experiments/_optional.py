"""Optional packages, imported where they are needed."""

import importlib
import types


def require(module: str, extra: str) -> types.ModuleType:
  """Imports `module`, or says which extra of this project installs it.

  Args:
    module: dotted name of the module, for example `'safetensors.numpy'`.
    extra: the extra that lists its package, for example `'train'`.

  Returns:
    The imported module.

  Raises:
    ImportError: if the package is not installed; names the pip command.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    root = module.partition(".")[0]
    if error.name is None or error.name.partition(".")[0] != root:
      raise  # The package is there; something it needs is not.
    raise ImportError(
        f"{root!r} is needed here and not installed: "
        f"pip install 'logra-jax[{extra}]'"
    ) from error

"""Parameter trees as flat dicts."""

import chex
import jax
import numpy as np


def leaves(tree: chex.ArrayTree) -> dict[str, np.ndarray]:
  """The leaves of a tree as NumPy arrays by path."""
  return {
      jax.tree_util.keystr(path): np.asarray(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }

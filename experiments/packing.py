"""Responses to one prompt in one row, so that the prompt is computed once.

A row of k responses is `prompt | response 1 | ... | response k`. Tokens of a
response see the prompt and their own response, at the positions they would
have alone, so features are those of k separate rows at a fraction of the cost:
P + k C tokens in place of k (P + C).

Axis letters: B responses, G = B / k rows, P prompt tokens, C completion tokens,
S = P + k C, D features.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from experiments.rollout import Rollout


@struct.dataclass
class Packed:
  """Rows of k responses each.

  Attributes:
    tokens: `[G, S]` int32.
    valid: `[G, S]` bool, False at padding.
    n_prompt: P; static.
    n_new: C; static.
  """

  tokens: jax.Array
  valid: jax.Array
  n_prompt: int = struct.field(pytree_node=False)
  n_new: int = struct.field(pytree_node=False)


def pack(rollout: Rollout, n_new: int, k: int) -> Packed:
  """Puts every k adjacent responses, which must share a prompt, in a row.

  Args:
    rollout: of B responses, `[B, P + C]`.
    n_new: C.
    k: responses a row; divides the number of responses to each prompt.

  Returns:
    B / k rows.
  """
  n_prompt = rollout.tokens.shape[1] - n_new

  def rows(x):  # [B, P + C] -> [G, P + k C]
    prompts = x[::k, :n_prompt]
    completions = x[:, n_prompt:].reshape(-1, k * n_new)
    return jnp.concatenate([prompts, completions], axis=1)

  return Packed(rows(rollout.tokens), rows(rollout.valid), n_prompt, n_new)


def features(model: Any, params: Any, packed: Packed) -> jax.Array:
  """The features that predict completion tokens.

  Args:
    model: a `Decoder`.
    params: its parameters.
    packed: the responses.

  Returns:
    `[B, C, D]`: entry `[b, c]` goes through the head to the logits of token c
    of completion b.
  """
  positions, mask = _layout(packed)
  hidden = model.apply(
      {"params": params},
      packed.tokens,
      positions,
      mask,
      method="hidden_masked",
  )
  n_rows, length, _ = hidden.shape
  n_prompt, n_new = packed.n_prompt, packed.n_new
  k = (length - n_prompt) // n_new
  # A token is predicted from the one before; the first one, from the prompt.
  first = jnp.broadcast_to(
      hidden[:, None, n_prompt - 1 : n_prompt], (n_rows, k, 1, hidden.shape[2])
  )
  rest = hidden[:, n_prompt:].reshape(n_rows, k, n_new, -1)[:, :, :-1]
  joined = jnp.concatenate([first, rest], axis=2)
  return joined.reshape(n_rows * k, n_new, -1)


def _layout(packed: Packed) -> tuple[jax.Array, jax.Array]:
  """Positions `[G, S]` int32, and who sees whom, `[G, S, S]` bool."""
  n_prompt, n_new = packed.n_prompt, packed.n_new
  length = packed.tokens.shape[1]
  index = np.arange(length)
  # 0 for the prompt, 1 ... k for the responses.
  segment = np.maximum((index - n_prompt) // n_new + 1, 0)
  causal = index[None, :] <= index[:, None]
  own = (segment[None, :] == segment[:, None]) | (segment[None, :] == 0)
  mask = jnp.asarray(causal & own)[None] & packed.valid[:, None, :]

  prompt = jnp.cumsum(packed.valid[:, :n_prompt], axis=1)
  within = jnp.asarray((index[n_prompt:] - n_prompt) % n_new)
  positions = jnp.concatenate(
      [jnp.maximum(prompt - 1, 0), prompt[:, -1:] + within], axis=1
  )
  return positions, mask

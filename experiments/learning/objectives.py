"""What a policy loss gains by moving a token's log-prob, with clipped ratios.

Axis letters: G rows, K token slots of a row. Notation: A advantage, ρ = π /
π_old of a token, |o| tokens of a response.
"""

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

# Ratios beyond e^±20 mean that the two policies disagree altogether; the clamp
# keeps the loss and its metrics finite there.
MAX_LOG_RATIO = 20.0

# The objective, and which tokens were clipped, `[G, K]` each.
Objective = tuple[jax.Array, jax.Array]


@struct.dataclass
class Tokens:
  """Generated tokens, packed; all arrays are `[G, K]`.

  Tokens of one response lie in one row, side by side. What stands outside the
  mask may be anything, a NaN too.

  Attributes:
    mask: bool, True at generated tokens.
    response: int32; equal numbers within a row mean the same response.
    old_log_probs: float32, of the policy that ratios are measured from.
    advantages: float32.
    weights: float32, share of a token in the loss: of `Loss.weights`, times an
      importance correction if there is one.
    reference_log_probs: float32, of the reference policy, or None.
  """

  mask: jax.Array
  response: jax.Array
  old_log_probs: jax.Array
  advantages: jax.Array
  weights: jax.Array
  reference_log_probs: jax.Array | None = None


@jax.custom_vjp
def response_sums(x: jax.Array, response: jax.Array) -> jax.Array:
  """Sums over the tokens of the same response, at each of its tokens.

  Args:
    x: `[G, K]` float.
    response: `[G, K]` int32; tokens of a response lie side by side.

  Returns:
    `[G, K]`, differentiable by x in reverse mode.
  """
  # In log K steps of doubled reach. A scatter would not be deterministic on
  # GPUs, and a cumulative sum carry the rounding of a row's other responses.
  slot = jnp.arange(x.shape[1])

  def step(i, sums):
    before, after = sums
    reach = jnp.left_shift(1, i)

    def add(sums, other, inside):
      other = jnp.clip(other, 0, x.shape[1] - 1)
      same = inside & (response[:, other] == response)
      return sums + jnp.where(same, sums[:, other], 0.0)

    before = add(before, slot - reach, slot >= reach)
    return before, add(after, slot + reach, slot + reach < x.shape[1])

  steps = max(x.shape[1] - 1, 0).bit_length()
  before, after = lax.fori_loop(0, steps, step, (x, x))
  return before + after - x


# The matrix of the sum is symmetric.
response_sums.defvjp(
    lambda x, response: (response_sums(x, response), response),
    lambda response, sums_bar: (response_sums(sums_bar, response), None),
)


def _clip(log_ratio, advantages, clip_low, clip_high):
  """`min(ρ A, clip(ρ) A)`, and where the second is the smaller one."""
  ratio = jnp.exp(log_ratio)
  free = ratio * advantages
  bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
  return jnp.minimum(free, bounded), bounded < free


def clip_tokens(log_ratio, tokens, clip_low, clip_high):
  """PPO's objective (arXiv:1707.06347, eq. 7) of each token."""
  return _clip(log_ratio, tokens.advantages, clip_low, clip_high)


def clip_responses(log_ratio, tokens, clip_low, clip_high):
  """The same of the geometric mean of a response's ratios."""
  total, length = _totals(log_ratio, tokens)
  return _clip(total / length, tokens.advantages, clip_low, clip_high)


def share_responses(log_ratio, tokens, clip_low, clip_high):
  """The same of the product of a response's ratios; a token has 1/|o| of it."""
  total, length = _totals(log_ratio, tokens)
  total = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  objective, clipped = _clip(total, tokens.advantages, clip_low, clip_high)
  return objective / length, clipped


def _totals(log_ratio, tokens):
  """Log-ratio and number of tokens of each token's response."""
  ones = tokens.mask.astype(jnp.float32)
  length = jnp.maximum(response_sums(ones, tokens.response), 1.0)
  return response_sums(log_ratio, tokens.response), length


def weigh_log_probs(log_ratio, tokens, clip_low, clip_high):
  """`stop_gradient(clip(ρ)) A log π`."""
  ratio = jnp.exp(log_ratio)
  weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  log_probs = log_ratio + tokens.old_log_probs
  objective = lax.stop_gradient(weight) * tokens.advantages * log_probs
  return objective, weight != ratio

"""Objectives of policy losses: what they gain by moving a token's log-prob.

Each takes `(log_ratio [G, K], tokens, clip_low, clip_high)` and returns an
`Objective`.

Axis letters: G rows, K token slots of a row. Notation: A advantage, ρ = π /
π_old of a token, |o| tokens of a response.
"""

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp

# Beyond ratios of e^±20 the two policies disagree altogether. Clamping keeps
# the loss and its metrics finite there.
MAX_LOG_RATIO = 20.0

# The objective, and which tokens were clipped, `[G, K]` each.
Objective = tuple[jax.Array, jax.Array]


@struct.dataclass
class Tokens:
  """Generated tokens in packed rows; all arrays are `[G, K]`.

  The tokens of a response are adjacent in one row. Values outside the mask are
  ignored, even NaN.

  Attributes:
    mask: bool, True at generated tokens.
    response: int32; equal numbers within a row mean the same response.
    old_log_probs: float32, log-probs under the policy that ratios are measured
      from.
    advantages: float32, the advantage of each token's response.
    weights: float32, the weight of each token in the loss: that of
      `Loss.weights`, times an importance correction if there is one.
    reference_log_probs: float32, log-probs under the reference policy, or None.
  """

  mask: jax.Array
  response: jax.Array
  old_log_probs: jax.Array
  advantages: jax.Array
  weights: jax.Array
  reference_log_probs: jax.Array | None = None


@jax.custom_vjp
def response_sums(x: jax.Array, response: jax.Array) -> jax.Array:
  """Sums over the tokens of each response, repeated at each of its tokens.

  Args:
    x: Values to sum, `[G, K]` float.
    response: Number of each token's response, `[G, K]` int32. The tokens of a
      response are adjacent.

  Returns:
    `[G, K]`, differentiable with respect to `x` in reverse mode.
  """
  # log K steps, each with twice the reach of the last. A scatter would not be
  # deterministic on GPUs, and a cumulative sum would add the rounding errors of
  # the other responses in the row.
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


# The sum is a product with a symmetric matrix, so it is its own transpose.
response_sums.defvjp(
    lambda x, response: (response_sums(x, response), response),
    lambda response, sums_bar: (response_sums(sums_bar, response), None),
)


def _clip(
    log_ratio: jax.Array,
    advantages: jax.Array,
    clip_low: float,
    clip_high: float,
) -> Objective:
  """`min(ρ A, clip(ρ) A)`, and where the second term is the smaller one."""
  ratio = jnp.exp(log_ratio)
  free = ratio * advantages
  bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
  return jnp.minimum(free, bounded), bounded < free


def clip_tokens(
    log_ratio: jax.Array, tokens: Tokens, clip_low: float, clip_high: float
) -> Objective:
  """PPO's objective (arXiv:1707.06347, eq. 7) of each token."""
  return _clip(log_ratio, tokens.advantages, clip_low, clip_high)


def clip_responses(
    log_ratio: jax.Array, tokens: Tokens, clip_low: float, clip_high: float
) -> Objective:
  """PPO's objective of the geometric mean of a response's ratios."""
  total, length = _totals(log_ratio, tokens)
  return _clip(total / length, tokens.advantages, clip_low, clip_high)


def share_responses(
    log_ratio: jax.Array, tokens: Tokens, clip_low: float, clip_high: float
) -> Objective:
  """PPO's objective of the product of a response's ratios.

  Each token of the response has 1/|o| of it.
  """
  total, length = _totals(log_ratio, tokens)
  total = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  objective, clipped = _clip(total, tokens.advantages, clip_low, clip_high)
  return objective / length, clipped


def _totals(
    log_ratio: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
  """Log-ratio and number of tokens of each token's response."""
  ones = tokens.mask.astype(jnp.float32)
  length = jnp.maximum(response_sums(ones, tokens.response), 1.0)
  return response_sums(log_ratio, tokens.response), length


def weigh_log_probs(
    log_ratio: jax.Array, tokens: Tokens, clip_low: float, clip_high: float
) -> Objective:
  """CISPO's objective of each token, `stop_gradient(clip(ρ)) A log π`."""
  ratio = jnp.exp(log_ratio)
  weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  log_probs = log_ratio + tokens.old_log_probs
  objective = lax.stop_gradient(weight) * tokens.advantages * log_probs
  return objective, weight != ratio

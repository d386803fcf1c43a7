"""What sampling returns: prompts and responses, aligned to tokens.

Axis letters: B responses, P padded prompt tokens, C new tokens, T = P + C.
"""

from flax import struct
import jax


@struct.dataclass
class Rollout:
  """Prompts and responses, aligned to tokens.

  Attributes:
    tokens: `[B, T]` int32; prompts end at P, responses begin there.
    valid: `[B, T]` bool, False at padding before the prompt and after the
      response.
    completion_mask: `[B, T]` bool, True at generated tokens, the end-of-turn
      token included.
    log_probs: `[B, T]` float32, of generated tokens under the distribution
      that they were sampled from; 0 elsewhere, and 0 (certain) where decoding
      was greedy.
    finished: `[B]` bool, whether the response ended by an end-of-turn token
      and not by the limit.
  """

  tokens: jax.Array
  valid: jax.Array
  completion_mask: jax.Array
  log_probs: jax.Array
  finished: jax.Array

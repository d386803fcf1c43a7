"""The result of sampling: prompts and responses, as token arrays.

Axis letters: B responses, P padded prompt tokens, C new tokens, T = P + C.
"""

from flax import struct
import jax


@struct.dataclass
class Rollout:
  """Prompts and responses; all fields are aligned to `tokens`.

  Attributes:
    tokens: `[B, T]` int32. Prompts end and responses begin at index P.
    valid: `[B, T]` bool, False at padding before the prompt and after the
      response.
    completion_mask: `[B, T]` bool, True at generated tokens, including the
      end-of-turn token.
    log_probs: `[B, T]` float32, log-probs of generated tokens under the
      distribution that they were sampled from; 0 elsewhere, and 0 (certain)
      for greedy decoding.
    finished: `[B]` bool, whether the response ended by an end-of-turn token or
      a stop string, and not by the length limit.
  """

  tokens: jax.Array
  valid: jax.Array
  completion_mask: jax.Array
  log_probs: jax.Array
  finished: jax.Array

"""Policy losses by name: advantages, token weights and objective of each.

Every loss is three choices. How a response's reward becomes an advantage, how
much a token weighs in the sum, and what is gained by moving a token's log-prob:

  loss = -Σ weights · objective + reference_kl · Σ weights · KL estimate

Sums run over all generated tokens of the batch, so the losses, and the
gradients, of micro-batches add up to those of the batch.

Axis letters: B responses, G rows, K token slots of a row. Notation: r reward,
A advantage, |o| tokens of a response, ρ = π / π_old of a token.
"""

from collections.abc import Callable, Mapping
import difflib
from typing import NamedTuple

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments.learning import advantages

# Ratios beyond e^±20 mean that the two policies disagree altogether; the clamp
# keeps the loss and its metrics finite there.
MAX_LOG_RATIO = 20.0

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


class Loss(NamedTuple):
  """What makes one policy loss.

  Attributes:
    advantages: `(rewards [B], group_size, counted=None) -> [B]` float32; the
      responses of a prompt are adjacent. `counted [B]` bool says which rewards
      are in the baseline.
    weights: `(lengths [B] int, max_new_tokens, kept=None) -> [B]` float32, the
      weight of each token of a response. `kept [B]` bool says which responses
      are in the loss.
    objective: `(log_ratio [G, K], tokens, clip_low, clip_high)` to what is
      maximised, `[G, K]` float32, and which tokens were clipped, `[G, K]` bool.
  """

  advantages: Callable[..., np.ndarray]
  weights: Callable[..., np.ndarray]
  objective: Callable[[jax.Array, Tokens, float, float], Objective]


# Objectives.


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


def _clip_tokens(log_ratio, tokens, clip_low, clip_high):
  """PPO's objective (arXiv:1707.06347, eq. 7) of each token."""
  return _clip(log_ratio, tokens.advantages, clip_low, clip_high)


def _clip_responses(log_ratio, tokens, clip_low, clip_high):
  """The same of the geometric mean of a response's ratios."""
  total, length = _totals(log_ratio, tokens)
  return _clip(total / length, tokens.advantages, clip_low, clip_high)


def _share_responses(log_ratio, tokens, clip_low, clip_high):
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


def _weigh_log_probs(log_ratio, tokens, clip_low, clip_high):
  """`stop_gradient(clip(ρ)) A log π`."""
  ratio = jnp.exp(log_ratio)
  weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  log_probs = log_ratio + tokens.old_log_probs
  objective = lax.stop_gradient(weight) * tokens.advantages * log_probs
  return objective, weight != ratio


# The losses.


def grpo() -> Loss:
  """Group-relative policy optimisation.

  `A = (r - mean) / (std + 1e-4)` within a group; objective
  `min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)`; token weight `1/(B |o|)`.
  DeepSeekMath, arXiv:2402.03300, eq. 3, which has one ε for both clips. Its KL
  term is `reference_kl` with the estimator k3 (eq. 4). Implementations differ
  in the standard deviation: TRL's is of the sample, ours of the population.
  """
  return Loss(
      advantages.group_advantages, advantages.mean_of_responses, _clip_tokens
  )


def dr_grpo() -> Loss:
  """GRPO without its biases by length and by difficulty.

  `A = r - mean` within a group; GRPO's objective; token weight
  `1/(B max_new_tokens)`. "Understanding R1-Zero-Like Training",
  arXiv:2503.20783, section 3.2. The paper's formula sums over tokens; its code
  and TRL divide by the constant budget, as here.
  """
  return Loss(
      advantages.group_differences, advantages.mean_of_budgets, _clip_tokens
  )


def dapo() -> Loss:
  """GRPO with all tokens of the batch equal, and clips of their own.

  GRPO's advantages and objective, `clip_high` above `clip_low` (0.28 and 0.2 in
  the paper); token weight `1 / Σ|o|`. DAPO, arXiv:2503.14476, eq. 8, 10 and 12.
  There Σ|o| is of a group, here of the batch, as in verl and TRL: the same if
  groups have equally many tokens. Dynamic sampling and the overlong penalty of
  the paper are settings of their own.
  """
  return Loss(
      advantages.group_advantages, advantages.mean_of_tokens, _clip_tokens
  )


def gspo() -> Loss:
  """The response, not the token, is what is clipped.

  `s = exp(mean over a response's tokens of log ρ)`; objective
  `min(s A, clip(s) A)` of a response, which each of its tokens carries with
  weight `1/(B |o|)`; GRPO's advantages. "Group Sequence Policy Optimization",
  arXiv:2507.18071, eq. 5 and 7. The paper's token variant has the same gradient
  where all tokens of a response have one advantage, as here. Clips are far
  smaller than GRPO's: in the paper `clip_low=3e-4` and `clip_high=4e-4`.
  """
  return Loss(
      advantages.group_advantages, advantages.mean_of_responses, _clip_responses
  )


def cispo() -> Loss:
  """REINFORCE with a clipped importance weight: no token loses its gradient.

  GRPO's advantages; objective
  `stop_gradient(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π`; token weight
  `1 / Σ|o|`. MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper has no lower
  bound (`clip_low=1`); its Σ|o| is of a group. TRL's `epsilon_high` is the
  bound itself, ours is the distance from 1.
  """
  return Loss(
      advantages.group_advantages, advantages.mean_of_tokens, _weigh_log_probs
  )


def rloo() -> Loss:
  """REINFORCE with the mean of the other responses as the baseline.

  `A = r - mean of the others` in the group; the whole response is the action,
  with ratio `R = Π ρ`; objective `min(R A, clip(R) A)` of a response, an equal
  part of it at each token; token weight `1/B`. "Back to Basics",
  arXiv:2402.14740, where π_old is π: then the gradient is the paper's,
  `A Σ ∇log π`. In later updates on the same responses R corrects for the older
  policy, and the clip, as in TRL, bounds the variance of a product of hundreds
  of ratios: a response beyond it has no gradient.
  """
  return Loss(
      advantages.leave_one_out, advantages.mean_of_sums, _share_responses
  )


def reinforce_pp() -> Loss:
  """PPO's clip with advantages normalised over the whole batch.

  `A = (r - mean) / (std + 1e-4)`, with the mean of the group and the standard
  deviation of these differences in the batch; PPO's objective; token weight
  `1 / Σ|o|`. REINFORCE++, arXiv:2501.03262: the variant with baseline, which
  its authors recommend for reasoning, or the one without for a group size of
  1, where the mean is the batch's. Statistics are of responses; OpenRLHF and
  verl take them over tokens, so that long responses count more. A reference KL
  is a term of the loss here, not of the reward.
  """
  return Loss(
      advantages.batch_advantages, advantages.mean_of_tokens, _clip_tokens
  )


LOSSES: dict[str, Loss] = {
    make.__name__: make()
    for make in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp)
}


# Estimates of KL(π ‖ reference) from one token, by d = log π - log π_ref.


def _k1(d):
  """d, with the gradient that k1 has as a part of the reward."""
  fixed = lax.stop_gradient(d)
  return fixed + fixed * (d - fixed)


def _k2(d):
  """d² / 2."""
  return 0.5 * jnp.square(d)


def _k3(d):
  """exp(-d) - 1 + d, never negative."""
  return jnp.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
}


def reference_kl_estimate(d: jax.Array, estimator: str) -> jax.Array:
  """An estimate of KL(π ‖ π_ref) from tokens of π.

  Values are those of J. Schulman, "Approximating KL Divergence" (2020); what a
  penalty does is decided by gradients. With tokens of π, states taken as given:

  | name | value | gradient, times ∇log π | descends |
  |---|---|---|---|
  | k1 | d, unbiased, may be negative | d | KL(π ‖ π_ref), unbiased |
  | k2 | d²/2, biased, ≥ 0 | d | KL(π ‖ π_ref), unbiased |
  | k3 | e^-d - 1 + d, unbiased, ≥ 0 | 1 - e^-d | KL(π_ref ‖ π) |

  The derivative of d itself is ∇log π, of mean 0: as a plain term of the loss
  k1 would be noise and no penalty. It has the gradient here that it has as a
  part of the reward. k3's gradient is that of k2 to first order in d, and
  GRPO's. Tokens of an older policy make all three biased by its ratio.

  Args:
    d: float32, log π - log π_ref at the tokens; clamped to ±20.
    estimator: k1, k2 or k3.

  Returns:
    Nats per token, of d's shape.

  Raises:
    ValueError: for another estimator.
  """
  _check_estimator(estimator)
  return ESTIMATORS[estimator](jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))


# Putting them together.


def check(
    name: str,
    *,
    group_size: int,
    clip_low: float,
    clip_high: float,
    reference_kl: float = 0.0,
    reference_estimator: str = "k3",
) -> None:
  """Raises ValueError for settings that no batch could be trained with."""
  # Two groups, for some losses compare with the batch.
  loss = _find(name)
  loss.advantages(np.zeros(2 * max(group_size, 1)), group_size)
  _check_scalars(clip_low, clip_high, reference_kl)
  _check_estimator(reference_estimator)


def policy_loss(
    name: str,
    log_probs: jax.Array,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    reference_kl: float = 0.0,
    reference_estimator: str = "k3",
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch, or of a micro-batch of it.

  Args:
    name: of `LOSSES`.
    log_probs: `[G, K]` float, of the policy that is trained.
    tokens: the rest of what is known of these tokens.
    clip_low: how far a ratio may fall below 1; in `[0, 1]`.
    clip_high: how far it may rise above 1; at least 0.
    reference_kl: coefficient of the KL to the reference policy; at least 0.
    reference_estimator: see `reference_kl_estimate`.

  Returns:
    The loss, a float32 scalar, and metrics of the generated tokens as float32
    scalars: `tokens` (their number), `ratio_mean`, `ratio_max`,
    `clip_fraction` (tokens whose objective was clipped), `kl`, the estimate
    ρ - 1 - log ρ of KL(π_old ‖ π) in nats per token, and with reference
    log-probs `reference_kl`, nats per token. All are 0 without a token.
    `merge_metrics` joins those of micro-batches.

  Raises:
    ValueError: for a name that is none, shapes or dtypes that disagree, a
      number out of range, or a reference KL without reference log-probs.
  """
  loss = _find(name)
  _check_scalars(clip_low, clip_high, reference_kl)
  _check_estimator(reference_estimator)
  _check_arrays(log_probs, tokens)
  if reference_kl and tokens.reference_log_probs is None:
    raise ValueError(
        f"reference_kl={reference_kl} needs tokens.reference_log_probs, got"
        " None: compute them under the reference policy, or set it to 0"
    )
  # Masked before exp: the gradient of a `where` around it would keep a NaN.
  log_probs = jnp.where(tokens.mask, log_probs, 0.0).astype(jnp.float32)
  tokens = _masked(tokens)
  log_ratio = jnp.clip(
      log_probs - tokens.old_log_probs, -MAX_LOG_RATIO, MAX_LOG_RATIO
  )
  objective, clipped = loss.objective(log_ratio, tokens, clip_low, clip_high)
  value = -jnp.sum(tokens.weights * objective)
  metrics = _metrics(log_ratio, clipped, tokens.mask)
  if tokens.reference_log_probs is not None:
    d = log_probs - tokens.reference_log_probs
    estimate = reference_kl_estimate(d, reference_estimator)
    value += reference_kl * jnp.sum(tokens.weights * estimate)
    metrics["reference_kl"] = _token_mean(estimate, tokens.mask)
  return value, lax.stop_gradient(metrics)


def merge_metrics(stacked: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Joins `policy_loss` metrics of micro-batches into those of the batch.

  Args:
    stacked: the metrics with a leading micro-batch axis, as `lax.scan` or
      `jax.tree.map(jnp.stack, ...)` leave them.

  Returns:
    The same names without that axis: the sum of `tokens`, the maximum of
    `ratio_max`, and the mean over tokens of everything else.
  """
  tokens = stacked["tokens"]
  total = jnp.sum(tokens)
  merged = {
      name: jnp.sum(value * tokens) / jnp.maximum(total, 1.0)
      for name, value in stacked.items()
  }
  return merged | {
      "tokens": total,
      "ratio_max": jnp.max(stacked["ratio_max"]),
  }


def _metrics(log_ratio, clipped, mask):
  """Metrics of the ratios."""
  ratio = jnp.exp(log_ratio)
  return {
      "tokens": jnp.sum(mask, dtype=jnp.float32),
      "ratio_mean": _token_mean(ratio, mask),
      "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
      "clip_fraction": _token_mean(clipped.astype(jnp.float32), mask),
      "kl": _token_mean(jnp.expm1(log_ratio) - log_ratio, mask),
  }


def _token_mean(x, mask):
  """Mean over generated tokens, 0 without any."""
  total = jnp.sum(jnp.where(mask, x, 0.0))
  return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def _masked(tokens):
  """The tokens with 0 (-1 for the response) outside the mask."""

  def one(x):
    return jnp.where(tokens.mask, x, 0.0).astype(jnp.float32)

  reference = tokens.reference_log_probs
  return Tokens(
      mask=tokens.mask,
      response=jnp.where(tokens.mask, tokens.response, -1),
      old_log_probs=one(tokens.old_log_probs),
      advantages=one(tokens.advantages),
      weights=one(tokens.weights),
      reference_log_probs=None if reference is None else one(reference),
  )


def _find(name):
  """The loss of that name."""
  if name not in LOSSES:
    near = difflib.get_close_matches(str(name), LOSSES, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"loss must be one of {', '.join(LOSSES)}, got {name!r}{hint}"
    )
  return LOSSES[name]


def _check_scalars(clip_low, clip_high, reference_kl):
  """Refuses numbers out of range."""
  if not 0 <= clip_low <= 1 or not clip_high >= 0:
    raise ValueError(
        "clip_low must be in [0, 1] and clip_high at least 0, got "
        f"{clip_low} and {clip_high}"
    )
  if not 0 <= reference_kl < float("inf"):
    raise ValueError(
        f"reference_kl must be finite and at least 0, got {reference_kl}"
    )


def _check_estimator(name):
  """Refuses an estimator that there is not."""
  if name not in ESTIMATORS:
    raise ValueError(
        f"reference_estimator must be one of {', '.join(ESTIMATORS)}, got"
        f" {name!r}"
    )


def _check_arrays(log_probs, tokens):
  """Refuses arrays that would broadcast into a wrong loss."""
  shape = tokens.mask.shape
  if len(shape) != 2 or tokens.mask.dtype != jnp.bool_:
    raise ValueError(
        f"tokens.mask must be bool [G, K], got {tokens.mask.dtype} {shape}"
    )
  arrays = {"log_probs": log_probs} | {
      f"tokens.{name}": x for name, x in vars(tokens).items() if x is not None
  }
  for name, x in arrays.items():
    if x.shape != shape:
      raise ValueError(
          f"{name} must have the shape of tokens.mask, {shape}, got {x.shape}"
      )
  if not jnp.issubdtype(tokens.response.dtype, jnp.integer):
    raise ValueError(
        f"tokens.response must be integers, got {tokens.response.dtype}"
    )

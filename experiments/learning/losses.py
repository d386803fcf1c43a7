"""Policy losses by name: the advantages, token weights and objective of each.

Every loss consists of three choices: how the reward of a response becomes an
advantage, the weight of a token in the sum, and the objective, that is, what
is gained by moving a token's log-prob:

  loss = -Σ weights · objective + reference_kl · Σ weights · KL estimate

Sums run over all generated tokens of the batch, so the losses and gradients of
micro-batches add up to those of the batch.

Axis letters: B responses, G rows, K token slots of a row. Notation: r reward,
A advantage, |o| tokens of a response, ρ = π / π_old of a token.
"""

from collections.abc import Callable, Mapping
import dataclasses
import difflib
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments.learning import advantages, objectives
from experiments.learning import reference_kl as reference_kl_lib
from experiments.learning.objectives import Objective, Tokens


class Loss(NamedTuple):
  """The three parts of a policy loss.

  Attributes:
    advantages: `(rewards [B], group_size, counted=None) -> [B]` float32. The
      responses to a prompt are adjacent; `counted [B]` bool says which rewards
      are in the baseline.
    weights: `(lengths [B] int, max_new_tokens, kept=None) -> [B]` float32, the
      weight of each token of a response. `kept [B]` bool says which responses
      are in the loss.
    objective: `(log_ratio [G, K], tokens, clip_low, clip_high)` to the value
      that is maximised, `[G, K]` float32, and which tokens were clipped,
      `[G, K]` bool.
  """

  advantages: Callable[..., np.ndarray]
  weights: Callable[..., np.ndarray]
  objective: Callable[[jax.Array, Tokens, float, float], Objective]


def grpo() -> Loss:
  """Group-relative policy optimisation.

  `A = (r - mean) / (std + 1e-4)` within a group; objective
  `min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)`; token weight `1/(B |o|)`.
  See DeepSeekMath, arXiv:2402.03300, eq. 3, which has one ε for both clips. Its
  KL term is `reference_kl` with the estimator k3 (eq. 4). Implementations
  differ in the standard deviation: TRL uses that of the sample, we use that of
  the population.
  """
  return Loss(
      advantages.group_advantages,
      advantages.mean_of_responses,
      objectives.clip_tokens,
  )


def dr_grpo() -> Loss:
  """GRPO without its biases from length and difficulty.

  `A = r - mean` within a group; GRPO's objective; token weight
  `1/(B max_new_tokens)`. See "Understanding R1-Zero-Like Training",
  arXiv:2503.20783, section 3.2. The paper's formula sums over tokens; its code
  and TRL divide by the constant budget, as we do.
  """
  return Loss(
      advantages.group_differences,
      advantages.mean_of_budgets,
      objectives.clip_tokens,
  )


def dapo() -> Loss:
  """GRPO with equal weights for all tokens of the batch and separate clips.

  GRPO's advantages and objective, with `clip_high` above `clip_low` (0.28 and
  0.2 in the paper); token weight `1 / Σ|o|`. See DAPO, arXiv:2503.14476, eq. 8,
  10 and 12. In the paper Σ|o| is over a group; here it is over the batch, as in
  verl and TRL, which is the same if all groups have the same number of tokens.
  The paper's dynamic sampling and overlong penalty are separate settings.
  """
  return Loss(
      advantages.group_advantages,
      advantages.mean_of_tokens,
      objectives.clip_tokens,
  )


def gspo() -> Loss:
  """GRPO that clips whole responses instead of single tokens.

  `s = exp(mean over a response's tokens of log ρ)`; objective
  `min(s A, clip(s) A)` of a response, at each of its tokens; token weight
  `1/(B |o|)`; GRPO's advantages. See "Group Sequence Policy Optimization",
  arXiv:2507.18071, eq. 5 and 7. The paper's token variant has the same gradient
  if all tokens of a response have the same advantage, as here. Use far smaller
  clips than for GRPO: the paper has `clip_low=3e-4` and `clip_high=4e-4`.
  """
  return Loss(
      advantages.group_advantages,
      advantages.mean_of_responses,
      objectives.clip_responses,
  )


def cispo() -> Loss:
  """REINFORCE with a clipped importance weight, so every token has a gradient.

  GRPO's advantages; objective
  `stop_gradient(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π`; token weight
  `1 / Σ|o|`. See MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper has no
  lower bound (`clip_low=1`), and its Σ|o| is over a group. TRL's `epsilon_high`
  is the bound itself; our `clip_high` is its distance from 1.
  """
  return Loss(
      advantages.group_advantages,
      advantages.mean_of_tokens,
      objectives.weigh_log_probs,
  )


def rloo() -> Loss:
  """REINFORCE with the mean of the other responses as the baseline.

  `A = r - mean of the others` in the group. The whole response is the action,
  with ratio `R = Π ρ`: objective `min(R A, clip(R) A)` of a response, split
  equally over its tokens; token weight `1/B`. See "Back to Basics",
  arXiv:2402.14740, where π_old is π: in that case the gradient is the paper's,
  `A Σ ∇log π`. In later updates on the same responses, R corrects for the older
  policy. The clip, as in TRL, bounds the variance of a product of hundreds of
  ratios: a response that is clipped has no gradient.
  """
  return Loss(
      advantages.leave_one_out,
      advantages.mean_of_sums,
      objectives.share_responses,
  )


def reinforce_pp() -> Loss:
  """PPO's clip with advantages normalised over the whole batch.

  `A = (r - mean) / (std + 1e-4)`, with the mean of the group and the standard
  deviation of these differences in the batch; PPO's objective; token weight
  `1 / Σ|o|`. See REINFORCE++, arXiv:2501.03262. This is the variant with
  baseline, which its authors recommend for reasoning; with a group size of 1 it
  is the variant without, and the mean is that of the batch. Statistics are over
  responses; OpenRLHF and verl compute them over tokens, so that long responses
  count more. The reference KL is a term of the loss here, not of the reward.
  """
  return Loss(
      advantages.batch_advantages,
      advantages.mean_of_tokens,
      objectives.clip_tokens,
  )


LOSSES: dict[str, Loss] = {
    make.__name__: make()
    for make in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp)
}


@dataclasses.dataclass(frozen=True)
class LossSettings:
  """The name and coefficients of a loss: part of `config.loss`.

  Attributes:
    name: A name in `LOSSES`.
    clip_low: How far a ratio may fall below 1; in `[0, 1]`.
    clip_high: How far a ratio may rise above 1; at least 0.
    reference_kl: Coefficient of the KL to the reference policy; at least 0.
    reference_estimator: See `reference_kl.estimate`.

  Raises:
    ValueError: If the name is unknown or a number is out of range.
  """

  name: str
  clip_low: float
  clip_high: float
  reference_kl: float = 0.0
  reference_estimator: str = "k3"

  def __post_init__(self) -> None:
    find(self.name)
    _check_scalars(self.clip_low, self.clip_high, self.reference_kl)
    reference_kl_lib.check_estimator(self.reference_estimator)


def check_group_size(name: str, group_size: int) -> None:
  """Raises ValueError if the loss has no advantages for groups of this size."""
  # Two groups, because some losses compare with the whole batch.
  find(name).advantages(np.zeros(2 * max(group_size, 1)), group_size)


def policy_loss(
    settings: LossSettings, log_probs: jax.Array, tokens: Tokens
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Computes the loss of a batch, or of one of its micro-batches.

  Args:
    settings: The name and coefficients of the loss.
    log_probs: Log-probs under the policy being trained, `[G, K]` float.
    tokens: Everything else about these tokens.

  Returns:
    The loss, a float32 scalar, and metrics of the generated tokens as float32
    scalars, all 0 if there are no tokens:

    *   `tokens`: number of tokens.
    *   `ratio_mean`, `ratio_max`: mean and largest ρ.
    *   `clip_fraction`: fraction of tokens whose objective was clipped.
    *   `kl`: the estimate ρ - 1 - log ρ of KL(π_old ‖ π), in nats per token.
    *   `reference_kl`: nats per token; only with reference log-probs.

    `merge_metrics` combines the metrics of micro-batches.

  Raises:
    ValueError: If shapes or dtypes disagree, or if there is a reference KL but
      no reference log-probs.
  """
  _check_arrays(log_probs, tokens)
  if settings.reference_kl and tokens.reference_log_probs is None:
    raise ValueError(
        f"reference_kl={settings.reference_kl} needs"
        " tokens.reference_log_probs, got None: compute them under the"
        " reference policy, or set it to 0"
    )
  # Mask before exp: a `where` around it would let NaN into the gradient.
  log_probs = jnp.where(tokens.mask, log_probs, 0.0).astype(jnp.float32)
  tokens = _masked(tokens)
  limit = objectives.MAX_LOG_RATIO
  log_ratio = jnp.clip(log_probs - tokens.old_log_probs, -limit, limit)
  objective, clipped = find(settings.name).objective(
      log_ratio, tokens, settings.clip_low, settings.clip_high
  )
  value = -jnp.sum(tokens.weights * objective)
  metrics = _metrics(log_ratio, clipped, tokens.mask)
  if tokens.reference_log_probs is not None:
    difference = log_probs - tokens.reference_log_probs
    estimate = reference_kl_lib.estimate(
        difference, settings.reference_estimator
    )
    value += settings.reference_kl * jnp.sum(tokens.weights * estimate)
    metrics["reference_kl"] = _token_mean(estimate, tokens.mask)
  return value, lax.stop_gradient(metrics)


def merge_metrics(stacked: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Combines `policy_loss` metrics of micro-batches into those of the batch.

  Args:
    stacked: Metrics with a leading micro-batch axis, as `lax.scan` returns
      them.

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


def _metrics(
    log_ratio: jax.Array, clipped: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
  """Metrics of the ratios."""
  ratio = jnp.exp(log_ratio)
  return {
      "tokens": jnp.sum(mask, dtype=jnp.float32),
      "ratio_mean": _token_mean(ratio, mask),
      "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
      "clip_fraction": _token_mean(clipped.astype(jnp.float32), mask),
      "kl": _token_mean(jnp.expm1(log_ratio) - log_ratio, mask),
  }


def _token_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """The mean over generated tokens, 0 if there are none."""
  total = jnp.sum(jnp.where(mask, x, 0.0))
  return total / jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def _masked(tokens: Tokens) -> Tokens:
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


def find(name: str) -> Loss:
  """Returns the loss of this name; raises ValueError for an unknown name."""
  if name not in LOSSES:
    near = difflib.get_close_matches(str(name), LOSSES, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"loss must be one of {', '.join(LOSSES)}, got {name!r}{hint}"
    )
  return LOSSES[name]


def _check_scalars(
    clip_low: float, clip_high: float, reference_kl: float
) -> None:
  """Raises ValueError for a coefficient out of range."""
  if not 0 <= clip_low <= 1 or not clip_high >= 0:
    raise ValueError(
        "clip_low must be in [0, 1] and clip_high at least 0, got "
        f"{clip_low} and {clip_high}"
    )
  if not 0 <= reference_kl < float("inf"):
    raise ValueError(
        f"reference_kl must be finite and at least 0, got {reference_kl}"
    )


def _check_arrays(log_probs: jax.Array, tokens: Tokens) -> None:
  """Raises ValueError for arrays that would broadcast into a wrong loss."""
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

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


def grpo() -> Loss:
  """Group-relative policy optimisation.

  `A = (r - mean) / (std + 1e-4)` within a group; objective
  `min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)`; token weight `1/(B |o|)`.
  DeepSeekMath, arXiv:2402.03300, eq. 3, which has one ε for both clips. Its KL
  term is `reference_kl` with the estimator k3 (eq. 4). Implementations differ
  in the standard deviation: TRL's is of the sample, ours of the population.
  """
  return Loss(
      advantages.group_advantages,
      advantages.mean_of_responses,
      objectives.clip_tokens,
  )


def dr_grpo() -> Loss:
  """GRPO without its biases by length and by difficulty.

  `A = r - mean` within a group; GRPO's objective; token weight
  `1/(B max_new_tokens)`. "Understanding R1-Zero-Like Training",
  arXiv:2503.20783, section 3.2. The paper's formula sums over tokens; its code
  and TRL divide by the constant budget, as here.
  """
  return Loss(
      advantages.group_differences,
      advantages.mean_of_budgets,
      objectives.clip_tokens,
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
      advantages.group_advantages,
      advantages.mean_of_tokens,
      objectives.clip_tokens,
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
      advantages.group_advantages,
      advantages.mean_of_responses,
      objectives.clip_responses,
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
      advantages.group_advantages,
      advantages.mean_of_tokens,
      objectives.weigh_log_probs,
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
      advantages.leave_one_out,
      advantages.mean_of_sums,
      objectives.share_responses,
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
  """Which loss, and its numbers: part of `config.loss`.

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
  """Raises ValueError for groups that the loss has no advantages for."""
  # Two groups, since some losses compare with the whole batch.
  find(name).advantages(np.zeros(2 * max(group_size, 1)), group_size)


def policy_loss(
    settings: LossSettings, log_probs: jax.Array, tokens: Tokens
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The loss of a batch, or of a micro-batch of it.

  Args:
    settings: Which loss, and its numbers.
    log_probs: `[G, K]` float, under the policy that is trained.
    tokens: Everything else that is known of these tokens.

  Returns:
    The loss, a float32 scalar, and metrics of the generated tokens as float32
    scalars: `tokens` (their number), `ratio_mean`, `ratio_max`,
    `clip_fraction` (the share of tokens whose objective was clipped), `kl`, the
    estimate ρ - 1 - log ρ of KL(π_old ‖ π) in nats per token, and, with
    reference log-probs, `reference_kl` in nats per token. Without tokens all
    are 0. `merge_metrics` joins those of micro-batches.

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
  # Masked before exp: the gradient of a `where` around it would keep a NaN.
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


def find(name: str) -> Loss:
  """The loss of a name; raises ValueError for an unknown one."""
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

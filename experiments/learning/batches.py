"""Turns a rollout and its advantages into the batch that a step learns from.

Axis letters are those of `packing`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections
import numpy as np

from experiments.learning import losses, packing
from experiments.learning.objectives import Tokens
from experiments.learning.train_step import Batch
from experiments.parallel import sharding
from experiments.rollouts.rollout import Rollout

# The fields of a batch that have a micro-batch axis before the rows.
_STACKED = ("rows", "tokens")


@dataclasses.dataclass(frozen=True)
class BatchSettings:
  """What packing a rollout into batches reads of a config.

  Attributes:
    loss: Name of the loss, which decides the tokens' weights.
    prompts: Number of prompts that one optimizer step learns from.
    responses: Number of responses to each prompt.
    max_prompt_tokens: Longest prompt in tokens.
    max_new_tokens: Longest response in tokens.
    row_tokens: Lengths of rows to choose from, in tokens.
    micro_rows: Number of rows computed at once.
    probe_responses: Number of responses that the KL is predicted on.
    reference: Whether tokens have log-probs of a reference policy.
  """

  loss: str
  prompts: int
  responses: int
  max_prompt_tokens: int
  max_new_tokens: int
  row_tokens: tuple[int, ...]
  micro_rows: int
  probe_responses: int
  reference: bool

  def __post_init__(self) -> None:
    object.__setattr__(self, "row_tokens", tuple(self.row_tokens))
    longest = self.max_prompt_tokens + self.max_new_tokens
    if not self.row_tokens or min(self.row_tokens) < longest:
      raise ValueError(
          f"config.loss.row_tokens={self.row_tokens} must hold lengths of at"
          f" least {longest}: rollout.max_prompt_tokens +"
          " rollout.max_new_tokens"
      )
    for name, value in (
        ("loss.micro_rows", self.micro_rows),
        ("kl.probe_responses", self.probe_responses),
    ):
      if value < 1:
        raise ValueError(f"config.{name}={value} must be at least 1")
    if self.probe_responses > self.prompts * self.responses:
      raise ValueError(
          f"config.kl.probe_responses={self.probe_responses} is more than a"
          f" step has, {self.prompts * self.responses}"
      )

  @classmethod
  def of_config(cls, config: ml_collections.ConfigDict) -> "BatchSettings":
    """Reads a config like `configs/quickstart.py`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    rollout, loss = config.rollout, config.loss
    if loss.minibatches < 1 or rollout.prompts % loss.minibatches:
      raise ValueError(
          f"config.loss.minibatches={loss.minibatches} must divide"
          f" rollout.prompts={rollout.prompts}"
      )
    return cls(
        loss=loss.name,
        prompts=rollout.prompts // loss.minibatches,
        responses=rollout.responses,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        row_tokens=loss.row_tokens,
        micro_rows=loss.micro_rows,
        probe_responses=config.kl.probe_responses,
        reference=loss.reference_kl > 0,
    )


def probe_rows(settings: BatchSettings) -> np.ndarray:
  """Chooses the responses that the KL is measured on.

  They are from as many different prompts as possible.

  Returns:
    Distinct indices of responses, `[probe_responses]` int32.
  """
  prompts, responses = settings.prompts, settings.responses
  rows = np.arange(prompts * responses, dtype=np.int32)
  by_response = rows.reshape(prompts, responses).T.reshape(-1)
  return by_response[: settings.probe_responses]


def make_batch(
    settings: BatchSettings,
    rollout: Rollout,
    advantages: np.ndarray,
    *,
    keep: np.ndarray | None = None,
) -> tuple[Batch, packing.Packing]:
  """Packs the responses that one step learns from.

  Of the lengths in `settings.row_tokens`, takes the one with the fewest tokens
  to compute.

  Args:
    settings: What packing reads of a config.
    rollout: B = prompts * responses responses, NumPy arrays `[B, T]`.
    advantages: `[B]` float32.
    keep: The responses that the loss includes, `[B]` bool; None means all.

  Returns:
    The batch as NumPy arrays, and where each token went. Its ratios are
    measured from the sampler's log-probs.

  Raises:
    ValueError: If no response of the probe has a token, so that no KL can be
      predicted.
  """
  mask = np.asarray(rollout.completion_mask)
  lengths = mask.sum(axis=1)
  if keep is None:
    keep = np.ones(len(lengths), bool)
  packed = min(
      (
          packing.pack(
              rollout,
              keep,
              group_size=settings.responses,
              n_new=settings.max_new_tokens,
              row_tokens=row_tokens,
              micro_rows=settings.micro_rows,
          )
          for row_tokens in settings.row_tokens
      ),
      key=lambda packed: packed.computed,
  )
  weights = losses.find(settings.loss).weights(
      lengths, settings.max_new_tokens, keep
  )
  tokens = Tokens(
      mask=packed.rows.target_mask,
      response=packed.rows.target_response,
      old_log_probs=packed.gather(np.asarray(rollout.log_probs)),
      advantages=packed.gather(np.asarray(advantages, np.float32)),
      weights=packed.gather(np.asarray(weights, np.float32)),
      reference_log_probs=None,
  )
  batch = Batch(
      rows=packed.rows,
      tokens=tokens,
      probe=_probe(settings, rollout),
      count=np.int32(packed.count),
      mismatch=np.float32(0.0),
  )
  return batch, packed


def _probe(settings: BatchSettings, rollout: Rollout) -> packing.Rows:
  """The rows of the probe, each long enough for any response."""
  chosen = probe_rows(settings)
  some = jax.tree.map(lambda x: np.asarray(x)[chosen], rollout)
  if not some.completion_mask.any():
    raise ValueError(
        f"the rollout has no generated token in its first {len(chosen)}"
        " responses, so that no KL can be predicted; raise"
        " config.kl.probe_responses"
    )
  return packing.all_rows(some, 1, settings.max_new_tokens)


def abstract_batch(settings: BatchSettings) -> Batch:
  """Shapes and dtypes of the largest batch: that of the longest rows."""
  row_tokens = max(settings.row_tokens)
  n_micro = packing.max_micro_batches(
      settings.prompts,
      settings.responses,
      settings.max_prompt_tokens,
      settings.max_new_tokens,
      row_tokens,
      settings.micro_rows,
  )
  n_targets = packing.max_targets(
      settings.max_prompt_tokens, settings.max_new_tokens, row_tokens
  )
  rows = lambda lead, s, k: packing.Rows(
      **{
          name: jax.ShapeDtypeStruct((*lead, s), np.int32)
          for name in ("tokens", "positions", "prompt", "response")
      },
      **{
          name: jax.ShapeDtypeStruct((*lead, k), np.int32)
          for name in (
              "source",
              "targets",
              "target_response",
              "target_step",
          )
      },
      target_mask=jax.ShapeDtypeStruct((*lead, k), np.bool_),
  )
  lead = (n_micro, settings.micro_rows)
  thin = (*lead, n_targets)
  number = jax.ShapeDtypeStruct(thin, np.float32)
  return Batch(
      rows=rows(lead, row_tokens, thin[-1]),
      tokens=Tokens(
          mask=jax.ShapeDtypeStruct(thin, np.bool_),
          response=jax.ShapeDtypeStruct(thin, np.int32),
          old_log_probs=number,
          advantages=number,
          weights=number,
          reference_log_probs=number if settings.reference else None,
      ),
      probe=rows(
          (settings.probe_responses,),
          settings.max_prompt_tokens + settings.max_new_tokens,
          settings.max_new_tokens,
      ),
      count=None,
      mismatch=jax.ShapeDtypeStruct((), np.float32),
  )


def shardings(batch: Batch, mesh: Mesh) -> Batch:
  """Shardings that split every micro-batch, and the probe, by rows."""

  def one(path: tuple[Any, ...], leaf: Any) -> jax.sharding.NamedSharding:
    ndim = len(leaf.shape)
    stacked = path[0].name in _STACKED
    names: list[str | None] = [None] * ndim
    if ndim:
      names[1 if stacked else 0] = "batch"
    return jax.sharding.NamedSharding(
        mesh, sharding.spec(tuple(names), leaf.shape, mesh)
    )

  return jax.tree_util.tree_map_with_path(one, batch)


def put(batch: Batch, mesh: Mesh) -> Batch:
  """Puts the batch on its devices."""
  batch = jax.tree.map(jnp.asarray, batch)
  return sharding.put(batch, shardings(batch, mesh))

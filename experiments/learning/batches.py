"""From a rollout and its advantages to what the learner reads.

Axis letters as in `packing`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections
import numpy as np

from experiments.learning import losses, packing
from experiments.learning.train_step import Batch
from experiments.parallel import sharding
from experiments.rollouts.rollout import Rollout

# Of the batch's fields, those with a micro-batch axis before the rows.
_STACKED = ("rows", "tokens")


def minibatch_prompts(config: ml_collections.ConfigDict) -> int:
  """Prompts that one step learns from."""
  return config.rollout.prompts // config.loss.minibatches


def probe_rows(config: ml_collections.ConfigDict) -> np.ndarray:
  """Responses that the KL is measured on, of different prompts first.

  Returns:
    `[config.kl.probe_responses]` int32, distinct.
  """
  prompts, responses = minibatch_prompts(config), config.rollout.responses
  rows = np.arange(prompts * responses, dtype=np.int32)
  by_response = rows.reshape(prompts, responses).T.reshape(-1)
  return by_response[: config.kl.probe_responses]


def make_batch(
    config: ml_collections.ConfigDict,
    rollout: Rollout,
    advantages: np.ndarray,
    *,
    keep: np.ndarray | None = None,
) -> tuple[Batch, packing.Packing]:
  """Packs the responses that one step learns from.

  Args:
    config: a config like `configs/quickstart.py`.
    rollout: B responses, NumPy arrays `[B, T]`, to prompts of
      `minibatch_prompts`.
    advantages: `[B]` float32.
    keep: `[B]` bool, responses that the loss is of; None means all.

  Returns:
    The batch, NumPy arrays; its ratios are measured from the sampler's
    log-probabilities. And where each token went.

  Raises:
    ValueError: no response has a token, so that there is nothing to learn
      from; or those of the probe have none, so that no KL can be predicted.
  """
  c = config.loss
  mask = np.asarray(rollout.completion_mask)
  lengths = mask.sum(axis=1)
  if keep is None:
    keep = np.ones(len(lengths), bool)
  packed = min(
      (
          packing.pack(
              rollout,
              keep,
              group_size=config.rollout.responses,
              n_new=config.rollout.max_new_tokens,
              row_tokens=row_tokens,
              micro_rows=c.micro_rows,
          )
          for row_tokens in c.row_tokens
      ),
      key=lambda packed: packed.computed,
  )
  weights = losses.LOSSES[c.name].weights(
      lengths, config.rollout.max_new_tokens, keep
  )
  tokens = losses.Tokens(
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
      probe=_probe(config, rollout),
      count=np.int32(packed.count),
      mismatch=np.float32(0.0),
  )
  return batch, packed


def _probe(config: ml_collections.ConfigDict, rollout: Rollout) -> packing.Rows:
  """The probe's rows, each long enough for any response."""
  chosen = probe_rows(config)
  some = jax.tree.map(lambda x: np.asarray(x)[chosen], rollout)
  if not some.completion_mask.any():
    raise ValueError(
        f"the rollout has no generated token in its first {len(chosen)}"
        " responses, so that no KL can be predicted; raise"
        " config.kl.probe_responses"
    )
  return packing.all_rows(some, 1, config.rollout.max_new_tokens)


def abstract_batch(config: ml_collections.ConfigDict) -> Batch:
  """Shapes and dtypes of the largest batch, in the longest rows."""
  c, r = config.loss, config.rollout
  row_tokens = max(c.row_tokens)
  n_micro = packing.max_micro_batches(
      minibatch_prompts(config),
      r.responses,
      r.max_prompt_tokens,
      r.max_new_tokens,
      row_tokens,
      c.micro_rows,
  )
  n_targets = packing.max_targets(
      r.max_prompt_tokens, r.max_new_tokens, row_tokens
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
  lead = (n_micro, c.micro_rows)
  thin = (*lead, n_targets)
  number = jax.ShapeDtypeStruct(thin, np.float32)
  return Batch(
      rows=rows(lead, row_tokens, thin[-1]),
      tokens=losses.Tokens(
          mask=jax.ShapeDtypeStruct(thin, np.bool_),
          response=jax.ShapeDtypeStruct(thin, np.int32),
          old_log_probs=number,
          advantages=number,
          weights=number,
          reference_log_probs=number if c.reference_kl else None,
      ),
      probe=rows(
          (config.kl.probe_responses,),
          r.max_prompt_tokens + r.max_new_tokens,
          r.max_new_tokens,
      ),
      count=None,
      mismatch=jax.ShapeDtypeStruct((), np.float32),
  )


def shardings(batch: Batch, mesh: Mesh) -> Batch:
  """Splits every micro-batch, and the probe, over its rows."""

  def one(path: Any, leaf: Any) -> jax.sharding.NamedSharding:
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
  """The batch on its devices."""
  batch = jax.tree.map(jnp.asarray, batch)
  return sharding.put(batch, shardings(batch, mesh))

"""The engine that samples a run's responses: this process, or a server."""

import pathlib

import chex
import ml_collections

from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import remote_sampler, sampling
from experiments.rollouts import sampler as sampler_lib


def make_sampler(
    config: ml_collections.ConfigDict,
    model: decoder.Decoder,
    params: chex.ArrayTree,
    tokenizer: Tokenizer,
    workdir: pathlib.Path,
) -> sampler_lib.Sampler:
  """The sampler of a run: this process, or `config.rollout.server`."""
  c = config.rollout
  if not c.server:
    return local_sampler(config, model, params, tokenizer)
  sync = None
  if c.server_sync:
    sync = remote_sampler.sync_by_directory(
        c.server, workdir / "served", model.config, tokenizer
    )
  return remote_sampler.OpenAISampler(
      c.server,
      c.server_model,
      tokenizer,
      max_prompt_tokens=c.max_prompt_tokens,
      sync=sync,
  )


def local_sampler(config, model, params, tokenizer):
  """Samples in this process, with the KV cache that `_summary` states."""
  c = config.rollout
  return sampler_lib.LocalSampler(
      model,
      params,
      tokenizer,
      max_prompt_tokens=c.max_prompt_tokens,
      slots=sampling.slots(c),
      cache_dtype=c.cache_dtype or None,
  )

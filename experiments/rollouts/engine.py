"""Chooses what samples a run's responses: this process, or a server."""

import dataclasses
import pathlib

import chex
import ml_collections

from experiments import _settings
from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import remote_sampler, sampling
from experiments.rollouts import sampler as sampler_lib


@dataclasses.dataclass(frozen=True)
class EngineSettings:
  """Where responses are sampled, and in how much memory.

  Attributes:
    max_prompt_tokens: Longest prompt in tokens.
    slots: Most responses decoded at once.
    cache_dtype: Dtype of the KV cache, `"int8"`, or `""` for that of
      activations.
    server: Address of a completion server, or `""` to sample in this process.
    server_model: The policy's name on the server.
    server_sync: Whether the server loads new weights from a directory.
  """

  max_prompt_tokens: int
  slots: int
  cache_dtype: str
  server: str
  server_model: str
  server_sync: bool

  def __post_init__(self) -> None:
    _settings.check_least(self, max_prompt_tokens=1, slots=0)
    if self.cache_dtype not in ("", "int8"):
      raise ValueError(f"cache_dtype={self.cache_dtype!r} must be '' or 'int8'")

  @classmethod
  def of_config(cls, rollout: ml_collections.ConfigDict) -> "EngineSettings":
    """Reads the section `config.rollout`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    return _settings.read(
        cls, rollout, "config.rollout.", slots=sampling.slots(rollout)
    )


def make_sampler(
    settings: EngineSettings,
    model: decoder.Decoder,
    params: chex.ArrayTree,
    tokenizer: Tokenizer,
    workdir: pathlib.Path,
) -> sampler_lib.Sampler:
  """Creates the sampler of a run.

  Args:
    settings: Where to sample.
    model: The policy.
    params: The parameters of `model`.
    tokenizer: The tokenizer of the model.
    workdir: Directory of the run. With `server_sync`, the server loads new
      weights from `workdir/served`.
  """
  if not settings.server:
    return local_sampler(settings, model, params, tokenizer)
  sync = None
  if settings.server_sync:
    sync = remote_sampler.sync_by_directory(
        settings.server, workdir / "served", model.config, tokenizer
    )
  return remote_sampler.OpenAISampler(
      settings.server,
      settings.server_model,
      tokenizer,
      max_prompt_tokens=settings.max_prompt_tokens,
      sync=sync,
  )


def local_sampler(
    settings: EngineSettings,
    model: decoder.Decoder,
    params: chex.ArrayTree,
    tokenizer: Tokenizer,
) -> sampler_lib.LocalSampler:
  """Creates a sampler in this process, with the settings' cache and slots."""
  return sampler_lib.LocalSampler(
      model,
      params,
      tokenizer,
      max_prompt_tokens=settings.max_prompt_tokens,
      slots=settings.slots,
      cache_dtype=settings.cache_dtype or None,
  )

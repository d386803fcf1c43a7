"""The interface of everything that samples, and sampling in this process."""

from collections.abc import Sequence
from typing import Protocol

import chex
import jax
from jax.typing import DTypeLike

from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import generate as generate_lib
from experiments.rollouts import stop_strings
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling


class Sampler(Protocol):
  """Samples responses to prompts; its weights can lag behind the trainer's.

  Attributes:
    max_prompt_tokens: Longest prompt allowed, and the padded length P of
      prompts in its rollouts.
  """

  max_prompt_tokens: int

  def sample(
      self,
      prompts: Sequence[Sequence[int]],
      key: jax.Array,
      sampling: Sampling,
      *,
      group_size: int = 1,
  ) -> Rollout:
    """Samples `group_size` responses to each prompt.

    Args:
      prompts: Token ids of each prompt, 1 to `max_prompt_tokens` of them.
      key: A `jax.random` key.
      sampling: How to choose tokens and when to stop.
      group_size: Number of responses to each prompt.

    Returns:
      A rollout of `len(prompts) * group_size` rows; responses to the same
      prompt are adjacent. The log-probs are those of the distribution that was
      sampled from.
    """
    ...

  def update_weights(self, params: chex.ArrayTree, version: int) -> None:
    """Replaces the weights by `params`, those after update `version`."""
    ...


class LocalSampler:
  """Samples in this process and shares the trainer's weights."""

  def __init__(
      self,
      model: decoder.Decoder,
      params: chex.ArrayTree,
      tokenizer: Tokenizer,
      *,
      max_prompt_tokens: int,
      slots: int = 0,
      cache_dtype: DTypeLike | None = None,
  ):
    """Creates a sampler.

    Args:
      model: The decoder.
      params: The parameters of `model`.
      tokenizer: The tokenizer of the model.
      max_prompt_tokens: Length that prompts are padded to. Each length compiles
        programs of its own.
      slots: See `generate.generate`.
      cache_dtype: See `generate.generate`.
    """
    self.max_prompt_tokens = max_prompt_tokens
    self._model = model
    self._params = params
    self._tokenizer = tokenizer
    self._slots = slots
    self._cache_dtype = cache_dtype

  def sample(
      self,
      prompts: Sequence[Sequence[int]],
      key: jax.Array,
      sampling: Sampling,
      *,
      group_size: int = 1,
  ) -> Rollout:
    """See `Sampler.sample`. The same key gives the same responses."""
    tokens, valid = generate_lib.pad_prompts(
        prompts, self.max_prompt_tokens, self._tokenizer.pad_id
    )
    table = None
    if sampling.stop:
      table = stop_strings.make_stop_table(
          self._tokenizer, sampling.stop, self._model.config.vocab_size
      )
    return generate_lib.generate(
        self._model,
        self._params,
        tokens,
        valid,
        key,
        sampling=sampling,
        eos_ids=self._tokenizer.eos_ids,
        pad_id=self._tokenizer.pad_id,
        group_size=group_size,
        slots=self._slots,
        cache_dtype=self._cache_dtype,
        stop_table=table,
    )

  def update_weights(self, params: chex.ArrayTree, version: int) -> None:
    """See `Sampler.update_weights`. Nothing is copied."""
    del version
    self._params = params

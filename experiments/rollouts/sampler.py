"""What training and evaluation ask of an engine that samples responses."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike

from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts import generate as generate_lib
from experiments.rollouts import stop_strings
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling

PyTree = Any


class Sampler(Protocol):
  """Samples responses to prompts; its weights may lag behind the trainer's.

  Attributes:
    max_prompt_tokens: longest prompt that it takes, and P of its rollouts.
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
    """Responses to each prompt; those of one prompt are adjacent.

    Args:
      prompts: token ids, 1 to `max_prompt_tokens` of each.
      key: a `jax.random` key.
      sampling: how to choose tokens, and when to end.
      group_size: responses per prompt.

    Returns:
      A rollout of `len(prompts) * group_size` rows. Its log-probs are of the
      distribution that was sampled from.
    """
    ...

  def update_weights(self, params: PyTree, version: int) -> None:
    """Makes later samples those of `params`, after update `version`."""
    ...


class LocalSampler:
  """Samples in this process, with the trainer's own copy of the weights."""

  def __init__(
      self,
      model: decoder.Decoder,
      params: PyTree,
      tokenizer: Tokenizer,
      *,
      max_prompt_tokens: int,
      slots: int = 0,
      cache_dtype: DTypeLike | None = None,
  ):
    """Keeps what `rollout.generate` needs.

    Args:
      model: the decoder.
      params: its parameters.
      tokenizer: the model's.
      max_prompt_tokens: length that prompts are padded to; another one is
        compiled again.
      slots: see `rollout.generate`.
      cache_dtype: see `rollout.generate`.
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
    """See `Sampler`; the same key gives the same responses."""
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

  def update_weights(self, params: PyTree, version: int) -> None:
    """See `Sampler`; nothing is copied."""
    del version
    self._params = params

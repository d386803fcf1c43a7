"""Conversions between a task's chats and texts and a sampler's tokens."""

from collections.abc import Sequence

import numpy as np

from experiments import tasks
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts.rollout import Rollout


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[tasks.Example]
) -> list[list[int]]:
  """Renders each prompt with the chat template and returns its token ids."""
  return [
      tokenizer.encode(tokenizer.apply_chat(example.prompt))
      for example in examples
  ]


def decode_completions(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
  """Returns the text of each response, without special tokens."""
  tokens = np.asarray(rollout.tokens)
  mask = np.asarray(rollout.completion_mask)
  return [
      tokenizer.decode(row[keep])
      for row, keep in zip(tokens, mask, strict=True)
  ]


def pair(
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    rollout: Rollout,
) -> tuple[list[tasks.Example], list[str]]:
  """Pairs each response with its example.

  Args:
    tokenizer: The tokenizer of the model.
    examples: N examples.
    rollout: B = N * n responses, n adjacent ones to each example.

  Returns:
    For each of the B responses its example, and its text.
  """
  completions = decode_completions(tokenizer, rollout)
  n = len(completions) // len(examples)
  return [example for example in examples for _ in range(n)], completions

"""Chats in, texts out: what stands between a task and a sampler."""

from collections.abc import Sequence

import numpy as np

from experiments import tasks
from experiments.models.tokenizer import Tokenizer
from experiments.rollouts.rollout import Rollout


def encode_prompts(
    tokenizer: Tokenizer, examples: Sequence[tasks.Example]
) -> list[list[int]]:
  """Token ids of each example's prompt, rendered with the chat template."""
  return [
      tokenizer.encode(tokenizer.apply_chat(example.prompt))
      for example in examples
  ]


def decode_completions(tokenizer: Tokenizer, rollout: Rollout) -> list[str]:
  """The text of each row's generated tokens, special tokens left out."""
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
  """Each response's example, and its text; those of an example are adjacent."""
  completions = decode_completions(tokenizer, rollout)
  n = len(completions) // len(examples)
  return [example for example in examples for _ in range(n)], completions

"""What the loop over updates reads of a config."""

import dataclasses

import ml_collections


@dataclasses.dataclass(frozen=True)
class LoopSettings:
  """How long a run is, and what happens between its updates.

  Attributes:
    updates: Number of updates of the run.
    minibatches: Optimizer steps per pass over a rollout.
    epochs: Passes over a rollout.
    evaluate_every: Number of updates between two evaluations.
    evaluate_prompts: Most held-out prompts of an evaluation.
    checkpoint_every: Number of updates between two checkpoints; 0 for none but
      those by minutes, and the last.
    checkpoint_minutes: Minutes between two checkpoints; 0 for none by time.
    checkpoint_keep: Number of the newest checkpoints that are kept.
    max_skipped: Updates in a row that may be skipped as non-finite.
    max_new_tokens: Longest response in tokens.
    prepares: Whether the trainer's own log-probs are needed before the first
      step on a rollout.
  """

  updates: int
  minibatches: int
  epochs: int
  evaluate_every: int
  evaluate_prompts: int
  checkpoint_every: int
  checkpoint_minutes: float
  checkpoint_keep: int
  max_skipped: int
  max_new_tokens: int
  prepares: bool

  @property
  def steps(self) -> int:
    """Optimizer steps of an update."""
    return self.epochs * self.minibatches

  @classmethod
  def of_config(cls, config: ml_collections.ConfigDict) -> "LoopSettings":
    """Reads a config like `configs/quickstart.py`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    loss, evaluate, checkpoint = config.loss, config.evaluate, config.checkpoint
    least = {
        "updates": (config.updates, 1),
        "loss.minibatches": (loss.minibatches, 1),
        "loss.epochs": (loss.epochs, 1),
        "evaluate.every": (evaluate.every, 1),
        "evaluate.prompts": (evaluate.prompts, 1),
        "checkpoint.every": (checkpoint.every, 0),
        "checkpoint.minutes": (checkpoint.minutes, 0),
        "checkpoint.keep": (checkpoint.keep, 1),
        "max_skipped": (config.max_skipped, 1),
    }
    for name, (value, minimum) in least.items():
      if not value >= minimum:
        raise ValueError(f"config.{name}={value} must be at least {minimum}")
    return cls(
        updates=config.updates,
        minibatches=loss.minibatches,
        epochs=loss.epochs,
        evaluate_every=evaluate.every,
        evaluate_prompts=evaluate.prompts,
        checkpoint_every=checkpoint.every,
        checkpoint_minutes=checkpoint.minutes,
        checkpoint_keep=checkpoint.keep,
        max_skipped=config.max_skipped,
        max_new_tokens=config.rollout.max_new_tokens,
        prepares=(
            loss.epochs * loss.minibatches > 1
            or loss.correction != "none"
            or loss.reference_kl > 0
            or config.kl.mismatch
        ),
    )

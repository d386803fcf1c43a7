"""What each metric of a run means: the source of `docs/metrics.md`.

python -m experiments.runs.metric_names > docs/metrics.md
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
  """One metric, or a family of them.

  Attributes:
    unit: what its number counts; 'share' is between 0 and 1.
    meaning: one sentence.
    source: file in `experiments/` that computes it.
  """

  unit: str
  meaning: str
  source: str


GROUPS = {
    "train": "the batch and the loss of an update",
    "kl": "how far an update moves the policy",
    "rollout": "the sampled responses",
    "eval": "held-out prompts",
    "memory": "what is held",
    "time": "where the seconds go",
}

_LEARNER, _TRAIN, _ROLLOUT = "learner.py", "train.py", "rollout.py"

_OF_THE_MACHINE = ("rollout/tokens_per_second", "train/compilations")

# A part in angle brackets stands for any text.
METRICS: dict[str, Metric] = {
    "train/reward": Metric("reward", "mean over the batch's responses", _TRAIN),
    "train/reward_std": Metric(
        "reward", "standard deviation over the batch's responses", _TRAIN
    ),
    "train/reward/<part>": Metric(
        "reward",
        "mean of one named part of the reward, before its weight",
        _TRAIN,
    ),
    "train/equal_groups": Metric(
        "share",
        "prompts whose responses all earned the same: they teach nothing",
        _TRAIN,
    ),
    "train/loss": Metric(
        "1", "the surrogate loss that the gradients are of", _LEARNER
    ),
    "train/entropy": Metric(
        "nats/token",
        "mean entropy of the policy's distribution at generated tokens",
        _LEARNER,
    ),
    "train/clip_fraction": Metric(
        "share", "generated tokens whose ratio is clipped", _LEARNER
    ),
    "train/ratio_max": Metric(
        "1",
        "largest ratio of new to old probability of a generated token",
        _LEARNER,
    ),
    "train/reference_kl": Metric(
        "nats/token",
        "estimated KL divergence from the reference policy",
        _LEARNER,
    ),
    "train/off_policy_gap": Metric(
        "nats/token",
        "mean log-probability of the sampler less that of the trainer, at"
        " tokens of responses that ended",
        _LEARNER,
    ),
    "train/off_policy_gap_max": Metric(
        "nats/token", "largest magnitude of that gap at one token", _LEARNER
    ),
    "train/off_policy_kl": Metric(
        "nats/token",
        "estimated KL divergence of the trainer's policy from the sampler's",
        _LEARNER,
    ),
    "train/padding": Metric(
        "share", "tokens computed that are of no prompt or response", _TRAIN
    ),
    "train/skipped": Metric(
        "0 or 1",
        "whether the step was left out, since loss, gradient or KL was not"
        " finite",
        _LEARNER,
    ),
    "train/compilations": Metric(
        "programs",
        "compiled, or read from a cache, since this process started",
        _TRAIN,
    ),
    "kl/predicted": Metric(
        "nats/token",
        "predicted KL(old || new) of the step as it was scaled",
        _LEARNER,
    ),
    "kl/proposed": Metric(
        "nats/token", "predicted KL of the step before scaling", _LEARNER
    ),
    "kl/realised": Metric(
        "nats/token", "KL measured after the step, same responses", _LEARNER
    ),
    "kl/budget": Metric(
        "nats/token", "what the step was allowed, mismatch deducted", _LEARNER
    ),
    "kl/mismatch": Metric(
        "nats/token", "running mean of the sampler-trainer gap", _LEARNER
    ),
    "kl/step_scale": Metric(
        "1", "factor on the optimizer's step; 0 if it was skipped", _LEARNER
    ),
    "kl/skipped": Metric("steps", "skipped since the start", _LEARNER),
    "rollout/length": Metric(
        "tokens", "mean length of a response, its end included", _TRAIN
    ),
    "rollout/length_max": Metric("tokens", "longest response", _TRAIN),
    "rollout/finished": Metric(
        "share", "responses that ended by themselves", _TRAIN
    ),
    "rollout/tokens_per_second": Metric(
        "tokens/s", "generated tokens by the time of the rollout", _TRAIN
    ),
    "rollout/replaced_groups": Metric(
        "groups", "drawn again, since all responses earned the same", _TRAIN
    ),
    "train/truncated_weights": Metric(
        "share", "importance weights that met their cap", _LEARNER
    ),
    "rollout/reward_timeouts": Metric(
        "responses", "whose reward took too long; they earn 0", _TRAIN
    ),
    "rollout/reward_errors": Metric(
        "responses", "whose reward function failed; they earn 0", _TRAIN
    ),
    "eval/accuracy": Metric("reward", "mean, greedy decoding", "evaluate.py"),
    "eval/length": Metric("tokens", "mean length of a response", "evaluate.py"),
    "eval/finished": Metric(
        "share", "responses that ended by themselves", "evaluate.py"
    ),
    "eval/weight_norm": Metric(
        "1", "Frobenius norm of all parameters, adapters merged", _TRAIN
    ),
    "memory/device_peak": Metric(
        "GiB",
        "most that the first device held since the start, where it tells",
        "metrics.py",
    ),
    "memory/host_peak": Metric(
        "GiB", "most that the process held since its start", "metrics.py"
    ),
    "time/rollout": Metric("s", "sampling, until the tokens are there", _TRAIN),
    "time/reward": Metric("s", "rewards and advantages", _TRAIN),
    "time/update": Metric("s", "gradients, probe and step", _TRAIN),
    "time/evaluate": Metric("s", "held-out prompts", _TRAIN),
}


def describe(name: str) -> Metric | None:
  """The entry of a metric's name; None where there is none."""
  if name in METRICS:
    return METRICS[name]
  for pattern, metric in METRICS.items():
    parts = re.split(r"<\w+>", pattern)
    if re.fullmatch(".+".join(map(re.escape, parts)), name):
      return metric
  return None


def repeats(name: str) -> bool:
  """Whether a resumed run has the same value, bit for bit.

  What is of the machine, as seconds and bytes are, does not.
  """
  group = name.partition("/")[0]
  return group not in ("time", "memory") and name not in _OF_THE_MACHINE


def page() -> str:
  """The text of `docs/metrics.md`."""
  lines = [
      "# Metrics",
      "",
      "Every line of a run's `metrics.jsonl` is a JSON object: `update`, the",
      "number of updates done when its numbers were true, and metrics. The",
      "same names are in TensorBoard, Weights & Biases and Trackio where the",
      "config asks for them (`config.log`). A number that is not finite is",
      "`null`. All but `time/`, `memory/`, `rollout/tokens_per_second` and",
      "`train/compilations` are the same, bit for bit, in a run that was",
      "killed and resumed.",
      "",
      "KL divergences are in nats per generated token. GiB are 2³⁰ bytes.",
      "",
      "Made by `python -m experiments.runs.metric_names`; a test compares.",
  ]
  for group, about in GROUPS.items():
    lines += ["", f"## `{group}/`: {about}", ""]
    lines += ["| metric | unit | meaning | computed in |", "|---|---|---|---|"]
    for name, metric in METRICS.items():
      if name.startswith(f"{group}/"):
        source = f"[`{metric.source}`](../experiments/{metric.source})"
        lines.append(
            f"| `{name}` | {metric.unit} | {metric.meaning} | {source} |"
        )
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  print(page(), end="")

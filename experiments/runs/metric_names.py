"""What each metric of a run means; prints docs/metrics.md.

python -m experiments.runs.metric_names > docs/metrics.md
"""

import re
from typing import NamedTuple

from experiments import _cli
from experiments.reporting import tables


class Metric(NamedTuple):
  """One metric, or a family of them.

  Attributes:
    unit: The unit of its number; "share" means between 0 and 1.
    meaning: One line that explains it.
    source: The file in `experiments/` that computes it.
  """

  unit: str
  meaning: str
  source: str


GROUPS = {
    "train": "the batch and the loss of an update",
    "kl": "how far an update moves the policy",
    "rollout": "the sampled responses",
    "eval": "held-out prompts",
    "memory": "peak memory",
    "time": "seconds of an update",
}

_STEP = "learning/train_step.py"
_LOSSES = "learning/losses.py"
_COLLECT = "runs/collect.py"
_LOOP = "runs/loop.py"
_HELDOUT = "evaluation/heldout.py"
_RECORD = "runs/record.py"

# Metrics that depend on the machine, besides the groups `time` and `memory`.
_OF_THE_MACHINE = ("rollout/tokens_per_second", "train/compilations")

# A part in angle brackets stands for any text.
METRICS: dict[str, Metric] = {
    "train/reward": Metric("reward", "mean over the batch", _COLLECT),
    "train/reward_std": Metric(
        "reward", "standard deviation over the batch", _COLLECT
    ),
    "train/reward/<part>": Metric(
        "reward", "mean of one part of the reward, before its weight", _COLLECT
    ),
    "train/equal_groups": Metric(
        "share",
        "prompts whose responses all earned the same, and so teach nothing",
        _COLLECT,
    ),
    "train/loss": Metric("1", "surrogate loss that is differentiated", _STEP),
    "train/entropy": Metric(
        "nats/token", "mean entropy of the policy at generated tokens", _STEP
    ),
    "train/clip_fraction": Metric(
        "share", "generated tokens whose ratio is clipped", _LOSSES
    ),
    "train/ratio_max": Metric(
        "1",
        "largest ratio of new to old probability of a generated token",
        _LOSSES,
    ),
    "train/reference_kl": Metric(
        "nats/token", "estimated KL from the reference policy", _LOSSES
    ),
    "train/off_policy_gap": Metric(
        "nats/token",
        "mean log-probability under the sampler minus that under the trainer,"
        " over tokens of responses that ended",
        _STEP,
    ),
    "train/off_policy_gap_max": Metric(
        "nats/token", "largest magnitude of that gap at one token", _STEP
    ),
    "train/off_policy_kl": Metric(
        "nats/token",
        "estimated KL of the trainer's policy from the sampler's",
        _STEP,
    ),
    "train/truncated_weights": Metric(
        "share", "importance weights that reached their cap", _STEP
    ),
    "train/padding": Metric("share", "computed tokens that are empty", _LOOP),
    "train/skipped": Metric(
        "0 or 1",
        "whether the step was skipped because the loss, a gradient or the KL"
        " was not finite",
        _STEP,
    ),
    "train/compilations": Metric(
        "programs",
        "compiled or read from a cache since this process started",
        _LOOP,
    ),
    "kl/predicted": Metric(
        "nats/token", "predicted KL(old || new) of the scaled step", _STEP
    ),
    "kl/proposed": Metric(
        "nats/token", "predicted KL of the step before scaling", _STEP
    ),
    "kl/realised": Metric(
        "nats/token", "KL measured after the step on the same responses", _STEP
    ),
    "kl/budget": Metric(
        "nats/token", "KL allowed for the step, less the mismatch", _STEP
    ),
    "kl/mismatch": Metric(
        "nats/token", "running mean of the sampler-trainer gap", _STEP
    ),
    "kl/step_scale": Metric(
        "1", "factor on the optimizer's step; 0 if it was skipped", _STEP
    ),
    "kl/skipped": Metric("steps", "steps skipped since the start", _STEP),
    "rollout/length": Metric(
        "tokens", "mean length of a response, its end included", _COLLECT
    ),
    "rollout/length_max": Metric(
        "tokens", "length of the longest response", _COLLECT
    ),
    "rollout/finished": Metric(
        "share", "responses that ended before the limit", _COLLECT
    ),
    "rollout/tokens_per_second": Metric(
        "tokens/s", "generated tokens per second of sampling", _COLLECT
    ),
    "rollout/replaced_groups": Metric(
        "groups",
        "replaced by further prompts because their rewards were all equal",
        _COLLECT,
    ),
    "rollout/reward_timeouts": Metric(
        "responses", "whose reward took too long, and which earn 0", _COLLECT
    ),
    "rollout/reward_errors": Metric(
        "responses", "whose reward function failed, and which earn 0", _COLLECT
    ),
    "eval/accuracy": Metric("reward", "mean, greedy decoding", _HELDOUT),
    "eval/length": Metric("tokens", "mean length of a response", _HELDOUT),
    "eval/finished": Metric(
        "share", "responses that ended before the limit", _HELDOUT
    ),
    "eval/weight_norm": Metric(
        "1", "Frobenius norm of all parameters, adapters merged", _LOOP
    ),
    "memory/device_peak": Metric(
        "GiB",
        "peak of the first device since the start, if it reports one",
        _RECORD,
    ),
    "memory/host_peak": Metric(
        "GiB", "peak of the process since its start", _RECORD
    ),
    "time/rollout": Metric("s", "sampling", _COLLECT),
    "time/reward": Metric("s", "rewards", _COLLECT),
    "time/update": Metric("s", "gradients, probe and step", _LOOP),
    "time/evaluate": Metric("s", "evaluation on held-out prompts", _LOOP),
}


def describe(name: str) -> Metric | None:
  """Returns the entry of a metric, or None for an unknown name."""
  if name in METRICS:
    return METRICS[name]
  for pattern, metric in METRICS.items():
    parts = re.split(r"<\w+>", pattern)
    if re.fullmatch(".+".join(map(re.escape, parts)), name):
      return metric
  return None


def repeats(name: str) -> bool:
  """Whether a resumed run has the same value, bit for bit.

  Metrics that depend on the machine, such as seconds and bytes, do not.
  """
  group = name.partition("/")[0]
  return group not in ("time", "memory") and name not in _OF_THE_MACHINE


def page() -> str:
  """The text of `docs/metrics.md`."""
  lines = [
      "# Metrics",
      "",
      "Every line of a run's `metrics.jsonl` is a JSON object that holds",
      "`update`, the number of updates done, and metrics. TensorBoard, Weights",
      "& Biases and Trackio get the same names if the config asks for them",
      "(`config.log`). A non-finite number is written as `null`. A run that",
      "was killed and resumed has the same numbers, bit for bit, except for",
      "`time/`, `memory/`, `rollout/tokens_per_second` and",
      "`train/compilations`.",
      "",
      "KL divergences are in nats per generated token. A GiB is 2³⁰ bytes.",
      "",
      "This page is made by `python -m experiments.runs.metric_names`.",
  ]
  head = ("metric", "unit", "meaning", "computed in")
  for group, about in GROUPS.items():
    rows = [
        (
            f"`{name}`",
            metric.unit,
            metric.meaning,
            f"[`{metric.source}`](../experiments/{metric.source})",
        )
        for name, metric in METRICS.items()
        if name.startswith(f"{group}/")
    ]
    lines += ["", f"## `{group}/`: {about}", ""]
    lines.append(tables.markdown(head, rows).rstrip("\n"))
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  _cli.run(lambda names: print(page(), end=""))

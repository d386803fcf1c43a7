"""Tables and figures of update times, from saved measurements alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.timed_update import (
    BASELINE,
    OptimizerSetting,
    UpdateSize,
)
from experiments.reporting import figures, tables, units

# By rank, the share of the baseline's time that LoGRA should not exceed.
TARGET_RATIOS = {64: 0.75, 256: 0.85}


def summarize_times(
    result: Mapping[str, Any], baseline: Mapping[str, Any]
) -> dict[str, float]:
  """Summarizes the times of one optimizer.

  Args:
    result: The optimizer's result of `timed_update.time_updates`.
    baseline: The same of the baseline.

  Returns:
    `median` and `iqr` (interquartile range) in seconds; `ratio` and
    `cpu_ratio`, the ratios of medians of elapsed and of processor time to the
    baseline's.
  """
  low, median, high = np.percentile(result["seconds"], [25, 50, 75])

  def ratio(key: str) -> float:
    return float(np.median(result[key]) / np.median(baseline[key]))

  return {
      "median": float(median),
      "iqr": float(high - low),
      "ratio": ratio("seconds"),
      "cpu_ratio": ratio("cpu_seconds"),
  }


def speed_table(measurement: Mapping[str, Any]) -> str:
  """A saved measurement as a Markdown table."""
  head = [
      "optimizer",
      "median, s",
      "IQR, s",
      "of dense AdamW's",
      "to reach",
      "of its processor time",
      "first update, s",
      "temporaries, GiB",
  ]
  baseline = measurement["rows"][0]
  lines = []
  for result in measurement["rows"]:
    summary = summarize_times(result, baseline)
    target = _target_ratio(result)
    lines.append(
        [
            _label(result),
            f"{summary['median']:.2f}",
            f"{summary['iqr']:.2f}",
            f"{summary['ratio']:.2f}",
            None if target is None else f"≤ {target}",
            f"{summary['cpu_ratio']:.2f}",
            f"{result['first_seconds']:.2f}",
            f"{result['temporary_bytes'] / units.GIB:.2f}",
        ]
    )
  return tables.markdown(head, lines)


def _label(result: Mapping[str, Any]) -> str:
  return OptimizerSetting(result["optimizer"], result["rank"]).label


def _target_ratio(result: Mapping[str, Any]) -> float | None:
  if result["optimizer"] != "logra":
    return None
  return TARGET_RATIOS.get(result["rank"])


def speed_figure(measurement: Mapping[str, Any]) -> Any:
  """A saved measurement as bars: medians, quartiles and LoGRA's targets.

  Returns:
    A matplotlib `Figure`.
  """
  results, baseline = measurement["rows"], measurement["rows"][0]
  figure = figures.make_figure(8, 1.2 + 0.35 * len(results))
  axes = figure.subplots()
  for i, result in enumerate(results):
    low, median, high = np.percentile(result["seconds"], [25, 50, 75])
    is_logra = result["optimizer"] == "logra"
    axes.barh(i, median, color="tab:orange" if is_logra else "tab:blue")
    axes.plot([low, high], [i, i], "k", linewidth=2)
    target = _target_ratio(result)
    if target is not None:
      seconds = target * np.median(baseline["seconds"])
      axes.plot([seconds, seconds], [i - 0.45, i + 0.45], "r")
  axes.set_yticks(range(len(results)), [_label(result) for result in results])
  axes.invert_yaxis()
  size = UpdateSize(**measurement["size"])
  axes.set_title(
      f"{measurement['model']}, {size.sequences} sequences of {size.tokens}"
      f" tokens, {measurement['machine']['cpus']} cores"
  )
  axes.set_xlabel("seconds per update (black: quartiles; red: LoGRA's target)")
  axes.grid(axis="x", alpha=0.3)
  return figure


def growth_table(results: Sequence[Mapping[str, Any]]) -> str:
  """Results of `update_growth.measure_growth` as a Markdown table."""
  head = ["axis", "value", "optimizer", "median, s", "temporaries, MiB"]
  lines = [
      [
          result["axis"],
          result["value"],
          result["optimizer"],
          f"{np.median(result['seconds']):.3f}",
          f"{result['temporary_bytes'] / units.MIB:.1f}",
      ]
      for result in results
  ]
  return tables.markdown(head, lines)


def growth_figure(results: Sequence[Mapping[str, Any]]) -> Any:
  """Results of `update_growth.measure_growth`: one panel per axis.

  Time is on the left scale, memory of temporaries on the right one.

  Returns:
    A matplotlib `Figure`.
  """
  names = list(dict.fromkeys(result["axis"] for result in results))
  figure = figures.make_figure(11, 7)
  panels = figure.subplots(2, 2).reshape(-1)
  for axes, name in zip(panels, names, strict=True):
    memory = axes.twinx()
    for optimizer, color in ((BASELINE, "tab:blue"), ("logra", "tab:orange")):
      own = [
          result
          for result in results
          if (result["axis"], result["optimizer"]) == (name, optimizer)
      ]
      x = [result["value"] for result in own]
      seconds = [float(np.median(result["seconds"])) for result in own]
      mib = [result["temporary_bytes"] / units.MIB for result in own]
      axes.plot(x, seconds, "o-", color=color, label=f"{optimizer}, time")
      memory.plot(x, mib, "x--", color=color, label=f"{optimizer}, memory")
      axes.set_xticks(x)
    axes.set(xlabel=name, ylabel="seconds per update")
    memory.set_ylabel("temporaries, MiB")
    axes.set_ylim(bottom=0.0)
    memory.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
  lines, labels = axes.get_legend_handles_labels()
  more_lines, more_labels = memory.get_legend_handles_labels()
  axes.legend(lines + more_lines, labels + more_labels, loc="upper left")
  return figure

"""Tables of memory and time from saved measurements."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reporting import tables
from experiments.reporting.units import GIB
from experiments.studies.scale import sweep


def table(
    comparisons: sweep.Comparisons,
    peaks: Mapping[str, int],
    times: Sequence[Mapping[str, Any]],
) -> str:
  """Tabulates memory and time, each as a Markdown table.

  Args:
    comparisons: What is compared.
    peaks: Peak bytes by stem of the file.
    times: Results of `timed_update.time_updates`.
  """
  memory = memory_table(comparisons.memory, peaks)
  return f"{memory}\n{time_table(comparisons.time, times)}"


def memory_table(
    comparisons: Sequence[sweep.MemoryComparison], peaks: Mapping[str, int]
) -> str:
  """Tabulates the peak memory of an update per device.

  Args:
    comparisons: The lines. One is left out if a file of it does not exist.
    peaks: Peak bytes by stem of the file.
  """
  lines = []
  for one in comparisons:
    if one.other not in peaks or one.logra not in peaks:
      continue
    other, logra = peaks[one.other] / GIB, peaks[one.logra] / GIB
    published, cut = None, one.cut
    if one.published:
      published = f"{one.published[0]:.2f} → {one.published[1]:.2f}"
      if cut is None:
        cut = 100 * (one.published[1] / one.published[0] - 1)
    lines.append(
        [
            one.setting,
            published,
            None if cut is None else f"{cut:+.1f} %",
            f"{other:.2f} → {logra:.2f}",
            f"{100 * (logra / other - 1):+.1f} %",
        ]
    )
  head = ["LoGRA beside", "published, GiB", "change", "compiled, GiB", "change"]
  return tables.markdown(head, lines)


def time_table(
    comparisons: Sequence[sweep.TimeComparison],
    times: Sequence[Mapping[str, Any]],
) -> str:
  """Tabulates LoGRA's updates per time over those of other optimizers.

  Args:
    comparisons: The lines. One is left out if an optimizer was not timed.
    times: Results of `timed_update.time_updates`.
  """
  seconds = {(row["optimizer"], row["rank"]): row["seconds"] for row in times}
  lines = []
  for one in comparisons:
    if one.other not in seconds or one.logra not in seconds:
      continue
    other, logra = np.array(seconds[one.other]), np.array(seconds[one.logra])
    ratios = other / logra
    name, rank = one.logra
    lines.append(
        [
            f"{one.setting} ({name}, rank {rank})",
            one.published,
            f"{np.median(other) / np.median(logra):.2f}",
            f"{ratios.min():.2f}, {ratios.max():.2f}",
        ]
    )
  head = ["LoGRA's updates per time over those of", "published"]
  head += ["here, medians", "least and most of a repeat"]
  return tables.markdown(head, lines)

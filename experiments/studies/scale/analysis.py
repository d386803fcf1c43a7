"""Tables from saved rows of memory and of time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.studies.scale import sweep

_GIB = 2**30


def memory_table(
    comparisons: Sequence[sweep.Memory], peaks: Mapping[str, int]
) -> str:
  """Peak memory of an update per device, as a Markdown table.

  Args:
    comparisons: the rows; one whose files are not there is left out.
    peaks: bytes by the name of a file.
  """
  lines = [
      "| LoGRA beside | published, GiB | change | compiled, GiB | change |",
      "|---|---|---|---|---|",
  ]
  for one in comparisons:
    if one.other not in peaks or one.logra not in peaks:
      continue
    other, logra = peaks[one.other] / _GIB, peaks[one.logra] / _GIB
    published, cut = "-", one.cut
    if one.published:
      published = f"{one.published[0]:.2f} → {one.published[1]:.2f}"
      if cut is None:
        cut = 100 * (one.published[1] / one.published[0] - 1)
    lines.append(
        f"| {one.what} | {published} |"
        f" {'-' if cut is None else f'{cut:+.1f} %'} |"
        f" {other:.2f} → {logra:.2f} | {100 * (logra / other - 1):+.1f} % |"
    )
  return "\n".join(lines) + "\n"


def time_table(
    comparisons: Sequence[sweep.Time], rows: Sequence[dict[str, Any]]
) -> str:
  """Updates per time of LoGRA over another's, as a Markdown table.

  Args:
    comparisons: the rows; one that was not timed is left out.
    rows: of `bench.measure`.
  """
  seconds = {(row["optimizer"], row["rank"]): row["seconds"] for row in rows}
  lines = [
      "| LoGRA's updates per time over those of | published | here, medians |"
      " least and most of a repeat |",
      "|---|---|---|---|",
  ]
  for one in comparisons:
    if one.other not in seconds or one.logra not in seconds:
      continue
    other, logra = np.array(seconds[one.other]), np.array(seconds[one.logra])
    paired = other / logra
    name, rank = one.logra
    lines.append(
        f"| {one.what} ({name}, rank {rank}) | {one.published} |"
        f" {np.median(other) / np.median(logra):.2f} |"
        f" {paired.min():.2f}, {paired.max():.2f} |"
    )
  return "\n".join(lines) + "\n"

"""What is compared, and what was published about it."""

import dataclasses
from typing import NamedTuple

# An optimizer and its rank, None for a dense one.
TimedOptimizer = tuple[str, int | None]


@dataclasses.dataclass(frozen=True)
class MemoryComparison:
  """Compares the memory of LoGRA with that of another optimizer.

  Attributes:
    setting: Description of the setting.
    published: GiB of the other optimizer and of LoGRA, or None if unknown.
    cut: Published change in per cent, or None if it was not stated.
    other: Stem of the other optimizer's file, which
      `experiments.planning.memory_table` wrote.
    logra: Stem of LoGRA's file.
  """

  setting: str
  published: tuple[float, float] | None
  cut: float | None
  other: str
  logra: str


@dataclasses.dataclass(frozen=True)
class TimeComparison:
  """Compares LoGRA's updates per time with those of another optimizer.

  Attributes:
    setting: Description of the setting.
    published: The ratio, or what is known about it.
    other: Optimizer and rank of a result that
      `experiments.benchmarks.update_time` wrote.
    logra: Optimizer and rank of LoGRA's result.
  """

  setting: str
  published: str
  other: TimedOptimizer
  logra: TimedOptimizer


class Comparisons(NamedTuple):
  """What the tables compare, one line each.

  Attributes:
    memory: Lines of the table of memory.
    time: Lines of the table of times.
  """

  memory: tuple[MemoryComparison, ...]
  time: tuple[TimeComparison, ...]


def _h100(model: str, rest: str, devices: int = 4) -> str:
  """Returns the stem of the file of a Qwen2.5 model on H100."""
  return f"qwen2.5-{model}-h100-{devices}-{rest}"


_DENSE = "dense_adam-r256-float32-adam"
_AS_PUBLISHED = "logra-r256-float32-adam"
_OURS = "logra-r256-bfloat16-frozen"

MEMORY: tuple[MemoryComparison, ...] = (
    MemoryComparison(
        "1.5B, dense Adam, storage as published",
        None,
        -21.8,
        _h100("1.5b", _DENSE),
        _h100("1.5b", _AS_PUBLISHED),
    ),
    MemoryComparison(
        "1.5B, dense Adam, ours (bfloat16, embeddings frozen)",
        None,
        -21.8,
        _h100("1.5b", _DENSE),
        _h100("1.5b", _OURS),
    ),
    MemoryComparison(
        "7B, dense Adam, storage as published",
        (31.82, 17.29),
        -45.7,
        _h100("7b", _DENSE),
        _h100("7b", _AS_PUBLISHED),
    ),
    MemoryComparison(
        "7B, dense Adam, ours (bfloat16, embeddings frozen)",
        (31.82, 17.29),
        -45.7,
        _h100("7b", _DENSE),
        _h100("7b", _OURS),
    ),
    MemoryComparison(
        "7B, a peer's port (Qwen2.5-Math-7B, 4 FSDP ranks)",
        (36.13, 19.36),
        None,
        _h100("7b", _DENSE),
        _h100("7b", _AS_PUBLISHED),
    ),
    MemoryComparison(
        "1.5B, LoRA rank 256",
        (13.21, 7.18),
        None,
        _h100("1.5b", "lora-r256-bfloat16-frozen"),
        _h100("1.5b", _OURS),
    ),
    MemoryComparison(
        "27B (ours: 32B) on eight 80 GB H100, dense Adam",
        None,
        None,
        _h100("32b", _DENSE, 8),
        _h100("32b", _OURS, 8),
    ),
)

TIME: tuple[TimeComparison, ...] = (
    TimeComparison(
        "7B, dense Adam",
        "1.018 (25.73 against 25.28 an hour)",
        ("dense_adam", None),
        ("logra", 256),
    ),
    TimeComparison(
        "1.5B, LoRA rank 256", "below 1", ("lora", 256), ("logra", 256)
    ),
    TimeComparison(
        "rank 16, dense Adam", "-", ("dense_adam", None), ("logra", 16)
    ),
)

FULL = Comparisons(MEMORY, TIME)

# A small model, which `run.measure_small` measures on any machine.
SMALL_MODEL = "smollm2-135m"
SMALL_TARGET = "cpu:2"
SMALL_RANK = 16
SMALL = Comparisons(
    (
        MemoryComparison(
            "135M on two CPU devices, dense Adam",
            None,
            None,
            "dense_adam",
            "logra",
        ),
    ),
    (
        TimeComparison(
            "two layers", "-", ("dense_adam", None), ("logra", SMALL_RANK)
        ),
    ),
)

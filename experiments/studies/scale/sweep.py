"""What is compared with what, and what was published of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
  """Memory of LoGRA beside that of another optimizer.

  Attributes:
    what: the setting.
    published: GiB of the other and of LoGRA, None where only `cut` is known.
    cut: published change in per cent, None where it is not.
    other: name of the other's file of `experiments.planning.memory_table`.
    logra: name of LoGRA's.
  """

  what: str
  published: tuple[float, float] | None
  cut: float | None
  other: str
  logra: str


@dataclasses.dataclass(frozen=True)
class Time:
  """Updates in a time, LoGRA's over another optimizer's.

  Attributes:
    what: the setting.
    published: the ratio, or what is known of it.
    other: optimizer and rank of a row of `experiments.benchmarks.update_time`.
    logra: the same of LoGRA.
  """

  what: str
  published: str
  other: tuple[str, int | None]
  logra: tuple[str, int | None]


def _h100(model: str, rest: str, devices: int = 4) -> str:
  return f"qwen2.5-{model}-h100-{devices}-{rest}"


_DENSE = "dense_adam-r256-float32-adam"
_AS_PUBLISHED = "logra-r256-float32-adam"
_OURS = "logra-r256-bfloat16-frozen"

MEMORY: tuple[Memory, ...] = (
    Memory(
        "1.5B, dense Adam, storage as published",
        None,
        -21.8,
        _h100("1.5b", _DENSE),
        _h100("1.5b", _AS_PUBLISHED),
    ),
    Memory(
        "1.5B, dense Adam, ours (bfloat16, embeddings frozen)",
        None,
        -21.8,
        _h100("1.5b", _DENSE),
        _h100("1.5b", _OURS),
    ),
    Memory(
        "7B, dense Adam, storage as published",
        (31.82, 17.29),
        -45.7,
        _h100("7b", _DENSE),
        _h100("7b", _AS_PUBLISHED),
    ),
    Memory(
        "7B, dense Adam, ours (bfloat16, embeddings frozen)",
        (31.82, 17.29),
        -45.7,
        _h100("7b", _DENSE),
        _h100("7b", _OURS),
    ),
    Memory(
        "7B, a peer's port (Qwen2.5-Math-7B, 4 FSDP ranks)",
        (36.13, 19.36),
        None,
        _h100("7b", _DENSE),
        _h100("7b", _AS_PUBLISHED),
    ),
    Memory(
        "1.5B, LoRA rank 256",
        (13.21, 7.18),
        None,
        _h100("1.5b", "lora-r256-bfloat16-frozen"),
        _h100("1.5b", _OURS),
    ),
    Memory(
        "27B (ours: 32B) on eight 80 GB H100, dense Adam",
        None,
        None,
        _h100("32b", _DENSE, 8),
        _h100("32b", _OURS, 8),
    ),
)

TIME: tuple[Time, ...] = (
    Time(
        "7B, dense Adam",
        "1.018 (25.73 against 25.28 an hour)",
        ("dense_adam", None),
        ("logra", 256),
    ),
    Time("1.5B, LoRA rank 256", "below 1", ("lora", 256), ("logra", 256)),
    Time("rank 16, dense Adam", "-", ("dense_adam", None), ("logra", 16)),
)

# Rows of the same names, of a small model, measured on any machine.
SMALL_MODEL = "smollm2-135m"
SMALL_TARGET = "cpu:2"
SMALL_RANK = 16
SMALL_MEMORY: tuple[Memory, ...] = (
    Memory(
        "135M on two CPU devices, dense Adam", None, None, "dense_adam", "logra"
    ),
)
SMALL_TIME: tuple[Time, ...] = (
    Time("two layers", "-", ("dense_adam", None), ("logra", SMALL_RANK)),
)

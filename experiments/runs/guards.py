"""What watches over a run: it stops one that is lost, and warns of the rest.

All of it runs on the host, on numbers that are in the record anyway; where a
step must not be taken, the update itself has left it out.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
from typing import Any

import jax
import numpy as np

from experiments import _cli
from experiments.parallel import sharding

PyTree = Any
Row = Mapping[str, Any]
_Found = tuple[str, bool, str]  # A kind of trouble, whether it is there, words.

# Updates that a mean is taken of.
_WINDOW = 10
# Metrics that are not finite where something went wrong.
_FINITE = ("train/loss", "train/entropy", "kl/predicted", "kl/realised")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory", "OUT_OF_MEMORY")
# What to lower, the cheapest first.
_LOWER = {
    "load": "param_dtype='bfloat16'; or split the model with mesh.fsdp",
    "rollout": (
        "rollout.slots, rollout.max_new_tokens; set"
        " rollout.cache_dtype='int8'; or split the model with mesh.fsdp"
    ),
    "update": (
        "loss.micro_rows, loss.row_tokens, loss.chunk, kl.probe_responses; set"
        " remat=True; or split the model with mesh.fsdp"
    ),
    "evaluate": (
        "evaluate.prompts, rollout.slots; set rollout.cache_dtype='int8'; or"
        " split the model with mesh.fsdp"
    ),
}


class NonFiniteError(_cli.UserError):
  """Too many updates in a row had a number that is not finite."""


class OutOfMemoryError(_cli.UserError):
  """The device, or the host, has no room; says what to lower."""


class SkipGuard:
  """Ends a run whose updates are skipped one after the other.

  Attributes:
    in_a_row: updates with a number that is not finite, up to the last one.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      limit: int = 5,
      rows: Sequence[Row] = (),
  ):
    """Begins where the record ends.

    Args:
      workdir: directory of the run, where the offending batch is saved.
      limit: how many such updates in a row end the run, at least 1.
      rows: the record of the updates already done.

    Raises:
      ValueError: the limit is less than 1.
    """
    if limit < 1:
      raise ValueError(f"limit={limit} must be at least 1")
    self._workdir = pathlib.Path(workdir)
    self._limit = limit
    self.in_a_row = 0
    for row in filter(_is_update, rows):
      self._count(row)

  def observe(self, update: int, row: Row, batch: PyTree) -> None:
    """Looks at an update's metrics.

    Args:
      update: its number.
      row: its line of the record, None for what is not finite.
      batch: what it learned from, a tree of arrays; all processes call this.

    Raises:
      NonFiniteError: it is the last of `limit` in a row. The batch is then in
        `workdir/bad_batch-<update>.npz`.
    """
    self._count(row)
    if self.in_a_row < self._limit:
      return
    path = self._workdir / f"bad_batch-{update:06d}.npz"
    batch = sharding.fetch(batch)
    if sharding.is_first_process():
      leaves = jax.tree_util.tree_leaves_with_path(batch)
      np.savez(path, **{sharding.path_of(name): leaf for name, leaf in leaves})
    shown = ", ".join(f"{n}={row[n]}" for n in _FINITE if n in row)
    raise NonFiniteError(
        f"loss, gradient or KL was not finite in {self.in_a_row} updates in a"
        f" row, the last of them update {update} ({shown}). Its batch is in"
        f" {path}. Look there for rewards or log-probabilities that are not"
        " finite; else lower optimizer.learning_rate or kl.budget, or set"
        " dtype='float32', in a new --workdir"
    )

  def _count(self, row: Row) -> None:
    lost = any(row.get(name, 0.0) is None for name in _FINITE)
    lost = lost or bool(row.get("train/skipped"))
    self.in_a_row = self.in_a_row + 1 if lost else 0


class Watch:
  """Warns of rewards, lengths and entropies that go where runs go wrong.

  | warning | when, of means over 10 updates |
  |---|---|
  | reward collapse | below the best by half of it, and by 2 deviations |
  | growing responses | twice as long as in the first 10 updates |
  | cut-off responses | 90 % of the limit, and most do not end by themselves |
  | entropy collapse | a twentieth of that of the first 10 updates |

  Each is given once, and again only after 10 updates without its reason.
  """

  def __init__(self, *, max_new_tokens: int, rows: Sequence[Row] = ()):
    """Begins where the record ends.

    Args:
      max_new_tokens: limit of a response.
      rows: the record of the updates already done; nothing is said of them.
    """
    self._limit = max_new_tokens
    self._means: dict[str, _Mean] = collections.defaultdict(_Mean)
    self._quiet: dict[str, int] = collections.defaultdict(lambda: _WINDOW)
    for row in filter(_is_update, rows):
      self.observe(row)

  def observe(self, row: Row) -> list[str]:
    """The warnings that an update's line of the record gives rise to."""
    names = "train/reward", "rollout/length", "rollout/finished"
    for name in (*names, "train/entropy"):
      if row.get(name) is not None:
        self._means[name].add(row[name])
    found = (
        *self._reward(self._means["train/reward"]),
        *self._length(*(self._means[name] for name in names[1:])),
        *self._entropy(self._means["train/entropy"]),
    )
    return [text for kind, bad, text in found if self._is_new(kind, bad)]

  def _reward(self, reward: "_Mean") -> Iterator[_Found]:
    drop = reward.best - reward.now
    bad = drop > max(0.5 * abs(reward.best), 2 * reward.spread_at_best)
    yield "reward", bad, (
        f"reward collapse: {reward.now:.3g} in the last {_WINDOW} updates,"
        f" {reward.best:.3g} at best"
    )

  def _length(self, length: "_Mean", finished: "_Mean") -> Iterator[_Found]:
    yield "growth", length.now > 2 * length.first, (
        f"growing responses: {length.now:.3g} tokens in the last {_WINDOW}"
        f" updates, {length.first:.3g} in the first"
    )
    cut_off = length.now > 0.9 * self._limit and finished.now < 0.5
    yield "cut off", cut_off, (
        f"cut-off responses: {length.now:.3g} tokens in the last {_WINDOW}"
        f" updates, of at most {self._limit}; {finished.now:.0%} end by"
        " themselves. Raise rollout.max_new_tokens, or see rollout.overlong"
    )

  def _entropy(self, entropy: "_Mean") -> Iterator[_Found]:
    yield "entropy", entropy.now < 0.05 * entropy.first, (
        f"entropy collapse: {entropy.now:.2g} nats per token in the last"
        f" {_WINDOW} updates, {entropy.first:.2g} in the first"
    )

  def _is_new(self, kind: str, bad: bool) -> bool:
    """Whether to say it: not while its reason lasts."""
    quiet = self._quiet[kind]
    self._quiet[kind] = 0 if bad else quiet + 1
    return bad and quiet >= _WINDOW


class _Mean:
  """Means over the last updates: now, at first, and at best.

  NaN until there are enough, so that no comparison with it holds.
  """

  def __init__(self) -> None:
    self._values: collections.deque[float] = collections.deque(maxlen=_WINDOW)
    self.now = self.first = self.best = self.spread_at_best = float("nan")

  def add(self, value: float) -> None:
    self._values.append(value)
    if len(self._values) < _WINDOW:
      return
    self.now = float(np.mean(self._values))
    if np.isnan(self.first):
      self.first = self.now
    if not self.now <= self.best:
      self.best, self.spread_at_best = self.now, float(np.std(self._values))


def _is_update(row: Row) -> bool:
  """Whether a line of the record is of an update, and not of an evaluation."""
  return "train/loss" in row or "train/reward" in row


class CompileCounter:
  """Counts the programs that are compiled while it is entered.

  Attributes:
    count: programs so far.
    seconds: that the compiler took for them.
  """

  def __init__(self, *, settle: int = 10, late: int = 3):
    """`late` updates that compile, after the first `settle`, are a warning.

    One or two are not: a rollout has programs for fewer slots, each compiled
    when it is first needed.
    """
    self.count = 0
    self.seconds = 0.0
    self._settle = settle
    self._late = late
    self._updates = 0
    self._seen = 0

  def __enter__(self) -> "CompileCounter":
    jax.monitoring.register_event_duration_secs_listener(self._listen)
    return self

  def __exit__(self, *unused: Any) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, seconds: float, **unused: Any) -> None:
    if event == _COMPILED:
      self.count += 1
      self.seconds += seconds

  @contextlib.contextmanager
  def expected(self) -> Iterator[None]:
    """Around what may compile late and once, as a first evaluation does."""
    before = self.count
    try:
      yield
    finally:
      self._seen += self.count - before

  def observe(self) -> str | None:
    """Call after each update; a warning where it was compiled for, once."""
    self._updates += 1
    new, self._seen = self.count - self._seen, self.count
    if self._updates <= self._settle or not new:
      return None
    self._late -= 1
    if self._late:
      return None
    return (
        f"{new} programs compiled in the {self._updates}th update since the"
        " start, and not for the first time so late: shapes still change from"
        f" update to update, which costs {self.seconds / self.count:.1f} s each"
    )


@contextlib.contextmanager
def advise_on_memory(phase: str) -> Iterator[None]:
  """Turns out-of-memory errors into `OutOfMemoryError`, with advice.

  Args:
    phase: 'load', 'rollout', 'update' or 'evaluate'. JAX runs behind the
      program: what waits for an update's metrics is part of the update.
  """
  lower = _LOWER[phase]
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    text = str(error)
    exhausted = any(mark in text for mark in _EXHAUSTED)
    if not exhausted and not isinstance(error, MemoryError):
      raise
    reason = text.strip().splitlines()[0] if text.strip() else "no room"
    raise OutOfMemoryError(
        f"out of memory in the {phase} ({reason}). Lower, in this order:"
        f" {lower}. `python -m experiments.plan` tells beforehand what fits"
    ) from error

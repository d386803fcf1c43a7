"""Guards of a run: they end a run that is lost, and warn of other trouble.

They run on the host and read the numbers of the record. Skipping a step that
must not be taken is the business of the update itself.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
from typing import Any

import chex
import jax
import numpy as np

from experiments import _cli
from experiments.parallel import processes, sharding

Row = Mapping[str, Any]
# A kind of trouble, whether it is present, and the warning.
_Check = tuple[str, bool, str]

# Number of updates that a mean is taken over.
_WINDOW = 10
# Metrics that become non-finite if something goes wrong.
_FINITE = ("train/loss", "train/entropy", "kl/predicted", "kl/realised")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory", "OUT_OF_MEMORY")
# What to lower in each phase, the cheapest first.
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
  """Too many consecutive updates were not finite."""


class OutOfMemoryError(_cli.UserError):
  """The device or the host is out of memory; the message says what to lower."""


class SkipGuard:
  """Ends a run after too many consecutive non-finite updates.

  Attributes:
    in_a_row: Number of consecutive non-finite updates up to the last one.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      limit: int = 5,
      rows: Sequence[Row] = (),
  ):
    """Starts where the record ends.

    Args:
      workdir: Directory of the run; the offending batch is saved there.
      limit: Number of consecutive non-finite updates that end the run, at least
        1.
      rows: The record of the updates already done.

    Raises:
      ValueError: If the limit is below 1.
    """
    if limit < 1:
      raise ValueError(f"limit={limit} must be at least 1")
    self._workdir = pathlib.Path(workdir)
    self._limit = limit
    self.in_a_row = 0
    for row in filter(_is_update, rows):
      self._count(row)

  def observe(self, update: int, row: Row, batch: chex.ArrayTree) -> None:
    """Checks the metrics of an update. All processes call this.

    Args:
      update: The update's number.
      row: Its line of the record, with None for non-finite values.
      batch: The arrays that it learned from.

    Raises:
      NonFiniteError: If it is the last of `limit` in a row. The batch is then
        in `workdir/bad_batch-<update>.npz`.
    """
    self._count(row)
    if self.in_a_row < self._limit:
      return
    path = self._workdir / f"bad_batch-{update:06d}.npz"
    batch = sharding.fetch(batch)
    if processes.is_first_process():
      leaves = jax.tree_util.tree_leaves_with_path(batch)
      np.savez(path, **{sharding.path_of(name): leaf for name, leaf in leaves})
    shown = ", ".join(f"{n}={row[n]}" for n in _FINITE if n in row)
    raise NonFiniteError(
        f"loss, gradient or KL was not finite in {self.in_a_row} updates in a"
        f" row, the last of them update {update} ({shown}). Its batch is in"
        f" {path}. Look there for rewards or log-probabilities that are not"
        " finite; otherwise lower optimizer.learning_rate or kl.budget, or set"
        " dtype='float32', in a new --workdir"
    )

  def _count(self, row: Row) -> None:
    lost = any(row.get(name, 0.0) is None for name in _FINITE)
    lost = lost or bool(row.get("train/skipped"))
    self.in_a_row = self.in_a_row + 1 if lost else 0


class Watch:
  """Warns when reward, length or entropy show that a run goes wrong.

  | warning | condition, on means over 10 updates |
  |---|---|
  | reward collapse | below the best mean by half of it and by 2 deviations |
  | growing responses | over twice as long as in the first 10 updates |
  | cut-off responses | over 90 % of the limit, and most reach the limit |
  | entropy collapse | below a twentieth of that in the first 10 updates |

  A warning is repeated only after 10 updates without its cause.
  """

  def __init__(self, *, max_new_tokens: int, rows: Sequence[Row] = ()):
    """Starts where the record ends.

    Args:
      max_new_tokens: Longest response in tokens.
      rows: The record of the updates already done, which cause no warnings.
    """
    self._limit = max_new_tokens
    self._means: dict[str, _Mean] = collections.defaultdict(_Mean)
    self._quiet: dict[str, int] = collections.defaultdict(lambda: _WINDOW)
    for row in filter(_is_update, rows):
      self.observe(row)

  def observe(self, row: Row) -> list[str]:
    """Returns the warnings that an update's line of the record causes."""
    names = "train/reward", "rollout/length", "rollout/finished"
    for name in (*names, "train/entropy"):
      if row.get(name) is not None:
        self._means[name].add(row[name])
    checks = (
        *self._reward(self._means["train/reward"]),
        *self._length(*(self._means[name] for name in names[1:])),
        *self._entropy(self._means["train/entropy"]),
    )
    return [text for kind, bad, text in checks if self._is_new(kind, bad)]

  def _reward(self, reward: "_Mean") -> Iterator[_Check]:
    drop = reward.best - reward.now
    bad = drop > max(0.5 * abs(reward.best), 2 * reward.spread_at_best)
    yield "reward", bad, (
        f"reward collapse: {reward.now:.3g} in the last {_WINDOW} updates,"
        f" {reward.best:.3g} at best"
    )

  def _length(self, length: "_Mean", finished: "_Mean") -> Iterator[_Check]:
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

  def _entropy(self, entropy: "_Mean") -> Iterator[_Check]:
    yield "entropy", entropy.now < 0.05 * entropy.first, (
        f"entropy collapse: {entropy.now:.2g} nats per token in the last"
        f" {_WINDOW} updates, {entropy.first:.2g} in the first"
    )

  def _is_new(self, kind: str, bad: bool) -> bool:
    """Whether to warn: not while the cause persists."""
    quiet = self._quiet[kind]
    self._quiet[kind] = 0 if bad else quiet + 1
    return bad and quiet >= _WINDOW


class _Mean:
  """Means over the last updates: now, at first, and at best.

  NaN until there are enough values, so that every comparison is false.
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
  """Whether a line of the record is an update, not an evaluation."""
  return "train/loss" in row or "train/reward" in row


class CompileCounter:
  """Context manager that counts compiled programs.

  Attributes:
    count: Number of programs so far.
    seconds: Time that the compiler took for them.
  """

  def __init__(self, *, settle: int = 10, late: int = 3):
    """Sets when late compilation is worth a warning.

    Args:
      settle: Number of updates after which compilation counts as late.
      late: Number of updates that compile late before there is a warning. One
        or two are normal: a rollout compiles programs for fewer slots when it
        first needs them.
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
    """Excuses what is compiled inside, such as a first evaluation."""
    before = self.count
    try:
      yield
    finally:
      self._seen += self.count - before

  def observe(self) -> str | None:
    """Call after each update; returns a warning, once, or None."""
    self._updates += 1
    new, self._seen = self.count - self._seen, self.count
    if self._updates <= self._settle or not new:
      return None
    self._late -= 1
    if self._late:
      return None
    return (
        f"{new} programs compiled in the {self._updates}th update since the"
        " start, and repeatedly so late: shapes still change from update to"
        f" update, which costs {self.seconds / self.count:.1f} s each"
    )


@contextlib.contextmanager
def advise_on_memory(phase: str) -> Iterator[None]:
  """Turns out-of-memory errors into `OutOfMemoryError` with advice.

  Args:
    phase: 'load', 'rollout', 'update' or 'evaluate'. JAX runs asynchronously,
      so waiting for the metrics of an update is part of the update.
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
        f" {lower}. `python -m experiments.plan` says in advance what fits"
    ) from error

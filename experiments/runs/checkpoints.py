"""Checkpoints that are either whole or not there.

Orbax writes a checkpoint into a folder with a temporary name, the SHA-256
hashes of its files are added, and a rename publishes it. A kill at any moment
leaves earlier checkpoints untouched. A checkpoint that is damaged later is
detected by its hashes, and the one before it is used.

A single process writes in the background, from a copy of the state in host
memory, while training continues. With several processes, all of them wait.
"""

from collections.abc import Callable
from concurrent import futures
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
from typing import Any

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import _cli
from experiments.parallel import processes, sharding
from experiments.reporting.units import GIB

_MANIFEST = "manifest.json"
_SCORE = "score.json"
_TEMPORARY = ".tmp-"


class CheckpointError(_cli.UserError):
  """A checkpoint could not be written, or none of them can be read."""


class SaveTimer:
  """Decides after which updates a checkpoint is due."""

  def __init__(self, *, every: int, minutes: float, start: float):
    """Starts the clock.

    Args:
      every: A checkpoint is due after every update that is a multiple of this;
        0 means none is due by updates.
      minutes: A checkpoint is due this many minutes after the last one; 0 means
        none is due by time.
      start: The current time in seconds, on the clock that `due` is given.

    Raises:
      ValueError: If a number is negative.
    """
    for name, value in (("every", every), ("minutes", minutes)):
      if not 0 <= value < math.inf:
        raise ValueError(f"checkpoint.{name}={value} must be at least 0")
    self._every = every
    self._minutes = minutes
    self._last = start

  def due(self, update: int, now: float) -> bool:
    """Whether to save after `update`; if so, the clock restarts."""
    by_count = self._every and update % self._every == 0
    by_time = self._minutes and now - self._last >= 60 * self._minutes
    if by_count or by_time:
      self._last = now
    return bool(by_count or by_time)


class Checkpoints:
  """The checkpoints of one run: `directory/<update, six digits>/`.

  As a context manager, waits on exit until the last one is written.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      keep: int = 2,
      background: bool = False,
  ):
    """Opens `directory`, for reading too while another process writes to it.

    Args:
      directory: Where the checkpoints are; created if it does not exist.
      keep: Number of the newest checkpoints to keep, at least 1. With 2 or more
        there is one to fall back to if the newest is damaged. The one with the
        highest score is kept in addition. The disk needs room for one more.
      background: Whether `save` returns while the checkpoint is still being
        written; ignored with several processes.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, got {keep}")
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._writer: futures.Executor | None = None
    if background and jax.process_count() == 1:
      self._writer = futures.ThreadPoolExecutor(max_workers=1)
    self._writing: futures.Future[None] | None = None
    if processes.is_first_process():
      self._directory.mkdir(parents=True, exist_ok=True)
    processes.wait_for_all("made")
    self._scores = {
        update: score
        for update in self.updates()
        if (score := _read_score(self._path(update))) is not None
    }

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    try:
      self.wait()
    except CheckpointError:
      if error is None:  # Otherwise that error ends the run.
        raise

  def updates(self) -> list[int]:
    """Update numbers of the existing checkpoints, ascending."""
    names = [path.name for path in self._directory.iterdir()]
    return sorted(int(name) for name in names if name.isdigit())

  def best(self) -> tuple[int, float] | None:
    """Update and score of the checkpoint with the highest score.

    The earliest of equals wins; a checkpoint still being written counts.

    Returns:
      None if no checkpoint has a score.
    """
    if not self._scores:
      return None
    return min(self._scores.items(), key=lambda item: (-item[1], item[0]))

  def save(
      self, update: int, state: chex.ArrayTree, score: float | None = None
  ) -> None:
    """Writes `state` as the checkpoint of `update`.

    All processes call this and write their parts into one directory. The arrays
    may be donated or changed as soon as it returns. A checkpoint of the same
    update is replaced. Later ones are removed: they were damaged and skipped.

    Args:
      update: Number of updates done, which names the checkpoint.
      state: A tree of JAX or NumPy arrays.
      score: The higher, the better; a non-finite score is ignored.

    Raises:
      CheckpointError: If this checkpoint, or with `background` the one before,
        could not be written. Existing checkpoints are untouched.
    """
    self.wait()
    if score is not None and math.isfinite(score):
      self._scores[update] = float(score)
    else:
      self._scores.pop(update, None)
    if self._writer is None:
      self._write(update, state)
    else:
      copy = jax.tree.map(np.array, state)
      self._writing = self._writer.submit(self._write, update, copy)

  def wait(self) -> None:
    """Waits until everything is on disk.

    Raises:
      CheckpointError: If it could not be written.
    """
    writing, self._writing = self._writing, None
    if writing is not None:
      writing.result()

  def _write(self, update: int, state: chex.ArrayTree) -> None:
    """Writes one checkpoint completely, or leaves nothing of it."""
    final = self._path(update)
    temporary = self._directory / f"{_TEMPORARY}{final.name}"
    try:
      if processes.is_first_process():
        # Including what a kill left half-written.
        for old in self._directory.glob(f"{_TEMPORARY}*"):
          shutil.rmtree(old)
        temporary.mkdir()
      processes.wait_for_all("made")
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(temporary / "state", state)
        checkpointer.wait_until_finished()
      processes.wait_for_all("written")
      if processes.is_first_process():
        self._publish(temporary, final)
      processes.wait_for_all("published")
    # Errors of the system, Orbax and TensorStore share no base class.
    except Exception as error:
      self._scores.pop(update, None)
      shutil.rmtree(temporary, ignore_errors=True)
      raise CheckpointError(self._cannot_write(update, state, error)) from error

  def _publish(self, temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Publishes what was written, and removes checkpoints not to be kept."""
    update = int(final.name)
    score = self._scores.get(update)
    _write_synced(temporary / _SCORE, json.dumps({"score": score}))
    _write_synced(temporary / _MANIFEST, json.dumps(_hashes(temporary)))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync(self._directory)
    before = [other for other in self.updates() if other <= update]
    kept = set(before[-self._keep :])
    best = self.best()
    if best is not None:
      kept.add(best[0])
    for old in set(self.updates()) - kept:
      shutil.rmtree(self._path(old))
      self._scores.pop(old, None)

  def _cannot_write(
      self, update: int, state: chex.ArrayTree, error: Exception
  ) -> str:
    """The message for a failed write, with a remedy."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self._directory).free
    existing = self.updates()
    return (
        f"the checkpoint of update {update} ({size / GIB:.2f} GiB) could not"
        f" be written to {self._directory} ({free / GIB:.2f} GiB free):"
        f" {_reason(error)}. Free space there, or lower config.checkpoint.keep"
        f" ({self._keep}), and run the same command again: it resumes from "
        + (
            f"the checkpoint of update {existing[-1]}"
            if existing
            else "the start"
        )
    )

  def restore(
      self,
      template: chex.ArrayTree,
      report: Callable[[str], None] = print,
  ) -> tuple[int, chex.ArrayTree] | None:
    """Restores the newest checkpoint that is not damaged.

    Args:
      template: A tree of arrays, or of `jax.ShapeDtypeStruct`, with the
        structure, shapes, dtypes and shardings to restore to.
      report: Called with a line for each damaged checkpoint that is skipped.

    Returns:
      Its update number and its state; None if there are no checkpoints.

    Raises:
      CheckpointError: If all checkpoints are damaged.
    """
    self.wait()
    updates = self.updates()
    for update in reversed(updates):
      problem = _damage(self._path(update))
      if problem is None:
        return update, _restore(self._path(update) / "state", template)
      report(
          f"checkpoint {self._path(update)} is damaged ({problem}); falling"
          " back to the one before"
      )
      self._scores.pop(update, None)
    if updates:
      raise CheckpointError(
          f"all checkpoints in {self._directory} are damaged; delete the"
          " folder to start the run over"
      )
    return None

  def load(self, update: int) -> dict[str, np.ndarray]:
    """Reads the arrays of one checkpoint by path, without a template.

    Raises:
      CheckpointError: If it does not exist or is damaged.
    """
    self.wait()
    problem = _damage(self._path(update))
    if problem is not None:
      raise CheckpointError(
          f"checkpoint {self._path(update)} cannot be read ({problem})"
      )
    with ocp.StandardCheckpointer() as checkpointer:
      tree = checkpointer.restore(self._path(update) / "state")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {sharding.path_of(path): np.asarray(leaf) for path, leaf in leaves}

  def _path(self, update: int) -> pathlib.Path:
    return self._directory / f"{update:06d}"


def _restore(path: pathlib.Path, template: chex.ArrayTree) -> chex.ArrayTree:
  """Reads one Orbax checkpoint into the form of the template."""
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
  with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(path, abstract)
  as_wanted = lambda x, like: np.asarray(x) if _on_host(like) else x
  return jax.tree.map(as_wanted, state, template)


def _on_host(leaf: Any) -> bool:
  """Whether a leaf is a NumPy array, not a JAX array or a description."""
  return isinstance(leaf, np.ndarray | np.generic)


def _reason(error: Exception) -> str:
  """An error in a few words; TensorStore buries the system's in many."""
  text = str(error).strip() or type(error).__name__
  for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
    if os.strerror(code) in text:
      return os.strerror(code)
  return text.splitlines()[0]


def _read_score(folder: pathlib.Path) -> float | None:
  """The score of a checkpoint; None without one, or if it is unreadable."""
  try:
    return json.loads((folder / _SCORE).read_text())["score"]
  except (OSError, ValueError, KeyError):
    return None


def _hashes(folder: pathlib.Path) -> dict[str, str]:
  """SHA-256 of every file under `folder` except the manifest, by path."""
  hashes = {}
  for path in sorted(folder.rglob("*")):
    if path.is_file() and path.name != _MANIFEST:
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      hashes[str(path.relative_to(folder))] = digest
  return hashes


def _damage(folder: pathlib.Path) -> str | None:
  """What is wrong with a checkpoint's files; None if nothing is."""
  try:
    expected = json.loads((folder / _MANIFEST).read_text())
  except (OSError, ValueError) as error:
    return f"{_MANIFEST}: {error}"
  found = _hashes(folder)
  for name, digest in expected.items():
    if name not in found:
      return f"{name} is missing"
    if found[name] != digest:
      return f"{name} is not what was written"
  return None


def _write_synced(path: pathlib.Path, text: str) -> None:
  """Writes a file and waits until it is on disk."""
  with path.open("w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def _sync(folder: pathlib.Path) -> None:
  """Waits until a rename inside `folder` is on disk."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

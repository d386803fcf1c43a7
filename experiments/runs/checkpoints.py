"""Checkpoints that are either whole or not there.

A checkpoint is written by Orbax into a folder with a temporary name, a list of
the SHA-256 of its files is added, and a rename makes it count. A kill at any
moment leaves the checkpoints before it as they were, and a checkpoint that was
damaged later is told by its hashes and passed over for the one before.

Training goes on while one is written: what the state was is copied to the
host's memory first. One process alone does so; of several, all wait.
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

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import _cli
from experiments.parallel import sharding

PyTree = Any
_MANIFEST = "manifest.json"
_SCORE = "score.json"
_TEMPORARY = ".tmp-"


class CheckpointError(_cli.UserError):
  """A checkpoint could not be written, or none of those there can be read."""


class SaveTimer:
  """Says after which updates a checkpoint is due."""

  def __init__(self, *, every: int, minutes: float, start: float):
    """Counts from `start`.

    Args:
      every: due after each update that this divides; 0 for never.
      minutes: due when so much time passed since the last one; 0 for never.
      start: the time now, in seconds, by the clock that `due` is given.

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
    """Whether to save after `update`; one that is due restarts the clock."""
    by_count = self._every and update % self._every == 0
    by_time = self._minutes and now - self._last >= 60 * self._minutes
    if by_count or by_time:
      self._last = now
    return bool(by_count or by_time)


class Checkpoints:
  """The checkpoints of one run: `directory/<update, six digits>/`.

  As a context manager it waits, on leaving, for what is still being written.
  """

  def __init__(
      self,
      directory: str | os.PathLike[str],
      *,
      keep: int = 2,
      background: bool = False,
  ):
    """Looks at `directory`; one that others write to may be read.

    Args:
      directory: where the checkpoints are; made if it is not there.
      keep: how many of the newest are kept, at least 1. With 2 or more a
        damaged newest one has one to fall back to. The one with the highest
        score is kept beside them. Room is needed for one more.
      background: `save` returns while the checkpoint is being written. With
        several processes it never does.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, not {keep}")
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep
    self._writer: futures.Executor | None = None
    if background and jax.process_count() == 1:
      self._writer = futures.ThreadPoolExecutor(max_workers=1)
    self._writing: futures.Future[None] | None = None
    if sharding.is_first_process():
      self._directory.mkdir(parents=True, exist_ok=True)
    sharding.wait_for_all("made")
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
      if error is None:  # Else that one is what ends the run.
        raise

  def updates(self) -> list[int]:
    """The update counts of the checkpoints that are there, ascending."""
    names = [path.name for path in self._directory.iterdir()]
    return sorted(int(name) for name in names if name.isdigit())

  def best(self) -> tuple[int, float] | None:
    """Update and score of the one with the highest score, the first of equals.

    One that is still being written counts. `None` where none has a score.
    """
    if not self._scores:
      return None
    return min(self._scores.items(), key=lambda item: (-item[1], item[0]))

  def save(
      self, update: int, state: PyTree, score: float | None = None
  ) -> None:
    """Writes `state` as the checkpoint of `update`.

    All processes call it, and write their parts into the one directory. On
    return the arrays may be donated or changed. One of the same update is
    replaced, and later ones go: they were passed over as damaged.

    Args:
      update: updates done, the checkpoint's name.
      state: a tree of JAX or NumPy arrays.
      score: what tells the best one, the higher the better; one that is not
        finite does not count.

    Raises:
      CheckpointError: this one, or with `background` the one before, could not
        be written. Those that were there still are.
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
    """Waits until all is on disk; raises `CheckpointError` if it cannot be."""
    writing, self._writing = self._writing, None
    if writing is not None:
      writing.result()

  def _write(self, update: int, state: PyTree) -> None:
    """Writes one checkpoint, or leaves nothing of it."""
    final = self._path(update)
    temporary = self._directory / f"{_TEMPORARY}{final.name}"
    try:
      if sharding.is_first_process():
        # What a kill left half-written, too.
        for old in self._directory.glob(f"{_TEMPORARY}*"):
          shutil.rmtree(old)
        temporary.mkdir()
      sharding.wait_for_all("made")
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(temporary / "state", state)
        checkpointer.wait_until_finished()
      sharding.wait_for_all("written")
      if sharding.is_first_process():
        self._publish(temporary, final)
      sharding.wait_for_all("published")
    # The system's, Orbax's and TensorStore's errors have no class in common.
    except Exception as error:
      self._scores.pop(update, None)
      shutil.rmtree(temporary, ignore_errors=True)
      raise CheckpointError(self._cannot_write(update, state, error)) from error

  def _publish(self, temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Makes what was written count, and older checkpoints go."""
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

  def _cannot_write(self, update: int, state: PyTree, error: Exception) -> str:
    """What happened to a checkpoint, and what to do about it."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(self._directory).free
    there = self.updates()
    return (
        f"the checkpoint of update {update} ({size / 2**30:.2f} GiB) could not"
        f" be written to {self._directory} ({free / 2**30:.2f} GiB free):"
        f" {_reason(error)}. Free space there, or lower config.checkpoint.keep"
        f" ({self._keep}), and run the same command again: it goes on from "
        + (f"the checkpoint of update {there[-1]}" if there else "the start")
    )

  def restore(
      self,
      template: PyTree,
      report: Callable[[str], None] = print,
  ) -> tuple[int, PyTree] | None:
    """The newest whole checkpoint, or `None` where there is none at all.

    Args:
      template: a tree of arrays, or `jax.ShapeDtypeStruct`s, with the
        structure, shapes, dtypes and shardings to restore to.
      report: is told of each damaged checkpoint that was passed over.

    Returns:
      Its update count and its state.

    Raises:
      CheckpointError: there are checkpoints, and all of them are damaged.
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
          " folder to start the run anew"
      )
    return None

  def load(self, update: int) -> dict[str, np.ndarray]:
    """The arrays of one checkpoint by their names, without a template.

    Raises:
      CheckpointError: it is not there, or damaged.
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


def _restore(path: pathlib.Path, template: PyTree) -> PyTree:
  """Reads one Orbax checkpoint into the template's form."""
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
  with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(path, abstract)
  as_wanted = lambda x, like: np.asarray(x) if _on_host(like) else x
  return jax.tree.map(as_wanted, state, template)


def _on_host(leaf: Any) -> bool:
  """Whether it is a NumPy array, and no JAX array or description of one."""
  return isinstance(leaf, np.ndarray | np.generic)


def _reason(error: Exception) -> str:
  """An error in a few words, for TensorStore's hide the system's in many."""
  text = str(error).strip() or type(error).__name__
  for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
    if os.strerror(code) in text:
      return os.strerror(code)
  return text.splitlines()[0]


def _read_score(folder: pathlib.Path) -> float | None:
  """The score of a checkpoint; None where it has none or cannot be read."""
  try:
    return json.loads((folder / _SCORE).read_text())["score"]
  except (OSError, ValueError, KeyError):
    return None


def _hashes(folder: pathlib.Path) -> dict[str, str]:
  """SHA-256 of every file under `folder` but the manifest, by its name."""
  hashes = {}
  for path in sorted(folder.rglob("*")):
    if path.is_file() and path.name != _MANIFEST:
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      hashes[str(path.relative_to(folder))] = digest
  return hashes


def _damage(folder: pathlib.Path) -> str | None:
  """What is wrong with a checkpoint's files, or `None`."""
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
  """Waits until a rename within `folder` is on disk."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)

"""Checkpoints that are either whole or not there.

A checkpoint is written by Orbax into a folder with a temporary name, a list of
the SHA-256 of its files is added, and a rename makes it count. A kill at any
moment leaves the checkpoints before it as they were, and a checkpoint that was
damaged later is told by its hashes and passed over for the one before.
"""

from collections.abc import Callable
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments import sharding

PyTree = Any
_MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"


class Checkpoints:
  """The checkpoints of one run: `directory/<update, six digits>/`."""

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
    """Looks at `directory` and clears what a kill left half-written.

    Args:
      directory: where the checkpoints are; made if it is not there.
      keep: how many of the newest are kept, at least 1. With 2 or more a
        damaged newest one has one to fall back to.
    """
    if keep < 1:
      raise ValueError(f"keep must be at least 1, not {keep}")
    self._directory = pathlib.Path(directory).absolute()
    self._keep = keep
    if sharding.is_first_process():
      self._directory.mkdir(parents=True, exist_ok=True)
      for half_written in self._directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(half_written)
    sharding.wait_for_all("cleared")

  def updates(self) -> list[int]:
    """The update counts of the checkpoints that are there, ascending."""
    names = [path.name for path in self._directory.iterdir()]
    return sorted(int(name) for name in names if name.isdigit())

  def save(self, update: int, state: PyTree) -> pathlib.Path:
    """Writes `state` (a tree of arrays) as the checkpoint of `update`.

    All processes call it, and write their parts into the one directory.
    Blocks until it is on disk. One of the same update is replaced.
    """
    final = self._path(update)
    temporary = self._directory / f"{_TEMPORARY}{final.name}"
    if sharding.is_first_process():
      shutil.rmtree(temporary, ignore_errors=True)
      temporary.mkdir()
    sharding.wait_for_all("made")
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(temporary / "state", state)
      checkpointer.wait_until_finished()
    sharding.wait_for_all("written")
    if sharding.is_first_process():
      self._publish(temporary, final)
    sharding.wait_for_all("published")
    return final

  def _publish(self, temporary: pathlib.Path, final: pathlib.Path) -> None:
    """Makes what was written count, and older checkpoints go."""
    _write_synced(temporary / _MANIFEST, json.dumps(_hashes(temporary)))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync(self._directory)
    for old in self.updates()[: -self._keep]:
      shutil.rmtree(self._path(old))

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
      RuntimeError: there are checkpoints, and all of them are damaged.
    """
    updates = self.updates()
    for update in reversed(updates):
      problem = _damage(self._path(update))
      if problem is None:
        return update, _restore(self._path(update) / "state", template)
      report(
          f"checkpoint {self._path(update)} is damaged ({problem}); falling"
          " back to the one before"
      )
    if updates:
      raise RuntimeError(
          f"all checkpoints in {self._directory} are damaged; delete the"
          " folder to start the run anew"
      )
    return None

  def _path(self, update: int) -> pathlib.Path:
    return self._directory / f"{update:06d}"


def _restore(path: pathlib.Path, template: PyTree) -> PyTree:
  """Reads one Orbax checkpoint into the template's form."""
  abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(path, abstract)


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

"""The directory of a run, which belongs to one config, and signals to stop."""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import signal
import tempfile
import threading
from typing import Any

import ml_collections

# Folder in a run that holds everything of its model except the weights.
MODEL = "model"

_CONFIG = "config.json"
# A run may continue on other devices: its updates are the same there.
_MOVABLE = "mesh."


def claim(
    directory: str | os.PathLike[str], config: ml_collections.ConfigDict
) -> pathlib.Path:
  """Claims a directory for a config, before anything slow is done.

  Args:
    directory: Directory of the run; created if it does not exist.
    config: The run's config, which is written to `directory/config.json`. A
      config that differs in `mesh` only is the same run on other devices.

  Returns:
    The directory's absolute path.

  Raises:
    ValueError: If the directory cannot be written, or belongs to another
      config.
  """
  path = pathlib.Path(directory).absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise ValueError(
        f"--workdir={directory} cannot be written ({error}); choose a"
        " directory that can be"
    ) from error
  mine = json.loads(config.to_json())
  if (path / _CONFIG).exists():
    _check_same(path, load_config(path), mine)
    return path
  text = json.dumps(mine, indent=2, sort_keys=True) + "\n"
  temporary = path / f".{_CONFIG}"
  temporary.write_text(text)
  os.replace(temporary, path / _CONFIG)
  return path


def load_config(
    directory: str | os.PathLike[str],
) -> ml_collections.ConfigDict:
  """Reads the config of the run in `directory`; it is locked.

  Raises:
    ValueError: If there is no run in the directory.
  """
  path = pathlib.Path(directory) / _CONFIG
  if not path.exists():
    raise ValueError(
        f"{directory} holds no run ({_CONFIG} is missing); pass the --workdir"
        " of a training run"
    )
  config = ml_collections.ConfigDict(_with_tuples(json.loads(path.read_text())))
  return config.lock()


def _with_tuples(value: Any) -> Any:
  """Turns lists back into tuples, which JSON does not have."""
  if isinstance(value, dict):
    return {name: _with_tuples(x) for name, x in value.items()}
  return tuple(value) if isinstance(value, list) else value


def _check_same(
    path: pathlib.Path, theirs: ml_collections.ConfigDict, mine: dict[str, Any]
) -> None:
  """Raises ValueError with the differences between two configs, if any."""
  there = _flatten(json.loads(theirs.to_json()))
  here = _flatten(mine)
  lines = [
      f"  {name}: {there.get(name, '(none)')!r} there,"
      f" {here.get(name, '(none)')!r} now"
      for name in sorted(there.keys() | here.keys())
      if there.get(name, ...) != here.get(name, ...)
      and not name.startswith(_MOVABLE)
  ]
  if lines:
    raise ValueError(
        f"--workdir={path} holds a run with another config:\n"
        + "\n".join(lines)
        + "\nChoose another --workdir, delete this one, or use its config."
    )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Flattens nested dicts into one with dotted names."""
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat.update(_flatten(value, f"{prefix}{name}."))
    else:
      flat[prefix + name] = value
  return flat


class Stop:
  """Is true once the run was asked to stop; `signal` says by which signal."""

  def __init__(self) -> None:
    self.signal: int | None = None

  def __bool__(self) -> bool:
    return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
  """Turns the first Ctrl-C or SIGTERM into a request to stop.

  A second signal has its usual effect. Python allows signal handlers only in
  the main thread; elsewhere, as on some notebook servers, signals act at once.
  """
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return
  names = (signal.SIGINT, signal.SIGTERM)
  before = {number: signal.getsignal(number) for number in names}

  def handle(number: int, frame: Any) -> None:
    del frame
    stop.signal = number
    name = signal.Signals(number).name
    # A handler may interrupt print(): write to the descriptor instead.
    message = f"\n{name}: finishing this update, then saving (again: at once)\n"
    os.write(2, message.encode())
    restore()

  def restore() -> None:
    for number, handler in before.items():
      signal.signal(number, handler)

  for number in names:
    signal.signal(number, handle)
  try:
    yield stop
  finally:
    restore()

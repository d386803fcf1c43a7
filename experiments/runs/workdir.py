"""What a run needs from its directory and from the operating system."""

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

# Folder in a run that describes its model: all but the weights.
MODEL = "model"

_CONFIG = "config.json"
# A run may go on on other devices: its updates are the same there.
_MOVABLE = "mesh."


def claim(
    directory: str | os.PathLike[str], config: ml_collections.ConfigDict
) -> pathlib.Path:
  """Makes a directory this config's own, before anything slow is done.

  Args:
    directory: where the run will live; made if it is not there.
    config: the run's config. It is written to `directory/config.json`. One
      that differs in `config.mesh` only is the same run, on other devices.

  Returns:
    The directory's absolute path.

  Raises:
    ValueError: the directory cannot be written, or belongs to another config.
  """
  path = pathlib.Path(directory).absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise ValueError(
        f"--workdir={directory} cannot be written ({error}); choose a"
        " directory that can"
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
  """The locked config of the run in `directory`.

  Raises:
    ValueError: there is no run in it.
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
  """What a config had before it was JSON, which has lists alone."""
  if isinstance(value, dict):
    return {name: _with_tuples(x) for name, x in value.items()}
  return tuple(value) if isinstance(value, list) else value


def _check_same(
    path: pathlib.Path, theirs: ml_collections.ConfigDict, mine: dict[str, Any]
) -> None:
  """Raises with the difference if the directory's config is not ours."""
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
        + "\nChoose another --workdir, delete that one, or give its config."
    )


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one, with dotted names."""
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    if isinstance(value, dict):
      flat.update(_flatten(value, f"{prefix}{name}."))
    else:
      flat[prefix + name] = value
  return flat


class Stop:
  """Whether the run was asked to stop, and by which signal."""

  def __init__(self) -> None:
    self.signal: int | None = None

  def __bool__(self) -> bool:
    return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
  """Turns the first Ctrl-C or SIGTERM into a request to stop.

  The second one acts as it always does. Outside the main thread (some notebook
  servers) Python allows no handlers: there the signals act at once.
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
    # print() could be interrupted within itself: write to the descriptor.
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

"""Places beside `metrics.jsonl` that a run's numbers can go to.

Each is a package that need not be installed. A run that is resumed goes on in
the same place: its name is kept in the run's directory.
"""

from collections.abc import Mapping
import os
import pathlib
from typing import Any, Protocol
import uuid

from experiments import _optional

_RUN_ID = "run_id.txt"


class Tracker(Protocol):
  """Takes the numbers of an update."""

  def log(self, update: int, values: Mapping[str, float]) -> None:
    """Takes finite numbers by name; updates come in ascending order."""

  def close(self) -> None:
    """Sends what is not yet sent."""


def open_trackers(
    workdir: str | os.PathLike[str],
    *,
    resume_at: int,
    tensorboard: bool = False,
    wandb: str = "",
    trackio: str = "",
    config: Mapping[str, Any] | None = None,
) -> list[Tracker]:
  """Opens what is asked for.

  Args:
    workdir: directory of the run; must exist.
    resume_at: number of updates already done.
    tensorboard: write event files to `workdir/tensorboard`.
    wandb: project at Weights & Biases; '' for none. WANDB_MODE=offline writes
      to `workdir/wandb` alone, for `wandb sync`.
    trackio: project at Trackio; '' for none. Its database is where TRACKIO_DIR
      says.
    config: nested dict of the run's settings, shown beside it.

  Raises:
    ImportError: a package is not installed; names the extra that brings it.
    ValueError: Weights & Biases refuses, for example without a login.
  """
  workdir = pathlib.Path(workdir).absolute()
  settings = dict(config or {})
  trackers: list[Tracker] = []
  if tensorboard:
    trackers.append(_TensorBoard(workdir, resume_at))
  if wandb:
    trackers.append(_WandB(workdir, wandb, settings))
  if trackio:
    trackers.append(_Trackio(workdir, trackio, settings))
  return trackers


class _TensorBoard:
  """Event files; those after `resume_at` are hidden by TensorBoard itself."""

  def __init__(self, workdir: pathlib.Path, resume_at: int):
    module = _optional.require("tensorboardX", "train")
    self._events = module.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=resume_at + 1
    )

  def log(self, update: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._events.add_scalar(name, value, update)

  def close(self) -> None:
    self._events.close()


class _Hosted:
  """A run that its package keeps."""

  _run: Any

  def log(self, update: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=update)

  def close(self) -> None:
    self._run.finish()


class _WandB(_Hosted):
  """A run at Weights & Biases, which keeps the first of repeated updates."""

  def __init__(
      self, workdir: pathlib.Path, project: str, config: dict[str, Any]
  ):
    module = _optional.require("wandb", "wandb")
    try:
      self._run = module.init(
          project=project,
          id=_run_id(workdir),
          name=workdir.name,
          resume="allow",
          dir=str(workdir),
          config=config,
          # Capturing the terminal would tear the progress bar.
          settings=module.Settings(console="off"),
      )
    except module.errors.Error as error:
      raise ValueError(
          f"config.log.wandb={project!r}: {error} (or set WANDB_MODE=offline,"
          " or config.log.wandb='')"
      ) from error


class _Trackio(_Hosted):
  """A run at Trackio, which keeps repeated updates: they are the same."""

  def __init__(
      self, workdir: pathlib.Path, project: str, config: dict[str, Any]
  ):
    module = _optional.require("trackio", "trackio")
    self._run = module.init(
        project,
        name=f"{workdir.name}-{_run_id(workdir)}",
        resume="allow",
        config=config,
        embed=False,
        # Only what the run measures itself.
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _run_id(workdir: pathlib.Path) -> str:
  """A name for the run in `workdir` that no other run has."""
  path = workdir / _RUN_ID
  if not path.exists():
    temporary = path.with_suffix(".tmp")
    temporary.write_text(uuid.uuid4().hex[:12])
    os.replace(temporary, path)
  return path.read_text()

"""Experiment trackers that get a run's metrics besides `metrics.jsonl`.

Each needs an optional package. A resumed run continues in the same tracker run,
whose id is kept in the run's directory.
"""

from collections.abc import Mapping
import os
import pathlib
from typing import Any, Protocol
import uuid

from experiments import _optional

_RUN_ID = "run_id.txt"


class Tracker(Protocol):
  """Receives the metrics of updates."""

  def log(self, update: int, values: Mapping[str, float]) -> None:
    """Logs finite numbers by name; updates come in ascending order."""

  def close(self) -> None:
    """Sends what has not been sent yet."""


def open_trackers(
    workdir: str | os.PathLike[str],
    *,
    resume_at: int,
    tensorboard: bool = False,
    wandb: str = "",
    trackio: str = "",
    config: Mapping[str, Any] | None = None,
) -> list[Tracker]:
  """Opens the trackers that are asked for.

  Args:
    workdir: Directory of the run, which must exist.
    resume_at: Number of updates already done.
    tensorboard: Whether to write event files to `workdir/tensorboard`.
    wandb: Project at Weights & Biases; `""` for none. With WANDB_MODE=offline
      it is written to `workdir/wandb` only, for `wandb sync`.
    trackio: Project at Trackio; `""` for none. TRACKIO_DIR says where its
      database is.
    config: Nested dict of the run's config, which the trackers show.

  Raises:
    ImportError: If a package is not installed; names the extra to install.
    ValueError: If Weights & Biases refuses, for example without a login.
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
  """Event files; TensorBoard hides events after `resume_at`."""

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
  """A run in the database of a tracker."""

  _run: Any

  def log(self, update: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=update)

  def close(self) -> None:
    self._run.finish()


class _WandB(_Hosted):
  """A run at Weights & Biases, which ignores repeated updates."""

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
          # Capturing the terminal would disturb the progress bar.
          settings=module.Settings(console="off"),
      )
    except module.errors.Error as error:
      raise ValueError(
          f"config.log.wandb={project!r}: {error} (or set WANDB_MODE=offline,"
          " or config.log.wandb='')"
      ) from error


class _Trackio(_Hosted):
  """A run at Trackio, which keeps repeated updates; they are equal."""

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
        # Log only what the run measures itself.
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _run_id(workdir: pathlib.Path) -> str:
  """The id of the run in `workdir`, which is unique."""
  path = workdir / _RUN_ID
  if not path.exists():
    temporary = path.with_suffix(".tmp")
    temporary.write_text(uuid.uuid4().hex[:12])
    os.replace(temporary, path)
  return path.read_text()

"""Tests of the soak: that it kills runs, and notices the least difference."""

import itertools
import os
import signal
import sys

import numpy as np
import pytest

from experiments import _cli
from experiments.benchmarks import soak
from experiments.configs import tiny
from experiments.learning import batches
from experiments.runs import checkpoints, collect, loop, record
from tests.helpers.paths import ROOT


def test_the_plan_is_of_its_seed_and_within_its_bounds():
  plan = lambda seed: list(itertools.islice(soak.kill_plan(seed, 2, 5), 40))
  assert plan(0) == plan(0) != plan(1)
  assert all(2 <= delay <= 5 for delay, _ in plan(0))
  assert {number for _, number in plan(0)} == set(soak.SIGNALS)
  with pytest.raises(ValueError, match="shortest=3 and longest=2"):
    next(soak.kill_plan(0, 3, 2))


def _finished(workdir, flip=False, **changes):
  """Writes a finished run, with one bit or some metrics changed."""
  kernel = np.arange(6, dtype=np.float32)
  if flip:
    kernel.view(np.uint32)[3] ^= 1
  saved = checkpoints.Checkpoints(workdir / "checkpoints")
  saved.save(2, {"kernel": kernel, "count": np.int32(2)})
  with record.MetricsWriter(workdir, resume_at=0, tensorboard=False) as writer:
    writer.write(1, {"train/reward": 0.5, "time/update": 1.0})
    writer.write(2, {"train/reward": 0.25, "time/update": 1.0} | changes)


def test_a_difference_of_one_bit_is_seen(tmp_path):
  _finished(tmp_path / "a")
  _finished(tmp_path / "same", **{"time/update": 2.0})
  _finished(tmp_path / "bit", flip=True)
  _finished(tmp_path / "row", **{"train/reward": 0.25 + 2**-54})
  _finished(tmp_path / "more", **{"kl/realised": float("nan")})
  different = lambda name: soak.differences(tmp_path / "a", tmp_path / name)
  assert different("same") == []
  assert different("bit") == ["array kernel"]
  assert different("row") == ["update 2: train/reward"]
  assert different("more") == ["update 2: kl/realised"]


def test_a_run_that_fails_by_itself_ends_the_soak(tmp_path):
  command = [sys.executable, "-c", "import sys; sys.exit('error: no room')"]
  plan = soak.kill_plan(0, 0, 0)
  with pytest.raises(_cli.UserError, match=r"failed; see .*train\.log"):
    soak.run_with_kills(command, tmp_path, plan, tmp_path)
  assert "error: no room" in (tmp_path / "train.log").read_text()
  assert '"exit_code": 1' in (tmp_path / "log.jsonl").read_text()


def _terminate_once(function, call):
  """`function`, which sends this process SIGTERM in its `call`-th call."""
  calls = itertools.count(1)

  def wrapped(*args, **kwargs):
    if next(calls) == call:
      os.kill(os.getpid(), signal.SIGTERM)
    return function(*args, **kwargs)

  return wrapped


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """A run of six updates, with a checkpoint after every second one."""
  workdir = tmp_path_factory.mktemp("undisturbed")
  loop.train(tiny.get_config(), workdir)
  return workdir


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "update", "checkpoint"])
def test_sigterm_in_any_phase_stops_and_the_run_goes_on(
    undisturbed, tmp_path, monkeypatch, phase
):
  with monkeypatch.context() as patch:
    if phase == "rollout":
      patch.setattr(collect, "sample", _terminate_once(collect.sample, 3))
    elif phase == "update":
      # Each of the updates puts one batch on the devices, then takes its step.
      patch.setattr(batches, "put", _terminate_once(batches.put, 3))
    else:
      publish = _terminate_once(checkpoints.Checkpoints._publish, 1)
      patch.setattr(checkpoints.Checkpoints, "_publish", publish)
    stopped = loop.train(tiny.get_config(), tmp_path)
  assert stopped.stopped_by == signal.SIGTERM
  # The current update is finished and saved.
  assert stopped.update == 3 if phase != "checkpoint" else stopped.update < 6
  folder = tmp_path / "checkpoints"
  assert checkpoints.Checkpoints(folder).updates()[-1] == stopped.update
  assert not list(folder.glob(".tmp-*"))
  assert loop.train(tiny.get_config(), tmp_path).update == 6
  assert soak.differences(tmp_path, undisturbed) == []


@pytest.mark.slow
def test_a_tiny_run_survives(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  command = [sys.executable, "-m", "experiments.train"]
  command += ["--config=experiments/configs/tiny.py", "--config.updates=400"]
  command += ["--config.checkpoint.every=10", "--config.evaluate.every=100"]
  plan = itertools.chain(
      [(0.3, signal.SIGKILL), (0.6, signal.SIGTERM), (1.1, signal.SIGKILL)],
      itertools.repeat((1e6, signal.SIGKILL)),  # Never.
  )
  summary = soak.soak(command, tmp_path, tmp_path / "out", plan)
  assert summary["differences"] == []
  assert (summary["SIGKILL"], summary["SIGTERM"]) == (2, 1)
  assert (summary["starts"], summary["updates"]) == (4, 400)
  assert summary["rows"] == 400 + 5

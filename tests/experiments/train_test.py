"""Tests of the training program with a real, random, tiny model."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import optax
import pytest

from experiments import export
from experiments.learning import losses
from experiments.models import load
from experiments.rollouts import server as server_lib
from experiments.runs import checkpoints, loop, metric_names, record
from experiments.tasks import curriculum
from tests.helpers import trees
from tests.helpers.configs import tiny_config
from tests.helpers.paths import ROOT


def _assert_bit_equal(found, expected):
  found, expected = trees.leaves(found), trees.leaves(expected)
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name].tobytes() == value.tobytes(), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run of four updates: its directory and its result."""
  workdir = tmp_path_factory.mktemp("run")
  return workdir, loop.train(tiny_config(updates=4), workdir)


def test_a_run_trains_the_targets_and_only_them(finished):
  _, result = finished
  assert result.update == 4 and result.stopped_by is None
  before = trees.leaves(load.for_run(tiny_config()).params)
  after = trees.leaves(result.state.params)
  changed = {name for name in before if (before[name] != after[name]).any()}
  assert changed == {name for name in before if "_proj" in name}


def test_a_run_leaves_a_record_and_checkpoints(finished):
  workdir, result = finished
  rows = record.read_rows(workdir / "metrics.jsonl")
  updates, rewards = record.column(rows, "train/reward")
  assert updates == [1, 2, 3, 4]
  assert all(0 <= reward <= 1 for reward in rewards)
  # Before, at the third (config.evaluate.every) and at the end.
  assert sorted(result.accuracy) == [0, 3, 4]
  norms = record.column(rows, "eval/weight_norm")[1]
  expected = float(optax.tree.norm(result.state.params))
  np.testing.assert_allclose(norms[-1], expected, rtol=1e-5)
  assert checkpoints.Checkpoints(workdir / "checkpoints").updates() == [3, 4]
  lengths = record.column(rows, "rollout/length")[1]
  assert all(1 <= length <= 2 for length in lengths)  # Tokens.


def test_predicted_and_realised_kl_agree_within_the_budget(finished):
  rows = record.read_rows(finished[0] / "metrics.jsonl")
  column = lambda name: np.array(record.column(rows, f"kl/{name}")[1])
  # Without a right answer there is nothing to learn, and no step.
  assert (column("predicted") > 0).sum() >= 2
  np.testing.assert_allclose(column("realised"), column("predicted"), rtol=0.25)
  assert (column("predicted") <= 1.001 * column("budget")).all()
  assert not column("skipped").any()


def test_a_finished_run_is_not_run_again(finished):
  workdir, result = finished
  before = (workdir / "metrics.jsonl").read_text()
  again = loop.train(tiny_config(updates=4), workdir)
  assert again.state is None
  assert (again.update, again.accuracy) == (4, result.accuracy)
  assert (workdir / "metrics.jsonl").read_text() == before


def test_the_exported_directory_holds_the_trained_parameters(
    finished, tmp_path
):
  workdir, result = finished
  assert export.export(workdir, tmp_path / "hf") == 4
  loaded = load.from_path(tmp_path / "hf")
  _assert_bit_equal(loaded.params, result.state.params)
  text = "What is 3 + 5?"
  assert loaded.tokenizer.encode(text) == load.for_run(
      tiny_config()
  ).tokenizer.encode(text)


def test_nothing_to_export_is_an_error(tmp_path):
  with pytest.raises(ValueError, match="holds no run"):
    export.export(tmp_path, tmp_path / "hf")


def test_several_steps_on_a_rollout(tmp_path):
  """Ratios are measured from the policy that sampled, in every step."""
  config = tiny_config(
      **{
          "updates": 2,
          "loss.minibatches": 2,
          "loss.epochs": 2,
          "loss.reference_kl": 0.1,
          "loss.clip_high": 10.0,
          "kl.budget": 1e-2,
          "kl.final_budget": 1e-2,
          "rollout.curriculum": 30,
          "rollout.dynamic_tries": 1,
      }
  )
  result = loop.train(config, tmp_path)
  assert result.update == 2 and int(result.state.update) == 8
  rows = record.read_rows(tmp_path / "metrics.jsonl")
  column = lambda name: record.column(rows, name)[1]
  # Later steps are off the policy; the first is not.
  assert all(1.01 < ratio < 3 for ratio in column("train/ratio_max"))
  # So far from the reference: nothing before the first step, more with each.
  near, far = column("train/reference_kl")
  assert 0 < near < far < 0.2
  for row in rows:
    for name in row:
      assert name == "update" or metric_names.describe(name), name
  # A run that is resumed has the curriculum that it had.
  state = {"curriculum": curriculum.init(30), **vars(result.state)}
  saved = checkpoints.Checkpoints(tmp_path / "checkpoints")
  _, restored = saved.restore(state)
  seen = restored["curriculum"].counts
  assert (seen > 0).sum() > 10 and seen.max() >= 16


def test_a_prompt_that_does_not_fit_is_an_error(tmp_path):
  with pytest.raises(
      ValueError, match="12 tokens, more than max_prompt_tokens=4"
  ):
    loop.train(tiny_config(**{"rollout.max_prompt_tokens": 4}), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_every_loss_trains(name, tmp_path):
  config = tiny_config(
      **{
          "updates": 3,
          "loss.name": name,
          "loss.minibatches": 2,
          "loss.correction": "sequence",
          "kl.mismatch": True,
          "rollout.overlong": "penalty",
          "rollout.overlong_buffer": 1,
      }
  )
  result = loop.train(config, tmp_path)
  rows = record.read_rows(tmp_path / "metrics.jsonl")
  column = lambda name: np.array(record.column(rows, name)[1])
  assert np.isfinite(column("train/loss")).all()
  assert not column("train/skipped").any() and result.update == 3
  # A penalty on length is a signal in every group.
  assert (column("kl/predicted") > 0).all()
  np.testing.assert_allclose(column("kl/realised"), column("kl/predicted"), 0.4)


@pytest.mark.slow
def test_a_run_that_samples_from_a_server_is_the_run_that_does_not(tmp_path):
  """The server loads each update's weights; log-probs come back with tokens."""
  config = tiny_config(**{"updates": 2, "loss.correction": "token"})
  engine = server_lib.Engine(load.for_run(config), "policy", load.from_path)
  with server_lib.Server(engine) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = tiny_config(
        **{
            "updates": 2,
            "loss.correction": "token",
            "rollout.server": server.url,
        }
    )
    result = loop.train(own, tmp_path)
    server.shutdown()
  assert result.update == 2
  rows = record.read_rows(tmp_path / "metrics.jsonl")
  gaps = record.column(rows, "train/off_policy_gap_max")[1]
  # Of the weights of the update before they would be 1e-2 apart.
  assert len(gaps) == 2 and max(gaps) < 1e-4
  assert engine.version == 2


UPDATES, EVERY = 60, 10
# Half the compile time; five processes compile the same.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def _start(workdir):
  """The program as a user starts it, with its output on a pipe."""
  command = [sys.executable, "-m", "experiments.train"]
  command += ["--config=experiments/configs/tiny.py", f"--workdir={workdir}"]
  command += [f"--config.updates={UPDATES}"]
  command += [f"--config.checkpoint.every={EVERY}"]
  command += ["--config.evaluate.every=1000"]
  return subprocess.Popen(
      command,
      cwd=ROOT,
      env={
          **os.environ,
          **_ENVIRONMENT,
          # Each start would compile the same programs.
          "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),
          "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
          "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
  )


def _read_until(process, text):
  """Reads the program's output up to a line with `text`."""
  seen = ""
  for line in process.stdout:
    seen += line
    if text in line:
      return
  raise AssertionError(f"ended before {text!r}:\n{seen}")


def _kill_while_saving(process, workdir):
  """SIGKILL while a checkpoint is half-written; whether that was hit."""
  folder = workdir / "checkpoints"
  while process.poll() is None:
    if list(folder.glob(".tmp-*")):
      process.kill()
      break
    time.sleep(0.001)
  process.communicate()
  return bool(list(folder.glob(".tmp-*")))


def _newest(workdir):
  saved = checkpoints.Checkpoints(workdir / "checkpoints")
  update = saved.updates()[-1]
  return update, saved.load(update)


def test_a_run_that_was_killed_ends_bit_equal_to_one_that_was_not(tmp_path):
  undisturbed = tmp_path / "undisturbed"
  process = _start(undisturbed)
  output, _ = process.communicate()
  assert process.returncode == 0, output
  assert (undisturbed / "run.png").exists()

  workdir = tmp_path / "killed"
  process = _start(workdir)
  _read_until(process, " 3/60")
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate()
  assert process.returncode == 128 + signal.SIGTERM, output
  assert "stopped by SIGTERM" in output
  stopped_at = checkpoints.Checkpoints(workdir / "checkpoints").updates()[-1]
  assert 3 <= stopped_at < UPDATES
  rows = record.read_rows(workdir / "metrics.jsonl")
  assert rows[-1]["update"] == stopped_at  # Saved, and no further.

  process = _start(workdir)
  _read_until(process, " 13/60")  # Between two checkpoints.
  process.kill()
  process.communicate()

  hit = any(_kill_while_saving(_start(workdir), workdir) for _ in range(3))
  assert hit, "no kill came while a checkpoint was being written"

  process = _start(workdir)
  output, _ = process.communicate()
  assert process.returncode == 0, output
  assert "resuming after update" in output
  (update, state), (_, expected) = _newest(workdir), _newest(undisturbed)
  assert update == UPDATES
  _assert_bit_equal(state, expected)
  rewards = [
      record.column(record.read_rows(w / "metrics.jsonl"), "train/reward")
      for w in (workdir, undisturbed)
  ]
  assert rewards[0] == rewards[1]
  assert rewards[0][0] == list(range(1, UPDATES + 1))

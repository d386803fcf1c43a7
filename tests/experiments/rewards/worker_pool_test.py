"""Tests of weighted rewards and of the processes that score responses."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from experiments import rewards, tasks

_BEHAVE = "tests.helpers.reward_functions:behave"


def _scored(completions, reward=_BEHAVE, **options):
  task = tasks.make_task("addition", 0)
  example = task.heldout()[0]
  with rewards.RewardWorkers(task, reward, **options) as pool:
    return pool.score([example] * len(completions), completions)


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_and_weights(workers):
  task = tasks.make_task("addition + 0.5*addition:2", 0)
  examples = [task.heldout()[0], task.heldout()[-1]] * 2
  right = [x.columns["answer"] for x in examples]
  completions = [right[0], f"It is {right[1]}", "no", f"{right[1]}1"]
  reward = "correctness + 0.1*format + 0.2*tests.helpers.reward_functions:short"
  with rewards.RewardWorkers(task, reward, workers=workers) as pool:
    scores = pool.score(examples, completions)
  parts = {
      "correctness": [1, 1, 0, 0],
      "format": [1, 0, 0, 1],
      "short": [1 / (1 + len(x)) for x in completions],
  }
  assert list(scores.parts) == list(parts)
  for name, values in parts.items():
    np.testing.assert_allclose(scores.parts[name], values, rtol=1e-6)
  total = np.asarray(parts["correctness"]) + 0.1 * np.asarray(parts["format"])
  total = total + 0.2 * np.asarray(parts["short"])
  np.testing.assert_allclose(scores.total, total, rtol=1e-6)
  assert scores.total.dtype == np.float32 and scores.total.shape == (4,)
  assert scores.parts["correctness"].mean() == 0.5
  assert scores.errors == 0
  assert scores.timeouts == 0


def test_what_goes_wrong_costs_its_response_only(caplog, capfd):
  completions = [
      "fine 1",
      "hang",
      "exit",
      "print 12",
      "spin",
      "crash",
      "raise",
      "read 123",
      "leave",
      "jax",
      "fine 1234",
  ]
  start = time.monotonic()
  scores = _scored(completions, f"2*{_BEHAVE}", workers=2, timeout=1.5)
  np.testing.assert_array_equal(scores.total, [2, 0, 0, 4, 0, 0, 0, 6, 0, 0, 8])
  assert (scores.timeouts, scores.errors) == (2, 4)
  said = " ".join(record.message for record in caplog.records)
  assert "no reward within 1.5 s" in said
  assert "its process ended with status 3" in said
  assert f"its process ended with status -{int(signal.SIGSEGV)}" in said
  assert "KeyError: 'no such key'" in said
  assert "SystemExit: 4" in said
  assert capfd.readouterr() == ("", "")
  assert time.monotonic() - start < 60


def test_processes_start_late_stay_and_end_with_their_children():
  task = tasks.make_task("addition", 0)
  example = task.heldout()[0]
  pool = rewards.RewardWorkers(task, _BEHAVE, workers=2, timeout=1.0)
  first, second = (
      int(pool.score([example], ["pid"]).total[0]) for _ in range(2)
  )
  assert first == second != os.getpid()
  assert pool.score([], []).total.shape == (0,)
  pool.score([example], ["child"])  # The process is ended and replaced.
  third = int(pool.score([example], ["pid"]).total[0])
  assert third != first and not _alive(first)
  listed = subprocess.run(
      ["ps", "-eo", "pgid,stat"], capture_output=True, text=True, check=True
  )
  lines = [line.split() for line in listed.stdout.splitlines()]
  groups = [group for group, state in lines if not state.startswith("Z")]
  assert str(third) in groups and str(first) not in groups
  # A process that ended between batches is replaced.
  os.kill(third, signal.SIGKILL)
  time.sleep(0.1)
  assert pool.score([example], ["fine 12"]).total[0] == 2
  last = int(pool.score([example], ["pid"]).total[0])
  pool.close()
  assert not _alive(last)


def _alive(process):
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  return True


@pytest.mark.parametrize("value", ["float('nan')", "None", "'1'"])
def test_value_that_is_no_reward(value):
  shown = repr(eval(value))
  match = f"'addition', part 'behave' returned {shown}: .* at index 1"
  with pytest.raises(ValueError, match=match):
    _scored(["fine 1", f"value {value}"], workers=0)


def test_value_that_is_no_reward_in_a_process():
  with pytest.raises(ValueError, match=r"part 'behave' returned inf.*index 1"):
    _scored(["fine 1", "value float('inf')"], workers=1)


def test_in_this_process_errors_are_counted_too(caplog):
  scores = _scored(["raise", "fine 12"], workers=0)
  np.testing.assert_array_equal(scores.total, [0, 2])
  assert scores.errors == 1 and "KeyError" in caplog.text


def test_order_is_kept_by_several_processes():
  completions = ["fine " + "x" * (i % 17) for i in range(200)]
  scores = _scored(completions, workers=2)
  np.testing.assert_array_equal(scores.total, np.arange(200) % 17)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("", "reward must be a name or a weighted sum"),
        ("corectness", "unknown reward part .*did you mean 'correctness'"),
        ("-1*correctness", "reward .* positive number, got '-1'"),
        ("format + format", "'format' twice"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("tests.helpers.reward_functions:shot", "did you mean 'short'"),
        ("a b:c", "is written 'module:function', got 'a b:c'"),
    ],
)
def test_rewards_that_are_refused(reward, message):
  task = tasks.make_task("addition", 0)
  with pytest.raises(ValueError, match=message):
    rewards.RewardWorkers(task, reward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers must be an int of at least 0, got -1"),
        ({"workers": 1.0}, r"workers must be .* got 1\.0"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0"),
        ({"timeout": float("inf")}, "timeout must be .* got inf"),
    ],
)
def test_numbers_out_of_range(options, message):
  with pytest.raises(ValueError, match=message):
    rewards.RewardWorkers(tasks.make_task("addition", 0), **options)


def test_tasks_that_cannot_be_scored():
  task = tasks.make_task("tests.helpers.reward_functions:Other", 0)
  with pytest.raises(ValueError, match="Other' has no answer format"):
    rewards.RewardWorkers(task, "format", workers=0)
  mixed = tasks.make_task("addition + tests.helpers.reward_functions:Other", 0)
  with pytest.raises(ValueError, match="has no answer format"):
    rewards.RewardWorkers(mixed, "format", workers=0)
  with pytest.raises(ValueError, match=r"cannot be sent .*or score with work"):
    rewards.RewardWorkers(task)
  task = tasks.make_task("tests.helpers.reward_functions:Absent", 0)
  with rewards.RewardWorkers(task) as pool:
    with pytest.raises(RuntimeError, match="did not start: OSError: no such d"):
      pool.score(task.heldout()[:1], ["1"])
    with pytest.raises(ValueError, match="pair up, got 1 and 2"):
      pool.score(task.heldout()[:1], ["1", "2"])


def test_formula_that_takes_forever(tmp_path):
  pytest.importorskip("math_verify")
  rows = [{"problem": p, "solution": "\\boxed{\\frac{1}{2}}"} for p in "ab"]
  path = tmp_path / "a.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  task = tasks.make_task(f"jsonl:{path}", 0)
  texts = ["\\boxed{9^{9^{9^9}}}", "so $\\boxed{0.5}$"]
  with rewards.RewardWorkers(task, "correctness + format", timeout=1.0) as pool:
    scores = pool.score(task.heldout() * 2, texts)
  np.testing.assert_array_equal(scores.total, [0, 2])
  assert (scores.timeouts, scores.errors) == (1, 0)

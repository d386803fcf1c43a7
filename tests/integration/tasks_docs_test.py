"""Runs the examples of docs/tasks.md."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest

from experiments import rewards, tasks
from tests.helpers.paths import ROOT

_PAGE = (ROOT / "docs" / "tasks.md").read_text()


def _blocks(language):
  return re.findall(rf"```{language}\n(.*?)```", _PAGE, re.DOTALL)


def test_own_tasks(tmp_path, monkeypatch):
  (tmp_path / "my_tasks.py").write_text("\n".join(_blocks("python")))
  monkeypatch.syspath_prepend(tmp_path)
  importlib.invalidate_caches()
  squares = tasks.make_task("my_tasks:squares?largest=50&heldout_size=5", 0)
  assert len(squares.heldout()) == 5
  example = squares.train(0)
  assert squares.reward(example, example.columns["answer"]) == 1
  task = tasks.make_task("my_tasks:Reverse?letters=4", 3)
  held, train = task.heldout(), [task.train(i) for i in range(50)]
  assert len(held) == 100 and held[0].task == "my_tasks:Reverse?letters=4"
  shown = {x.prompt[0]["content"] for x in held}
  assert not shown & {x.prompt[0]["content"] for x in train}
  assert tasks.make_task("my_tasks:Reverse?letters=4", 3).train(7) == train[7]
  with rewards.RewardWorkers(task) as pool:
    right = [x.columns["answer"] for x in train[:3]]
    scores = pool.score(train[:4], [*right, "no"])
  np.testing.assert_array_equal(scores.total, [1, 1, 1, 0])
  (own,) = [b for b in _blocks("python") if "class" in b]
  assert len([line for line in own.splitlines() if line.strip()]) <= 18


def test_rows(tmp_path):
  pytest.importorskip("math_verify")
  (block,) = _blocks("json")
  (tmp_path / "a.jsonl").write_text(block)
  task = tasks.make_task(f"jsonl:{tmp_path / 'a.jsonl'}", 0, heldout_size=1)
  by_verifier = {
      x.columns["verifier"]: x
      for x in [*task.heldout(), task.train(0), task.train(1)]
  }
  responses = {"text": "paris", "number": "So 18", "math": "\\boxed{0.5}"}
  for verifier, text in responses.items():
    assert task.reward(by_verifier[verifier], text) == 1


def test_options(tmp_path, monkeypatch):
  pytest.importorskip("reasoning_gym")
  monkeypatch.chdir(tmp_path)
  for name, prompts in (("train", "ab"), ("test", "c")):
    rows = [json.dumps({"prompt": p, "answer": 1}) for p in prompts]
    pathlib.Path(f"{name}.jsonl").write_text("\n".join(rows))
  lines = next(b for b in _blocks("") if "?" in b).splitlines()
  gym, file = (tasks.make_task(line, 0) for line in lines)
  assert len(gym.train(0).columns["entry"]["metadata"]["numbers"]) == 2
  expected = "c\n\nPut the final answer in \\boxed{}."
  assert file.heldout()[0].prompt[0]["content"] == expected

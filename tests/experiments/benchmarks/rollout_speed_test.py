"""Tests of the comparison with transformers: its counts, and a small run."""

import json
import sys

import numpy as np
import pytest

from experiments.benchmarks import rollout_speed
from experiments.models import tokenizer as tokenizer_lib
from tests.helpers.paths import GOLDEN

LLAMA = GOLDEN / "llama"


def test_tokens_after_an_end_do_not_count():
  tokens = np.asarray([[5, 6, 2, 7], [5, 6, 7, 8], [2, 5, 2, 2], [5, 5, 5, 3]])
  assert rollout_speed.count_tokens(tokens, (2, 3)) == 3 + 4 + 1 + 4
  assert rollout_speed.count_tokens(tokens, ()) == 16


def test_sentences_end_with_a_full_stop_or_a_line():
  tokenizer = tokenizer_lib.from_directory(LLAMA)
  ends = rollout_speed.sentence_ends(tokenizer)
  for text, is_end in [(".", True), ("\n", True), ("a", False), (",", False)]:
    assert (tokenizer.encode(text)[-1] in ends) == is_end
  assert set(tokenizer.eos_ids) <= set(ends)


def test_ratios_are_of_medians():
  runs = [
      {"tokens": 100, "seconds": s, "processor_seconds": 2 * s}
      for s in (1.0, 2.0, 50.0)
  ]
  slower = [r | {"seconds": 4.0} for r in runs]
  row = rollout_speed.summarize_workload(
      "equal", {"ours": runs, "transformers": slower}
  )
  assert row["tokens_per_second"] == {"ours": 50.0, "transformers": 25.0}
  assert row["ratio"] == 2 and row["ratio_of_processor"] == 1


def test_without_pytorch_it_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ImportError, match="pip install torch transformers"):
    rollout_speed.run({})


@pytest.mark.slow
def test_a_small_run(tmp_path):
  pytest.importorskip("torch", reason="torch is not installed")
  pytest.importorskip("transformers", reason="transformers is not installed")
  rollout_speed.run(
      {
          "model": LLAMA,
          "workloads": ["equal", "sentences"],
          "batch": 2,
          "prompt": 56,
          "new": 4,
          "repeats": 1,
          "out": tmp_path,
      }
  )
  measured = json.loads((tmp_path / "throughput.json").read_text())
  equal, sentences = measured["rows"]
  for runs in equal["runs"].values():
    assert runs[0]["tokens"] == 2 * 4
  for runs in sentences["runs"].values():
    assert 8 <= runs[0]["tokens"] <= 8 * 4

"""Tests of what a run tells a person."""

import io
import os
import sys

import pytest

from experiments.runs import progress


def test_time_left_is_that_of_recent_updates():
  assert progress.time_left([0.0, 30.0], 10) == 300.0  # All there is.
  # Compilation does not count once there are others.
  assert progress.time_left([0.0, 30.0, 32.0, 34.0], 10) == 20.0
  slow_then_fast = [100.0 * i for i in range(50)]
  slow_then_fast += [4900.0 + i for i in range(1, 21)]
  assert progress.time_left(slow_then_fast, 5) == 5.0
  assert progress.time_left([0.0, 30.0], 0) == 0.0


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0 s"),
        (99.4, "99 s"),
        (99.6, "2 min"),
        (99 * 60, "99 min"),
        (100 * 60, "1 h 40 min"),
        (47.99 * 3600, "47 h 59 min"),
        (48 * 3600, "2 d 0 h"),
        (100.4 * 3600, "4 d 4 h"),
    ],
)
def test_durations_are_short(seconds, text):
  assert progress.duration(seconds) == text


def test_without_a_terminal_each_update_is_a_line(capsys):
  ticks = iter([0.0, 60.0, 62.0])
  row = {"train/reward": 0.5, "kl/predicted": None, "rollout/length": 3.0}
  with progress.Progress(120, 9, clock=lambda: next(ticks)) as bar:
    bar.show(10, row, 1.25)
    bar.show(11, row, 1.25)
    bar.say("a word")
  lines = capsys.readouterr().out.splitlines()
  assert lines == [
      "update  10/120  reward 0.50  KL predicted nan  1.2 s  1 h 50 min left",
      "update  11/120  reward 0.50  KL predicted nan  1.2 s  4 min left",
      "a word",
  ]


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch):
  pytest.importorskip("tqdm")
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  monkeypatch.setattr(sys, "stderr", terminal)
  monkeypatch.setattr(os, "get_terminal_size", lambda fd: (80, 24))
  ticks = iter([0.0, 60.0, 62.0])
  with progress.Progress(12, 9, clock=lambda: next(ticks)) as bar:
    bar.show(10, {"train/reward": 0.5}, 1.0)
    bar.show(11, {"train/reward": 0.75}, 1.0)
  last = terminal.getvalue().split("\r")[-1]
  assert "11/12|" in last and "2 s left, reward 0.75" in last


def test_the_summary_adds_up():
  text = progress.start_summary(
      model="small",
      parameters=134_515_008,
      trained="sketched 1",
      memory={"parameters": 3 << 29, "KV cache": 1 << 29},
      prompts=12,
      responses=8,
      max_prompt_tokens=44,
      max_new_tokens=12,
  )
  assert text.splitlines() == [
      "sketched 1",
      "",
      "model      small: 134.5 M parameters",
      "memory     2.00 GiB before activations: parameters 1.50 GiB,"
      " KV cache 0.50 GiB",
      "an update  96 responses, 8 to each of 12 prompts; at most 5,376 tokens,"
      " 1,152 of them generated",
  ]

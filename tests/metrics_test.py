"""Tests of the run's record and of its picture."""

import json
import math

import pytest

from experiments import metrics, plots


def _lines(folder):
  return (folder / metrics.FILENAME).read_text().splitlines()


def test_each_write_is_one_line_that_is_there_at_once(tmp_path):
  with metrics.MetricsWriter(
      tmp_path, resume_at=0, tensorboard=False
  ) as writer:
    writer.write(1, {"a/b": 2})
    assert [json.loads(line) for line in _lines(tmp_path)] == [
        {"update": 1, "a/b": 2.0}
    ]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
  with metrics.MetricsWriter(
      tmp_path, resume_at=0, tensorboard=False
  ) as writer:
    writer.write(1, {"x": math.nan, "y": math.inf, "z": 1.0})
  text = _lines(tmp_path)[0]
  assert "NaN" not in text and "Infinity" not in text
  assert json.loads(text) == {"update": 1, "x": None, "y": None, "z": 1.0}
  _, values = metrics.column(metrics.read_rows(tmp_path / "metrics.jsonl"), "x")
  assert math.isnan(values[0])


def test_resuming_forgets_later_updates_and_a_torn_line(tmp_path):
  with metrics.MetricsWriter(
      tmp_path, resume_at=0, tensorboard=False
  ) as writer:
    for update in range(5):
      writer.write(update, {"x": update})
  path = tmp_path / metrics.FILENAME
  path.write_text(path.read_text() + '{"update": 5, "x"')
  with metrics.MetricsWriter(
      tmp_path, resume_at=3, tensorboard=False
  ) as writer:
    writer.write(4, {"x": 40})
  rows = metrics.read_rows(path)
  assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
  assert rows[-1]["x"] == 40


def test_a_new_run_starts_an_empty_record(tmp_path):
  (tmp_path / metrics.FILENAME).write_text('{"update": 0, "x": 1.0}\n')
  metrics.MetricsWriter(tmp_path, resume_at=0, tensorboard=False).close()
  assert metrics.read_rows(tmp_path / metrics.FILENAME) == []


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / metrics.FILENAME
  path.write_text('{"update": 1}\noops\n{"update": 2}\n')
  with pytest.raises(ValueError, match="line 2"):
    metrics.read_rows(path)


def test_tensorboard_gets_the_same_scalars(tmp_path):
  with metrics.MetricsWriter(tmp_path, resume_at=0) as writer:
    writer.write(1, {"train/reward": 0.5})
  events = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
  assert len(events) == 1
  assert b"train/reward" in events[0].read_bytes()


def test_the_picture_needs_a_run(tmp_path):
  with pytest.raises(ValueError, match="no updates to draw"):
    plots.draw_run(tmp_path)


def test_the_picture_has_the_runs_curves(tmp_path):
  with metrics.MetricsWriter(
      tmp_path, resume_at=0, tensorboard=False
  ) as writer:
    writer.write(0, {"eval/accuracy": 0.25})
    for update in (1, 2, 3):
      writer.write(
          update,
          {
              "train/reward": update / 4,
              "kl/predicted": 2e-3,
              "kl/realised": math.nan,  # A gap in the line, not an error.
              "kl/budget": 2e-3,
          },
      )
  figure = plots.figure_of(metrics.read_rows(tmp_path / metrics.FILENAME))
  reward, kl = figure.axes
  assert [line.get_label() for line in reward.lines] == [
      "training (sampled)",
      "held-out (greedy)",
  ]
  assert list(reward.lines[0].get_ydata()) == [0.25, 0.5, 0.75]
  assert [line.get_label() for line in kl.lines] == [
      "predicted",
      "realised",
      "budget",
  ]
  assert list(kl.lines[0].get_ydata()) == [2e-3] * 3
  path = plots.draw_run(tmp_path)
  assert path.read_bytes().startswith(b"\x89PNG")

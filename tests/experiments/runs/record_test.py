"""Tests of the run's record and of its picture."""

import json
import math
import re
import sqlite3
import struct
import sys

import jax
import pytest

from experiments.runs import metric_names, record, run_plot
from tests.helpers.paths import ROOT


def _lines(folder):
  return (folder / record.FILENAME).read_text().splitlines()


def test_each_write_is_one_line_that_is_there_at_once(tmp_path):
  with record.MetricsWriter(tmp_path, resume_at=0, tensorboard=False) as writer:
    writer.write(1, {"a/b": 2})
    assert [json.loads(line) for line in _lines(tmp_path)] == [
        {"update": 1, "a/b": 2.0}
    ]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
  with record.MetricsWriter(tmp_path, resume_at=0, tensorboard=False) as writer:
    writer.write(1, {"x": math.nan, "y": math.inf, "z": 1.0})
  text = _lines(tmp_path)[0]
  assert "NaN" not in text and "Infinity" not in text
  assert json.loads(text) == {"update": 1, "x": None, "y": None, "z": 1.0}
  _, values = record.column(record.read_rows(tmp_path / "metrics.jsonl"), "x")
  assert math.isnan(values[0])


def test_resuming_forgets_later_updates_and_a_torn_line(tmp_path):
  with record.MetricsWriter(tmp_path, resume_at=0, tensorboard=False) as writer:
    for update in range(5):
      writer.write(update, {"x": update})
  path = tmp_path / record.FILENAME
  path.write_text(path.read_text() + '{"update": 5, "x"')
  with record.MetricsWriter(tmp_path, resume_at=3, tensorboard=False) as writer:
    writer.write(4, {"x": 40})
  rows = record.read_rows(path)
  assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
  assert rows[-1]["x"] == 40


def test_a_new_run_starts_an_empty_record(tmp_path):
  (tmp_path / record.FILENAME).write_text('{"update": 0, "x": 1.0}\n')
  record.MetricsWriter(tmp_path, resume_at=0, tensorboard=False).close()
  assert record.read_rows(tmp_path / record.FILENAME) == []


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / record.FILENAME
  path.write_text('{"update": 1}\noops\n{"update": 2}\n')
  with pytest.raises(ValueError, match="line 2"):
    record.read_rows(path)


def _events(path):
  """The scalars of a TensorBoard file: (step, name, value)."""
  event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
  content, found = path.read_bytes(), []
  while content:  # Records: length, its checksum, the event, its checksum.
    (size,) = struct.unpack("<Q", content[:8])
    event = event_pb2.Event.FromString(content[12 : 12 + size])
    found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    content = content[16 + size :]
  return found


def test_tensorboard_gets_the_same_scalars(tmp_path):
  with record.MetricsWriter(tmp_path, resume_at=0) as writer:
    writer.write(1, {"train/reward": 0.5, "kl/realised": math.nan})
    writer.write(2, {"train/reward": 0.75})
  (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
  assert _events(path) == [(1, "train/reward", 0.5), (2, "train/reward", 0.75)]


def _two_runs(workdir, **places):
  """A run that is killed after update 2 and goes on from update 1."""
  for resume_at, updates in ((0, (1, 2)), (1, (2, 3))):
    with record.MetricsWriter(
        workdir,
        resume_at=resume_at,
        tensorboard=False,
        config={"optimizer": {"rank": 16}},
        **places,
    ) as writer:
      for update in updates:
        writer.write(update, {"train/reward": update / 4})


def test_weights_and_biases_offline_goes_on_with_the_run(tmp_path, monkeypatch):
  wandb = pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  wandb.teardown()  # It reads its environment once.
  _two_runs(tmp_path, wandb="logra-test")
  wandb.teardown()  # Its process ends, and has then written all.
  files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
  run_id = (tmp_path / "run_id.txt").read_text()
  assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
  for path, value in zip(files, (b"0.25", b"0.75"), strict=True):
    content = path.read_bytes()
    assert b"train/reward" in content and value in content
    assert b"logra-test" in content


def test_weights_and_biases_without_a_login_says_what_to_do(
    tmp_path, monkeypatch
):
  wandb = pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "online")
  monkeypatch.setenv("WANDB_SILENT", "true")
  monkeypatch.setenv("HOME", str(tmp_path))  # There is no key in it.
  monkeypatch.delenv("WANDB_API_KEY", raising=False)
  wandb.teardown()
  with pytest.raises(ValueError, match=r"wandb login.*WANDB_MODE=offline"):
    record.MetricsWriter(
        tmp_path, resume_at=0, tensorboard=False, wandb="logra-test"
    )


def test_trackio_goes_on_with_the_run(tmp_path, monkeypatch):
  monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # It reads it on import.
  pytest.importorskip("trackio")
  _two_runs(tmp_path, trackio="logra-test")
  with sqlite3.connect(tmp_path / "logra-test.db") as database:
    rows = database.execute("SELECT run_name, step, metrics FROM metrics")
    found = [(name, step, json.loads(text)) for name, step, text in rows]
  assert {name for name, _, _ in found} == {
      f"{tmp_path.name}-{(tmp_path / 'run_id.txt').read_text()}"
  }
  assert [(step, row) for _, step, row in found] == [
      (update, {"train/reward": update / 4}) for update in (1, 2, 2, 3)
  ]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path, monkeypatch, name
):
  monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(ImportError, match=rf"pip install 'logra-jax\[{name}\]'"):
    record.MetricsWriter(
        tmp_path, resume_at=0, tensorboard=False, **{name: "project"}
    )


def test_memory_is_in_gib():
  found = record.memory_peaks()
  assert 0.05 < found["memory/host_peak"] < 100
  on_cpu = jax.default_backend() == "cpu"
  assert ("memory/device_peak" in found) == (not on_cpu)


def test_the_page_is_what_the_names_say():
  page = (ROOT / "docs" / "metrics.md").read_text()
  assert (
      page == metric_names.page()
  ), "run: python -m experiments.runs.metric_names > docs/metrics.md"


def test_every_metric_has_a_unit_a_group_and_a_source():
  for name, metric in metric_names.METRICS.items():
    assert name.split("/")[0] in metric_names.GROUPS, name
    assert metric.unit and metric.meaning, name


def test_every_metric_is_computed_where_the_page_says():
  for name, metric in metric_names.METRICS.items():
    source = (ROOT / "experiments" / metric.source).read_text()
    # In full, or as a name that gets its group later.
    full = name.partition("<")[0]
    short = name.partition("/")[2]
    assert f'"{full}' in source or f'"{short}"' in source, name


def test_every_name_in_the_programs_is_explained():
  groups = "|".join(metric_names.GROUPS)
  pattern = re.compile(rf'"((?:{groups})/[\w/@.-]+)"')
  found = {
      name
      for path in (ROOT / "experiments").rglob("*.py")
      for name in pattern.findall(path.read_text())
  }
  assert "train/reward" in found and "kl/predicted" in found
  unknown = {name for name in found if metric_names.describe(name) is None}
  assert not unknown, f"add them to experiments/runs/metric_names.py: {unknown}"


def test_families_of_names_are_described():
  part = metric_names.describe("train/reward/format")
  assert part is metric_names.METRICS["train/reward/<part>"]
  assert metric_names.describe("train/reward") is not part
  assert metric_names.describe("train/oops") is None
  assert metric_names.describe("train/reward/") is None


def test_the_picture_needs_a_run(tmp_path):
  with pytest.raises(ValueError, match="no updates to draw"):
    run_plot.draw_run(tmp_path)


def test_the_picture_has_the_runs_curves(tmp_path):
  with record.MetricsWriter(tmp_path, resume_at=0, tensorboard=False) as writer:
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
  figure = run_plot.run_figure(record.read_rows(tmp_path / record.FILENAME))
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
  path = run_plot.draw_run(tmp_path)
  assert path.read_bytes().startswith(b"\x89PNG")

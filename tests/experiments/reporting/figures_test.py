"""Tests of what figures share."""

import numpy as np

from experiments.reporting import figures


def test_a_band_spans_the_seeds():
  axes = figures.make_figure(2, 2).subplots()
  runs = [np.array([0.0, 2.0, 4.0]), np.array([2.0, 4.0, 6.0, 8.0])]
  figures.plot_spread(axes, runs, "label", width=2, step=10.0)
  (line,) = axes.lines
  np.testing.assert_allclose(line.get_xdata(), [20.0, 30.0])
  np.testing.assert_allclose(line.get_ydata(), [2.0, 4.0])
  (band,) = axes.collections
  assert band.get_datalim(axes.transData).bounds == (20.0, 1.0, 10.0, 4.0)


def test_one_curve_has_no_band_and_saving_writes_table_and_picture(tmp_path):
  figure = figures.make_figure(2, 2)
  axes = figure.subplots()
  figures.plot_spread(axes, [np.arange(3.0)], "label")
  assert len(axes.lines) == 1 and not axes.collections
  figures.finish(axes, "title", "x", "y")
  assert axes.get_title() == "title" and axes.get_legend() is not None
  figures.save(tmp_path, "picture", "| a |\n", figure)
  assert (tmp_path / "table.md").read_text("utf-8") == "| a |\n"
  assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"

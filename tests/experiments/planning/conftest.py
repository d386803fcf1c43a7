"""Fixtures: a small model without weights, and its plan."""

import json

import pytest

from experiments.benchmarks import gpu_check
from experiments.planning import update_plan
from experiments.planning.request import Request


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
  """A Hugging Face directory without weights."""
  folder = tmp_path_factory.mktemp("tiny")
  (folder / "config.json").write_text(json.dumps(gpu_check.SMALL_MODEL))
  return str(folder)


@pytest.fixture(scope="session")
def small_plan(tiny):
  return update_plan.plan(Request(tiny, "cpu:1", rank=8, tokens=64))

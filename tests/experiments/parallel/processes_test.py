"""Coordination in a run of one process; `multiprocess_test` has two."""

import jax
import numpy as np
import pytest

from experiments.parallel import processes


@pytest.mark.parametrize("index, first", [(0, True), (1, False)])
def test_the_first_process_is_number_zero(monkeypatch, index, first):
  monkeypatch.setattr(jax, "process_index", lambda: index)
  assert processes.is_first_process() is first


def test_one_process_waits_for_nobody(monkeypatch):
  def fail(name):
    raise AssertionError(name)

  sync = "sync_global_devices"
  monkeypatch.setattr(processes.multihost_utils, sync, fail)
  processes.wait_for_all("here")
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(AssertionError, match="here"):
    processes.wait_for_all("here")


@pytest.mark.parametrize("value", [False, True])
def test_one_process_decides_alone(value):
  assert processes.any_process(value) is value


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_one_true_process_is_enough(monkeypatch, own, other):
  gather = lambda x: np.asarray([x, other])
  monkeypatch.setattr(processes.multihost_utils, "process_allgather", gather)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  assert processes.any_process(own) is (own or other)

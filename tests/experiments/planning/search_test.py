"""Which plans a search makes, and which it returns."""

import dataclasses
import math

import pytest

from experiments.planning import search, targets
from experiments.planning.request import Request
from experiments.reporting.units import GIB


@pytest.mark.parametrize("best", [0, 1, 2, 3, 7, 8, 33, 100])
def test_the_largest_is_found_by_few_tries(best):
  tried = []

  def fits(n):
    tried.append(n)
    return n <= best

  assert search.largest(fits, 64) == min(best, 64)
  assert len(tried) <= 2 * math.log2(max(best, 1)) + 2
  assert len(set(tried)) == len(tried)


def fake_plans(monkeypatch, small_plan, peak):
  """Replaces the compiler with a formula for the peak."""

  def plan(request):
    n_bytes = peak(request)
    return dataclasses.replace(
        small_plan,
        request=request,
        peak_bytes=n_bytes,
        fits=n_bytes <= 15.75 * GIB,
    )

  monkeypatch.setattr(search, "plan", plan)


def test_search_for_a_batch(monkeypatch, small_plan):
  fake_plans(monkeypatch, small_plan, lambda r: (4 + r.micro_batch) * GIB)
  tried = search.search_batch(Request("qwen2.5-7b", "v5e:2x2"))
  assert tried[-1].request.micro_batch == tried[-1].request.sequences == 11
  assert [p.request.micro_batch for p in tried[:-1]] == [1, 2, 4, 8, 16, 12, 10]


def test_search_for_a_batch_where_none_fits(monkeypatch, small_plan):
  fake_plans(monkeypatch, small_plan, lambda r: 16 * GIB)
  (only,) = search.search_batch(Request("qwen2.5-7b", "v5e:2x2"))
  assert not only.fits and only.request.micro_batch == 1


def test_search_for_a_slice(monkeypatch, small_plan):
  size = lambda r: math.prod(targets.parse(r.target).shape)
  fake_plans(monkeypatch, small_plan, lambda r: 100 * GIB // size(r))
  tried = search.search_slice(Request("qwen2.5-32b", "v5e:1x1"))
  # The weights alone take 61 GiB, more than one chip has.
  assert [p.request.target for p in tried] == ["v5e:2x2", "v5e:2x4"]
  assert tried[-1].fits
  with pytest.raises(ValueError, match="fixes the number of devices"):
    search.search_slice(Request("qwen2.5-7b", "v5e:2x2", mesh={"fsdp": 4}))

"""Tests of pages of samples: complete, in order, and free of markup."""

from html.parser import HTMLParser

import pytest

from experiments.evaluation import samples_page

EVIL = '</pre><script>alert("x")</script><pre>'
SAMPLES = [
    samples_page.Sample("2 < 3 & 1?", EVIL, 0.5, 7, True, "t<b>"),
    samples_page.Sample("2 < 3 & 1?", "été 😀", 1.0, 2, False, "t<b>"),
    samples_page.Sample("next", "```\nx\n````", 0.0, 3, True, "u"),
    samples_page.Sample("next", "", 0.0, 1, True, "u"),
]


class Reader(HTMLParser):
  """Collects the tags of a page and the text in each `pre`."""

  def __init__(self):
    super().__init__()
    self.tags, self.texts, self.inside = [], [], False

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.inside = tag == "pre"
    if self.inside:
      self.texts.append("")

  def handle_endtag(self, tag):
    self.inside = self.inside and tag != "pre"

  def handle_data(self, data):
    if self.inside:
      self.texts[-1] += data


def test_the_page_shows_all_text_as_it_is_and_runs_none():
  reader = Reader()
  reader.feed(samples_page.to_html("<i>title", SAMPLES, 2))
  assert not {"script", "i", "b", "img", "link"} & set(reader.tags)
  assert reader.texts == [
      "2 < 3 & 1?",
      EVIL,
      "été 😀",
      "next",
      "```\nx\n````",
      "",
  ]


def test_a_page_names_reward_length_and_end(tmp_path):
  page, text = samples_page.write(tmp_path / "new", "title", SAMPLES, 2)
  for content in (page.read_text("utf-8"), text.read_text("utf-8")):
    assert "reward 0.5 · 7 tokens · finished" in content
    assert "reward 1 · 2 tokens · cut at the limit" in content


def test_no_text_ends_its_code_block_in_markdown():
  text = samples_page.to_markdown("title", SAMPLES, 2)
  assert "`````text\n```\nx\n````\n`````" in text
  assert text.index(EVIL) < text.index("été") < text.index("## 1: u")


def test_groups_must_come_out_even():
  with pytest.raises(ValueError, match="group_size=3 must divide the 4"):
    samples_page.to_html("title", SAMPLES, 3)

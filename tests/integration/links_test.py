"""What the project's texts point to exists: links, anchors, files, modules."""

import ast
import functools
import json
import re

import pytest

from tests.helpers.paths import ROOT

_PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
_SOURCES = sorted(
    path
    for folder in ("experiments", "logra_jax", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`[^`\n]*`")
_FILE = re.compile(
    r"(?<![\w/.-])((?:experiments|logra_jax|tests|docs|notebooks)/[\w./-]+"
    r"\.(?:py|md|ipynb|json|jsonl|txtpb))\b"
)
_MODULE = re.compile(
    r"(?<![\w./-])((?:experiments|logra_jax)(?:\.(?!__|NAME)\w+)+)"
)


def _is_history(path):
  """Results of the past keep the names of their day, but not dead links."""
  results = ROOT / "docs" / "results"
  return path.is_relative_to(results) and path.parent != results


def _prose(path):
  """The Markdown of a page or notebook."""
  text = path.read_text()
  if path.suffix != ".ipynb":
    return text
  cells = json.loads(text)["cells"]
  cells = [cell for cell in cells if cell["cell_type"] == "markdown"]
  return "\n\n".join("".join(cell["source"]) for cell in cells)


def _links(text):
  return _LINK.findall(_INLINE.sub("", _FENCED.sub("", text)))


def _anchors(text):
  """Anchors of a page's headings, as GitHub makes them."""
  anchors, seen = set(), {}
  for title in re.findall(r"^#+ (.+)$", _FENCED.sub("", text), re.MULTILINE):
    title = _LINK.sub(lambda link: link[0].split("]")[0].strip("!["), title)
    slug = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
    count = seen[slug] = seen.get(slug, -1) + 1
    anchors.add(f"{slug}-{count}" if count else slug)
  return anchors


def _is_there(page, link):
  """Whether a relative link leads to a file, and to a heading in it."""
  if re.match(r"[a-z]+:", link):
    return True  # Other sites are not asked.
  file, _, anchor = link.partition("#")
  target = (page.parent / file).resolve() if file else page
  if not target.exists() or ROOT not in [target, *target.parents]:
    return False
  return not anchor or anchor in _anchors(_prose(target))


def _name_exists(name):
  """Whether a dotted name is a module, or a name in one; imports nothing."""
  folder, parts = ROOT, name.split(".")
  for i, part in enumerate(parts):
    file = folder / f"{part}.py"
    if not (folder / part).is_dir():
      rest = parts[i + 1 :]
      if not file.exists():
        file, rest = folder / "__init__.py", parts[i:]
      return not rest or rest[0] in _names_in(file)
    folder = folder / part
  return True


@functools.cache
def _names_in(file):
  """Names that a source binds."""
  found = set()
  for node in ast.walk(ast.parse(file.read_text())):
    if isinstance(node, ast.Import | ast.ImportFrom):
      found |= {alias.asname or alias.name for alias in node.names}
    elif isinstance(node, ast.ClassDef | ast.FunctionDef):
      found.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      found.add(node.id)
  return found


def _name(path):
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [*_PAGES, *_NOTEBOOKS], ids=_name)
def test_links_lead_somewhere(page):
  lost = [x for x in _links(_prose(page)) if not _is_there(page, x)]
  assert not lost


@pytest.mark.parametrize("page", [*_PAGES, *_NOTEBOOKS], ids=_name)
def test_files_and_modules_named_by_pages_exist(page):
  if not _is_history(page):
    assert not _ghosts(_prose(page))


def test_files_and_modules_named_by_sources_exist():
  ghosts = {_name(p): _ghosts(p.read_text()) for p in _SOURCES}
  del ghosts["tests/integration/commands_test.py"]  # Names some on purpose.
  del ghosts["tests/integration/layers_test.py"]
  del ghosts["tests/integration/links_test.py"]
  assert not {name: found for name, found in ghosts.items() if found}


def _ghosts(text):
  """Files and modules that a text names and that do not exist."""
  text = re.sub(r'"\s*\n\s*f?"', "", text)
  files = {name for name in _FILE.findall(text) if not (ROOT / name).exists()}
  modules = {x for x in _MODULE.findall(text) if not _name_exists(x)}
  return sorted(files | modules)


def test_dead_links_would_be_found(tmp_path):
  page = ROOT / "docs" / "design.md"
  for dead in ("none.md", "#none", "../README.md#none", "/etc", "../../x"):
    assert not _is_there(page, dead)
  for alive in ("../README.md", "../README.md#two-commands", "tasks.md"):
    assert _is_there(page, alive)
  text = "[a](a.md) ![b](b.png) `[c](c.md)`\n```\n[d](d.md)\n```\n"
  assert _links(text) == ["a.md", "b.png"]
  assert _anchors("# A `b`, c\n## A\n## A\n") == {"a-b-c", "a", "a-1"}


def test_ghosts_would_be_found():
  text = "see experiments.planner, experiments/planner.py, experiments.train.x"
  assert len(_ghosts(text)) == 3
  text = "experiments.rewards.BadReward, logra_jax.sketch, docs/design.md"
  assert not _ghosts(text)

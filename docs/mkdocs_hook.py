"""Tells mkdocs which files make up the site, for `make docs`.

The site has the layout of the repository, so that links between pages, sources
and notebooks are the same on disk and on the site. The pages of the API
reference are made here: for `logra_jax`, for the commands, and for each package
of `experiments`.
"""

import ast
import pathlib

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("docs", "notebooks", "experiments", "logra_jax")
SUFFIXES = {".md", ".py", ".ipynb", ".png", ".html", ".json", ".jsonl", ".txt"}


def on_config(config):
  """Adds the results and the API reference to the navigation."""
  results = sorted((ROOT / "docs" / "results").glob("*/README.md"))
  config.nav.insert(
      2,
      {
          "Results": [
              "docs/results/README.md",
              *(str(page.relative_to(ROOT)) for page in results),
          ]
      },
  )
  config.nav.append({"API reference": list(_reference())})
  return config


def on_files(files, config):
  """Replaces the files of `docs` by those of the repository."""
  theme = [file for file in files if file.src_dir != config.docs_dir]
  paths = [ROOT / name for name in PAGES]
  for folder in FOLDERS:
    paths += sorted((ROOT / folder).rglob("*"))
  own = [
      File(
          str(path.relative_to(ROOT)),
          str(ROOT),
          config.site_dir,
          config.use_directory_urls,
      )
      for path in paths
      if path.suffix in SUFFIXES or path.name == "LICENSE"
  ]
  made = [
      File.generated(config, name, content=text)
      for name, text in _reference().items()
  ]
  return Files([*theme, *own, *made])


def _reference():
  """Returns the pages of the API reference by path."""
  library = ("logra_jax", "logra_jax.linen", "logra_jax.nnx")
  commands = sorted((ROOT / "experiments").glob("[!_]*.py"))
  pages = {
      "logra_jax": ("The library", library),
      "commands": ("Commands", map(_dotted, commands)),
  }
  for package in sorted((ROOT / "experiments").glob("*/__init__.py")):
    name = _dotted(package)
    modules = [_dotted(path) for path in sorted(package.parent.rglob("*.py"))]
    pages[name] = (f"{name}\n\n{_docstring(package)}", modules[1:])
  return {
      f"reference/{name}.md": f"# {head}\n\n"
      + "\n".join(f"::: {module}\n" for module in modules)
      for name, (head, modules) in pages.items()
  }


def _dotted(path):
  """Returns the name of a module by its path."""
  path = path.parent if path.name == "__init__.py" else path
  return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _docstring(file):
  return ast.get_docstring(ast.parse(file.read_text())) or ""

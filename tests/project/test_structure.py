"""Rules of the structure: imports follow the data path, importing has no effects, docs match the
folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import list_families
import tersekv
from tersekv.cli import listing
from tersekv.codecs import methods
from tersekv.policies import policies

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tersekv"

COMMON = {
    "atomic_write",
    "errors",
    "extras",
    "malloc_trim",
    "registry",
    "steps",
    "tensors",
    "threads",
    "units",
    "versions",
} | {"__version__"}
# Folders that each folder may import (besides itself and COMMON). A module belongs to the longest
# matching name.
MAY_IMPORT = {
    "kernels": set(),
    "transforms": {"kernels"},
    "codecs.codebooks": {"kernels"},
    "layouts": {"kernels", "transforms"},
    "codecs": {"codecs.codebooks", "kernels", "layouts", "transforms"},
    "policies": {"layouts"},
    "plan": {"codecs", "policies"},
    "recipe": {"codecs", "plan", "policies"},
    "cache": {"codecs", "kernels", "layouts", "policies", "recipe", "transforms"},
    "sizes": {"cache", "codecs", "kernels", "layouts", "policies", "recipe", "transforms"},
    "attention": {"cache", "kernels", "layouts", "transforms"},
    "models": {"attention", "codecs", "recipe", "sizes", "transforms"},
    "storage": {"transforms"},
    "calibration": {"attention", "cache", "codecs", "layouts", "models", "recipe", "sizes", "storage", "transforms"},
    "hf": {
        "attention",
        "cache",
        "calibration",
        "codecs",
        "layouts",
        "models",
        "policies",
        "recipe",
        "sizes",
        "storage",
        "transforms",
    },
    "serving": {
        "cache",
        "calibration",
        "codecs",
        "hf",
        "kernels",
        "layouts",
        "models",
        "plan",
        "recipe",
        "storage",
        "transforms",
    },
    "lab.evals": {"cache", "calibration", "hf", "models", "recipe"},
    "lab.plots": {"cache", "codecs.codebooks", "lab.evals", "policies", "recipe", "sizes", "transforms"},
    "lab.bench": {
        "cache",
        "calibration",
        "codecs",
        "hf",
        "kernels",
        "lab.evals",
        "layouts",
        "models",
        "recipe",
        "transforms",
    },
}


def home(module: str) -> str:
    """Return the folder, or the top-level file, to which one of our modules belongs."""
    parts = module.split(".")[1:3]
    return ".".join(parts) if ".".join(parts) in MAY_IMPORT else parts[0]


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(folder: str) -> list[Path]:
    path = PACKAGE / folder.replace(".", "/")
    within = [PACKAGE / other.replace(".", "/") for other in MAY_IMPORT if other.startswith(folder + ".")]
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return [file for file in found if not any(inner in file.parents for inner in within)]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder):
    allowed = MAY_IMPORT[folder] | {folder} | COMMON
    for path in files(folder):
        ours = {home(name) for name in imports(path) if name.startswith("tersekv.")}
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {ours - allowed}"


def module_of(path: Path) -> str:
    """Return the module name of a file."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    """Return our modules with those of ours that each imports.

    Imports count at the top, in functions, for types only, or by a text that names a module, as
    `import_module` takes it. `from package import module` counts for the module alone, because
    Python imports every package before its modules anyway.
    """
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for module, path in paths.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= names if names <= paths.keys() else names | {node.module}
            elif isinstance(node, ast.Constant):
                found.add(node.value)
        graph[module] = (found & paths.keys()) - {module}
    # Names of the top package are not imports: they load when a user first uses them.
    graph["tersekv"] = set()
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return strongly connected components of more than one module: modules that import each other."""

    def reached(start: str) -> set[str]:
        found, left = set(), [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in graph}
    groups = {tuple(sorted(other for other in reach[m] if m in reach[other])) for m in graph if m in reach[m]}
    return sorted(list(group) for group in groups)


def test_no_cycle_of_imports():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    graph = import_graph()
    assert "tersekv.hf.saved" in graph["tersekv.hf.cache"]
    assert "tersekv.lab.evals.reader" in graph["tersekv.lab.evals.tasks.base"]  # for types only
    assert cycles(graph) == []


def test_few_folders_import_transformers():
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("calibration", "cli", "hf", "models"):
            assert not any(name.split(".")[0] == "transformers" for name in imports(path)), path


def test_only_serving_imports_an_engine():
    for path in PACKAGE.rglob("*.py"):
        engines = {name.split(".")[0] for name in imports(path)} & {"vllm", "lmcache"}
        assert not engines or "serving" in path.relative_to(PACKAGE).parts, path


def test_import_loads_neither_transformers_nor_kernels():
    code = (
        "import sys, torch, tersekv\n"
        "import tersekv.recipe, tersekv.kernels.backends\n"
        "print([m for m in sys.modules if m.startswith('transformers') or m == 'tersekv.kernels.cpu._native'])"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[]"


def test_bare_import_loads_only_the_top_package():
    code = "import sys, tersekv; print([m for m in sys.modules if m.startswith('tersekv.') or m == 'torch'])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[]"


def test_public_names():
    for name in tersekv.__all__:
        assert getattr(tersekv, name) is not None
    with pytest.raises(AttributeError, match="it has CacheError"):
        _ = tersekv.packed
    assert dir(tersekv) == tersekv.__all__


def test_one_method_one_file_with_a_docstring():
    for name in [*methods(), *policies()]:
        folder = "codecs" if name in methods() else "policies"
        doc = ast.get_docstring(ast.parse((PACKAGE / folder / f"{name}.py").read_text()))
        assert doc
        assert len(doc) > 60


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_readme_is_short():
    assert page("README.md").count("\n") <= 120


def test_hand_written_pages_are_few_and_short():
    """Pages of the site before the measured ones, and the one for contributors: answers are found fast."""
    nav = page("mkdocs.yml").split("\nnav:", 1)[1].split("  - Measured", 1)[0]
    site = [f"docs/{name}" for name in (*re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE), "design.md")]
    assert len(site) <= 20
    assert sum(len(page(name).split()) for name in (*site, "README.md", "CHANGELOG.md")) <= 20_000
    for name in site:
        for table in re.findall(r"(?:^\|.*\n)+", page(name).split("<!-- families", 1)[0], re.MULTILINE):
            assert table.count("\n") <= 2 + 12, (name, table)
            assert table.split("\n", 1)[0].count("|") <= 1 + 7, (name, table)


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_kind_of_reader_is_one_click_away(start):
    for name in ("laptop", "my-model", "serving", "research", "measured/index"):
        assert f"{name}.md)" in page(start), name


def test_the_design_page_lists_the_folders():
    tree = page("docs/design.md").split("src/tersekv/\n", 1)[1].split("```", 1)[0]
    listed = set(re.findall(r"^  (\w+)/", tree, re.MULTILINE))
    real = {p.name for p in PACKAGE.iterdir() if p.is_dir() and not p.name.startswith("__")}
    assert listed == real
    for name in [*re.findall(r"^(\w+)/", tree, re.MULTILINE), "tests", "benchmarks", "docs"]:
        assert (ROOT / name).is_dir()


def test_the_methods_page_names_every_method_with_its_true_bits():
    """A row may name several methods, with a pair of bits for each setting; one of them is the default's in `tersekv
    list`."""
    rows = {}
    for line in page("docs/methods/index.md").split("| method |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`(\w+)`", cells[0]):
            rows[name] = cells[2]
    assert set(rows) == set(methods())
    said = "They are means over the layers: " + ", ".join(f"{n} with head dim {d}" for d, n in listing.LAYERS.items())
    assert said in " ".join(page("docs/methods/index.md").split())
    for method in listing.describe():
        name, mean = method["name"], [of["mean"] for of in method["bits"].values()]
        short = [f"{b:.2f}" if b != 16 else "16" for b in mean]
        assert " / ".join(short) in rows[name], (name, short, rows[name])


def test_the_methods_page_names_every_policy():
    table = page("docs/methods/index.md").split("| token policy |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| \[?`(\w+)`", table, re.MULTILINE)) == set(policies())


def test_the_site_lists_every_page():
    """The build is strict about it, too; this needs no documentation tools."""
    listed = set(re.findall(r"([\w/-]+\.md)$", page("mkdocs.yml"), re.MULTILINE))
    assert listed == {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}


def test_the_families_of_the_models_page_are_those_of_the_tests():
    written = page("docs/models.md").split(list_families.BEGIN, 1)[1].split(list_families.END, 1)[0].strip()
    assert written == list_families.table()


def test_every_method_has_a_page():
    pages = " ".join(p.read_text() for p in (ROOT / "docs" / "methods").glob("*.md"))
    for name in {*methods(), *policies()} - {"window"}:  # every method's page describes it
        assert f"`{name}" in pages


def test_links_in_the_docs_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_stay_small():
    """No file has over 400 lines, except tests of many small cases. A lower limit would make code
    too dense."""
    reasons = {"test_models.py", "test_cli.py", "test_ops_parity.py", "test_ops_triton.py", "test_transformers.py"}
    for folder in ("src", "tests", "benchmarks", "cpp", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cpp", ".h") and path.name not in reasons:
                lines = path.read_text().count("\n")
                assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines"

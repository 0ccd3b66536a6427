"""The package's metadata, its workflows and its checks of versions; nothing is compiled."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import tersekv
from tersekv import versions
from tersekv.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL = PROJECT["tool"]


def workflow(name):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def test_the_version_has_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    (source,) = TOOL["dynamic-metadata"]
    assert re.search(r'^__version__ = "(.+)"', (ROOT / source["input"]).read_text(), re.M)[1] == tersekv.__version__


def test_a_release_needs_tag_changelog_and_version_to_agree(monkeypatch):
    check = runpy.run_path(str(ROOT / "tools" / "check_release.py"))
    mistakes, names = check["mistakes"], check["mistakes"].__globals__
    assert mistakes(None) == []
    monkeypatch.setitem(names, "newest_entry", lambda: f"{tersekv.__version__} (2026-12-01)")
    assert mistakes(f"v{tersekv.__version__}") == []
    assert "the tag is v9.9.9" in mistakes("v9.9.9")[0]
    monkeypatch.setitem(names, "newest_entry", lambda: f"{tersekv.__version__} (unreleased)")
    assert "still says" in mistakes(f"v{tersekv.__version__}")[0]
    monkeypatch.setitem(names, "newest_entry", lambda: "0.0.1")
    assert "first entry" in mistakes(None)[0]


def test_wheels_are_portable():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "-march" not in cmake
    assert "-mcpu" not in cmake
    guarded = cmake[cmake.index("if(NOT TERSEKV_PORTABLE AND") :]
    before, inside = cmake[: cmake.index(guarded)], guarded[: guarded.index("endif()\nset(products ")]
    after = guarded[len(inside) :]
    assert "-mavx2" in inside
    assert "-mavx" not in before + after


def test_the_stable_abi_is_asked_for():
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "Development.Module ${SKBUILD_SABI_COMPONENT})" in cmake
    assert re.search(r"nanobind_add_module\(_native [^\n]*STABLE_ABI", cmake)
    assert TOOL["scikit-build"]["wheel"]["py-api"] == "cp312"
    # macros that the stable ABI lacks; nanobind has names for both
    for file in (ROOT / "cpp").rglob("*.*"):
        assert not re.search(r"\bPy(Tuple|List)_GET_|CallMethodNoArgs", file.read_text()), file


def test_wheels_of_each_python_and_platform():
    wheels = TOOL["cibuildwheel"]
    assert wheels["build"] == ["cp310-*", "cp311-*", "cp312-*"]
    assert wheels["environment"]["TERSEKV_REQUIRE_NATIVE"] == "1"
    assert wheels["linux"]["manylinux-x86_64-image"] == wheels["linux"]["manylinux-aarch64-image"] == "manylinux_2_28"
    assert wheels["macos"]["archs"] == ["arm64"]
    runners = workflow("wheels.yml")["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    assert [("arm" in r, r.split("-")[0]) for r in runners] == [(False, "ubuntu"), (True, "ubuntu"), (False, "macos")]


def test_a_failed_build_is_tried_again_without_the_kernels():
    (override,) = TOOL["scikit-build"]["overrides"]
    assert override["if"]["failed"] is True
    assert override["wheel"] == {"cmake": False, "py-api": "py3", "platlib": False}


def test_workflows_hold_no_secrets_and_publish_by_trust():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert workflow(path.name)["permissions"] == {"contents": "read"}
        assert "secrets." not in path.read_text()
    jobs = workflow("release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "wheels"
    assert jobs["wheels"]["needs"] == "check"
    assert ".ci/run" in str(workflow("ci.yml"))


def test_the_bounds_agree_with_what_is_tested():
    (bound,) = [d for d in PROJECT["project"]["dependencies"] if d.startswith("transformers")]
    assert bound == "transformers>={}.{}".format(*versions.OLDEST)
    pinned = re.findall(r"^transformers==([\d.]+)", (ROOT / "requirements" / "pins.txt").read_text(), re.M)
    releases = sorted(versions.release(text) for text in pinned)
    assert releases[-1] == versions.NEWEST
    assert releases[0] >= versions.OLDEST
    page = (ROOT / "docs" / "installation.md").read_text()
    assert "transformers {}.{} to {}.{}".format(*versions.OLDEST, *versions.NEWEST) in page


@pytest.fixture
def installed(monkeypatch):
    def put(text):
        versions.check_transformers.cache_clear()
        monkeypatch.setattr(versions, "version", lambda _: text)

    yield put
    versions.check_transformers.cache_clear()


def test_an_untested_transformers_warns_once(installed, recwarn):
    installed("5.25.0.dev0")
    for _ in range(2):
        versions.check_transformers()
    (warned,) = recwarn
    assert str(warned.message) == (
        "transformers 5.25.0.dev0 is newer than tersekv was tested with; tested are 5.16 to 5.24; "
        "to install one: pip install 'transformers==5.24.*'"
    )


@pytest.mark.parametrize("text", ["5.16.0", "5.24.1"])
def test_a_tested_transformers_is_silent(installed, recwarn, text):
    installed(text)
    versions.check_transformers()
    assert not recwarn


def test_what_breaks_is_refused(installed, monkeypatch):
    installed("5.15.9")
    with pytest.raises(UserError, match=r"5\.15\.9 is too old"):
        versions.check_transformers()
    monkeypatch.setitem(versions.BROKEN, (6, 0), "its caches have no layers")
    installed("6.0.1")
    with pytest.raises(UserError, match=r"does not work with tersekv \(its caches have no layers\); tested are"):
        versions.check_transformers()


def test_a_name_that_transformers_moved_gives_advice(monkeypatch):
    def fails(name):
        raise ImportError("cannot import name 'sdpa_mask'", name="transformers.masking_utils")

    monkeypatch.setattr(tersekv.importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"sdpa_mask.*tested are 5\.16 to 5\.24"):
        _ = tersekv.compress

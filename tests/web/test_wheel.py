"""Where Node is at hand, what is shipped has the page in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from octavo.server.page import FOLDER, Page

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="no Node here (npm)")


def test_the_page_was_built_and_is_whole() -> None:
    page = Page.read(FOLDER)
    assert "/" in page._files, "make web builds the page"
    html = page._files["/"].plain.decode()
    named = set(re.findall(r'(?:src|href)="\.(/assets/[^"]+)"', html))
    assert named
    assert named <= set(page._files)
    assert all(page._files[name].zipped for name in named)
    assert "http" not in re.sub(r"<!doctype.*?>", "", html)


def test_the_wheel_and_the_source_archive_have_it(tmp_path: Path) -> None:
    """Built without compiling anything: what is packed is chosen by the same rules."""
    pytest.importorskip("scikit_build_core")
    script = (
        "from scikit_build_core.build import build_sdist, build_wheel; import sys;"
        "build_wheel(sys.argv[1], {'wheel.cmake': 'false'}); build_sdist(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=True)
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(archive) as tar:
        sources = {name.partition("/")[2] for name in tar.getnames()}
    built = {f"octavo/web/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.*")}
    assert "octavo/web/index.html" in built
    assert built <= packed
    assert built <= sources
    assert {"web/src/main.tsx", "web/package-lock.json"} <= sources
    assert not any("node_modules" in name for name in packed | sources)


def test_the_lock_file_names_no_registry() -> None:
    text = (ROOT / "web" / "package-lock.json").read_text()
    assert re.findall(r'"resolved": "(?!https://registry\.npmjs\.org/)', text) == []
    assert text.count('"integrity"') > 5

"""The page's files: open, closed in by policy, cached by content, and nothing but them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from octavo.server import page
from tests.server.house import House, inside

pytestmark = pytest.mark.anyio


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "web"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>Octavo</title>")
    script = b"console.log('octavo')" * 40
    (folder / "assets" / "index-abc123.js").write_bytes(script)
    (folder / "assets" / "index-abc123.js.gz").write_bytes(gzip.compress(script))
    (tmp_path / "secret.txt").write_text("not for the web")
    monkeypatch.setattr(page, "FOLDER", folder)
    return folder


async def test_without_a_built_page_the_server_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "FOLDER", tmp_path / "nothing")
    async with inside(House()) as client:
        answer = await client.get("/")
        assert answer.status_code == 404
        assert "make web" in answer.text
        assert "Node 20" in answer.text
        assert (await client.get("/v1/models")).status_code == 200


async def test_assets_are_kept_for_ever_and_the_page_is_asked_for_each_time(built: Path) -> None:
    async with inside(House()) as client:
        index = await client.get("/")
        assert index.headers["cache-control"] == "no-cache"
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        tag = {"if-none-match": index.headers["etag"]}
        assert (await client.get("/", headers=tag)).status_code == 304
        plain = await client.get("/assets/index-abc123.js", headers={"accept-encoding": "br"})
        zipped = await client.get("/assets/index-abc123.js")
        assert "immutable" in zipped.headers["cache-control"]
        assert zipped.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in plain.headers
        assert zipped.content == plain.content == (built / "assets/index-abc123.js").read_bytes()
        assert (await client.head("/")).status_code == 200


@pytest.mark.usefixtures("built")
async def test_the_browser_is_told_to_load_nothing_from_elsewhere() -> None:
    async with inside(House()) as client:
        for path in ("/", "/assets/index-abc123.js"):
            policy = (await client.get(path)).headers["content-security-policy"]
            rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
            assert rules["default-src"] == "'none'"
            assert {rules[f"{what}-src"] for what in ("script", "style", "img", "connect")} == {
                "'self'"
            }
            assert rules["frame-ancestors"] == "'none'"


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "path",
    [
        "/assets/../../secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/index-abc123.js.gz",
        "/assets/",
        "/index.html",
        "/assets/%00",
    ],
)
async def test_only_the_pages_files_are_to_be_had(path: str) -> None:
    async with inside(House()) as client:
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "not for the web" not in answer.text


@pytest.mark.usefixtures("built")
async def test_the_page_is_open_where_keys_are_needed_and_its_data_is_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-sixteen-characters\n")
    async with inside(House(api_key_file=str(keys))) as client:
        found: dict[str, Any] = {
            path: (await client.get(path)).status_code
            for path in (
                "/",
                "/assets/index-abc123.js",
                "/favicon.ico",
                "/v1/models",
                "/v1/engine/live",
            )
        }
    assert found == {
        "/": 200,
        "/assets/index-abc123.js": 200,
        "/favicon.ico": 204,
        "/v1/models": 401,
        "/v1/engine/live": 401,
    }

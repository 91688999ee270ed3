"""Links of README and docs lead somewhere, and the build of the site fails where one does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def prose(page):
    return CODE.sub("", page.read_text())


def anchors(page):
    """The names of the headings of a page, as GitHub and mkdocs form them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page):
    """The relative links of a page that lead to no file, or to no heading of it."""
    for target in LINK.findall(prose(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, name = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (name and name not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    assert list(broken(page)) == []


def test_there_are_links_to_follow():
    links = [target for page in PAGES for target in LINK.findall(prose(page))]
    assert len(links) > 100
    assert any("#" in target for target in links)


def test_links_of_pages_that_are_read_on_the_site_stay_on_the_site():
    for page in (ROOT / "docs").rglob("*.md"):
        for target in LINK.findall(prose(page)):
            path = target.partition("#")[0]
            # The page of the benchmarks is one of the site; docs/hooks.py turns links of the guides to it.
            if not re.match(r"https?:", target) and path != "../benchmarks/README.md":
                assert (page.parent / path).resolve().is_relative_to(ROOT / "docs"), (page, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("here.md", ""),
        ("missing.md", "missing.md"),
        ("here.md#nowhere", "nowhere"),
        ("/here.md", "/here.md"),
        ("missing/", "missing/"),
    ],
)
def test_a_broken_link_fails_the_build(link, told, tmp_path):
    # What follows a tag of YAML belongs to plugins, which take no part here.
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[a link]({link})\n")
    (tmp_path / "docs" / "here.md").write_text("# Here\n")
    config = {"site_name": "links", "validation": settings["validation"], "plugins": []}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode == 0) == (not told)
    assert told in run.stderr


def test_ci_runs_the_tests_that_build_the_site_and_ends_at_a_fault():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"""^tests=.* -m 'not nightly'"$""", script, re.MULTILINE)
    assert "nightly" not in (ROOT / "tests" / "test_site.py").read_text()
    assert script.startswith("#!/usr/bin/env bash")
    assert re.search(r"^set -euo pipefail$", script, re.MULTILINE)

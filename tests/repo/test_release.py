"""A release has one version, and its wheel has the package alone."""

import re
import subprocess
import sys
import zipfile

from commands import ROOT

import multigpu


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {multigpu.__version__}\n" in citation
    date = re.search(r'^date-released: "([\d-]+)"$', citation, re.M)[1]
    assert f"\n## {multigpu.__version__}, {date}\n" in changes


def test_a_wheel_has_each_file_of_the_package_and_no_other(tmp_path):
    subprocess.run(
        ["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", "clone"],
        cwd=tmp_path,
        check=True,
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, "--wheel-dir", tmp_path, tmp_path / "clone"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "multigpu"], cwd=tmp_path / "clone", capture_output=True, text=True
    )
    files = {name for name in listed.stdout.split() if not name.endswith(".md")}
    assert names == files

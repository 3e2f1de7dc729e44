"""Each mutation of `make test-mutations` breaks text that is still in the code."""

import tomllib

import pytest
from commands import ROOT

MUTATIONS = tomllib.loads((ROOT / "tests/mutations/mutations.toml").read_text())["mutation"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["name"])
def test_a_mutation_follows_the_code(mutation):
    source = (ROOT / mutation["file"]).read_text()
    assert source.count(mutation["old"]) == 1
    assert mutation["new"] != mutation["old"]
    for name in mutation["tests"]:
        assert (ROOT / name.partition("::")[0]).exists()

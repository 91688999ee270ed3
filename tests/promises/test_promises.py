"""The package keeps what it promised; CONTRIBUTING.md says how a promise moves or goes."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lists
import pytest
import refusals
import saved

#: Numbers of entries at the first commit. A promise that moves or goes stays in its list, so none falls.
AT_LEAST = {"names": 375, "signatures": 1819, "operations": 3, "options": 66, "states": 409, "files": 190}
AT_LEAST["refusals"] = 2769
NEW = "run `python tests/promises/write.py`"


def entries(name):
    committed = lists.read(name)
    return sum(map(len, committed.values())) if name in ("names", "options", "states", "files") else len(committed)


@pytest.mark.parametrize("name", AT_LEAST)
def test_no_list_has_shrunk(name):
    assert entries(name) >= AT_LEAST[name], "put the entry back, and say in moved.json or gone.json what became of it"


def test_promises_go_by_a_rule_and_move_to_what_is_there():
    assert all(re.match(r"rule [1-9]\b", rule) for rule in lists.read("gone").values())
    for path in lists.read("moved").values():
        assert lists.value_at(path) is not None


def test_no_list_depends_on_a_private_module():
    for file in lists.HERE.glob("*.json"):
        assert not re.search(r"implicit_attention(\.\w+)*\._[a-z]", file.read_text()), file.name


def test_every_public_name_is_in_the_list_and_every_listed_name_is_there():
    committed = lists.read("names")
    for module, names in lists.names().items():
        assert set(names) <= set(committed.get(module, ())), NEW
    for path in (f"{module}.{name}" for module, names in committed.items() for name in names):
        assert lists.is_gone(path) or ".testing." in path or lists.value_at(lists.now_at(path)).__doc__, path


def test_every_signature_takes_what_it_took():
    committed, values = lists.read("signatures"), dict(lists.listed())
    assert lists.signatures().keys() <= committed.keys(), NEW
    broken = []
    for path, old in committed.items():
        owner, _, name = path.rpartition(".")
        if lists.is_gone(path):
            continue
        new = lists.parameters(values[path]) if path in values else lists.member(values[owner], name)
        if not (old == new if isinstance(old, str) or not isinstance(new, list) else lists.keeps(path, old, new)):
            broken.append(f"{path}: {old} is {new}")
    assert not broken


def test_torch_knows_the_operations():
    assert {k: v for k, v in lists.read("operations").items() if not lists.is_gone(k)} == lists.operations()


@pytest.mark.parametrize(("name", "today"), [("options", lists.options), ("files", saved.files)])
def test_options_of_commands_and_keys_of_files_are_there(name, today):
    found = today()
    for path, wanted in lists.read(name).items():
        lost = [each for each in wanted if not lists.is_gone(f"{path} {each}") and each not in found.get(path, ())]
        assert not lost, path


def test_saved_states_still_fit():
    for text, old in lists.read("states").items():
        assert lists.is_gone(text) or saved.state(text) == old, text


# Refusals.

ROWS = lists.read("refusals")


def gone(row):
    texts = (
        row["door"],
        f"{row['door']}: {row['message']}",
        *re.findall(r"implicit_attention[\w.]*", row.get("call", "")),
    )
    return any(map(lists.is_gone, texts))


@pytest.mark.parametrize("door", sorted({row["door"] for row in ROWS}))
def test_a_door_refuses_what_it_refused_in_the_same_words(door):
    other = []
    for row in ROWS:
        if row["door"] == door and "call" in row and not gone(row):
            found = refusals.refused(row)
            if found != (row["kind"], row["message"]):
                other.append({"call": row["call"], "was": [row["kind"], row["message"]], "is": found})
    assert not other, json.dumps(other, indent=1)


def test_what_no_expression_can_ask_has_a_test():
    contracts = "".join(file.read_text() for file in (lists.SOURCE / "testing").glob("*.py"))
    read = functools.cache(lambda file: (lists.ROOT / file).read_text() + contracts)
    for row in ROWS:
        if "test" in row and not gone(row):
            file, *_, name = lists.now_at(row["test"]).split("::")
            assert f"def {name}(" in read(file), row


def test_every_public_name_refuses_something_or_is_known_to_refuse_nothing():
    doors = {path for row in ROWS for path in (row["door"], row["door"].rpartition(".")[0])}
    silent = lists.read("silent")
    for path, value in lists.listed():
        known = path in silent or refusals.reason(value) or ".testing." in path
        assert path in doors or known, f"{path}: record a refusal, or say in silent.json why there is none"


@pytest.mark.nightly
def test_refusals_are_recorded(tmp_path):
    file, root = tmp_path / "records.jsonl", Path(__file__).parents[2]
    named = {"REFUSALS": str(file), "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}"}
    asked = ["-n", "0", "-p", "recorder", "tests/test_options.py", "-k", "keep_their_checks"]
    done = subprocess.run([sys.executable, "-m", "pytest", *asked], cwd=root, env=os.environ | named, text=True)
    assert done.returncode == 0
    rows = map(json.loads, file.read_text().splitlines())
    assert "`history` must be >= 1, got 0" in {row["message"] for row in rows}

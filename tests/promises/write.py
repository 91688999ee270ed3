"""`python tests/promises/write.py`: adds to the lists beside this file what the package promises beyond them."""

import lists

if __name__ == "__main__":
    committed = lists.read("names") if (lists.HERE / "names.json").exists() else {}
    for module, names in lists.names().items():
        committed[module] = sorted({*committed.get(module, ()), *names})
    lists.write("names", committed)

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from implicit_attention.cli import errors, main


def invoke(*arguments):
    return CliRunner().invoke(main.app, ["compare", *arguments])


def bad_files(folder):
    x = np.zeros((4, 6))
    np.save(folder / "cube.npy", x.reshape(4, 2, 3))
    np.save(folder / "complex.npy", x + 1j)
    np.save(folder / "object.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    np.savez(folder / "two.npz", first=x, second=x)
    torch.save(torch.nn.Linear(2, 2), folder / "code.pt")
    torch.save([1, 2], folder / "list.pt")
    (folder / "damaged.npz").write_bytes(b"PK\x03\x04 not a zip")
    (folder / "empty.npy").write_bytes(b"")
    np.save(folder / "short.npy", x)
    (folder / "table.csv").write_text("1,2")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--beta", "0"], ["`--beta` must be > 0", "got 0"]),
        (["--beta", "nan"], ["`--beta` must be > 0", "got nan"]),
        (["--anchor", "1.5"], ["`--anchor` must be in [0, 1]", "got 1.5"]),
        (["--patterns", "0"], ["`--patterns` must be >= 1", "got 0"]),
        (["--patterns", "1798"], ["`--patterns` must be <= 1797", "got 1798"]),
        (["--device", "abacus"], ["`--device` must name a device", "'abacus'"]),
        (["--device", "meta"], ["`--device` must be cpu or cuda", "'meta'"]),
        (["--device", "cuda:99"], ["`--device` must be present", "'cuda:99'"]),
        (["--dtype", "int8"], ["`--dtype` must be one of float32", "'int8'"]),
        (["--seed", "-1"], ["`--seed` must be in", "got -1"]),
        (["--out", "short.npy"], ["`--out` must be a writable folder", "short.npy"]),
        (["--data", "nowhere.npy"], ["`--data` nowhere.npy must be an existing file"]),
        (["--data", "table.csv"], ["must end in .npy, .npz or .pt", "'.csv'"]),
        (["--data", "cube.npy"], ["must have shape (count, D)", "(4, 2, 3)"]),
        (["--data", "complex.npy"], ["must hold real numbers", "complex128"]),
        (["--data", "object.npy"], ["must hold one plain array", "running its code"]),
        (["--data", "two.npz"], ["exactly one array", "first, second"]),
        (["--data", "code.pt"], ["must hold one plain array", "running its code"]),
        (["--data", "list.pt"], ["must hold a tensor", "list"]),
        (["--data", "damaged.npz"], ["must hold one plain array", "damaged"]),
        (["--data", "empty.npy"], ["must hold one plain array", "damaged"]),
        (["--data", "short.npy"], ["`--patterns` must be <= 4, the rows of `--data` short.npy", "got 200"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, monkeypatch, arguments, expected):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: `--")
    assert "; " in result.stderr
    for part in expected:
        assert part in result.stderr


@pytest.mark.parametrize("absent", ["sklearn", "matplotlib"])
def test_a_missing_extra_is_named_with_the_install_line(monkeypatch, absent):
    find = errors.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == absent else find(name, *a))
    result = invoke("--quick")
    assert result.exit_code == 2
    assert absent in result.stderr
    assert 'in the checkout: pip install -e ".[cli]"' in result.stderr


def test_without_typer_the_entry_point_prints_the_install_line(monkeypatch, capsys):
    find = errors.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "typer" else find(name, *a))
    with pytest.raises(SystemExit, match="2"):
        main._app()()
    assert 'in the checkout: pip install -e ".[cli]"' in capsys.readouterr().err

import io
import sys
import zipfile

import numpy as np
import pytest
import torch
from commands import done, invoke, refused, script


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
    np.save(folder / "none.npy", x[:0])
    (folder / "table.csv").write_text("1,2")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--beta", "0"], ["`--beta` must be > 0", "got 0"]),
        (["--beta", "nan"], ["`--beta` must be > 0", "got nan"]),
        (["--anchor", "1.5"], ["`--anchor` must be in [0, 1]", "got 1.5"]),
        (["--patterns", "1798"], ["`--patterns` must be <= 1797", "got 1798"]),
        (["--device", "abacus"], ["`--device` must name a device", "'abacus'"]),
        (["--device", "meta"], ["`--device` must be cpu or cuda", "'meta'"]),
        (["--device", "cuda:99"], ["`--device` must be present", "'cuda:99'"]),
        (["--out", "short.npy"], ["`--out` must be a writable folder", "short.npy"]),
        (["--data", "nowhere.npy"], ["`--data` nowhere.npy must be an existing file"]),
        (["--data", "table.csv"], ["must end in .npy or .npz or .pt", "'.csv'"]),
        (["--data", "cube.npy"], ["must have shape (count, D)", "(4, 2, 3)"]),
        (["--data", "complex.npy"], ["must hold real numbers", "complex128"]),
        (["--data", "object.npy"], ["must hold plain arrays", "running its code"]),
        (["--data", "two.npz"], ["exactly one array", "first, second"]),
        (["--data", "code.pt"], ["must hold plain arrays", "running its code"]),
        (["--data", "list.pt"], ["must hold a tensor", "list"]),
        (["--data", "damaged.npz"], ["must hold plain arrays", "damaged"]),
        (["--data", "empty.npy"], ["must hold plain arrays", "damaged"]),
        (
            ["--data", "short.npy", "--patterns", "5"],
            ["`--patterns` must be <= 4, the rows of `--data` short.npy", "got 5"],
        ),
        (["--data", "none.npy"], ["`--patterns` must be <= 0, the rows of `--data` none.npy"]),
        (["--beta", "warm"], ["`--beta` must be a number > 0 or auto, got 'warm'"]),
        (["--beta", "auto", "--potential", "softmax1"], ["`--beta` must be a number for softmax1, got auto"]),
        (["--beta", "auto", "--suite", "retrieval"], ["`--beta` must be a number for --suite retrieval, got auto"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tmp_path, monkeypatch, arguments, expected):
    bad_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    refused("compare", *arguments, parts=expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compare", "--patterns", "0"], ["'--patterns'", "greater than or equal to 1"]),
        (["compare", "--dtype", "int8"], ["'--dtype'", "'int8' is not one of 'float32', 'float64'"]),
        (["compare", "--seed", "-1"], ["'--seed'", "greater than or equal to 0"]),
        (["magnetize", "--seed", str(2**63 - 1)], ["'--seed'", "less than or equal to"]),
        (["magnetize", "--dtype", "float16"], ["'--dtype'", "'float16' is not one of 'float64', 'float32'"]),
        (["compare", "--patterns", "many"], ["'--patterns'", "it must be a valid integer"]),
        (["magnetize", "--measure", "both"], ["'--measure'", "'both' is not one of 'uniform', 'counting'"]),
    ],
)
def test_values_outside_of_choices_and_ranges_are_refused_by_the_parser(arguments, expected):
    result = invoke(*arguments, COLUMNS=200)
    assert result.exit_code == 2
    assert result.stdout == ""
    for part in expected:
        assert part in result.stderr
    assert "Value error" not in result.stderr
    assert "Input should" not in result.stderr


def test_an_interrupted_command_removes_the_folders_it_made_and_says_what_is_kept(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("implicit_attention.cli.magnetize.Magnetize.run", interrupted)
    new, old = tmp_path / "new" / "folder", tmp_path / "old"
    old.mkdir()
    (old / "notes.txt").touch()
    for out, words in ((new, "nothing was written"), (old, f"{old} holds notes.txt")):
        result = invoke("magnetize", "--out", out)
        assert result.exit_code == 130
        assert result.stderr.splitlines()[-1] == f"interrupted: {words}"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (old / "notes.txt").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_work():
    refused("compare", "--out", "/proc/self/fd", parts="`--out` must be a writable folder, got '/proc/self/fd'")


@pytest.mark.parametrize(
    ("command", "option", "meaning"),
    [
        ("compare", "--anchor", "Weight of the query"),
        ("compare", "--dtype", "float32|float64|bfloat16|float16"),
        ("magnetize", "--measure", "uniform|counting"),
        ("magnetize", "[FILE]", "An .npz file with the arrays J"),
    ],
)
def test_help_names_every_option_with_its_meaning(command, option, meaning):
    text = done(command, "--help", COLUMNS=200).stdout
    (line,) = (line for line in text.splitlines() if option in line and "Usage" not in line)
    assert meaning in line


@pytest.mark.parametrize("absent", ["sklearn", "matplotlib"])
def test_a_missing_extra_is_named_with_the_install_line(monkeypatch, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    refused("compare", "--quick", parts=[absent, 'in the checkout: pip install -e ".[cli]"'])


def test_without_typer_the_entry_point_prints_the_install_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "implicit_attention.cli.main")
    with pytest.raises(SystemExit, match="2"):
        script()()
    assert 'in the checkout: pip install -e ".[cli]"' in capsys.readouterr().err


def header(shape):
    """An .npy file of 128 bytes that promises an array of this shape."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content in members.items():
            made.writestr(name, content)


def bomb(path, *names):
    """A few bytes that expand, by what the archive says of them, to more than is read."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name in names:
            made.writestr(f"{name}.npy", header((2**19, 2**10)))
            made.getinfo(f"{name}.npy").file_size = 2**32 - 1


def hostile(folder):
    (folder / "promise.npy").write_bytes(header((10**6, 10**6)))
    (folder / "overflow.npy").write_bytes(header((2**62, 2**62)))
    archive(folder / "promise.npz", {"x.npy": header((10**6, 10**6))})
    archive(folder / "deep.npz", {"x.npy": b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 118})
    torch.save(torch.zeros(1).expand(10**6, 10**6), folder / "expanded.pt")
    bomb(folder / "bomb.npz", "x")
    np.savez(folder / "names.npz", **{"\x1b[31mred\x07": np.zeros(2), "two\nlines": np.zeros(2)})
    torch.save({"\x1b]0;title\x07": torch.zeros(2), "b": torch.zeros(2)}, folder / "names.pt")
    np.savez(folder / "many.npz", **{f"array{i}": np.zeros(1) for i in range(1000)})
    np.save(folder / "\x1b[31mred.npy", np.zeros((2, 2, 2)))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("promise.npy", "damaged"),
        ("overflow.npy", "damaged"),
        ("promise.npz", "damaged"),
        ("deep.npz", "damaged"),
        ("expanded.pt", "must hold at most 2.05e+03 MiB"),
        ("bomb.npz", "must hold at most 2.05e+03 MiB"),
        ("names.npz", r"\x1b[31mred\x07, two\nlines"),
        ("names.pt", r"\x1b]0;title\x07"),
        ("many.npz", " ... "),
        ("\x1b[31mred.npy", r"`--data` \x1b[31mred.npy must have shape"),
    ],
)
def test_a_hostile_file_is_one_line_and_takes_no_memory(tmp_path, file, expected):
    hostile(tmp_path)
    refused("compare", "--data", tmp_path / file, parts=expected)


@pytest.mark.parametrize(
    ("kind", "expected"), [("promise", "damaged"), ("bomb", "at most 2.05e+03 MiB"), ("names", r"\x1b[31mred")]
)
def test_a_hostile_file_of_spins_is_one_line(tmp_path, kind, expected):
    if kind == "promise":
        archive(tmp_path / "spins.npz", {f"{name}.npy": header((10**6, 10**6)) for name in ("J", "h", "beta")})
    elif kind == "bomb":
        bomb(tmp_path / "spins.npz", "J", "h", "beta")
    else:
        np.savez(tmp_path / "spins.npz", **{"\x1b[31mred": np.zeros(2)})
    refused("magnetize", tmp_path / "spins.npz", parts=expected)

"""The command line, its error messages and its exit statuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

import flash_kda
from flash_kda import cli, cli_errors
from flash_kda.demo import agree
from flash_kda.demo.matrices import chunk_matrices

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.build_app(), list(args), env={"COLUMNS": "200", "NO_COLOR": "1"})


def refused(*args: str) -> str:
    """The message of a call that must leave with 2 and without a traceback."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.stderr.split())


@pytest.fixture
def call() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 50, 2, 8) for _ in range(2))
    v, g, beta = torch.randn(1, 50, 4, 6), torch.randn(1, 50, 4, 8) - 2, torch.randn(1, 50, 4)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": torch.randn(4), "dt_bias": torch.randn(32)}


def save(tmp_path: Path, what: object) -> str:
    torch.save(what, tmp_path / "call.pt")
    return str(tmp_path / "call.pt")


def test_doctor_tells_what_runs_and_why_not() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0
    for text in (
        torch.__version__,
        flash_kda.__version__,
        "GPU",
        "Triton",
        *cli.typical_problems(),
        *flash_kda.BACKENDS,
    ):
        assert text in result.output
    for problem in cli.typical_problems().values():
        for why in flash_kda.explain(problem).reasons.values():
            # A table may break a long reason; its first words stay together.
            assert why[:12] in result.output


def test_doctor_names_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count, total_memory = "Some GPU", 9, 0, 132, 141 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    facts = dict(cli.machine_facts())
    assert facts["GPU 0"] == "Some GPU, compute capability 9.0, 132 multiprocessors, 141 GiB"


@pytest.mark.parametrize("gate", ["lower-bound", "softplus", "log"])
def test_inspect_draws_random_values(tmp_path: Path, gate: str) -> None:
    out = tmp_path / "a.png"
    result = invoke("inspect", "--gate", gate, "--seed", "3", "--chunk", "3", "--head", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(PNG)
    assert f"head 1, tokens 96 to 127, {gate} gate" in result.output
    assert "seed 3" in result.output
    first = out.read_bytes()
    assert invoke("inspect", "--gate", gate, "--seed", "4", "--chunk", "3", "--out", str(out)).exit_code == 0
    assert out.read_bytes() != first


def test_inspect_draws_saved_values(tmp_path: Path, call: dict[str, torch.Tensor]) -> None:
    """The last, shorter chunk of a grouped head; the sizes printed are those of that head's own L."""
    out = tmp_path / "a.png"
    result = invoke(
        "inspect", save(tmp_path, call), "--lower-bound", "-2", "--head", "3", "--chunk", "3",
        "--chunk-size", "16", "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(PNG)
    assert "call.pt: head 3, tokens 48 to 49" in result.output
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (call["q"], call["k"]))
    g = -2 * torch.sigmoid(call["A_log"][3].exp() * (call["g"][0, 49, 3] + call["dt_bias"].view(4, 8)[3]))
    entry = float(torch.sigmoid(call["beta"][0, 49, 3]) * (k[0, 49, 1] * k[0, 48, 1] * g.exp()).sum())
    assert f"{abs(entry):.3g}" in result.output
    gate = flash_kda.LowerBoundGate(call["A_log"], call["dt_bias"], -2.0)
    rows = [call[name] for name in ("q", "k", "v", "g", "beta")]
    m = chunk_matrices(*rows, gate=gate, head=3, chunk=3, chunk_size=16)
    assert float(m.L[1, 0]) == pytest.approx(entry, rel=1e-5)
    mqk = 8**-0.5 * float((q[0, 49, 1] * k[0, 48, 1] * g.exp()).sum())
    assert float(m.Mqk[1, 0]) == pytest.approx(mqk, rel=1e-5)
    assert m.T.tolist() == [[1.0, 0.0], [pytest.approx(-entry, rel=1e-5), 1.0]]


def test_inspect_names_what_is_wrong(tmp_path: Path, call: dict[str, torch.Tensor]) -> None:
    assert "nowhere.pt: no such file" in refused("inspect", str(tmp_path / "nowhere.pt"))
    (tmp_path / "text.pt").write_text("not tensors")
    assert "not a file of tensors that torch.save wrote" in refused("inspect", str(tmp_path / "text.pt"))
    assert "got a list, expected a dictionary" in refused("inspect", save(tmp_path, [1, 2]))
    part = {name: x for name, x in call.items() if name not in ("v", "beta")}
    assert "no v, beta in it, only A_log, dt_bias, g, k, q" in refused("inspect", save(tmp_path, part))
    assert "k is a int, expected a tensor" in refused("inspect", save(tmp_path, {**call, "k": 3}))
    path = save(tmp_path, call)
    assert "lower_bound: got -9.0, expected a value in [-5.0, 0)" in refused("inspect", path, "--lower-bound", "-9")
    assert "--lower-bound goes with --gate lower-bound" in refused(
        "inspect", path, "--gate", "softplus", "--lower-bound", "-1"
    )
    assert "g has values above 0" in refused("inspect", path, "--gate", "log")
    assert "head: got 4, expected 0 to 3" in refused("inspect", path, "--head", "4")
    assert "chunk: got 9, expected 0 to 1" in refused("inspect", path, "--chunk", "9")
    assert "chunk_size: got 0, expected 1 to 64" in refused("inspect", path, "--chunk-size", "0")
    assert "beta: got shape (1, 50, 2)" in refused("inspect", save(tmp_path, {**call, "beta": call["beta"][..., :2]}))
    assert "No such file or directory" in refused("inspect", "--out", str(tmp_path / "no" / "folder.png"))
    refused("inspect", "--gate", "none-such")
    refused("demo", "--steps", "0")


def test_demo_on_the_standard_library(tmp_path: Path) -> None:
    result = invoke("demo", "--steps", "2", "--out", str(tmp_path / "report"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "report" / "index.html").stat().st_size > 100_000
    for text in ("byte bigram", "gzip -9", "25 of 25 comparisons"):
        assert text in result.output
    out = str(tmp_path / "layer.png")
    saved = str(tmp_path / "report" / "activations.pt")
    assert invoke("inspect", saved, "--head", "2", "--chunk", "5", "--out", out).exit_code == 0


def test_demo_leaves_with_one_if_something_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_kda.demo import data, run

    root = tmp_path / "library"
    root.mkdir()
    for f in data.library_files()[:6]:
        (root / f.name).write_bytes(f.read_bytes()[:3000])
    quick = run.DemoConfig(check_bytes=70, new_bytes=2, root=root)
    monkeypatch.setattr(run, "DemoConfig", lambda steps, seed, out: replace(quick, steps=steps, seed=seed, out=out))
    assert invoke("demo", "--steps", "1", "--out", str(tmp_path / "good")).exit_code == 0
    monkeypatch.setattr(agree, "LOGITS_LIMIT", 0.0)
    result = invoke("demo", "--steps", "1", "--out", str(tmp_path / "bad"))
    assert result.exit_code == 1
    assert "DIFFERS" in result.output
    (tmp_path / "file").write_text("in the way")
    assert "--out" in refused("demo", "--steps", "1", "--out", str(tmp_path / "file"))
    for f in root.iterdir():
        f.unlink()
    assert "expected 2 or more" in refused("demo", "--steps", "1", "--out", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("package", "extra", "args"),
    [
        ("matplotlib", "plot", ["demo"]),
        ("jinja2", "plot", ["demo"]),
        ("matplotlib", "plot", ["inspect"]),
        ("rich", "cli", ["doctor"]),
    ],
)
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str, extra: str, args: list[str]) -> None:
    app = cli.build_app()
    for name in list(sys.modules):
        if name.startswith("flash_kda.demo") or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "rich":
        # typer draws with rich too, so the command's function is called without it.
        with pytest.raises(cli_errors.UserError, match=r"needs rich: pip install 'flash_kda\[cli\]'"):
            cli.run_doctor()
        return
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert f"this command needs {package}: pip install 'flash_kda[{extra}]'" in result.stderr


def test_main_without_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "needs typer: pip install 'flash_kda[cli]'" in capsys.readouterr().err


def test_main_runs_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["flash-kda", "doctor"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert "Which backend runs" in capsys.readouterr().out


def test_a_fault_of_our_own_is_not_hidden() -> None:
    with pytest.raises(ImportError, match="broken"):
        raise cli_errors.missing(ImportError("broken", name="flash_kda.api"))


def test_imports_are_lazy() -> None:
    code = """
import sys
import flash_kda
heavy = [m for m in sys.modules if m.startswith(("flash_kda.nn", "flash_kda.demo", "flash_kda.cli"))]
assert not heavy, heavy
before = set(sys.modules)
import flash_kda.cli
new = {m.partition(".")[0] for m in set(sys.modules) - before}
assert not new & {"typer", "rich", "matplotlib", "jinja2"}, new
assert not [m for m in sys.modules if m.startswith(("flash_kda.nn", "flash_kda.demo"))]
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""The notebook: it runs as a plain script, both files hold the same cells, and its pictures are there."""

from __future__ import annotations

import base64
import runpy
from pathlib import Path

import pytest

# The environments of the newer JAX releases have none of these.
jupytext = pytest.importorskip("jupytext")
matplotlib = pytest.importorskip("matplotlib")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPT = NOTEBOOKS / "first_steps.py"
NOTEBOOK = NOTEBOOKS / "first_steps.ipynb"

REFRESH = (
    "run `jupytext --to ipynb --update notebooks/first_steps.py` and `jupyter execute --inplace "
    "notebooks/first_steps.ipynb`"
)


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def pictures(notebook) -> list[bytes]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [base64.b64decode(o["data"]["image/png"]) for o in outputs if "image/png" in o.get("data", {})]


def test_the_script_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib import pyplot

    monkeypatch.setenv("MPLBACKEND", "Agg")
    pyplot.switch_backend("Agg")
    try:
        with matplotlib.rc_context():
            # Its own assertions compare states, logits and slots.
            runpy.run_path(str(SCRIPT), run_name="__main__")
            figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
            assert len(figures) == 4
            for figure in figures:
                figure.canvas.draw()
    finally:
        pyplot.close("all")
    assert "the current slot was untouched" in capsys.readouterr().out


def test_both_files_hold_the_same_cells(notebook) -> None:
    script = jupytext.read(SCRIPT)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells], REFRESH
    assert notebook.metadata.jupytext.formats == script.metadata.jupytext.formats == "ipynb,py:percent"
    assert notebook.metadata.kernelspec == script.metadata.kernelspec


def test_outputs_are_there_without_errors_and_small(notebook) -> None:
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < 400_000
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}, REFRESH
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}, REFRESH
    found = pictures(notebook)
    assert len(found) == 4, REFRESH
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5_000 for picture in found)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), REFRESH


@pytest.mark.slow
# The kernel's client warns about its own sockets and event loop, which is not ours to mend.
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_executes(notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend makes the pictures
    fresh = nbformat.from_dict(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(NOTEBOOKS)}}
    nbclient.NotebookClient(fresh, timeout=300, kernel_name="python3", resources=resources).execute()
    assert len(pictures(fresh)) == 4
